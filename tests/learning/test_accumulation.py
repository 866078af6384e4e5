"""Accumulation over microbatches gives the full batch's gradient, without moving rows between devices.

Shapes: B batch rows, T positions, V classes, M microbatches.
"""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.layers import LanguageModelLoss, LossOutput
from spmd_tasks.learning.accumulation import accumulate_gradients, split_microbatches

B, T, V = 8, 5, 7


def loss_fn(weights, batch, rng):
  """Weighted mean cross entropy of a table of logits; the metric `noise` depends on rng."""
  logits = weights['table'][batch['ids']]
  loss_BxT = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch['labels'][..., None], axis=-1)[..., 0]
  weight = jnp.sum(batch['weights'])
  mean = lambda x: jnp.sum(x * batch['weights']) / jnp.maximum(weight, 1.0)
  correct = (jnp.argmax(logits, -1) == batch['labels']).astype(jnp.float32)
  num_rows = jnp.float32(batch['ids'].shape[0])
  output = LossOutput(
    loss=mean(loss_BxT),
    weight=weight,
    metrics={
      'accuracy': (mean(correct), weight),
      'first_id': (jnp.mean(batch['ids'][:, 0].astype(jnp.float32)), num_rows),
      'id_frequency': (jax.vmap(mean, in_axes=-1)(jax.nn.one_hot(batch['ids'], V)), weight),  # [V]
      'noise': (jnp.float32(0) if rng is None else jax.random.uniform(rng), num_rows),
    },
    per_example={'loss': jnp.sum(loss_BxT, axis=1)},
  )
  return output.loss, output


@pytest.fixture
def weights(rng):
  return {'table': jnp.asarray(rng.normal(size=(V, V)), jnp.float32)}


@pytest.fixture
def batch(rng):
  """Rows have between 0 and T tokens; with M = 4, microbatch 1 (rows 1 and 5) has none."""
  num_tokens = np.array([5, 0, 1, 2, 4, 0, 3, 5])
  return {
    'ids': rng.integers(0, V, (B, T)).astype(np.int32),
    'labels': rng.integers(0, V, (B, T)).astype(np.int32),
    'weights': (np.arange(T)[None] < num_tokens[:, None]).astype(np.float32),
  }


def full_batch(weights, batch):
  """The loss and gradient of the full batch in float64."""
  table = np.asarray(weights['table'], np.float64)
  grad, loss, num_tokens = np.zeros_like(table), 0.0, 0
  for token, label, weight in zip(batch['ids'].ravel(), batch['labels'].ravel(), batch['weights'].ravel()):
    probs = np.exp(table[token]) / np.exp(table[token]).sum()
    grad[token] += weight * (probs - np.eye(V)[label])
    loss -= weight * np.log(probs[label])
    num_tokens += weight
  scale = 1 / max(num_tokens, 1)
  return loss * scale, grad * scale


