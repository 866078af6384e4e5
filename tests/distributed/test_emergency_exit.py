"""EmergencyExit ends its process, so each test runs it in a subprocess; jax.distributed is faked."""

import faulthandler
import sys
import textwrap

import jax
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.distributed import EmergencyExit
from tests import binary

PREAMBLE = """
import faulthandler, logging, multiprocessing, sys, time, threading
import jax
from spmd_tasks import exit_codes
from spmd_tasks.distributed import emergency_exit
from spmd_tasks.distributed.emergency_exit import EmergencyExit
emergency = EmergencyExit()
"""
MULTI_PROCESS = 'jax.distributed.is_initialized = lambda: True\n'


def run(code: str) -> binary.Finished:
  return binary.run_python(PREAMBLE + textwrap.dedent(code))


def test_a_single_process_just_raises():
  result = run("""
    import atexit
    atexit.register(print, 'exit handlers ran')
    with emergency.on_failure():
      raise KeyError('lost')
    """)
  assert result.returncode == 1
  assert "KeyError: 'lost'" in result.stderr
  assert 'exit handlers ran' in result.stdout
  assert '***' not in result.stderr


def test_one_of_several_processes_reports_flushes_and_leaves_without_exit_handlers():
  result = run(
    MULTI_PROCESS
    + textwrap.dedent("""
    import atexit
    atexit.register(print, 'exit handlers ran')
    class FullDisk(logging.Handler):
      def flush(self):
        raise OSError('disk full')
    logging.getLogger().addHandler(FullDisk())
    sys.stdout.write('buffered')
    with emergency.on_failure():
      raise KeyError('lost')
    """)
  )
  assert result.returncode == exit_codes.FAILED
  assert "KeyError: 'lost'" in result.stderr
  assert 'while flushing: Traceback' in result.stderr
  assert result.stdout == 'buffered'


@pytest.mark.parametrize(
  'code, expected',
  [(0, None), (None, None), (exit_codes.PREEMPTED, None), (exit_codes.USAGE, exit_codes.USAGE), ('no such thing', 1)],
)
def test_sys_exit_passes_only_if_all_processes_exit(monkeypatch, code, expected):
  calls = []
  emergency = EmergencyExit()
  monkeypatch.setattr(emergency, 'leave', lambda code, reason: calls.append((code, reason)))
  monkeypatch.setattr(faulthandler, 'enable', lambda **kwargs: None)
  monkeypatch.setattr(jax.distributed, 'is_initialized', lambda: True)
  with pytest.raises(SystemExit), emergency.on_failure():
    sys.exit(code)
  assert calls == ([] if expected is None else [(expected, f'exit with {code!r}')])


def test_neither_a_hanging_flush_nor_a_second_caller_delays_the_exit():
  result = run("""
    emergency_exit._FLUSH_LIMIT_S = 0.3
    class Hanging(logging.Handler):
      def flush(self):
        time.sleep(3600)
    logging.getLogger().addHandler(Hanging())
    threading.Thread(target=emergency.leave, args=(exit_codes.STUCK, 'first')).start()
    time.sleep(0.1)
    emergency.leave(exit_codes.FAILED, 'second')
    """)
  assert result.returncode == exit_codes.STUCK
  assert 'first' in result.stderr
  assert 'second' not in result.stderr


def test_child_processes_are_killed():
  # They hold stdout open, so `run` returns only once they have ended.
  result = run("""
    for _ in range(2):
      multiprocessing.get_context('spawn').Process(target=time.sleep, args=(3600,), daemon=True).start()
    emergency.leave(exit_codes.FAILED, 'trouble')
    """)
  assert result.returncode == exit_codes.FAILED


def test_an_abort_shows_the_stacks():
  result = run("""
    import os
    with emergency.on_failure():
      os.abort()
    """)
  assert result.returncode == -6
  assert 'Fatal Python error: Aborted' in result.stderr


# Process 1 of 2, and a fake coordination service with process 0's notice.
SERVICE = """
import dataclasses, json, types
from spmd_tasks.checkpoints.manifest import CheckpointSaveError
from spmd_tasks.distributed import shutdown
from spmd_tasks.distributed.shutdown import ExitNotice
from spmd_tasks.distributed.rank_records import RankRecords
from spmd_tasks.errors import UserError
values = {}
client = types.SimpleNamespace(key_value_set=values.__setitem__, key_value_dir_get=lambda prefix: list(values.items()))
emergency_exit.coordination = lambda: types.SimpleNamespace(client=client, process_id=1, num_processes=2)
def interrupted():
  notice = ExitNotice(process_index=0, host='a', pid=1, step=3, code=130, reason='interrupted', is_cause=True)
  values['spmd_tasks/exits/0'] = json.dumps(dataclasses.asdict(notice))
"""
GLOO = "ValueError('UNKNOWN: Gloo AllGather failed: Connection reset by peer')"


@pytest.mark.parametrize(
  'error, has_notice, code',
  [
    (f'CheckpointSaveError("step 4 could not be saved") from {GLOO}', True, exit_codes.PEER_FAILED),
    (f'CheckpointSaveError("step 4 could not be saved") from {GLOO}', False, exit_codes.FAILED),
    ('UserError("a setting of all processes")', True, exit_codes.USAGE),
  ],
)
def test_a_connection_lost_to_a_process_with_a_notice_is_not_a_failure_here(tmp_path, error, has_notice, code):
  """After Ctrl-C in one process during a save, that process ends with 130 and the others with 44."""
  result = run(
    MULTI_PROCESS
    + SERVICE
    + textwrap.dedent(f"""
    shutdown._PERIOD_S = 3600
    emergency.watch_peers()
    time.sleep(0.2)
    emergency.attach(RankRecords({str(tmp_path)!r}, process_index=1, num_processes=2).describe)
    if {has_notice}:
      interrupted()
    with emergency.on_failure():
      raise {error}
    """)
  )
  assert result.returncode == code, result.stderr
  assert ('process 0: interrupted' in result.stderr) == has_notice
