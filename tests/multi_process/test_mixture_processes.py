"""Training on a mixture goes on with another number of processes: the same rows, and so the same losses."""

import dataclasses
import json
from pathlib import Path
import random
import signal
import sys

from launch import Job, coordinator_flags
import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.runtime.metrics import read_jsonl
from tests.model_folders import write_llama

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]

START_S = 120.0
NUM_STEPS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
  """What is trained: an experiment, its flags, and how near losses of 20 steps are on other numbers of processes."""

  experiment: str
  flags: tuple[str, ...] = ()
  rtol: float = 1e-5


@pytest.fixture(params=['text', 'conversations', 'pairs'])
def kind(request, tmp_path) -> Kind:
  """A mixture of packed text and tokens; or of two files of conversations, or of pairs, by which adapters are tuned."""
  if request.param == 'text':
    return Kind(experiment='tests.multi_process.mixture_experiments.Mixed')
  folder, is_pairs = write_llama(tmp_path / 'model'), request.param == 'pairs'
  files = {'most': str(tmp_path / 'most.jsonl'), 'few': str(tmp_path / 'few.jsonl')}
  for (name, file), count in zip(files.items(), (40, 7)):
    words = [(f'{name} {i}', 'the cat ' * (1 + i % 4), 'a dog ' * (1 + i % 3)) for i in range(count)]
    if is_pairs:
      records = [{'prompt': a, 'chosen': b, 'rejected': c} for a, b, c in words]
    else:
      talks = [(('user', a), ('assistant', b), ('user', c), ('assistant', a)) for a, b, c in words]
      records = [{'messages': [{'role': role, 'content': text} for role, text in talk]} for talk in talks]
    Path(file).write_text(''.join(json.dumps(record) + '\n' for record in records))
  schedule = 'task.learner.optimizer.learning_rate'
  settings = [f'model={folder}', f'data={files}', 'data_weights={"most": 0.6, "few": 0.4}', 'seq_len=128']
  settings += ['batch_size=8', 'ici_mesh_shape=1,2,4', 'tensorboard=False', f'num_train_steps={NUM_STEPS}']
  settings += ['log_every_steps=1', 'learning_rate=1e-3', f'{schedule}.warmup_steps=0', f'{schedule}.total_steps=600']
  settings += ['step_timeout_s=60.0', 'heartbeat_timeout_s=10', 'shutdown_timeout_s=5']
  flags = tuple(f'--set={setting}' for setting in settings)
  return Kind(experiment='finetune.LoraDpo' if is_pairs else 'finetune.LoraSft', flags=flags, rtol=2e-4)


def job(kind: Kind, log_dir: Path, job_log_dir: Path, num_processes: int, *flags: str) -> Job:
  """The processes of one start; together they have 8 devices."""
  log_dir.mkdir()
  command = [sys.executable, '-m', 'spmd_tasks.main', '--exp', kind.experiment, *kind.flags]
  command += ['--mode', 'train', '--job_log_dir', str(job_log_dir), f'--num_fake_devices={8 // num_processes}', *flags]
  ranks = coordinator_flags(num_processes=num_processes) if num_processes > 1 else [[]]
  return Job([command + rank for rank in ranks], log_dir=log_dir, num_devices=8 // num_processes)


def check_same(kind: Kind, job_log_dir: Path, other: Path) -> None:
  """All steps of both: rows to the last one; losses as sums over devices of other processes allow."""
  found, wanted = read_jsonl(job_log_dir), read_jsonl(other)
  assert found.keys() == wanted.keys() == set(range(1, NUM_STEPS + 1))
  for step, metrics in wanted.items():
    for name in (name for name in metrics if name.startswith(('loss', 'rows/'))):
      exact = name.startswith(('rows/', 'loss_weight'))
      np.testing.assert_allclose(
        found[step][name], metrics[name], rtol=0 if exact else kind.rtol, err_msg=f'{step} {name}'
      )


def test_ended_at_some_steps_and_gone_on_with_other_numbers_of_processes(kind, tmp_path):
  starts = [(1, 20, 'alone'), (2, 7, 'shared'), (4, 13, 'shared'), (1, 20, 'shared')]
  for number, (num_processes, num_steps, directory) in enumerate(starts):
    with job(
      kind, tmp_path / f'logs_{number}', tmp_path / directory, num_processes, f'--num_train_steps={num_steps}'
    ) as run:
      ranks = run.wait(deadline_s=START_S)
    assert [rank.returncode for rank in ranks] == [exit_codes.OK] * num_processes, [rank.log for rank in ranks]
  check_same(kind, tmp_path / 'shared', tmp_path / 'alone')


def test_killed_at_random_moments_and_gone_on_with_other_numbers_of_processes(kind, tmp_path):
  rng = random.Random(4)
  with job(kind, tmp_path / 'logs_alone', tmp_path / 'alone', 1) as run:
    run.wait(deadline_s=START_S)
  flags = ('--set', 'checkpoint_every_steps=2')
  for number, num_processes in enumerate((2, 4, 2, 1)):
    with job(kind, tmp_path / f'logs_{number}', tmp_path / 'killed', num_processes, *flags) as run:
      if number < 3:
        step = 4 + 5 * number + rng.randrange(3)
        run.wait_for_text(0, f'step {step}/', limit_s=START_S)
        run.send(rng.randrange(num_processes), signal.SIGKILL)
      ranks = run.wait(deadline_s=START_S)
  assert [rank.returncode for rank in ranks] == [exit_codes.OK], ranks[0].log
  check_same(kind, tmp_path / 'killed', tmp_path / 'alone')
