"""Models for explicit mesh axes, or for `jax.set_mesh`, train inside our step, resume and are loaded."""

import functools

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from spmd_tasks import Learner, Task, load
from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.runtime import partition_spmd_model
from spmd_tasks.runtime.flops import model_flops
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, MeshSpec
from tests import binary
from tests.programs.nnx_experiment import batches

MODULE = 'tests.programs.explicit_experiment'
FLAGS = ('--exp', f'{MODULE}.Types', '--mode', 'train', '--set', 'log_every_steps=1', '--set', 'trackers=()')


@pytest.fixture(scope='module')
def job_dir(tmp_path_factory):
  """A job of 4 steps on 8 devices with explicit axes, with a checkpoint after 2."""
  directory = tmp_path_factory.mktemp('explicit') / 'job'
  assert binary.run_in_process(*FLAGS, '--job_log_dir', directory) == 0
  return directory


def mesh_of(shape):
  return MeshSpec(axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=shape).build(jax.devices()[: np.prod(shape)])


@functools.cache
def losses_by_hand():
  """The losses of 4 steps of the same model in plain JAX, and its weights after them."""
  weights = jax.device_get(partition_job(resolve(f'{MODULE}.InContext').build(), mesh_of((1, 1, 1))).init(0).weights)
  optimizer, losses = optax.adamw(0.01), []

  def logits_of(weights, image):
    y = image.reshape(len(image), -1) @ weights['up']
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-6)
    return jax.nn.relu(y) @ weights['down']

  @jax.jit
  def step(weights, state, image, label):
    mean = lambda weights: optax.softmax_cross_entropy_with_integer_labels(logits_of(weights, image), label).mean()
    loss, gradients = jax.value_and_grad(mean)(weights)
    updates, state = optimizer.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state, loss

  state = optimizer.init(weights)
  for _, batch in zip(range(4), batches(0)):
    weights, state, loss = step(weights, state, batch['image'].astype(np.float32), batch['label'].astype(np.int32))
    losses.append(float(loss))
  image = next(batches(1))['image'].astype(np.float32)
  return losses, image, logits_of(weights, image)


def test_explicit_axes_train_as_plain_jax_does(job_dir):
  np.testing.assert_allclose([*binary.column(job_dir, 'loss').values()], losses_by_hand()[0], rtol=1e-5)


@pytest.mark.parametrize(
  'name, shape, overrides',
  [
    pytest.param('Types', (1, 1, 1), (), marks=pytest.mark.exhaustive),  # plain JAX is on one device
    ('Types', (1, 8, 1), ('task.learner.num_microbatches=2',)),  # 60 or 30 rows over 8 devices are not split
    ('InContext', (1, 4, 2), ()),
  ],
)
def test_other_meshes_and_automatic_axes_give_the_same_numbers(name, shape, overrides):
  model = partition_job(resolve(f'{MODULE}.{name}', overrides).build(), mesh_of(shape))
  state, losses = model.init(0), []
  for _, batch in zip(range(4), batches(0)):
    state, metrics = model.train_step(state, model.train_step.place(batch))
    losses.append(float(metrics['loss']))
  np.testing.assert_allclose(losses, losses_by_hand()[0], rtol=1e-5)


def test_a_layer_of_a_stack_may_have_explicit_axes():
  losses, first = [], None
  for shape in ((1, 4, 2), (1, 1, 1)):
    job = resolve(f'{MODULE}.OwnFeed').build()
    model, iterator = partition_job(job, mesh_of(shape)), job.train_input.make_iterator()
    if first is None:
      state = model.init(0)
      first = jax.device_get(model.to_canonical(state))
    else:
      place = lambda x, spec: jax.device_put(x, spec.sharding)
      state = model.from_canonical(jax.tree.map(place, first, model.canonical_state))
    for _ in range(2):
      state, metrics = model.train_step(state, model.train_step.place(next(iterator)))
    losses.append([float(metrics['loss']), float(metrics['grad_norm'])])
  np.testing.assert_allclose(losses[1:], losses[:1], rtol=1e-5)


def test_model_flops_are_those_of_the_products():
  for name in ('Types', 'InContext'):
    model = partition_job(resolve(f'{MODULE}.{name}').build(), mesh_of((1, 4, 2)))
    assert model_flops(model) == 3 * 2 * 60 * (100 * 32 + 32 * 10)


