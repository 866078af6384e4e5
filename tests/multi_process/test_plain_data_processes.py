"""Plain batches on several processes: each keeps its rows; those of a last batch that n does not divide count once."""

import sys

from launch import Job, coordinator_flags
import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.runtime.metric_files import read_jsonl
from tests import binary

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_numbers_do_not_depend_on_the_number_of_processes(tmp_path):
  flags = ['--exp', 'tests.multi_process.plain_experiments.Uneven', '--mode', 'train', '--job_log_dir']
  assert binary.run_in_process(*flags, tmp_path / 'alone') == exit_codes.OK
  assert binary.run_in_process(*flags, tmp_path / 'shared', '--num_train_steps', 5) == exit_codes.OK
  command = [sys.executable, '-m', 'spmd_tasks.main', *flags, str(tmp_path / 'shared'), '--num_fake_devices=4']
  argvs = [command + rank for rank in coordinator_flags(num_processes=2)]
  with Job(argvs, log_dir=tmp_path, num_devices=4) as job:
    ended = job.wait(deadline_s=200)
  assert [rank.returncode for rank in ended] == [exit_codes.OK] * 2, [rank.log for rank in ended]
  alone, shared = (read_jsonl(tmp_path / name) for name in ('alone', 'shared'))
  assert alone.keys() == shared.keys() == set(range(1, 13))
  for step, metrics in alone.items():
    np.testing.assert_allclose(shared[step]['loss'], metrics['loss'], rtol=1e-5)
  evals = [read_jsonl(tmp_path / name / 'eval' / 'valid')[12] for name in ('alone', 'shared')]
  np.testing.assert_allclose(evals[0]['loss'], evals[1]['loss'], rtol=1e-5)
  assert evals[0]['num_batches'] == evals[1]['num_batches'] == 2
