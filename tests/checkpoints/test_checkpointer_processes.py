"""Checkpoints across processes: two of them act as one. tests/programs/test_kills.py has kill -9."""

import os
import pathlib
import socket
import subprocess

import checkpoint_worker
import jax
import numpy as np
import pytest

from spmd_tasks.checkpoints import Checkpointer
from tests import binary

REPOSITORY = pathlib.Path(__file__).parents[2]


def start(num_devices: int, *argv: str) -> subprocess.Popen[str]:
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': str(num_devices), 'PYTHONPATH': str(REPOSITORY)}
  return binary.start_process(
    [checkpoint_worker.__file__, *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
  )


@pytest.mark.slow
def test_two_processes_save_and_restore_as_one_and_one_process_reads_theirs(tmp_path):
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{probe.getsockname()[1]}'
  processes = [start(2, str(tmp_path), address, str(rank)) for rank in (0, 1)]
  try:
    outputs = [process.communicate(timeout=120)[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
  assert [process.returncode for process in processes] == [0, 0], outputs
  for output in outputs:
    told = [line for line in output.splitlines() if line.split(' ')[0] in ('steps', 'restored', 'refused')]
    states = [[{'rank': rank, 'step': step} for rank in (0, 1)] for step in (3, 2)]
    assert told == [
      'steps [1, 2, 3]',
      f'restored 3 exact True {states[0]}',
      f'restored 2 exact True {states[1]}',
      f'refused {tmp_path} has no checkpoint of step 9; it has [1, 2].',
    ]
  restored = Checkpointer(tmp_path).restore(checkpoint_worker.abstract_state())
  assert restored.step == 2
  assert restored.input_state is None, 'what two processes read is not what one would read'
  assert restored.input_states == [{'rank': rank, 'step': 2} for rank in (0, 1)]
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored.state), checkpoint_worker.host_state(2))