def test_it_resumes_bit_for_bit(job_dir, tmp_path):
  copy = binary.copy_at(job_dir, 2, tmp_path / 'copy')
  assert binary.run_in_process(*FLAGS, '--job_log_dir', copy) == 0
  for name in ('loss', 'grad_norm'):
    assert binary.column(copy, name) == binary.column(job_dir, name)


def test_a_loaded_model_is_called_in_the_context_of_its_mesh(job_dir):
  lm = load(job_dir, mesh=jax.make_mesh((1, 4, 2), ('replica', 'data', 'mdl')))
  _, image, expected = losses_by_hand()
  with jax.set_mesh(lm.mesh):
    assert jax.typeof(lm.variables['params']['up']).sharding.spec == P(None, 'mdl')
    image = jax.device_put(image, P(('replica', 'data')))
    np.testing.assert_allclose(lm.model.apply(lm.variables, image), expected, rtol=1e-4, atol=1e-5)


class Records(nnx.Module):
  """An NNX module that says how its arguments and weights are sharded, and has uneven dims."""

  types: dict[str, str] = {}

  def __init__(self, *, rngs: nnx.Rngs):
    split = lambda *names: nnx.with_partitioning(nnx.initializers.normal(), names)
    self.up = nnx.Param(split('embed', 'mlp')(rngs.params(), (6, 30)))
    self.down = nnx.Param(split('mlp', 'embed')(rngs.params(), (30, 7)))
    self.plain = nnx.Linear(7, 8, rngs=rngs)

  def __call__(self, x):
    for name in ('up', 'down'):
      self.types[name] = str(jax.typeof(getattr(self, name)[...]))
    self.types |= {'x': str(jax.typeof(x)), 'plain': str(jax.typeof(self.plain.kernel[...]))}
    rows = jax.typeof(x).sharding.spec[0]
    up = jax.sharding.reshard(self.up[...], P())  # as a step gathers weights for its rows
    hidden = jnp.einsum('bi,if->bf', x, up, out_sharding=P(rows, None))
    return self.plain(jnp.einsum('bf,fo->bo', hidden, jax.sharding.reshard(self.down[...], P())))


def partitioned(model, loss=lambda y, batch: jnp.mean(jnp.square(y)), rows=8):
  task = Task(model=model, loss=loss, learner=Learner(optimizer=optax.sgd(0.1)), explicit_axes=True)
  spec = {'x': jax.ShapeDtypeStruct((rows, 6), jnp.float32)}
  return partition_spmd_model(
    task, mesh_of((1, 4, 2)), spec, axis_rules=DEFAULT_AXIS_RULES, inputs_split_mapping={'map_2d': ('batch', None)}
  )


@pytest.mark.parametrize('rows, type_of_rows', [(8, '8@(replica,data)'), (6, '6@replica')])
def test_uneven_dims_have_true_sizes_and_even_types(rows, type_of_rows):
  model = partitioned(Records, rows=rows)
  model.train_step.lower()
  assert model.padded_state.weights['up'].shape == (8, 30)
  assert Records.types == {
    'x': f'float32[{type_of_rows},6]',
    'up': 'float32[6,30@mdl]',  # 6 rows are stored on 4 devices as 8, and arrive whole
    'down': 'float32[30@mdl,7]',
    'plain': 'float32[7,8]',
  }


class Uneven(nn.Module):
  @nn.compact
  def __call__(self, x):
    w = self.param('w', nn.with_partitioning(nn.initializers.ones, (None, 'mdl')), (6, 9))
    multiply = lambda x, w: x @ w
    return jax.shard_map(multiply, in_specs=(P(), P(None, 'mdl')), out_specs=P(None, 'mdl'))(
      jax.sharding.reshard(x, P()), w
    )


def test_a_kernel_that_needs_even_shards_of_an_uneven_dim_is_refused_in_one_sentence():
  with pytest.raises(
    UserError, match=r"the model Uneven\(x\) fails with .* axis 1 \(of size 9\) to mesh axis 'mdl' \(of size 2\)"
  ):
    partitioned(Uneven())
