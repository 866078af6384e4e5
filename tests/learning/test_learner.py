"""A learner step clips, averages and reports metrics; a non-finite step changes only the counts of skipped steps."""

import dataclasses

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.learning import AdamW, FromOptax, Learner
from spmd_tasks.learning.learner import global_norm
from spmd_tasks.sharding import WeightSpec

SPECS = {
  'kernel': WeightSpec(shape=(3, 4, 6), init=None, stacked=1),
  'scale': WeightSpec(shape=(6,), init=None, tags=('no_decay',)),
}
SGD = FromOptax(factory=optax.sgd, learning_rate=1.0)


def random_tree(rng):
  return {name: jnp.asarray(rng.normal(size=spec.shape), jnp.float32) for name, spec in SPECS.items()}


def numpy_norm(tree):
  return np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree)))


def step_once(learner, grads, weights, loss=1.0, step=0):
  state = learner.init(weights, SPECS)
  return learner.update(grads, jnp.float32(loss), jnp.int32(step), state, weights, SPECS)


@pytest.mark.parametrize('max_norm', [0.5, 1e6])
def test_clip_by_global_norm(max_norm, rng):
  weights, grads = random_tree(rng), random_tree(rng)
  norm = numpy_norm(grads)
  new_weights, _, metrics = step_once(Learner(optimizer=SGD, clip_global_norm=max_norm), grads, weights)
  for name in SPECS:
    expected = np.asarray(weights[name], np.float64) - np.asarray(grads[name], np.float64) * min(1, max_norm / norm)
    np.testing.assert_allclose(new_weights[name], expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(metrics['grad_norm'], norm, rtol=1e-6)  # before clipping


def test_norms_of_bfloat16_are_summed_in_float32():
  # In bfloat16 a sum of ones does not grow beyond 256.
  specs = {'w': WeightSpec(shape=(1024,), init=None)}
  assert global_norm({'w': jnp.ones((1024,), jnp.bfloat16)}, specs) == 32.0


def test_bfloat16_weights_are_warned_of(monkeypatch):
  logged = []
  monkeypatch.setattr(logging, 'log_first_n', lambda level, message, n, *args: logged.append(message % args))
  narrow = {name: dataclasses.replace(spec, dtype=jnp.bfloat16) for name, spec in SPECS.items()}
  weights = jax.tree.map(lambda spec: jnp.ones(spec.shape, spec.dtype), narrow)
  Learner(optimizer=SGD).init(weights, narrow)
  assert len(logged) == 1
  assert '2 trained weights, such as kernel, are stored in less than float32' in logged[0]
  # 50 steps of 1e-3 do not change bfloat16 weights, and change float32 weights by 0.05.
  for specs in (narrow, SPECS):
    weights = jax.tree.map(lambda spec: jnp.ones(spec.shape, spec.dtype), specs)
    learner, state = (
      Learner(optimizer=FromOptax(factory=optax.sgd, learning_rate=1e-3)),
      Learner(optimizer=SGD).init(weights, specs),
    )

    @jax.jit
    def update(step, state, weights, learner=learner, specs=specs):
      ones = jax.tree.map(lambda w: jnp.ones(w.shape), weights)
      return learner.update(ones, jnp.float32(1), step, state, weights, specs)[:2]

    for step in range(50):
      weights, state = update(jnp.int32(step), state, weights)
    np.testing.assert_allclose(weights['scale'].astype(jnp.float32), 1.0 if specs is narrow else 0.95, rtol=1e-5)


def test_ema_follows_the_new_weights(rng):
  weights = random_tree(rng)
  learner = Learner(optimizer=SGD, ema_decay=0.9)
  state = learner.init(weights, SPECS)
  assert all(a is not w for a, w in zip(jax.tree.leaves(state.ema_weights), jax.tree.leaves(weights)))
  average = {name: np.asarray(w, np.float64) for name, w in weights.items()}
  for step in range(3):
    weights, state, _ = learner.update(random_tree(rng), jnp.float32(1), jnp.int32(step), state, weights, SPECS)
    average = {name: 0.9 * average[name] + 0.1 * np.asarray(w, np.float64) for name, w in weights.items()}
  for name in SPECS:
    np.testing.assert_allclose(state.ema_weights[name], average[name], rtol=1e-5, atol=1e-6)


def test_the_decay_of_an_average_warms_up(rng):
  weights = random_tree(rng)
  learner = Learner(optimizer=SGD, ema_decay=0.3, ema_warmup=True)
  state = learner.init(weights, SPECS)
  average = {name: np.asarray(w, np.float64) for name, w in weights.items()}
  for step in range(5):
    weights, state, _ = learner.update(random_tree(rng), jnp.float32(1), jnp.int32(step), state, weights, SPECS)
    decay = [1 / 10, 2 / 11, 3 / 12, 0.3, 0.3][step]
    average = {name: decay * average[name] + (1 - decay) * np.asarray(w, np.float64) for name, w in weights.items()}
  for name in SPECS:
    np.testing.assert_allclose(state.ema_weights[name], average[name], rtol=1e-5, atol=1e-6)


def test_spikes_are_skipped(rng):
  """A spike of the loss or of the gradients changes nothing, whatever its size; a lasting rise is accepted."""
  learner = Learner(optimizer=SGD, spike_threshold=4.0, spike_window=16)
  update = jax.jit(lambda g, loss, step, state, w: learner.update(g, loss, step, state, w, SPECS))
  grads, weights = random_tree(rng), random_tree(rng)
  state = learner.init(weights, SPECS)
  recent: list[tuple[float, float]] = []  # the same rule in numpy
  num_skipped = 0
  losses = [9.0, *rng.uniform(2, 3, size=18), 1e30, 2.4, np.nan, 2.5, 2.5, *[5.0] * 12]
  for step, loss in enumerate(losses):
    scale = 1e15 if step == 23 else rng.uniform(1, 1.2)
    scaled = jax.tree.map(lambda g, scale=scale: g * scale, grads)
    values, limit = np.array([loss, numpy_norm(scaled)]), np.full(2, np.inf)
    if len(recent) >= 8:
      limit = np.mean(recent[-16:], axis=0) + 4 * np.std(recent[-16:], axis=0)
    is_applied = np.isfinite(loss) and (values <= limit).all()
    if np.isfinite(loss):
      recent.append(np.minimum(values, limit))
    new_weights, state, metrics = update(scaled, jnp.float32(loss), jnp.int32(step), state, weights)
    assert metrics['skipped'] == (not is_applied), (step, loss)
    is_equal = jax.tree.map(np.array_equal, new_weights, weights)
    assert all(x == (not is_applied) for x in is_equal.values())
    weights, num_skipped = new_weights, num_skipped + (not is_applied)
  assert is_applied
  assert state.num_skipped == num_skipped
  assert 4 <= num_skipped < 10  # 1e30, NaN, 1e15 times the gradients, and some of the steps with loss 5


def test_skipped_steps_do_not_affect_later_steps(rng):
  """Skipped steps do not advance the optimizer's counts, and the learning rate follows `step`."""
  schedule = optax.warmup_constant_schedule(0.0, 0.1, 10)
  learner = Learner(optimizer=AdamW(learning_rate=schedule))
  update = jax.jit(lambda g, loss, step, state, w: learner.update(g, loss, step, state, w, SPECS))
  first, second, start = random_tree(rng), random_tree(rng), random_tree(rng)
  ends = []
  for losses in ([1.0, 1.0], [1.0, np.nan, np.nan, 1.0]):
    weights, state, step = start, learner.init(start, SPECS), 0
    for loss in losses:
      grads = first if step == 0 else second
      weights, state, metrics = update(grads, jnp.float32(loss), jnp.int32(step), state, weights)
      step += 1 - int(metrics['skipped'])
    ends.append((weights, state.opt_state))
  jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'optimizer': 'adamw'}, "learner.optimizer is 'adamw'"),
    ({'ema_decay': 1.0}, r'learner.ema_decay is 1.0; it must be in \[0, 1\)'),
    ({'ema_warmup': True}, 'learner.ema_warmup is True; it must be False without ema_decay'),
    ({'spike_threshold': 0.0}, 'learner.spike_threshold is 0.0; it must be larger than 0'),
    ({'accumulation': 'average'}, "learner.accumulation is 'average'; .*'sum'"),
    ({'num_microbatches': 0}, 'learner.num_microbatches is 0'),
  ],
)
def test_impossible_settings_are_refused(settings, message):
  with pytest.raises(UserError, match=message):
    Learner(**({'optimizer': SGD} | settings))
