"""Gated DeltaNet against float64 numpy, one token after another, and documents of a row against themselves alone."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.layers import RmsNorm, remat_policy
from spmd_tasks.layers.base import layer_scope
from spmd_tasks.layers.recurrent import GatedDeltaNet
from spmd_tasks.layers.recurrent.delta_rule import delta_rule_by_chunk, delta_rule_by_token, invert_unit_lower
from spmd_tasks.runtime.flops import count_matmul_flops
from tests.layers.recurrent import delta_net_reference as reference
from tests.layers.tiny_model import assert_close, random_weights

D, G, H, K, V = 18, 2, 6, 5, 7
KIMI = {'feature_decays': True, 'gate_rank': 4, 'gate_activation': 'sigmoid'}


def make_layer(**fields):
  return GatedDeltaNet(
    **{'num_heads': H, 'num_key_heads': G, 'key_head_dim': K, 'value_head_dim': V, 'chunk_tokens': 4, **fields}
  )


def with_rate(weights, rate):
  """The weights with decays of about exp(-rate) per token, another for each head."""
  rates = np.log(rate * np.linspace(0.5, 1.5, len(weights['log_rate'])))
  return {**weights, 'log_rate': jnp.asarray(rates, jnp.float32)}


# A row of several documents, padding and chunks; a document that a chunk does not divide; one document; padding only.
LENGTH = 21
SEGMENT_IDS = np.array([[1] * 6 + [2] * 3 + [3] * 9 + [0] * 3, [4] * 1 + [9] * 19 + [0], [1] * LENGTH, [0] * LENGTH])


@pytest.mark.parametrize(
  'fields, settings',
  [
    ({}, {}),
    ({'num_key_heads': None, 'use_bias': True, 'conv_size': 3}, {}),
    (
      {'max_strength': 2.0, 'out_norm': RmsNorm(epsilon=0.1), 'chunk_tokens': 64},
      {'max_strength': 2.0, 'epsilon': 0.1},
    ),
    (KIMI, {'gate_activation': reference.sigmoid}),
  ],
  ids=['grouped', 'biases', 'reversing', 'decays of features'],
)
def test_is_the_recurrence_of_each_document(rng, fields, settings):
  layer, x = make_layer(**fields), rng.normal(size=(*SEGMENT_IDS.shape, D)).astype(np.float32)
  drawn, apply, is_token = random_weights(layer, x, SEGMENT_IDS), jax.jit(layer.apply), SEGMENT_IDS != 0
  for rate in (1e-4, 0.7, 30.0):
    weights = with_rate(drawn, rate)
    actual = apply({'params': weights}, x, SEGMENT_IDS)
    expected = reference.delta_net(x.astype(np.float64), SEGMENT_IDS, weights, **settings)
    np.testing.assert_allclose(
      np.asarray(actual)[is_token], expected[is_token], rtol=2e-4, atol=2e-5, err_msg=f'rate {rate}'
    )
    assert np.isfinite(actual).all()


def draw_rule(rng, length, log_decay, num_rows=2):
  shape = (num_rows, length, 3)
  normal = lambda size: rng.normal(size=(*shape, size)).astype(np.float32)
  query, key, value = normal(K) / np.sqrt(K), normal(K), normal(V)
  key /= np.linalg.norm(key, axis=-1, keepdims=True)
  strength = rng.uniform(0, 2, shape).astype(np.float32)
  state = rng.normal(size=(num_rows, 3, K, V)).astype(np.float32)
  log_decay = np.broadcast_to(log_decay, (*shape, *np.shape(log_decay)[3:])).astype(np.float32)
  return query, key, value, log_decay, strength, state


@pytest.mark.parametrize('features', [(), (K,)], ids=['decays of heads', 'decays of features'])
@pytest.mark.parametrize(  # of chunks of 4
  'length', [1, 3, 14, *(pytest.param(length, marks=pytest.mark.exhaustive) for length in (2, 4, 50))]
)
def test_chunks_are_the_formula(rng, length, features):
  *tokens, state = draw_rule(rng, length, -rng.uniform(0, 0.3, (1, length, 1, *features)))
  none = np.zeros((2, length), np.int32)
  outputs, last = jax.jit(delta_rule_by_chunk, static_argnums=7)(*tokens, none, state, 4)
  for b, h in np.ndindex(2, 3):
    of_head = (np.float64(x[b, :, h]) for x in tokens)
    expected, expected_last = reference.delta_rule(*of_head, np.float64(state[b, h]))
    np.testing.assert_allclose(outputs[b, :, h], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(last[b, h], expected_last, rtol=1e-4, atol=1e-5)


OF_FEATURES = -np.geomspace(1e-4, 40.0, K)[None, None, None]  # slow and fast ones


@pytest.mark.parametrize(
  'log_decays', [(0.0, -1e-4, -0.2, -20.0), (OF_FEATURES,)], ids=['decays of heads', 'decays of features']
)
def test_gradients_are_those_of_the_formula(rng, log_decays):
  length = 21
  documents = np.sort(rng.integers(0, 4, (2, length)), axis=1).astype(np.int32)

  def loss(rule, tokens, state):
    outputs, last = rule(*tokens, documents, state)
    return jnp.sum(jnp.sin(outputs)) + jnp.sum(jnp.cos(last))

  by_chunk, by_token = (
    jax.jit(jax.value_and_grad(functools.partial(loss, rule), argnums=(0, 1)))
    for rule in (functools.partial(delta_rule_by_chunk, chunk=8), delta_rule_by_token)
  )
  for log_decay in log_decays:
    *tokens, state = draw_rule(rng, length, log_decay)
    assert_close(by_chunk(tuple(tokens), state), by_token(tuple(tokens), state), rtol=1e-4)


@pytest.mark.parametrize('features', [(), (K,)], ids=['decays of heads', 'decays of features'])
def test_slow_decays_after_fast_ones_keep_their_precision(rng, features):
  length, log_decay = 8, np.full((1, 8, 1, *features), -1e-4)
  log_decay[:, 2] = -3e4
  *tokens, state = draw_rule(rng, length, log_decay)
  none = np.zeros((2, length), np.int32)
  outputs, _ = jax.jit(delta_rule_by_chunk, static_argnums=7)(*tokens, none, state, 8)
  expected, _ = jax.jit(delta_rule_by_token)(*tokens, none, state)
  np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


def test_inverse_is_exact_for_keys_that_are_alike():
  size = 64
  lower = np.tril(np.ones((size, size), np.float32), -1)
  inverse = np.eye(size) - np.eye(size, k=-1)
  np.testing.assert_array_equal(jax.jit(invert_unit_lower)(lower), inverse)


@pytest.mark.parametrize('rates, fields', [((1e-4, 0.7), {}), ((0.7,), KIMI)], ids=['of heads', 'of features'])
def test_documents_of_a_row_are_documents_alone(rng, rates, fields):
  """Outputs and gradients, also those of the weights; and other documents change no bit."""
  layer, x = make_layer(**fields), rng.normal(size=(1, LENGTH, D)).astype(np.float32)
  ids = SEGMENT_IDS[:1]
  drawn = random_weights(layer, x, ids)

  @jax.jit
  def of_weights(weights, x, ids, is_read):
    def loss(weights, x):
      y = layer.apply({'params': weights}, x, ids)
      return jnp.sum(jnp.sin(y) * is_read), y

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, x)

  for rate, document in itertools.product(rates, (1, 2, 3)):
    outputs_and_gradients = functools.partial(of_weights, with_rate(drawn, rate))
    mask = (ids == document)[0]
    is_read = mask[None, :, None].astype(np.float32)
    (of_kernels, of_x), y = outputs_and_gradients(x, ids, is_read)
    assert not np.any(np.asarray(of_x)[0, ~mask])
    alone = np.zeros_like(x)
    alone[0, : mask.sum()] = x[0, mask]
    alone_ids = (np.arange(LENGTH) < mask.sum()).astype(ids.dtype)[None]
    (alone_of_kernels, alone_of_x), alone_y = outputs_and_gradients(alone, alone_ids, alone_ids[..., None] * 1.0)
    assert_close((np.asarray(y)[0, mask], of_kernels), (np.asarray(alone_y)[0, : mask.sum()], alone_of_kernels))
    assert_close(np.asarray(of_x)[0, mask], np.asarray(alone_of_x)[0, : mask.sum()])
    others = np.where(mask[None, :, None], x, 100 * rng.normal(size=x.shape)).astype(np.float32)
    other_y = np.asarray(outputs_and_gradients(others, ids, is_read)[1])
    np.testing.assert_array_equal(other_y[0, mask], np.asarray(y)[0, mask])


def test_sixteen_bits_outside_and_a_float32_state(rng):
  layer, x = make_layer(dtype='bfloat16'), rng.normal(size=(*SEGMENT_IDS.shape, D)).astype(np.float32)
  weights = with_rate(random_weights(layer, x, SEGMENT_IDS), 0.01)
  actual = jax.jit(layer.apply)({'params': weights}, x.astype(jnp.bfloat16), SEGMENT_IDS)
  assert actual.dtype == jnp.bfloat16
  expected = reference.delta_net(x.astype(np.float64), SEGMENT_IDS, weights)
  is_token = SEGMENT_IDS != 0
  error = np.abs(np.asarray(actual, np.float64) - expected)[is_token]
  assert np.median(error) < 0.02 * np.abs(expected).max()


def test_model_flops_are_those_of_the_formula(rng):
  """Three products with the state of each head and token: S^T k, k r^T and S^T q, whatever the chunks."""
  x = rng.normal(size=(2, LENGTH, D)).astype(np.float32)
  for chunk in (4, 64):
    layer = make_layer(chunk_tokens=chunk)
    weights = random_weights(layer, x)
    in_products = sum(w.size for path, w in jax.tree.leaves_with_path(weights) if path[-1].key == 'kernel')
    with layer_scope(plain_products=True):
      flops = count_matmul_flops(layer.apply, {'params': weights}, x)
    assert flops == 2 * 2 * LENGTH * (in_products + 3 * H * K * V)


@pytest.mark.parametrize('policy', ['none', 'elementwise', 'dots', 'attention'])
def test_the_backward_pass_computes_the_chunks_again(policy, rng):
  layer, x = make_layer(), rng.normal(size=(*SEGMENT_IDS.shape, D)).astype(np.float32)
  weights = jax.eval_shape(lambda: random_weights(layer, x))
  apply = lambda weights, x: layer.apply({'params': weights}, x)
  if policy != 'none':
    apply = jax.checkpoint(apply, policy=remat_policy(policy))
  kept = jax.eval_shape(lambda weights, x: jax.tree.leaves(jax.vjp(apply, weights, x)[1]), weights, x)
  assert max(array.ndim for array in kept) == 4  # chunks have 5 dims


def test_refuses_rows_in_another_order(rng):
  x = rng.normal(size=(1, 4, D)).astype(np.float32)
  with layer_scope(balanced_tokens=True), pytest.raises(UserError, match=r'balances_tokens=True .* set it to False'):
    jax.eval_shape(make_layer().init, jax.random.key(0), x)


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'num_key_heads': 4}, 'num_heads=6 is not divisible by num_key_heads=4'),
    ({'conv_size': 1}, 'conv_size=1 must be at least 2'),
    ({'chunk_tokens': 48}, 'chunk_tokens=48 must be a power of two'),
  ],
)
def test_refuses_fields_that_do_not_fit(fields, message):
  with pytest.raises(UserError, match=message):
    make_layer(**fields)
