"""PreemptionGuard in a single process; tests/multi_process has the rest."""

import os
import signal
import threading

import pytest

from spmd_tasks.distributed import PreemptionGuard


def test_sigterm_is_answered_at_the_next_question_and_stays():
  with PreemptionGuard() as guard:
    assert not guard.should_stop()
    os.kill(os.getpid(), signal.SIGTERM)
    assert guard.should_stop()
    assert guard.should_stop()


def test_a_second_sigterm_does_not_break_the_save():
  with PreemptionGuard() as guard:
    os.kill(os.getpid(), signal.SIGTERM)
    assert guard.should_stop()
    os.kill(os.getpid(), signal.SIGTERM)
    assert guard.should_stop()


def test_the_previous_handler_returns_also_after_an_error():
  received = []
  previous = signal.signal(signal.SIGTERM, lambda signum, frame: received.append(signum))
  try:
    with pytest.raises(KeyError), PreemptionGuard():
      raise KeyError
    os.kill(os.getpid(), signal.SIGTERM)
  finally:
    signal.signal(signal.SIGTERM, previous)
  assert received == [signal.SIGTERM]


def test_elsewhere_than_on_the_main_thread_it_says_what_to_do():
  errors = []

  def enter():
    try:
      PreemptionGuard().__enter__()
    except ValueError as error:
      errors.append(str(error))

  thread = threading.Thread(target=enter)
  thread.start()
  thread.join()
  assert len(errors) == 1
  assert 'main thread only: enter it there' in errors[0]
