"""Forks processes that have imported the package already: the tests start about 200, and imports cost each 4 s of CPU.

The server imports every module of spmd_tasks on the first request, stays a process of one thread without a JAX
backend, and forks once per request. The child takes the request's argv, working directory, environment and streams,
leaves the server's code and runs the command as `python` would, to the interpreter's own end: exit codes, atexit
handlers, threads and signals are those of a process that was started afresh.

These differ from a fresh process: imports are free and have happened, all children share one seed of `hash`, garbage
is seldom looked for, and options of `python` and variables that only the interpreter's start reads have no effect.
`scripts/test --all` starts every process afresh, and some tests always do (`fresh=True` of tests/binary.py).

    python fork_server.py SOCKET [MODULE...]    ends, and kills its children, when its stdin is closed

A client connects to SOCKET, sends a header with its three streams attached and a Request as JSON (tests/forked.py),
and reads two lines: the child's pid, and its wait status once it has ended. A connection that is closed earlier kills
the child.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import gc
import importlib
import json
import os
from pathlib import Path
import pkgutil
import resource
import runpy
import select
import signal
import socket
import struct
import sys
import types

HEADER = struct.Struct('!Q')  # the length of the JSON that follows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One process to start.

  Attributes:
    argv: what follows `python`: `-c CODE`, `-m MODULE` or a script, and its arguments.
    cwd: the working directory.
    env: the whole environment.
    new_session: makes the child the leader of a session.
  """

  argv: list[str]
  cwd: str
  env: dict[str, str]
  new_session: bool


def preload(others: Sequence[str]) -> None:
  """Imports all that jobs need but TensorFlow and registered experiments, and `others`."""
  import spmd_tasks

  for module in pkgutil.walk_packages(spmd_tasks.__path__, 'spmd_tasks.'):
    if not module.name.startswith(('spmd_tasks.experiments', 'spmd_tasks.bridges.pax.')):
      importlib.import_module(module.name)
  importlib.import_module('grain')  # which spmd_tasks imports where it is used
  from jax._src import xla_bridge

  from spmd_tasks.distributed.environment import refuse_unusable_environment

  refuse_unusable_environment()
  assert not xla_bridge._backends, 'an import started a JAX backend, which does not outlive a fork'
  assert 'tensorflow' not in sys.modules, 'an import of spmd_tasks imported TensorFlow'
  for name in others:  # `module:name`
    module_name, _, attribute = name.partition(':')
    getattr(importlib.import_module(module_name), attribute)
  tasks = Path('/proc/self/task')
  assert not tasks.exists() or len(list(tasks.iterdir())) == 1, (
    'an import started a thread, which does not survive a fork'
  )
  gc.collect()
  gc.freeze()
  gc.set_threshold(50_000, 20, 20)  # as in tests/conftest.py


