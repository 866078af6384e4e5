"""Setting: one way to run an experiment, on a mesh, with overrides and other batches. Samples meshes and batches.

`shrink` makes a large experiment tiny: it reduces sizes, and keeps other settings. It changes only fields of known
names and meaning, those of the recipes, and the user's overrides take precedence.

The first batch is the experiment's own. If all rows had the same number of tokens, the mean of shards' means would be
the mean of the batch, so other batches have rows of different lengths: weights of 0 at the end, and in some rows
segment ids of 0 too, as in padding.

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
    flags: flags for commands: the experiment, such as '--exp', 'lm.UnevenTiny', and the user's overrides.
    resolve: `path=value` overrides -> (the built job, the value of every field by path, as in config.json).
    quantization: the experiment's task.quantization, which jobs of `resolve` do not have.
    build_whole: builds the job as it is, not shrunk and with its quantization; None: it is `base`.
  """

  flags: tuple[str, ...]
  resolve: Callable[[Sequence[str]], tuple[Job, Mapping[str, Any]]]
  quantization: Any = None
  build_whole: Callable[[], Job] | None = None

  def whole(self) -> Job:
    """Returns the job as it is."""
    return self.base if self.build_whole is None else self.build_whole()

  @functools.cached_property
  def _resolved(self) -> tuple[Job, Mapping[str, Any]]:
    return self.resolve(())

  @property
  def base(self) -> Job:
    """The experiment without additional overrides."""
    return self._resolved[0]

  @property
  def values(self) -> Mapping[str, Any]:
    """The value of every field of `base`, by path."""
    return self._resolved[1]

  def paths_of(self, part: type) -> list[str]:
    """Returns the paths of the model's parts of a class, such as PipelinedStack, or of its subclasses."""
    return [
      path
      for path, value in self.values.items()
      if path.startswith('task.model') and isinstance(value, Mapping) and _names(value.get('symbol'), part)
    ]

  def paths_ending(self, field: str) -> list[str]:
    """Returns the paths of a field in all parts of the model."""
    return [path for path in self.values if path.startswith('task.model.') and path.endswith(f'.{field}')]


def _names(symbol: Any, part: type) -> bool:
  """Returns whether a symbol, such as 'package:Class', names a class or a subclass of it."""
  module, _, name = str(symbol).partition(':')
  named_class = getattr(sys.modules.get(module), name, None)  # the module is loaded, because the experiment was built
  return isinstance(named_class, type) and issubclass(named_class, part)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
  """One way to run the experiment; equal settings share one compiled program.

  Attributes:
    mesh: (axis, size) pairs in the order of the mesh; drops axes of size 1.
    slices: dcn_mesh_shape, which multiplies the sizes; None for one slice.
    overrides: `path=value` overrides of the shrunk experiment.
    change: function that changes the built job if overrides cannot; None for no change.
    by_formulas: whether steps are computed by formulas, see _formula_runner.py.
  """

  mesh: tuple[tuple[str, int], ...] = ()
  slices: tuple[int, ...] | None = None
  overrides: tuple[str, ...] = ()
  change: Callable[[Job], Job] | None = None
  by_formulas: bool = False

  def __post_init__(self):
    object.__setattr__(self, 'mesh', tuple((axis, size) for axis, size in self.mesh if size > 1))

  @property
  def num_devices(self) -> int:
    return math.prod(size for _, size in self.mesh) * math.prod(self.slices or (1,))

  def __str__(self) -> str:
    return ' x '.join(f'{axis} {size}' for axis, size in self.mesh) or 'one device'


def build_job(source: Source, setting: Setting) -> Job:
  """Builds the experiment in a setting. Raises a UserError if the experiment refuses the mesh or the overrides."""
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
  """Returns the job with `task.quantization` set."""
  task = job.task.as_task('--mode verify')
  return dataclasses.replace(job, task=dataclasses.replace(task, quantization=quantization))


Mesh = tuple[tuple[str, int], ...]


