"""The networks of a target's devices: how long a collective over mesh axes occupies its links.

What a dim of a torus gives to a group, in links of one direction that every device can use at once (`links_of_dim`):

    all 4 devices of a dim of 4 that closes to a ring    2      each sends both ways round
    the same, if it does not close                       1      what is beyond an end of a line comes through one link
    devices 0, 1 of 4                                    1      a line: the way round is the other group's as well
    devices 0, 2 of 4 that close                         1      a ring that shares its links with devices 1, 3
    devices 0, 2 of 8                                    1/2    a line that shares its links with devices 1, 3

Gathers and reductions pass pieces on from neighbour to neighbour, along all dims at once. In an all-to-all every device
has a piece for every other: half of what a line's devices send crosses its middle (`exchange_links`).

Which dims close, and the costs on rings: Austin et al., How to Scale Your Model (2025),
https://jax-ml.github.io/scaling-book/tpus and /sharding.
"""

from collections.abc import Collection, Sequence
import itertools

import numpy as np

from spmd_tasks.planning.chips import Chip, rate_of
from spmd_tasks.planning.targets import Place, Target
from spmd_tasks.sharding import MeshSpec


class Networks:
  """The networks of a target's devices on a mesh, by mesh axes.

  On a torus a collective sends along every dim in which the devices of its group differ, at the same time as the other
  groups of the same form, which have the rest of these dims. In a node with a switch it has all of a chip's links.
  Between slices every chip has its share of the data-center network. A gather or a reduction over several slices has
  two phases: each device exchanges its piece with its counterparts in the other slices, and the rest is within slices.
  """

  def __init__(self, target: Target, mesh_spec: MeshSpec):
    self._chip, self._axis_names = target.chip, mesh_spec.axis_names
    self._places = mesh_spec.arrange(target.places())
    self._rates: dict[tuple[str, tuple[str, ...]], tuple[float, float, float]] = {}
    self._sizes = [max(place.coords[dim] for place in self._places.flat) + 1 for dim in range(3)]

  def seconds(self, kind: str, axes: Sequence[str], num_bytes: float) -> tuple[float, float]:
    """Returns how long a collective occupies ICI and the network between slices, by the bytes that one device sends."""
    key = kind, tuple(axes)
    if key not in self._rates:
      self._rates[key] = self._ici_bandwidth(*key), self._dcn_bandwidth(), self._crossing_share(*key)
    ici, dcn, crossing = self._rates[key]
    within, between = num_bytes * (1 - crossing), num_bytes * crossing
    return within / ici if ici else 0.0, between / dcn if dcn else 0.0

  def crosses_slices(self, axes: tuple[str, ...]) -> bool:
    """Returns whether a group of devices along these axes is in several slices, or nodes of GPUs."""
    return self._num_slices(self._group(axes)) > 1

  def _crossing_share(self, kind: str, axes: tuple[str, ...]) -> float:
    """Returns which share of the bytes that a device sends goes to other slices."""
    group = self._group(axes)
    n, num_slices = len(group), self._num_slices(group)
    if num_slices == 1:
      return 0.0
    if kind == 'collective_permute':
      return 1.0
    if kind == 'all_to_all':  # of n pieces one stays, and those for the device's slice
      return (n - n // num_slices) / (n - 1)
    return (num_slices - 1) / (n - 1)

  def _dcn_bandwidth(self) -> float:
    return rate_of(self._chip, 'dcn').value if self._chip.torus_dims else self._chip.dcn_bandwidth or 0.0

  def _ici_bandwidth(self, kind: str, axes: tuple[str, ...]) -> float:
    """Returns the bytes/s that a device sends within a slice; 0 if the chip's figures are not known."""
    chip, group = self._chip, self._group(axes)
    if not chip.ici_bandwidth:
      return 0.0
    reached = chip.ici_bandwidth * rate_of(chip, 'ici').value
    if chip.torus_dims == 0:
      return reached * chip.ici_links
    if kind == 'collective_permute':
      return reached
    return reached * links_of_group(chip, self._sizes, {place.coords for place in group}, kind == 'all_to_all')

  @staticmethod
  def _num_slices(group: Sequence[Place]) -> int:
    return len({place.slice_index for place in group})

  def _group(self, axes: tuple[str, ...]) -> list[Place]:
    """Returns the devices of the group that the first device is in."""
    index = tuple(slice(None) if name in axes else 0 for name in self._axis_names)
    return list(np.atleast_1d(self._places[index]).flat)


def links_of_group(
  chip: Chip, sizes: Sequence[int], group: Collection[tuple[int, ...]], is_exchange: bool = False
) -> float:
  """Returns how many links, in one direction each, a device of a group can use at once.

  Args:
    chip: whose slice is a torus.
    sizes: of the torus's dims.
    group: coordinates of the group's chips; the slice's other chips are in groups of the same form.
    is_exchange: whether it is an all-to-all: the rate counts what is sent, not the piece that stays.
  """
  places = [sorted(set(at)) for at in zip(*group)]
  dims = [(at, size, is_ring(chip, size)) for at, size in zip(places, sizes) if len(at) > 1]
  if not dims:  # the cores of a chip
    return chip.ici_links
  if not is_exchange:
    return sum(links_of_dim(*dim) for dim in dims)
  return min(exchange_links(*dim) for dim in dims) * (len(group) - 1) / len(group)


def is_ring(chip: Chip, size: int) -> bool:
  """Whether a dim of this size closes to a ring: multiples of 4 on a 3D torus, a full pod's 16 on a 2D one."""
  return size % 4 == 0 if chip.torus_dims == 3 else size == 16


def links_of_dim(places: Sequence[int], size: int, is_ring: bool) -> float:
  """Returns how many links of a dim, in one direction each, a device of a group can use at once for its neighbours.

  Args:
    places: where in the dim the group's devices are, in order; at least two. The dim's other places belong to groups of
      the same form.
    size: of the dim.
    is_ring: whether its ends are linked.
  """
  as_line = 1 / _groups_over_a_link(places)
  as_ring = 2 * len(places) / size if is_ring else 0.0  # both ways round, each shared by size / len(places) groups
  return max(as_line, as_ring)


def exchange_links(places: Sequence[int], size: int, is_ring: bool) -> float:
  """Returns the rate of an all-to-all along a dim, in links: all that a device has, its own piece too, over the time.

  A piece goes a quarter of a ring on average, over 2 links a device: size / 8 of the time that one link takes for all.
  The link in the middle of a line carries what the devices on one side have for the other side.

  Args:
    places, size, is_ring: as of `links_of_dim`.
  """
  side = len(places) // 2
  over_the_middle = side * (len(places) - side) / len(places)
  as_line = 1 / (over_the_middle * _groups_over_a_link(places))
  return max(as_line, 8 / size) if is_ring else as_line


def _groups_over_a_link(places: Sequence[int]) -> int:
  """Returns how many groups of this form lie across one link: as many as the widest gap is long."""
  return max(after - before for before, after in itertools.pairwise(places))
