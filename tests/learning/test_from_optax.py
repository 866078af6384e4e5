"""FromOptax on an uneven mesh trains as plain optax does on one device."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.config import encoding
from spmd_tasks.errors import UserError
from spmd_tasks.layers import LanguageModelLoss, declare_weight
from spmd_tasks.learning import FromOptax, Learner, LinearWarmupCosine
from spmd_tasks.runtime import Task, partition_spmd_model
from spmd_tasks.sharding import MeshSpec, WeightSpec

NUM_STEPS = 3
RATE = LinearWarmupCosine(peak=0.3, warmup_steps=2, total_steps=9)
VOCAB, DIM = 9, 5  # divisible by neither 4 nor 2


class TinyModel(nn.Module):
  """Ids [B, T] to logits [B, T, V], with weights that have uneven dims."""

  @nn.compact
  def __call__(self, batch, train=False):
    normal = nn.initializers.normal(0.5)
    table = declare_weight(self, 'table', shape=(VOCAB, DIM), init=normal, split_dims=('data', 'mdl'))
    kernel = declare_weight(self, 'kernel', shape=(DIM, 2, VOCAB), init=normal, split_dims=('data', None, 'mdl'))
    scale = declare_weight(self, 'scale', shape=(DIM,), init=nn.initializers.ones, split_dims=('mdl',))
    x = jnp.tanh(table[batch['ids']]) * scale[None, None]
    return {'logits': jnp.einsum('BTD,DHV->BTV', x, kernel)}


def clipped_adamw(learning_rate, max_delta, mask):
  return optax.chain(optax.clip(max_delta), optax.adamw(learning_rate, weight_decay=0.1, mask=mask))


def only_matrices(weights):
  return jax.tree.map(lambda w: w.ndim > 1, weights)


OPTIMIZERS = {
  # Applies momentum and weight decay after the learning rate.
  'adafactor': FromOptax(
    factory=optax.adafactor,
    learning_rate=RATE,
    arguments={'min_dim_size_to_factor': 2, 'momentum': 0.9, 'weight_decay_rate': 0.01},
  ),
  'chain with a mask': FromOptax(
    factory=clipped_adamw, learning_rate=0.1, arguments={'max_delta': 0.01, 'mask': only_matrices}
  ),
}


def batches():
  rng = np.random.default_rng(0)
  for _ in range(NUM_STEPS):
    ids = rng.integers(0, VOCAB, size=(8, 3)).astype(np.int32)
    yield {'ids': ids, 'labels': (ids * 2 + 1) % VOCAB, 'weights': np.ones(ids.shape, np.float32)}


def partitioned(optimizer):
  task = Task(model=TinyModel(), loss=LanguageModelLoss(), learner=Learner(optimizer=optimizer))
  mesh = MeshSpec(axis_names=('data', 'mdl'), ici_mesh_shape=(4, 2)).build()
  spec = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in next(batches()).items()}
  return partition_spmd_model(task, mesh, spec)


def plain_optax(optimizer, model, weights):
  """Plain optax on one device, with the learning rate as a number in each step."""
  build = lambda step: optimizer.factory(
    learning_rate=optimizer.learning_rate(step) if callable(optimizer.learning_rate) else optimizer.learning_rate,
    **optimizer.arguments,
  )
  gradient = jax.grad(lambda w, batch: model.task.compute_loss({'params': w}, batch, train=True).loss)

  @jax.jit
  def one_step(step, batch, state, weights):
    updates, state = build(step).update(gradient(weights, batch), state, weights)
    return state, optax.apply_updates(weights, updates)

  state = jax.jit(build(0).init)(weights)
  for step, batch in enumerate(batches()):
    state, weights = one_step(step, batch, state, weights)
  return weights, state


# test_layerwise.py has a mask that runs by default.
@pytest.mark.parametrize('name', ['adafactor', pytest.param('chain with a mask', marks=pytest.mark.exhaustive)])
def test_equals_plain_optax_on_an_uneven_mesh(name):
  model = partitioned(OPTIMIZERS[name])
  state = model.init(0)
  start = jax.device_get(model.to_canonical(state).weights)
  for batch in batches():
    state, _ = model.train_step(state, model.train_step.place(batch))
  expected_weights, expected_state = plain_optax(OPTIMIZERS[name], model, start)
  got = model.to_canonical(state)
  assert jax.tree.structure(got.learner.opt_state) == jax.tree.structure(expected_state)
  for a, b in zip(
    jax.tree.leaves((got.weights, got.learner.opt_state)), jax.tree.leaves((expected_weights, expected_state))
  ):
    # Sums in another order, in a quotient of moments.
    np.testing.assert_allclose(jax.device_get(a), b, rtol=1e-4, atol=1e-5)
  assert np.abs(expected_weights['table'] - start['table']).max() > 0.01


WEIGHTS = {'table': jnp.arange(6.0).reshape(3, 2), 'bias': None}
GRADS = {'table': jnp.ones((3, 2)), 'bias': None}


def one_step(optimizer, loss=1.0):
  """The table after one step of the learner."""
  weights, specs = {'table': WEIGHTS['table']}, {'table': WeightSpec(shape=(3, 2), init=None)}
  learner = Learner(optimizer=optimizer)
  state = learner.init(weights, specs)
  new_weights, _, _ = learner.update({'table': GRADS['table']}, jnp.float32(loss), jnp.int32(0), state, weights, specs)
  return new_weights['table']


def polyak(learning_rate):
  return optax.chain(optax.polyak_sgd(max_learning_rate=10.0), optax.scale(learning_rate))


def test_a_transformation_may_read_the_loss():
  """Polyak's step is the loss over the squared norm of the gradient, times the learning rate."""
  optimizer = FromOptax(factory=polyak, learning_rate=0.5)
  np.testing.assert_allclose(one_step(optimizer, loss=3.0), WEIGHTS['table'] - 0.5 * 3.0 / 6, rtol=1e-6)


