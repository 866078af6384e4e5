"""partition_spmd_model: initialisation, layouts, donation, eval, and what it refuses."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.layers import LanguageModelLoss
from spmd_tasks.learning import Learner, Sgd
from spmd_tasks.runtime import PartitionedModel, Task, partition_spmd_model
from spmd_tasks.sharding import MeshSpec, WeightSpec
from spmd_tasks.sharding.weights import unbox_weights


def partition(*overrides: str) -> PartitionedModel:
  return partition_job(resolve('synthetic.Uneven', overrides).build())


@pytest.fixture(scope='module')
def model() -> PartitionedModel:
  return partition()


def test_initial_weights_do_not_depend_on_the_mesh(model):
  weights = jax.device_get(model.to_canonical(model.init(0)).weights)
  for shape in ('1,8,1', '1,1,8'):
    other = partition(f'ici_mesh_shape={shape}')
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.to_canonical(other.init(0)).weights), weights)
  reseeded = jax.device_get(model.to_canonical(model.init(1)).weights)
  assert not np.array_equal(reseeded['embedding']['table'], weights['embedding']['table'])


def test_initialisation_holds_no_full_weight():
  model = partition('vocab_size=16385', 'model_dims=126')
  memory = model.lower_init().compile().memory_analysis()
  full_table = 16385 * 126 * 4
  state_per_device = 3 * full_table / 8  # the table and its two moments are most of the state
  assert memory.output_size_in_bytes < 1.3 * state_per_device
  assert memory.temp_size_in_bytes < full_table / 2


def test_initial_weights_are_those_that_the_model_draws_without_a_mesh(model):
  batch = next(resolve('synthetic.Uneven').build().train_input.make_iterator())
  plain = jax.jit(lambda rng: unbox_weights(model.task.init_variables(rng, batch)))(model.task.make_key(0))
  weights = jax.device_get(model.to_canonical(model.init(0)).weights)
  jax.tree.map(np.testing.assert_array_equal, weights, jax.device_get(plain['params']))


def test_a_stage_draws_the_weights_of_its_own_layers_only():
  def num_transcendentals(shape: str) -> float:  # of one device; every weight that is drawn takes some
    experiment = 'tests.runtime.pipeline_experiments.PipelinedAdamW'
    overrides = ('num_layers=8', 'num_heads=4', 'model_dims=32', 'hidden_dims=128', f'ici_mesh_shape={shape}')
    model = partition_job(resolve(experiment, overrides).build())
    return model.lower_init().compile().cost_analysis()['transcendentals']

  assert num_transcendentals('1,4,1,2') < 1.5 * num_transcendentals('1,2,1,4')  # twice, if a stage drew all layers


def test_shapes_specs_and_counts(model):
  up = ('stack', 'layers', 'ffn', 'up', 'kernel')

  def leaf(tree):
    for name in up:
      tree = tree[name]
    return tree

  assert leaf(model.abstract_state.weights).shape == (2, 30, 90)
  assert leaf(model.state_specs.weights) == jax.P(None, 'data', 'mdl')
  assert leaf(model.padded_state.weights).shape == (2, 30, 92)
  assert leaf(model.canonical_state.weights).shape == (2, 30, 90)
  attention, ffn, norms = 4 * 30 * 30, 3 * 30 * 90, 2 * 30
  assert model.total_num_params == 257 * 30 + 2 * (attention + ffn + norms) + 30
  assert model.input_layout.padded['ids'].sharding.spec == jax.P(('replica', 'data', 'mdl'), None)
  assert model.input_layout.split_specs['ids'] == jax.P(('replica', 'data'), None)


def test_canonical_state_there_and_back_is_bit_exact(model):
  state = model.init(3)
  canonical = model.to_canonical(state)
  assert jax.tree.map(jnp.shape, canonical) == jax.tree.map(jnp.shape, model.abstract_state)
  back = model.from_canonical(canonical)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(jax.device_get(a), jax.device_get(b)), back, state)
  assert all(x.sharding == spec.sharding for x, spec in zip(jax.tree.leaves(back), jax.tree.leaves(model.padded_state)))


def test_train_step_donates_the_state_and_replicates_scalars(model):
  batch = next(resolve('synthetic.Uneven').build().train_input.make_iterator())
  state = model.init(0)
  new_state, metrics = model.train_step(state, model.train_step.place(batch))
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.weights))
  assert int(new_state.step) == 1
  for value in metrics.values():
    assert (value.shape, value.dtype) == ((), jnp.float32)
    assert value.sharding.is_fully_replicated


def test_eval_step_takes_other_batches_and_leaves_the_weights(model):
  job = resolve('synthetic.Uneven', ['batch_size=3']).build()
  eval_step = model.eval_step(job.train_input.element_spec())
  state = model.init(0)
  batch = next(job.train_input.make_iterator())
  averages = eval_step(state.variables, eval_step.place(batch), jnp.int32(0))
  assert float(averages['loss'].count) == 3 * 16
  weights = jax.device_get(model.to_canonical(state).weights)
  expected = model.task.compute_loss({'params': weights}, batch, train=False).loss  # no mesh, no padding
  np.testing.assert_allclose(averages['loss'].compute(), expected, rtol=1e-6)
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.weights))


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda b: {k: v for k, v in b.items() if k != 'labels'}, 'the batch holds .* but the step was compiled for'),
    (lambda b: b | {'ids': b['ids'][:4]}, r"input 'ids' is int32\[4, 16\] on this process .* int32\[8, 16\]"),
    (lambda b: b | {'ids': b['ids'].astype(np.float64)}, r"input 'ids' is float64"),
  ],
)
def test_a_batch_that_is_not_the_spec_is_refused(model, change, message):
  batch = next(resolve('synthetic.Uneven').build().train_input.make_iterator())
  with pytest.raises(ValueError, match=message):
    model.train_step.place(change(batch))


class Wrong(nn.Module):
  """A model whose only weight is declared as `how` says."""

  how: str

  @nn.compact
  def __call__(self, batch, train=False):
    init = jax.nn.initializers.ones
    split_dims = {'twice': ('data', 'data'), 'unknown': ('dta', None)}.get(self.how, (None, None))
    spec = WeightSpec(shape=(3, 3), init=init, split_dims=split_dims)
    return {'logits': self.param('kernel', spec)[batch['ids']]}


@pytest.mark.parametrize(
  'how, message',
  [
    ('twice', "use mesh axis 'data' twice"),
    ('unknown', "name 'dta', which is neither a mesh axis"),
  ],
)
def test_models_that_cannot_be_partitioned(how, message):
  task = Task(model=Wrong(how), loss=LanguageModelLoss(), learner=Learner(optimizer=Sgd(learning_rate=0.1)))
  mesh = MeshSpec(axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=(1, 2, 4)).build()
  with pytest.raises(ValueError, match=message):
    partition_spmd_model(task, mesh, {'ids': jax.ShapeDtypeStruct((8, 4), jnp.int32)})


def test_an_input_of_a_rank_without_a_mapping_is_refused():
  job = resolve('synthetic.Uneven').build()
  with pytest.raises(ValueError, match="no key 'map_2d' for an input of rank 2"):
    partition_spmd_model(
      job.task,
      job.experiment.mesh_spec().build(),
      job.train_input.element_spec(),
      axis_rules=job.experiment.axis_rules,
      inputs_split_mapping={'map_1d': ('batch',)},
    )


def test_dropout_differs_by_step():
  still = ('task.learner.optimizer.learning_rate.peak=0', 'task.model.stack.block.dropout_rate=0.5')
  job = resolve('synthetic.Uneven', still).build()
  model = partition_job(job)
  batch, state, losses = next(job.train_input.make_iterator()), model.init(0), []
  for _ in range(2):
    state, metrics = model.train_step(state, model.train_step.place(batch))
    losses.append(float(metrics['loss']))
  assert losses[0] != losses[1]
