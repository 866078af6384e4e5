import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.layers import LanguageModelLoss

B, T, V = 3, 4, 11


def _case(rng):
  """Logits, and a batch with fractional weights and a row of padding."""
  weights = rng.choice([0.0, 0.5, 1.0], size=(B, T)).astype(np.float32)
  weights[0, 0], weights[2] = 1.0, 0.0
  logits = (3.0 * rng.normal(size=(B, T, V))).astype(np.float32)
  return logits, {'labels': rng.integers(0, V, (B, T)).astype(np.int32), 'weights': weights}


def _reference(logits, batch, smoothing, z_weight):
  """Token by token: the mean loss and its parts."""
  totals = dict.fromkeys(('loss', 'cross_entropy', 'z_loss', 'accuracy'), 0.0)
  rows = np.zeros(B)
  for b in range(B):
    for t in range(T):
      values = logits[b, t].astype(np.float64)
      log_normalizer = np.log(np.exp(values).sum())
      log_probabilities = values - log_normalizer
      target = np.full(V, smoothing / V)
      target[batch['labels'][b, t]] += 1 - smoothing
      cross_entropy, z_loss = -log_probabilities[batch['labels'][b, t]], z_weight * log_normalizer**2
      weight = batch['weights'][b, t]
      totals['loss'] += weight * (-(target * log_probabilities).sum() + z_loss)
      totals['cross_entropy'] += weight * cross_entropy
      totals['z_loss'] += weight * z_loss
      totals['accuracy'] += weight * (values.argmax() == batch['labels'][b, t])
      rows[b] += weight * cross_entropy
  weight = batch['weights'].sum()
  return {name: total / weight for name, total in totals.items()}, rows


