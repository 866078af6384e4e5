"""QK-clip: factors that shrink a head's queries and keys after a step in which its largest logit exceeded a bound.

Kimi Team, "Kimi K2: Open Agentic Intelligence" (2025), section 2.1, with Muon: MuonClip. Let S be the largest logit of
a head over all pairs of tokens of the batch, and gamma = min(1, bound / S). The kernels of queries and keys are
multiplied by sqrt(gamma) after the optimizer's step. If several query heads share keys, only their queries are scaled,
by gamma.

Attention writes the factors to the collection WEIGHT_FACTORS, and the learner multiplies by them (learning/learner.py).
The logits are computed a second time for the maximum, so that every implementation of attention supports it.

Shapes: B batch, T sequence, H query heads, G key/value heads, K head dim, C queries of a block, S keys.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention._plain import BLOCK, AttentionOptions, visible
from spmd_tasks.layers.base import current_layer_scope
from spmd_tasks.sharding import SplitDims, WeightSpec
from spmd_tasks.sharding.weights import WEIGHT_FACTORS


def shrinkage(
  query: jax.Array, key: jax.Array, segment_ids: jax.Array | None, options: AttentionOptions, bound: float
) -> jax.Array:
  """Returns gamma, float32 [H, 1] in (0, 1], from each head's largest logit over all tokens except padding (segment 0).

  Takes [B, T, H, K], [B, T, G, K] and int32 [B, T] or None; uses `causal`, `window` and the scale of the options.
  """
  if current_layer_scope().balanced_tokens:
    raise UserError('qk_clip needs tokens in the order of the text: set balances_tokens=False.')
  query, key = jax.lax.stop_gradient((query, key))
  num_rows, length, num_heads, head_dim = query.shape
  block = min(BLOCK, length)
  scale = options.scale(head_dim)

  def of_block(first: jax.Array) -> jax.Array:
    first = jnp.minimum(first, length - block)  # the last block overlaps the one before it
    queries = jax.lax.dynamic_slice_in_dim(query, first, block, axis=1)
    queries = queries.reshape(num_rows, block, key.shape[2], -1, head_dim)
    logits = jnp.einsum('BCGRK,BSGK->GRBCS', queries, key, preferred_element_type=jnp.float32) * scale
    segments = None if segment_ids is None else jax.lax.dynamic_slice_in_dim(segment_ids, first, block, axis=1)
    may_see = visible(first + jnp.arange(block), jnp.arange(length), segments, segment_ids, options)
    if segments is not None:
      may_see &= (segments != 0)[:, :, None]
    return jnp.max(jnp.where(may_see[None, None], logits, -jnp.inf), axis=(2, 3, 4)).reshape(num_heads)

  largest = jnp.max(jax.lax.map(of_block, jnp.arange(0, length, block)), axis=0)
  return (bound / jnp.maximum(largest, bound))[:, None]


def write_factors(module: nn.Module, factors: Mapping[str, jax.Array], split_dims: SplitDims, *, train: bool) -> None:
  """Writes factors [H, K or 1] of weights [..., H, K] for the learner; does nothing in evaluation and generation.

  `factors` are by the weight's name below the attention; `split_dims` belong to the queries' kernel [D, H, K].
  """
  if not train and not module.is_initializing():
    return
  split = None if split_dims is None else (split_dims[1], None)
  for name, factor in factors.items():
    spec = WeightSpec(shape=factor.shape, init=jax.nn.initializers.ones, split_dims=split)
    variable: Any = module.variable(WEIGHT_FACTORS, name.replace('/', '.'), spec, None)
    if not module.is_initializing():
      variable.value = factor


def clip_logits(
  attention: Any, query: jax.Array, key: jax.Array, segment_ids: Any, options: AttentionOptions, *, train: bool
) -> None:
  """Writes the factors of an `Attention`'s kernels, which shrink heads whose largest logit exceeded its `qk_clip`."""
  gamma = shrinkage(query, key, segment_ids, options, attention.qk_clip)
  own_keys = key.shape[2] == attention.num_heads
  of_heads = {'query': jnp.sqrt(gamma), 'key': jnp.sqrt(gamma)} if own_keys else {'query': gamma}
  names = ('kernel', 'bias') if attention.use_bias else ('kernel',)
  factors = {f'{projection}/{name}': x for projection, x in of_heads.items() for name in names}
  write_factors(attention, factors, attention.query_split_dims, train=train)
