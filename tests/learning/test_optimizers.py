"""Every optimizer follows its published rule: several steps against a float64 numpy reference."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.learning import Adafactor, AdamW, Learner, Lion, Sgd
from spmd_tasks.sharding import WeightSpec

NUM_STEPS = 4
SPECS = {'kernel': WeightSpec(shape=(4, 6), init=None), 'scale': WeightSpec(shape=(6,), init=None, tags=('no_decay',))}
SCHEDULE = optax.warmup_constant_schedule(0.0, 0.1, 2)
RATES = [0.0, 0.05, 0.1, 0.1]


def adamw_steps(w, grads, weight_decay):
  m, v = np.zeros_like(w), np.zeros_like(w)
  for t, (g, rate) in enumerate(zip(grads, RATES), start=1):
    m = 0.8 * m + 0.2 * g
    v = 0.9 * v + 0.1 * g**2
    w = w - rate * ((m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-6) + weight_decay * w)
  return w


def sgd_steps(w, grads, weight_decay):
  for g, rate in zip(grads, RATES):
    w = w - rate * (g + weight_decay * w)
  return w


def momentum_steps(w, grads, weight_decay):
  trace = np.zeros_like(w)
  for g, rate in zip(grads, RATES):
    trace = g + 0.9 * trace
    w = w - rate * (trace + weight_decay * w)
  return w


def nesterov_steps(w, grads, weight_decay):
  trace = np.zeros_like(w)
  for g, rate in zip(grads, RATES):
    trace = g + 0.9 * trace
    w = w - rate * (g + 0.9 * trace + weight_decay * w)
  return w


def lion_steps(w, grads, weight_decay):
  m = np.zeros_like(w)
  for g, rate in zip(grads, RATES):
    direction = np.sign(0.9 * m + 0.1 * g)
    m = 0.99 * m + 0.01 * g
    w = w - rate * (direction + weight_decay * w)
  return w


def adafactor_steps(w, grads, weight_decay):
  """Shazeer and Stern's algorithm 4 to 6, written for a [4, 6] matrix (factored) and a vector (not)."""
  row, col, v, average = 0.0, 0.0, 0.0, np.zeros_like(w)
  for t, (g, rate) in enumerate(zip(grads, RATES), start=1):
    keep = 1 - t**-0.8
    square = g**2 + 1e-30
    if w.ndim == 2:
      row = keep * row + (1 - keep) * square.mean(axis=1)
      col = keep * col + (1 - keep) * square.mean(axis=0)
      second_moment = np.outer(row, col) / row.mean()
    else:
      v = second_moment = keep * v + (1 - keep) * square
    u = g / np.sqrt(second_moment)
    u = u / max(1.0, np.sqrt((u**2).mean()) / 0.7)
    u = u * max(np.sqrt((w**2).mean()), 1e-3)
    average = 0.9 * average + 0.1 * u
    w = w - rate * (average + weight_decay * w)
  return w


CASES = {
  'adamw': (AdamW(learning_rate=SCHEDULE, beta1=0.8, beta2=0.9, epsilon=1e-6, weight_decay=0.5), adamw_steps),
  'sgd': (Sgd(learning_rate=SCHEDULE, weight_decay=0.5), sgd_steps),
  'momentum': (Sgd(learning_rate=SCHEDULE, momentum=0.9, weight_decay=0.5), momentum_steps),
  'nesterov': (Sgd(learning_rate=SCHEDULE, momentum=0.9, nesterov=True, weight_decay=0.5), nesterov_steps),
  'lion': (Lion(learning_rate=SCHEDULE, weight_decay=0.5), lion_steps),
  'adafactor': (
    Adafactor(learning_rate=SCHEDULE, momentum=0.9, min_dim_size_to_factor=2, clipping_threshold=0.7, weight_decay=0.5),
    adafactor_steps,
  ),
}


def run_learner(learner, weights, grads_per_step, specs):
  weights = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), weights)
  update = jax.jit(lambda g, step, state, w: learner.update(g, jnp.float32(1), step, state, w, specs))
  state = learner.init(weights, specs)
  for step, grads in enumerate(grads_per_step):
    weights, state, _ = update(grads, jnp.int32(step), state, weights)
  return weights, state


@pytest.mark.parametrize('case', CASES)
def test_follows_its_reference(case, rng):
  optimizer, reference = CASES[case]
  weights = {name: rng.normal(size=spec.shape) for name, spec in SPECS.items()}
  grads = [{name: rng.normal(size=spec.shape) for name, spec in SPECS.items()} for _ in range(NUM_STEPS)]
  got, _ = run_learner(Learner(optimizer=optimizer), weights, grads, SPECS)
  for name in SPECS:
    # Only the kernel decays: the scale is tagged no_decay.
    decay = 0.5 if name == 'kernel' else 0.0
    expected = reference(weights[name], [g[name] for g in grads], decay)
    np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_decay_exempt_tags_choose_what_decays(rng):
  weights = {name: rng.normal(size=spec.shape) for name, spec in SPECS.items()}
  zero_grads = [{name: np.zeros(spec.shape) for name, spec in SPECS.items()}]
  for tags, decays in {('no_decay',): (True, False), (): (True, True), ('expert',): (True, True)}.items():
    optimizer = Sgd(learning_rate=0.1, weight_decay=0.5, decay_exempt_tags=tags)
    got, _ = run_learner(Learner(optimizer=optimizer), weights, zero_grads, SPECS)
    for name, decay in zip(SPECS, decays):
      np.testing.assert_allclose(got[name], weights[name] * (0.95 if decay else 1), rtol=1e-6, err_msg=f'{tags} {name}')


@pytest.mark.parametrize(
  'build, message',
  [
    (lambda: AdamW(learning_rate=0.1, beta2=1.0), r'AdamW.beta2 is 1.0; it must be in \[0, 1\)'),
    (lambda: Lion(learning_rate=0.1, decay_exempt_tags='no_decay'), 'must be a tuple of tags'),
    (lambda: Sgd(learning_rate=0.1, nesterov=True), 'needs Sgd.momentum'),
  ],
)
def test_impossible_settings_are_refused(build, message):
  with pytest.raises(ValueError, match=message):
    build()
