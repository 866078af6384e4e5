"""Predicts step times of published training recipes, and holds them against the seconds that others measured.

    report = compare_rows(json.loads(text)['rows'])
    report['rows'][0]['ratio'], report['dense']['median_error']

A row becomes an experiment of ours (`experiment_of`), from the architecture and the recipe in recipes.toml: what is
kept or offloaded, and how weights are split. Its prediction is what `--mode plan --no_compile` says of that experiment.
Words of a recipe: `q k v context out wi wo` are results that are kept (`save`) or copied to the host (`offload`),
`input` is a layer's; everything else is computed again. `save = 'all'` computes nothing again.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
from pathlib import Path
import statistics
import tomllib
from typing import Any, NamedTuple

import fiddle as fdl
import flax.linen as nn
import jax

from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment
from spmd_tasks.inputs import SyntheticText
from spmd_tasks.layers import (
  BlockGroup,
  FeedForward,
  GatedFeedForward,
  LanguageModel,
  Linear,
  StackSequence,
  TokenEmbedding,
  TransformerStack,
)
from spmd_tasks.layers.attention import LatentAttention
from spmd_tasks.layers.base import WithSublayers, run_layer
from spmd_tasks.layers.moe import CapacityGather, Dropless
from spmd_tasks.planning import make_plan
from spmd_tasks.planning.chips import CHIPS, Chip, read_table
from spmd_tasks.planning.targets import parse_target, target_of
from spmd_tasks.recipes import DenseLanguageModel, MoeLanguageModel
from spmd_tasks.sharding import (
  DEFAULT_AXIS_RULES,
  DataExpertModelMesh,
  constrain,
  context_axis_rules,
  residual_axis_rules,
)

_GUESSES: tuple[dict[str, Any], ...] = (  # where no recipe is published, the fastest of these that fits
  *({'save': words} for words in ('q k v out context wi wo', 'q k v out context', 'q k v')),
  *({'offload': words} for words in ('input q k v', 'input', '')),
)
_PRECISIONS = ('bf16', 'int8', 'fp8')  # what the name of a known one begins with
_NEEDED = {'name': str, 'chip': str, 'num_chips': int, 'model': str, 'global_batch': float, 'seq_len': int}


class Layer(NamedTuple):
  """A layer of a model: the keys that a query sees (None: all), the hidden size, and whether it has experts."""

  window: int | None
  hidden: int
  has_experts: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """An architecture, from its published config.

  Attributes:
    layers, dims, heads, kv_heads, head_dim, hidden, vocab: sizes; `hidden` is of one expert, if there are any.
    tied: whether the logits use the embedding's table.
    gated: whether feed-forward networks have a gate.
    qk_norm: whether queries and keys are normalized.
    post_norm: whether the sublayers' outputs are normalized too.
    window: how many keys a query of a local layer sees.
    global_every: each so many-th layer sees all keys.
    global_heads: key/value heads and head dim of layers that see all keys, if they differ.
    experts, selected: experts of a layer, and of a token.
    shared: hidden size of the expert that all tokens pass.
    experts_every: each so many-th layer has experts.
    dense_layers: the first layers, which have none.
    dense_hidden: hidden size of the layers without experts.
    wide_layers: the last layers, whose hidden size is twice `hidden`.
    layer_dims: size of each layer's own embedding of the tokens (Gemma 3n).
    query_rank, kv_rank, rope_dim: of latent attention; its queries and keys have `rope_dim` more than `head_dim`.
  """

  layers: int
  dims: int
  heads: int
  hidden: int
  vocab: int
  kv_heads: int | None = None
  head_dim: int = 128
  tied: bool = False
  gated: bool = True
  qk_norm: bool = False
  post_norm: bool = False
  window: int = 0
  global_every: int = 1
  global_heads: Sequence[int] = ()
  experts: int = 0
  selected: int = 1
  shared: int = 0
  experts_every: int = 1
  dense_layers: int = 0
  dense_hidden: int = 0
  wide_layers: int = 0
  layer_dims: int = 0
  query_rank: int = 0
  kv_rank: int = 0
  rope_dim: int = 0

  def layer(self, number: int) -> Layer:
    """Returns what distinguishes a layer from the others."""
    has_experts = bool(self.experts) and number >= self.dense_layers and (number + 1) % self.experts_every == 0
    hidden = self.dense_hidden if self.experts and not has_experts else self.hidden
    if number >= self.layers - self.wide_layers:
      hidden *= 2
    is_global = (number + 1) % self.global_every == 0
    return Layer(window=None if is_global else self.window, hidden=hidden, has_experts=has_experts)

  def heads_of(self, layer: Layer) -> tuple[int | None, int]:
    """Returns the number of key/value heads and the head dim of a layer."""
    if self.global_heads and layer.window is None:
      kv_heads, head_dim = self.global_heads
      return kv_heads, head_dim
    return self.kv_heads, self.head_dim

  @property
  def num_params(self) -> int:
    """The number of weights without norms and biases, as the experiment has them."""
    total = (2 - self.tied) * self.vocab * self.dims
    for layer in map(self.layer, range(self.layers)):
      kv_heads, head_dim = self.heads_of(layer)
      width = self.heads * head_dim
      if self.kv_rank:
        total += self.query_rank * (self.dims + width + self.heads * self.rope_dim) + self.dims * width
        total += self.dims * (self.kv_rank + self.rope_dim) + 2 * self.kv_rank * width
      else:
        total += 2 * self.dims * (width + (kv_heads or self.heads) * head_dim)
      hidden = layer.hidden * self.experts + self.shared if layer.has_experts else layer.hidden
      total += (2 + self.gated) * self.dims * hidden + self.layer_dims * (self.vocab + 3 * self.dims)
    return total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
  """How a model is trained; see the module's docstring."""

  save: str = ''
  offload: str = ''
  capacity_factor: float = 0.0  # of experts; 0: no row is dropped, and rows are grouped
  tensor: int = 1
  expert: int = 1
  context: int = 1
  replicas: int = 1
  is_split_over_slices: bool = False  # the state; otherwise each slice has it all
  vocab_tiles: int = 1
  gradient_keys: int = 0  # of one attention kernel for all gradients; 0: two kernels
  seq_len: int | None = None  # where a row of results states another than the script
  precision: str | None = None


