"""DPO on a folder in several processes: one reference pass and one loss curve, also killed and gone on."""

import json
from pathlib import Path
import signal
import sys

from launch import Job, coordinator_flags
import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.runtime.metrics import read_jsonl
from tests.model_folders import write_llama

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(1200)]

START_S = 400.0
NUM_STEPS = 10
WORDS = ('the cat sat', 'a dog ate that', 'on the mat', 'and the hat', 'def f(x):', ' return x', 'age', 'name')
SETTINGS = (
  *('seq_len=64', 'batch_size=8', 'tensorboard=False', 'log_every_steps=1', f'num_train_steps={NUM_STEPS}'),
  # A constant learning rate, at which rounding stays rounding over ten steps.
  *('learning_rate=1e-3', 'task.learner.optimizer.learning_rate.warmup_steps=0', 'beta=0.5'),
  *('task.learner.optimizer.learning_rate.total_steps=600', 'checkpoint_every_steps=2'),
  *('step_timeout_s=300.0', 'heartbeat_timeout_s=30', 'shutdown_timeout_s=10'),
)
PIPELINED = 'tests.multi_process.preference_experiments.Pipelined'
IN_PARTS = ('task.learner.num_microbatches=2',)
# name, prefix of the experiment, number of processes, mesh, overrides
CASES = [
  ('data 2 x mdl 4 in two processes', 'finetune.', 2, '1,2,4', ()),
  ('data 8 in four processes, 2 microbatches', 'finetune.', 4, '1,8,1', IN_PARTS),
  ('stage 2 x data 2 x mdl 2 in two processes', PIPELINED, 2, '1,2,2,2', ()),
  (
    'stage 2 x data 4 in one process, one forward, one backward',
    PIPELINED,
    1,
    '1,2,4,1',
    ('schedule=one_forward_one_backward',),
  ),
]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A model, and 37 pairs of different lengths."""
  folder = write_llama(tmp_path_factory.mktemp('base') / 'model')
  rng = np.random.default_rng(5)

  def some(most):
    return ' '.join(rng.choice(WORDS, rng.integers(1, most + 1)))

  pairs = [{'prompt': some(2), 'chosen': f' {some(3)}', 'rejected': f' {some(3)} x'} for _ in range(37)]
  (folder / 'pairs.jsonl').write_text(''.join(json.dumps(pair) + '\n' for pair in pairs))
  return folder


def job(logs: Path, directory: Path, folder: Path, experiment: str, num_processes: int, mesh: str, *more: str) -> Job:
  """The processes of one start."""
  logs.mkdir()
  num_devices = int(np.prod([int(size) for size in mesh.split(',')])) // num_processes
  command = [sys.executable, '-m', 'spmd_tasks.main', '--exp', experiment, '--mode', 'train']
  command += ['--job_log_dir', str(directory), f'--num_fake_devices={num_devices}']
  settings = (*SETTINGS, *more, f'model={folder}', f'data={folder}/pairs.jsonl', f'ici_mesh_shape={mesh}')
  command += [f'--set={setting}' for setting in settings]
  ranks = coordinator_flags(num_processes=num_processes) if num_processes > 1 else [[]]
  return Job([command + rank for rank in ranks], log_dir=logs, num_devices=num_devices)


def run(started: Job) -> None:
  with started as processes:
    ranks = processes.wait(deadline_s=START_S)
  assert [rank.returncode for rank in ranks] == [exit_codes.OK] * len(ranks), [rank.log for rank in ranks]


@pytest.fixture(scope='module')
def alone(folder, tmp_path_factory):
  """Returns the directory of a kind's job, FullDpo or LoraDpo, on one device of one process; each is run once."""
  directories = {}

  def alone(kind):
    if kind not in directories:
      directory = tmp_path_factory.mktemp(kind)
      run(job(directory / 'logs', directory / 'job', folder, f'finetune.{kind}', 1, '1,1,1'))
      directories[kind] = directory / 'job'
      losses = [step['loss'] for step in read_jsonl(directory / 'job').values()]
      assert abs(losses[0] - np.log(2)) < 1e-5  # the model is its reference
      assert losses[-1] < 0.98 * losses[0]
    return directories[kind]

  return alone


def check_same(found: Path, wanted: Path) -> None:
  """The reference's log-probabilities, and every step's loss and metrics."""
  name = 'reference/train_input.npy'
  np.testing.assert_allclose(np.load(found / name), np.load(wanted / name), rtol=2e-5)
  steps, expected = read_jsonl(found), read_jsonl(wanted)
  assert steps.keys() == expected.keys() == set(range(1, NUM_STEPS + 1))
  for step, metrics in expected.items():
    assert steps[step]['loss_weight'] == metrics['loss_weight']
    for metric in ('loss', 'reward_margin', 'chosen_log_prob', 'rejected_log_prob', 'grad_norm'):
      np.testing.assert_allclose(
        steps[step][metric], metrics[metric], rtol=2e-4, atol=2e-5, err_msg=f'{metric} of step {step}'
      )


@pytest.mark.parametrize('kind', ['FullDpo', 'LoraDpo'])
@pytest.mark.parametrize('name, prefix, num_processes, mesh, more', CASES, ids=[case[0] for case in CASES])
def test_one_curve_in_any_number_of_processes(name, prefix, num_processes, mesh, more, kind, folder, alone, tmp_path):
  run(job(tmp_path / 'logs', tmp_path / 'job', folder, f'{prefix}{kind}', num_processes, mesh, *more))
  check_same(tmp_path / 'job', alone(kind))


@pytest.mark.parametrize('kind', ['FullDpo', 'LoraDpo'])
def test_killed_and_gone_on_in_other_numbers_of_processes(kind, folder, alone, tmp_path):
  starts = [(2, '1,2,4', 4), (4, '1,8,1', 8), (1, '1,2,2', None)]
  for number, (num_processes, mesh, step) in enumerate(starts):
    started = job(tmp_path / f'logs_{number}', tmp_path / 'job', folder, f'finetune.{kind}', num_processes, mesh)
    with started as processes:
      if step is not None:
        processes.wait_for_text(0, f'step {step}/', limit_s=START_S)
        processes.send(num_processes - 1, signal.SIGKILL)
      ranks = processes.wait(deadline_s=START_S)
    if step is not None:
      assert ranks[-1].returncode == -signal.SIGKILL
  assert [rank.returncode for rank in ranks] == [exit_codes.OK], ranks[0].log
  check_same(tmp_path / 'job', alone(kind))
