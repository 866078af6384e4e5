"""Reward functions in separate processes: a call that fails costs only its own result."""

import os
from pathlib import Path
import sys
import time
from time import sleep  # noqa: F401  (which must not be callable by a name in this module)

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
    time.sleep(600)
  if completion == 'exit':
    sys.exit(3)
  if completion == 'die':
    os._exit(3)
  return {'nan': float('nan'), 'text': 'good'}.get(completion, 1)


def test_functions_are_called_for_all_completions_and_a_failed_call_costs_only_its_result():
  calls = [('p', text, {'bonus': 0.5}) for text in ('ok', 'raise', 'hang', 'nan', 'fine', 'die', 'text', 'ok')]
  with RewardWorkers(
    [f'{NAME}:length', f'{NAME}:fails'], num_workers=2, timeout_s=1.5, code_directories=HERE
  ) as workers:
    workers.rewards([('p', 'offline', {'bonus': 0})])
    assert workers.broken is None  # a service may work again later
    workers.rewards([('p', 'exit', {'bonus': 0})])
    assert workers.broken == f'{NAME}:fails: SystemExit: 3'
    workers.rewards(calls[1:2])
    assert workers.broken == f"{NAME}:fails: KeyError: 'answer'"  # none of its calls has returned a result
    started = time.monotonic()
    rewards = workers.rewards(calls)
    np.testing.assert_array_equal(rewards[:, 0], [len(text) + 0.5 for _, text, _ in calls])
    np.testing.assert_array_equal(rewards[:, 1], [1, np.nan, np.nan, np.nan, 1, np.nan, np.nan, 1])
    assert (workers.num_failed, workers.broken) == (8, None)
    assert time.monotonic() - started < 300  # the call that hangs would take 600 s
    np.testing.assert_array_equal(workers.rewards(calls[:1]), [[2.5, 1]])  # by processes that were replaced, too
    workers.stop()
    with pytest.raises(UserError, match='failed to import them'):  # a process that starts later is killed, too
      workers._start()


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('length', 'must be a function, written module:function'),
    (f'{NAME}:nothing', 'cannot be imported'),
    ('no_such_module:length', 'is not below the directories of this command'),
    ('..rewards:length', 'write module:name'),
    ('os:system', 'names code of Python itself'),
    ('numpy:mean', 'is not below the directories of this command'),
    (f'{NAME}:sleep', 'is defined in time'),
    (f'{NAME}:NAME', 'is defined in no module'),
  ],
)
def test_names_that_are_not_own_functions_are_refused(name, message):
  with pytest.raises(UserError, match=message):
    RewardWorkers([name], num_workers=1, timeout_s=1.0, code_directories=HERE)
  with pytest.raises(UserError):
    load_environment(name, HERE)
