"""Says how long a transfer occupies its link: collectives on a torus, in a node or between slices; copies to the host.

What a dim of a torus gives to a group, in links of one direction that every device can use at once (`links_of_dim`):

    all 4 devices of a dim of 4 that closes to a ring    2      each sends both ways round
    the same, where it does not close                    1      what lies beyond an end of a line comes through one link
    devices 0, 1 of 4                                    1      a line: the way round is the other group's as well
    devices 0, 2 of 4 that close                         1      a ring that shares its links with that of devices 1, 3
    devices 0, 2 of 8                                    1/2    a line that shares its links with devices 1, 3

Gathers and reductions pass pieces on from neighbour to neighbour, along all dims at once. In an all-to-all every device
has a piece for every other: half of what a line's devices send crosses its middle (`exchange_links`).

Which dims close, and the costs on rings: Austin et al., How to Scale Your Model (2025),
https://jax-ml.github.io/scaling-book/tpus and /sharding.

Offloaded activations are copied between a device and the memory of its host. The scheduled program marks arrays of the
host by the memory space 5. Layers' values are written there and read back slice by slice, by copies and by updates and
slices of a stack, inside of fusions and of asynchronous computations.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import itertools

from jax.sharding import Mesh
import numpy as np

from spmd_tasks.planning.chips import Chip
from spmd_tasks.planning.collectives import WRAPPER, Collective, end_of_pair, unwrapped_computations
from spmd_tasks.planning.hlo import HOST_MEMORY, Instruction, Shape
from spmd_tasks.planning.program import Program

HOST_QUEUES = ('to the host', 'from the host')  # the link has a lane for each
_READS = frozenset({'copy', 'copy-start', 'dynamic-slice', 'slice'})


class Links:
  """The networks of a mesh of chips.

  On a torus a collective sends along every dim in which the devices of its group differ, at the same time as the other
  groups of the same form, which have the rest of these dims. In a node with a switch it has all of a chip's links.
  Between slices every chip has its share of the data-center network.
  """

  def __init__(self, mesh: Mesh, chip: Chip):
    self._chip = chip
    self._coordinates = _coordinates(mesh)
    self._links: dict[tuple[bool, tuple[int, ...]], float] = {}  # by whether it is an exchange, and the group

  def seconds(self, collective: Collective) -> float:
    """Returns how long one execution occupies its network; 0 if the chip's figures are not known."""
    bandwidth = self.bandwidth(collective)
    return collective.bytes_per_device / bandwidth if bandwidth else 0.0

  def bandwidth(self, collective: Collective) -> float | None:
    """Returns the bytes/s that a device sends; None if the chip's figures are not known."""
    chip = self._chip
    if collective.network == 'dcn':
      return chip.dcn_bandwidth
    if not chip.ici_bandwidth:
      return None
    if chip.torus_dims == 0:
      return chip.ici_bandwidth * chip.ici_links
    if collective.kind == 'collective_permute':
      return chip.ici_bandwidth  # to one other device
    is_exchange = collective.kind in ('all_to_all', 'ragged_all_to_all')
    key = is_exchange, collective.group
    if key not in self._links:
      self._links[key] = self._links_of_group(is_exchange, collective.group)
    return chip.ici_bandwidth * self._links[key]

  def _links_of_group(self, is_exchange: bool, group: Sequence[int]) -> float:
    """Returns how many links, in one direction each, a device of the group can use at once; 1 without coordinates."""
    if self._coordinates is None:
      return 1.0
    sizes = (self._coordinates.max(axis=0) + 1).tolist()
    places = [sorted(set(dim)) for dim in self._coordinates[list(group)].T.tolist()]
    dims = [(dim, size, is_ring(self._chip, size)) for dim, size in zip(places, sizes, strict=True) if len(dim) > 1]
    if not dims:
      return 1.0
    if not is_exchange:
      return sum(links_of_dim(*dim) for dim in dims)
    return min(exchange_links(*dim) for dim in dims) * (len(group) - 1) / len(group)  # what stays is not sent


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


def _coordinates(mesh: Mesh) -> np.ndarray | None:
  """Returns [devices in the mesh's order, dims of the torus]; None where the devices have no coordinates."""
  found = [getattr(device, 'coords', None) for device in mesh.devices.flat]
  return None if any(coordinates is None for coordinates in found) else np.array(found)


@dataclasses.dataclass(frozen=True)
class Transfer:
  """A collective, or a copy to the host or from there, which takes `seconds` each of the `count` times in a step.

  The program starts it at `start` and waits for it at `end`; where there is none, `start` does both. Those of a `queue`
  share a link: a network, or one direction to the host.
  """

  start: Instruction
  end: Instruction | None
  op_name: str
  queue: str
  count: float
  bytes_per_step: float
  seconds: float

  @property
  def basis(self) -> str:
    """What the program waits for: 'ici', 'dcn' or 'host'."""
    return 'host' if self.queue in HOST_QUEUES else self.queue


def transfers(program: Program, collectives: Sequence[Collective], mesh: Mesh, chip: Chip) -> Iterator[Transfer]:
  """Yields the collectives, which are those of the program, and its copies to the host and back."""
  links = Links(mesh, chip)
  for each in collectives:
    numbers = each.count, each.bytes_per_step, links.seconds(each)
    yield Transfer(each.start, each.end, each.op_name, each.network, *numbers)
  for computation, count in unwrapped_computations(program):
    for start in computation.instructions:
      for moved in _moved_by(start):
        end = end_of_pair(computation, start) if start.opcode.endswith('-start') else None
        seconds = abs(moved) / chip.host_bandwidth if chip.host_bandwidth else 0.0
        yield Transfer(start, end, start.op_name, HOST_QUEUES[moved < 0], count, count * abs(moved), seconds)


def _moved_by(instruction: Instruction) -> Iterator[int]:
  """Yields `_moved` of an instruction, or of those in its fusion or asynchronous computation, without zeros."""
  if moved := _moved(instruction):
    yield moved
  if instruction.opcode in ('fusion', WRAPPER):
    for each in instruction.called[0].instructions:
      yield from _moved_by(each)


def _moved(instruction: Instruction) -> int:
  """The bytes that an instruction writes to the host, negative if it reads them from there."""
  shapes = [operand.shape for operand in instruction.operands]
  if instruction.opcode == 'dynamic-update-slice':
    return shapes[1].stored_bytes if _is_on_host(shapes[0]) and not _is_on_host(shapes[1]) else 0
  if instruction.opcode not in _READS:
    return 0
  result = _first_array(instruction.shape)  # a start has its operand and its handle after it
  if _is_on_host(shapes[0]) == _is_on_host(result):
    return 0
  return result.stored_bytes if _is_on_host(result) else -result.stored_bytes


def _first_array(shape: Shape) -> Shape:
  return next(shape.leaves(), shape)


def _is_on_host(shape: Shape) -> bool:
  return _first_array(shape).memory_space == HOST_MEMORY
