"""Ragged all-to-all dispatch: only routed rows move, each to the device of its expert and back.

Shapes: n tokens of this device, k choices per token, R = n * k rows, X devices of the exchange, E experts per device,
M rows of the receiving buffer, D model.

For GPU and TPU; XLA has no such collective on CPU. The number of rows sent follows the routing, but the receiving
buffer has a fixed size: by default room for the worst case. A `capacity_factor` makes the buffer smaller; rows that do
not fit are then dropped and counted.
"""

import functools

from flax import struct
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import Ratios
from spmd_tasks.layers.moe._expert_parallel import Axes, Exchange, apply_to_received, exclusive_cumsum
from spmd_tasks.layers.moe._experts import LocalExperts, name_routing
from spmd_tasks.layers.moe._permutation import sort_by_expert, without_unrouted


class Route(struct.PyTreeNode):
  """One device's arguments of `jax.lax.ragged_all_to_all`.

  Attributes:
    input_offsets: int32 [X], the first row for each device, in this device's input.
    send_sizes: int32 [X], the number of rows for each device.
    output_offsets: int32 [X], the first of these rows in each device's output.
    recv_sizes: int32 [X], the number of rows from each device.
  """

  input_offsets: jax.Array
  send_sizes: jax.Array
  output_offsets: jax.Array
  recv_sizes: jax.Array


class Routes(struct.PyTreeNode):
  """The routes of rows to their experts and of results back, and the number of rows received.

  Attributes:
    there, back: the routes of rows and of results.
    received: int32 [X, E], rows received from each device for each expert of this device.
  """

  there: Route
  back: Route
  received: jax.Array


def plan_routes(sizes: jax.Array, device: jax.Array, capacity: int) -> Routes:
  """Returns the routes of one device, given buffers with room for `capacity` rows.

  Buffers are filled by sender, then by expert; the last rows are dropped if the buffer overflows.

  Args:
    sizes: int32 [X, X, E], rows from each device, for each device, for each expert of the latter.
    device: int32 scalar, the device's index in the exchange.
    capacity: M.
  """
  totals = jnp.sum(sizes, axis=2)
  row_starts = exclusive_cumsum(totals, axis=1)  # [sender, receiver], in the rows of the sender
  buffer_ends = jnp.minimum(jnp.cumsum(totals, axis=0), capacity)  # in the buffer of the receiver
  moved = jnp.diff(buffer_ends, axis=0, prepend=0)
  buffer_starts = buffer_ends - moved
  arriving = sizes[:, device]
  ends = jnp.minimum(jnp.cumsum(arriving.reshape(-1)), capacity)
  return Routes(
    there=Route(
      input_offsets=row_starts[device],
      send_sizes=moved[device],
      output_offsets=buffer_starts[device],
      recv_sizes=moved[:, device],
    ),
    back=Route(
      input_offsets=buffer_starts[:, device],
      send_sizes=moved[:, device],
      output_offsets=row_starts[:, device],
      recv_sizes=moved[device],
    ),
    received=jnp.diff(ends, prepend=0).reshape(arriving.shape),
  )


def ragged_all_to_all(
  x: jax.Array, expert_ids: jax.Array, gates: jax.Array, experts: LocalExperts, exchange: Exchange
) -> tuple[jax.Array, Ratios]:
  """Implements Dispatch.

  Statistics:
    row_capacity: M.
    fraction_dropped: only with a `capacity_factor`.
  """
  if exchange.platform == 'cpu':
    raise UserError(
      "dispatch='ragged_all_to_all' does not run on CPU, where XLA has no such collective: use dispatch='ring' or "
      "dispatch='padded_all_to_all'."
    )
  num_devices, num_rows = exchange.num_devices, expert_ids.size
  capacity = exchange.capacity(
    balanced=num_rows, worst=num_devices * x.shape[0] * min(expert_ids.shape[1], experts.num_experts)
  )
  permutation = name_routing(without_unrouted(sort_by_expert(expert_ids, num_devices * experts.num_experts)))
  sizes = permutation.group_sizes.reshape(num_devices, experts.num_experts)
  routes = plan_routes(jax.lax.all_gather(sizes, exchange.axes), jax.lax.axis_index(exchange.axes), capacity)
  received_ids = name_routing(_expert_ids(routes.received, capacity))

  def send(rows: jax.Array) -> jax.Array:
    return _send(exchange.axes, (capacity, num_rows), rows, routes.there, routes.back)

  def apply(rows: jax.Array, row_gates: jax.Array | None) -> jax.Array:
    row_gates = None if row_gates is None else send(row_gates[:, None])[:, 0]
    results = apply_to_received(experts, send(rows), received_ids, row_gates)
    return _send(exchange.axes, (num_rows, capacity), results, routes.back, routes.there)

  y = experts.permute_and_apply(apply, x, gates, permutation)
  statistics = {'row_capacity': (jnp.float32(capacity), jnp.float32(1))}
  if exchange.capacity_factor is not None:
    num_assigned = jnp.sum(sizes)
    num_dropped = num_assigned - jnp.sum(routes.there.send_sizes)
    statistics['fraction_dropped'] = exchange.fraction_dropped(num_dropped, num_assigned)
  return y, statistics


def _expert_ids(received: jax.Array, capacity: int) -> jax.Array:
  """Returns int32 [M]: the expert of each row of the receiving buffer, E for a row without content.

  Args:
    received: int32 [X, E], rows by sender and expert, in this order.
    capacity: M.
  """
  num_experts = received.shape[1]
  ends = jnp.cumsum(received.reshape(-1))
  segments = jnp.sum(jnp.arange(capacity, dtype=jnp.int32)[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)
  return jnp.where(segments < ends.shape[0], segments % num_experts, num_experts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _send(axes: Axes, num_rows: tuple[int, int], rows: jax.Array, there: Route, back: Route) -> jax.Array:
  """Sends rows [num_rows[1], D] along the route `there`. Returns [num_rows[0], D], zeros for rows that nobody sends.

  The gradient takes the route `back`. (JAX's own rule would also compute a gradient for the overwritten buffer.)
  """
  del back
  buffer = jnp.zeros((num_rows[0], rows.shape[1]), rows.dtype)
  return jax.lax.ragged_all_to_all(
    rows,
    buffer,
    there.input_offsets,
    there.send_sizes,
    there.output_offsets,
    there.recv_sizes,
    axis_name=axes,
  )


def _send_forward(axes, num_rows, rows, there, back):
  return _send(axes, num_rows, rows, there, back), (there, back)


def _send_backward(axes, num_rows, residuals, d_arrived):
  there, back = residuals
  return _send(axes, num_rows[::-1], d_arrived, back, there), None, None


_send.defvjp(_send_forward, _send_backward)
