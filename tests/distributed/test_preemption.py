"""PreemptionGuard in a single process; tests/multi_process has the rest."""

import contextlib
import os
import signal

import pytest

from spmd_tasks import exit_codes
from spmd_tasks.distributed.preemption import PreemptionGuard
from tests import binary


@pytest.mark.parametrize(
  'signum, code',
  [
    (signal.SIGTERM, exit_codes.PREEMPTED),
    (signal.SIGHUP, exit_codes.PREEMPTED),
    (signal.SIGINT, exit_codes.INTERRUPTED),
  ],
)
def test_a_signal_stops_the_job_at_the_next_call_and_every_later_one(signum, code):
  with contextlib.ExitStack() as stack:
    for ignored in (signal.SIGINT, signal.SIGHUP):  # pytest's workers ignore SIGINT, nohup ignores SIGHUP
      stack.callback(signal.signal, ignored, signal.signal(ignored, signal.default_int_handler))
    guard = stack.enter_context(PreemptionGuard())
    assert not guard.should_stop()
    os.kill(os.getpid(), signum)
    assert guard.should_stop()
    assert guard.should_stop()
    assert guard.exit_code == code


def test_a_second_ctrl_c_leaves_at_once_and_nohup_is_respected():
  ended = binary.run_python("""
import os, signal
from spmd_tasks.distributed.preemption import PreemptionGuard

signal.signal(signal.SIGHUP, signal.SIG_IGN)
with PreemptionGuard() as guard:
  os.kill(os.getpid(), signal.SIGHUP)
  assert not guard.should_stop()
  os.kill(os.getpid(), signal.SIGINT)
  print(guard.should_stop(), flush=True)
  os.kill(os.getpid(), signal.SIGINT)
  print('still here')
""")
  assert (ended.returncode, ended.stdout) == (exit_codes.INTERRUPTED, 'True\n'), ended.stderr
  assert 'Ctrl-C: stopping after this step' in ended.stderr
  assert 'interrupted twice: left at once.' in ended.stderr
