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
from spmd_tasks.layers.moe._permutation import Permutation, gather_gates, gather_rows, sort_by_expert, sum_rows


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
  by_expert = sort_by_expert(expert_ids, num_devices * experts.num_experts)
  sizes = by_expert.group_sizes.reshape(num_devices, experts.num_experts)
  buffers = name_routing(_fill_buffers(by_expert, expert_ids // experts.num_experts, jnp.sum(sizes, axis=1), capacity))

  def send(blocks: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(blocks, exchange.axes, 0, 0, tiled=True)

  ends = jnp.minimum(jnp.cumsum(sizes, axis=1), capacity)  # of each expert's rows in each device's buffer
  places = jnp.arange(capacity, dtype=jnp.int32)
  received_ids = jnp.sum(places[None, :, None] >= send(ends)[:, None, :], axis=-1, dtype=jnp.int32)
  received_ids = name_routing(received_ids.reshape(-1))

  rows, row_gates = send(gather_rows(x, buffers)), send(gather_gates(gates, buffers))
  y = sum_rows(send(apply_to_received(experts, rows, received_ids, row_gates)), buffers)
  statistics = {'pair_capacity': (jnp.float32(capacity), jnp.float32(1))}
  if exchange.capacity_factor is not None:
    num_assigned = jnp.sum(sizes)
    statistics['fraction_dropped'] = exchange.fraction_dropped(num_assigned - jnp.sum(ends[:, -1]), num_assigned)
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


def _fill_buffers(by_expert: Permutation, devices: jax.Array, sizes: jax.Array, capacity: int) -> Permutation:
  """Returns the order of the rows in the X send buffers of P places each.

  Args:
    by_expert: the order by expert, and therefore by device.
    devices: int32 [n, k], each assignment's device, X where it is not routed.
    sizes: int32 [X], rows for each device.
    capacity: P.
  """
  assert by_expert.assignments is not None
  num_devices, num_assignments = sizes.shape[0], devices.size
  starts, place = exclusive_cumsum(sizes), jnp.arange(capacity, dtype=jnp.int32)
  # Each buffer is a slice of the rows; the padding keeps the last slices within bounds.
  rows = jnp.pad(by_expert.assignments, (0, capacity), constant_values=num_assignments)
  slices = jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(rows, start, capacity))(starts)
  assignments = jnp.where(place[None, :] < sizes[:, None], slices, num_assignments).reshape(-1)
  # Comparisons replace a look-up, which is slow on TPUs.
  is_to = devices[..., None] == jnp.arange(num_devices, dtype=devices.dtype)[None, None, :]
  places = by_expert.positions - jnp.sum(jnp.where(is_to, starts[None, None, :], 0), axis=-1)
  has_place = (devices < num_devices) & (places < capacity)
  return Permutation(
    token_ids=assignments // devices.shape[1],  # n where there is no assignment, since num_assignments = n * k
    positions=jnp.where(has_place, devices * capacity + places, num_devices * capacity),
    group_sizes=jnp.minimum(sizes, capacity),
    assignments=assignments,
  )