def scaled_mesh(experiment: Experiment, num_devices: int) -> Mesh:
  """Returns the experiment's mesh with its largest axis divided until it has at most `num_devices` devices.

  ICI and DCN sizes are multiplied, because one machine has no slices.
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
  """Yields random meshes without end; numbers of devices cycle over `sizes`. Yields all meshes before it repeats one.

  Alternates between meshes by the number of axes that they split.
  """
  remaining: dict[int, list[Mesh]] = {}
  for size in itertools.cycle(sizes):
    if not remaining.get(size):
      shapes = factorizations(size, [size] * len(axis_names))
      meshes: list[Mesh] = [tuple(zip(axis_names, shape)) for shape in shapes]
      by_num_axes: dict[int, list[Mesh]] = {}
      for index in rng.permutation(len(meshes)):
        num_axes = sum(axis_size > 1 for _, axis_size in meshes[index])
        by_num_axes.setdefault(num_axes, []).append(meshes[index])
      groups = [by_num_axes[num_axes] for num_axes in rng.permutation(sorted(by_num_axes))]
      remaining[size] = [mesh for row in itertools.zip_longest(*groups) for mesh in row if mesh is not None]
    yield remaining[size].pop(0)


def smaller_meshes(mesh: Mesh) -> Iterator[Mesh]:
  """Yields meshes with one smaller axis: first those with size 1, then those divided by the axis's smallest factor."""
  for removes_axis in (True, False):
    for axis, (name, size) in enumerate(mesh):
      if size > 1:
        new_size = 1 if removes_axis else size // _smallest_factor(size)
        if removes_axis or new_size > 1:
          yield (*mesh[:axis], (name, new_size), *mesh[axis + 1 :])


def _smallest_factor(size: int) -> int:
  return next(factor for factor in range(2, size + 1) if size % factor == 0)


