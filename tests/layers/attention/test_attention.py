import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers import RmsNorm
from spmd_tasks.layers.attention import Attention, LinearScaling, PositionBias, Rotary
from spmd_tasks.layers.attention._plain import AttentionOptions
from spmd_tasks.layers.attention.implementations import attend
from spmd_tasks.layers.attention.temperature import Temperature
from tests.layers.tiny_model import random_weights
import tests.layers.transformer_reference as reference

# Two documents and padding in the first row, padding only in the second.
SEGMENT_IDS = np.array([[1, 1, 1, 2, 2, 0], [0, 0, 0, 0, 0, 0]])
SEGMENT_POS = np.array([[0, 1, 2, 0, 1, 0], [0, 0, 0, 0, 0, 0]])

GROUPED = {'num_heads': 6, 'num_kv_heads': 2, 'head_dim': 4}


@pytest.mark.parametrize(
  'fields',
  [
    {'num_heads': 3, 'num_kv_heads': 1, 'qk_norm': True, 'use_bias': True},
    {'num_heads': 3, 'causal': False, 'rotary': None, 'softmax_scale': 0.7},
    {**GROUPED, 'window': 3, 'logit_cap': 0.5},
    {**GROUPED, 'qk_norm': RmsNorm(epsilon=0.1), 'use_bias': True, 'out_bias': False},
    {**GROUPED, 'qk_norm': RmsNorm(epsilon=0.1, num_dims=2), 'clip_qkv': 0.8},
    {**GROUPED, 'sinks': True, 'window': 3, 'out_bias': True},
    pytest.param({'num_heads': 3, 'sinks': True, 'logit_cap': 0.5, 'causal': False}, marks=pytest.mark.exhaustive),
    {'num_heads': 3, 'rotary': Rotary(max_wavelength=50.0, num_features=4, scaling=LinearScaling(factor=4.0))},
    {**GROUPED, 'qk_norm': True, 'norms_rotated': True, 'chunk': 2},
    {**GROUPED, 'qk_norm': True, 'values_from_keys': True, 'value_norm': RmsNorm(use_scale=False), 'use_bias': True},
    {**GROUPED, 'output_gate': True, 'use_bias': True, 'qk_norm': True},
    {**GROUPED, 'qk_norm': RmsNorm(use_scale=False), 'temperature': Temperature(scale=2.0, length=2, offset=1)},
  ],
  ids=[
    'multi-query',
    'multi-head, bidirectional, scaled',
    'grouped, window, capped',
    'norm per head',
    'norm over heads, clipped',
    'sinks in a window',
    'capped bidirectional sinks',
    'partial scaled rotation',
    'norm after the rotation, chunks',
    'values from keys',
    'gated output',
    'norm without a scale, temperature',
  ],
)
def test_attention(rng, fields):
  x = rng.normal(size=(2, 6, 30)).astype(np.float32)
  layer = Attention(**fields)
  weights = random_weights(layer, x, SEGMENT_IDS, SEGMENT_POS)
  expected = reference.attention(
    x.astype(np.float64),
    reference.to_float64(weights),
    SEGMENT_IDS,
    SEGMENT_POS,
    causal=layer.causal,
    window=layer.window,
    chunk=layer.chunk,
    temperature=lambda position: 1 + 2.0 * np.log1p((position + 1) // 2) if layer.temperature else 1.0,
    norms_rotated=layer.norms_rotated,
    normalizes_values=layer.value_norm is not None,
    rotary=_rotation(layer.rotary),
    qk_norm=bool(layer.qk_norm),
    epsilon=getattr(layer.qk_norm, 'epsilon', 1e-6),
    clip=layer.clip_qkv or np.inf,
    logit_cap=layer.logit_cap,
    scale=layer.softmax_scale,
  )
  actual = jax.jit(layer.apply)({'params': weights}, x, SEGMENT_IDS, SEGMENT_POS)
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def _rotation(rotary):
  if rotary is None or rotary == Rotary():
    return rotary is not None
  d = rotary.num_features
  frequencies = rotary.max_wavelength ** (-np.arange(0, d, 2) / d) / rotary.scaling.factor
  return {'num_features': d, 'frequencies': frequencies}


@pytest.mark.parametrize('num_kv_heads, window', [(4, None), (2, 3)])
def test_gradients_are_those_of_jax(rng, num_kv_heads, window):
  shapes = [(2, 6, heads, 8) for heads in (4, 4, num_kv_heads, num_kv_heads)]
  cotangent, *operands = (rng.normal(size=shape).astype(np.float32) for shape in shapes)

  def ours(query, key, value):
    return attend(query, key, value, SEGMENT_IDS, AttentionOptions(window=window), implementation='xla')

  def theirs(query, key, value):
    size = None if window is None else (window - 1, 0)
    mask = SEGMENT_IDS[:, None, :, None] == SEGMENT_IDS[:, None, None, :]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, local_window_size=size)

  made, wanted = (jax.jit(lambda *xs, f=f: jax.vjp(f, *xs)[1](cotangent))(*operands) for f in (ours, theirs))
  for gradient, expected in zip(made, wanted, strict=True):
    np.testing.assert_allclose(gradient, expected, atol=1e-5)  # float32


