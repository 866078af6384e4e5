"""Padded all-to-all dispatch: rows move to their experts and back in buffers of one fixed size per pair of devices.

Shapes: n tokens of this device, k choices per token, R = n * k rows, X devices of the exchange, E experts per device,
P the pair capacity, D model.

The padded all-to-all runs on every platform and has no scatter. By default the buffers have room for the worst case:
nothing is dropped, but X * P rows move where only R are real. A `capacity_factor` makes the buffers smaller; rows that
do not fit are then dropped and counted.
"""

import functools

from absl import logging
import jax
import jax.numpy as jnp

from spmd_tasks.layers.base import Ratios
from spmd_tasks.layers.moe._expert_parallel import Exchange, apply_to_received, exclusive_cumsum
from spmd_tasks.layers.moe._experts import LocalExperts, name_routing
from spmd_tasks.layers.moe._permutation import gather_rows, sort_by_expert, take_rows


def padded_all_to_all(
  x: jax.Array, expert_ids: jax.Array, gates: jax.Array, experts: LocalExperts, exchange: Exchange
) -> tuple[jax.Array, Ratios]:
  """Implements Dispatch.

  Statistics:
    pair_capacity: P, the rows from one device to another.
    fraction_dropped: only with a `capacity_factor`.
  """
  num_devices, num_rows = exchange.num_devices, expert_ids.size
  capacity = exchange.capacity(
    balanced=num_rows / num_devices, worst=x.shape[0] * min(expert_ids.shape[1], experts.num_experts)
  )
  _log_capacity(capacity, num_rows, num_devices)
  permutation = name_routing(sort_by_expert(expert_ids, num_devices * experts.num_experts))
  sizes = permutation.group_sizes.reshape(num_devices, experts.num_experts)
  sent = jnp.diff(jnp.minimum(jnp.cumsum(sizes, axis=1), capacity), axis=1, prepend=0)
  row_ids, places = _fill_buffers(jnp.sum(sizes, axis=1), capacity, num_rows)

  def send(blocks: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(blocks, exchange.axes, 0, 0, tiled=True)

  rows = send(_move_rows(gather_rows(x, permutation), row_ids, places))
  received = send(sent)
  unused = capacity - jnp.sum(received, axis=1, keepdims=True)
  results = send(apply_to_received(experts, rows, jnp.concatenate([received, unused], axis=1)))
  # Move back to one row per choice before applying the gates: their gradient then saves R rows instead of X * P.
  y = experts.combine(_move_rows(results, places, row_ids), gates, permutation)
  statistics = {'pair_capacity': (jnp.float32(capacity), jnp.float32(1))}
  if exchange.capacity_factor is not None:
    num_assigned = jnp.sum(sizes)
    statistics['fraction_dropped'] = exchange.fraction_dropped(num_assigned - jnp.sum(sent), num_assigned)
  return y, statistics


@functools.cache
def _log_capacity(capacity: int, num_rows: int, num_devices: int) -> None:
  """Logs the capacity once per program, because the cost of a step follows from it."""
  logging.info(
    'padded_all_to_all: room for %d rows from each of %d devices to each other; balanced routing needs %.1f of %d.',
    capacity,
    num_devices,
    num_rows / num_devices,
    num_rows,
  )


def _fill_buffers(sizes: jax.Array, capacity: int, num_rows: int) -> tuple[jax.Array, jax.Array]:
  """Assigns rows to places in the X send buffers of P places each.

  Args:
    sizes: int32 [X], rows for each device; rows are sorted by device.
    capacity: P.
    num_rows: R.

  Returns:
    (int32 [X * P], the row in each place, R for an empty place; int32 [R], the place of each row, X * P for a row
    without a place).
  """
  num_devices = sizes.shape[0]
  starts, place = exclusive_cumsum(sizes), jnp.arange(capacity, dtype=jnp.int32)
  row_ids = jnp.where(place[None, :] < sizes[:, None], starts[:, None] + place[None, :], num_rows)
  # Rows that are not routed come last, as rows for one more device that has no buffer.
  rest = num_rows - jnp.sum(sizes)
  device = jnp.repeat(
    jnp.arange(num_devices + 1, dtype=jnp.int32), jnp.append(sizes, rest), total_repeat_length=num_rows
  )
  place = jnp.arange(num_rows, dtype=jnp.int32) - jnp.append(starts, 0)[device]
  has_place = (device < num_devices) & (place < capacity)
  return row_ids.reshape(-1), jnp.where(has_place, device * capacity + place, num_devices * capacity)


@jax.custom_vjp
def _move_rows(rows: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
  """Moves rows from one order to another.

  Args:
    rows: [M, D].
    sources: int32 [N], the row for each place, M for none.
    targets: int32 [M], the place of each row, N for none: the inverse of `sources`, which moves the gradient back.

  Returns:
    [N, D], zeros for a place without a row.
  """
  del targets
  return take_rows(rows, sources)


def _move_rows_forward(rows, sources, targets):
  return _move_rows(rows, sources, targets), (sources, targets)


def _move_rows_backward(residuals, d_moved):
  sources, targets = residuals
  return _move_rows(d_moved, targets, sources), None, None


_move_rows.defvjp(_move_rows_forward, _move_rows_backward)
