"""Losses in chunks of logits: values, metrics and gradients against float64 NumPy, on any mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers import LanguageModelLoss
from spmd_tasks.layers.base import layer_scope
from spmd_tasks.layers.softmax_head import SoftmaxHead, label_scores_of
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, MeshSpec, context_axis_rules
from spmd_tasks.sharding.specs import sharding_scope
from tests.layers.tiny_model import VOCAB, packed_batch, random_weights, tiny_model

B, T, D, V = 4, 6, 10, 37  # no axis of a mesh here divides V
MESHES = {
  'one device': None,
  'data 2 x mdl 4': (('replica', 'data', 'mdl'), (1, 2, 4), DEFAULT_AXIS_RULES),
  'replica 2 x data 2 x mdl 2': (('replica', 'data', 'mdl'), (2, 2, 2), DEFAULT_AXIS_RULES),
  'data 2 x context 2 x mdl 2': (
    ('replica', 'data', 'context', 'mdl'),
    (1, 2, 2, 2),
    context_axis_rules(DEFAULT_AXIS_RULES),
  ),
}


def make_batch(rng):
  """A packed batch with fractional weights, a row of padding, and labels of -100 where the weight is 0."""
  weights = rng.choice([0.0, 0.5, 1.0], size=(B, T)).astype(np.float32)
  weights[0, 0], weights[2] = 1.0, 0.0
  labels = np.where(weights == 0, -100, rng.integers(0, V, size=(B, T))).astype(np.int32)
  segment_ids = np.array([[1, 1, 2, 2, 2, 0]] * B, np.int32)
  return {'labels': labels, 'weights': weights, 'segment_ids': segment_ids}


def in_float64(x, kernel, batch, loss, cap, divisor):
  """The loss, token by token."""
  total, norm = 0.0, {'tokens': batch['weights'].sum(), 'sum': 1.0, 'all_tokens': B * T, 'sequences': 0.0}
  shares = np.array(batch['weights'], np.float64)
  if loss.normalization == 'sequences':
    for row, ids in zip(shares, batch['segment_ids'], strict=True):
      for document in set(ids):
        weight = row[ids == document].sum()
        row[ids == document] /= weight or 1.0
    norm['sequences'] = shares.sum()
  for place in np.ndindex(B, T):
    if shares[place] == 0:
      continue
    logits = x[place] @ kernel / divisor
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    log_normalizer = np.log(np.exp(logits).sum())
    smoothing, label = loss.label_smoothing, batch['labels'][place]
    target, entropy = np.full(V, smoothing / V), 0.0
    target[label] += 1 - smoothing
    if loss.smoothing == 'others' and smoothing:
      target = np.full(V, smoothing / (V - 1))
      target[label] = 1 - smoothing
      entropy = -(target * np.log(target)).sum()
    value = (target * (log_normalizer - logits)).sum() - entropy + loss.z_loss_weight * log_normalizer**2
    total += shares[place] * value
  return total / norm[loss.normalization]


def in_scope(mesh, function, *arguments):
  if MESHES[mesh] is None:
    return jax.device_get(jax.jit(function)(*arguments))
  names, shape, rules = MESHES[mesh]

  def scoped(*arguments):
    with sharding_scope(MeshSpec(axis_names=names, ici_mesh_shape=shape).build(), rules):
      return function(*arguments)

  return jax.device_get(jax.jit(scoped)(*arguments))


def head_of(x, kernel, is_table, num_chunks, cap=None, divisor=1.0, dtype='float32'):
  return SoftmaxHead(
    x=x,
    kernel=kernel,
    is_table=is_table,
    dtype=dtype,
    divisor=divisor,
    cap=cap,
    num_chunks=num_chunks,
    split_dims=('vocab', 'embed') if is_table else ('embed', 'vocab'),
    logits_split_dims=('batch', 'seq', 'act_vocab'),
  )


def assert_gradients(rng, gradients, function, operands, tolerance):
  """Compares with finite differences in float64 along random directions."""
  for number, gradient in enumerate(gradients):
    for _ in range(4):
      step = rng.normal(size=gradient.shape)
      ahead, behind = [*operands], [*operands]
      ahead[number], behind[number] = operands[number] + 1e-5 * step, operands[number] - 1e-5 * step
      expected = (function(*ahead) - function(*behind)) / 2e-5
      np.testing.assert_allclose(np.sum(gradient * step), expected, rtol=tolerance, atol=tolerance)


CASES = [
  # is_table, chunks, mesh, loss, cap, divisor, dtype
  (True, 'auto', 'one device', {'z_loss_weight': 1e-2, 'label_smoothing': 0.1}, 2.0, 1.5, 'float32'),
  (False, 3, 'data 2 x mdl 4', {'label_smoothing': 0.2, 'smoothing': 'others'}, None, 1.0, 'float32'),
  (True, 2, 'data 2 x context 2 x mdl 2', {'normalization': 'sum'}, 3.0, 1.0, 'float32'),
  (True, 4, 'one device', {'z_loss_weight': 1e-2}, None, 1.0, 'bfloat16'),
]
MORE_CASES = [
  (True, 5, 'one device', {'normalization': 'sequences', 'z_loss_weight': 1e-2}, None, 1.0, 'float32'),
  (False, 1, 'replica 2 x data 2 x mdl 2', {'normalization': 'all_tokens'}, None, 1.0, 'float32'),
]


@pytest.mark.parametrize(
  'is_table, chunks, mesh, settings, cap, divisor, dtype',
  CASES + [pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE_CASES],
)
def test_loss_and_gradients_against_float64(rng, is_table, chunks, mesh, settings, cap, divisor, dtype):
  batch, loss = make_batch(rng), LanguageModelLoss(**settings)
  x, kernel = rng.normal(size=(B, T, D)), rng.normal(size=(D, V))

  def compute(x, kernel):
    head = head_of(x, kernel.T if is_table else kernel, is_table, chunks, cap, divisor, dtype)
    output = loss({'softmax_head': head}, batch)
    return output.loss, output

  operands = x.astype(np.float32), kernel.astype(np.float32)
  (value, output), gradients = in_scope(mesh, jax.value_and_grad(compute, argnums=(0, 1), has_aux=True), *operands)
  expected = lambda x, kernel: in_float64(x, kernel, batch, loss, cap, divisor)
  tolerance = 2e-5 if dtype == 'float32' else 2e-2
  np.testing.assert_allclose(value, expected(x, kernel), rtol=tolerance)
  assert_gradients(rng, gradients, expected, (x, kernel), 1e-3 if dtype == 'float32' else 5e-2)
  # Without a gradient, and with all logits at once.
  np.testing.assert_allclose(in_scope(mesh, compute, *operands)[0], value, rtol=tolerance)
  logits = x @ kernel / divisor
  logits = np.float32(logits if cap is None else cap * np.tanh(logits / cap))
  whole = jax.jit(lambda logits: loss({'logits': logits}, batch))(logits)
  for name, (mean, _) in whole.metrics.items():
    np.testing.assert_allclose(output.metrics[name][0], mean, rtol=tolerance, atol=tolerance, err_msg=name)
  rows = whole.per_example['cross_entropy']
  np.testing.assert_allclose(output.per_example['cross_entropy'], rows, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('is_table, chunks, mesh', [(True, 3, 'one device'), (False, 'auto', 'data 2 x mdl 4')])
def test_other_functions_of_the_scores_have_gradients(rng, is_table, chunks, mesh):
  """As losses of preferences and of policies have: no sum over tokens, at a temperature."""
  batch, weights = make_batch(rng), rng.normal(size=(B, T))
  x, kernel = rng.normal(size=(B, T, D)), rng.normal(size=(D, V))
  is_known = batch['labels'] >= 0

  def compute(x, kernel):
    head = head_of(x, kernel.T if is_table else kernel, is_table, chunks, cap=4.0)
    scores = label_scores_of({'softmax_head': head}, batch['labels'], temperature=0.7)
    log_probs = jnp.where(is_known, scores.label_logit - scores.log_normalizer, 0.0)
    return jnp.sum(jnp.tanh(jnp.sum(log_probs * weights, axis=1))) + jnp.sum(scores.mean_logit * weights)

  def expected(x, kernel):
    logits = 4.0 * np.tanh(x @ kernel / 4.0) / 0.7
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    of_labels = np.take_along_axis(log_probs, np.maximum(batch['labels'], 0)[..., None], axis=-1)[..., 0] * is_known
    return np.tanh((of_labels * weights).sum(axis=1)).sum() + (logits.mean(-1) * weights).sum()

  operands = x.astype(np.float32), kernel.astype(np.float32)
  value, gradients = in_scope(mesh, jax.value_and_grad(compute, argnums=(0, 1)), *operands)
  np.testing.assert_allclose(value, expected(x, kernel), rtol=1e-4)
  assert_gradients(rng, gradients, expected, (x, kernel), 1e-3)


def test_scattered_gradients_are_the_same(rng):
  batch, loss = make_batch(rng), LanguageModelLoss()
  operands = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(D, V)).astype(np.float32)

  def gradients(scatters):
    def compute(x, kernel):
      with layer_scope(scatters_gradients=scatters):
        return loss({'softmax_head': head_of(x, kernel, False, 2)}, batch).loss

    return in_scope('replica 2 x data 2 x mdl 2', jax.grad(compute, argnums=(0, 1)), *operands)

  for gradient, expected in zip(gradients(True), gradients(False), strict=True):
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_a_frozen_kernel_has_no_products_for_its_gradient(rng):
  batch, loss = make_batch(rng), LanguageModelLoss()
  x, kernel = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(D, V)).astype(np.float32)

  def summed(x, kernel):
    return loss({'softmax_head': head_of(x, kernel, False, 2)}, batch).loss

  def compared(x, kernel):
    scores = label_scores_of({'softmax_head': head_of(x, kernel, False, 2)}, batch['labels'])
    return jnp.sum(scores.log_normalizer**2)

  for function, num_frozen, num_trained in ((summed, 2, 3), (compared, 3, 4)):
    both, frozen = jax.grad(function, argnums=(0, 1)), jax.grad(function)
    np.testing.assert_allclose(jax.jit(frozen)(x, kernel), jax.jit(both)(x, kernel)[0], atol=1e-6)
    counts = [str(jax.make_jaxpr(f)(x, kernel)).count('dot_general') for f in (frozen, both)]
    assert counts == [num_frozen, num_trained]


def test_the_logits_are_never_whole():
  """No array of the compiled gradient is [B, T, V]."""
  batch = packed_batch()
  loss = LanguageModelLoss(z_loss_weight=1e-2, label_smoothing=0.1)
  weights = random_weights(tiny_model(num_layers=1))

  def has_all_logits(num_chunks):
    model = tiny_model(num_layers=1).clone(num_logit_chunks=num_chunks)

    def compute(weights):
      return loss(model.apply({'params': weights}, batch), batch).loss

    program = jax.jit(jax.grad(compute)).lower(weights).compile().as_text()
    return re.search(rf'f32\[(3,8|1,24|24),{VOCAB}\]', program) is not None

  assert has_all_logits(1)
  assert not has_all_logits(4)
