"""The ring: tokens pass by the experts.

Shapes: n tokens of this device, k choices per token, X devices of the exchange, E experts per device, D model.

In each of X steps a device adds what its own experts have to say to the tokens that are with it, and hands tokens and
sums on to the next device. After X steps they are home. It runs everywhere, has static shapes and drops nothing.

An all-gather of the tokens and one scatter of the sums would send as much, but it holds X * n * k rows where a step of
the ring holds n * k: on 8 fake devices it took 5 times the memory and was no faster. In the backward pass the tokens go
round a second time, and the experts' results are computed again; so what is kept does not grow with X.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp

from spmd_tasks.layers.moe.exchange import Exchange
from spmd_tasks.layers.moe.local_experts import LocalExperts


def ring(
  x: jax.Array, expert_ids: jax.Array, gates: jax.Array, experts: LocalExperts, exchange: Exchange
) -> tuple[jax.Array, Mapping[str, jax.Array]]:
  """The Dispatch; no statistics, since nothing is ever dropped."""
  return _ring(exchange, x, expert_ids, gates, experts), {}


def _go_round(exchange: Exchange, step: Callable[[Any, Any], tuple[Any, Any]], travelling: Any, staying: Any) -> Any:
  """(travelling, staying) after X times `step`, each followed by handing `travelling` on; it ends where it began."""
  ring_order = [(i, (i + 1) % exchange.num_devices) for i in range(exchange.num_devices)]

  def step_and_hand_on(carry, _):
    travelling, staying = step(*carry)
    return (jax.tree.map(lambda array: jax.lax.ppermute(array, exchange.axes, ring_order), travelling), staying), None

  return jax.lax.scan(step_and_hand_on, (travelling, staying), None, length=exchange.num_devices)[0]


def _own_part(
  exchange: Exchange, x: jax.Array, expert_ids: jax.Array, gates: jax.Array, experts: LocalExperts
) -> jax.Array:
  """[n, D], the part of this device's experts in the result for any device's tokens."""
  local_ids = expert_ids - jax.lax.axis_index(exchange.axes) * experts.num_experts
  is_own = (local_ids >= 0) & (local_ids < experts.num_experts)
  return experts.apply_to_tokens(x, jnp.where(is_own, local_ids, experts.num_experts), jnp.where(is_own, gates, 0.0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(exchange, x, expert_ids, gates, experts):
  def step(travelling, staying):
    x, expert_ids, gates, y = travelling
    return (x, expert_ids, gates, y + _own_part(exchange, x, expert_ids, gates, experts)), staying

  (_, _, _, y), _ = _go_round(exchange, step, (x, expert_ids, gates, jnp.zeros_like(x)), None)
  return y


def _ring_forward(exchange, x, expert_ids, gates, experts):
  return _ring(exchange, x, expert_ids, gates, experts), (x, expert_ids, gates, experts)


def _ring_backward(exchange, residuals, d_y):
  x, expert_ids, gates, experts = residuals

  def step(travelling, d_experts):
    x, expert_ids, gates, d_y, d_x, d_gates = travelling
    _, pull_back = jax.vjp(
      lambda x, gates, experts: _own_part(exchange, x, expert_ids, gates, experts), x, gates, experts
    )
    d_x_part, d_gates_part, d_experts_part = pull_back(d_y)
    d_experts = jax.tree.map(lambda total, part: total + part.astype(total.dtype), d_experts, d_experts_part)
    return (x, expert_ids, gates, d_y, d_x + d_x_part, d_gates + d_gates_part), d_experts

  zeros = jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), experts)
  travelling = (x, expert_ids, gates, d_y, jnp.zeros_like(x), jnp.zeros_like(gates))
  (_, _, _, _, d_x, d_gates), d_experts = _go_round(exchange, step, travelling, zeros)
  return d_x, None, d_gates, jax.tree.map(lambda total, weight: total.astype(weight.dtype), d_experts, experts)


_ring.defvjp(_ring_forward, _ring_backward)
