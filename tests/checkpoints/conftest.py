"""Directories of checkpoints for the tests to read and to damage, on a disk and in emulated stores."""

import pathlib
import shutil

from checkpoint_states import device_state
import pytest

from spmd_tasks.checkpoints import Checkpointer


@pytest.fixture(scope='module')
def three_steps(tmp_path_factory) -> pathlib.Path:
  """A directory with checkpoints 1, 2 and 3."""
  directory = tmp_path_factory.mktemp('three_steps') / 'checkpoints'
  checkpointer = Checkpointer(directory)
  for step in (1, 2, 3):
    checkpointer.save(step, device_state(step), {'position': step * 10})
  checkpointer.close()
  return directory


@pytest.fixture
def directory(three_steps, tmp_path) -> pathlib.Path:
  return pathlib.Path(shutil.copytree(three_steps, tmp_path / 'checkpoints'))
