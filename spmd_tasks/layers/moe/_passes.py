"""Further passes: an all-to-all with small buffers that drops nothing.

Buffers for the worst case, all tokens to one device, cost memory and time that balanced routing does not need. With a
`capacity_factor` a buffer has room for that multiple of balanced routing. What does not fit goes in a second pass, a
third and so on, as many as the fullest pair of devices needs. Under balanced routing one pass does everything. The
numbers are those of one big pass.

The first pass is computed and differentiated like any other layer. Further ones run in a loop whose length follows from
the routing, and none of their arrays is kept: the backward pass computes them again.

Shapes: n tokens of this device, k choices per token, X devices of the exchange, E experts per device, D model.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spmd_tasks.layers.base import Ratios
from spmd_tasks.layers.moe._expert_parallel import Dispatch, Exchange
from spmd_tasks.layers.moe._experts import LocalExperts, name_routing

# The name of the loops in a compiled program, by which a plan knows that balanced routing runs them not at all.
FURTHER_PASSES_NAME = 'further_passes_of_experts'


def dispatch_in_passes(dispatch: Dispatch) -> Dispatch:
  """Returns a dispatch that calls `dispatch`, an all-to-all with bounded buffers, until every assignment is done."""
  return functools.partial(_in_passes, dispatch)


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


def _in_passes(
  dispatch: Dispatch,
  x: jax.Array,
  expert_ids: jax.Array,
  gates: jax.Array,
  experts: LocalExperts,
  exchange: Exchange,
) -> tuple[jax.Array, Ratios]:
  """Implements Dispatch.

  Statistics: those of `dispatch`, and
    num_passes: how many passes were needed.
  """
  assert exchange.capacity_factor is not None
  num_devices, unrouted = exchange.num_devices, exchange.num_devices * experts.num_experts
  worst = x.shape[0] * min(expert_ids.shape[1], experts.num_experts)  # rows from one device to another
  room = min(worst, max(1, int(exchange.capacity_factor * expert_ids.size) // num_devices))
  if room == worst:
    return dispatch(x, expert_ids, gates, experts, exchange)

  # An assignment's pass follows from its rank among those to the same device, in the order of the tokens.
  device = (expert_ids // experts.num_experts).reshape(-1)  # X where not routed
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

  def run(x: jax.Array, gates: jax.Array, experts: LocalExperts) -> tuple[jax.Array, Ratios]:
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
