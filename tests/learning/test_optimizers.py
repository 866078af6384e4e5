"""Every optimizer agrees with its published rule in float64 numpy, and skips non-finite steps."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.learning import Adafactor, AdamW, FromOptax, Learner
from spmd_tasks.learning.optimizers import decay_mask
from spmd_tasks.learning.skipping import round_randomly
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.weights import leaves_by_name, weight_specs

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


def sgd_steps(w, grads, weight_decay, momentum=0.0, nesterov=False):
  trace = np.zeros_like(w)
  for g, rate in zip(grads, RATES):
    trace = g + momentum * trace
    direction = g + momentum * trace if nesterov else trace
    w = w - rate * (direction + weight_decay * w)
  return w


def lion_steps(w, grads, weight_decay):
  m = np.zeros_like(w)
  for g, rate in zip(grads, RATES):
    direction = np.sign(0.9 * m + 0.1 * g)
    m = 0.99 * m + 0.01 * g
    w = w - rate * (direction + weight_decay * w)
  return w


def momentum_with_decay(learning_rate, weight_decay, mask, momentum=None, nesterov=False):
  decay = optax.add_decayed_weights(weight_decay, mask)
  direction = optax.trace(momentum, nesterov) if momentum else optax.identity()
  return optax.chain(direction, decay, optax.scale_by_learning_rate(learning_rate))


def from_optax(factory, **arguments):
  decay = {'weight_decay': 0.5, 'mask': {'kernel': True, 'scale': False}}
  return FromOptax(factory=factory, learning_rate=SCHEDULE, arguments=decay | arguments)


CASES = {
  'adamw': (AdamW(learning_rate=SCHEDULE, beta1=0.8, beta2=0.9, epsilon=1e-6, weight_decay=0.5), adamw_steps),
  'sgd': (from_optax(momentum_with_decay), sgd_steps),
  'momentum': (from_optax(momentum_with_decay, momentum=0.9), functools.partial(sgd_steps, momentum=0.9)),
  'nesterov': (
    from_optax(momentum_with_decay, momentum=0.9, nesterov=True),
    functools.partial(sgd_steps, momentum=0.9, nesterov=True),
  ),
  'lion': (from_optax(optax.lion), lion_steps),
}


def trained(optimizer, weights, grads_per_step):
  """The weights after the steps; checks after each that a non-finite step does not change weights and state."""
  learner, weights = Learner(optimizer=optimizer), jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), weights)
  update = jax.jit(lambda g, step, state, w: learner.update(g, jnp.float32(1), step, state, w, SPECS)[:2])
  state = learner.init(weights, SPECS)
  for step, grads in enumerate(grads_per_step):
    weights, state = update(grads, jnp.int32(step), state, weights)
    skipped = update(jax.tree.map(lambda g: g * np.nan, grads), jnp.int32(step), state, weights)
    before, after = (weights, state.opt_state), (skipped[0], skipped[1].opt_state)
    jax.tree.map(np.testing.assert_array_equal, after, before)
  return weights


@pytest.mark.parametrize('case', CASES)
def test_agrees_with_its_reference(case, rng):
  optimizer, reference = CASES[case]
  weights = {name: rng.normal(size=spec.shape) for name, spec in SPECS.items()}
  grads = [{name: rng.normal(size=spec.shape) for name, spec in SPECS.items()} for _ in range(NUM_STEPS)]
  got = trained(optimizer, weights, grads)
  for name in SPECS:
    # Only the kernel decays: the scale is tagged no_decay.
    decay = 0.5 if name == 'kernel' else 0.0
    expected = reference(weights[name], [g[name] for g in grads], decay)
    np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_decay_exempt_tags_exempt_weights(rng):
  weights = {name: rng.normal(size=spec.shape) for name, spec in SPECS.items()}
  zero_grads = [{name: np.zeros(spec.shape) for name, spec in SPECS.items()}]
  for tags, decays in {('no_decay',): (True, False), (): (True, True), ('expert',): (True, True)}.items():
    optimizer = AdamW(learning_rate=0.1, weight_decay=0.5, decay_exempt_tags=tags)
    got = trained(optimizer, weights, zero_grads)
    for name, decay in zip(SPECS, decays):
      np.testing.assert_allclose(got[name], weights[name] * (0.95 if decay else 1), rtol=1e-6, err_msg=f'{tags} {name}')


@pytest.mark.parametrize(
  'build, message',
  [
    (lambda: AdamW(learning_rate=0.1, beta2=1.0), r'AdamW.beta2 is 1.0; .*\[0, 1\)'),
    (lambda: AdamW(learning_rate=0.1, weight_decay=-0.1), 'AdamW.weight_decay is -0.1'),
    (lambda: Adafactor(learning_rate=0.1, momentum_dtype='int8'), "Adafactor.momentum_dtype is 'int8'"),
    (lambda: AdamW(learning_rate=0.1, second_moment_dtype='float16'), "second_moment_dtype is 'float16'; .*bfloat16"),
    (lambda: AdamW(learning_rate=0.1, decay_exempt_tags='no_decay'), 'tuple of tags'),
  ],
)
def test_impossible_settings_are_refused(build, message):
  with pytest.raises(UserError, match=message):
    build()


def test_weights_of_linen_layers_decay_by_name_and_rank():
  """Linen's layers do not tag weights; those decay that common recipes decay."""

  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.LayerNorm(name='norm')(nn.Dense(4, name='in')(nn.Embed(7, 4, name='embed')(x)))
      x = nn.MultiHeadDotProductAttention(num_heads=2, name='attention')(x)
      return x * self.param('gain', nn.initializers.ones, (4,))[None, None]

  abstract = jax.eval_shape(Net().init, jax.random.key(0), jnp.zeros((1, 3), jnp.int32))['params']
  specs = weight_specs(abstract, 'embed')
  decaying = lambda tags: {name for name, decays in leaves_by_name(decay_mask(specs, tags)).items() if decays}
  kernels = {f'attention/{name}/kernel' for name in ('query', 'key', 'value', 'out')} | {'in/kernel'}
  assert decaying(('no_decay',)) == {*kernels, 'embed/embedding'}
  assert decaying(()) == {*leaves_by_name(specs)}

  weights = jax.tree.map(lambda x: jnp.ones(x.shape), abstract)
  for optimizer in (AdamW(learning_rate=0.1, weight_decay=0.5), Adafactor(learning_rate=0.1, weight_decay=0.5)):
    learner = Learner(optimizer=optimizer)
    zeros = jax.tree.map(jnp.zeros_like, weights)

    @jax.jit
    def update(zeros, weights, learner=learner):
      return learner.update(zeros, 0.0, jnp.int32(0), learner.init(weights, specs), weights, specs)[0]

    new = update(zeros, weights)
    np.testing.assert_array_equal(new['norm']['scale'], np.ones(4))
    np.testing.assert_array_equal(new['attention']['query']['bias'], np.ones((2, 2)))
    np.testing.assert_allclose(new['in']['kernel'], np.full((4, 4), 0.95), rtol=1e-6)


