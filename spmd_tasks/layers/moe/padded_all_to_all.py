"""The padded all-to-all: rows travel to their experts and back in buffers of one fixed size per pair of devices.

Shapes: n tokens of this device, k choices per token, R = n * k rows, X devices of the exchange, E experts per device,
P the pair capacity, D model.

It runs everywhere and has no scatter. With the default, room for the worst case, nothing is dropped, but X * P rows
travel for R real ones. A `capacity_factor` bounds both, and then overflow is dropped and counted.
"""

from collections.abc import Mapping
import functools

from absl import logging
import jax
import jax.numpy as jnp

from spmd_tasks.layers.moe.exchange import Exchange, apply_to_received, exclusive_cumsum
from spmd_tasks.layers.moe.local_experts import LocalExperts, name_routing
from spmd_tasks.layers.moe.permutation import gather_rows, sort_by_expert, take_rows


def padded_all_to_all(
  x: jax.Array, expert_ids: jax.Array, gates: jax.Array, experts: LocalExperts, exchange: Exchange
) -> tuple[jax.Array, Mapping[str, jax.Array]]:
  """The Dispatch. Statistics: `fraction_dropped`, and `pair_capacity`, the rows from one device to another."""
  num_devices, num_rows = exchange.num_devices, expert_ids.size
  capacity = exchange.capacity(
    balanced=num_rows / num_devices, worst=x.shape[0] * min(expert_ids.shape[1], experts.num_experts)
  )
  _log_capacity(capacity, num_rows, num_devices)
  permutation = name_routing(sort_by_expert(expert_ids, num_devices * experts.num_experts))
  sizes = permutation.group_sizes.reshape(num_devices, experts.num_experts)
  sent = jnp.diff(jnp.minimum(jnp.cumsum(sizes, axis=1), capacity), axis=1, prepend=0)
  row_ids, slots = _slots(jnp.sum(sizes, axis=1), capacity, num_rows)

  def travel(blocks: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(blocks, exchange.axes, 0, 0, tiled=True)

  rows = travel(_move_rows(gather_rows(x, permutation), row_ids, slots))
  received = travel(sent)
  unused = capacity - jnp.sum(received, axis=1, keepdims=True)
  results = travel(apply_to_received(experts, rows, jnp.concatenate([received, unused], axis=1)))
  # Back to one row per choice before the gates: their gradient keeps R rows rather than X * P.
  y = experts.combine(_move_rows(results, slots, row_ids), gates, permutation)
  statistics = {'pair_capacity': jnp.asarray(capacity, jnp.float32)}
  if exchange.capacity_factor is not None:
    num_assigned = jnp.sum(sizes)
    statistics['fraction_dropped'] = exchange.fraction_dropped(num_assigned - jnp.sum(sent), num_assigned)
  return y, statistics


@functools.cache
def _log_capacity(capacity: int, num_rows: int, num_devices: int) -> None:
  """Once per program: what a step costs follows from it."""
  logging.info(
    'padded_all_to_all: room for %d rows from each of %d devices to each other; balanced routing needs %.1f of %d.',
    capacity,
    num_devices,
    num_rows / num_devices,
    num_rows,
  )


def _slots(sizes: jax.Array, capacity: int, num_rows: int) -> tuple[jax.Array, jax.Array]:
  """Which row is in each slot of the buffers, and in which slot each row is.

  Args:
    sizes: int32 [X], rows for each device; rows are sorted by device.
    capacity: P.
    num_rows: R.

  Returns:
    int32 [X * P], R for an empty slot; int32 [R], X * P for a row without one.
  """
  num_devices = sizes.shape[0]
  starts, place = exclusive_cumsum(sizes), jnp.arange(capacity, dtype=jnp.int32)
  row_ids = jnp.where(place[None, :] < sizes[:, None], starts[:, None] + place[None, :], num_rows)
  # The rows for nowhere come last, as one more device whose rows have no slot.
  rest = num_rows - jnp.sum(sizes)
  device = jnp.repeat(
    jnp.arange(num_devices + 1, dtype=jnp.int32), jnp.append(sizes, rest), total_repeat_length=num_rows
  )
  place = jnp.arange(num_rows, dtype=jnp.int32) - jnp.append(starts, 0)[device]
  has_slot = (device < num_devices) & (place < capacity)
  return row_ids.reshape(-1), jnp.where(has_slot, device * capacity + place, num_devices * capacity)


@jax.custom_vjp
def _move_rows(rows: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
  """Rows from one order to another, zeros where there is none.

  Args:
    rows: [M, D].
    sources: int32 [N], the row that comes to each place, M for none.
    targets: int32 [M], the place that each row goes to, N for none: the inverse, and the way of the gradient.

  Returns:
    [N, D].
  """
  del targets
  return take_rows(rows, sources)


def _move_rows_forward(rows, sources, targets):
  return _move_rows(rows, sources, targets), (sources, targets)


def _move_rows_backward(residuals, d_moved):
  sources, targets = residuals
  return _move_rows(d_moved, targets, sources), None, None


_move_rows.defvjp(_move_rows_forward, _move_rows_backward)