class Server:
  """Accepts requests and watches the children: `serve` returns the Request in each child, and None in the server."""

  def __init__(self, path: str, preloaded: Sequence[str]):
    self._preloaded = preloaded
    self._listener = socket.socket(socket.AF_UNIX)
    self._listener.bind(path)
    self._listener.listen(64)
    self._connections: dict[int, socket.socket] = {}  # by the pid of the child
    self._owners: dict[int, str] = {}  # by the pid too: who pays for the child (tests/costs.py)
    self._costs = Path(path).with_name('costs')
    self._wakeup, self._write_end = os.pipe()
    os.set_blocking(self._wakeup, False)
    os.set_blocking(self._write_end, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the children by themselves
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(self._write_end)

  def serve(self) -> Request | None:
    is_loaded = False
    while True:
      by_fd = {connection.fileno(): pid for pid, connection in self._connections.items()}
      ready, _, _ = select.select([0, self._wakeup, self._listener, *by_fd], [], [])
      for fd in by_fd.keys() & set(ready):
        os.kill(by_fd[fd], signal.SIGKILL)
        self._end(*os.wait4(by_fd[fd], 0))
      if self._wakeup in ready:
        os.read(self._wakeup, 4096)
      for pid in list(self._connections):
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
          self._end(pid, status, usage)
      if 0 in ready:
        for pid in self._connections:
          os.kill(pid, signal.SIGKILL)
        return None
      if self._listener in ready:
        if not is_loaded:
          preload(self._preloaded)
          is_loaded = True
        if (request := self._accept()) is not None:
          return request

  def _accept(self) -> Request | None:
    connection, _ = self._listener.accept()
    header, fds, _, _ = socket.recv_fds(connection, HEADER.size, 3)
    with connection.makefile('rb') as stream:
      request = Request(**json.loads(stream.read(HEADER.unpack(header)[0])))
    if pid := os.fork():
      for fd in fds:
        os.close(fd)
      self._connections[pid] = connection
      self._owners[pid] = request.env.get('PYTEST_COST_OWNER', '')
      return None
    if request.new_session:
      os.setsid()
    with contextlib.suppress(OSError):  # `serve` sees that the client is gone again
      connection.sendall(f'{os.getpid()}\n'.encode())
    self._leave(connection)
    for stream_fd, fd in enumerate(fds):
      os.dup2(fd, stream_fd)
    for fd in {*fds} - {0, 1, 2}:
      os.close(fd)
    return request

  def _leave(self, connection: socket.socket) -> None:
    """Makes a child forget that it was the server."""
    signal.set_wakeup_fd(-1)  # as asyncio has done already, from Python 3.12 on
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.close(self._write_end)
    os.close(self._wakeup)
    for open_socket in (connection, self._listener, *self._connections.values()):
      open_socket.close()

  def _end(self, pid: int, status: int, usage: resource.struct_rusage) -> None:
    with self._costs.open('a') as costs:
      costs.write(f'{usage.ru_utime + usage.ru_stime:.3f}\t{self._owners.pop(pid)}\n')
    with self._connections.pop(pid) as connection, contextlib.suppress(OSError):
      connection.sendall(f'{status}\n'.encode())


def run(request: Request, installed_path: list[str]) -> None:
  """Becomes the process of the request; `installed_path`: sys.path without PYTHONPATH and the script's directory."""
  os.chdir(request.cwd)
  os.environ.clear()
  os.environ.update(request.env)
  is_unbuffered = bool(os.environ.get('PYTHONUNBUFFERED'))
  sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=is_unbuffered)
  if 'COVERAGE_PROCESS_CONFIG' in os.environ or 'COVERAGE_PROCESS_START' in os.environ:
    import coverage

    coverage.process_startup()
  _read_jax_environment()
  kind, *rest = request.argv
  first = {'-c': '', '-m': os.getcwd()}.get(kind) if kind in ('-c', '-m') else str(Path(kind).resolve().parent)
  path = [entry or os.getcwd() for entry in os.environ.get('PYTHONPATH', '').split(os.pathsep) if entry]
  sys.path[:] = [first, *path, *installed_path]
  sys.orig_argv = [sys.executable, *request.argv]
  importlib.invalidate_caches()
  if kind == '-c':
    sys.argv = ['-c', *rest[1:]]
    sys.modules['__main__'] = types.ModuleType('__main__')
    exec(compile(rest[0], '<string>', 'exec'), sys.modules['__main__'].__dict__)
  elif kind == '-m':
    sys.argv = rest
    sys.modules.pop(rest[0], None)  # as `__main__` it is executed again
    runpy.run_module(rest[0], run_name='__main__', alter_sys=True)
  else:
    sys.argv = request.argv
    runpy.run_path(kind, run_name='__main__')


def _read_jax_environment() -> None:
  """Sets JAX's options from the environment, which JAX reads when it is imported."""
  import jax

  for name, value in jax.config.values.items():
    text = os.environ.get(name.upper())
    if text is None:
      continue
    if isinstance(value, bool):
      jax.config.update(name, text.lower() in ('y', 'yes', 't', 'true', 'on', '1'))
    else:
      jax.config.update(name, type(value)(text) if isinstance(value, int | float) else text)


def main() -> Request | None:
  return Server(sys.argv[1], sys.argv[2:]).serve()


if __name__ == '__main__':
  # The children leave `main` and run to the end of this module, so that nothing of the server is below them.
  _own = {str(Path(__file__).parent), *os.environ.get('PYTHONPATH', '').split(os.pathsep)}
  _installed_path = [entry for entry in sys.path if entry not in _own]
  _request = main()
  if _request is not None:
    run(_request, _installed_path)
