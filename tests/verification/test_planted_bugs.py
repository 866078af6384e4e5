"""--mode verify finds each planted bug, and the smallest mesh that shows it, and holds without the bug.

Each bug is verified with the claim that it breaks.
"""

import contextlib
import json
from typing import NamedTuple

import pytest

from spmd_tasks.verification import Bench
from spmd_tasks.verification.mode import CLAIMS
from tests.binary import run_binary
from tests.runtime.loss_curves import source_of
from tests.verification import planted_bugs


class Planted(NamedTuple):
  """A bug, the claim that it breaks on a number of devices, the smallest mesh with it, and a leaf that differs."""

  name: str
  claim: str
  num_devices: int
  smallest_mesh: dict[str, int]
  leaf: str = ''  # prefix of the leaf's name


BUGS = [
  Planted('MissingPsum', 'mesh', 2, {'mdl': 2}),
  Planted('LocalMean', 'mesh', 2, {'replica': 2}),
  Planted('RngOfDevice', 'mesh', 2, {'replica': 2}),
  Planted('WrongLabels', 'mesh', 4, {'replica': 2, 'data': 2}),
  Planted('PadInNorm', 'mesh', 4, {'mdl': 4}),
  Planted('MeanOfMeans', 'microbatches', 1, {}),
  Planted('LostTick', 'pipeline', 2, {'stage': 2}),
  Planted('PadInOptimizer', 'mesh', 2, {'mdl': 2}, leaf='learner/'),
  Planted('LooksAhead', 'decode', 1, {}, leaf='log-probabilities'),
  Planted('CoarseBfloat16', 'bfloat16', 1, {}),
  Planted('NarrowInt8', 'quantization', 1, {}),
]


def verify(bug: Planted, *flags: str):
  """Runs the binary. Returns its exit code and its last line."""
  process = run_binary(
    *('--exp', f'tests.verification.planted_bugs.{bug.name}', '--mode', 'verify', '--claims', bug.claim),
    *('--num_fake_devices', bug.num_devices, *flags),
  )
  assert process.stdout, process.stderr
  return process.returncode, json.loads(process.stdout.splitlines()[-1])


def assert_is_found(bug: Planted, failures: list[dict]):
  first = failures[0]
  assert first['claim'] == bug.claim
  assert first['step'] >= 1
  assert first['difference'] > first['allowed']
  assert bug.smallest_mesh in [failure['smallest_mesh'] for failure in failures]
  assert first['leaf'].startswith(bug.leaf)


# PadInOptimizer still runs for the claim 'mesh' by default.
EXHAUSTIVE = {'MissingPsum', 'LocalMean', 'RngOfDevice', 'WrongLabels', 'PadInNorm'}


@pytest.mark.parametrize(
  'bug',
  [pytest.param(bug, id=bug.name, marks=[pytest.mark.exhaustive] * (bug.name in EXHAUSTIVE)) for bug in BUGS[:-1]],
)
def test_a_planted_bug_is_found(bug):
  """Decides the cases of its claim up to the first that is broken."""
  source = source_of(getattr(planted_bugs, bug.name))
  with contextlib.closing(Bench(source, num_devices=bug.num_devices)) as bench:
    verdicts = (case.decide(bench) for case in CLAIMS[bug.claim].cases(bench))
    broken = next(verdict for verdict in verdicts if verdict.status == 'BROKEN')
  assert_is_found(bug, [{'claim': bug.claim} | broken.failure])


def test_the_binary_fails_if_a_claim_is_broken():
  """Uses the claim about quantization, which the other claims turn off."""
  bug = BUGS[-1]
  code, summary = verify(bug)
  assert code == 1
  assert summary['broken'] == len(summary['failures']) > 0
  assert_is_found(bug, summary['failures'])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize('bug', BUGS, ids=[bug.name for bug in BUGS])
def test_the_claim_holds_without_the_bug(bug):
  code, summary = verify(bug, '--set', 'bug=False')
  assert (code, summary['failures']) == (0, [])
  assert summary['held'] > 0
