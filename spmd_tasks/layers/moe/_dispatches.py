"""Ways to move tokens to experts on other devices: a ring, and an all-to-all in one pass or in several.

Shapes: n tokens of this device, k choices per token, R = n * k rows, X devices of the exchange, E experts per device, P
rows in a send buffer, D model. Each implements `Dispatch` (_expert_parallel.py) and runs on every platform.
"""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spmd_tasks.layers.base import Ratios
from spmd_tasks.layers.moe._expert_parallel import Dispatch, Exchange
from spmd_tasks.layers.moe._experts import ExpertWeights, name_routing
from spmd_tasks.layers.moe._permutation import (
  Permutation,
  gather_gates,
  gather_rows,
  move_rows,
  sort_by_expert,
  sum_rows,
)

# Names these loops in a compiled program. A plan does not count them, because balanced routing never runs them.
FURTHER_PASSES_NAME = 'further_passes_of_experts'


def ring(
  x: jax.Array, expert_ids: jax.Array, gates: jax.Array, experts: ExpertWeights, exchange: Exchange
) -> tuple[jax.Array, Ratios]:
  """Rotates token shards through the devices, each of which adds the outputs of its experts; drops nothing.

  After each of X hops, tokens and sums go to the next device. An all-gather of the tokens and one reduce-scatter of the
  sums would hold X * n * k rows where one hop holds n * k. In the backward pass the tokens rotate a second time and the
  experts' outputs are computed again, so the saved memory does not grow with X.
  """
  return _ring(exchange, x, expert_ids, gates, experts), {}


def _rotate(exchange: Exchange, step: Callable[[Any, Any], tuple[Any, Any]], moving: Any, local: Any) -> Any:
  """Calls `moving, local = step(moving, local)` X times and sends `moving` to the next device after each call.

  Returns the last (moving, local); `moving` is then back at its owner.
  """
  ring_order = [(i, (i + 1) % exchange.num_devices) for i in range(exchange.num_devices)]

  def step_and_send(carry, _):
    moving, local = step(*carry)
    return (jax.tree.map(lambda array: jax.lax.ppermute(array, exchange.axes, ring_order), moving), local), None

  return jax.lax.scan(step_and_send, (moving, local), None, length=exchange.num_devices)[0]


def _apply_local_experts(
  exchange: Exchange, x: jax.Array, expert_ids: jax.Array, gates: jax.Array, experts: ExpertWeights
) -> jax.Array:
  """Returns [n, D]: the contribution of this device's experts to the outputs of any device's tokens."""
  local_ids = expert_ids - jax.lax.axis_index(exchange.axes) * experts.num_experts
  is_local = (local_ids >= 0) & (local_ids < experts.num_experts)
  unrouted = experts.num_experts
  return experts.apply_to_tokens(x, jnp.where(is_local, local_ids, unrouted), jnp.where(is_local, gates, 0.0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(exchange, x, expert_ids, gates, experts):
  def step(moving, local):
    x, expert_ids, gates, y = moving
    return (x, expert_ids, gates, y + _apply_local_experts(exchange, x, expert_ids, gates, experts)), local

  (_, _, _, y), _ = _rotate(exchange, step, (x, expert_ids, gates, jnp.zeros_like(x)), None)
  return y


def _ring_backward(exchange, residuals, d_y):
  x, expert_ids, gates, experts = residuals

  def step(moving, sums):
    x, expert_ids, gates, d_y, d_x, d_gates = moving
    _, pull_back = jax.vjp(
      lambda x, gates, experts: _apply_local_experts(exchange, x, expert_ids, gates, experts), x, gates, experts
    )
    d_x_part, d_gates_part, d_experts = pull_back(d_y)
    sums = jax.tree.map(lambda total, d: total + d.astype(jnp.float32), sums, d_experts)
    return (x, expert_ids, gates, d_y, d_x + d_x_part, d_gates + d_gates_part), sums

  zeros = jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), experts)
  moving = (x, expert_ids, gates, d_y, jnp.zeros_like(x), jnp.zeros_like(gates))
  (_, _, _, _, d_x, d_gates), sums = _rotate(exchange, step, moving, zeros)
  return d_x, None, d_gates, jax.tree.map(lambda total, weight: total.astype(weight.dtype), sums, experts)


_ring.defvjp(lambda exchange, *arguments: (_ring(exchange, *arguments), arguments), _ring_backward)


