"""Runs jobs of Small in this process, and reads what their checkpoints hold."""

import functools
from pathlib import Path
import shutil
from typing import Any

import jax
import numpy as np

from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from tests import binary
from tests.programs.small_jobs import SMALL


def train(directory: Path, *flags: object, exp: str = SMALL) -> int:
  """The exit code of a training job."""
  return binary.run_in_process('--exp', exp, '--mode', 'train', '--job_log_dir', directory, *flags)


def only_checkpoints(finished_job: Path, directory: Path, steps=(20,)) -> Path:
  """Makes a job_log_dir with the config and some of the checkpoints of the finished job, and nothing else."""
  directory.mkdir(parents=True)
  shutil.copy(finished_job / 'config.json', directory)
  for step in steps:
    name = f'checkpoint_{step:08d}'
    shutil.copytree(finished_job / 'checkpoints' / name, directory / 'checkpoints' / name)
  return directory


def saved_arrays(job_log_dir: Path, step: int) -> Any:
  """The TrainState of one checkpoint of a job of Small: true shapes, whole on the first device, then on the host."""
  checkpointer = Checkpointer(job_log_dir / 'checkpoints', read_only=True)
  try:
    return jax.device_get(checkpointer.restore(_abstract_state(), step).state)
  finally:
    checkpointer.close()


@functools.cache
def _abstract_state() -> Any:
  return partition_job(resolve(SMALL).build()).abstract_state


def assert_same_arrays(actual: Any, expected: Any) -> None:
  """Bit for bit, leaf by leaf."""
  expected_leaves, structure = jax.tree_util.tree_flatten_with_path(expected)
  assert jax.tree.structure(actual) == structure
  for (path, leaf), other in zip(expected_leaves, jax.tree.leaves(actual)):
    name = jax.tree_util.keystr(path)
    assert (other.dtype, other.shape) == (leaf.dtype, leaf.shape), name
    np.testing.assert_array_equal(_bits(other), _bits(leaf), err_msg=name)


def _bits(array: np.ndarray) -> np.ndarray:
  """So that 0 and -0 differ, and nan equals itself."""
  return np.atleast_1d(array).view(np.uint8)