def test_a_built_optax_optimizer_can_be_given():
  np.testing.assert_array_equal(one_step(optax.sgd(0.5)), WEIGHTS['table'] - 0.5)


def test_a_built_optimizer_is_saved_by_the_arguments_that_its_functions_captured():
  shown = [encoding.show(encoding.encode(optax.adam(rate))) for rate in (1e-3, 2e-3, optax.constant_schedule(2e-3))]
  assert len({*shown}) == 3
  assert 'scale_by_adam.<locals>.update_fn(b1=0.9, b2=0.999, eps=1e-08' in shown[0]
  assert ' at 0x' not in ''.join(shown)


def scalar_updates(learning_rate):
  return optax.stateless(lambda updates, _: jax.tree.map(lambda g: -learning_rate * jnp.sum(g), updates))


def growing_state(learning_rate):
  del learning_rate
  grow = lambda updates, state, params: (updates, jax.tree.map(lambda x: jnp.concatenate([x, x]), state))
  return optax.GradientTransformation(lambda weights: weights, grow)


def no_transformation(learning_rate):
  optax.sgd(learning_rate)  # without `return`


def lookahead_in_a_chain(learning_rate):
  return optax.chain(optax.clip(1.0), optax.lookahead(optax.sgd(learning_rate), 2, 0.5))


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'factory': optax.lamb(1e-3)}, 'not a function: pass optax.lamb'),
    ({'arguments': {'learning_rate': 0.1}}, r'lamb\(.*learning_rate.*: correct the arguments'),
    ({'arguments': {'wight_decay': 0.1}}, r'lamb\(.*weight_decay.*wight_decay.*: correct the arguments'),
    ({'factory': optax.scale_by_adam}, r'scale_by_adam\(.*learning_rate.*optax.scale_by_learning_rate'),
    ({'factory': no_transformation}, 'no_transformation returns NoneType: .* must return an optax transformation'),
    ({'factory': optax.lbfgs}, 'lbfgs fails .*without a line search'),
    ({'factory': scalar_updates}, r'scalar_updates returns an update .*\[\] for table, .*\[3, 2\]'),
    ({'factory': growing_state}, r'growing_state returns a state .*\[6, 2\] for table, .*\[3, 2\]'),
    ({'factory': lookahead_in_a_chain}, 'lookahead_in_a_chain fails .*outermost'),
    ({'factory': optax.noisy_sgd, 'arguments': {'key': 0}}, 'noisy_sgd has a key<fry> .*without random numbers'),
  ],
)
def test_impossible_optimizers_are_refused(settings, message):
  with pytest.raises(UserError, match=message):
    one_step(FromOptax(**({'factory': optax.lamb, 'learning_rate': 0.1} | settings)))