def padded_all_to_all(
  x: jax.Array, expert_ids: jax.Array, gates: jax.Array, experts: ExpertWeights, exchange: Exchange
) -> tuple[jax.Array, Ratios]:
  """Moves rows to their experts and back in buffers of one fixed size per pair of devices, without a scatter.

  By default the buffers have room for the worst case: nothing is dropped, but X * P rows move where only R are real.
  With a `capacity_factor`, rows that do not fit are dropped and counted. The statistics are `pair_capacity`, P, and
  with a `capacity_factor` also `fraction_dropped`.
  """
  num_devices, factor = exchange.num_devices, exchange.capacity_factor
  capacity = _most_rows(expert_ids, experts)
  if factor is not None:
    capacity = max(1, math.ceil(min(capacity, factor * (expert_ids.size / num_devices))))
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
  num_assignments = num_devices * expert_ids.size
  y = sum_rows(send(_apply_to_received(experts, rows, received_ids, row_gates, num_assignments)), buffers)
  statistics = {'pair_capacity': (jnp.float32(capacity), jnp.float32(1))}
  if factor is not None:
    num_assigned = jnp.sum(sizes)
    counts = jnp.stack([num_assigned - jnp.sum(ends[:, -1]), num_assigned]).astype(jnp.float32)
    num_dropped, num_assigned = jax.lax.psum(counts, exchange.all_axes)
    statistics['fraction_dropped'] = num_dropped, num_assigned
  return y, statistics


def _most_rows(expert_ids: jax.Array, experts: ExpertWeights) -> int:
  """Returns the largest number of rows that one device may send to another."""
  return expert_ids.shape[0] * min(expert_ids.shape[1], experts.num_experts)


def _apply_to_received(
  experts: ExpertWeights, rows: jax.Array, expert_ids: jax.Array, gates: jax.Array, num_assignments: int
) -> jax.Array:
  """Applies this device's experts to rows [R, D] in any order, and returns the results [R, D] in their places.

  The id E marks a row without content, whose result is zeros; ids are int32 [R], gates float32 [R]. See `apply_to_rows`
  for `num_assignments`.
  """
  num_rows = rows.shape[0]
  by_expert = sort_by_expert(expert_ids[:, None], experts.num_experts)
  has_content = expert_ids < experts.num_experts
  targets = jnp.where(has_content, by_expert.positions[:, 0], num_rows)
  group_sizes, sources, targets = name_routing((by_expert.group_sizes, by_expert.token_ids, targets))
  rows, gates = move_rows(rows, sources, targets), move_rows(gates, sources, targets)
  results = experts.apply_to_rows(rows, group_sizes, gates, num_assignments)
  return move_rows(results, targets, sources)


def _fill_buffers(by_expert: Permutation, devices: jax.Array, sizes: jax.Array, capacity: int) -> Permutation:
  """Returns the order of the rows in the X send buffers of P places each.

  `by_expert` is the order by expert, and therefore by device; `devices` int32 [n, k] is each assignment's device, or X
  if it is not routed; `sizes` int32 [X] is the number of rows for each device.
  """
  num_devices, num_assignments = sizes.shape[0], devices.size
  starts, place = jnp.cumsum(sizes, dtype=sizes.dtype) - sizes, jnp.arange(capacity, dtype=jnp.int32)
  # Each buffer is a slice of the rows; the padding keeps the last slices within bounds.
  rows = jnp.pad(by_expert.assignments, (0, capacity), constant_values=num_assignments)
  slices = jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(rows, start, capacity))(starts)
  assignments = jnp.where(place[None, :] < sizes[:, None], slices, num_assignments).reshape(-1)
  # Comparisons replace a look-up, which is slow on TPUs.
  is_to = devices[..., None] == jnp.arange(num_devices, dtype=devices.dtype)[None, None, :]
  places = by_expert.positions - jnp.sum(jnp.where(is_to, starts[None, None, :], 0), axis=-1)
  has_place = (devices < num_devices) & (places < capacity)
  return Permutation(
    token_ids=assignments // devices.shape[1],  # n if there is no assignment, because num_assignments = n * k
    positions=jnp.where(has_place, devices * capacity + places, num_devices * capacity),
    group_sizes=jnp.minimum(sizes, capacity),
    assignments=assignments,
  )


