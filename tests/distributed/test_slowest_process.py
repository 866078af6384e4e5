"""The process that the others wait for is named, with what keeps it; even processes are not."""

import numpy as np
import pytest

from spmd_tasks.distributed.slowest_process import find_slowest

EVEN = (1.0, 0.0, 0.9)  # seconds in all, waited, blocked


@pytest.mark.parametrize(
  'slow, wait_share, cause',
  [
    ((1.0, 0.8, 0.0), 0.9, 'input'),
    ((1.0, 0.1, 0.0), 0.9, 'host'),
    ((1.0, 0.3, 0.2), 0.5, 'host'),
    # Its host takes longer, and is early enough all the same.
    ((1.0, 0.0, 0.6), 0.0, 'host'),
    (EVEN, 0.0, 'host'),
  ],
)
@pytest.mark.parametrize('num_even', [1, 7])
def test_the_slowest_process_and_its_cause(slow, wait_share, cause, num_even):
  found = find_slowest(np.array([EVEN] * num_even + [slow]))
  assert found.wait_share == pytest.approx(wait_share)
  if wait_share:
    assert (found.process_index, cause in found.cause) == (num_even, True)
    assert (found.own, found.median) == pytest.approx((1.0 - slow[2], 0.1))
