"""ExpertChoiceRouter: experts choose their tokens.

Shapes: B batch, T sequence, E experts; G groups of S tokens, C slots per expert and group.
"""

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from spmd_tasks.layers.moe.router import Router
from spmd_tasks.layers.moe.routing import RouterOutput, Slots
from spmd_tasks.layers.remat import ROUTING_NAME


class ExpertChoiceRouter(Router, kw_only=True):
  """In every group each expert takes the C tokens with the highest scores (Zhou et al., 2022).

  The load is even by construction and no assignment is dropped, but a token may meet any number of experts, none
  included. Whether an expert takes a token depends on the scores of the tokens after it: in a causal language model the
  router looks ahead, so its training loss is too low, and generation token by token cannot repeat its choice.

  Scores are the softmax over the experts, and an expert's gates are the scores of its tokens. Of equal scores the
  earliest token wins. Slots for which a group has no real token are empty.

  Router's fields and weight.

  Fields:
    capacity_factor: C = round(capacity_factor * S / E), at least 1 and at most S: by how many experts a token is chosen
      on average.
    group_size: S, which must divide the B * T tokens; groups are runs of them in order. None makes every row a group.
  """

  capacity_factor: float = 2.0
  group_size: int | None = None

  def __post_init__(self):
    if not self.capacity_factor > 0:
      raise ValueError(f'capacity_factor={self.capacity_factor} must be positive.')
    if self.group_size is not None and self.group_size < 1:
      raise ValueError(f'group_size={self.group_size} must be at least 1, or None for one group per row.')
    super().__post_init__()

  @nn.compact
  def __call__(self, x: jax.Array, token_mask: jax.Array | None = None, *, train: bool = False) -> RouterOutput:
    """Returns the RouterOutput for x [B, T, D] and token_mask bool [B, T], or None where every token is real."""
    batch_size, length, _ = x.shape
    group_size = length if self.group_size is None else self.group_size
    if batch_size * length % group_size:
      raise ValueError(
        f'group_size={group_size} must divide the {batch_size} * {length} tokens of a batch: choose a divisor, or None '
        'for one group per row.'
      )
    capacity = min(max(1, round(self.capacity_factor * group_size / self.num_experts)), group_size)
    logits = self._logits(x, train=train)
    scores = jax.nn.softmax(logits)
    # [G, E, S]: tokens last, where they are compared.
    grouped = scores.reshape(-1, group_size, self.num_experts).swapaxes(1, 2)
    preferences = jax.lax.stop_gradient(grouped)
    if token_mask is not None:
      preferences = jnp.where(token_mask.reshape(-1, 1, group_size), preferences, -1.0)  # below every score
    chosen, token_ids = jax.lax.top_k(preferences, capacity)
    token_ids = checkpoint_name(jnp.where(chosen >= 0, token_ids, group_size), ROUTING_NAME)
    gates = jnp.take_along_axis(grouped, token_ids, axis=-1, mode='fill', fill_value=0.0)
    slots = Slots(token_ids=token_ids, gates=checkpoint_name(gates, ROUTING_NAME))
    return RouterOutput(logits=logits, scores=scores, token_mask=token_mask, slots=slots)
