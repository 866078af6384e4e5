"""ExpertChoiceRouter: experts choose their tokens.

Shapes: B batch, T sequence, E experts; G groups of S tokens, C slots per expert and group.
"""

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.moe.capacity import expert_capacity, tokens_per_group
from spmd_tasks.layers.moe.router import Router
from spmd_tasks.layers.moe.routing import RouterOutput, Slots
from spmd_tasks.layers.moe.top_k import top_k_ids
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
    group_size: S: a divisor of T, or a multiple of T that divides B * T. None for one group per row.
  """

  capacity_factor: float = 2.0
  group_size: int | None = None

  def __post_init__(self):
    if not self.capacity_factor > 0:
      raise UserError(f'capacity_factor={self.capacity_factor} must be positive.')
    super().__post_init__()

  @nn.compact
  def __call__(self, x: jax.Array, token_mask: jax.Array | None = None, *, train: bool = False) -> RouterOutput:
    """Returns the RouterOutput for x [B, T, D] and token_mask bool [B, T], or None where every token is real.

    Raises:
      UserError: group_size does not fit.
    """
    group_size = tokens_per_group(x.shape[0], x.shape[1], self.group_size)
    capacity = expert_capacity(group_size, self.num_experts, factor=self.capacity_factor, min_capacity=1)
    logits = self._logits(x, train=train)
    scores = jax.nn.softmax(logits)
    # [G, E, S]: tokens last, where they are compared.
    grouped = scores.reshape(-1, group_size, self.num_experts).swapaxes(1, 2)
    preferences = grouped
    if token_mask is not None:
      group_mask = token_mask.reshape(-1, 1, group_size)
      preferences = jnp.where(group_mask, preferences, -1.0)  # below every score
    split_dims = self.activation_split_dims
    token_ids = top_k_ids(preferences, capacity, None if split_dims is None else (split_dims[0], None, None))
    if token_mask is not None:
      is_real = jnp.take_along_axis(group_mask, token_ids, axis=-1)
      token_ids = jnp.where(is_real, token_ids, group_size)
    token_ids = checkpoint_name(token_ids, ROUTING_NAME)
    gates = jnp.take_along_axis(grouped, token_ids, axis=-1, mode='fill', fill_value=0.0)
    slots = Slots(token_ids=token_ids, gates=checkpoint_name(gates, ROUTING_NAME))
    return RouterOutput(logits=logits, scores=scores, token_mask=token_mask, slots=slots)
