"""The engine's thread: calls from other threads, a bounded queue, failures, its end."""

import pytest

from spmd_tasks.decoding import Request
from spmd_tasks.decoding.generated_sequence import GeneratedSequence
from spmd_tasks.decoding.scheduler import Scheduler
from spmd_tasks.errors import JobError
from spmd_tasks.serving.engine_thread import EngineEndedError, EngineThread
from tests.serving.fake_engine import EOS, TOKENIZER, FakeEngine, Launched
from tests.serving.served import wait_for


def sequence(text='abc', max_tokens=5):
  return GeneratedSequence(
    Request(ids=tuple(TOKENIZER.encode(text)), max_tokens=max_tokens, stop_ids=(EOS,)), TOKENIZER.decode
  )


@pytest.fixture
def make_thread():
  started = []

  def make(engine, **settings):
    posts = []
    scheduler = Scheduler(engine)
    thread = EngineThread(scheduler, warm_up=engine.warm_up, post=posts.append, **{'max_queued': 8} | settings)
    thread.start()
    started.append((engine, thread))
    wait_for(lambda: thread.is_ready or thread.error)
    return thread, posts

  yield make
  for engine, thread in started:
    if engine.gate is not None:
      engine.gate.set()
    thread.stop()


def test_warm_before_ready_and_one_post_per_step(make_thread):
  engine = FakeEngine()
  thread, posts = make_thread(engine)
  assert engine.is_warm
  sequences = [sequence(max_tokens=5), sequence(max_tokens=9)]
  thread.submit(sequences)
  wait_for(lambda: all(each.finish_reason for each in sequences))
  wait_for(lambda: thread.is_idle)
  assert len(posts) <= thread.scheduler.num_steps + 2
  assert ''.join(d.text for post in posts for d in post if d.sequence is sequences[0]) == 'abcab'


def test_one_failure_ends_what_ran_three_end_the_engine(make_thread, caplog):
  engine = FakeEngine(num_slots=1)
  thread, _ = make_thread(engine)
  engine.fail_next = RuntimeError('device lost')
  first, second = sequence(max_tokens=9), sequence()
  thread.submit([first, second])
  wait_for(lambda: second.finish_reason)
  assert (first.finish_reason, second.finish_reason) == ('error', 'length')
  assert thread.is_ready

  # Each time, and as devices fail: known one step late, after a prefill that was well.
  engine.step = lambda keep: Launched(None, RuntimeError('device lost'))
  sequences = [sequence() for _ in range(5)]
  thread.submit(sequences)
  wait_for(lambda: thread.error is not None and all(each.finish_reason for each in sequences))
  assert not thread.is_ready
  with pytest.raises(EngineEndedError):
    thread.submit([sequence()])


def test_an_error_that_no_step_survives_ends_the_engine_at_once_in_one_sentence(make_thread, caplog):
  engine = FakeEngine()
  thread, _ = make_thread(engine)
  engine.fail_next = JobError('process 1 of 2 is gone')
  one = sequence()
  thread.submit([one])
  wait_for(lambda: thread.error)
  assert str(thread.error) == 'process 1 of 2 is gone'
  wait_for(lambda: one.finish_reason == 'error')
  assert caplog.messages == ['the engine ended: process 1 of 2 is gone']
  assert 'Traceback' not in caplog.text


def test_a_model_that_cannot_warm_up_is_an_error_not_a_hang(make_thread):
  engine = FakeEngine()
  engine.warm_up = lambda: 1 / 0
  thread, _ = make_thread(engine)
  assert isinstance(thread.error, ZeroDivisionError)


def test_an_action_between_sequences_that_fails_ends_the_engine(make_thread):
  thread, _ = make_thread(FakeEngine())
  assert thread.between_sequences(lambda: 7).result(5) == 7
  with pytest.raises(ZeroDivisionError):
    thread.between_sequences(lambda: 1 / 0).result(5)
  wait_for(lambda: isinstance(thread.error, ZeroDivisionError) and not thread.is_alive)
  with pytest.raises(EngineEndedError):
    thread.between_sequences(lambda: 7)


def test_an_action_that_still_waits_at_the_end_is_told(make_thread):
  thread, posts = make_thread(FakeEngine(num_slots=1, max_len=100_000))
  thread.submit([sequence(max_tokens=50_000)])
  wait_for(lambda: posts)
  action = thread.between_sequences(lambda: 7)
  thread.stop()
  with pytest.raises(EngineEndedError):
    action.result(5)
