"""--mode verify finds each planted bug, on the smallest mesh that shows it, and holds for its sound twin.

Each bug is verified by the claim that it breaks; the other claims of these experiments are compared elsewhere.
"""

import json
from typing import NamedTuple

import pytest

from tests.binary import run_binary


class Planted(NamedTuple):
  """A bug: the claim that it breaks on that many devices, the smallest mesh that shows it, and a leaf that differs."""

  name: str
  claim: str
  num_devices: int
  smallest_mesh: dict[str, int]
  leaf: str = ''  # what follows from weights and batch


BUGS = [
  Planted('MissingPsum', 'mesh', 2, {'mdl': 2}),
  Planted('LocalMean', 'mesh', 2, {'data': 2}),
  Planted('RngOfDevice', 'mesh', 2, {'data': 2}),
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
  finished = run_binary(
    *('--exp', f'tests.verification.planted_bugs.{bug.name}', '--mode', 'verify', '--claims', bug.claim),
    *('--num_fake_devices', bug.num_devices, *flags),
  )
  assert finished.stdout, finished.stderr
  return finished.returncode, json.loads(finished.stdout.splitlines()[-1])


# Of those that the claim 'mesh' finds, PadInOptimizer remains.
EXHAUSTIVE = {'MissingPsum', 'LocalMean', 'RngOfDevice', 'WrongLabels', 'PadInNorm'}


@pytest.mark.parametrize(
  'bug', [pytest.param(bug, id=bug.name, marks=[pytest.mark.exhaustive] * (bug.name in EXHAUSTIVE)) for bug in BUGS]
)
def test_a_planted_bug_is_found(bug):
  code, summary = verify(bug)
  assert code == 1
  assert summary['broken'] == len(summary['failures']) > 0
  first = summary['failures'][0]
  assert first['claim'] == bug.claim
  assert first['step'] >= 1
  assert first['difference'] > first['allowed']
  assert bug.smallest_mesh in [each['smallest_mesh'] for each in summary['failures']]
  assert first['leaf'].startswith(bug.leaf)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize('bug', BUGS, ids=[bug.name for bug in BUGS])
def test_its_sound_twin_holds(bug):
  code, summary = verify(bug, '--set', 'bug=False')
  assert (code, summary['failures']) == (0, [])
  assert summary['held'] > 0
