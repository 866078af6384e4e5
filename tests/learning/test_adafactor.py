"""Adafactor updates the layers of a scanned stack, and experts, exactly as it would update separate weights."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.learning import Adafactor, Learner, ProductOfFactors
from spmd_tasks.sharding import WeightSpec

TESTDATA = pathlib.Path(__file__).parents[1] / 'data'

D, F = 3, 5


def adafactor_float64(weight, grads, rate):
  """Adafactor on one expert's weight [D, F] or [F] for all steps, by the paper's algorithms 4 to 6."""
  v_row, v_col, v, average = np.zeros(weight.shape[0]), np.zeros(weight.shape[-1]), 0.0, 0.0
  for t, grad in enumerate(grads, start=1):
    decay = 1 - t**-0.8
    square = grad**2 + 1e-30
    v = decay * v + (1 - decay) * square
    v_row = decay * v_row + (1 - decay) * square.mean(axis=-1)
    v_col = decay * v_col + (1 - decay) * square.mean(axis=0)
    update = grad / np.sqrt(v if grad.ndim == 1 else np.outer(v_row, v_col) / v_row.mean())
    update /= max(1.0, np.sqrt(np.mean(update**2)) / 0.7)
    average = 0.9 * average + 0.1 * max(1e-3, np.sqrt(np.mean(weight**2))) * update
    weight = weight - rate * (average + 0.5 * weight)
  return weight, v_row, v_col


def test_experts_have_their_own_factors_clipping_and_scale(rng):
  """[E, D, F] and [L, E, D, F]; E is the largest dim. Some experts have zero or large gradients in one step."""
  num_experts, specs = 6, {}
  for name, leading in (('one layer', ()), ('layers', (2,))):
    fields = {'init': None, 'tags': ('expert',), 'stacked': len(leading)}
    specs[f'up {name}'] = WeightSpec(shape=(*leading, num_experts, D, F), **fields)
    specs[f'bias {name}'] = WeightSpec(shape=(*leading, num_experts, F), **fields)
  settings = {'momentum': 0.9, 'clipping_threshold': 0.7, 'weight_decay': 0.5}
  learner = Learner(optimizer=Adafactor(learning_rate=0.1, min_dim_size_to_factor=2, **settings))
  sizes = 10.0 ** np.arange(-3, 3)
  start, all_grads = {}, {}
  for name, spec in specs.items():
    expert_shape = (num_experts, *[1] * (len(spec.shape) - spec.num_separate_dims))
    start[name] = rng.normal(size=spec.shape) * sizes.reshape(expert_shape)
    all_grads[name] = rng.normal(size=(3, *spec.shape))
    by_expert = np.moveaxis(all_grads[name], spec.num_separate_dims, 0)
    by_expert[1, :2], by_expert[1, 2] = 0, 100
  weights = {name: jnp.asarray(weight, jnp.float32) for name, weight in start.items()}
  state = jax.jit(lambda weights: learner.init(weights, specs))(weights)
  update = jax.jit(lambda g, s, w: learner.update(g, jnp.float32(1), jnp.int32(0), s, w, specs))
  for step in range(3):
    grads = {name: jnp.asarray(steps[step], jnp.float32) for name, steps in all_grads.items()}
    weights, state, _ = update(grads, state, weights)
  moments = state.opt_state[0]
  for name, spec in specs.items():
    is_factored = name.startswith('up')
    separate = spec.shape[: spec.num_separate_dims]
    assert (moments.v if is_factored else moments.v_row)[name].shape == (*separate, 1)
    assert is_factored or moments.v[name].shape == spec.shape
    for index in np.ndindex(*separate):
      grads = [grad[index] for grad in all_grads[name]]
      expected, v_row, v_col = adafactor_float64(start[name][index], grads, 0.1)
      atol = 1e-7 if is_factored else 1e-6
      np.testing.assert_allclose(weights[name][index], expected, rtol=2e-5, atol=atol, err_msg=f'{name} {index}')
      if is_factored:
        np.testing.assert_allclose(moments.v_row[name][index], v_row, rtol=1e-5)
        np.testing.assert_allclose(moments.v_col[name][index], v_col, rtol=1e-5)


# T5X's weights as ours: (shape, other fields of the WeightSpec, transposition).
_T5X_WEIGHTS = {
  'w2': ((6, 8), {'num_input_dims': 1}, (0, 1)),
  'q3': ((6, 2, 4), {'num_input_dims': 1}, (0, 1, 2)),
  'o3': ((2, 4, 6), {'num_input_dims': 2}, (0, 1, 2)),
  's3': ((3, 6, 8), {'num_input_dims': 1, 'stacked': 1}, (1, 0, 2)),
  'e3': ((4, 6, 5), {'num_input_dims': 1, 'tags': ('expert',)}, (0, 1, 2)),
  'q4': ((3, 6, 2, 4), {'num_input_dims': 1, 'stacked': 1}, (1, 0, 2, 3)),
  'n2': ((3, 6), {'stacked': 1, 'tags': ('no_decay',)}, (1, 0)),
  'n1': ((6,), {'tags': ('no_decay',)}, (0,)),
  'rel': ((3, 2, 8), {'stacked': 1}, (1, 0, 2)),
}
_T5X_SETTINGS = {
  'default': {'min_dim_size_to_factor': 6},
  'momentum': {
    'min_dim_size_to_factor': 6,
    'momentum': 0.9,
    'weight_decay': 1e-3,
    'max_parameter_scale': 0.5,
    'clipping_threshold': 0.7,
  },
  'offset': {
    'decay_exponent': 0.7,
    'step_offset': -3,
    'weight_decay': 1.0,
    'weight_decay_exponent': 2.0,
    'min_parameter_scale': 1e-2,
    'multiply_by_parameter_scale': False,
  },
}


@pytest.mark.parametrize('settings', _T5X_SETTINGS)
def test_equals_100_steps_of_t5x(settings):
  """Compares with weights and moments after 100 steps of T5X's adafactor.py (cc342d4) and its logical factor rules.

  There are 2-D weights, 3-D kernels of attention, experts, and scanned layers of these; T5X stacks layers in dim 1.
  """
  with np.load(TESTDATA / 't5x' / 'adafactor.npz') as archive:
    expected = dict(archive)
  specs = {name: WeightSpec(shape=shape, init=None, **kw) for name, (shape, kw, _) in _T5X_WEIGHTS.items()}
  rules = (('rel', 'never'), ('[qose][34]', 'always'), ('', 'matrix'))
  rate = ProductOfFactors(factors='constant * rsqrt_decay', base=0.1, warmup_steps=10)
  adafactor = Adafactor.as_t5x(learning_rate=rate, factor_rules=rules, **_T5X_SETTINGS[settings])
  learner = Learner(optimizer=adafactor)

  def ours(array, name, first=0):
    return np.transpose(array, (*range(first), *(first + np.array(_T5X_WEIGHTS[name][2]))))

  weights = {name: jnp.asarray(ours(expected[f'start/{name}'], name)) for name in specs}
  patterns = {name: ours(expected[f'base/{name}'], name, 1).astype(np.float64) for name in specs}
  state = jax.jit(lambda weights: learner.init(weights, specs))(weights)
  update = jax.jit(lambda g, t, s, w: learner.update(g, jnp.float32(1), t, s, w, specs)[:2])
  for t in range(100):
    sizes = np.cos(1 + 0.7 * t * np.arange(1, 5)) * (1 + (t % 7) ** 3)
    grads = {name: np.tensordot(sizes, pattern, 1).astype(np.float32) for name, pattern in patterns.items()}
    weights, state = update(grads, jnp.int32(t), state, weights)
  for name in specs:
    theirs = ours(expected[f'{settings}/{name}'], name)
    np.testing.assert_allclose(weights[name], theirs, rtol=1e-6, atol=1e-6 * np.abs(theirs).max(), err_msg=name)
  stored = state.opt_state[0]
  for key in expected:
    if key.startswith(settings) and key.count('/') == 2 and not key.endswith('/m'):
      _, name, moment = key.split('/')
      got, theirs = np.asarray(getattr(stored, moment)[name]), expected[key]
      if name in ('e3', 'n1') or got.ndim == theirs.ndim == 1:  # moments whose dims have the same order in T5X
        is_swapped = name == 'e3'  # E x 6 x 5: T5X's rows are 6, ours the smaller dim
        got = getattr(stored, {'v_row': 'v_col', 'v_col': 'v_row'}[moment])[name] if is_swapped else got
        np.testing.assert_allclose(got, theirs, rtol=2e-6, err_msg=key)