@functools.cache
def _published_recipes() -> dict[str, Any]:
  return tomllib.loads(Path(__file__).with_name('recipes.toml').read_text(encoding='utf-8'))


def find_model(name: str) -> Model | None:
  """Returns the architecture of a name of MaxText's; None if it is not known."""
  found = _published_recipes()
  entry = found['models'].get(found['aliases'].get(name, name))
  return entry and Model(**entry)


def find_recipe(name: str, chip: str, num_chips: int, seq_len: int, precision: str) -> Recipe | None:
  """Returns the published recipe of a model on a chip, if there is one."""
  found = _published_recipes()
  name, of_chip = found['aliases'].get(name, name), found.get(chip, {})
  keys = (f'{name}.{num_chips}chips', f'{name}.{seq_len}', f'{name}.{precision.split("_")[0]}', name)
  return next((Recipe(**of_chip[key]) for key in keys if key in of_chip), None)


_NAMES = {
  'input': 'layer_input',
  'q': 'query',
  'k': 'key',
  'v': 'value',
  'context': 'attention',
  'out': 'attention_output',
  'wi': 'pre_activations',
  'wo': 'ffn_output',
}


class _WithLayerEmbedding(WithSublayers, kw_only=True):
  """Runs a block and adds the layer's own embedding of the tokens behind a gate (Gemma 3n)."""

  block: nn.Module
  norm: nn.Module
  embedding: nn.Module

  @nn.compact
  def __call__(self, x, segment_ids=None, segment_pos=None, *, ids, train=False):
    x, aux = run_layer('block', self.block, x, segment_ids=segment_ids, segment_pos=segment_pos, train=train)

    def product(name: str, y: jax.Array, dims: int, *split_dims: str) -> jax.Array:
      return Linear(output_dims=dims, dtype=x.dtype, split_dims=split_dims, name=name)(y)

    dims = self.embedding.embed_dim
    own = self.embedding(ids) + self.norm.copy(name='own_norm')(product('projection', x, dims, 'embed', 'mlp'))
    gate = nn.gelu(product('gate', x, dims, 'embed', 'mlp'))
    y = self.norm.copy(name='out_norm')(product('out', gate * own, x.shape[-1], 'mlp', 'embed'))
    return constrain(x + y, ('batch', 'seq', 'act_embed')), aux


