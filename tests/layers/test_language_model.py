import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import packed_batch, random_weights, tiny_model
import transformer_reference as reference

from spmd_tasks.errors import UserError
from spmd_tasks.layers import (
  LanguageModel,
  LanguageModelLoss,
  RmsNorm,
  StackSequence,
  TokenEmbedding,
  TransformerBlock,
  TransformerStack,
)
from spmd_tasks.layers.attention import Attention

LOSS = LanguageModelLoss(z_loss_weight=1e-3, label_smoothing=0.1)


def _apply(model, weights, batch):
  return np.asarray(jax.jit(model.apply)({'params': weights}, batch)['logits'])


def test_logits_against_numpy():
  model, batch = tiny_model(num_kv_heads=1), packed_batch()
  weights = random_weights(model)
  expected = reference.language_model(jax.tree.map(np.asarray, batch), reference.to_float64(weights))
  np.testing.assert_allclose(_apply(model, weights, batch), expected, rtol=1e-3, atol=1e-4)


def test_segment_ids_without_positions_are_an_error():
  model, batch = tiny_model(), packed_batch()
  with pytest.raises(ValueError, match="no 'segment_pos'"):
    model.init(jax.random.key(0), {'ids': batch['ids'], 'segment_ids': batch['segment_ids']})


@pytest.mark.parametrize(
  'make, message',
  [
    (lambda: tiny_model().clone(num_logit_chunks=0), 'num_logit_chunks=0 must be at least 1'),
    (lambda: StackSequence(stacks=()), 'stacks=.* at least one stack'),
    (
      lambda: TokenEmbedding(vocab_size=0, embed_dim=4).init(jax.random.key(0), [[0]]),
      'vocab_size=0 must be at least 1',
    ),
  ],
)
def test_sizes_of_zero_are_errors(make, message):
  with pytest.raises(UserError, match=message):
    make()


@functools.cache
def _float32_loss_and_gradients():
  model = tiny_model()
  weights = random_weights(model)
  return weights, *jax.jit(_loss_and_gradients(model, packed_batch()))(weights)


def _loss_and_gradients(model, batch):
  return jax.value_and_grad(lambda weights: LOSS(model.apply({'params': weights}, batch), batch).loss)


def test_bfloat16_compute_is_close_and_its_gradients_are_float32():
  weights, loss, gradients = _float32_loss_and_gradients()
  model = tiny_model(dtype='bfloat16')
  assert jax.eval_shape(model.apply, {'params': weights}, packed_batch())['logits'].dtype == np.float32
  loss_16, gradients_16 = jax.jit(_loss_and_gradients(model, packed_batch()))(weights)
  np.testing.assert_allclose(loss_16, loss, rtol=1e-2)
  assert loss_16 != loss
  for a, b in zip(jax.tree.leaves(gradients_16), jax.tree.leaves(gradients), strict=True):
    assert a.dtype == np.float32
    assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)


def test_padding_rows_give_finite_gradients_and_change_nothing():
  weights, loss, gradients = _float32_loss_and_gradients()  # the batch's last row is padding only
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
  without = {name: value[:2] for name, value in packed_batch().items()}
  loss_without, gradients_without = jax.jit(_loss_and_gradients(tiny_model(), without))(weights)
  np.testing.assert_allclose(loss, loss_without, rtol=1e-6)
  for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(gradients_without), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


IDS = jnp.asarray([[0, 3, 9, 0, 4, 8, 0, 0]], jnp.int32)


class SeesZeros(nn.Module):
  """A sublayer that adds 1 where its input is zeros, and 2 where it sees padding."""

  @nn.compact
  def __call__(self, x, segment_ids=None, *, train=False):
    is_zero, is_padding = jnp.all(x == 0, axis=-1), segment_ids == 0
    return jnp.broadcast_to((is_zero + 2.0 * is_padding)[..., None], x.shape), {}


def test_all_tokens_are_seen_but_zeros_that_no_token_follows():
  """LanguageModel(masks_zeros=True): which tokens give zeros to all sublayers, as Flaxformer masks them."""
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
