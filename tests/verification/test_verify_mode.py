"""--mode verify holds for registered experiments and for a user's own; test_planted_*.py show that it finds errors."""

import json

import pytest

from spmd_tasks import exit_codes
from spmd_tasks.config.listing import list_experiments
from spmd_tasks.verification import mode
from spmd_tasks.verification._cases import Case, skipped_case
from spmd_tasks.verification.mode import CLAIMS
from tests import binary
from tests.model_folders import write_llama

TINY = [name for name, _ in list_experiments() if 'Tiny' in name or 'Uneven' in name]


def verify(capsys, name: str, *flags: str) -> tuple[int, dict, str]:
  """Runs --mode verify. Returns the exit code, the last line, and the whole output."""
  code = binary.run_in_process('--exp', name, '--mode', 'verify', *flags)
  printed = capsys.readouterr().out
  return code, json.loads(printed.splitlines()[-1]), printed


def assert_holds(code: int, summary: dict, printed: str) -> None:
  assert code == exit_codes.OK, printed
  assert summary['broken'] == 0
  assert summary['failures'] == []
  assert summary['claims'] == summary['held'] > 0


def test_every_claim_about_a_users_own_experiment(capsys):
  name = 'tests.programs.own_experiments.Regression'
  code, summary, printed = verify(capsys, name, '--cases', '1')

  assert_holds(code, summary, printed)
  assert 'not shrunk' in printed
  for claim in CLAIMS:
    assert f'\n{claim} ' in printed, claim
  assert summary['skipped'] >= 1  # a plain model has no layers to pipeline


# The test above verifies all claims except `pipeline` by default.
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize('name', TINY)
def test_every_claim_about_every_tiny_experiment(capsys, name):
  assert_holds(*verify(capsys, name, '--cases', '3'))


def test_wrong_flags_are_refused(capsys):
  assert binary.run_in_process('--exp', 'synthetic.Tiny', '--mode', 'verify', '--claims', 'mesh,psum') == 2
  assert "'psum', which is not a claim: choose from step, mesh" in capsys.readouterr().err
  assert binary.run_in_process('--exp', 'synthetic.Tiny', '--mode', 'verify', '--cases', '-1') == 2
  assert '--cases -1 must be at least 0' in capsys.readouterr().err
  assert binary.run_in_process('--exp', 'synthetic.Tiny', '--mode', 'eval', '--cases', '2', '--job_log_dir', 'x') == 2
  assert '--cases is for --mode verify: leave it out' in capsys.readouterr().err


def test_an_exception_is_an_error_and_not_a_broken_claim():
  """Nothing was compared."""

  def fail(bench):
    raise TypeError('list indices must be integers')

  cases = [Case(claim='mesh', subject='data 2', decide=fail), skipped_case('eval', 'evaluation', 'there is one device')]
  decided = [(case, mode._decide(case, None)) for case in cases]
  assert [verdict.status for _, verdict in decided] == ['ERROR', 'skipped']
  summary = json.loads(mode.summary(decided))
  assert {name: summary[name] for name in ('claims', 'held', 'broken', 'errors', 'skipped')} == {
    'claims': 1,
    'held': 0,
    'broken': 0,
    'errors': 1,
    'skipped': 1,
  }
  assert summary['failures'] == [
    {'claim': 'mesh', 'case': 'data 2', 'error': 'TypeError: list indices must be integers'}
  ]
  assert 'mesh          ERROR' in mode.format_table(decided)


@pytest.mark.exhaustive
@pytest.mark.parametrize('name, more', [('FullSft', ()), ('LoraDpo', ('reference=base',))])
def test_every_claim_about_tuning_a_folder(name, more, capsys, tmp_path):
  """Rows keep their length, because a conversation is not split."""
  folder = write_llama(tmp_path / 'model')
  words = [('the cat', ' sat on the mat'), ('a dog', ' ate'), ('def f(x):', ' return x'), ('the hat', ' and')] * 6
  if 'Dpo' in name:
    records = [{'prompt': a, 'chosen': b, 'rejected': f' {a}'} for a, b in words]
  else:
    records = [{'messages': [{'role': 'user', 'content': a}, {'role': 'assistant', 'content': b}]} for a, b in words]
  (tmp_path / 'data.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
  settings = [
    f'model={folder}',
    f'data={tmp_path}/data.jsonl',
    'seq_len=96',
    'batch_size=8',
    'learning_rate=1e-2',
    *more,
  ]
  flags = [flag for setting in settings for flag in ('--set', setting)]
  code, summary, printed = verify(capsys, f'finetune.{name}', *flags)
  assert_holds(code, summary, printed)
