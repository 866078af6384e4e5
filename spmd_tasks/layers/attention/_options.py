"""AttentionOptions: what all implementations of attention need to know beside queries, keys, values and documents."""

import dataclasses
import math

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
  """Settings by which queries and keys are compared.

  Attributes:
    causal: whether a token sees itself and earlier tokens only.
    window: how many tokens of its document a token sees, itself included; None: all.
    softmax_scale: factor of the logits; None: 1 / sqrt(K).
    logit_cap: bounds the logits softly, see `soft_cap`.
    sinks: [H], see `masked_softmax`.
  """

  causal: bool = True
  window: int | None = None
  softmax_scale: float | None = None
  logit_cap: float | None = None
  sinks: jax.Array | None = None

  def scale(self, head_dim: int) -> float:
    """The factor of the logits for K features."""
    return self.softmax_scale or 1.0 / math.sqrt(head_dim)