@pytest.mark.parametrize('implementation', ['xla', 'blockwise'])
def test_gradients_of_capped_logits_sinks_and_biases_are_those_of_jax(rng, implementation):
  shapes = [(2, 6, 4, 8), (2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8), (4,), (4, 8)]
  cotangent, *operands = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
  may_see = (SEGMENT_IDS[:, :, None] == SEGMENT_IDS[:, None, :]) & np.tri(6, dtype=bool)

  def ours(query, key, value, sinks, table):
    bias = PositionBias(table=table, max_distance=6, bidirectional=False)
    options = AttentionOptions(logit_cap=2.0, sinks=sinks, bias=bias)
    return attend(query, key, value, SEGMENT_IDS, options, implementation=implementation)

  def theirs(query, key, value, sinks, table):
    logits = jnp.einsum('BTGRK,BSGK->BGRTS', query.reshape(2, 6, 2, 2, 8), key) / np.sqrt(8)
    columns = np.arange(6)
    bias = PositionBias(table=table, max_distance=6, bidirectional=False).between(columns, columns)
    logits = 2.0 * jnp.tanh(logits / 2.0) + bias.reshape(1, 2, 2, 6, 6)
    logits = jnp.where(may_see[:, None, None], logits, -jnp.inf)
    sinks = jnp.broadcast_to(sinks.reshape(1, 2, 2, 1, 1), (2, 2, 2, 6, 1))
    weights = jax.nn.softmax(jnp.concatenate([logits, sinks], axis=-1), axis=-1)[..., :-1]
    return jnp.einsum('BGRTS,BSGK->BTGRK', weights, value).reshape(2, 6, 4, 8)

  made, wanted = (jax.jit(lambda *xs, f=f: jax.vjp(f, *xs)[1](cotangent))(*operands) for f in (ours, theirs))
  for gradient, expected in zip(made, wanted, strict=True):
    np.testing.assert_allclose(gradient, expected, atol=2e-5)  # float32


def test_the_backward_pass_computes_the_weights_again():
  shapes = [(2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8)]
  options = AttentionOptions(logit_cap=2.0, sinks=jnp.ones(4))
  call = functools.partial(attend, segment_ids=jnp.asarray(SEGMENT_IDS), options=options, implementation='xla')
  _, pull_back = jax.vjp(call, *map(jnp.ones, shapes))
  kept = {x.shape for x in jax.tree.leaves(pull_back) if x.shape[-2:] == (6, 6)}
  assert kept == {(2, 1, 1, 6, 6)}  # the mask of all heads


