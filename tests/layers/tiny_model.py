"""The small uneven language model and packed batch on which the layers' tests agree.

d_model 30, heads 3, ffn 90, vocab 257: no dim that a power of two divides, but d_model and ffn by 2.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.layers import (
  GatedFeedForward,
  LanguageModel,
  RmsNorm,
  TokenEmbedding,
  TransformerBlock,
  TransformerStack,
)
from spmd_tasks.layers.attention import Attention
from spmd_tasks.layers.base import WithSublayers
from spmd_tasks.sharding.weights import unbox_weights

VOCAB = 257


class FfnBlock(WithSublayers, kw_only=True):
  """A transformer block without attention, which compiles in half the time."""

  ffn: nn.Module
  norm: nn.Module = RmsNorm()

  @nn.compact
  def __call__(self, x, segment_ids=None, segment_pos=None, *, train=False):
    y, aux = self.ffn(self.norm(x), segment_ids, train=train)
    return x + y, aux


class DroppedFfn(FfnBlock):
  """A block without attention that drops features of its sublayer's output."""

  dropout_rate: float = 0.5

  @nn.compact
  def __call__(self, x, segment_ids=None, segment_pos=None, *, train=False):
    y, aux = self.ffn(self.norm(x), segment_ids, train=train)
    return x + nn.Dropout(self.dropout_rate, deterministic=not train)(y), aux


def tiny_model(
  *, num_layers=2, scan=True, remat_policy='none', dropout_rate=0.0, dtype='float32', tied=True, num_kv_heads=None
) -> LanguageModel:
  return LanguageModel(
    embedding=TokenEmbedding(vocab_size=VOCAB, embed_dim=30, dtype=dtype, tied=tied),
    stack=TransformerStack(
      num_layers=num_layers,
      scan=scan,
      remat_policy=remat_policy,
      block=TransformerBlock(
        attention=Attention(num_heads=3, num_kv_heads=num_kv_heads, dtype=dtype),
        ffn=GatedFeedForward(hidden_dim=90, dtype=dtype),
        norm=RmsNorm(dtype=dtype),
        dropout_rate=dropout_rate,
      ),
    ),
    final_norm=RmsNorm(dtype=dtype),
  )


def packed_batch() -> dict[str, jax.Array]:
  """Three rows of 8: two documents and padding; one whole document; padding only."""
  rng = np.random.default_rng(7)
  segment_ids = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1] * 8, [0] * 8])
  segment_pos = np.array([[0, 1, 2, 0, 1, 2, 3, 0], range(8), [0] * 8])
  batch = {
    'ids': rng.integers(1, VOCAB, segment_ids.shape) * (segment_ids > 0),
    'labels': rng.integers(1, VOCAB, segment_ids.shape) * (segment_ids > 0),
    'segment_ids': segment_ids,
    'segment_pos': segment_pos,
  }
  arrays = {name: jnp.asarray(value, jnp.int32) for name, value in batch.items()}
  return arrays | {'weights': jnp.asarray(segment_ids > 0, jnp.float32)}


def assert_close(got, expected, rtol=1e-5, atol=2e-5):
  """Tree by tree; `atol` is relative to the largest number of each array."""
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
    scale = max(1e-3, np.max(np.abs(b)))
    np.testing.assert_allclose(a, b, rtol=rtol, atol=atol * scale, err_msg=jax.tree_util.keystr(path))


def random_weights(layer, *inputs):
  """Weights of a layer for some inputs, by default a packed batch; no norm scale is 1, no bias 0, where mistakes hide.

  Drawn by numpy, because compiling the model's own initializers for every test takes longer than the tests.
  """
  rng = np.random.default_rng(0)
  abstract = jax.eval_shape(layer.init, jax.random.key(0), *(inputs or [packed_batch()]))['params']

  def draw(path, leaf):
    is_scale = path[-1].key == 'scale'
    return jnp.asarray(is_scale + 0.2 * rng.normal(size=leaf.shape), jnp.float32)

  return jax.tree.map_with_path(draw, unbox_weights(abstract))
