"""A process that the server forks is to its parent what a fresh one is: arguments, environment, streams and its end."""

import os
import signal
import subprocess

import pytest

from tests import binary, forked

pytestmark = pytest.mark.skipif(not forked.is_running(), reason='no server: every process is fresh')


def run(*argv, **popen):
  streams = {'stdin': subprocess.DEVNULL, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
  return binary.finish(binary.start_process(argv, **streams | popen), 60)


def test_arguments_directory_and_environment(tmp_path):
  (tmp_path / 'own.py').write_text('import os, sys; print(__name__, sys.argv[1:], os.getcwd(), os.environ.get("X"))')
  ended = run('-m', 'own', 'a', 'b c', cwd=tmp_path, env={'X': 'Y'})
  assert (ended.returncode, ended.stdout) == (0, f"__main__ ['a', 'b c'] {tmp_path} Y\n")


def test_variables_of_jax_take_effect():
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '3', 'JAX_DEBUG_NANS': 'true'}
  show = 'import jax; print(jax.device_count(), jax.config.jax_debug_nans)'
  assert run('-c', show, env=env).stdout == '3 True\n'


@pytest.mark.parametrize(
  'code, returncode, stdout, stderr',
  [
    ('import sys; sys.exit(7)', 7, '', ''),
    ('import sys; sys.exit("words")', 1, '', 'words\n'),
    ('1 / 0', 1, '', 'ZeroDivisionError: division by zero\n'),
    ('import os; os.kill(os.getpid(), 9)', -9, '', ''),
    ('raise KeyboardInterrupt', -2, '', 'KeyboardInterrupt\n'),
    ('import atexit; atexit.register(print, "at exit"); print("end")', 0, 'end\nat exit\n', ''),
  ],
)
def test_its_end(code, returncode, stdout, stderr):
  ended = run('-c', code)
  assert (ended.returncode, ended.stdout) == (returncode, stdout)
  assert ended.stderr.endswith(stderr)


def test_signals_reach_it():
  waits = 'import time; print("ready", flush=True); time.sleep(100)'
  process = binary.start_process(['-c', waits], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
  assert process.stdout.readline() == 'ready\n'
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=60) == -signal.SIGTERM
  process.stdout.close()
