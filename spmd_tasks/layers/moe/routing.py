"""RouterOutput: what a router decides, and what everything after it reads.

Shapes: B batch, T sequence, E experts, k choices per token; G groups of S tokens, C slots per expert and group.
"""

from flax import struct
import jax


class Slots(struct.PyTreeNode):
  """Which token each expert holds in each of its slots, group by group: what expert choice decides directly.

  Attributes:
    token_ids: int32 [G, E, C], the token's place in its group; S where the slot is empty.
    gates: float32 [G, E, C], 0 where the slot is empty.
  """

  token_ids: jax.Array
  gates: jax.Array


class RouterOutput(struct.PyTreeNode):
  """A router's decision for a batch of tokens. Padding tokens are routed nowhere.

  Attributes:
    logits: float32 [B, T, E], of the jittered input where there is jitter, without the balance bias.
    scores: float32 [B, T, E], non-negative, with sum 1 over E: softmax(logits), or sigmoid(logits) over their sum. Read
      by losses and statistics.
    token_mask: bool [B, T], False for padding; None where every token is real.
    expert_ids: int32 [B, T, k], first choice first; E for padding. None where experts choose.
    gates: float32 [B, T, k], the weights of the experts' outputs; 0 for padding. None where experts choose.
    slots: what experts chose; None where tokens choose.
    balance_bias: float32 [E], the bias that had a part in the choice (see bias_balancing.py); None where there is none.
  """

  logits: jax.Array
  scores: jax.Array
  token_mask: jax.Array | None
  expert_ids: jax.Array | None = None
  gates: jax.Array | None = None
  slots: Slots | None = None
  balance_bias: jax.Array | None = None