@pytest.mark.parametrize('smoothing, z_weight', [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.3, 1e-2)])
def test_loss(rng, smoothing, z_weight):
  logits, batch = _case(rng)
  means, rows = _reference(logits, batch, smoothing, z_weight)
  out = LanguageModelLoss(label_smoothing=smoothing, z_loss_weight=z_weight)({'logits': logits, 'aux': {}}, batch)
  np.testing.assert_allclose(out.loss, means['loss'], rtol=1e-5)
  assert set(out.metrics) == {'cross_entropy', 'accuracy'} | ({'z_loss'} if z_weight else set())
  for name, (mean, weight) in out.metrics.items():
    np.testing.assert_allclose(mean, means[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(weight, batch['weights'].sum(), rtol=1e-6)
  np.testing.assert_allclose(out.weight, batch['weights'].sum(), rtol=1e-6)
  np.testing.assert_allclose(out.per_example['cross_entropy'], rows, rtol=1e-5)
  np.testing.assert_allclose(out.per_example['num_tokens'], batch['weights'].sum(-1), rtol=1e-6)


def test_gradient_against_finite_differences(rng):
  logits, batch = _case(rng)
  loss = LanguageModelLoss(label_smoothing=0.2, z_loss_weight=1e-2)
  gradient = jax.grad(lambda logits: loss({'logits': logits}, batch).loss)(jnp.asarray(logits))
  for index in [(0, 0, int(batch['labels'][0, 0])), (0, 0, 5), (2, 1, 3)]:
    shifted = [logits.astype(np.float64).copy() for _ in range(2)]
    shifted[0][index] += 1e-4
    shifted[1][index] -= 1e-4
    up, down = (_reference(x, batch, 0.2, 1e-2)[0]['loss'] for x in shifted)
    np.testing.assert_allclose(gradient[index], (up - down) / 2e-4, rtol=1e-3, atol=1e-7)


def test_a_batch_of_padding_has_loss_and_gradient_zero(rng):
  logits, batch = _case(rng)
  batch['weights'] = np.zeros((B, T), np.float32)
  loss = LanguageModelLoss(label_smoothing=0.1, z_loss_weight=1e-2, aux_loss_weights={'balance': 1.0})
  predictions = {'aux': {'balance': jnp.ones(2)}}
  value, gradient = jax.value_and_grad(lambda x: loss({'logits': x, **predictions}, batch).loss)(jnp.asarray(logits))
  assert value == 0.0
  np.testing.assert_array_equal(gradient, np.zeros_like(logits))


SETTINGS = {'label_smoothing': 0.1, 'z_loss_weight': 1e-2}


@pytest.mark.parametrize('settings', [{}, SETTINGS])
@pytest.mark.parametrize('unknown', [V, -1])
def test_an_unknown_label_makes_the_loss_nan(rng, unknown, settings):
  logits, batch = _case(rng)
  batch['labels'][0, 0] = unknown  # of weight 1
  out = LanguageModelLoss(**settings)({'logits': logits}, batch)
  assert np.isnan(out.loss)
  assert np.isnan(out.metrics['cross_entropy'][0])
  np.testing.assert_array_equal(np.isnan(out.per_example['cross_entropy']), [True, False, False])


@pytest.mark.parametrize('settings', [{}, SETTINGS])
@pytest.mark.parametrize('ignored', [V, -100])
def test_an_unknown_label_of_weight_0_is_harmless(rng, ignored, settings):
  logits, batch = _case(rng)
  labels = np.where(batch['weights'] == 0, ignored, batch['labels'])
  loss = jax.value_and_grad(lambda x, labels: LanguageModelLoss(**settings)({'logits': x}, batch | labels).loss)
  expected = loss(jnp.asarray(logits), {})
  jax.tree.map(np.testing.assert_array_equal, loss(jnp.asarray(logits), {'labels': labels}), expected)
  assert np.isfinite(expected[0])


def test_aux_losses_are_added_by_name_as_the_mean_over_layers(rng):
  """T5X's cases: 0.1 * mean(1, 2) = 0.15 and 10 * mean(0, 1) = 5."""
  logits, batch = _case(rng)
  aux = {'balance': jnp.array([1.0, 2.0]), 'z': jnp.array([0.0, 1.0]), 'dropped': jnp.array([5.0, 5.0])}
  plain = LanguageModelLoss()({'logits': logits}, batch)
  for weights, added in [({'balance': 0.1}, 0.15), ({'z': 10.0}, 5.0), ({'balance': 0.1, 'z': 10.0}, 5.15)]:
    out = LanguageModelLoss(aux_loss_weights=weights)({'logits': logits, 'aux': aux}, batch)
    np.testing.assert_allclose(out.loss, plain.loss + added, rtol=1e-6)
    np.testing.assert_allclose(out.metrics['balance'][0], 1.5)  # without its weight
  with pytest.raises(UserError, match='aux_loss_weights has balance=nan, which must be finite'):
    LanguageModelLoss(aux_loss_weights={'balance': math.nan})({'logits': logits, 'aux': aux}, batch)


def test_every_aux_entry_is_a_metric_averaged_over_layers(rng):
  """Whether or not there is a loss of it; one value per expert where the entry has them, of which there is no loss."""
  logits, batch = _case(rng)
  values = {'alone': rng.normal(size=()), 'stacked': rng.normal(size=3), 'expert_load': rng.normal(size=(3, 4))}
  aux = {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
  out, plain = (LanguageModelLoss()({'logits': logits} | given, batch) for given in ({'aux': aux}, {}))
  assert set(out.metrics) == set(plain.metrics) | set(aux)
  for name, value in values.items():
    mean = value.mean(axis=0) if value.ndim else value
    np.testing.assert_allclose(out.metrics[name][0], mean, rtol=1e-5, atol=1e-7, err_msg=name)
    assert out.metrics[name][1] == out.weight
  assert out.loss == plain.loss
  loss = LanguageModelLoss(aux_loss_weights={'expert_load': 1.0})
  with pytest.raises(ValueError, match=r"'expert_load' has shape \(2, 4\), but must have one value per layer"):
    loss({'logits': logits, 'aux': {'expert_load': jnp.ones((2, 4))}}, batch)


def test_bfloat16_logits_are_summed_in_float32(rng):
  logits, batch = _case(rng)
  rounded = jnp.asarray(logits, 'bfloat16')
  means, _ = _reference(np.asarray(rounded, np.float32), batch, 0.0, 0.0)
  np.testing.assert_allclose(LanguageModelLoss()({'logits': rounded}, batch).loss, means['loss'], rtol=1e-5)


def test_losses_of_the_sources_of_a_mixture_are_means_over_their_tokens(rng):
  logits, batch = _case(rng)
  batch['weights'][1, 1] = 1.0
  row_sources = np.array([2, 0, 2])[:, None] == np.arange(3)  # the last row is padding
  in_mixture = LanguageModelLoss(label_smoothing=0.1, z_loss_weight=1e-2)
  loss = jax.jit(lambda predictions, batch: in_mixture(predictions, batch))
  out, plain = loss({'logits': logits}, batch | {'row_sources': row_sources}), loss({'logits': logits}, batch)
  assert set(out.metrics) - set(plain.metrics) == {'loss_by_source'}
  np.testing.assert_array_equal(out.loss, plain.loss)
  means, weights = out.metrics['loss_by_source']
  for source, rows in ((0, [1]), (2, [0, 2])):
    alone = loss({'logits': logits[rows]}, {key: x[rows] for key, x in batch.items()})
    np.testing.assert_allclose(means[source], alone.loss, rtol=1e-6)
    np.testing.assert_allclose(weights[source], batch['weights'][rows].sum(), rtol=1e-6)
  assert [means[1], weights[1]] == [0, 0]


def test_a_batch_without_weights_raises_a_user_error():
  batch = {'ids': jnp.ones((B, T), int), 'labels': jnp.ones((B, T), int)}
  with pytest.raises(UserError, match='the batch has no weights, which LanguageModelLoss reads, only ids, labels: add'):
    LanguageModelLoss()({'logits': jnp.zeros((B, T, V))}, batch)
