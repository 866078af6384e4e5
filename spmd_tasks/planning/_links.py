"""Gives a collective's bandwidth: which links of a torus, of a node's switch or between slices it can use."""

from collections.abc import Sequence

from jax.sharding import Mesh
import numpy as np

from spmd_tasks.planning.chips import Chip
from spmd_tasks.planning.collectives import Collective


class Links:
  """The networks of a mesh of chips.

  On a torus a collective sends along every dim in which the devices of its group differ: in both directions where the
  dim closes to a ring, else as fast as the two ends of a line, which have one link each. In a node with a switch it has
  all of a chip's links. Between slices every chip has its share of the data-center network.
  """

  def __init__(self, mesh: Mesh, chip: Chip):
    self._chip = chip
    self._axis_names = tuple(mesh.axis_names)
    self._coordinates = _coordinates(mesh)

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
    directions = sum(2 if self._is_ring(size) else 1 for size in self._dims(collective.axes))
    return chip.ici_bandwidth * max(1, directions)

  def _dims(self, axes: Sequence[str]) -> list[int]:
    """Returns the sizes of the torus dims in which devices along the mesh axes differ."""
    if self._coordinates is None:
      return []
    num_dims = self._coordinates.shape[-1]
    extent = self._coordinates.reshape(-1, num_dims).max(axis=0) + 1
    index = tuple(slice(None) if name in axes else 0 for name in self._axis_names)
    group = self._coordinates[index].reshape(-1, num_dims)
    return [int(extent[dim]) for dim in range(num_dims) if len(set(group[:, dim])) > 1]

  def _is_ring(self, size: int) -> bool:
    """Whether a dim of this size closes to a ring: multiples of 4 on a 3D torus, a full pod's 16 on a 2D one."""
    return size % 4 == 0 if self._chip.torus_dims == 3 else size == 16


def _coordinates(mesh: Mesh) -> np.ndarray | None:
  """Returns [*mesh, dims of the torus]; None where the devices have no coordinates."""
  found = [getattr(device, 'coords', None) for device in mesh.devices.flat]
  if any(coordinates is None for coordinates in found):
    return None
  return np.array(found).reshape(*mesh.devices.shape, -1)
