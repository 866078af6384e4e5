"""Remat policies by name: what a layer keeps for its backward pass, and what it computes again."""

from collections.abc import Callable
from typing import Any

from jax import checkpoint_policies

from spmd_tasks.errors import UserError

# The `checkpoint_name` of discrete decisions and what follows from them in a few bytes per token, such as a router's
# choice of experts. Every policy keeps these values: computed again, they may come out differently.
ROUTING_NAME = 'routing'

_routing = checkpoint_policies.save_only_these_names(ROUTING_NAME)

# None: no remat at all, everything is kept. The names are ordered from most memory to least.
REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
  'none': None,
  # Keeps the results of all matmuls, attention's [B, H, T, T] logits among them.
  'dots': checkpoint_policies.save_from_both_policies(checkpoint_policies.dots_saveable, _routing),
  # Keeps the results of matmuls with weights only: attention is computed again, which is cheap next to what it would
  # hold.
  'dots_no_batch': checkpoint_policies.save_from_both_policies(
    checkpoint_policies.dots_with_no_batch_dims_saveable, _routing
  ),
  # Keeps each layer's input only.
  'full': _routing,
}


def remat_policy(name: str) -> Callable[..., Any] | None:
  """The `jax.checkpoint` policy of that name, None for 'none'.

  Raises:
    UserError: there is no such name; the message lists them.
  """
  if name not in REMAT_POLICIES:
    raise UserError(f'remat_policy {name!r} is unknown: choose one of {list(REMAT_POLICIES)}.')
  return REMAT_POLICIES[name]
