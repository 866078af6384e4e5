"""A transformer in float64 numpy, written with loops over rows, heads and tokens: nothing in common with the layers.

Shapes: B batch, T sequence, D model, H heads, G key/value heads, K head dim, F ffn, V vocab, L layers.
"""

import math

import numpy as np


def to_float64(tree):
  """Nested dicts of arrays as float64 numpy."""
  if isinstance(tree, dict):
    return {name: to_float64(value) for name, value in tree.items()}
  return np.asarray(tree, np.float64)


def rms_norm(x, scale, epsilon=1e-6):
  """Over the last dims, as many as the scale has."""
  dims = tuple(range(-np.ndim(scale), 0))
  return x / np.sqrt((x**2).mean(dims, keepdims=True) + epsilon) * scale


def layer_norm(x, scale, bias, epsilon=1e-6):
  mean = x.mean(-1, keepdims=True)
  return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + epsilon) * scale + bias


def gelu_tanh(x):
  return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def gelu_erf(x):
  return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def silu(x):
  return x / (1 + np.exp(-x))


def rotate(vector, position, max_wavelength=10_000.0, *, num_features=None, frequencies=None, amplitude=1.0):
  """Rotary embedding of one head's vector [K], pair by pair: feature i with feature i + d/2 of the first d."""
  num_features = num_features or len(vector)
  half = num_features // 2
  out = np.array(vector)
  for i in range(half):
    frequency = max_wavelength ** (-2 * i / num_features) if frequencies is None else frequencies[i]
    angle = position * frequency
    a, b = vector[i], vector[i + half]
    out[i] = (a * math.cos(angle) - b * math.sin(angle)) * amplitude
    out[i + half] = (b * math.cos(angle) + a * math.sin(angle)) * amplitude
  return out


def soft_cap(x, cap):
  return x if cap is None else cap * np.tanh(x / cap)


def attention(
  x,
  weights,
  segment_ids,
  segment_pos,
  *,
  causal=True,
  window=None,
  chunk=None,
  rotary=True,
  temperature=lambda position: 1.0,
  qk_norm=False,
  norms_rotated=False,
  normalizes_values=False,
  epsilon=1e-6,
  clip=np.inf,
  logit_cap=None,
  scale=None,
):
  """X [B, T, D] -> [B, T, D], one query at a time."""
  weights = {'value': weights['key'], **weights}
  kernels = {name: weights[name]['kernel'] for name in ('query', 'key', 'value', 'out')}
  biases = {name: weights[name].get('bias', 0.0) for name in kernels}
  num_heads, num_kv_heads = kernels['query'].shape[1], kernels['key'].shape[1]
  head_dim = kernels['query'].shape[2]
  result = np.zeros_like(x)
  for row in range(x.shape[0]):
    query, key, value = (
      np.einsum('td,dhk->thk', x[row], kernels[name]) + biases[name] for name in ('query', 'key', 'value')
    )
    scales = [
      weights[f'{name}_norm']['scale'] if f'{name}_norm' in weights else np.ones(1) for name in ('query', 'key')
    ]
    if normalizes_values:
      value = rms_norm(value, np.ones(1), epsilon)
    if qk_norm and not norms_rotated:
      query, key = (rms_norm(x, scale, epsilon) for x, scale in zip((query, key), scales, strict=True))
    query, key, value = (x.clip(-clip, clip) for x in (query, key, value))
    if rotary is not False:
      settings = {} if rotary is True else rotary
      for t, position in enumerate(segment_pos[row]):
        query[t] = [rotate(vector, position, **settings) for vector in query[t]]
        key[t] = [rotate(vector, position, **settings) for vector in key[t]]
    if qk_norm and norms_rotated:
      query, key = (rms_norm(x, scale, epsilon) for x, scale in zip((query, key), scales, strict=True))
    query = query * np.array([temperature(position) for position in segment_pos[row]])[:, None, None]
    for t in range(x.shape[1]):
      visible = [s for s in range(x.shape[1]) if segment_ids[row, s] == segment_ids[row, t] and (s <= t or not causal)]
      visible = visible if window is None else [s for s in visible if s > t - window]
      if chunk is not None:
        visible = [s for s in visible if segment_pos[row, s] // chunk == segment_pos[row, t] // chunk]
      for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        logits = np.array([query[t, head] @ key[s, kv_head] for s in visible]) * (scale or head_dim**-0.5)
        logits = soft_cap(logits, logit_cap)
        sink = [weights['sinks'][head]] if 'sinks' in weights else []
        probabilities = np.exp(np.array([*logits, *sink]) - logits.max())
        probabilities = probabilities[: len(logits)] / probabilities.sum()
        attended = sum(p * value[s, kv_head] for p, s in zip(probabilities, visible, strict=True))
        if 'gate' in weights:
          bias = weights['gate'].get('bias', np.zeros((num_heads, head_dim)))[head]
          attended = attended / (1 + np.exp(-x[row, t] @ weights['gate']['kernel'][:, head] - bias))
        result[row, t] += attended @ kernels['out'][head]
      result[row, t] += biases['out']
  return result


def gated_feed_forward(x, weights, activation=gelu_tanh):
  gate, up, down = (weights[name]['kernel'] for name in ('gate', 'up', 'down'))
  return (activation(x @ gate) * (x @ up)) @ down


def language_model(batch, weights):
  """Logits [B, T, V] of a tied, rotary, gated, RMS-normed LanguageModel; a Python loop over the L stacked layers."""
  table = weights['embedding']['table']
  x = table[batch['ids']] * math.sqrt(table.shape[1])
  layers = weights['stack']['layers']

  def layer_of(tree, index):
    return {k: layer_of(v, index) if isinstance(v, dict) else v[index] for k, v in tree.items()}

  for index in range(layers['attention_norm']['scale'].shape[0]):
    layer = layer_of(layers, index)
    normed = rms_norm(x, layer['attention_norm']['scale'])
    x = x + attention(normed, layer['attention'], batch['segment_ids'], batch['segment_pos'])
    x = x + gated_feed_forward(rms_norm(x, layer['ffn_norm']['scale']), layer['ffn'])
  return rms_norm(x, weights['final_norm']['scale']) @ table.T
