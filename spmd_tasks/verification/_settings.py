"""Setting: one way to run an experiment, on a mesh and with overrides; and the meshes that are drawn for it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import math
import sys
from typing import Any

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment, Job
from spmd_tasks.sharding import factorizations


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
  """

  mesh: tuple[tuple[str, int], ...] = ()
  slices: tuple[int, ...] | None = None
  overrides: tuple[str, ...] = ()
  change: Callable[[Job], Job] | None = None

  def __post_init__(self):
    object.__setattr__(self, 'mesh', tuple((axis, size) for axis, size in self.mesh if size > 1))

  @property
  def num_devices(self) -> int:
    return math.prod(size for _, size in self.mesh) * math.prod(self.slices or (1,))

  def __str__(self) -> str:
    return ' x '.join(f'{axis} {size}' for axis, size in self.mesh) or 'one device'


def build_job(source: Source, setting: Setting) -> Job:
  """Builds the experiment in a setting.

  Raises:
    UserError: the experiment refuses the mesh or the overrides.
  """
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
  if getattr(job.task, 'quantization', None) == quantization:
    return job
  return dataclasses.replace(job, task=dataclasses.replace(job.task, quantization=quantization))


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


def all_meshes(axis_names: Sequence[str], num_devices: int) -> list[Mesh]:
  """Returns every mesh of exactly `num_devices` devices over these axes."""
  return [tuple(zip(axis_names, sizes)) for sizes in factorizations(num_devices, len(axis_names))]


def draw_meshes(axis_names: Sequence[str], sizes: Sequence[int], rng: np.random.Generator) -> Iterator[Mesh]:
  """Yields meshes without end, each time of the next of `sizes` devices, none twice before all came once.

  Meshes that split several axes come with the same chance as those of one long axis.
  """
  decks: dict[int, list[Mesh]] = {}
  for size in itertools.cycle(sizes):
    if not decks.get(size):
      meshes = all_meshes(axis_names, size)
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
