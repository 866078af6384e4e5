"""Predicts step times of published training recipes, and holds them against the seconds that others measured.

    report = compare_rows(json.loads(text)['rows'])
    report['rows'][0]['ratio'], report['dense']['median_error']

A row becomes an experiment of ours (`experiment_of`), from the architecture and the recipe in recipes.toml: what is
kept or offloaded, and how weights are split. Its prediction is what `--mode plan --no_compile` says of that experiment.
Words of a recipe: `q k v context out wi wo` are results that are kept (`save`) or copied to the host (`offload`),
`input` is a layer's; everything else is computed again.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from pathlib import Path
import statistics
import tomllib
from typing import Any

import fiddle as fdl

from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment
from spmd_tasks.inputs import SyntheticText
from spmd_tasks.layers import (
  BlockGroup,
  FeedForward,
  GatedFeedForward,
  StackSequence,
  TokenEmbedding,
  TransformerBlock,
  TransformerStack,
)
from spmd_tasks.layers.attention import LatentAttention
from spmd_tasks.layers.moe import CapacityGather, Dropless
from spmd_tasks.planning import make_plan
from spmd_tasks.planning.chips import CHIPS, Chip, read_table
from spmd_tasks.planning.targets import parse_target, target_of
from spmd_tasks.recipes import DenseLanguageModel, MoeLanguageModel
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, DataExpertModelMesh, context_axis_rules, residual_axis_rules

_BF16, _F32 = 2, 4  # bytes
_ATTENTION = ('q', 'k', 'v', 'out')
_GUESSES: tuple[dict[str, Any], ...] = (  # where no recipe is published, the fastest of these that fits
  *({'save': words} for words in ('q k v out context wi wo', 'q k v out context', 'q k v')),
  *({'offload': words} for words in ('input q k v', 'input', '')),
)
_PRECISIONS = ('bf16', 'int8', 'fp8')  # what the name of a known one begins with
_NEEDED = {'name': str, 'chip': str, 'num_chips': int, 'model': str, 'global_batch': float, 'seq_len': int}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """An architecture. `hidden` is of one expert, if there are any; a share `local` of the layers sees `window` keys."""

  layers: int
  dims: int
  heads: int
  hidden: int
  vocab: int
  kv_heads: int | None = None
  head_dim: int = 128
  tied: bool = False
  gated: bool = True
  window: int = 0
  local: float = 0.0
  experts: int = 0
  selected: int = 1
  shared: int = 0
  dense_layers: int = 0
  dense_hidden: int = 0
  query_rank: int = 0  # of latent attention, like `kv_rank`; its queries and keys have `rope_dim` more
  kv_rank: int = 0
  rope_dim: int = 0

  @functools.cached_property
  def weights(self) -> dict[str, int]:
    """The weights of one layer's products by name; `wi` and `wo` are of one expert, or of the feed-forward layer."""
    width, kv_width = self.heads * self.head_dim, (self.kv_heads or self.heads) * self.head_dim
    found = {'q': self.dims * width, 'k': self.dims * kv_width, 'v': self.dims * kv_width, 'out': self.dims * width}
    if self.kv_rank:
      found['q'] = self.query_rank * (self.dims + width + self.heads * self.rope_dim)
      found['k'] = self.dims * (self.kv_rank + self.rope_dim) + self.kv_rank * width
      found['v'] = self.kv_rank * width
    return found | {'wi': (1 + self.gated) * self.dims * self.hidden, 'wo': self.dims * self.hidden}

  @property
  def routed_layers(self) -> int:
    """Layers with experts."""
    return self.layers - self.dense_layers if self.experts else 0

  @property
  def dense_units(self) -> float:
    """Feed-forward layers that all tokens pass, shared experts too, in units of `hidden`."""
    if not self.experts:
      return self.layers
    return (self.dense_layers * self.dense_hidden + self.routed_layers * self.shared) / self.hidden

  def num_params(self, experts: int | None = None) -> float:
    """Returns the number of weights without norms, with all experts of a layer or so many."""
    units = self.dense_units + self.routed_layers * (self.experts if experts is None else experts)
    attention, expert = sum(self.weights[name] for name in _ATTENTION), self.weights['wi'] + self.weights['wo']
    return self.layers * attention + units * expert + (2 - self.tied) * self.vocab * self.dims

  def keys(self, seq_len: int, block: int) -> float:
    """Returns how many keys a query meets on average over the layers, in whole blocks of a causal kernel."""
    everywhere = (seq_len + min(block, seq_len)) / 2
    of_window = (1 + -(-(self.window - 1) // block)) * block
    return everywhere * (1 - self.local) + min(everywhere, of_window) * self.local


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
  state_bytes: int = 12  # of a weight with its moments and its gradient
  vocab_tiles: int = 1
  blocks: Sequence[int] = (1024, 1024)  # of the attention kernel, forward and backward
  seq_len: int | None = None  # where a row of results states another than the script
  precision: str | None = None

  @property
  def kept(self) -> tuple[str, ...]:
    """All that the backward pass does not compute again."""
    return (*self.save.split(), *self.offload.split())


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


class _Published(MoeLanguageModel):
  """A published model and recipe as an experiment of ours; `rows` of a step are `seq_len` tokens long."""

  architecture: Any
  recipe: Any
  num_devices: int
  num_slices: int
  precision: str

  def block(self, ffn: fdl.Config, window: int | None = None) -> fdl.Config[TransformerBlock]:
    model, block = self.architecture, super().block(ffn)
    if model.kv_rank:
      sizes = {'nope_head_dim': model.head_dim, 'rope_head_dim': model.rope_dim, 'value_head_dim': model.head_dim}
      ranks = {'query_rank': model.query_rank, 'kv_rank': model.kv_rank}
      block.attention = fdl.Config(LatentAttention, num_heads=model.heads, dtype=self.dtype, **ranks, **sizes)
    else:
      block.attention.head_dim, block.attention.window = model.head_dim, window
    block.attention.gradient_keys = min(self.recipe.blocks[1], self.seq_len)
    return block

  def ffn(self) -> fdl.Config:
    if self.architecture.experts:
      return super().ffn()
    kind = GatedFeedForward if self.architecture.gated else FeedForward
    return fdl.Config(kind, hidden_dim=self.hidden_dims, activation='silu', dtype=self.dtype)

  def stack(self) -> fdl.Config:
    stack, model = super().stack(), self.architecture
    if not model.local:
      return stack
    local = round(1 / (1 - model.local)) - 1  # local layers for each global one
    windows = (*[model.window] * local, None)

    def grouped(windows: Sequence[int | None], num_layers: int) -> fdl.Config[TransformerStack]:
      blocks = tuple(self.block(self.ffn(), window=window) for window in windows)
      group = fdl.Config(BlockGroup, blocks=blocks)
      return fdl.Config(TransformerStack, block=group, num_layers=num_layers, remat_policy=self.remat_policy)

    groups, rest = divmod(model.layers, len(windows))
    stacks = [grouped(windows, groups), *([grouped(windows[:rest], 1)] if rest else [])]
    return stacks[0] if len(stacks) == 1 else fdl.Config(StackSequence, stacks=tuple(stacks))

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


def experiment_of(
  model: Model, recipe: Recipe, *, num_devices: int, num_slices: int, batch: int, seq_len: int, precision: str
) -> type[Experiment]:
  """Returns the experiment class of a published recipe, on a mesh of replica x data x expert x context x mdl."""
  words = {'save': recipe.save, 'offload': recipe.offload}
  policy = ' '.join(f'{how}({", ".join(_NAMES[word] for word in text.split())})' for how, text in words.items() if text)
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
    'num_dense_layers': model.dense_layers,
    'dense_hidden_dims': model.dense_hidden or None,
    'dtype': 'bfloat16',
    'seq_len': seq_len,
    'batch_size': batch,
    'remat_policy': policy or 'full',
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
    rows: with `name`, `chip`, `num_chips`, `num_slices`, `model`, `global_batch`, `seq_len`, `precision`, `step_s`.

  Returns:
    rows: each with name, predicted_s, measured_s, ratio, fits and what `predict_recipe` returns; predicted_s is None
      where the model or the chip is not known.
    dense, experts: num_rows, and `median_error` and `worst_error` of |ratio - 1|, with the row of the worst.

  Raises:
    UserError: a row lacks a figure.
  """
  planned = [_compare_row(row) for row in rows]
  errors = {kind: _errors([row for row in planned if row['kind'] == kind]) for kind in ('dense', 'experts')}
  return {'rows': planned, **errors}


def _check_row(row: Any) -> None:
  if not isinstance(row, Mapping):
    raise UserError(f'a row is {row!r}: write an object with {", ".join(_NEEDED)}.')
  for key, kind in (_NEEDED | {'num_slices': int, 'precision': str, 'step_s': float}).items():
    value = row.get(key)
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
  answer = {'name': row['name'], 'predicted_s': None, 'measured_s': measured, 'ratio': None, 'fits': None, 'kind': None}
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


def _errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  errors = {row['name']: abs(row['ratio'] - 1) for row in rows if row['ratio'] is not None}
  if not errors:
    return {'num_rows': 0, 'median_error': None, 'worst_error': None, 'worst_row': None}
  worst = max(errors, key=errors.__getitem__)
  median = statistics.median(errors.values())
  return {'num_rows': len(errors), 'median_error': median, 'worst_error': errors[worst], 'worst_row': worst}
