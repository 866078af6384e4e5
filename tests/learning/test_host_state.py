"""An update with the state on the host computes what it computes on the device, bit for bit, a few layers at a time."""

import jax
from jax.extend.core import jaxprs_in_params
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.learning import Adafactor, AdamW, FromOptax, Learner, MultiOptimizer, Muon
from spmd_tasks.sharding import WeightSpec

L, D, F = 4, 24, 20
NARROW = {'momentum_dtype': 'bfloat16', 'second_moment_dtype': 'bfloat16'}


def weight(*shape, **fields):
  return WeightSpec(shape=shape, init=None, **fields)


SPECS = {
  'up': weight(L, D, F, stacked=1, num_input_dims=1),
  'query': weight(2, L, D, 3, 4, stacked=2, num_input_dims=1),
  'experts': weight(L, 3, F, D, stacked=1, num_input_dims=1, tags=('expert',)),
  'norms': weight(L, D, stacked=1, tags=('no_decay',)),
  'gains': weight(L, stacked=1, tags=('no_decay',)),
  'table': weight(31, D, num_input_dims=0),
  'head': weight(D, 31, num_input_dims=1),
}


def random_tree(rng, size=1.0):
  return {name: jnp.asarray(size * rng.normal(size=spec.shape), jnp.float32) for name, spec in SPECS.items()}


def stored_state(learner, weights):
  """Returns the initial state in its memory, and its specs."""
  state = learner.init(weights, SPECS)
  specs = learner.state_split_dims(jax.eval_shape(lambda: state), SPECS)
  put = lambda x, spec: jax.device_put(x, jax.memory.Space.Host) if spec.memory_kind else x
  return jax.tree.map(put, state, specs), specs


def trained(optimizer, **fields):
  """Returns weights and state after three steps, of which the second is skipped."""
  learner, rng = Learner(optimizer=optimizer, **fields), np.random.default_rng(0)
  weights = random_tree(rng)
  state, _ = stored_state(learner, weights)
  update = jax.jit(
    lambda grads, loss, step, state, weights: learner.update(grads, loss, step, state, weights, SPECS)[:2],
    out_shardings=(None, jax.tree.map(lambda x: x.sharding, state)),
  )
  for step, (size, loss) in enumerate([(0.01, 1.0), (10.0, np.nan), (1.0, 1.0)]):
    weights, state = update(random_tree(rng, size), jnp.float32(loss), jnp.int32(step), state, weights)
  return weights, state


OPTIMIZERS = {
  'adamw': AdamW(learning_rate=0.1, weight_decay=0.1),
  'adamw in bfloat16': AdamW(learning_rate=0.1, **NARROW),
  'adafactor': Adafactor(learning_rate=0.1, min_dim_size_to_factor=4, momentum=0.9),
  'muon': Muon(learning_rate=0.1),
  'lion': FromOptax(factory=optax.lion, learning_rate=0.1),
  'two': MultiOptimizer(
    optimizers=(('up|table', AdamW(learning_rate=0.1, **NARROW)), ('', AdamW(learning_rate=0.2, **NARROW)))
  ),
}


def assert_equal(tree, expected):
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(tree), jax.device_get(expected))


@pytest.mark.parametrize(
  'name', ['adamw', *(pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS if name != 'adamw')]
)
def test_numbers_are_the_same_bit_for_bit(name):
  weights, state = trained(OPTIMIZERS[name], state_on_host=True, clip_global_norm=1.0)
  expected_weights, expected_state = trained(OPTIMIZERS[name], clip_global_norm=1.0)
  assert_equal(weights, expected_weights)
  assert_equal(state, expected_state)
  for leaf in jax.tree.leaves(state.opt_state):
    assert leaf.sharding.memory_kind == ('pinned_host' if leaf.shape else 'device')


def copies(jaxpr, space):
  """Yields the shapes of what a jaxpr copies to a memory, one step of a loop for all of them."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'device_put' and eqn.params['devices'] == (space,):
      yield from (x.aval.shape for x in eqn.outvars)
    for inner in jaxprs_in_params(eqn.params):
      yield from copies(inner, space)


def traced_update(optimizer):
  """Returns the jaxpr of an update; its first arguments are the gradients."""
  learner = Learner(optimizer=optimizer, state_on_host=True, clip_global_norm=1.0)
  weights = random_tree(np.random.default_rng(0))
  state, _ = stored_state(learner, weights)
  update = lambda grads, state: learner.update(grads, jnp.float32(1), jnp.int32(0), state, weights, SPECS)
  return jax.make_jaxpr(update)(weights, state).jaxpr


def layer_shape(spec):
  return (1,) * spec.stacked + spec.shape[spec.stacked :]


@pytest.mark.parametrize('name', ['adamw', 'lion', 'two'])
def test_one_layer_of_a_stack_is_on_the_device_at_a_time(name):
  jaxpr = traced_update(OPTIMIZERS[name])
  assert set(copies(jaxpr, jax.memory.Space.Device)) == {layer_shape(spec) for spec in SPECS.values()}


def test_no_state_is_copied_to_the_device_before_its_update():
  """XLA moves a copy that is not in a loop to any earlier time: only the first layer of each stack is not."""
  jaxpr = traced_update(OPTIMIZERS['lion'])
  outside = jaxpr.replace(eqns=[eqn for eqn in jaxpr.eqns if not [*jaxprs_in_params(eqn.params)]])
  assert sorted(copies(outside, jax.memory.Space.Device)) == sorted(
    layer_shape(spec) for spec in SPECS.values() if spec.stacked
  )


def test_a_gradient_is_read_once():
  """A slice of a sum over devices that has two readers is computed twice, and the sum kept until the second."""
  jaxpr = traced_update(OPTIMIZERS['adamw'])
  for grad in jaxpr.invars[: len(SPECS)]:
    assert [eqn.primitive.name for eqn in jaxpr.eqns if grad in eqn.invars] == ['optimization_barrier']


def test_an_optimizer_that_couples_weights_is_refused():
  clipped = lambda learning_rate: optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))
  with pytest.raises(UserError, match=r'FromOptax reads the weight .* to update .*: set it to False, or .*clip_global'):
    trained(FromOptax(factory=clipped, learning_rate=0.1), state_on_host=True)


def test_a_norm_over_the_layers_of_one_stack():
  """They are updated together."""

  def clipped(learning_rate):
    of_up = optax.masked(optax.clip_by_global_norm(0.1), {name: name == 'up' for name in SPECS})
    return optax.chain(of_up, optax.sgd(learning_rate, momentum=0.9))

  optimizer = FromOptax(factory=clipped, learning_rate=0.1)
  assert not optimizer.updates_layers_apart(SPECS)
  assert OPTIMIZERS['lion'].updates_layers_apart(SPECS)
  for on_host, on_device in zip(trained(optimizer, state_on_host=True), trained(optimizer), strict=True):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), on_host, on_device)
