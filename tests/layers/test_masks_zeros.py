"""LanguageModel(masks_zeros=True): which tokens give zeros to all sublayers, as Flaxformer masks them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.layers import LanguageModel, RmsNorm, TokenEmbedding, TransformerBlock, TransformerStack
from spmd_tasks.layers.attention import Attention

IDS = jnp.asarray([[0, 3, 9, 0, 4, 8, 0, 0]], jnp.int32)


class SeesZeros(nn.Module):
  """A sublayer that adds 1 where its input is zeros, and 2 where it sees padding."""

  @nn.compact
  def __call__(self, x, segment_ids=None, *, train=False):
    is_zero, is_padding = jnp.all(x == 0, axis=-1), segment_ids == 0
    return jnp.broadcast_to((is_zero + 2.0 * is_padding)[..., None], x.shape), {}


def test_all_tokens_are_seen_but_zeros_that_no_token_follows():
  block = TransformerBlock(attention=Attention(num_heads=2), ffn=SeesZeros(), norm=RmsNorm())
  stack = TransformerStack(block=block, num_layers=1)
  embedding = TokenEmbedding(vocab_size=11, embed_dim=4)
  segments = {'segment_ids': jnp.ones_like(IDS), 'segment_pos': jnp.arange(8)[None]}

  def run(masks_zeros):
    model = LanguageModel(embedding=embedding, stack=stack, final_norm=RmsNorm(), masks_zeros=masks_zeros)
    batch = {'ids': IDS, **segments}
    abstract = jax.eval_shape(model.init, jax.random.key(0), batch)
    variables = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
    for name in ('embedding', 'stack', 'final_norm'):
      variables['params'][name] = jax.tree.map(np.ones_like, variables['params'][name])
    sees = lambda module, _: isinstance(module, SeesZeros)
    _, captured = jax.jit(lambda variables: model.apply(variables, batch, capture_intermediates=sees))(variables)
    (y, _), *_ = jax.tree.leaves(captured, is_leaf=lambda x: isinstance(x, tuple) and len(x) == 2)
    return np.asarray(y).reshape(8, 4)[:, 0]

  np.testing.assert_array_equal(run(False), np.zeros(8))
  np.testing.assert_array_equal(run(True), [0, 0, 0, 0, 0, 0, 3, 3])
