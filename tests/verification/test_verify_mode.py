"""--mode verify through the binary's `run`: every claim holds for the registered experiments and for a user's own.

tests/verification shows that it finds what is wrong.
"""

import json

import pytest

from spmd_tasks import exit_codes
from spmd_tasks.config.listing import list_experiments
from spmd_tasks.verification import mode
from spmd_tasks.verification._cases import Case, skipped
from spmd_tasks.verification.mode import CLAIMS
from tests import binary
from tests.model_folders import write_llama

TINY = [name for name, _ in list_experiments() if 'Tiny' in name or 'Uneven' in name]


def verify(capsys, name: str, *flags: str) -> tuple[int, dict, str]:
  """The exit code, the last line, and all that was printed."""
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
  assert 'nothing in it can be made smaller' in printed
  for claim in CLAIMS:
    assert f'\n{claim} ' in printed, claim
  assert summary['skipped'] >= 1  # a plain model has no layers to pipeline


# Of the user's own experiment above, all claims but that of pipelines are verified.
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize('name', TINY)
def test_every_claim_about_every_tiny_experiment(capsys, name):
  assert_holds(*verify(capsys, name, '--cases', '3'))


def test_wrong_flags_are_one_sentence(capsys):
  assert binary.run_in_process('--exp', 'synthetic.Tiny', '--mode', 'verify', '--claims', 'mesh,psum') == 2
  assert "--claims names 'psum', which is no claim: choose from step, mesh, pipeline" in capsys.readouterr().err
  assert binary.run_in_process('--exp', 'synthetic.Tiny', '--mode', 'verify', '--cases', '-1') == 2
  assert '--cases -1 must be 0 or more' in capsys.readouterr().err
  assert binary.run_in_process('--exp', 'synthetic.Tiny', '--mode', 'eval', '--cases', '2', '--job_log_dir', 'x') == 2
  assert '--cases is for --mode verify: leave it out' in capsys.readouterr().err


def test_an_exception_is_an_error_and_not_a_broken_claim():
  """Of the experiment or of this package: nothing was compared."""

  def fail(bench):
    raise TypeError('list indices must be integers')

  cases = [Case(claim='mesh', subject='data 2', decide=fail), skipped('eval', 'evaluation', 'there is one device')]
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
  """Rows stay as long as they were, for a conversation is never divided."""
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
  code, summary, printed = verify(capsys, f'finetune.{name}', *(flag for each in settings for flag in ('--set', each)))
  assert_holds(code, summary, printed)
