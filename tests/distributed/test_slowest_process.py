"""The process that the others wait for is named, with what keeps it; even processes are not."""

import pytest

from spmd_tasks.distributed.slowest_process import StepTimes, find_slowest

EVEN = StepTimes(total=1.0, waited=0.0, blocked=0.9)


@pytest.mark.parametrize(
  'slow, wait_share, cause',
  [
    (StepTimes(total=1.0, waited=0.8, blocked=0.0), 0.9, 'input'),
    (StepTimes(total=1.0, waited=0.1, blocked=0.0), 0.9, 'host'),
    (StepTimes(total=1.0, waited=0.3, blocked=0.2), 0.5, 'host'),
    # Its host takes longer, and is early enough all the same.
    (StepTimes(total=1.0, waited=0.0, blocked=0.6), 0.0, 'host'),
    (EVEN, 0.0, 'host'),
  ],
)
@pytest.mark.parametrize('num_even', [1, 2, 7])
def test_the_slowest_process_and_its_cause(slow, wait_share, cause, num_even):
  found = find_slowest([EVEN] * num_even + [slow])
  assert found.wait_share == pytest.approx(wait_share)
  if wait_share:
    assert (found.process_index, found.cause) == (num_even, cause)
    assert (found.own, found.median) == pytest.approx((1.0 - slow.blocked, 0.1))