class _WithLayerEmbeddings(LanguageModel):
  """A language model whose layers read the tokens' ids."""

  @nn.nowrap
  def _context(self, batch, train):
    context, aux = super()._context(batch, train)
    return {**context, 'ids': batch['ids']}, aux


class _Published(MoeLanguageModel):
  """A published model and recipe as an experiment of ours; `rows` of a step are `seq_len` tokens long."""

  architecture: Any
  recipe: Any
  num_devices: int
  num_slices: int
  precision: str

  def layer_block(self, layer: Layer) -> fdl.Config:
    """Returns a transformer block of this kind."""
    model = self.architecture
    if layer.has_experts:
      block = self.block(self.ffn())
    else:
      kind = GatedFeedForward if model.gated else FeedForward
      block = self.block(fdl.Config(kind, hidden_dim=layer.hidden, activation='silu', dtype=self.dtype))
    if model.kv_rank:
      sizes = {'nope_head_dim': model.head_dim, 'rope_head_dim': model.rope_dim, 'value_head_dim': model.head_dim}
      ranks = {'query_rank': model.query_rank, 'kv_rank': model.kv_rank}
      block.attention = fdl.Config(LatentAttention, num_heads=model.heads, dtype=self.dtype, **ranks, **sizes)
    else:
      block.attention.num_kv_heads, block.attention.head_dim = model.heads_of(layer)
      block.attention.window, block.attention.qk_norm = layer.window, model.qk_norm
    block.attention.gradient_keys = min(self.recipe.gradient_keys, self.seq_len) or None
    block.post_norm = model.post_norm
    if not model.layer_dims:
      return block
    own = {'vocab_size': model.vocab, 'embed_dim': model.layer_dims, 'dtype': self.dtype}
    return fdl.Config(
      _WithLayerEmbedding, block=block, norm=fdl.copy_with(block.norm), embedding=fdl.Config(TokenEmbedding, **own)
    )

  def stack(self) -> fdl.Config:
    model = self.architecture
    layers = [model.layer(number) for number in range(model.layers)]
    period = math.lcm(model.global_every, model.experts_every)
    stacks = []
    while layers:
      group = layers[:period]
      count = next(i for i in range(1, len(layers) + 1) if layers[i * len(group) : (i + 1) * len(group)] != group)
      blocks = tuple(self.layer_block(layer) for layer in group)
      block = blocks[0] if len(blocks) == 1 else fdl.Config(BlockGroup, blocks=blocks)
      stacks.append(fdl.Config(TransformerStack, block=block, num_layers=count, remat_policy=self.remat_policy))
      layers = layers[count * len(group) :]
    return stacks[0] if len(stacks) == 1 else fdl.Config(StackSequence, stacks=tuple(stacks))

  def language_model(self) -> fdl.Config[LanguageModel]:
    model = super().language_model()
    if self.architecture.layer_dims:
      fdl.update_callable(model, _WithLayerEmbeddings)
    return model

  def embedding(self) -> fdl.Config[TokenEmbedding]:
    return fdl.copy_with(super().embedding(), tied=self.architecture.tied, scale_sqrt_depth=False)

  def computation(self) -> fdl.Config:
    if self.recipe.capacity_factor:
      return fdl.Config(CapacityGather, capacity_factor=self.recipe.capacity_factor, capacity_counts_choices=True)
    return fdl.Config(Dropless, dispatch='gather')

  def loss(self) -> fdl.Config:
    return super().loss() if self.architecture.experts else DenseLanguageModel.loss(self)

  def task(self) -> fdl.Config:
    return fdl.copy_with(super().task(), quantization=None if self.precision == 'bf16' else self.precision)

  def train_input(self) -> fdl.Config:
    sizes = {'batch_size': self.batch_size, 'seq_len': self.seq_len, 'vocab_size': self.vocab_size}
    return fdl.Config(SyntheticText, **sizes, seed=0)


