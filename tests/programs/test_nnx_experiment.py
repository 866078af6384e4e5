"""An NNX module trains, evaluates, resumes, is sharded, padded, frozen and loaded as a Linen module is."""

import functools

import fiddle as fdl
from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks import Learner, Task, load
from spmd_tasks.adapters import LowRankAdapter, add_adapters
from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.runtime import partition_spmd_model
from spmd_tasks.sharding import MeshSpec
from tests import binary
from tests.programs.nnx_experiment import Classifier, batches, loss

NAME = 'tests.programs.nnx_experiment.Shapes'
FLAGS = ('--exp', NAME, '--mode', 'train', '--set', 'log_every_steps=1', '--set', 'trackers=()')


@pytest.fixture(scope='module')
def job_dir(tmp_path_factory):
  """A job of 6 steps on 8 devices, with a checkpoint after 3."""
  directory = tmp_path_factory.mktemp('nnx') / 'job'
  assert binary.run_in_process(*FLAGS, '--job_log_dir', directory) == 0
  return directory


@pytest.fixture(scope='module')
def by_hand():
  """The losses of a plain loop over the NNX module, and the module after 6 steps."""
  with nnx.use_eager_sharding(False):
    module = Classifier(30, rngs=nnx.Rngs(0))
  optimizer, losses = optax.adamw(0.01), []
  graph, weights, others = nnx.split(module, nnx.Param, ...)
  state = optimizer.init(weights)

  def with_keys(others, key):
    """Each stream has the step's key, folded with its place among the variables."""
    places = [path for path, _ in nnx.to_flat_state(nnx.state(module))]
    value = lambda path, leaf: (
      jax.random.fold_in(key, places.index(path)) if isinstance(leaf, nnx.RngKey) else jnp.uint32(0)
    )
    return nnx.from_flat_state(
      [
        (path, leaf.replace(value(path, leaf)) if isinstance(leaf, nnx.RngState) else leaf)
        for path, leaf in nnx.to_flat_state(others)
      ]
    )

  @jax.jit
  def step(weights, state, others, key, batch):
    def loss_of(weights):
      module = nnx.merge(graph, weights, with_keys(others, key), copy=True)
      module.train()
      mean, _ = loss(module(batch['image']), batch)
      return mean, nnx.state(module, nnx.Not(nnx.Param))

    (mean, others), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights)
    updates, state = optimizer.update(gradients, state, weights)
    return optax.apply_updates(weights, updates), state, others, mean

  for number, batch in zip(range(6), batches(0)):
    batch = {'image': jnp.asarray(batch['image'], jnp.float32), 'label': jnp.asarray(batch['label'], jnp.int32)}
    weights, state, others, mean = step(weights, state, others, jax.random.fold_in(jax.random.key(0), number), batch)
    losses.append(float(mean))
  return losses, nnx.merge(graph, weights, others)


def test_it_trains_as_a_plain_loop_over_the_module_does(job_dir, by_hand):
  np.testing.assert_allclose([*binary.column(job_dir, 'loss').values()], by_hand[0], rtol=1e-5)


def test_it_resumes_bit_for_bit(job_dir, tmp_path):
  copy = binary.copy_at(job_dir, 3, tmp_path / 'copy')
  assert binary.run_in_process(*FLAGS, '--job_log_dir', copy) == 0
  for name in ('loss', 'grad_norm'):
    assert binary.column(copy, name) == binary.column(job_dir, name)
  evals = [binary.metric_lines(directory / 'eval' / 'valid')[-1] for directory in (copy, job_dir)]
  assert evals[0]['loss'] == evals[1]['loss']


def test_a_loaded_model_computes_what_the_module_computes_in_evaluation(job_dir, by_hand):
  """So evaluation reads the running averages and drops nothing, and the padding is off."""
  lm, batch = load(job_dir), next(batches(1))
  module = by_hand[1]
  module.eval()
  image = jnp.asarray(batch['image'], jnp.float32)
  expected = module(image)
  np.testing.assert_allclose(lm.model.apply(lm.variables, image), expected, rtol=1e-3, atol=1e-4)
  assert isinstance(lm.model, nn.Module)
  mean = np.mean([loss(module(rows['image']), rows)[0] for rows in batches(1)])
  np.testing.assert_allclose(binary.column(job_dir / 'eval' / 'valid', 'loss')[6], mean, rtol=1e-5)


