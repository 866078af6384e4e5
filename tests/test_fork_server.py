"""A process that the server forks is to its parent what a fresh one is: arguments, environment, streams and its end."""

import os
from pathlib import Path
import signal
import subprocess
import sys

import pytest

from tests import binary, forked

pytestmark = pytest.mark.skipif(not forked.is_running(), reason='no server: every process is fresh')


def run(*argv, limit_s=60, **popen):
  streams = {'stdin': subprocess.DEVNULL, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
  return binary.finish(binary.start_process(argv, **streams | popen), limit_s)


def test_arguments_directory_streams_and_environment(tmp_path):
  (tmp_path / 'own.py').write_text('import sys; print(__name__, sys.argv[1:], __file__)')
  show = 'import own, os, sys; print(sys.argv, os.getcwd(), sys.stdin.read(), os.environ.get("HOME")); '
  show += 'print(2, file=sys.stderr)'
  process = binary.start_process(
    ['-c', show, 'a', 'b c'], cwd=tmp_path, env={'X': 'Y', 'PYTHONPATH': str(tmp_path)}, text=True,
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip
  assert isinstance(process, forked.ForkedPopen)
  stdout, stderr = process.communicate('input', timeout=60)
  own = f"own ['a', 'b c'] {tmp_path}/own.py\n"
  assert (process.returncode, stdout, stderr) == (0, f"{own}['-c', 'a', 'b c'] {tmp_path} input None\n", '2\n')
  assert run('-m', 'own', 'x', cwd=tmp_path).stdout == f"__main__ ['x'] {tmp_path}/own.py\n"
  assert run(tmp_path / 'own.py', 'x').stdout == f"__main__ ['x'] {tmp_path}/own.py\n"


def test_variables_of_jax_take_effect():
  show = 'import jax; print(jax.device_count(), jax.config.jax_compilation_cache_dir, jax.config.jax_debug_nans, '
  show += 'jax.config.jax_persistent_cache_min_compile_time_secs, jax.numpy.ones(2).sum())'
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '3', 'JAX_COMPILATION_CACHE_DIR': '/x/y'}
  env |= {'JAX_DEBUG_NANS': 'true', 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '2.5'}
  assert run('-c', show, env=env).stdout == '3 /x/y True 2.5 2.0\n'
  dump = 'import jax; print(jax.jit(lambda x: x + 1).lower(1.0).compile().as_text())'
  for flags, is_in in (('', False), ('--xla_dump_to=/dev/null --xla_this_is_no_flag', True)):
    ended = run('-c', dump, env=env | {'XLA_FLAGS': flags, 'JAX_NUM_CPU_DEVICES': '1'})
    assert ('Unknown flag' in ended.stderr) == is_in, ended.stderr


@pytest.mark.parametrize(
  'code, returncode, stdout, stderr',
  [
    ('pass', 0, '', ''),
    ('import sys; sys.exit(7)', 7, '', ''),
    ('import sys; sys.exit("words")', 1, '', 'words\n'),
    ('1 / 0', 1, '', 'ZeroDivisionError: division by zero\n'),
    ('import os; os._exit(9)', 9, '', ''),
    ('import os; os.kill(os.getpid(), 9)', -9, '', ''),
    ('import os; os.abort()', -6, '', ''),
    ('raise KeyboardInterrupt', -2, '', 'KeyboardInterrupt\n'),
    ('import atexit; atexit.register(print, "at exit"); print("end")', 0, 'end\nat exit\n', ''),
    ('import threading; threading.Timer(0.1, print, ["thread"]).start(); print("end")', 0, 'end\nthread\n', ''),
    ('import subprocess, sys; subprocess.run([sys.executable, "-Sc", "print(1)"], check=True)', 0, '1\n', ''),
  ],
)
def test_its_end(code, returncode, stdout, stderr):
  ended = run('-c', code)
  assert (ended.returncode, ended.stdout) == (returncode, stdout)
  assert ended.stderr.endswith(stderr)
  assert bool(ended.stderr) == bool(stderr)


@pytest.mark.parametrize('signum', [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_signals(signum):
  waits = 'import time; print("ready", flush=True); time.sleep(100)'
  process = binary.start_process(['-c', waits], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
  assert process.stdout.readline() == 'ready\n'
  assert process.poll() is None
  with pytest.raises(subprocess.TimeoutExpired):
    process.wait(timeout=0.05)
  process.send_signal(signal.SIGSTOP)
  binary.wait_until_stopped(process)
  process.send_signal(signal.SIGCONT)
  process.send_signal(signum)
  assert process.wait(timeout=60) == -signum
  assert process.poll() == -signum
  process.stdout.close()


def test_a_session_of_its_own():
  show = 'import os, time; print(os.getsid(0), os.getpid(), flush=True); time.sleep(100)'
  process = binary.start_process(['-c', show], stdout=subprocess.PIPE, text=True, start_new_session=True)
  os.killpg(process.pid, 0)
  assert process.stdout.readline() == f'{process.pid} {process.pid}\n'
  os.killpg(process.pid, signal.SIGKILL)
  assert process.wait(timeout=60) == -signal.SIGKILL
  process.stdout.close()


def test_programs_for_a_shell(tmp_path):
  forked.make_programs(tmp_path / 'bin')
  script = """
    echo 'print("own")' > own.py
    python own.py
    echo text | python -c 'import os, sys; print(sys.stdin.read(), sys.argv); sys.exit(3)' a || echo "exit $?"
    spmd-tasks --list | grep -c '^lm.StdlibTiny'
    python -c 'import time; time.sleep(100)' &
    kill -9 $!; wait $! 2>/dev/null || echo "exit $?"
    timeout 0.5 python -c 'import time; time.sleep(100)' || echo "exit $?"
  """
  env = os.environ | {'PATH': f'{tmp_path}/bin:{os.environ["PATH"]}', 'PYTHONPATH': str(binary.REPOSITORY)}
  ended = subprocess.run(['bash', '-c', script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
  assert ended.stdout.splitlines() == ['own', 'text', " ['-c', 'a']", 'exit 3', '1', 'exit 137', 'exit 124'], (
    ended.stderr
  )


def test_a_fresh_process_can_be_had():
  process = binary.start_process(['-c', 'import sys; print("jax" in sys.modules)'], fresh=True, stdout=subprocess.PIPE)
  assert process.args[0] == sys.executable
  assert process.communicate(timeout=60)[0] == b'False\n'
  assert Path(sys.executable).exists()
