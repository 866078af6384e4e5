"""A job that starts from a dense job's weights, through the binary: it begins with the dense model's loss."""

import shutil

import fiddle as fdl
import jax
import numpy as np
import optax
import pytest

from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.layers.moe import Dropless, Experts, MixtureOfExperts, TopKRouter
from spmd_tasks.programs.upcycling import initialize_from
from spmd_tasks.sharding import DataExpertModelMesh
from tests import binary
from tests.programs.small_jobs import Small
from tests.programs.small_runs import saved_arrays, train
from tests.programs.test_resume import flip_a_byte
from tests.shared_models import shared_models

UPCYCLED = f'{__name__}.Upcycled'
AXES = DataExpertModelMesh(num_devices=8, num_expert_partitions=2, num_partitions=2).axes()


class Upcycled(Small):
  """The layer is a mixture of equal experts, whose gates sum to 1: the dense model, as no step changes a weight."""

  mesh_axis_names = AXES.mesh_axis_names
  ici_mesh_shape = AXES.ici_mesh_shape  # data 2 x expert 2 x mdl 2
  axis_rules = AXES.axis_rules
  num_train_steps = 1

  def task(self):
    task = super().task()
    task.learner.optimizer = fdl.Config(optax.sgd, learning_rate=0.0, momentum=0.9)
    return task

  def ffn(self):
    return fdl.Config(
      MixtureOfExperts,
      router=fdl.Config(TopKRouter, num_experts=4, num_selected=2, normalize_gates=1.0),
      experts=fdl.Config(Experts, num_experts=4, hidden_dim=self.hidden_dims),
      computation=fdl.Config(Dropless),
    )


def test_begins_with_the_loss_of_the_dense_model(finished_job, tmp_path, capsys):
  assert train(tmp_path / 'job', '--set', f'init_from={finished_job}', exp=UPCYCLED) == 0
  assert f'starting from the weights of step 20 in {finished_job}' in capsys.readouterr().err
  dense, upcycled = (binary.metric_lines(job / 'eval' / 'ragged')[-1] for job in (finished_job, tmp_path / 'job'))
  np.testing.assert_allclose(upcycled['cross_entropy'], dense['cross_entropy'], rtol=1e-5)
  np.testing.assert_allclose([len(upcycled['expert_load']), sum(upcycled['expert_load'])], [4, 1], rtol=1e-6)
  assert np.isfinite(binary.column(tmp_path / 'job', 'loss')[1])


def test_weights_are_copied_bit_for_bit_and_everything_else_is_new(finished_job):
  with shared_models():
    model = partition_job(resolve(UPCYCLED).build())
  checkpointer = Checkpointer(finished_job / 'checkpoints', read_only=True)
  padded, step = initialize_from(model, checkpointer, seed=3)
  checkpointer.close()
  assert step == 20
  dense = saved_arrays(finished_job, 20).weights
  state, fresh = (jax.device_get(model.to_canonical(s)) for s in (padded, model.init(3)))
  layers, dense_layers = state.weights['stack']['layers'], dense['stack']['layers']
  for name in ('up', 'gate', 'down'):
    for expert in range(4):
      np.testing.assert_array_equal(layers['ffn']['experts'][name][:, expert], dense_layers['ffn'][name]['kernel'])
  for name in ('attention', 'attention_norm', 'ffn_norm'):
    jax.tree.map(np.testing.assert_array_equal, layers[name], dense_layers[name])
  jax.tree.map(np.testing.assert_array_equal, state.weights['embedding'], dense['embedding'])
  # The router, the step and the optimizer's state are those of a new job, and the average begins with the weights.
  routers = [s.weights['stack']['layers']['ffn']['router'] for s in (state, fresh)]
  jax.tree.map(np.testing.assert_array_equal, *routers)
  jax.tree.map(np.testing.assert_array_equal, state.learner.opt_state, fresh.learner.opt_state)
  jax.tree.map(np.testing.assert_array_equal, state.learner.ema_weights, state.weights)
  assert state.step == 0
  for array in jax.tree.leaves(padded.weights['stack']['layers']['ffn']['experts']):
    assert array.addressable_shards[0].data.size * 8 == array.size  # each device has an eighth


def test_a_damaged_checkpoint_is_passed_over_and_left_where_it_lies(finished_job, tmp_path, capsys):
  source = shutil.copytree(finished_job, tmp_path / 'dense')
  flip_a_byte(source / 'checkpoints' / 'checkpoint_00000020')
  before = binary.snapshot(source)
  flags = ('--num_train_steps', 1, '--set', f'init_from={source}')
  assert train(tmp_path / 'job', *flags) == 0
  assert 'starting from the weights of step 18' in capsys.readouterr().err
  assert train(tmp_path / 'of_18', *flags, '--set', 'init_from_step=18') == 0
  assert binary.column(tmp_path / 'job', 'loss') == binary.column(tmp_path / 'of_18', 'loss')
  assert train(tmp_path / 'of_20', *flags, '--set', 'init_from_step=20') != 0
  assert 'is damaged' in capsys.readouterr().err
  assert binary.snapshot(source) == before


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--set', 'init_from_step=3'], 'has no checkpoint of step 3, only steps [2, 4, 6'),
    (['--set', 'hidden_dims=10'], 'needs stack/layers/ffn/up/kernel [1, 6, 10], but the checkpoint has [1, 6, 9]'),
  ],
)
def test_what_cannot_be_is_said(flags, message, finished_job, tmp_path, capsys):
  assert train(tmp_path / 'job', '--set', f'init_from={finished_job}', *flags, exp=UPCYCLED) != 0
  assert message in capsys.readouterr().err
  assert not (tmp_path / 'job' / 'config.json').exists()
