"""The Prefetcher returns each batch with its own state, raises the input's errors, and never waits forever."""

import json
import threading
import time
import traceback

import numpy as np
import pytest

from spmd_tasks.inputs import Prefetcher, SyntheticText

SETTINGS = SyntheticText(batch_size=2, seq_len=4, num_batches=7)


class Scripted:
  """An input iterator that counts, and calls `at[n]()` before batch n."""

  def __init__(self, at=None):
    self.at = at or {}
    self.count = 0
    self.closed = 0

  def __iter__(self):
    return self

  def __next__(self):
    if self.count in self.at:
      self.at[self.count]()
    self.count += 1
    return {'ids': np.full((1, 1), self.count - 1)}

  def get_state(self):
    return {'next': self.count}

  def set_state(self, state):
    self.count = state['next']

  def close(self):
    self.closed += 1


def raise_here():
  raise OSError('disk on fire')


@pytest.mark.parametrize('consumed', [1, 6, 7])
def test_the_state_belongs_to_the_consumed_batch_however_far_it_has_read_ahead(consumed):
  expected = list(SETTINGS.make_iterator())
  with Prefetcher(SETTINGS.make_iterator(), depth=5) as prefetcher:
    for _ in range(consumed):
      _, state = next(prefetcher)
    time.sleep(0.05)  # let it read ahead
  resumed = SETTINGS.make_iterator()
  resumed.set_state(json.loads(json.dumps(state)))
  with Prefetcher(resumed) as prefetcher:
    rest = [batch for batch, _ in prefetcher]
  assert len(rest) == 7 - consumed
  for batch, other in zip(rest, expected[consumed:]):
    np.testing.assert_array_equal(batch['ids'], other['ids'])


def test_an_error_comes_after_the_batches_before_it_with_its_traceback():
  with Prefetcher(Scripted({2: raise_here}), depth=5) as prefetcher:
    assert [next(prefetcher)[1]['next'] for _ in range(2)] == [1, 2]
    for _ in range(2):  # and again on every further attempt
      with pytest.raises(OSError, match='disk on fire') as caught:
        next(prefetcher)
  assert 'raise_here' in ''.join(traceback.format_tb(caught.value.__traceback__))


def test_a_hung_input_raises_an_error_that_shows_where(monkeypatch):
  monkeypatch.setattr('spmd_tasks.inputs.prefetch._JOIN_TIMEOUT_S', 0.2)
  release = threading.Event()

  def hang_on_purpose():
    release.wait(60)

  source = Scripted({1: hang_on_purpose})
  prefetcher = Prefetcher(source, timeout_s=0.3)
  next(prefetcher)
  start = time.monotonic()
  with pytest.raises(RuntimeError, match=r'no batch for 0.3 s(.|\n)*hang_on_purpose'):
    next(prefetcher)
  prefetcher.close()
  prefetcher.close()
  assert time.monotonic() - start < 5
  assert source.closed == 1
  release.set()
