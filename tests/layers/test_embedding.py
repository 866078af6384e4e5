import jax
import numpy as np
import pytest

from spmd_tasks.layers import ScoreEmbedding, TokenEmbedding
from spmd_tasks.layers.softmax_head import label_scores
from spmd_tasks.sharding.weights import unbox_weights

IDS = np.array([[0, 3, 3], [6, 1, 0]])


def _init(layer: TokenEmbedding):
  return layer.init(jax.random.key(0), IDS)['params']


@pytest.mark.parametrize('scale_sqrt_depth', [False, True])
def test_lookup(scale_sqrt_depth):
  layer = TokenEmbedding(vocab_size=7, embed_dim=16, scale_sqrt_depth=scale_sqrt_depth)
  weights = unbox_weights(_init(layer))
  expected = np.stack([[np.asarray(weights['table'])[i] for i in row] for row in IDS]) * (
    4.0 if scale_sqrt_depth else 1
  )
  np.testing.assert_allclose(layer.apply({'params': weights}, IDS), expected, rtol=1e-6)


@pytest.mark.parametrize('tied', [True, False])
def test_logits_are_scaled_and_capped(rng, tied):
  layer = TokenEmbedding(vocab_size=7, embed_dim=16, tied=tied, scale_logits=True, logits_cap=2.0)
  weights = unbox_weights(_init(layer))
  x = rng.normal(size=(2, 3, 16)).astype(np.float32)
  kernel = np.asarray(weights['table']).T if tied else np.asarray(weights['softmax_kernel'])
  expected = x.astype(np.float64) @ kernel / 4
  logits = layer.apply({'params': weights}, x, method='attend')
  np.testing.assert_allclose(logits, 2 * np.tanh(expected / 2), rtol=1e-5, atol=1e-5)


def test_factors_and_a_bias(rng):
  layer = TokenEmbedding(
    vocab_size=7, embed_dim=16, scale_sqrt_depth=False, embedding_multiplier=3.0, logits_multiplier=0.5, use_bias=True
  )
  weights = unbox_weights(_init(layer))
  assert not np.any(weights['softmax_bias'])
  weights['softmax_bias'] = rng.normal(size=7).astype(np.float32)
  table, x = np.asarray(weights['table']), rng.normal(size=(2, 3, 16)).astype(np.float32)
  np.testing.assert_allclose(layer.apply({'params': weights}, IDS), 3 * table[IDS], rtol=1e-6)
  logits = layer.apply({'params': weights}, x, method='attend')
  np.testing.assert_allclose(logits, (x @ table.T + weights['softmax_bias']) / 2, atol=1e-5)

  def sum_of_scores(weights, num_chunks):
    head = layer.apply({'params': weights}, x, num_chunks=num_chunks, method='softmax_head')
    scores = head.scores(IDS) if num_chunks else label_scores(head_logits(weights), IDS)
    return (scores.log_normalizer - 2 * scores.label_logit).sum()

  head_logits = lambda weights: layer.apply({'params': weights}, x, method='attend')
  gradient = jax.jit(jax.grad(sum_of_scores), static_argnums=1)
  at_once, in_chunks = (gradient(weights, num) for num in (0, 3))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), at_once, in_chunks)


class Halved(TokenEmbedding, kw_only=True):
  """An embedding with logits of its own."""

  def attend(self, x):
    return super().attend(x) / 2


@pytest.mark.parametrize('embedding, has_head', [(TokenEmbedding, True), (Halved, False), (ScoreEmbedding, False)])
def test_a_subclass_with_logits_of_its_own_has_no_head(embedding, has_head):
  layer = embedding(vocab_size=7, embed_dim=16)
  head = layer.apply({'params': unbox_weights(_init(layer))}, np.ones((2, 3, 16), 'float32'), method='softmax_head')
  assert (head is not None) == has_head


def test_logits_of_bfloat16_operands_are_accumulated_in_float32(rng):
  layer = TokenEmbedding(vocab_size=7, embed_dim=512, dtype='bfloat16')
  weights = unbox_weights(_init(layer))
  x = jax.numpy.asarray(rng.normal(size=(2, 3, 512)), 'bfloat16')
  logits = layer.apply({'params': weights}, x, method='attend')
  assert logits.dtype == 'float32'
  table = np.asarray(weights['table'].astype('bfloat16'), np.float64)
  np.testing.assert_allclose(logits, np.asarray(x, np.float64) @ table.T, rtol=1e-4, atol=1e-4)


def test_no_product_of_the_gradient_of_bfloat16_has_float32_operands():
  """A GPU takes more than twice as long for these."""
  layer = TokenEmbedding(vocab_size=11, embed_dim=8, dtype='bfloat16')
  weights = unbox_weights(_init(layer))
  score = lambda weights, x: layer.apply({'params': weights}, x, method='attend').sum()
  gradient = jax.jit(jax.grad(score, argnums=(0, 1)))
  program = gradient.lower(weights, jax.ShapeDtypeStruct((2, 3, 8), 'bfloat16')).as_text()
  products = [line for line in program.splitlines() if 'dot_general' in line]
  assert len(products) == 2
  assert all('f32>, tensor' not in line for line in products)


@pytest.mark.parametrize('unknown', [7, -1, 2**31 - 1])
def test_an_unknown_token_is_loud(unknown):
  layer = TokenEmbedding(vocab_size=7, embed_dim=16)
  x = np.asarray(layer.apply({'params': unbox_weights(_init(layer))}, np.array([[6, unknown, 0]], np.int32)))
  assert np.isfinite(x[0, [0, 2]]).all()
  assert np.isnan(x[0, 1]).all()