class _Passes(NamedTuple):
  """The assignments of tokens to passes.

  Attributes:
    expert_ids: int32 [n, k].
    pass_ids: int32 [n, k], 0 for the first pass.
    num_needed: int32 scalar, the same on all devices.
  """

  expert_ids: jax.Array
  pass_ids: jax.Array
  num_needed: jax.Array


def in_passes(
  dispatch: Dispatch,
  x: jax.Array,
  expert_ids: jax.Array,
  gates: jax.Array,
  experts: ExpertWeights,
  exchange: Exchange,
) -> tuple[jax.Array, Ratios]:
  """Calls `dispatch`, an all-to-all with bounded buffers, until every assignment is computed.

  Assignments that do not fit go into a second pass, a third, and so on, as many as the fullest pair of devices needs;
  balanced routing needs one pass. The results equal those of one large pass. The first pass is differentiated like any
  other layer. The others run in a loop whose length depends on the routing, and none of their arrays is saved: the
  backward pass recomputes them.

  The statistics are those of `dispatch`, and `num_passes`, the number of passes.
  """
  assert exchange.capacity_factor is not None
  num_devices, unrouted = exchange.num_devices, exchange.num_devices * experts.num_experts
  worst = _most_rows(expert_ids, experts)
  room = max(1, int(min(worst * num_devices, exchange.capacity_factor * expert_ids.size)) // num_devices)
  if room == worst:
    return dispatch(x, expert_ids, gates, experts, exchange)

  # An assignment's pass follows from its rank among those to the same device, in the order of the tokens.
  device = (expert_ids // experts.num_experts).reshape(-1)  # X if not routed
  is_to = (device[:, None] == jnp.arange(num_devices)[None, :]).astype(jnp.int32)
  rank = jnp.sum((jnp.cumsum(is_to, axis=0) - 1) * is_to, axis=1)
  pass_ids = name_routing((rank // room).reshape(expert_ids.shape))
  needed = jax.lax.pmax(jnp.max(jnp.where(expert_ids < unrouted, pass_ids, 0)) + 1, exchange.all_axes)
  passes = _Passes(expert_ids, pass_ids, name_routing(needed))
  y, statistics = _run(dispatch, exchange, x, gates, experts, passes)
  return y, {**statistics, 'num_passes': (needed.astype(jnp.float32), jnp.float32(1))}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(dispatch, exchange, x, gates, experts, passes):
  return _run_forward(dispatch, exchange, x, gates, experts, passes)[0]


def _one_pass(dispatch: Dispatch, exchange: Exchange, passes: _Passes, index: jax.Array | int) -> Callable[..., Any]:
  """Returns the function (x, gates, experts) -> (y, statistics) of one pass."""

  def run(x: jax.Array, gates: jax.Array, experts: ExpertWeights) -> tuple[jax.Array, Ratios]:
    is_now, unrouted = passes.pass_ids == index, exchange.num_devices * experts.num_experts
    expert_ids = jnp.where(is_now, passes.expert_ids, unrouted)
    return dispatch(x, expert_ids, jnp.where(is_now, gates, 0.0), experts, exchange)

  return run


def _for_further_passes(passes: _Passes, body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
  """Runs `carry = body(index, carry)` for each pass but the first."""
  with jax.named_scope(FURTHER_PASSES_NAME):
    step = lambda state: (state[0] + 1, body(*state))
    return jax.lax.while_loop(lambda state: state[0] < passes.num_needed, step, (jnp.int32(1), carry))[1]


def _run_forward(dispatch, exchange, x, gates, experts, passes):
  first = _one_pass(dispatch, exchange, passes, 0)
  y, pull_back, statistics = jax.vjp(first, x, gates, experts, has_aux=True)

  def add_pass(index, y):
    return y + _one_pass(dispatch, exchange, passes, index)(x, gates, experts)[0]

  y = _for_further_passes(passes, add_pass, y)
  return (y, statistics), (pull_back, x, gates, experts, passes)


def _run_backward(dispatch, exchange, saved, cotangents):
  pull_back, x, gates, experts, passes = saved
  d_y, _ = cotangents

  def add_pass(index, gradients):
    run = _one_pass(dispatch, exchange, passes, index)
    _, pull_back, _ = jax.vjp(run, x, gates, experts, has_aux=True)
    return jax.tree.map(jnp.add, gradients, pull_back(d_y))

  return *_for_further_passes(passes, add_pass, pull_back(d_y)), None


_run.defvjp(_run_forward, _run_backward)
