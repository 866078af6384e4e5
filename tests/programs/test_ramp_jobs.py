"""A job whose batch size changes: its programs are compiled first, and it resumes, and gets its ramp, exactly."""

import shutil

import fiddle as fdl
import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.inputs import BatchRamp
from spmd_tasks.recipes import SyntheticLanguageModel
from tests import binary
from tests.programs.small_jobs import Small
from tests.programs.small_runs import train


class Ramped(Small):
  """Small without dropout. Without a learning rate, the loss of a batch is the mean over its rows of one function."""

  num_train_steps = 5
  batch_size = 6  # of 8 devices
  checkpoint_every = 3
  has_ramp: bool = True

  def task(self):
    task = super().task()
    task.learner.optimizer.learning_rate = 0.0
    task.model.stack.block.dropout_rate = 0.0
    return task

  def train_input(self):
    source = SyntheticLanguageModel.train_input(self)
    return fdl.Config(BatchRamp, source=source, sizes=((0, 6), (3, 18))) if self.has_ramp else source

  def eval_inputs(self):
    return {}


def run(directory, *flags):
  assert train(directory, *flags, exp=f'{__name__}.Ramped') == exit_codes.OK


def losses(directory):
  return list(binary.column(directory, 'loss').values())


@pytest.fixture(scope='module')
def ramped(tmp_path_factory):
  """The directory of an undisturbed job of Ramped."""
  directory = tmp_path_factory.mktemp('ramped') / 'job'
  run(directory)
  return directory


def test_a_larger_batch_has_the_rows_of_the_next_batches(ramped, tmp_path):
  plain = tmp_path / 'plain'
  run(plain, '--num_train_steps', 3, '--set', 'has_ramp=false')
  shutil.copytree(plain, tmp_path / 'again')
  run(plain, '--num_train_steps', 9, '--set', 'has_ramp=false')
  small = losses(plain)
  expected = [*small[:3], np.mean(small[3:6]), np.mean(small[6:9])]
  np.testing.assert_allclose(losses(ramped), expected, rtol=1e-6)
  assert list(binary.column(ramped, 'batch_size').values()) == [6, 6, 6, 18, 18]
  assert set(binary.column(ramped, 'num_compilations').values()) == {0}

  # A plain job of three steps goes on with larger batches.
  sizes = 'train_input.sizes=[[0, 18]]'
  run(tmp_path / 'again', '--set', sizes, '--accept_config_changes')
  assert losses(tmp_path / 'again') == losses(ramped)


def test_a_restart_within_a_ramp_changes_nothing(ramped, tmp_path):
  """The rows of each step; weights that change are resumed in test_resume.py."""
  for num_steps in (4, 5):
    run(tmp_path / 'parts', '--num_train_steps', num_steps)
  for name in ('loss', 'grad_norm', 'batch_size'):
    assert binary.column(tmp_path / 'parts', name) == binary.column(ramped, name)
