"""The ring dispatch: every device sees every token, and computes what its own experts have to do with it.

Shapes: n tokens of this device, k choices per token, X devices that exchange tokens, E experts per device, D model.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from spmd_tasks.layers.moe.exchange import Exchange
from spmd_tasks.layers.moe.local_experts import LocalExperts


def ring(
  x: jax.Array, expert_ids: jax.Array, gates: jax.Array, experts: LocalExperts, exchange: Exchange
) -> tuple[jax.Array, Mapping[str, jax.Array]]:
  """The Dispatch; nothing is ever dropped."""
  axes = exchange.axes
  x, expert_ids, gates = (jax.lax.all_gather(array, axes, tiled=True) for array in (x, expert_ids, gates))
  local_ids = expert_ids - jax.lax.axis_index(axes) * experts.num_experts
  is_mine = (local_ids >= 0) & (local_ids < experts.num_experts)
  y = experts.apply_to_tokens(x, jnp.where(is_mine, local_ids, experts.num_experts), jnp.where(is_mine, gates, 0.0))
  return jax.lax.psum_scatter(y, axes, tiled=True), {}
