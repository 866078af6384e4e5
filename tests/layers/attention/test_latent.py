"""Latent attention against float64 numpy that computes keys and values of all heads."""

import jax
import numpy as np
import pytest

from spmd_tasks.layers.attention import LatentAttention, Rotary, YarnScaling
from tests.layers.tiny_model import random_weights
import tests.layers.transformer_reference as reference

B, T, D, H, N, R, V, C, Q = 2, 6, 30, 3, 6, 4, 5, 8, 7
SEGMENT_IDS = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])
SEGMENT_POS = np.array([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])


def make_layer(**fields):
  dims = {'num_heads': H, 'kv_rank': C, 'nope_head_dim': N, 'rope_head_dim': R, 'value_head_dim': V}
  return LatentAttention(**dims, **fields)


def latent_attention(x, weights, *, scale, epsilon=1e-6, amplitude=1.0):
  """[B, T, D], token by token and head by head; the frequencies are Rotary's own, scaled or not."""
  weights = reference.to_float64(weights)
  project = lambda name, x: x @ weights[name]['kernel'] + weights[name].get('bias', 0.0)
  down = project('kv_down', x)
  latent, key_rope = reference.rms_norm(down[..., :C], weights['kv_norm']['scale'], epsilon), down[..., C:]
  if 'query' in weights:
    query = np.einsum('btd,dhk->bthk', x, weights['query']['kernel'])
  else:
    latent_query = reference.rms_norm(project('query_down', x), weights['query_norm']['scale'], epsilon)
    query = np.einsum('btq,qhk->bthk', latent_query, weights['query_up']['kernel'])
  y = np.zeros_like(x)
  for b, t, h in np.ndindex(B, T, H):
    visible = [s for s in range(t + 1) if SEGMENT_IDS[b, s] == SEGMENT_IDS[b, t]]
    rotate = lambda vector, s, b=b: reference.rotate(vector, SEGMENT_POS[b, s], amplitude=amplitude)
    turned = rotate(query[b, t, h, N:], t)
    keys_and_values = [latent[b, s] @ weights['kv_up'][:, h] for s in visible]
    logits = [
      query[b, t, h, :N] @ kv[:N] + turned @ rotate(key_rope[b, s], s) for kv, s in zip(keys_and_values, visible)
    ]
    probabilities = np.exp(scale * np.array(logits))
    attended = sum(p * kv[N:] for p, kv in zip(probabilities / probabilities.sum(), keys_and_values))
    y[b, t] += attended @ weights['out']['kernel'][h]
  return y + weights['out'].get('bias', 0.0)


@pytest.mark.parametrize(
  'fields, settings',
  [
    ({}, {'scale': (N + R) ** -0.5}),
    ({'query_rank': Q, 'epsilon': 0.1, 'use_bias': True}, {'scale': (N + R) ** -0.5, 'epsilon': 0.1}),
    (
      {
        'rotary': Rotary(scaling=YarnScaling(factor=1.0, original_length=64, attention_factor=1.3)),
        'softmax_scale': 0.5,
      },
      {'scale': 0.5, 'amplitude': 1.3},
    ),
  ],
  ids=['direct queries', 'latent queries, biases', 'scale, amplitude'],
)
def test_is_attention_to_keys_and_values_of_every_head(rng, fields, settings):
  layer, x = make_layer(**fields), rng.normal(size=(B, T, D)).astype(np.float32)
  weights = random_weights(layer, x, SEGMENT_IDS, SEGMENT_POS)
  actual = jax.jit(layer.apply)({'params': weights}, x, SEGMENT_IDS, SEGMENT_POS)
  np.testing.assert_allclose(actual, latent_attention(x.astype(np.float64), weights, **settings), rtol=1e-4, atol=1e-5)
