"""Setting: one way to run an experiment, on a mesh, with overrides and other batches; and what is drawn for it.

A large experiment is made tiny (`shrink`) by the fields that it has: settings that decide numbers stay, sizes shrink.
Only fields of known names and meaning change, those of the recipes, and an override of the user wins.

The first batch is the experiment's own. Equal numbers of tokens in all rows would make the mean of the shards' means
the mean of the batch, so all others have rows of different lengths: weights of 0 at the end, and in some rows segment
ids of 0 too, as in padding.

Shapes: B batch rows, T sequence.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import itertools
import math
import sys
from typing import Any

import jax
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment, Job
from spmd_tasks.inputs import Input, InputIterator
from spmd_tasks.inputs.mixture import sources_of
from spmd_tasks.sharding.mesh_shapes import factorizations
from spmd_tasks.tuning import ConversationInput, RolloutInput
from spmd_tasks.tuning.preferences import without_references


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
  """An experiment that can be built with any overrides.

  Attributes:
    flags: the two that name it, such as '--exp', 'lm.UnevenTiny', and then the user's own overrides, for commands.
    resolve: `path=value` overrides -> (the built job, the value of every field by its path, as config.json has it).
    quantization: what the experiment says of int8 and fp8, which the job of `resolve` leaves out; None: nothing.
  """

  flags: tuple[str, ...]
  resolve: Callable[[Sequence[str]], tuple[Job, Mapping[str, Any]]]
  quantization: Any = None

  @functools.cached_property
  def _resolved(self) -> tuple[Job, Mapping[str, Any]]:
    return self.resolve(())

  @property
  def base(self) -> Job:
    """The experiment without further overrides."""
    return self._resolved[0]

  @property
  def values(self) -> Mapping[str, Any]:
    """The value of every field of `base` by its path."""
    return self._resolved[1]

  def paths_of(self, part: type) -> list[str]:
    """Returns the paths of the model's parts of a class, such as PipelinedStack, or of a subclass of the user's."""
    return [
      path
      for path, value in self.values.items()
      if path.startswith('task.model') and isinstance(value, Mapping) and _names(value.get('symbol'), part)
    ]

  def paths_ending(self, field: str) -> list[str]:
    """Returns the paths of a field in all parts of the model."""
    return [path for path in self.values if path.startswith('task.model.') and path.endswith(f'.{field}')]


def _names(symbol: Any, part: type) -> bool:
  """Whether a symbol, such as 'package:Class', is that of a class or a subclass."""
  module, _, name = str(symbol).partition(':')
  found = getattr(sys.modules.get(module), name, None)  # loaded: the experiment was built
  return isinstance(found, type) and issubclass(found, part)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """One way to run the experiment; two equal settings share one compiled program.

  Attributes:
    mesh: (axis, size) pairs in the order of the mesh; those of size 1 are dropped.
    slices: dcn_mesh_shape, by which the sizes are multiplied; None: one slice.
    overrides: `path=value`, on top of the shrunk experiment.
    change: changes the built job in a way that no override can; None: it stays.
    by_hand: whether its steps are computed from the formulas, see _by_hand.py.
  """

  mesh: tuple[tuple[str, int], ...] = ()
  slices: tuple[int, ...] | None = None
  overrides: tuple[str, ...] = ()
  change: Callable[[Job], Job] | None = None
  by_hand: bool = False

  def __post_init__(self):
    object.__setattr__(self, 'mesh', tuple((axis, size) for axis, size in self.mesh if size > 1))

  @property
  def num_devices(self) -> int:
    return math.prod(size for _, size in self.mesh) * math.prod(self.slices or (1,))

  def __str__(self) -> str:
    return ' x '.join(f'{axis} {size}' for axis, size in self.mesh) or 'one device'


def build_job(source: Source, setting: Setting) -> Job:
  """Builds the experiment in a setting. Raises a UserError: the experiment refuses the mesh or the overrides."""
  names, sizes = source.base.experiment.mesh_axis_names, dict(setting.mesh)
  shape = ','.join(str(sizes.pop(name, 1)) for name in names)
  slices = None if setting.slices is None else ','.join(map(str, setting.slices))
  job, _ = source.resolve((*setting.overrides, f'ici_mesh_shape={shape}', f'dcn_mesh_shape={slices}'))
  if setting.change is not None:
    job = setting.change(job)
  if unknown := [axis for axis in sizes if axis not in job.experiment.mesh_axis_names]:
    raise UserError(f'the mesh has no axis {unknown[0]!r}: its axes are {", ".join(job.experiment.mesh_axis_names)}.')
  return job


def with_quantization(quantization: Any, job: Job) -> Job:
  """Returns the job with this `task.quantization`."""
  task = job.task.as_task('--mode verify')
  return dataclasses.replace(job, task=dataclasses.replace(task, quantization=quantization))


Mesh = tuple[tuple[str, int], ...]


def scaled_mesh(experiment: Experiment, num_devices: int) -> Mesh:
  """Returns the experiment's mesh, its largest axis divided until at most `num_devices` devices are left.

  ICI and DCN sizes are multiplied: on one machine there are no slices.
  """
  names = experiment.mesh_axis_names
  ici, dcn = list(experiment.ici_mesh_shape), experiment.dcn_mesh_shape or (1,) * len(names)
  if -1 in ici:
    others = -math.prod(ici) * math.prod(dcn)
    ici[ici.index(-1)] = max(1, num_devices // others)
  sizes = [i * d for i, d in zip(ici, dcn)]
  while math.prod(sizes) > num_devices:
    axis = max(range(len(sizes)), key=lambda axis: sizes[axis])
    sizes[axis] //= _smallest_factor(sizes[axis])
  return tuple(zip(names, sizes))


def draw_meshes(axis_names: Sequence[str], sizes: Sequence[int], rng: np.random.Generator) -> Iterator[Mesh]:
  """Yields meshes without end, each time of the next of `sizes` devices, none twice before all came once.

  Meshes that split several axes come with the same chance as those of one long axis.
  """
  decks: dict[int, list[Mesh]] = {}
  for size in itertools.cycle(sizes):
    if not decks.get(size):
      shapes = factorizations(size, [size] * len(axis_names))
      meshes: list[Mesh] = [tuple(zip(axis_names, shape)) for shape in shapes]
      by_width: dict[int, list[Mesh]] = {}
      for index in rng.permutation(len(meshes)):
        width = sum(part > 1 for _, part in meshes[index])
        by_width.setdefault(width, []).append(meshes[index])
      groups = [by_width[width] for width in rng.permutation(sorted(by_width))]
      decks[size] = [mesh for each in itertools.zip_longest(*groups) for mesh in each if mesh is not None]
    yield decks[size].pop(0)


def smaller_meshes(mesh: Mesh) -> Iterator[Mesh]:
  """Yields meshes with one axis made smaller: first without it, then divided by its smallest factor."""
  for without in (True, False):
    for axis, (name, size) in enumerate(mesh):
      if size > 1:
        new = 1 if without else size // _smallest_factor(size)
        if without or new > 1:
          yield (*mesh[:axis], (name, new), *mesh[axis + 1 :])


def _smallest_factor(size: int) -> int:
  return next(factor for factor in range(2, size + 1) if size % factor == 0)


# Sizes up to which a field stays. A larger one becomes the cap, or a little less where it was odd.
_CAPS = {
  'num_layers': 4,
  'seq_len': 16,
  'batch_size': 8,
  'eval_batches': 2,
  'num_heads': 4,
  'model_dims': 32,
  'hidden_dims': 64,
  'shared_hidden_dims': 32,
  'num_experts': 8,
  'num_selected_experts': 2,
  'num_microbatches': 8,
  'num_train_steps': 40,
}
_TINY = {'model_dims': 64, 'hidden_dims': 128, 'num_layers': 6, 'vocab_size': 512}


def shrink(job: Job, values: Mapping[str, Any], mesh: Mapping[str, int]) -> dict[str, Any]:
  """Returns the new values of the fields that are too large, by their paths.

  Args:
    job: the built experiment.
    values: the value of every field by its path.
    mesh: the axis sizes on which it will be verified.
  """
  own: dict[str, Any] = {name: value for name, value in values.items() if '.' not in name}
  new: dict[str, Any] = {}

  def at(name: str, default: int = 1) -> int:
    return new.get(name, own.get(name, default))

  for name, cap in _CAPS.items():
    if name == 'seq_len' and _reads_whole_records(job):
      continue
    if isinstance(own.get(name), int) and own[name] > _TINY.get(name, cap):
      new[name] = cap
  stages = max(mesh.get('stage', 1), 1)
  if 'num_microbatches' in own:
    new['num_microbatches'] = max(stages, at('num_microbatches') // stages * stages)
  if 'num_layers' in new:
    groups = stages * at('num_repeats')
    uneven = own['num_layers'] % groups != 0
    new['num_layers'] = max(groups, 4 if groups in (1, 2, 4) else groups) + (at('num_repeats') if uneven else 0)
  if 'batch_size' in own:
    parts = math.lcm(max(at('num_microbatches'), _learner_microbatches(values)), own.get('group_size', 1))
    new['batch_size'] = max(at('batch_size') // parts, 1) * parts
  if 'num_heads' in own and ('num_heads' in new or 'model_dims' in new):
    heads = at('num_heads')
    new['model_dims'] = max(at('model_dims') // heads, 8) // 2 * 2 * heads
    if own.get('num_kv_heads'):
      new['num_kv_heads'] = max(heads * own['num_kv_heads'] // own['num_heads'], 1)
  if isinstance(own.get('vocab_size'), int) and own['vocab_size'] > _TINY['vocab_size']:
    new['vocab_size'] = max(job.tokenizer.vocab_size if job.tokenizer else 0, 64)
  if own.get('dtype', 'float32') != 'float32':
    new['dtype'] = 'float32'
  return {name: value for name, value in new.items() if value != own[name]}


def _reads_whole_records(job: Job) -> bool:
  """Whether rows hold whole conversations, pairs or completed prompts, which would not fit in shorter ones."""
  return any(isinstance(each, ConversationInput | RolloutInput) for each in sources_of(job.train_input))


def _learner_microbatches(values: Mapping[str, Any]) -> int:
  count = values.get('task.learner.num_microbatches', 1)
  return count if isinstance(count, int) else 1


Batch = dict[str, np.ndarray]


def draw_batches(train_input: Input, num_batches: int, seed: int) -> list[Batch]:
  """Reads that many batches and makes all but the first ragged, where they have `weights` [B, T].

  Raises a UserError: the input ends before.
  """
  with contextlib.closing(without_references(train_input).make_iterator()) as iterator:
    read = [{name: np.array(values) for name, values in x.items()} for x in itertools.islice(iterator, num_batches)]
  if len(read) < num_batches:
    raise UserError(
      f'the training input ends after {len(read)} batches, but {num_batches} steps are compared: let it repeat itself.'
    )
  rng = np.random.default_rng(seed)
  return [*read[:1], *(_ragged(batch, rng) for batch in read[1:])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
  """Gives the training batches another number of rows, those of as many batches as it takes; a change of a Setting.

  Attributes:
    num_rows: of a batch.
    num_columns: tokens of a row, the first ones; None keeps all.
    is_bare: whether segments are left out: without them no layer can tell padding.
  """

  num_rows: int
  num_columns: int | None = None
  is_bare: bool = False

  def __call__(self, job: Job) -> Job:
    return dataclasses.replace(job, train_input=_CutInput(job.train_input, self))


@dataclasses.dataclass(frozen=True)
class OtherBatches:
  """Batches made of those of another input, for one process that reads them from the start; a base class."""

  whole: Input

  @property
  def batch_size(self) -> int:
    return self.whole.batch_size

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    return self.whole.element_spec()

  def batches(self) -> Iterator[Batch]:
    raise NotImplementedError

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> '_WithoutPosition':
    assert shard_count == 1
    return _WithoutPosition(self.batches())

  def reshard_states(self, states: Sequence[Any], shard_count: int) -> Any:
    raise NotImplementedError('its iterators have no position to save')


@dataclasses.dataclass
class _WithoutPosition(InputIterator):
  remaining: Iterator[Batch]

  def __next__(self) -> Batch:
    return next(self.remaining)

  def get_state(self) -> dict[str, Any]:
    return {}

  def set_state(self, state: Any) -> None:
    raise NotImplementedError('it has no position to go to')


@dataclasses.dataclass(frozen=True)
class _CutInput(OtherBatches):
  """Another input, cut."""

  cut: Cut

  @property
  def batch_size(self) -> int:
    return self.cut.num_rows

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    def cut(spec):
      shape = (self.cut.num_rows, *spec.shape[1:])
      if self.cut.num_columns and len(shape) > 1:
        shape = (shape[0], min(shape[1], self.cut.num_columns), *shape[2:])
      return jax.ShapeDtypeStruct(shape, spec.dtype)

    return {name: cut(spec) for name, spec in self.whole.element_spec().items() if self._is_kept(name)}

  def batches(self) -> Iterator[Batch]:
    num_rows, num_columns = self.cut.num_rows, self.cut.num_columns
    num_batches = -(-num_rows // self.whole.batch_size)
    with contextlib.closing(without_references(self.whole).make_iterator()) as iterator:
      while len(batches := list(itertools.islice(iterator, num_batches))) == num_batches:
        rows = {name: np.concatenate([each[name] for each in batches])[:num_rows] for name in batches[0]}
        yield {name: x[:, :num_columns] if x.ndim > 1 else x for name, x in rows.items() if self._is_kept(name)}

  def _is_kept(self, name: str) -> bool:
    return not (self.cut.is_bare and name.startswith('segment_'))


def _ragged(batch: Mapping[str, Any], rng: np.random.Generator) -> Batch:
  batch = dict(batch)
  weights = batch.get('weights')
  if weights is None or weights.ndim != 2 or weights.shape[1] < 2:
    return batch
  num_rows, seq_len = weights.shape
  lengths = rng.integers(1, seq_len + 1, num_rows)
  lengths[rng.integers(num_rows)] = seq_len
  is_kept = np.arange(seq_len) < lengths[:, None]
  batch['weights'] = np.where(is_kept, weights, 0).astype(weights.dtype)
  is_padded = rng.random(num_rows) < 0.5
  for name in ('segment_ids', 'segment_pos'):
    if name in batch and batch[name].shape == weights.shape:
      batch[name] = np.where(is_kept | ~is_padded[:, None], batch[name], 0).astype(batch[name].dtype)
  return batch
