"""SIGTERM and Ctrl-C end a command that has nothing to save at once, with one sentence and an exit code."""

import json
import signal
import subprocess
import time

import pytest

from spmd_tasks import exit_codes, interrupt
from tests import binary
from tests.programs.small_jobs import SMALL

SENTENCE = 'spmd-tasks: preempted by SIGTERM with nothing to save; run the same command again.\n'
TRAIN = ('--exp', SMALL, '--mode', 'train', '--num_fake_devices', 8)


def handles_sigterm(process: subprocess.Popen) -> bool:
  """Returns whether our handlers are set; before our first line, Python itself has none."""
  with open(f'/proc/{process.pid}/status') as status:
    caught = next(line for line in status if line.startswith('SigCgt'))
  return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def wait_for_handler(process: subprocess.Popen) -> None:
  deadline = time.monotonic() + 60
  while not handles_sigterm(process):
    assert process.poll() is None
    assert time.monotonic() < deadline
    time.sleep(0.001)


def terminate(process: subprocess.Popen, delay_s: float = 0.0) -> binary.Finished:
  wait_for_handler(process)
  time.sleep(delay_s)
  process.send_signal(signal.SIGTERM)
  return binary.finish(process)


# Imports take some seconds, which a process of the fork server has behind it.
@pytest.mark.parametrize('delay_s, is_fresh', [(0.0, True), (0.4, True), (0.1, False), (2.0, False)])
def test_a_preempted_start_has_the_exit_code_for_a_restart(tmp_path, delay_s, is_fresh):
  job = tmp_path / 'job'
  process = binary.start_binary(*TRAIN, '--job_log_dir', job, fresh=is_fresh)
  ended = terminate(process, delay_s)
  assert ended.returncode == exit_codes.PREEMPTED, ended.stderr
  assert ended.stderr.endswith(SENTENCE) or 'Preempted: ' in ended.stderr  # it may have come to its first steps
  assert ended.seconds < 5
  for path in job.glob('*.json'):
    json.loads(path.read_text())


COMPILATION = """
import jax
import numpy as np
from spmd_tasks.sigterm import leave_on_signals

leave_on_signals()
jax.config.update('jax_platforms', 'cpu')  # libtpu would write to stderr that there is no TPU
ones, size = np.ones((300, 300), np.float32), (300, 300)
fold = jax.jit(lambda: jax.lax.reduce_window(jax.numpy.asarray(ones), 0.0, jax.lax.add, size, (1, 1), 'SAME'))
lowered = fold.lower()
print('compiling', flush=True)
lowered.compile()  # XLA folds the constant: more than a minute without a line of Python
"""


def test_a_long_compilation_does_not_delay_sigterm():
  streams = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
  process = binary.start_process(['-c', COMPILATION], **streams)
  assert process.stdout.readline() == 'compiling\n'
  ended = terminate(process, delay_s=0.3)
  assert (ended.returncode, ended.stderr) == (exit_codes.PREEMPTED, SENTENCE)
  assert ended.seconds < 5


NATIVE_CODE = """
import hashlib, sys
from spmd_tasks.sigterm import leave_on_signals

leave_on_signals()
if 'connected' in sys.argv:
  import jax
  jax.distributed.is_initialized = lambda: True
print('busy', flush=True)
hashlib.pbkdf2_hmac('sha256', b'word', b'salt', 10**9)  # minutes without a line of Python, as a compilation may take
"""
INTERRUPTED = interrupt.SENTENCE.decode()


def start_native_code(*flags):
  streams = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
  process = binary.start_process(['-c', NATIVE_CODE, *flags], **streams)
  assert process.stdout.readline() == 'busy\n'
  time.sleep(0.1)
  process.send_signal(signal.SIGINT)
  return process


def test_native_code_does_not_delay_ctrl_c():
  ended = binary.finish(start_native_code())
  assert (ended.returncode, ended.stderr) == (exit_codes.INTERRUPTED, INTERRUPTED)


def test_a_second_ctrl_c_ends_a_connected_process_at_once():
  process = start_native_code('connected')
  assert process.stderr.readline() == '\n'
  assert 'Ctrl-C: ending after the current native call' in process.stderr.readline()
  process.send_signal(signal.SIGINT)
  ended = binary.finish(process)
  assert ended.returncode == exit_codes.INTERRUPTED
  assert ended.stderr == '\nspmd-tasks: interrupted twice: left at once.\n'


def test_nothing_is_imported_before_ctrl_c_is_handled():
  """`import signal` alone would take a third of the time until the handler is set."""
  program = 'import sys; before = {*sys.modules}; import spmd_tasks.interrupt; print(*sorted({*sys.modules} - before))'
  assert binary.run_python(program, fresh=True).stdout == 'spmd_tasks spmd_tasks.interrupt\n'
  assert interrupt.CODE == exit_codes.INTERRUPTED


# `spmd-tasks` is a script that imports this function.
COMMANDS = {'module': ('-m', 'spmd_tasks'), 'script': ('-c', 'from spmd_tasks.__main__ import main; main()')}


DELAYS_S = (0.0, 0.05, 0.3, 1.0, 3.0)
AT_ANY_TIME = [('module', delay_s) for delay_s in DELAYS_S]
AT_ANY_TIME += [
  pytest.param('script', delay_s, marks=[pytest.mark.exhaustive] * (delay_s != 0.05)) for delay_s in DELAYS_S
]


@pytest.mark.parametrize('command, delay_s', AT_ANY_TIME)
def test_ctrl_c_prints_one_line_from_the_start(tmp_path, command, delay_s):
  process = binary.start_binary(*TRAIN, '--job_log_dir', tmp_path, command=COMMANDS[command], fresh=True)
  wait_for_handler(process)
  time.sleep(delay_s)
  process.send_signal(signal.SIGINT)
  ended = binary.finish(process)
  assert (ended.returncode, ended.stderr.splitlines()[-1:]) == (exit_codes.INTERRUPTED, [INTERRUPTED.strip()])
  assert 'Traceback' not in ended.stderr
  assert ended.seconds < 5


HANDOVER = """
import os, signal, subprocess, sys, time
from spmd_tasks.distributed.preemption import PreemptionGuard
from spmd_tasks.sigterm import leave_on_signals

leave_on_signals()
read_end, write_end = os.pipe()
pid = os.fork()
if pid == 0:
  os.write(write_end, b'ready')
  for _ in range(600):  # a signal just before a sleep is answered after it
    time.sleep(0.1)
  os._exit(0)  # never the lines below, in which a pid of 0 is the process group: the tests' server, and pytest itself
os.read(read_end, 5)  # Python drops a signal that comes before it has forked
os.kill(pid, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
child.terminate()
assert child.wait() == -signal.SIGTERM

with PreemptionGuard() as guard:
  os.kill(os.getpid(), signal.SIGTERM)
  assert guard.should_stop()
time.sleep(0.3)  # for whoever notices the guard's signal only now
print('saved', flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(60)
"""


def test_a_guard_replaces_the_handlers_and_forked_children_have_the_default():
  ended = binary.run_python(HANDOVER, limit_s=60)
  assert (ended.returncode, ended.stdout) == (exit_codes.PREEMPTED, 'saved\n'), ended.stderr
  assert ended.stderr.endswith(SENTENCE)  # after what newer Pythons say to a fork beside a thread
