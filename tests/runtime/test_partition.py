"""A PartitionedModel initializes weights on their devices, refuses batches without its spec, and varies dropout."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.layers import LanguageModelLoss
from spmd_tasks.runtime import PartitionedModel, Task, partition_spmd_model
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, MeshSpec


def partition(*overrides: str) -> PartitionedModel:
  return partition_job(resolve('synthetic.Uneven', overrides).build())


@pytest.fixture(scope='module')
def model() -> PartitionedModel:
  return partition()


def test_initial_weights_do_not_depend_on_the_mesh(model):
  weights = jax.device_get(model.to_canonical(model.init(0)).weights)
  other = partition('ici_mesh_shape=1,1,8')
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(other.to_canonical(other.init(0)).weights), weights)
  reseeded = jax.device_get(model.to_canonical(model.init(1)).weights)
  assert not np.array_equal(reseeded['embedding']['table'], weights['embedding']['table'])


def test_initialization_has_no_full_weight_in_memory():
  model = partition('vocab_size=16385', 'model_dims=126')
  memory = model.lower_init().compile().memory_analysis()
  full_table = 16385 * 126 * 4
  state_per_device = 3 * full_table / 8  # the state is mostly the table and its two moments
  assert memory.output_size_in_bytes < 1.3 * state_per_device
  assert memory.temp_size_in_bytes < full_table / 2


def test_a_stage_initializes_only_its_own_layers():
  def num_transcendentals(shape: str) -> float:  # per device; every initialized weight takes some
    experiment = 'tests.runtime.pipeline_experiments.PipelinedAdamW'
    overrides = ('num_layers=8', 'num_heads=4', 'model_dims=32', 'hidden_dims=128', f'ici_mesh_shape={shape}')
    model = partition_job(resolve(experiment, overrides).build())
    return model.lower_init().compile().cost_analysis()['transcendentals']

  # The factor would be 2 if a stage initialized all layers.
  assert num_transcendentals('1,4,1,2') < 1.5 * num_transcendentals('1,2,1,4')


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda b: list(b.values()), 'a list: .*dict of arrays'),
    (lambda b: {k: v for k, v in b.items() if k != 'labels'}, 'the batch has .*: element_spec'),
    (lambda b: b | {'ids': b['ids'][:4]}, r"'ids' is int32\[4, 16\] .* int32\[8, 16\]: element_spec"),
    (lambda b: b | {'ids': b['ids'].astype(np.float64)}, "'ids' is float64"),
    (lambda b: b | {'ids': b['ids'] + np.int64(2**40)}, "'ids' has integers from .* int32: choose a wider dtype"),
  ],
)
def test_a_batch_that_does_not_match_the_spec_is_refused(model, change, message):
  batch = next(resolve('synthetic.Uneven').build().train_input.make_iterator())
  with pytest.raises(UserError, match=message):
    model.train_step.place(change(batch))


class Dropping(nn.Module):
  """Logits [B, T, V] of which half are dropped."""

  @nn.compact
  def __call__(self, batch, train=False):
    table = self.param('table', nn.initializers.normal(1.0), (7, 7))
    return {'logits': nn.Dropout(0.5, deterministic=not train)(table[batch['ids']])}


def test_dropout_differs_by_step():
  batch = {'ids': np.arange(6, dtype=np.int32).reshape(1, 6) % 7, 'weights': np.ones((1, 6), np.float32)}
  batch['labels'] = batch['ids']
  task = Task(model=Dropping(), loss=LanguageModelLoss(), learner=optax.sgd(0.0))
  mesh = MeshSpec(axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=(1, 1, 1)).build(jax.devices()[:1])
  spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
  model = partition_spmd_model(task, mesh, spec, axis_rules=DEFAULT_AXIS_RULES)
  state, losses = model.init(0), []
  for _ in range(2):
    state, metrics = model.train_step(state, model.train_step.place(batch))
    losses.append(float(metrics['loss']))
  assert losses[0] != losses[1]
