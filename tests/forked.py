"""Clients of tests/fork_server.py: a Popen whose process the server forks, and programs for shells to find on PATH.

Usage:

    with running_server(directory):                       # once per run of the tests, by conftest.py
      process = ForkedPopen(['-m', 'spmd_tasks.main', '--list'], stdout=subprocess.PIPE, text=True)
      stdout, _ = process.communicate(timeout=60)

Only the standard library is imported, so that the programs on PATH start in 20 ms.
"""

from collections.abc import Iterator, Sequence
import contextlib
import inspect
import json
import os
from pathlib import Path
import select
import signal
import socket
import struct
import subprocess
import sys
import time

# They name the servers' sockets to the processes of the tests.
SOCKET_VARIABLE = 'SPMD_TASKS_FORK_SERVER'
PAX_SOCKET_VARIABLE = 'SPMD_TASKS_PAX_FORK_SERVER'
# The file and the fixture that start a process, tab between them (tests/costs.py).
OWNER_VARIABLE = 'PYTEST_COST_OWNER'
# And what each imports.
_SERVERS = {SOCKET_VARIABLE: (), PAX_SOCKET_VARIABLE: ('spmd_tasks.bridges.pax:PaxExperiment',)}
REPOSITORY = Path(__file__).resolve().parents[1]

_HEADER = struct.Struct('!Q')


@contextlib.contextmanager
def running_server(directory: Path) -> Iterator[None]:
  """Starts the servers that all processes use, with their sockets in `directory`; ends them afterwards.

  One of them has imported Paxml too. A server imports at its first request: one that nobody asks costs nothing.
  """
  with contextlib.ExitStack() as servers:
    for number, (variable, modules) in enumerate(_SERVERS.items()):
      own = directory / str(number)
      own.mkdir()
      os.environ[variable] = servers.enter_context(running_extra_server(own, modules))
      servers.callback(os.environ.pop, variable)
    yield


@contextlib.contextmanager
def running_extra_server(directory: Path, modules: Sequence[str] = ()) -> Iterator[str]:
  """Starts a server that has imported `modules` too; yields its socket; ends it, and its children, afterwards."""
  path = str(directory / 'socket')
  # JAX's variables are the children's; numpy's threads would not survive a fork; coverage starts in the children.
  left_out = ('JAX_', 'COVERAGE_', 'COV_')
  env = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
  env |= {'PYTHONPATH': str(REPOSITORY), 'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}
  with (directory / 'log').open('wb') as log:
    server = subprocess.Popen(
      [sys.executable, Path(__file__).with_name('fork_server.py'), path, *modules],
      cwd=REPOSITORY,
      env=env,
      stdin=subprocess.PIPE,
      stdout=log,
      stderr=subprocess.STDOUT,
    )
  try:
    yield path
  finally:
    server.communicate()


def cost_files() -> list[Path]:
  """Returns the files of the running servers with lines of `seconds, owner`: the CPU seconds of ended processes."""
  paths = [Path(os.environ[variable]).with_name('costs') for variable in _SERVERS if variable in os.environ]
  return [path for path in paths if path.exists()]


def server_is_gone(server: str) -> RuntimeError:
  """The error to raise, with what the server wrote at its end."""
  log = Path(server).with_name('log').read_text(errors='replace')
  return RuntimeError(f'the fork server is gone; it wrote:\n{log}')


def is_running() -> bool:
  """Whether this process may start others by the server."""
  return SOCKET_VARIABLE in os.environ


def request_process(
  argv: Sequence[str],
  *,
  cwd: str,
  env: dict[str, str],
  fds: Sequence[int],
  new_session: bool = False,
  server: str | None = None,
) -> tuple[socket.socket, int]:
  """Has the server fork; returns the connection, on which the wait status will come, and the child's pid.

  `server` is the socket of an extra server; None takes the one that all processes use.
  """
  server = server or os.environ[SOCKET_VARIABLE]
  connection = socket.socket(socket.AF_UNIX)
  for _ in range(1500):  # 30 s
    try:
      connection.connect(server)
      break
    except (FileNotFoundError, ConnectionRefusedError):  # it has only just been started
      time.sleep(0.02)
  else:
    raise server_is_gone(server)
  body = json.dumps({'argv': list(argv), 'cwd': cwd, 'env': env, 'new_session': new_session}).encode()
  socket.send_fds(connection, [_HEADER.pack(len(body))], fds)
  connection.sendall(body)
  pid = b''
  while not pid.endswith(b'\n'):
    byte = connection.recv(1)
    if not byte:
      raise server_is_gone(server)
    pid += byte
  return connection, int(pid)


class ForkedPopen(subprocess.Popen):
  """A subprocess.Popen of `python <argv>`, forked by the server, which is its parent: os.waitpid does not know it."""

  def __init__(self, argv: Sequence[str], *, env=None, server: str | None = None, **popen):
    self._server = server or os.environ[SOCKET_VARIABLE]
    super().__init__(list(argv), env=dict(os.environ if env is None else env), **popen)

  def _execute_child(self, *given):
    given = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments
    own = [given['p2cread'], given['c2pwrite'], given['errwrite']]
    fds = [number if fd == -1 else fd for number, fd in enumerate(own)]
    try:
      self._connection, self.pid = request_process(
        given['args'],
        cwd=os.path.abspath(given['cwd'] or os.curdir),
        env={name: str(value) for name, value in given['env'].items()},
        fds=fds,
        new_session=given['start_new_session'],
        server=self._server,
      )
    finally:
      names = ('p2cread', 'p2cwrite', 'c2pread', 'c2pwrite', 'errread', 'errwrite')
      self._close_pipe_fds(*(given[name] for name in names))
    self._child_created = True

  def _internal_poll(self, *args, **kwargs):
    if self.returncode is None and self._connection is not None:
      self._read_status(timeout=0)
    return self.returncode

  def _try_wait(self, wait_flags):
    if wait_flags & os.WNOHANG:
      status = self._read_status(timeout=0)
    else:
      status = self._read_status(timeout=None)
    return (0, 0) if status is None else (self.pid, status)

  def _read_status(self, timeout):
    ready, _, _ = select.select([self._connection], [], [], timeout)
    if not ready:
      return None
    text = self._connection.recv(64)
    if not text:
      raise server_is_gone(self._server)
    self._connection.close()
    self._connection = None
    self._handle_exitstatus(int(text))
    return int(text)


def make_programs(directory: Path) -> None:
  """Writes `spmd-tasks` and `python` into `directory`, which a shell finds on its PATH: the server forks for them."""
  directory.mkdir(exist_ok=True)
  installed = Path(sys.executable).with_name('spmd-tasks')
  for name, argv in (('spmd-tasks', [str(installed)]), ('python', [])):
    program = directory / name
    program.write_text(
      f'#!{sys.executable} -IS\n'
      'import sys\n'
      f'sys.path.insert(0, {str(Path(__file__).parent)!r})\n'
      'import forked\n'
      f'forked.run_as_program({argv!r} + sys.argv[1:])\n'
    )
    program.chmod(0o755)


def run_as_program(argv: list[str]) -> None:
  """Is the process of `argv` to whoever started this one: its streams, its signals, its exit."""
  connection, pid = request_process(argv, cwd=os.getcwd(), env=dict(os.environ), fds=[0, 1, 2])
  for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(signum, lambda signum, _: os.kill(pid, signum))
  status = os.waitstatus_to_exitcode(int(connection.recv(64)))
  if status < 0:
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
  os._exit(status)