def test_random_rounding_has_the_right_mean_on_every_mesh(rng):
  x = np.float32(rng.uniform(1, 2, size=(6, 8, 512)))
  step_of_bfloat16 = 2.0**-7
  rounded = jax.jit(lambda x, seed: round_randomly(x, seed=seed, stream=3))
  draws = [np.asarray(rounded(x, jnp.int32(seed))).astype(np.float64) for seed in range(64)]
  assert max(np.abs(draw - x).max() for draw in draws) < step_of_bfloat16
  # 64 draws of each of 24,576 numbers: the standard error of the mean of all is a thousandth of bfloat16's step.
  assert abs(np.mean(np.array(draws) - x)) < 2e-3 * step_of_bfloat16
  assert np.corrcoef((draws[0] - x).ravel(), (draws[1] - x).ravel())[0, 1] < 0.03  # other seeds, other numbers
  assert np.corrcoef((draws[0] - x).ravel()[1:], (draws[0] - x).ravel()[:-1])[0, 1] < 0.03
  np.testing.assert_array_equal(rounded(draws[0].astype(np.float32), jnp.int32(9)), draws[0])
  mesh = jax.make_mesh((2, 4), ('a', 'b'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P('a', 'b')))
  np.testing.assert_array_equal(rounded(sharded, jnp.int32(5)), draws[5])


def test_a_second_moment_in_bfloat16_follows_float32(rng):
  """With beta2 = 0.999 a step is at most 0.1% of the average: rounded to the nearest number, it would hardly move."""
  grads = [{name: rng.normal(size=spec.shape) for name, spec in SPECS.items()} for _ in range(40)]
  weights = {name: jnp.asarray(rng.normal(size=spec.shape), jnp.float32) for name, spec in SPECS.items()}
  moments = []
  for dtype in ('float32', 'bfloat16'):
    learner = Learner(optimizer=AdamW(learning_rate=1e-3, second_moment_dtype=dtype))
    update = jax.jit(
      lambda g, step, state, w, learner=learner: learner.update(g, jnp.float32(1), step, state, w, SPECS)
    )
    state, w = learner.init(weights, SPECS), weights
    for step in range(1600):
      w, state, _ = update(grads[step % 40], jnp.int32(step), state, w)
    moments.append(jax.tree.map(lambda x: np.asarray(x, np.float64), state.opt_state[0].nu))
    assert {x.dtype.name for x in jax.tree.leaves(state.opt_state[0].nu)} == {dtype}
  ratios = np.concatenate([(moments[1][name] / moments[0][name]).ravel() for name in SPECS])
  np.testing.assert_allclose(ratios, 1, atol=0.1)
  np.testing.assert_allclose(ratios.mean(), 1, atol=0.01)