@pytest.mark.parametrize('num_microbatches', [4, 8])
def test_mean_equals_the_full_batch(num_microbatches, weights, batch):
  accumulate = jax.jit(lambda w, b: accumulate_gradients(loss_fn, w, b, None, num_microbatches, 'mean'))
  output, grads = accumulate(weights, batch)
  loss, grad = full_batch(weights, batch)
  assert grads['table'].dtype == jnp.float32
  np.testing.assert_allclose(grads['table'], grad, rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(output.loss, loss, rtol=1e-6)
  assert output.weight == batch['weights'].sum()
  _, whole = jax.jit(lambda w, b: loss_fn(w, b, None))(weights, batch)
  for name, (mean, weight) in whole.metrics.items():
    np.testing.assert_allclose(output.metrics[name][0], mean, rtol=1e-6, err_msg=name)
    assert output.metrics[name][1] == weight


def test_sum_adds_the_microbatches_mean_gradients(weights, batch):
  output, grads = jax.jit(lambda w, b: accumulate_gradients(loss_fn, w, b, None, 4, 'sum'))(weights, batch)
  expected = np.zeros((V, V))
  for m in range(4):
    expected += full_batch(weights, {name: x[m::4] for name, x in batch.items()})[1]
  np.testing.assert_allclose(grads['table'], expected, rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(output.loss, full_batch(weights, batch)[0], rtol=1e-6)


AUX_WEIGHTS = {'size': 0.3, 'mean_square': 0.2}


def with_aux_losses(normalization):
  """A loss function with two aux losses: one of the weights only, and one that is a mean over tokens."""
  loss = LanguageModelLoss(normalization=normalization, aux_loss_weights=AUX_WEIGHTS)

  def compute(weights, batch, rng):
    logits = weights['table'][batch['ids']]
    squares = jnp.sum(jnp.square(logits), axis=-1) * batch['weights']
    aux = {
      'size': jnp.sum(jnp.square(weights['table'])),
      'mean_square': jnp.sum(squares) / jnp.maximum(jnp.sum(batch['weights']), 1.0),
    }
    output = loss({'logits': logits, 'aux': aux}, batch)
    return output.loss, output

  return compute


def with_aux_losses_in_float64(weights, batch, normalization):
  """The loss, its gradient and the aux losses, token by token."""
  table, tokens = np.asarray(weights['table'], np.float64), batch['weights'].sum()
  batch_divisor = {'all_tokens': batch['ids'].size, 'tokens': tokens, 'sum': 1.0}.get(normalization, normalization)
  num_tokens = batch['weights'].sum(axis=1)
  aux = {'size': np.sum(table**2), 'mean_square': 0.0}
  loss, grad = AUX_WEIGHTS['size'] * aux['size'], AUX_WEIGHTS['size'] * 2 * table
  for b, t in zip(*np.nonzero(batch['weights']), strict=True):
    token, label = batch['ids'][b, t], batch['labels'][b, t]
    probs = np.exp(table[token]) / np.exp(table[token]).sum()
    divisor = np.sum(num_tokens > 0) * num_tokens[b] if normalization == 'sequences' else batch_divisor
    loss -= np.log(probs[label]) / divisor
    grad[token] += (probs - np.eye(V)[label]) / divisor
    aux['mean_square'] += np.sum(table[token] ** 2) / tokens
    grad[token] += AUX_WEIGHTS['mean_square'] * 2 * table[token] / tokens
  return loss + AUX_WEIGHTS['mean_square'] * aux['mean_square'], grad, aux


@pytest.mark.parametrize(
  'normalization', ['tokens', 'all_tokens', 'sequences', 'sum', pytest.param(10.0, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize('num_microbatches', [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_aux_losses_count_once_for_any_number_of_microbatches(normalization, num_microbatches, weights, batch):
  """One of four microbatches has no tokens."""
  compute = with_aux_losses(normalization)
  loss, grad, aux = with_aux_losses_in_float64(weights, batch, normalization)

  @jax.jit
  def both(weights, batch):
    whole = jax.value_and_grad(compute, has_aux=True)(weights, batch, None)
    return accumulate_gradients(compute, weights, batch, None, num_microbatches), whole

  (output, grads), ((full_loss, _), full_grads) = both(weights, batch)
  np.testing.assert_allclose(output.loss, loss, rtol=1e-5)
  np.testing.assert_allclose(grads['table'], grad, rtol=1e-4, atol=1e-6)
  for name, value in aux.items():
    np.testing.assert_allclose(output.metrics[name][0], value, rtol=1e-5, err_msg=name)
  np.testing.assert_allclose(full_loss, loss, rtol=1e-5)
  np.testing.assert_allclose(full_grads['table'], grad, rtol=1e-4, atol=1e-6)


def test_aux_losses_of_a_sum_count_once_per_microbatch_in_mode_sum(weights, batch):
  accumulate = jax.jit(lambda w, b: accumulate_gradients(with_aux_losses('sum'), w, b, None, 2, 'sum'))
  output, grads = accumulate(weights, batch)
  halves = [with_aux_losses_in_float64(weights, {k: x[m::2] for k, x in batch.items()}, 'sum') for m in range(2)]
  np.testing.assert_allclose(output.loss, sum(half[0] for half in halves), rtol=1e-5)
  np.testing.assert_allclose(grads['table'], sum(half[1] for half in halves), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('is_sum', [False, True])
@pytest.mark.parametrize('mode', ['mean', 'sum'])
def test_a_microbatch_of_weight_0_contributes_nothing(is_sum, mode, weights, batch):
  """Microbatch 1 has no tokens: its loss, metrics, gradient and updated variables are 0 / 0."""

  def unguarded(weights, batch, rng):
    loss, output = loss_fn(weights, batch, rng)
    weight = jnp.sum(batch['weights'])
    nan = loss * (0 / weight)
    updated = {'statistics': {'mean': jnp.sum(batch['weights'] * batch['ids']) / weight + nan}}
    metrics = {'accuracy': (output.metrics['accuracy'][0] + nan, weight)}
    loss = loss * (weight if is_sum else 1.0) + nan
    return loss, output.replace(loss=loss, is_sum=is_sum, metrics=metrics, updated_variables=updated)

  output, grads = jax.jit(lambda w, b: accumulate_gradients(unguarded, w, b, None, 4, mode))(weights, batch)
  parts = [{name: x[m::4] for name, x in batch.items()} for m in (0, 2, 3)]
  counts = np.array([part['weights'].sum() for part in parts])
  losses, gradients = zip(*(full_batch(weights, part) for part in parts), strict=True)
  scales = np.ones(3) if mode == 'sum' and not is_sum else counts
  divisor = counts.sum() if mode == 'mean' and not is_sum else 1.0
  expected = np.tensordot(scales, gradients, 1) / divisor
  np.testing.assert_allclose(grads['table'], expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(output.loss, np.dot(counts, losses) / (1.0 if is_sum else counts.sum()), rtol=1e-6)
  np.testing.assert_allclose(output.metrics['accuracy'][0], loss_fn(weights, batch, None)[1].metrics['accuracy'][0])
  means = [np.sum(part['weights'] * part['ids']) / count for part, count in zip(parts, counts, strict=True)]
  np.testing.assert_allclose(output.updated_variables['statistics']['mean'], np.mean(means), rtol=1e-6)


@pytest.mark.parametrize('mode', ['mean', 'sum'])
def test_a_gradient_that_is_a_sum_is_added_in_both_modes(mode, weights, batch):
  """An example is the load of experts, which does not depend on loss weights."""

  def counting(weights, batch, rng):
    _, output = loss_fn({'table': weights['table']}, batch, rng)
    num_rows = jnp.float32(len(batch['weights']))
    return output.loss + num_rows * jnp.sum(weights['count']), output

  both, is_sum = weights | {'count': jnp.zeros(2)}, dict.fromkeys(weights, False) | {'count': True}
  _, grads = jax.jit(lambda w, b: accumulate_gradients(counting, w, b, None, 4, mode, is_sum))(both, batch)
  np.testing.assert_array_equal(grads['count'], [B, B])
  _, expected = jax.jit(lambda w, b: accumulate_gradients(loss_fn, w, b, None, 4, mode))(weights, batch)
  np.testing.assert_array_equal(grads['table'], expected['table'])


def test_microbatches_after_the_last_token_are_not_computed(weights, batch):
  """Microbatches 2 and 3 (rows 2, 3, 6 and 7) have no segments; their loss weights would count if computed."""
  has_text = np.isin(np.arange(B) % 4, (0, 1))
  segment_ids = np.broadcast_to(has_text[:, None], (B, T)).astype(np.int32)
  skipping = jax.jit(lambda w, b: accumulate_gradients(loss_fn, w, b, None, 4, skips_empty=True))
  output, grads = skipping(weights, batch | {'segment_ids': segment_ids})
  batch['weights'] *= has_text[:, None]
  expected, expected_grads = jax.jit(lambda w, b: accumulate_gradients(loss_fn, w, b, None, 4))(weights, batch)
  np.testing.assert_array_equal(grads['table'], expected_grads['table'])
  assert (output.loss, output.weight) == (expected.loss, expected.weight)
  assert output.metrics['accuracy'] == expected.metrics['accuracy']


def test_each_microbatch_has_its_own_rng(weights, batch):
  rng = jax.random.key(3)
  expected = np.mean([jax.random.uniform(jax.random.fold_in(rng, m)) for m in range(4)])
  output, _ = jax.jit(lambda w, b: accumulate_gradients(loss_fn, w, b, rng, 4))(weights, batch)
  np.testing.assert_allclose(output.metrics['noise'][0], expected, rtol=1e-6)


def test_rows_are_split_with_strides_and_stay_on_their_device():
  mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = NamedSharding(mesh, PartitionSpec('data'))
  rows = np.arange(32 * 3, dtype=np.float32).reshape(32, 3)
  split = jax.jit(lambda x: split_microbatches({'x': x}, 2)['x'], in_shardings=sharding)
  compiled = split.lower(rows).compile()
  text = compiled.as_text()
  for collective in ('all-gather', 'all-to-all', 'collective-permute', 'all-reduce'):
    assert collective not in text
  parts = compiled(jax.device_put(rows, sharding))
  assert parts.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(None, 'data')), parts.ndim)
  np.testing.assert_array_equal(parts, np.stack([rows[0::2], rows[1::2]]))


def test_an_uneven_batch_is_refused_before_tracing(weights, batch):
  def never(weights, batch, rng):
    raise AssertionError('traced')

  with pytest.raises(UserError, match=r'8 rows .* num_microbatches=3: choose a divisor, such as 2'):
    accumulate_gradients(never, weights, batch, None, 3)
