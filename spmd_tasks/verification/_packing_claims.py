"""The claim about packed rows: a document has the same numbers in a row with others as alone.

Rows have three documents each, of which one has loss weights. Its predictions, the loss and the gradients of all
weights must be the same if the other documents have other tokens ('beside others'), and if there are none ('alone');
see _packed_rows.py. With loss weights on all tokens, the loss of a row with the documents a and b is a sum over them,
so L(a, b) - L(a', b) - L(a, b') + L(a', b') must be 0, and its gradients ('together'). This finds losses whose labels
or weights cross a border.

A new model may hide a leak: a recurrence may forget a document within a token. So everything is compared for three
draws of the weights: as they are, and with all vectors, such as biases and decay rates, lowered and raised by _SHIFT.
Weights of zeros are drawn.

If numbers differ, what modules get and return is compared in the order of the computation (_module_calls.py), which
names the layer that leaks.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np

from spmd_tasks.errors import UserError, is_own
from spmd_tasks.inputs import TextInput
from spmd_tasks.layers import LanguageModel, LanguageModelLoss
from spmd_tasks.layers.losses import FunctionLoss
from spmd_tasks.layers.moe import ExpertChoiceRouter
from spmd_tasks.runtime import TrainState
from spmd_tasks.sharding.specs import row_axes
from spmd_tasks.sharding.weights import BALANCE_BIAS_TAG, WeightSpec, leaf_name, leaves_by_name
from spmd_tasks.verification._agreement import (
  FURTHER,
  Difference,
  closest_to_allowed,
  compare,
  perturb_weights,
  spread,
)
from spmd_tasks.verification._cases import Bench, Case, Verdict, broken_verdict, held_verdict, reduce_mesh, skipped_case
from spmd_tasks.verification._layout_claims import other_mesh, overrides_for_accumulation, pipeline_settings
from spmd_tasks.verification._module_calls import ModuleCalls
from spmd_tasks.verification._packed_rows import PackedRows, Pair, at_columns
from spmd_tasks.verification._runner import Leaves
from spmd_tasks.verification._settings import Batch, Mesh, Setting
from spmd_tasks.verification._text_claims import without_drops

_SHIFT = 4.0  # a recurrence that keeps exp(-exp(a)) of its state per token, such as 0.001, keeps 0.88 with a - 4
_DRAWS = {'': 0.0, f', vectors lowered by {_SHIFT:g}': -_SHIFT, f', vectors raised by {_SHIFT:g}': _SHIFT}
# Fields of layers that compute several tokens at once and carry a state on. Rows must have several chunks.
_CHUNKS = ('chunk', 'chunk_size', 'chunk_tokens')
_MAX_LOOK_AHEAD = 2  # tokens
_LOSSES = ('cross_entropy', 'z_loss', 'nextn_loss', 'loss')


def packing_cases(bench: Bench) -> Iterator[Case]:
  """Yields cases for one device, meshes, each schedule of a pipeline and a sharded sequence, and for the batches."""
  job = bench.source.base
  spec = job.train_input.element_spec()
  shapes = {spec[name].shape for name in ('ids', 'segment_ids', 'segment_pos') if name in spec}
  if len(shapes) != 1 or 'segment_pos' not in spec or len(shape := shapes.pop()) != 2 or shape[1] < 4:
    yield skipped_case('packing', 'documents in a row', 'the batches have no ids, segment_ids and segment_pos [B, T]')
    return
  if bench.source.paths_of(ExpertChoiceRouter):
    reason = 'an ExpertChoiceRouter chooses among the tokens of all documents'
    yield skipped_case('packing', 'documents in a row', reason)
    return
  one_device = _one_device(bench, shape[1])
  settings = {'one device': one_device}
  for name, mesh, overrides in _layouts(bench):
    overrides = tuple(dict.fromkeys((*one_device.overrides, *overrides)))
    settings[name] = dataclasses.replace(one_device, mesh=mesh, overrides=overrides)
  documents = functools.cache(lambda setting: _Documents(bench, setting, one_device))
  for name, setting in settings.items():
    yield Case(
      claim='packing',
      subject=f'three documents in a row, {name}',
      settings=(one_device, setting),
      decide=functools.partial(_compare_documents, setting=setting, one_device=one_device, documents=documents),
    )
  if isinstance(job.train_input, TextInput):
    yield Case(claim='packing', subject='batches of the input', decide=_check_batches)


def _one_device(bench: Bench, seq_len: int) -> Setting:
  """Returns one device, without what makes tokens depend on all others: aux losses, and experts that drop tokens.

  Also without dropout, whose masks depend on columns, and with short chunks.
  """
  source = bench.source
  chunk = 1 << (max(seq_len // 4, 1).bit_length() - 1)
  overrides = [*overrides_for_accumulation(source).overrides]
  for path in (path for field in _CHUNKS for path in source.paths_ending(field)):
    if isinstance(source.values[path], int) and source.values[path] > chunk:
      overrides.append(f'{path}={chunk}')
  is_changed = without_drops(source.base).task.model is not source.base.task.as_task('--mode verify').model
  return Setting(overrides=tuple(overrides), change=without_drops if is_changed else None)


def _layouts(bench: Bench) -> Iterator[tuple[str, Mesh, tuple[str, ...]]]:
  """Yields (name, mesh, overrides): pipelines, or else the experiment's mesh and another; and a sharded sequence."""
  experiment = bench.source.base.experiment
  pipelines = [(schedule, s.mesh, s.overrides) for schedule, s in pipeline_settings(bench) if isinstance(s, Setting)]
  meshes = [] if pipelines else [bench.own_mesh, other_mesh(bench)]
  for axis in experiment.mesh_axis_names:
    seq_rules = [rule for rule in experiment.axis_rules if rule[0] == 'seq']
    is_seq = axis in row_axes((), seq_rules) and bench.num_devices > 1
    if is_seq and not any(dict(mesh).get(axis, 1) > 1 for mesh in (*meshes, *(mesh for _, mesh, _ in pipelines))):
      meshes.append(((axis, 2),))
  yield from ((f'{name}, {Setting(mesh=mesh)}', mesh, overrides) for name, mesh, overrides in pipelines)
  yield from ((str(Setting(mesh=mesh)), mesh, ()) for mesh in meshes if Setting(mesh=mesh).num_devices > 1)