# Larger values of these fields shrink to the cap, or to a similar value that fits the other fields.
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
  """Returns new values for fields that are too large, by path.

  Args:
    job: the built experiment.
    values: the value of every field, by path.
    mesh: the axis sizes on which the experiment will be verified.
  """
  own: dict[str, Any] = {name: value for name, value in values.items() if '.' not in name}
  new: dict[str, Any] = {}

  def current(name: str, default: int = 1) -> int:
    return new.get(name, own.get(name, default))

  for name, cap in _CAPS.items():
    if name == 'seq_len' and _reads_whole_records(job):
      continue
    if isinstance(own.get(name), int) and own[name] > _TINY.get(name, cap):
      new[name] = cap
  stages = max(mesh.get('stage', 1), 1)
  if 'num_microbatches' in own:
    new['num_microbatches'] = max(stages, current('num_microbatches') // stages * stages)
  if 'num_layers' in new:
    groups = stages * current('num_repeats')
    is_uneven = own['num_layers'] % groups != 0
    num_layers = max(groups, 4 if groups in (1, 2, 4) else groups)
    new['num_layers'] = num_layers + (current('num_repeats') if is_uneven else 0)
  if 'batch_size' in own:
    multiple = math.lcm(max(current('num_microbatches'), _learner_microbatches(values)), own.get('group_size', 1))
    new['batch_size'] = max(current('batch_size') // multiple, 1) * multiple
  if 'num_heads' in own and ('num_heads' in new or 'model_dims' in new):
    heads = current('num_heads')
    new['model_dims'] = max(current('model_dims') // heads, 8) // 2 * 2 * heads
    if own.get('num_kv_heads'):
      new['num_kv_heads'] = max(heads * own['num_kv_heads'] // own['num_heads'], 1)
  if isinstance(own.get('vocab_size'), int) and own['vocab_size'] > _TINY['vocab_size']:
    new['vocab_size'] = max(job.tokenizer.vocab_size if job.tokenizer else 0, 64)
  if own.get('dtype', 'float32') != 'float32':
    new['dtype'] = 'float32'
  return {name: value for name, value in new.items() if value != own[name]}


def _reads_whole_records(job: Job) -> bool:
  """Returns whether rows have whole conversations, pairs or completed prompts, which do not fit in shorter rows."""
  return any(isinstance(source, ConversationInput | RolloutInput) for source in sources_of(job.train_input))


def _learner_microbatches(values: Mapping[str, Any]) -> int:
  count = values.get('task.learner.num_microbatches', 1)
  return count if isinstance(count, int) else 1


Batch = dict[str, np.ndarray]


def draw_batches(train_input: Input, num_batches: int, seed: int) -> list[Batch]:
  """Reads batches. If they have `weights` [B, T], gives rows of all but the first batch different lengths.

  Raises a UserError if the input ends before.
  """
  with contextlib.closing(without_references(train_input).make_iterator()) as iterator:
    batches = [{name: np.array(x) for name, x in batch.items()} for batch in itertools.islice(iterator, num_batches)]
  if len(batches) < num_batches:
    raise UserError(
      f'the training input ends after {len(batches)} batches, but {num_batches} steps are compared: let it repeat.'
    )
  rng = np.random.default_rng(seed)
  return [*batches[:1], *(_with_random_lengths(batch, rng) for batch in batches[1:])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResizeBatches:
  """Changes the number of rows of training batches, by joining several batches; used as `Setting.change`.

  Attributes:
    num_rows: rows per batch.
    num_columns: keeps this many tokens of each row; None keeps all.
    without_segments: whether to remove segment ids, without which layers cannot recognize padding.
  """

  num_rows: int
  num_columns: int | None = None
  without_segments: bool = False

  def __call__(self, job: Job) -> Job:
    return dataclasses.replace(job, train_input=_ResizedInput(job.train_input, self))


@dataclasses.dataclass(frozen=True)
class DerivedInput:
  """Base class of inputs whose batches are computed from another input, for one process and without resuming."""

  source: Input

  @property
  def batch_size(self) -> int:
    return self.source.batch_size

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    return self.source.element_spec()

  def batches(self) -> Iterator[Batch]:
    raise NotImplementedError

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> '_StatelessIterator':
    assert shard_count == 1
    return _StatelessIterator(self.batches())

  def reshard_states(self, states: Sequence[Any], shard_count: int) -> Any:
    raise NotImplementedError('its iterators have no state')


@dataclasses.dataclass
class _StatelessIterator(InputIterator):
  remaining: Iterator[Batch]

  def __next__(self) -> Batch:
    return next(self.remaining)

  def get_state(self) -> dict[str, Any]:
    return {}

  def set_state(self, state: Any) -> None:
    raise NotImplementedError('it has no state')


@dataclasses.dataclass(frozen=True)
class _ResizedInput(DerivedInput):
  sizes: ResizeBatches

  @property
  def batch_size(self) -> int:
    return self.sizes.num_rows

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    def resize(spec):
      shape = (self.sizes.num_rows, *spec.shape[1:])
      if self.sizes.num_columns and len(shape) > 1:
        shape = (shape[0], min(shape[1], self.sizes.num_columns), *shape[2:])
      return jax.ShapeDtypeStruct(shape, spec.dtype)

    return {name: resize(spec) for name, spec in self.source.element_spec().items() if self._includes(name)}

  def batches(self) -> Iterator[Batch]:
    num_rows, num_columns = self.sizes.num_rows, self.sizes.num_columns
    num_batches = -(-num_rows // self.source.batch_size)
    with contextlib.closing(without_references(self.source).make_iterator()) as iterator:
      while len(batches := list(itertools.islice(iterator, num_batches))) == num_batches:
        rows = {name: np.concatenate([batch[name] for batch in batches])[:num_rows] for name in batches[0]}
        yield {name: x[:, :num_columns] if x.ndim > 1 else x for name, x in rows.items() if self._includes(name)}

  def _includes(self, name: str) -> bool:
    return not (self.sizes.without_segments and name.startswith('segment_'))


def _with_random_lengths(batch: Mapping[str, Any], rng: np.random.Generator) -> Batch:
  batch = dict(batch)
  weights = batch.get('weights')
  if weights is None or weights.ndim != 2 or weights.shape[1] < 2:
    return batch
  num_rows, seq_len = weights.shape
  lengths = rng.integers(1, seq_len + 1, num_rows)
  lengths[rng.integers(num_rows)] = seq_len
  is_inside = np.arange(seq_len) < lengths[:, None]
  batch['weights'] = np.where(is_inside, weights, 0).astype(weights.dtype)
  is_padded = rng.random(num_rows) < 0.5
  for name in ('segment_ids', 'segment_pos'):
    if name in batch and batch[name].shape == weights.shape:
      batch[name] = np.where(is_inside | ~is_padded[:, None], batch[name], 0).astype(batch[name].dtype)
  return batch
