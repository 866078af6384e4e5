"""--mode plan as a user runs it: what it prints and writes, and what it answers if a step does not fit."""

import dataclasses
import json

import pytest

from spmd_tasks import exit_codes
from spmd_tasks.planning import format_plan, targets
from tests import binary

KEYS = {
  *('fits', 'hbm_bytes', 'peak_bytes', 'argument_bytes', 'temp_bytes', 'predicted_step_s', 'predicted_mfu'),
  *('collectives', 'weights', 'assumptions', 'experiment', 'target', 'mesh', 'memory', 'pipeline'),
}


def plan(*flags: object) -> int:
  return binary.run_in_process('--exp', 'synthetic.Uneven', '--mode', 'plan', *flags)


def test_the_command_prints_a_plan_and_writes_it(tmp_path, capsys):
  code = plan('--target', 'cpu', '--plan_out', tmp_path / 'plan')
  printed = capsys.readouterr().out
  assert code == exit_codes.OK
  assert printed.startswith('synthetic.Uneven on cpu:8: 8 devices, mesh data 2 x mdl 4')
  written = json.loads((tmp_path / 'plan' / 'plan.json').read_text())
  assert written.keys() >= KEYS
  assert printed == format_plan(written) + '\n'
  page = (tmp_path / 'plan' / 'plan.html').read_text()
  assert 'synthetic.Uneven on cpu:8' in page


@pytest.mark.parametrize(
  'flags, parts',
  [
    ((), ['no target is named', '--target']),
    (('--target', 'cpu', '--plan_steps', 'train,serve'), ["'serve', which is no step"]),
  ],
)
def test_what_cannot_be_planned_is_one_sentence(flags, parts, capsys):
  assert plan(*flags) == exit_codes.USAGE
  message = capsys.readouterr().err
  for part in parts:
    assert part in message
  assert message.count('\n') == 1


def test_flags_of_plan_in_another_mode_are_refused(tmp_path, capsys):
  flags = ('--exp', 'synthetic.Uneven', '--mode', 'train', '--job_log_dir', tmp_path / 'job', '--target', 'cpu')
  assert binary.run_in_process(*flags) == exit_codes.USAGE
  assert '--target is for --mode plan' in capsys.readouterr().err
  assert not (tmp_path / 'job').exists()


def test_what_does_not_fit_is_a_failure(monkeypatch, tmp_path, capsys):
  """Devices whose memory does not hold the step of synthetic.Uneven with 64 rows at once."""
  monkeypatch.setattr(targets, 'CPU', dataclasses.replace(targets.CPU, hbm_bytes=600_000))
  code = plan('--target', 'cpu:8', '--plan_out', tmp_path, '--set', 'batch_size=64')
  printed = capsys.readouterr().out
  assert code == exit_codes.FAILED
  assert 'DOES NOT FIT' in printed
  written = json.loads((tmp_path / 'plan.json').read_text())
  assert written['fits'] is False