def _compare_documents(
  bench: Bench, setting: Setting, one_device: Setting, documents: Callable[[Setting], '_Documents']
) -> Verdict:
  of_setting = documents(setting)
  first = of_setting.first_difference
  if first is None:
    return held_verdict(closest_to_allowed(of_setting.differences), 1, tuple(of_setting.notes))
  smallest = one_device
  if (smaller := documents(one_device).first_difference) is not None:
    first = smaller
  else:
    smallest, first = reduce_mesh(setting, first, lambda smaller: documents(smaller).first_difference)
  layer = documents(smallest).leaking_layer()
  verdict = broken_verdict(bench, 'packing', setting, first, smallest, tuple(of_setting.notes))
  failure = verdict.failure | {'layer': layer}
  return dataclasses.replace(verdict, detail=f'{layer} leaks: {verdict.detail}', failure=failure)


class _Documents:
  """Compares the documents of packed rows in one setting.

  Attributes:
    differences: what was compared so far, unless it was too large.
    notes: what was not compared, and why.
  """

  def __init__(self, bench: Bench, setting: Setting, one_device: Setting):
    """Compares predictions on one device; on a mesh only if losses and gradients cannot be compared."""
    trajectory = bench.trajectory(one_device)
    self.differences: list[Difference] = []
    self.notes: dict[str, None] = {}
    self._runner, self._seed, self._is_one_device = bench.runner(setting), bench.seed, setting == one_device
    self._rows = PackedRows(trajectory.batches[0], bench.seed)
    self._states = {name: self._draw(trajectory.state(0), shift) for name, shift in _DRAWS.items()}

  def _draw(self, state: TrainState, shift: float) -> TrainState:
    """Returns the state with `shift` added to all vectors of the weights, and with drawn weights for zeros."""
    specs = leaves_by_name(self._runner.model.weight_specs)
    rng = np.random.default_rng((self._seed, 46))

    def draw(path: Any, w: np.ndarray) -> np.ndarray:
      spec = specs.get(leaf_name(path))
      if not isinstance(spec, WeightSpec) or not np.issubdtype(w.dtype, np.floating):  # a part of a quantized kernel
        return w
      is_vector = len(spec.shape) - spec.stacked < 2 or abs(np.mean(w)) > np.std(w)
      if not w.any() and not is_vector:
        return rng.normal(0, 0.1, w.shape).astype(w.dtype)
      return (w + shift).astype(w.dtype) if is_vector else w

    return state.replace(weights=jax.tree_util.tree_map_with_path(draw, state.weights))

  @functools.cached_property
  def first_difference(self) -> Difference | None:
    """The first difference that is too large; None if there is none."""
    reason = self._why_no_gradients
    if reason:
      self.notes[f'not compared: losses and gradients, {reason}'] = None
    predictions = self._predictions() if reason or self._is_one_device else ()
    gradients = () if reason else self._gradients()
    return next((found[0] for found in itertools.chain(predictions, gradients) if found), None)

  def _predictions(self) -> Iterator[list[Difference]]:
    self._check_segments()
    for (name, state), pair in itertools.product(self._states.items(), self._rows.pairs()):

      def predictions(state: TrainState, number: int, pair: Pair = pair) -> Leaves:
        values = self._calls.predictions(state, pair.batches[number])
        return {name: at_columns(x, pair.columns[number]) for name, x in values.items()}

      yield self._too_large(state, predictions, pair.name + name)

  def _gradients(self) -> Iterator[list[Difference]]:
    if self._loss_reads_weights:
      for (name, state), pair in itertools.product(self._states.items(), self._rows.pairs()):
        step = lambda state, number, pair=pair: self._step(state, pair.batches[number])
        yield self._too_large(state, step, pair.name + name)
    else:
      self.notes['not compared: the gradients of one document, because the loss ignores weights'] = None
    for batches in self._rows.quadruples():
      yield self._too_large(self._states[''], functools.partial(self._combined, batches), 'together')

  def _combined(self, batches: Sequence[Batch], state: TrainState, number: int) -> Leaves:
    """Returns L(a, b), for number 1 plus a quarter of L(a, b) - L(a', b) - L(a, b') + L(a', b'): a mean of 4 errors."""
    steps = [self._step(state, batch) for batch in (batches if number else batches[:1])]
    if not number:
      return steps[0]
    base, first, second, both = ({name: x.astype(np.float64) for name, x in step.items()} for step in steps)
    return {name: np.asarray(x + (x - first[name] - second[name] + both[name]) / 4) for name, x in base.items()}

  def _too_large(self, state: TrainState, numbers: Callable[[TrainState, int], Leaves], where: str) -> list[Difference]:
    """Returns differences of `numbers(state, 1)` from `numbers(state, 0)` that are too large: losses, then the worst.

    If numbers are not finite, or rounding alone makes them jump, adds a note and returns none.
    """
    reference, other = numbers(state, 0), numbers(state, 1)
    if not all(np.all(np.isfinite(x)) for x in reference.values()):
      self.notes[f'not compared: {where}, because numbers are not finite'] = None
      return []
    epsilon, rng = self._runner.epsilon, np.random.default_rng((self._seed, 45))

    def spread_of(units: float) -> dict[str, float]:
      samples = [perturb_weights(state, units * epsilon, rng) for _ in range(3)]
      return spread(reference, [numbers(sample, 0) for sample in samples])

    too_large, differences, _ = compare(reference, other, spread_of(1.0), epsilon, 1)
    if too_large:
      further = spread_of(FURTHER)
      if all(further[d.leaf] > d.difference / 4 for d in too_large):
        self.notes[f'not compared: {where}, because rounding alone makes the model jump, as at a tie of experts'] = None
        return []
      by_kind = sorted(too_large, key=lambda d: _LOSSES.index(d.leaf) if d.leaf in _LOSSES else len(_LOSSES))
      return [dataclasses.replace(d, leaf=f'{d.leaf} ({where})') for d in by_kind]
    self.differences += [dataclasses.replace(d, leaf=f'{d.leaf} ({where})') for d in differences]
    return []

  def _step(self, state: TrainState, batch: Batch) -> Leaves:
    """Returns the loss and the gradients of a train step."""
    specs = leaves_by_name({'gradients': self._runner.model.weight_specs})
    biases = {name for name, spec in specs.items() if isinstance(spec, WeightSpec) and BALANCE_BIAS_TAG in spec.tags}
    return {
      name: x
      for name, x in self._runner.step(state, batch).forward.items()
      if name in _LOSSES or (name.startswith('gradients/') and name not in biases)
    }

  @functools.cached_property
  def _why_no_gradients(self) -> str | None:
    """Returns why the gradients of a document depend on others in any case, or on its column; None if they do not."""
    loss, state, batch = self._runner.task.loss, self._states[''], self._rows.batch
    if not (isinstance(loss, LanguageModelLoss | FunctionLoss) or is_own(loss)):
      return f'because a {type(loss).__name__} may compare documents'
    if collections := self._runner.model.abstract_state.non_trainable:
      return f'because {", ".join(collections)} are statistics of a batch'
    other = self._step(state.replace(rng=state.rng + 1), batch)
    if any(not np.array_equal(x, other[name], equal_nan=True) for name, x in self._step(state, batch).items()):
      return 'because the model draws random numbers, others for each column'
    return None

  @functools.cached_property
  def _loss_reads_weights(self) -> bool:
    if isinstance(self._runner.task.loss, LanguageModelLoss):
      return True
    batches = (self._rows.batch, next(self._rows.pairs()).batches[0])
    whole, part = (self._step(self._states[''], batch)['loss'] for batch in batches)
    return bool(whole != part)

  def _check_segments(self) -> None:
    """Raises a UserError if a user's own model has no idea of documents."""
    if isinstance(self._runner.task.model, LanguageModel):
      return
    batch = self._rows.batch
    one_document = {
      name: np.ones_like(x) if name.endswith('segment_ids') else np.zeros_like(x) if name.endswith('segment_pos') else x
      for name, x in batch.items()
    }
    first, second = (self._calls.predictions(self._states[''], x) for x in (batch, one_document))
    if all(np.array_equal(x, second[name]) for name, x in first.items()):
      raise UserError('the model reads neither segment_ids nor segment_pos, so it does not separate documents.')

  @functools.cached_property
  def _calls(self) -> ModuleCalls:
    return ModuleCalls(self._runner, self._rows.batch)

  def leaking_layer(self) -> str:
    """Returns the first layer whose output at a document depends on others: 'stack/layers/attention (Attention)'.

    If there is none, that is the loss; or if only gradients differ, the last layer whose gradients do. A head that
    looks ahead reads the next document's tokens at the end of a document, for predictions without weight. So the ends
    come second, and only if the main predictions differ.
    """
    if layer := self._first_layer(without_last=_MAX_LOOK_AHEAD) or (any(self._predictions()) and self._first_layer()):
      return layer
    different = next(found for found in self._gradients() if found)
    if all(difference.leaf.startswith('gradients/') for difference in different):
      return f'the backward pass of {self._last_layer([difference.leaf for difference in different])}'
    loss = self._runner.task.loss
    function = loss.function if isinstance(loss, FunctionLoss) else loss
    return f'the loss ({getattr(function, "__name__", type(function).__name__)})'

  def _first_layer(self, *, without_last: int = 0) -> str | None:
    for state, pair in itertools.product(self._states.values(), self._rows.pairs()):
      layers: list[str] = []

      def values(state: TrainState, number: int, pair: Pair = pair, layers: list[str] = layers) -> Leaves:
        computed = list(self._calls.values(state, pair.batches[number]))
        layers[:] = [layer for layer, _ in computed]
        arrays = [at_columns(x, pair.columns[number], without_last=without_last) for _, x in computed]
        return {f'{place:06d}': x for place, x in enumerate(arrays)}

      if differences := self._too_large(state, values, ''):
        return layers[min(int(difference.leaf[:6]) for difference in differences)]
    return None

  def _last_layer(self, gradients: Sequence[str]) -> str:
    """Returns the layer that is called last of those with a weight in `gradients`: 'gradients/norm/scale (...)'."""
    called = [layer.partition(' (')[0] for layer, _ in self._calls.values(self._states[''], self._rows.batch)]
    layers = {gradient.partition('/')[2].partition(' (')[0].rpartition('/')[0] for gradient in gradients}
    return max(sorted(layers), key=lambda layer: called.index(layer) if layer in called else -1)


def _check_batches(bench: Bench) -> Verdict:
  """Checks that positions count within each document of a row, and that labels are the next tokens."""
  with contextlib.closing(bench.source.base.train_input.make_iterator()) as iterator:
    batches = list(itertools.islice(iterator, bench.num_steps))
  for step, batch in enumerate(batches, 1):
    ids, labels, weights, segments, positions = (
      batch[name] for name in ('ids', 'labels', 'weights', 'segment_ids', 'segment_pos')
    )
    continues = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    leaves = {
      'segment_pos': continues & (positions[:, 1:] != positions[:, :-1] + 1),
      'labels': continues & (weights[:, :-1] > 0) & (labels[:, :-1] != ids[:, 1:]),
    }
    for name, is_wrong in leaves.items():
      if count := int(np.sum(is_wrong)):
        leaf = f'batch/{name} of {count} tokens'
        return broken_verdict(bench, 'packing', Setting(), Difference(step=step, leaf=leaf))
  verdict = held_verdict(Difference(step=1, leaf='labels', difference=0.0), len(batches))
  return dataclasses.replace(verdict, detail=f'{len(batches)} batches')