def _remat_policy(recipe: Recipe) -> str:
  if recipe.save == 'all':
    return 'none'
  words = {'save': recipe.save, 'offload': recipe.offload}
  named = {how: ', '.join(_NAMES[word] for word in text.split()) for how, text in words.items() if text}
  return ' '.join(f'{how}({names})' for how, names in named.items()) or 'full'


def experiment_of(
  model: Model, recipe: Recipe, *, num_devices: int, num_slices: int, batch: int, seq_len: int, precision: str
) -> type[Experiment]:
  """Returns the experiment class of a published recipe, on a mesh of replica x data x expert x context x mdl."""
  others = recipe.replicas * recipe.expert * recipe.context * recipe.tensor
  data = num_devices // num_slices // others
  both = ('embed', ('data', 'expert')), *(rule for rule in DEFAULT_AXIS_RULES if rule[0] != 'embed')
  mesh = DataExpertModelMesh(num_devices=data * recipe.expert, num_expert_partitions=recipe.expert, base_rules=both)
  rules = mesh.axes().axis_rules
  rules = context_axis_rules(rules) if recipe.context > 1 else rules
  rules = residual_axis_rules(rules) if recipe.tensor > 1 else rules
  data_over_slices = recipe.is_split_over_slices
  dcn = (1, num_slices, 1, 1, 1) if data_over_slices else (num_slices, 1, 1, 1, 1)
  fields: dict[str, Any] = {
    'mesh_axis_names': ('replica', 'data', 'expert', 'context', 'mdl'),
    'ici_mesh_shape': (recipe.replicas, data, recipe.expert, recipe.context, recipe.tensor),
    'dcn_mesh_shape': dcn if num_slices > 1 else None,
    'axis_rules': rules,
    'vocab_size': model.vocab,
    'model_dims': model.dims,
    'num_layers': model.layers,
    'num_heads': model.heads,
    'num_kv_heads': model.kv_heads,
    'hidden_dims': model.hidden,
    'num_experts': model.experts,
    'num_selected_experts': model.selected,
    'shared_hidden_dims': model.shared or None,
    'num_dense_layers': sum(not model.layer(number).has_experts for number in range(model.layers)),
    'dtype': 'bfloat16',
    'seq_len': seq_len,
    'batch_size': batch,
    'remat_policy': _remat_policy(recipe),
    'num_logit_chunks': recipe.vocab_tiles,
    'num_train_steps': 1,
    'architecture': model,
    'recipe': recipe,
    'num_devices': num_devices,
    'num_slices': num_slices,
    'precision': precision,
  }
  return type('Published', (_Published,), {**fields, '__module__': __name__})


def predict_recipe(
  model: Model,
  recipe: Recipe,
  chip: Chip,
  *,
  num_chips: int,
  num_slices: int,
  batch: int,
  seq_len: int,
  precision: str = 'bf16',
) -> dict[str, Any]:
  """Predicts one training step: what `--mode plan --no_compile` says of the recipe as an experiment.

  Args:
    model, recipe: what is trained and how.
    chip: one with rates in rates.toml.
    num_chips: of all slices together.
    num_slices: over which only gradients are summed.
    batch, seq_len: rows of a step, and their tokens.
    precision: 'bf16', or that of the layers' products: 'int8', 'fp8', also 'fp8_full'.
  """
  num_devices = num_chips * chip.cores
  sizes: dict[str, Any] = {'num_devices': num_devices, 'num_slices': num_slices, 'batch': batch, 'seq_len': seq_len}
  experiment = experiment_of(model, recipe, precision=precision, **sizes)
  target = parse_target(target_of(chip, num_devices, num_slices) or f'{chip.name}:{num_devices}')
  planned = make_plan(resolve(experiment).build(), target, compiles=False)
  return {
    'predicted_s': planned['predicted_step_s'],
    'fits': planned['fits'],
    'memory_bytes': planned['peak_bytes'],
    'mfu': planned['predicted_mfu'],
    'seconds': {term['name']: term['seconds'] for term in planned['terms']},
    'share': planned['shares'],
  }