def test_variables_have_readable_names_split_dims_and_padding(job_dir):
  table = (job_dir / 'parameters.txt').read_text().split('\n')
  rows = {line.split()[0]: ' '.join(line.split()) for line in table if '/' in line.split('  ')[0]}
  assert rows['inputs/kernel'].startswith('inputs/kernel [100, 30] float32 (embed, mlp) (data, mdl)')
  assert rows['again/kernel'].endswith('[32, 30] 6.25%')  # the first name of the layer that is used twice
  assert 'hidden/kernel' not in rows
  state = partition_job(resolve(NAME).build()).abstract_state
  assert jax.tree.map(lambda leaf: leaf.shape, state.non_trainable) == {
    'batch_stats': {'norm': {'mean': (30,), 'var': (30,)}}
  }


def test_a_fiddle_partial_is_a_model_too():
  config = fdl.Config(Task, model=fdl.Partial(Classifier, width=30), loss=loss, learner=optax.adamw(0.01))
  assert fdl.build(config).model == resolve(NAME).build().task.model


def test_arguments_are_fields_of_the_config():
  job = resolve(NAME, ['task.model.width=26', 'task.model.rate=0.5']).build()
  assert partition_job(job).abstract_state.weights['outputs']['kernel'].shape == (26, 10)
  with pytest.raises(UserError, match=r'task\.model\.wide'):
    resolve(NAME, ['task.model.wide=26'])


class Tuned(nnx.Module):
  """Low-rank adapters of Flax's own, constants, and a mode that is an argument."""

  def __init__(self, *, rngs: nnx.Rngs):
    self.base = nnx.LoRALinear(6, 10, lora_rank=2, rngs=rngs)
    self.scale = nnx.Param(jnp.ones(10))
    self.shift = nnx.Variable(jnp.arange(10.0))
    self.calls = nnx.BatchStat(jnp.int32(0))

  def __call__(self, batch, *, deterministic):
    self.sow(nnx.Intermediate, 'inputs', batch['x'])
    if not deterministic:
      self.calls[...] += 1
    return self.base(batch['x']) * self.scale[None] + self.shift[None]


def make_model(model, shape=(1, 4, 2), learner=optax.sgd(0.1), **settings):
  task = Task(model=model, loss=lambda y, batch: jnp.mean(jnp.square(y)), learner=learner, **settings)
  mesh = MeshSpec(axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=shape).build(jax.devices()[: np.prod(shape)])
  return partition_spmd_model(task, mesh, {'x': jax.ShapeDtypeStruct((8, 6), jnp.float32)}, default_split_dim='data')


@pytest.mark.filterwarnings('ignore:Using .Module.sow')
@pytest.mark.parametrize('dtype', [None, 'int8'])
def test_flax_adapters_are_trained_beside_frozen_kernels(dtype):
  model = make_model(Tuned, trained=('lora_',), frozen_dtype=dtype)
  assert model.num_trained_params == 6 * 2 + 2 * 10
  before = jax.device_get(model.init(0))
  state, _ = model.train_step(model.init(0), model.train_step.place({'x': np.ones((8, 6), np.float32)}))
  after = jax.device_get(state)
  jax.tree.map(np.testing.assert_array_equal, before.weights['base']['kernel'], after.weights['base']['kernel'])
  np.testing.assert_array_equal(before.weights['scale'], after.weights['scale'])
  assert np.any(before.weights['base']['lora']['lora_b'] != after.weights['base']['lora']['lora_b'])
  assert (before.non_trainable['batch_stats']['calls'], after.non_trainable['batch_stats']['calls']) == (0, 1)
  np.testing.assert_array_equal(after.non_trainable['Variable']['shift'], np.arange(10))


class Normed(nnx.Module):
  def __init__(self, *, rngs: nnx.Rngs):
    self.norm, self.linear = nnx.BatchNorm(6, momentum=0.5, rngs=rngs), nnx.Linear(6, 3, rngs=rngs)

  def __call__(self, x):
    return self.linear(self.norm(x))


