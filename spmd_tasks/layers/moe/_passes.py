"""Further passes: an all-to-all with small buffers that drops nothing.

Buffers for the worst case, all tokens to one device, cost memory and time that balanced routing does not need. With a
`capacity_factor` a buffer has room for that multiple of balanced routing. What does not fit goes in a second pass, a
third and so on, as many as the fullest pair of devices needs. Under balanced routing one pass does everything. The
numbers are those of one big pass.

Shapes: n tokens of this device, k choices per token, X devices of the exchange, E experts per device, D model.
"""

import functools

import jax
import jax.numpy as jnp

from spmd_tasks.layers.base import Ratios
from spmd_tasks.layers.moe._expert_parallel import Dispatch, Exchange
from spmd_tasks.layers.moe._experts import LocalExperts, name_routing


def dispatch_in_passes(dispatch: Dispatch) -> Dispatch:
  """Returns a dispatch that calls `dispatch`, an all-to-all with bounded buffers, until every assignment is done."""
  return functools.partial(_in_passes, dispatch)


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
  most = -(-worst // room)
  if most == 1:
    return dispatch(x, expert_ids, gates, experts, exchange)

  # An assignment's pass follows from its rank among those to the same device, in the order of the tokens.
  device = (expert_ids // experts.num_experts).reshape(-1)  # X where not routed
  is_to = (device[:, None] == jnp.arange(num_devices)[None, :]).astype(jnp.int32)
  rank = jnp.sum((jnp.cumsum(is_to, axis=0) - 1) * is_to, axis=1)
  pass_ids = name_routing((rank // room).reshape(expert_ids.shape))
  needed = jax.lax.pmax(jnp.max(jnp.where(expert_ids < unrouted, pass_ids, 0)) + 1, exchange.all_axes)

  def run(index: jax.Array | int, x: jax.Array, gates: jax.Array, experts: LocalExperts) -> tuple[jax.Array, Ratios]:
    is_now = pass_ids == index
    ids = jnp.where(is_now, expert_ids, unrouted)
    return dispatch(x, ids, jnp.where(is_now, gates, 0.0), experts, exchange)

  y, statistics = run(0, x, gates, experts)

  @functools.partial(jax.checkpoint, prevent_cse=False)  # passes are rare: their buffers are not kept
  def add_pass(y: jax.Array, index: jax.Array, x: jax.Array, gates: jax.Array, experts: LocalExperts) -> jax.Array:
    return y + run(index, x, gates, experts)[0]

  def step(y: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
    return jax.lax.cond(index < needed, add_pass, lambda y, *_: y, y, index, x, gates, experts), None

  y, _ = jax.lax.scan(step, y, jnp.arange(1, most))
  return y, {**statistics, 'num_passes': (needed.astype(jnp.float32), jnp.float32(1))}
