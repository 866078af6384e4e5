"""QK-clip: factors that shrink a head's queries and keys after a step in which its largest logit passed a bound.

Kimi Team, "Kimi K2: Open Agentic Intelligence" (2025), section 2.1, with Muon: MuonClip. With S the largest logit of a
head over all pairs of tokens of the batch and gamma = min(1, bound / S), kernels of queries and keys are multiplied by
sqrt(gamma) after the optimizer's step. Keys that several query heads share stay, and their queries take all of gamma.

Attention leaves the factors in the collection WEIGHT_FACTORS, under the name of the weight with dots for slashes; the
learner multiplies by them (learning/learner.py). The logits are computed for the maximum alone, a block of queries at a
time, so that every implementation of attention will do; this costs the product of queries and keys once more.

Shapes: B batch, T sequence, H query heads, G key/value heads, K head dim, C queries of a block, S keys.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.layers.attention._plain import BLOCK, AttentionOptions, visible
from spmd_tasks.sharding import SplitDims, WeightSpec
from spmd_tasks.sharding.weights import WEIGHT_FACTORS


def largest_logits(
  query: jax.Array, key: jax.Array, segment_ids: jax.Array | None, options: AttentionOptions
) -> jax.Array:
  """Returns float32 [H], each head's largest logit before a cap, over all tokens but padding (segment 0).

  Args:
    query, key, segment_ids: [B, T, H, K], [B, T, G, K] and int32 [B, T] or None.
    options: of which `causal`, `window` and the scale count.
  """
  query, key = jax.lax.stop_gradient((query, key))
  num_rows, length, num_heads, head_dim = query.shape
  block = min(BLOCK, length)
  scale = options.scale(head_dim)

  def of_block(first: jax.Array) -> jax.Array:
    first = jnp.minimum(first, length - block)  # the last block takes queries of the one before, not other ones
    queries = jax.lax.dynamic_slice_in_dim(query, first, block, axis=1)
    queries = queries.reshape(num_rows, block, key.shape[2], -1, head_dim)
    logits = jnp.einsum('BCGRK,BSGK->GRBCS', queries, key, preferred_element_type=jnp.float32) * scale
    segments = None if segment_ids is None else jax.lax.dynamic_slice_in_dim(segment_ids, first, block, axis=1)
    may_see = visible(first + jnp.arange(block), jnp.arange(length), segments, segment_ids, options)
    if segments is not None:
      may_see &= (segments != 0)[:, :, None]
    return jnp.max(jnp.where(may_see[None, None], logits, -jnp.inf), axis=(2, 3, 4)).reshape(num_heads)

  return jnp.max(jax.lax.map(of_block, jnp.arange(0, length, block)), axis=0)


def shrinkage(logits: jax.Array, bound: float) -> jax.Array:
  """Returns gamma, float32 [H] in (0, 1], for the largest logits [H]."""
  return bound / jnp.maximum(logits, bound)


def leave_factors(module: nn.Module, factors: Mapping[str, jax.Array], split_dims: SplitDims, *, train: bool) -> None:
  """Leaves factors [H, K or 1] of weights [..., H, K] for the learner; in evaluation and generation, does nothing.

  Args:
    module: the attention.
    factors: by the weight's name below it.
    split_dims: of the kernel of the queries, [D, H, K].
    train: whether this is a train step.
  """
  if not train and not module.is_initializing():
    return
  split = None if split_dims is None else (split_dims[1], None)
  for name, factor in factors.items():
    spec = WeightSpec(shape=factor.shape, init=jax.nn.initializers.ones, split_dims=split)
    variable: Any = module.variable(WEIGHT_FACTORS, name.replace('/', '.'), spec, None)
    if not module.is_initializing():
      variable.value = factor
