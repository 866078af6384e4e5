"""A leading and a following engine over a real socket: the same operations in the same order, and every way to end."""

from concurrent.futures import Future, ThreadPoolExecutor
import contextlib
import queue
import threading

import pytest

from spmd_tasks import exit_codes
from spmd_tasks.decoding import Request
from spmd_tasks.decoding.constraints import Grammars
from spmd_tasks.decoding.generated_sequence import GeneratedSequence
from spmd_tasks.decoding.scheduler import Scheduler
from spmd_tasks.errors import JobError
from spmd_tasks.serving.links import admit, join, listen
from spmd_tasks.serving.multi_process import Followers, LeadingEngine, PeerFailedError, follow
from tests.serving.fake_engine import TOKENIZER, FakeEngine


def restore(step):
  return step, step


def links(num_others=1):
  """(process 0's links, the others')"""
  others = range(1, num_others + 1)
  with listen('127.0.0.1') as listener, ThreadPoolExecutor() as pool:
    joined = [pool.submit(join, listener.getsockname(), b'secret', index) for index in others]
    return admit(listener, b'secret', num_others), [link.result() for link in joined]


def follow_in_background(engine, link, left) -> Future:
  """Follows in a thread; where the process would leave, `left` receives the exit code and the reason."""
  result = Future()

  def leave(code, reason):
    left.put((code, reason))
    link.close()

  def run():
    try:
      result.set_result(follow(engine, link, restore=restore, leave=leave))
    except Exception as error:
      result.set_exception(error)

  threading.Thread(target=run, daemon=True).start()
  return result


class Pair:
  """An engine that leads and one that follows; `left` receives the reasons why the processes would leave."""

  def __init__(self, **sizes):
    self.engines = FakeEngine(**sizes), FakeEngine(**sizes)
    self.left = queue.SimpleQueue()
    self.near, self.far = links()
    self.followers = Followers(self.near, leave=self.left.put)
    self.engine = LeadingEngine(self.engines[0], self.followers, restore)
    self.followed = follow_in_background(self.engines[1], self.far[0], self.left)

  def close(self):
    self.followers.dismiss(0, '')
    for link in (*self.near, *self.far):
      link.close()


@pytest.fixture
def pair(request):
  with contextlib.closing(Pair(**getattr(request, 'param', {}))) as pair:
    yield pair


def sequences(count):
  ids = TOKENIZER.encode('the same beginning')
  requests = [Request(ids=(*ids, 65 + i), max_tokens=3 + i, stop_ids=(1,)) for i in range(count)]
  return [GeneratedSequence(request, TOKENIZER.decode) for request in requests]


def run(scheduler):
  while scheduler.has_work:
    scheduler.advance()


def settled(pair):
  """Waits until the follower has run all operations."""
  pair.followers.end(0)
  assert pair.followed.result(10) == 0


def test_token_masks_are_sent_to_followers(pair):
  grammars = Grammars(TOKENIZER, vocab_size=TOKENIZER.vocab_size, end_ids=())
  scheduler = Scheduler(pair.engine)
  free, bound = sequences(2)
  bound.matcher = grammars.compile('regex', '[x-z]+')
  scheduler.submit([free, bound])
  run(scheduler)
  settled(pair)
  assert set(bound.text) <= set('xyz')
  assert len(bound.text) == bound.request.max_tokens
  leading, followed = pair.engines
  assert (followed.tokens, followed.log) == (leading.tokens, leading.log)


@pytest.mark.parametrize('culprit', [0, 1])
def test_a_step_that_fails_ends_the_job(pair, culprit):
  pair.engines[culprit].fail_next = RuntimeError('out of memory')
  scheduler = Scheduler(pair.engine)
  scheduler.submit(sequences(1))
  if culprit == 0:
    with pytest.raises(RuntimeError, match='out of memory'):
      run(scheduler)
    with pytest.raises(JobError, match='cannot recover from that'):
      scheduler.recover()
    return
  with contextlib.suppress(PeerFailedError):
    run(scheduler)
  with pytest.raises(RuntimeError, match='out of memory'):
    pair.followed.result(10)
  assert pair.followers.stop.wait(10)
  with pytest.raises(queue.Empty):
    pair.left.get(timeout=0.1)  # the process ends by its own error, not as one that has lost process 0
  with pytest.raises(PeerFailedError, match='process 1 of 2 failed: RuntimeError: out of memory'):
    pair.engine.reset()


@pytest.mark.parametrize('data', [b'GET / HTTP/1.1\r\n\r\n' * 9, b'\x00' * 8 + b'x' * 32], ids=['http', 'forged'])
def test_foreign_bytes_on_a_link_end_the_job(pair, data):
  """Bytes that somebody has put into the connection; process 1 leaves as it does when process 0 is gone."""
  pair.far[0]._sock.sendall(data)
  assert pair.followers.stop.wait(5)
  with pytest.raises(PeerFailedError, match=r'process 1 of 2 (has ended|did not send message 0 as it came)'):
    pair.engine.reset()
  code, reason = pair.left.get(timeout=5)
  assert code == exit_codes.PEER_FAILED
  assert 'process 0 is gone' in reason
