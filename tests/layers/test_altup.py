"""Blocks over several residual streams against float64 numpy."""

import functools
import math

import flax.linen as nn
import jax
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.layers import AltUp, AltUpBlock, LayerInput, LearnedResidual, ResidualStreams, RmsNorm
from tests.layers.tiny_model import random_weights
from tests.layers.transformer_reference import gelu_tanh, rms_norm, to_float64

B, T, N, D, R, P = 2, 3, 4, 6, 5, 7


class Twice(nn.Module):
  """In the place of attention and of the feed-forward network."""

  @nn.compact
  def __call__(self, x):
    return 2 * x


def make_block(**fields):
  parts = {'attention': Twice(), 'ffn': Twice(), 'norm': RmsNorm(), 'layer_input': LayerInput()}
  altup, laurel = AltUp(num_streams=N), LearnedResidual(rank=R)
  return AltUpBlock(**{'altup': altup, 'laurel': laurel, 'post_norm': True, **parts, **fields})


def block_in_numpy(weights, x, layer_input):
  norm = lambda name, x: rms_norm(x, weights[name]['scale'])
  altup, laurel, inputs = weights['altup'], weights['laurel'], weights['layer_input']

  def context(x):
    return np.tanh(rms_norm(x, altup['norm_of_input']['scale']) / D @ altup['router']['kernel'])

  streams = x.reshape(B, T, N, D)
  coefficients = np.tensordot(context(streams[:, :, 0]), altup['prediction']['kernel'], 1)  # [B, T, to, from]
  predicted = streams + coefficients @ streams
  h = predicted[:, :, 0]
  n = norm('attention_norm', h)
  residual = n + rms_norm(n @ laurel['left']['kernel'] @ laurel['right']['kernel'], laurel['out_norm']['scale'])
  g = (h + norm('attention_post_norm', 2 * n) + residual) / math.sqrt(2)
  y = g + norm('ffn_post_norm', 2 * norm('ffn_norm', g))
  corrected = 1 + context(y) @ altup['correction']['kernel']
  streams = predicted + corrected[..., None] * (y - h)[:, :, None]
  first = streams[:, :, 0] * weights['first_scale']
  first = gelu_tanh(first @ inputs['gate']['kernel']) * layer_input @ inputs['out']['kernel']
  streams[:, :, 1:] += norm('layer_input_post_norm', first)[:, :, None]
  return streams.reshape(B, T, N * D)


def test_block(rng):
  x, vectors = (rng.normal(size=(B, T, size)).astype(np.float32) for size in (N * D, P))
  block = make_block()
  apply = functools.partial(block.apply, layer_inputs=vectors[None])
  initialize = functools.partial(block.init, layer_inputs=vectors[None])
  weights = random_weights(type('Block', (), {'init': staticmethod(initialize)}), x)
  y, aux = jax.jit(apply)({'params': weights}, x)
  np.testing.assert_allclose(y, block_in_numpy(to_float64(weights), np.float64(x), np.float64(vectors)), atol=1e-5)
  assert aux == {}


def test_streams_have_the_magnitude_of_the_first(rng):
  x, streams = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(B, T, N * D)).astype(np.float32)
  layer = ResidualStreams(num_streams=N, embed_dim=D)
  kernels = {name: rng.normal(size=(N - 1, D, D)).astype(np.float32) for name in ('expand', 'merge')}
  magnitude = lambda x: np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True))
  scaled = lambda first, y: y * magnitude(first) / magnitude(y)
  expected = np.concatenate([x, *(scaled(x, x @ kernel) for kernel in kernels['expand'])], axis=-1)
  np.testing.assert_allclose(layer.apply({'params': kernels}, x, method='expand'), expected, rtol=1e-4, atol=1e-5)
  first, *others = np.split(streams, N, axis=-1)
  merged = [first, *(scaled(first, other @ kernel) for other, kernel in zip(others, kernels['merge']))]
  actual = layer.apply({'params': kernels}, streams, method='merge')
  np.testing.assert_allclose(actual, np.mean(merged, axis=0), rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused():
  with pytest.raises(UserError, match='pre_norm=True and post_norm=True'):
    make_block(post_norm=False)
  with pytest.raises(UserError, match='num_streams=1 must be at least 2'):
    ResidualStreams(num_streams=1, embed_dim=D)
  with pytest.raises(UserError, match='needs a layer_input, and its model a layer_embedding'):
    jax.eval_shape(make_block().init, jax.random.key(0), np.zeros((B, T, N * D), np.float32))
