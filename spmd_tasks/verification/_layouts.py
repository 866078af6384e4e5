"""The meshes to compare: the experiment's, scaled to the devices that there are, and others that are drawn for it."""

from collections.abc import Iterator, Sequence
import math

import numpy as np

from spmd_tasks.experiment import Experiment
from spmd_tasks.sharding import factorizations

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
  turn = 0
  while True:
    size = sizes[turn % len(sizes)]
    turn += 1
    if not decks.get(size):
      meshes = all_meshes(axis_names, size)
      by_width: dict[int, list[Mesh]] = {}
      for index in rng.permutation(len(meshes)):
        width = sum(part > 1 for _, part in meshes[index])
        by_width.setdefault(width, []).append(meshes[index])
      groups = [by_width[width] for width in rng.permutation(sorted(by_width))]
      decks[size] = [group[i] for i in range(max(map(len, groups))) for group in groups if i < len(group)]
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
