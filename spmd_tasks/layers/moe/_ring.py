"""Ring dispatch: token shards rotate through the devices, and each device adds the outputs of its local experts.

Shapes: n tokens of this device, k choices per token, X devices of the exchange, E experts per device, D model.

In each of X hops a device adds its experts' outputs to the sums of the tokens that it currently holds, then sends
tokens and sums to the next device. After X hops every shard is back at its owner. The ring runs on every platform, has
static shapes and drops nothing.

An all-gather of the tokens and one reduce-scatter of the sums would send as much data, but would hold X * n * k rows
where one hop holds n * k: on 8 fake devices that took 5 times the memory and was no faster. In the backward pass the
tokens rotate a second time and the experts' outputs are computed again, so the saved memory does not grow with X.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.layers.base import Ratios
from spmd_tasks.layers.moe._expert_parallel import Exchange
from spmd_tasks.layers.moe._experts import LocalExperts


def ring(
  x: jax.Array, expert_ids: jax.Array, gates: jax.Array, experts: LocalExperts, exchange: Exchange
) -> tuple[jax.Array, Ratios]:
  """Implements Dispatch. Returns no statistics, because nothing is dropped."""
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
  exchange: Exchange, x: jax.Array, expert_ids: jax.Array, gates: jax.Array, experts: LocalExperts
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


def _ring_forward(exchange, x, expert_ids, gates, experts):
  return _ring(exchange, x, expert_ids, gates, experts), (x, expert_ids, gates, experts)


def _ring_backward(exchange, residuals, d_y):
  x, expert_ids, gates, experts = residuals

  def step(moving, sums):
    x, expert_ids, gates, d_y, d_x, d_gates = moving
    _, pull_back = jax.vjp(
      lambda x, gates, experts: _apply_local_experts(exchange, x, expert_ids, gates, experts), x, gates, experts
    )
    d_x_part, d_gates_part, d_experts = pull_back(d_y)
    sums = jax.tree.map(lambda total, d: total + d.astype(jnp.float32), sums, d_experts.weights)
    return (x, expert_ids, gates, d_y, d_x + d_x_part, d_gates + d_gates_part), sums

  zeros = jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), experts.weights)
  moving = (x, expert_ids, gates, d_y, jnp.zeros_like(x), jnp.zeros_like(gates))
  (_, _, _, _, d_x, d_gates), sums = _rotate(exchange, step, moving, zeros)
  d_weights = jax.tree.map(lambda total, weight: total.astype(weight.dtype), sums, experts.weights)
  return d_x, None, d_gates, experts.replace(weights=d_weights)


_ring.defvjp(_ring_forward, _ring_backward)
