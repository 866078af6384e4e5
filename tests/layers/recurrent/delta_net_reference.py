"""Gated DeltaNet in float64 numpy, one row, document, head and token after another, as the paper's formula has it."""

import numpy as np

from tests.layers.transformer_reference import rms_norm, silu, to_float64


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def delta_rule(query, key, value, log_decay, strength, state):
  """[T, K], [T, K], [T, V], [T] or [T, K], [T] and [K, V] of one head -> [T, V] and the last state."""
  outputs = []
  for q, k, v, g, b in zip(query, key, value, log_decay, strength):
    state = np.exp(g)[..., None] * state
    state = state + np.outer(k, b * (v - state.T @ k))
    outputs.append(state.T @ q)
  return np.array(outputs), state


def convolve(x, taps):
  """[T, H, K] and [W, H, K] -> [T, H, K]: the last tap is of the token itself."""
  num_taps = len(taps)
  return np.array([
    sum(taps[num_taps - 1 - back] * x[t - back] for back in range(min(num_taps, t + 1))) for t in range(len(x))
  ])  # fmt: skip


def delta_net(x, segment_ids, weights, *, max_strength=1.0, epsilon=1e-6, gate_activation=silu):
  """[B, T, D] -> [B, T, D]; padding gets zeros."""
  weights, y = to_float64(weights), np.zeros_like(x)
  for row, ids, y_row in zip(x, segment_ids, y):
    for document in set(ids) - {0}:
      y_row[ids == document] = _of_document(row[ids == document], weights, max_strength, epsilon, gate_activation)
  return y


def _of_document(x, weights, max_strength, epsilon, gate_activation):
  def project(name):
    inputs = project(f'{name}_down') if f'{name}_down' in weights else x
    return np.tensordot(inputs, weights[name]['kernel'], 1) + weights[name].get('bias', 0.0)

  query, key, value = (silu(convolve(project(name), weights[f'{name}_taps'])) for name in ('query', 'key', 'value'))
  query, key = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (query, key))
  num_heads, repeats = value.shape[1], value.shape[1] // key.shape[1]
  log_decay = np.moveaxis(np.log1p(np.exp(project('step') + weights['step_bias'])), 1, -1)  # heads last
  log_decay = np.moveaxis(-np.exp(weights['log_rate']) * log_decay, -1, 1)
  strength, gate = max_strength * sigmoid(project('strength')), gate_activation(project('gate'))
  y = 0.0
  for h in range(num_heads):
    k = key[:, h // repeats]
    q = query[:, h // repeats] / np.sqrt(k.shape[-1])
    zero = np.zeros((k.shape[-1], value.shape[-1]))
    read, _ = delta_rule(q, k, value[:, h], log_decay[:, h], strength[:, h], zero)
    read = rms_norm(read, weights['out_norm']['scale'], epsilon) * gate[:, h]
    y = y + read @ weights['out']['kernel'][h]
  return y + weights['out'].get('bias', 0.0)
