"""EvalTarget: which values end a job, and what is refused."""

import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.programs.early_end import EvalTarget, StepReport

EVALS = {'valid': {'loss': 2.0, 'accuracy': 0.5, 'expert_load': [0.5, 0.5]}}


def reason(target, evals=EVALS):
  return target.reason(StepReport(step=8, metrics={}, evals=evals, eval_seconds=1.0))


@pytest.mark.parametrize(
  'metric, limits, expected',
  [
    ('loss', {'at_most': 2.0}, 'loss of valid is 2, at most 2'),
    ('loss', {'at_most': 1.9}, None),
    ('accuracy', {'at_least': 0.4}, 'accuracy of valid is 0.5, at least 0.4'),
    ('accuracy', {'at_least': 0.6}, None),
  ],
)
def test_a_job_ends_where_the_limit_is_reached(metric, limits, expected):
  assert reason(EvalTarget(eval_set='valid', metric=metric, **limits)) == expected


def test_a_loss_that_is_not_a_number_reaches_nothing():
  evals = {'valid': {'loss': float('nan')}}
  assert reason(EvalTarget(eval_set='valid', at_most=2.0), evals) is None
  assert reason(EvalTarget(eval_set='valid', at_least=2.0), evals) is None


@pytest.mark.parametrize(
  'settings, words',
  [
    ({'eval_set': 'valid'}, 'give one of them'),
    ({'eval_set': 'test', 'at_most': 1.0}, r"none of the eval sets \['valid'\]"),
    ({'eval_set': 'valid', 'metric': 'bleu', 'at_least': 1.0}, r"take one of \['accuracy', 'loss'\]"),
  ],
)
def test_mistakes_are_named(settings, words):
  with pytest.raises(UserError, match=words):
    reason(EvalTarget(**settings))
