"""A short campaign, and the judge itself: it must find what it is there to find."""

import importlib
import json
import shutil

import pytest

from tests.fault_campaign import judge
from tests.fault_campaign.campaign import Campaign
from tests.fault_campaign.catalogue import kind_of, kinds
from tests.fault_campaign.judge import BrokenPromiseError
from tests.fault_campaign.kills import PLACES

SEED = 12
CHEAP = ('kill/', 'signal/', 'damage/', 'directory/', 'disk/')
LEFT_OUT = ('signal/SIGTERM while a fresh',)
LONG = ('rewards/kill', 'store/kill')


def numbers_of(prefixes: tuple[str, ...], count: int) -> list[int]:
  """The first faults of these kinds."""
  names = ((number, kind_of(SEED, number).name) for number in range(10_000))
  numbers = (number for number, name in names if name.startswith(prefixes) and not name.startswith(LEFT_OUT))
  return [number for number, _ in zip(numbers, range(count))]


@pytest.fixture(scope='module')
def campaign(tmp_path_factory):
  with Campaign(tmp_path_factory.mktemp('campaign') / 'own', SEED, only_plain=True) as campaign:
    yield campaign


# By default tests/programs/test_kills.py kills jobs at any moment, test_store_jobs.py finds what a kill leaves in a
# bucket, and tests/tuning/test_rewards.py resumes a job in the middle of a rollout.
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
  'number',
  [
    *numbers_of(CHEAP, 1),
    *(number for kind in LONG for number in numbers_of((kind,), 1)),
  ],
)
def test_the_promise_is_held(campaign, number):
  line = campaign.run_fault(number)
  assert line['verdict'] in ('GOOD', 'SKIPPED'), json.dumps(line)


# --- the judge ---


@pytest.fixture(scope='module')
def reference(campaign):
  reference = campaign.reference('Plain')
  judge.compare_with_reference(reference.directory, reference)  # without a fault, it finds none
  return reference


@pytest.fixture
def copy(reference, tmp_path):
  return shutil.copytree(reference.directory, tmp_path / 'job')


def change_metric(directory):
  path = directory / 'metrics.jsonl'
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  lines[6]['loss'] += 1e-15 * lines[6]['loss'] + 1e-15
  path.write_text(''.join(json.dumps(line) + '\n' for line in lines))


def leave_out_step(directory):
  path = directory / 'metrics.jsonl'
  lines = path.read_text().splitlines(keepends=True)
  path.write_text(''.join(lines[:8] + lines[9:]))


def repeat_step_with_other_numbers(directory):
  path = directory / 'metrics.jsonl'
  line = json.loads(path.read_text().splitlines()[3])
  path.write_text(json.dumps(line | {'grad_norm': 0.5}) + '\n' + path.read_text())


def replace_last_checkpoint(directory):
  """By a whole one of the same step, of a job with another history."""
  checkpoints = directory / 'checkpoints'
  last = checkpoints / 'checkpoint_00000020'
  shutil.rmtree(last)
  shutil.copytree(checkpoints / 'checkpoint_00000015', last)
  path = last / 'manifest.json'
  body = json.loads(path.read_text())['body'] | {'step': 20}
  path.write_text(judge.sealed(body))


SILENT_FAULTS = {
  'a loss differs in its last bits': (change_metric, 'loss of step 7'),
  'a step was left out': (leave_out_step, r'metrics.jsonl lacks the steps \[9\]'),
  'a repeated step had other numbers': (repeat_step_with_other_numbers, 'grad_norm of step 4 is 0.5'),
  'an eval is missing': (lambda d: (d / 'eval/valid/metrics.jsonl').unlink(), r'eval.* lacks the steps \[10, 20\]'),
  'the last checkpoint is missing': (
    lambda d: shutil.rmtree(d / 'checkpoints/checkpoint_00000020'),
    'not that of step 20',
  ),
  'the last checkpoint has other weights': (replace_last_checkpoint, 'checkpoint 20 differ'),
}


@pytest.mark.parametrize('fault', SILENT_FAULTS)
def test_the_judge_finds(fault, reference, copy):
  make, message = SILENT_FAULTS[fault]
  make(copy)
  with pytest.raises(BrokenPromiseError, match=message):
    judge.compare_with_reference(copy, reference)


# --- the draw ---


def test_a_fault_is_a_function_of_seed_and_number_and_a_round_has_every_kind():
  total = sum(kind.share for kind in kinds())
  names = [kind_of(3, number).name for number in range(total, 2 * total)]
  assert names == [kind_of(3, number).name for number in range(total, 2 * total)]
  assert names != [kind_of(4, number).name for number in range(total, 2 * total)]
  assert all(names.count(kind.name) == kind.share for kind in kinds())


@pytest.mark.parametrize('place', PLACES)
def test_the_places_of_the_code_are_there(place):
  module, _, name = PLACES[place][0].partition(':')
  target = importlib.import_module(module)
  for part in name.split('.'):
    target = getattr(target, part)
  assert callable(target)
