"""Reward functions in real processes: one that fails in any way costs its own result and nothing else."""

import os
from pathlib import Path
import sys
import time
from time import sleep  # noqa: F401  (which a name must not reach)

import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.tuning.reward_functions import RewardWorkers, load_environment

NAME, HERE = 'tests.tuning.test_reward_functions', [Path(__file__).resolve().parents[2]]


def length(prompt, completion, record):
  return len(completion) + record['bonus']


def fails(prompt, completion, record):
  if completion == 'raise':
    raise KeyError('answer')
  if completion == 'offline':
    raise ConnectionRefusedError('the judge')
  if completion == 'hang':
    time.sleep(60)
  if completion == 'exit':
    sys.exit(3)
  if completion == 'die':
    os._exit(3)
  return {'nan': float('nan'), 'text': 'good'}.get(completion, 1)


def test_functions_are_called_for_all_completions_and_a_bad_one_costs_its_own_result():
  calls = [('p', text, {'bonus': 0.5}) for text in ('ok', 'raise', 'hang', 'nan', 'fine', 'die', 'text', 'ok')]
  with RewardWorkers(
    [f'{NAME}:length', f'{NAME}:fails'], num_workers=2, timeout_s=1.5, code_directories=HERE
  ) as workers:
    workers.rewards([('p', 'offline', {'bonus': 0})])
    assert workers.broken is None  # a service may be there again
    workers.rewards([('p', 'exit', {'bonus': 0})])
    assert workers.broken == f'{NAME}:fails: SystemExit: 3'
    workers.rewards(calls[1:2])
    assert workers.broken == f"{NAME}:fails: KeyError: 'answer'"  # none of its calls gave a result so far
    started = time.monotonic()
    found = workers.rewards(calls)
    np.testing.assert_array_equal(found[:, 0], [len(text) + 0.5 for _, text, _ in calls])
    np.testing.assert_array_equal(found[:, 1], [1, np.nan, np.nan, np.nan, 1, np.nan, np.nan, 1])
    assert (workers.num_failed, workers.broken) == (8, None)
    assert time.monotonic() - started < 30  # not the 60 s of the one that hangs
    np.testing.assert_array_equal(workers.rewards(calls[:1]), [[2.5, 1]])  # those that were replaced work
    workers.stop()
    with pytest.raises(UserError, match='ended while it imported'):  # one that starts meanwhile ends as well
      workers._start()


@pytest.mark.parametrize(
  ('name', 'says'),
  [
    ('length', 'must name a function as module:function'),
    (f'{NAME}:nothing', 'cannot be imported'),
    ('no_such_module:length', 'is not below the directories of this command'),
    ('..rewards:length', 'write module:name'),
    ('os:system', 'names code of Python itself'),
    ('numpy:mean', 'is not below the directories of this command'),
    (f'{NAME}:sleep', 'is defined in time'),
    (f'{NAME}:NAME', 'is defined in no module'),
  ],
)
def test_a_name_of_no_function_is_refused(name, says):
  with pytest.raises(UserError, match=says):
    RewardWorkers([name], num_workers=1, timeout_s=1.0, code_directories=HERE)
  with pytest.raises(UserError):
    load_environment(name, HERE)
