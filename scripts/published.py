"""Predicts step times of published training recipes, and holds them against the seconds that others measured.

    report = compare_rows(json.loads(text)['rows'])
    report['rows'][0]['ratio'], report['dense']['median_error']

Nothing is compiled: a recipe's step (recipes.toml: model, what is kept or offloaded, how weights are split) is listed
as operations of one chip, and each takes its work over a rate of rates.toml. So a plan takes milliseconds and is of
their program, not of ours. What it cannot see: fusions, layouts and schedules, whose sum is in the rates.

* Products: two FLOPs per multiply-add; forward, what is recomputed, and twice the forward for the gradients. Sides that
  fill no whole matrix unit count as if they did. Words of a recipe: `q k v context out wi wo` are results that are kept
  (`save`) or copied to the host (`offload`), `input` is a layer's; everything else is computed again.
* Attention: scores of whole blocks, causal; forward again unless `context` is kept, backward 2.5 times the forward.
  Heads fill a part of a matrix unit (costs.py).
* Memory: results that no product's fusion hides, as passes over [tokens, dims] and [tokens, hidden]; rows of experts
  are gathered; logits in float32; the optimizer.
* Networks: weights are gathered twice and their gradients scattered once, in bfloat16, over all chips of a slice; keys
  and values over `context`, activations over `tensor`, rows over `expert`. A share of that (`exposed`) nothing hides.
* Copies to the host run beside the forward pass and come back beside the backward pass; the program waits for the rest.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from pathlib import Path
import statistics
import tomllib
from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.planning.chips import CHIPS, Chip, Rate, rate_of, read_table
from spmd_tasks.planning.costs import filled_part
from spmd_tasks.planning.networks import is_ring, links_of_dim
from spmd_tasks.planning.targets import parse_target, target_of

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


def model_flops(model: Model, num_tokens: float, seq_len: int) -> float:
  """Returns the FLOPs of a step without recomputation, of the scores only causal and windowed ones."""
  active = model.num_params(model.selected) - (1 - model.tied) * model.vocab * model.dims
  keys = seq_len / 2 * (1 - model.local) + min(model.window, seq_len / 2) * model.local
  return 6 * num_tokens * (active + keys * model.heads * (2 * model.head_dim + model.rope_dim) * model.layers)


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


class _Step:
  """One chip's step: a model by a recipe, and the seconds of its operations with the rates that they rest on."""

  def __init__(self, model: Model, recipe: Recipe, chip: Chip, num_chips: int, tokens: float, seq_len: int, low: bool):
    self.seconds: dict[str, float] = {}
    self.by_basis: dict[str, float] = {}
    self.model, self.recipe, self.chip, self.num_chips, self.tokens = model, recipe, chip, num_chips, tokens
    self.seq_len, self.is_low = seq_len, low
    self.peak = (chip.peak_flops or 0) * chip.cores
    self.hbm = (chip.hbm_bandwidth or 0) * chip.cores
    width, kv_width = model.heads * model.head_dim, (model.kv_heads or model.heads) * model.head_dim
    active = (model.dense_units + model.routed_layers * model.selected) * model.hidden / model.layers
    self.widths = {  # of what may be kept of a layer
      **{'input': model.dims, 'out': model.dims, 'q': width, 'context': width, 'k': kv_width, 'v': kv_width},
      **{'wi': (1 + model.gated) * active, 'wo': model.dims * model.selected},
    }

  def rate(self, name: str) -> float:
    return rate_of(self.chip, name).value

  def add(self, operation: str, rate: str, work: float) -> None:
    """Adds an operation: its work over its rate, in seconds; of collectives, the share that is exposed."""
    value, basis, _ = Rate(1, 'assumed', '') if rate == 'host' else rate_of(self.chip, rate)
    self.seconds[operation] = seconds = work * value if rate == 'exposed' else work / value
    self.by_basis[basis] = self.by_basis.get(basis, 0) + seconds

  def add_products(self) -> None:
    model, recipe, weights = self.model, self.recipe, self.model.weights
    low = (self.chip.fp8_flops or self.chip.int8_flops or self.chip.peak_flops or 0) * self.chip.cores
    peak = low * self.rate('low_precision') if self.is_low else self.peak
    again = {name: name not in recipe.kept for name in weights}
    unfilled = 2 * self.tokens / filled_part(model.dims, self.chip.mxu_size)
    expert = sum(weights[name] * (3 + again[name]) for name in ('wi', 'wo'))
    attention = sum(weights[name] * (3 + again[name]) for name in _ATTENTION) * model.layers
    # The layer's last product is needed by no gradient, unless gates multiply it.
    dense = attention + (weights['wi'] * (3 + again['wi']) + weights['wo'] * 3) * model.dense_units
    routed = model.routed_layers * model.selected * expert / filled_part(model.hidden, self.chip.mxu_size)
    if recipe.capacity_factor:
      dense += routed * recipe.capacity_factor
      # A sequence's tokens are given to slots, and back, by products with masks of [tokens, slots].
      slots = self.seq_len * model.selected * recipe.capacity_factor
      self.add('dispatch', 'matmul', 4 * 2 * unfilled * model.routed_layers * slots * model.dims / self.peak)
    elif routed:
      self.add('experts', 'grouped', unfilled * routed / peak)
    self.add('products', 'matmul', unfilled * dense / peak)
    logits = 2 * self.tokens * model.vocab * model.dims * (3 + (recipe.vocab_tiles > 1))
    self.add('logits', 'matmul', logits / self.peak)
    query_dim = model.head_dim + model.rope_dim
    forward, backward = (model.keys(self.seq_len, block) for block in recipe.blocks)
    keys = forward * (1 + ('context' not in recipe.kept)) + backward * 2.5
    scores = 2 * self.tokens * keys * model.heads * (query_dim + model.head_dim) * model.layers
    self.add('attention', 'attention', scores / (self.peak * filled_part(query_dim, self.chip.mxu_size)))

  def add_memory(self) -> None:
    model, widths = self.model, self.widths
    hidden, heads = widths['wi'] / (1 + model.gated), widths['q'] + widths['k'] + widths['v']
    moved = _BF16 * (28 * model.dims + 10 * hidden + 8 * heads)
    if self.is_low:  # each product's operands are read, and written in a byte: forward, again, backward
      moved += 3 * (_BF16 + 1) * (2 * model.dims + heads / 2 + 2 * hidden)
    self.add('memory', 'hbm', self.tokens * (model.layers * moved + 5 * _F32 * model.vocab) / self.hbm)
    self.add('optimizer', 'hbm', 7 * _F32 * model.num_params() * self.recipe.replicas / self.num_chips / self.hbm)
    if model.experts and not self.recipe.capacity_factor:
      rows = self.tokens * model.selected * model.dims * model.routed_layers
      self.add('sorting', 'gather', 28 * _BF16 * rows / self.hbm)  # 14 times read and written

  def add_networks(self, num_slices: int) -> None:
    model, recipe, chip, tokens = self.model, self.recipe, self.chip, self.tokens
    text = target_of(chip, self.num_chips * chip.cores, num_slices)
    shape = parse_target(text).slice_shape if text else (self.num_chips // num_slices,)
    link = (chip.ici_bandwidth or 0) * chip.cores
    links = sum(links_of_dim(range(size), size, is_ring(chip, size)) for size in shape if size > 1) or 1
    experts = model.num_params() - model.num_params(0)
    weights = (model.num_params(0) + experts / recipe.expert) / recipe.tensor
    layer = _BF16 * tokens * model.layers
    along_a_dim = (
      layer * 3 * (recipe.context - 1) * (self.widths['k'] + self.widths['v'])
      + layer * 4 * (3 - ('wi' in recipe.kept)) * (recipe.tensor - 1) * model.dims
      + _BF16 * tokens * model.routed_layers * 6 * (1 - 1 / recipe.expert) * model.selected * model.dims
    )
    gathered = 0 if self.num_chips == num_slices else weights  # by the chips of a slice
    seconds = (3 * _BF16 * gathered / links + along_a_dim / 2) / (link * self.rate('ici'))
    self.add('collectives', 'exposed', seconds)
    if num_slices > 1:
      self.add('slices', 'dcn', 2 * _F32 * model.num_params() * (num_slices - 1) / self.num_chips)

  def add_host(self) -> None:
    """Adds what the host's copies take beyond a forward pass of a quarter, and a backward pass of half of the step."""
    total, words = sum(self.seconds.values()), self.recipe.offload.split()
    moved = _BF16 * self.tokens * self.model.layers * sum(self.widths[word] for word in words)
    seconds = moved / ((self.chip.host_bandwidth or 0) * self.chip.cores)
    self.add('host', 'host', max(0, seconds - total / 4) + max(0, seconds - total / 2))

  def memory_bytes(self, num_slices: int) -> float:
    model, recipe = self.model, self.recipe
    words = {'input', *recipe.kept} - set(recipe.offload.split())
    saved = _BF16 * model.layers * sum(self.widths[word] for word in words)
    working = _BF16 * (6 * model.dims + 2 * self.widths['wi'] + model.vocab / recipe.vocab_tiles)
    copies = recipe.replicas * (1 if recipe.is_split_over_slices else num_slices)
    state = recipe.state_bytes * model.num_params() / self.num_chips * copies
    layer = 2 * _BF16 * max(model.num_params() / model.layers / recipe.expert, model.vocab * model.dims)
    return state + (layer + self.tokens * (saved + working)) / recipe.tensor


def predict_recipe(
  model: Model,
  recipe: Recipe,
  chip: Chip,
  *,
  num_chips: int,
  num_slices: int,
  num_tokens: int,
  seq_len: int,
  precision: str = 'bf16',
) -> dict[str, Any]:
  """Predicts one training step.

  Args:
    model, recipe: what is trained and how.
    chip: one with rates in rates.toml.
    num_chips, num_tokens: of all slices together.
    num_slices: over which only gradients are summed.
    seq_len: tokens of a sequence.
    precision: 'bf16', or that of the layers' products: 'int8', 'fp8', also 'fp8_full'.

  Returns:
    predicted_s; `seconds` by operation; `share` of the time by the basis of its rates: measured, fitted, assumed;
    memory_bytes of a chip and whether that fits; model_flops of the step; mfu, always of bfloat16's peak.
  """
  is_low = not precision.startswith('bf16')
  step = _Step(model, recipe, chip, num_chips, num_tokens / num_chips, seq_len, is_low)
  step.add_products()
  step.add_memory()
  step.add_networks(num_slices)
  step.add_host()
  total, memory = sum(step.seconds.values()), step.memory_bytes(num_slices)
  flops = model_flops(model, num_tokens, seq_len)
  return {
    'predicted_s': total,
    'fits': memory <= (chip.hbm_bytes or 0) * chip.cores,
    'memory_bytes': memory,
    'model_flops': flops,
    'mfu': flops / (num_chips * step.peak * total),
    'seconds': {name: seconds for name, seconds in step.seconds.items() if seconds},
    'share': {basis: seconds / total for basis, seconds in sorted(step.by_basis.items())},
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
    made = predict_recipe(model, recipe, chip, num_tokens=row['global_batch'] * row['seq_len'], **sizes, **settings)
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