def compare_rows(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Predicts each row of a file of published results.

  Args:
    rows: with `name`, `chip`, `num_chips`, `num_slices`, `model`, `global_batch`, `seq_len`, `precision`, `step_s`, and
      `kept` if no rate was fitted to the row.

  Returns:
    rows: each with name, kept, predicted_s, measured_s, ratio, fits and what `predict_recipe` returns; predicted_s is
      None if the model or the chip is not known.
    dense, experts: num_rows, and `median_error` and `worst_error` of |ratio - 1|, with the row of the worst.

  Raises:
    UserError: a row lacks a figure.
  """
  planned = [_compare_row(row) for row in rows]
  errors = {kind: errors_of([row for row in planned if row['kind'] == kind]) for kind in ('dense', 'experts')}
  return {'rows': planned, **errors}


def _check_row(row: Any) -> None:
  if not isinstance(row, Mapping):
    raise UserError(f'a row is {row!r}: write an object with {", ".join(_NEEDED)}.')
  for key, kind in (_NEEDED | {'num_slices': int, 'precision': str, 'step_s': float}).items():
    value: Any = row.get(key)
    if value is None and key in _NEEDED:
      raise UserError(f'row {row.get("name", row)!r} has no {key!r}: give {", ".join(_NEEDED)}.')
    is_fit = bool(value) and type(value) is str if kind is str else type(value) in (int, kind) and 0 < value < 1e18
    if value is not None and not is_fit:
      wanted = {str: 'a text', int: 'a whole number above 0', float: 'a number above 0'}[kind]
      raise UserError(f'row {row["name"]!r} has {key}={value!r}: give {wanted}.')
  if row['num_chips'] % (row.get('num_slices') or 1):
    raise UserError(f'row {row["name"]!r} has num_slices={row["num_slices"]}, which must divide its num_chips.')


def _compare_row(row: Mapping[str, Any]) -> dict[str, Any]:
  _check_row(row)
  model, chip, measured = find_model(row['model']), CHIPS.get(row['chip']), row.get('step_s')
  answer = {'name': row['name'], 'chip': row['chip'], 'kept': bool(row.get('kept')), 'measured_s': measured}
  answer |= dict.fromkeys(('predicted_s', 'ratio', 'fits', 'kind'))
  precision, plans = (row.get('precision') or 'bf16').replace('bfloat16', 'bf16'), []
  has_rates = chip is not None and chip.name in read_table('rates.toml')
  if model is None or chip is None or not has_rates or not precision.startswith(_PRECISIONS):
    return answer
  found = find_recipe(row['model'], chip.name, row['num_chips'], row['seq_len'], precision)
  for recipe in [found] if found else [Recipe(**words) for words in _GUESSES]:
    settings: dict[str, Any] = {'seq_len': recipe.seq_len or row['seq_len'], 'precision': recipe.precision or precision}
    sizes: dict[str, Any] = {'num_chips': row['num_chips'], 'num_slices': row.get('num_slices') or 1}
    batch = max(1, round(row['global_batch'] * row['seq_len'] / settings['seq_len']))
    made = predict_recipe(model, recipe, chip, batch=batch, **sizes, **settings)
    plans.append(made | settings | {'recipe': dataclasses.asdict(recipe) | {'is_guess': not found}})
  best = min(plans, key=lambda made: (not made['fits'], made['predicted_s']))
  ratio = best['predicted_s'] / measured if measured else None
  measured_mfu = best['mfu'] * ratio if ratio else None
  return answer | best | {'ratio': ratio, 'measured_mfu': measured_mfu, 'kind': 'experts' if model.experts else 'dense'}


def errors_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Returns the median and the worst of the errors |ratio - 1| of planned rows, and the row of the worst."""
  errors = {row['name']: abs(row['ratio'] - 1) for row in rows if row['ratio'] is not None}
  if not errors:
    return {'num_rows': 0, 'median_error': None, 'worst_error': None, 'worst_row': None}
  worst = max(errors, key=errors.__getitem__)
  median = statistics.median(errors.values())
  return {'num_rows': len(errors), 'median_error': median, 'worst_error': errors[worst], 'worst_row': worst}
