"""When the watchdog fires, and what it reports."""

import textwrap
import threading
import time

import pytest

from spmd_tasks import exit_codes
from spmd_tasks.distributed import EmergencyExit
from spmd_tasks.distributed.watchdog import StepWatchdog
from tests import binary


class RecordingExit(EmergencyExit):
  """Records the calls instead of ending the process, so it is called more than once."""

  def __init__(self):
    super().__init__()
    self.calls = []
    self.called = threading.Event()

  def leave(self, code, reason, **kwargs):
    self.calls.append((code, reason))
    self.called.set()


@pytest.fixture
def emergency():
  return RecordingExit()


def test_the_first_step_has_its_own_limit(emergency):
  with StepWatchdog(timeout_s=0.1, first_step_timeout_s=60, emergency=emergency) as watchdog:
    time.sleep(0.3)
    watchdog.beat(100, 'input')
    time.sleep(0.3)
    watchdog.beat(100)
    time.sleep(0.3)
    assert not emergency.calls
    watchdog.beat(101)
    assert emergency.called.wait(10)


def test_a_long_operation_has_its_own_limit_and_the_old_one_returns(emergency):
  with StepWatchdog(timeout_s=0.3, first_step_timeout_s=60, emergency=emergency) as watchdog:
    watchdog.beat(0)
    watchdog.beat(1)
    with watchdog.allow('checkpoint', limit_s=60):
      time.sleep(0.6)
    assert not emergency.calls
    assert emergency.called.wait(10)
  assert "'step' of step 1 (limit 0.3 s)" in emergency.calls[0][1]


STUCK_SCRIPT = """
import ctypes, time
from spmd_tasks.distributed import watchdog
from spmd_tasks.distributed.emergency_exit import EmergencyExit
watchdog._NATIVE_MARGIN_S = 1.0
with watchdog.StepWatchdog(timeout_s=0.5, first_step_timeout_s=0.5, emergency=EmergencyExit()) as dog:
  dog.beat(0)
  dog.beat(1)
  def stuck_here():
    time.sleep(0.3)
    {call}
  stuck_here()
"""


@pytest.mark.parametrize(
  'call, returncode, message',
  [
    ('time.sleep(3600)', exit_codes.STUCK, " s in 'step' of step 1 (limit 0.5 s)"),
    # A native call that holds the interpreter lock, so that no Python thread runs.
    ('ctypes.PyDLL(None).sleep(3600)', exit_codes.FAILED, 'Timeout (0:00:01.500000)!'),
  ],
)
def test_a_stuck_process_really_ends_with_its_stacks(call, returncode, message):
  result = binary.run_python(textwrap.dedent(STUCK_SCRIPT).format(call=call))
  assert result.returncode == returncode, result.stderr
  assert message in result.stderr
  assert 'in stuck_here' in result.stderr
