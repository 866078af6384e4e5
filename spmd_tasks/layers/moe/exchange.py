"""Exchange: devices with different tokens and different experts, and what the dispatches between them share.

Shapes: n tokens of this device, k choices per token, X devices of the exchange, E experts per device, R rows, D model.

Device i of the exchange holds the experts [i * E, (i + 1) * E); X * E is nowhere.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp

from spmd_tasks.layers.moe.local_experts import LocalExperts, name_routing
from spmd_tasks.layers.moe.permutation import Permutation, gather_rows, sort_by_expert

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
  """The devices of an exchange.

  Attributes:
    axes: their mesh axes, the slowest first.
    num_devices: X.
    platform: 'cpu', 'gpu' or 'tpu'; None where the mesh is abstract.
    capacity_factor: the room in buffers of fixed size, in multiples of what balanced routing fills; None for the worst
      case.
    all_axes: all mesh axes over which anything differs, `axes` among them.
  """

  axes: Axes
  num_devices: int
  platform: str | None
  capacity_factor: float | None
  all_axes: Axes

  def capacity(self, *, balanced: float, worst: int) -> int:
    """The rows that a buffer has room for, given how many there are in the balanced and in the worst case."""
    if self.capacity_factor is None:
      return worst
    return min(worst, max(1, math.ceil(self.capacity_factor * balanced)))

  def fraction_dropped(self, num_dropped: jax.Array, num_assigned: jax.Array) -> jax.Array:
    """Float32 scalar, the same everywhere, from each device's own counts."""
    counts = jnp.stack([num_dropped, num_assigned]).astype(jnp.float32)
    all_dropped, all_assigned = jax.lax.psum(counts, self.all_axes)
    return all_dropped / jnp.maximum(all_assigned, 1.0)


class Dispatch(Protocol):
  """How tokens meet experts of other devices; runs on every device of the exchange, inside a `shard_map`."""

  def __call__(
    self, x: jax.Array, expert_ids: jax.Array, gates: jax.Array, experts: LocalExperts, exchange: Exchange
  ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    """Returns (y [n, D], statistics): for each token of this device the sum of its experts' results by their gates.

    The statistics are float32 scalars, the same on all devices: `fraction_dropped` where anything can be dropped.

    Args:
      x: [n, D].
      expert_ids: int32 [n, k] in [0, X * E], the k of a token different from one another or nowhere.
      gates: float32 [n, k], 0 for nowhere.
      experts: this device's.
      exchange: the devices.

    Raises:
      UserError: the dispatch does not run on this platform.
    """
    ...


def apply_to_received(experts: LocalExperts, rows: jax.Array, sizes: jax.Array) -> jax.Array:
  """[R, D], the experts' results for received rows, each in the place of its row.

  Args:
    experts: this device's.
    rows: [R, D], sorted by sender, then by expert.
    sizes: int32 [X, E or E + 1], the number of rows from each sender for each expert; column E counts rows without
      content. The rows after these have none either, and all of them give zeros.
  """
  num_rows, (num_senders, width) = rows.shape[0], sizes.shape
  column_ids = jnp.tile(jnp.arange(width, dtype=jnp.int32), num_senders)
  row_ids = jnp.repeat(
    jnp.append(column_ids, experts.num_experts),
    jnp.append(sizes.reshape(-1), num_rows - jnp.sum(sizes)),
    total_repeat_length=num_rows,
  )
  by_expert = name_routing(sort_by_expert(row_ids[:, None], experts.num_experts))
  back = Permutation(
    token_ids=by_expert.positions[:, 0], positions=by_expert.token_ids[:, None], group_sizes=by_expert.group_sizes
  )
  results = experts.apply_to_rows(gather_rows(rows, by_expert), by_expert.group_sizes)
  return gather_rows(results, back)


def exclusive_cumsum(sizes: jax.Array, axis: int = 0) -> jax.Array:
  """Where each part begins when parts of these sizes follow one another."""
  return jnp.cumsum(sizes, axis=axis, dtype=sizes.dtype) - sizes
