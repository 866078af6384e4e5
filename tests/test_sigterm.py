"""SIGTERM while a command has nothing to save: the code of preemption and one sentence, at once, at any moment."""

import json
import signal
import subprocess
import time

import pytest

from spmd_tasks import exit_codes
from tests import binary
from tests.programs.small_jobs import SMALL

SENTENCE = 'spmd-tasks: preempted by SIGTERM with nothing to save; the same command goes on from here.\n'
TRAIN = ('--exp', SMALL, '--mode', 'train', '--num_fake_devices', 8)


def handles_sigterm(process: subprocess.Popen) -> bool:
  """Whether the process has begun: Python itself, before its first line of ours, has no handler."""
  with open(f'/proc/{process.pid}/status') as status:
    caught = next(line for line in status if line.startswith('SigCgt'))
  return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def terminate(process: subprocess.Popen, delay_s: float = 0.0) -> binary.Finished:
  deadline = time.monotonic() + 60
  while not handles_sigterm(process):
    assert process.poll() is None
    assert time.monotonic() < deadline
    time.sleep(0.001)
  time.sleep(delay_s)
  process.send_signal(signal.SIGTERM)
  return binary.finish(process)


# Imports take some seconds, which a process of the fork server has behind it.
@pytest.mark.parametrize('delay_s, is_fresh', [(0.0, True), (0.4, True), (0.1, False), (2.0, False)])
def test_a_start_that_is_preempted_is_started_again(tmp_path, delay_s, is_fresh):
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
from spmd_tasks.sigterm import leave_on_sigterm

leave_on_sigterm()
jax.config.update('jax_platforms', 'cpu')  # libtpu would write to stderr that there is no TPU
ones, size = np.ones((300, 300), np.float32), (300, 300)
fold = jax.jit(lambda: jax.lax.reduce_window(jax.numpy.asarray(ones), 0.0, jax.lax.add, size, (1, 1), 'SAME'))
lowered = fold.lower()
print('compiling', flush=True)
lowered.compile()  # XLA folds the constant: more than a minute without a line of Python
"""


def test_a_long_compilation_does_not_delay_the_end():
  streams = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
  process = binary.start_process(['-c', COMPILATION], **streams)
  assert process.stdout.readline() == 'compiling\n'
  ended = terminate(process, delay_s=0.3)
  assert (ended.returncode, ended.stderr) == (exit_codes.PREEMPTED, SENTENCE)
  assert ended.seconds < 5


NATIVE_CODE = """
import hashlib
from spmd_tasks.sigterm import interrupt_on_sigint, leave_on_sigterm

leave_on_sigterm()
interrupt_on_sigint()
print('busy', flush=True)
hashlib.pbkdf2_hmac('sha256', b'word', b'salt', 10**9)  # minutes without a line of Python, as a compilation may take
"""


def test_native_code_delays_neither_the_answer_to_ctrl_c_nor_the_second_one():
  process = binary.start_process(['-c', NATIVE_CODE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  assert process.stdout.readline() == 'busy\n'
  time.sleep(0.1)
  process.send_signal(signal.SIGINT)
  assert process.stderr.readline() == '\n'
  assert process.stderr.readline().endswith('ending as soon as what runs now returns; again: leaving at once.\n')
  process.send_signal(signal.SIGINT)
  ended = binary.finish(process)
  assert ended.returncode == exit_codes.INTERRUPTED
  assert ended.stderr == '\nspmd-tasks: interrupted twice: left at once.\n'


HANDOVER = """
import os, signal, subprocess, sys, time
from spmd_tasks.distributed.preemption import PreemptionGuard
from spmd_tasks.sigterm import leave_on_sigterm

leave_on_sigterm()
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


def test_a_guard_takes_the_signal_over_and_children_end_as_others_do():
  ended = binary.run_python(HANDOVER, limit_s=60)
  assert (ended.returncode, ended.stdout) == (exit_codes.PREEMPTED, 'saved\n'), ended.stderr
  assert ended.stderr.endswith(SENTENCE)  # after what newer Pythons say to a fork beside a thread