def test_averaged_weights_are_evaluated_with_averaged_statistics():
  """Two steps: the decay is at most (1 + 0) / (10 + 0), then (1 + 1) / (10 + 1)."""
  learner = Learner(optimizer=optax.sgd(0.1), ema_decay=0.5, ema_warmup=True)
  model = make_model(Normed, (1, 1, 1), learner=learner, eval_with_ema=True)
  x = np.random.default_rng(0).normal(2, 3, (8, 6)).astype(np.float32)
  state, batch = model.init(0), model.train_step.place({'x': x})
  averages = jax.device_get(state.non_trainable['batch_stats'])
  for decay in (1 / 10, 2 / 11):
    state, _ = model.train_step(state, batch)
    statistics = jax.device_get(state.non_trainable['batch_stats'])
    averages = jax.tree.map(lambda e, s, decay=decay: decay * e + (1 - decay) * s, averages, statistics)
  weights, norm = jax.device_get(state.learner.ema_weights), averages['norm']
  normed = (x - norm['mean']) / np.sqrt(norm['var'] + 1e-5) * weights['norm']['scale'] + weights['norm']['bias']
  expected = np.mean(np.square(normed @ weights['linear']['kernel'] + weights['linear']['bias']))
  step = model.eval_step({'x': jax.ShapeDtypeStruct((8, 6), jnp.float32)})
  np.testing.assert_allclose(step(state, batch)['loss'].compute(), expected, rtol=1e-5)


def test_the_config_of_an_nnx_module_takes_no_adapters():
  config = fdl.Partial(Classifier, width=30)
  with pytest.raises(UserError, match=r'no layer of Classifier can have an adapter.* by add_nnx_adapters'):
    add_adapters(config, ('hidden/',), LowRankAdapter(rank=2, alpha=4.0))


class Writes(nnx.Module):
  def __init__(self, *, rngs):
    self.scale = nnx.Param(jnp.ones(6))

  def __call__(self, x):
    self.scale[...] *= 2
    return x * self.scale[None]


class HasArray(nnx.Module):
  def __init__(self, *, rngs):
    self.noise, self.scale = rngs.normal((6,)), nnx.Param(jnp.ones(6))

  def __call__(self, x):
    return x * self.noise[None] * self.scale[None]


def test_an_array_among_the_attributes_is_a_variable_of_the_state():
  model = make_model(HasArray)
  model.train_step.lower()
  assert model.abstract_state.non_trainable['constants']['noise'].shape == (6,)


class NoCall(nnx.Module):
  def __init__(self, width):
    self.scale = nnx.Param(jnp.ones(width))


class Sized(NoCall):
  def __call__(self, x):
    return x


class Named(nnx.Module):
  def __init__(self, name):
    self.scale = nnx.Param(jnp.ones(len(name)))

  def __call__(self, x):
    return x


@pytest.mark.parametrize(
  'model, sentence',
  [
    (lambda: Writes(rngs=nnx.Rngs(0)), 'is an instance of Writes, whose weights exist already: pass the class Writes'),
    (lambda: Writes, r'Writes changes its nnx\.Param scale .* such as nnx\.BatchStat'),
    (lambda: functools.partial(Writes, rngs=nnx.Rngs(0)), 'takes rngs, which is drawn by the job: leave it out'),
    (lambda: functools.partial(Writes, width=3), "unexpected keyword argument 'width'"),
    (lambda: Classifier.__init__, 'it must be an instance of a flax.linen.Module or a class of nnx.Modules'),
    (lambda: functools.partial(NoCall, width=3), 'NoCall has no method __call__'),
    (lambda: Sized, r"missing 1 required .*'width': pass functools\.partial\(Sized, \.\.\.\)"),
    (lambda: functools.partial(Named, name='a'), 'takes name, which is a name of Linen modules too: rename'),
  ],
)
def test_mistakes_are_one_sentence(model, sentence):
  with pytest.raises(UserError, match=sentence):
    make_model(model()).train_step.lower()