@pytest.mark.parametrize('implementation', ['xla', 'blockwise'])
@pytest.mark.parametrize(
  'options',
  [
    pytest.param({'causal': False}, id='of another text'),
    pytest.param({}, id='causal', marks=pytest.mark.exhaustive),
    pytest.param({'causal': False, 'even_padding': True}, id='evenly attending padding'),
    pytest.param({'logit_cap': 2.0, 'causal': False}, id='capped', marks=pytest.mark.exhaustive),
  ],
)
def test_gradients_of_queries_that_see_no_key_are_finite_differences(rng, implementation, options):
  segment_ids, key_segments = np.array([[1, 1, 2], [1, 0, 1]]), np.array([[1, 1, 3], [0, 0, 0]])
  shapes = [(2, 3, heads, 4) for heads in (4, 4, 2, 2)]
  cotangent, *operands = (rng.normal(size=shape) for shape in shapes)
  settings = AttentionOptions(**options)

  def ours(*operands):
    return attend(*operands, segment_ids, settings, key_segments=key_segments, implementation=implementation)

  def in_float64(query, key, value):
    may_see = segment_ids[:, :, None] == key_segments[:, None, :]
    may_see &= np.tri(3, dtype=bool) if settings.causal else True
    may_see &= (segment_ids != 0)[:, :, None] if settings.even_padding else True
    logits = np.einsum('BTGRK,BSGK->BGRTS', query.reshape(2, 3, 2, 2, 4), key) / np.sqrt(4)
    cap = settings.logit_cap or 1e9
    weights = np.exp(np.where(may_see[:, None, None], cap * np.tanh(logits / cap), -1e30))
    sees_none = ~np.any(may_see, axis=-1)[:, None, None, :, None]
    weights = np.where(sees_none, 1.0, weights)
    weights /= np.sum(weights, axis=-1, keepdims=True)
    return np.einsum('BGRTS,BSGK->BTGRK', weights, value).reshape(2, 3, 4, 4)

  made = jax.vjp(ours, *(x.astype(np.float32) for x in operands))[1](cotangent.astype(np.float32))
  for number, gradient in enumerate(made):
    for place in np.ndindex(*gradient.shape[:2]):  # along one direction for each token
      step = np.zeros_like(operands[number])
      step[place] = rng.normal(size=step.shape[2:])
      ahead, behind = ([*operands] for _ in range(2))
      ahead[number], behind[number] = operands[number] + 1e-5 * step, operands[number] - 1e-5 * step
      expected = np.sum((in_float64(*ahead) - in_float64(*behind)) * cotangent) / 2e-5
      np.testing.assert_allclose(np.sum(gradient * step), expected, atol=1e-4, rtol=1e-4)  # float32


@pytest.mark.parametrize(
  'fields, message',
  [
    ({'num_heads': 6, 'num_kv_heads': 4}, 'num_kv_heads=4: choose a divisor'),
    ({'num_heads': 0, 'num_kv_heads': 2}, 'num_heads=0: set head_dim'),
    ({'num_heads': 4}, 'num_heads=4: set head_dim'),
    ({'num_heads': 3, 'rotary': Rotary()}, 'need segment_pos'),
    ({'num_heads': 3, 'window': 2, 'chunk': 2}, 'chunk=2 must be at least 1, and needs causal=True'),
    ({'num_heads': 3, 'norms_rotated': True}, 'norms_rotated=True needs qk_norm and rotary'),
    ({'num_heads': 3, 'window': 2, 'causal': False}, 'window=2 with causal=False'),
    ({'num_heads': 3, 'rotary': None, 'implementation': 'cudnn'}, "platform 'cpu'"),
  ],
)
def test_impossible_settings_are_errors(fields, message):
  with pytest.raises(ValueError, match=message):
    Attention(**fields).init(jax.random.key(0), np.zeros((2, 6, 30), np.float32))
