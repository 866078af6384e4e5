"""A job that starts from a dense job's weights, through the binary: it begins with the dense model's loss."""

import shutil

import fiddle as fdl
import jax
import numpy as np
import pytest

from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.layers.moe import Dropless, Experts, MixtureOfExperts, TopKRouter
from spmd_tasks.programs.upcycling import initialize_from
from spmd_tasks.recipes import SyntheticLanguageModel
from spmd_tasks.sharding import DataExpertModelMesh
from tests import binary
from tests.programs.small_jobs import Small
from tests.programs.test_resume import flip_a_byte

DENSE, UPCYCLED = f'{__name__}.Dense', f'{__name__}.Upcycled'
AXES = DataExpertModelMesh(num_devices=8, num_expert_partitions=2, num_partitions=2).axes()


class Dense(Small):
  """Two layers, without dropout; padded nearly everywhere on data 2 x mdl 4."""

  num_layers = 2
  num_train_steps = 4

  def task(self):
    task = super().task()
    task.learner.optimizer.learning_rate = 0.03
    task.model.stack.block.dropout_rate = 0.0
    return task

  def train_input(self):
    return SyntheticLanguageModel.train_input(self)

  def eval_inputs(self):
    return {}


class Upcycled(Dense):
  """Every layer a mixture of equal experts, whose gates sum to 1: the dense model, until it is trained."""

  mesh_axis_names = AXES.mesh_axis_names
  ici_mesh_shape = AXES.ici_mesh_shape  # data 2 x expert 2 x mdl 2
  axis_rules = AXES.axis_rules
  num_train_steps = 2
  num_experts: int = 4
  num_selected_experts: int = 2
  has_shared_expert: bool = False

  def ffn(self):
    return fdl.Config(
      MixtureOfExperts,
      router=fdl.Config(
        TopKRouter, num_experts=self.num_experts, num_selected=self.num_selected_experts, normalize_gates=1.0
      ),
      experts=fdl.Config(Experts, num_experts=self.num_experts, hidden_dim=self.hidden_dims),
      computation=fdl.Config(Dropless),
      shared_expert=super().ffn() if self.has_shared_expert else None,
    )


def train(experiment, directory, *flags):
  return binary.run_in_process('--exp', experiment, '--mode', 'train', '--job_log_dir', directory, *flags)


@pytest.fixture(scope='module')
def dense_job(tmp_path_factory):
  """Four steps of a dense model, with checkpoints of steps 2 and 4. Not to be written to."""
  directory = tmp_path_factory.mktemp('dense') / 'job'
  assert train(DENSE, directory) == 0
  return directory


@pytest.fixture(scope='module')
def first_loss(dense_job, tmp_path_factory):
  """Of the dense job's last weights, on the first batch of a new job: of the same model, trained further."""
  directory = tmp_path_factory.mktemp('further') / 'job'
  assert train(DENSE, directory, '--set', f'init_from={dense_job}', '--num_train_steps', 1) == 0
  loss = binary.column(directory, 'cross_entropy')[1]
  assert abs(loss - binary.column(dense_job, 'cross_entropy')[1]) > 0.01  # new weights give another
  return loss


def test_begins_with_the_loss_of_the_dense_model(dense_job, first_loss, tmp_path, capsys):
  assert train(UPCYCLED, tmp_path / 'job', '--set', f'init_from={dense_job}') == 0
  assert f'starting from the weights of step 4 in {dense_job}' in capsys.readouterr().err
  losses = binary.column(tmp_path / 'job', 'cross_entropy')
  np.testing.assert_allclose(losses[1], first_loss, rtol=1e-5)
  assert np.isfinite(losses[2])


def test_weights_are_copied_bit_for_bit_and_everything_else_is_new(dense_job):
  model = partition_job(resolve(UPCYCLED).build())
  checkpointer = Checkpointer(dense_job / 'checkpoints', read_only=True)
  padded, step = initialize_from(model, checkpointer, seed=3)
  dense = jax.device_get(
    checkpointer.restore_weights(partition_job(resolve(DENSE).build()).abstract_state.weights).state
  )
  checkpointer.close()
  assert step == 4
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


def test_a_damaged_checkpoint_is_passed_over_and_left_where_it_lies(dense_job, first_loss, tmp_path, capsys):
  source = shutil.copytree(dense_job, tmp_path / 'dense')
  flip_a_byte(source / 'checkpoints' / 'checkpoint_00000004')
  before = binary.snapshot(source)
  flags = ['--set', f'init_from={source}', '--num_train_steps', 1]
  assert train(DENSE, tmp_path / 'job', *flags) == 0
  assert 'starting from the weights of step 2' in capsys.readouterr().err
  assert binary.column(tmp_path / 'job', 'cross_entropy')[1] != first_loss
  assert train(DENSE, tmp_path / 'other', *flags, '--set', 'init_from_step=4') != 0
  assert 'is damaged' in capsys.readouterr().err
  assert binary.snapshot(source) == before


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--set', 'init_from_step=3'], 'has no checkpoint of step 3; it has those of [2, 4]'),
    (['--set', 'hidden_dims=10'], 'needs stack/layers/ffn/up/kernel [2, 6, 10], but the checkpoint has [2, 6, 9]'),
  ],
)
def test_what_cannot_be_is_said(flags, message, dense_job, tmp_path, capsys):
  assert train(UPCYCLED, tmp_path / 'job', '--set', f'init_from={dense_job}', *flags) != 0
  assert message in capsys.readouterr().err
  assert not (tmp_path / 'job' / 'config.json').exists()
