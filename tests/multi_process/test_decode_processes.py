"""A decoding job as two processes over loopback: the outputs of one."""

import json
from pathlib import Path
import sys

from launch import Job, coordinator_flags
import pytest

from tests import binary

pytestmark = pytest.mark.slow

EXPERIMENT = 'tests.multi_process.raising_experiments.Job'
# Width-tiny prompts of tokens; the slots do not divide by the data axis.
PROMPTS = [
  {'prompt_ids': [i + 1] * (i + 1), 'max_tokens': 4, 'temperature': 1.0 * (i % 2), 'n': 1 + i % 2} for i in range(6)
]
SETTINGS = ('max_len=12', 'min_bucket=12', 'num_slots=3')


def _run(tmp_path: Path, num_processes: int, *flags: object) -> str:
  """What the first process writes; one process is this one."""
  flags = ('--exp', EXPERIMENT, '--job_log_dir', tmp_path / 'job', *flags)
  if num_processes == 1:
    assert binary.run_in_process(*flags) == 0
    return ''
  command = [sys.executable, '-m', 'spmd_tasks.main', *map(str, flags), '--num_fake_devices=4']
  log_dir = tmp_path / f'logs_{len(list(tmp_path.iterdir()))}'
  log_dir.mkdir()
  with Job([command + rank for rank in coordinator_flags(num_processes=2)], log_dir=log_dir, num_devices=4) as job:
    finished = job.wait(deadline_s=120.0)
  assert [rank.returncode for rank in finished] == [0, 0], [rank.log for rank in finished]
  return finished[0].log


def test_two_processes_decode_what_one_does(tmp_path):
  prompts = tmp_path / 'prompts.jsonl'
  prompts.write_text(''.join(json.dumps(prompt) + '\n' for prompt in PROMPTS))
  _run(tmp_path, 1, '--mode', 'train', '--num_train_steps', 2)
  settings = [part for setting in SETTINGS for part in ('--set', f'task.decode.{setting}')]
  outputs = []
  for num_processes in (1, 2):
    path = tmp_path / f'outputs_{num_processes}.jsonl'
    flags = ('--mode', 'decode_once', '--decode_input', prompts, '--decode_output', path, *settings)
    _run(tmp_path, num_processes, *flags)
    outputs.append(
      [[output['ids'] for output in json.loads(line)['outputs']] for line in path.read_text().splitlines()]
    )
  assert outputs[0] == outputs[1]
  assert [len(ids) for ids in outputs[0]] == [1, 2, 1, 2, 1, 2]
