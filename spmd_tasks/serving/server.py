"""serve: from a model to a process that answers HTTP, until a signal ends it.

It listens at once, is ready when the engine is warm, and on SIGTERM takes nothing new, lets what has begun end within
`drain_s`, and tells the rest that it was cut. A second signal waits for nothing.
"""

import asyncio
from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import socket
import sys
import threading
from typing import Any, NoReturn

from absl import logging
import uvicorn
import uvloop

from spmd_tasks import exit_codes
from spmd_tasks.decoding import Delta, Engine, Scheduler
from spmd_tasks.errors import UserError
from spmd_tasks.runtime.compilation import CompilationCounter
from spmd_tasks.serving.engine_thread import EngineThread
from spmd_tasks.serving.generation_request import ServedModel
from spmd_tasks.serving.http_server import make_app
from spmd_tasks.serving.publisher import Publisher
from spmd_tasks.serving.service import Service
from spmd_tasks.serving.settings import ServerSettings

_BACKLOG = 1024  # connections that may wait to be taken
_SEND_BUFFER = 1 << 18  # bytes; the system would let a stream that nobody reads grow to megabytes before it blocks
_DISPATCH_LIMIT_S = 5.0
_MAX_UNDISPATCHED = 4  # steps whose deltas wait for the event loop
_POLL_S = 0.02
_CLOSE_LIMIT_S = 5  # for connections to end when everything has been sent


def listen(settings: ServerSettings) -> socket.socket:
  """The socket of the server.

  Raises:
    UserError: it cannot listen there.
  """
  where = f'{settings.host}:{settings.port}'
  sock = None
  try:
    family, kind, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
    # By its protocol an event loop knows that it is TCP, and does not hold small packets back; without, each answer may
    # wait 40 ms for an acknowledgement.
    sock = socket.socket(family, kind, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # connections inherit it
    sock.bind(address)
    sock.listen(_BACKLOG)
    return sock
  except OSError as error:
    if sock is not None:
      sock.close()
    raise UserError(
      f'cannot listen on {where}: {error.strerror}. Name another --host or --port; port 0 is any that is free.'
    ) from error


def url_of(sock: socket.socket) -> str:
  """Where a listening socket is reached."""
  host, port = sock.getsockname()[:2]
  return f'http://{f"[{host}]" if ":" in host else host}:{port}'


def serve(
  engine: Engine,
  model: ServedModel,
  settings: ServerSettings,
  sock: socket.socket,
  *,
  restore: Callable[[int | None], tuple[Any, int]] | None = None,
  restore_pauses: bool = False,
  announce: Callable[[str], None] = print,
  stop: threading.Event | None = None,
  leave: Callable[[int], NoReturn] = os._exit,
) -> int:
  """Serves until SIGTERM, Ctrl-C or `stop`; returns an exit code.

  Args:
    engine: not warm yet.
    model: what it serves.
    settings: limits.
    sock: from `listen`.
    restore, restore_pauses: another checkpoint's weights and its step, see Publisher.
    announce: given one line when the server is ready, and one each when it begins to drain and when it has.
    stop: as SIGTERM, for callers off the main thread, which get no signals, and for other processes.
    leave: ends the process with an exit code where a thread is in the middle of native code, in a step or reading a
      checkpoint: an orderly end of Python would crash, or wait for it.

  Raises:
    whatever ended the engine.
  """
  with CompilationCounter() as compilations:
    server = _Server(engine, model, settings, restore, restore_pauses, announce, compilations)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
      code = runner.run(server.run(sock, stop))
  if server.thread.is_alive or server.publisher.is_reading:
    sys.stdout.flush()
    sys.stderr.flush()
    leave(code if server.thread.error is None else exit_codes.FAILED)
  if server.thread.error is not None:
    raise server.thread.error
  return code


class _Uvicorn(uvicorn.Server):
  """Leaves the signals to us: its own handlers cut streams without a word."""

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    yield


class _Server:
  def __init__(
    self,
    engine: Engine,
    model: ServedModel,
    settings: ServerSettings,
    restore: Callable[[int | None], tuple[Any, int]] | None,
    restore_pauses: bool,
    announce: Callable[[str], None],
    compilations: CompilationCounter,
  ):
    self._settings = settings
    self._model = model
    self._announce = announce
    self._loop: asyncio.AbstractEventLoop | None = None
    self._changed = asyncio.Event()
    self._signals: list[int] = []
    self._undispatched = threading.Semaphore(_MAX_UNDISPATCHED)
    self.thread = EngineThread(
      Scheduler(engine),
      warm_up=engine.warm_up,
      post=self._post,
      max_queued=settings.max_queued,
      on_change=self._on_change,
    )
    self._service = Service(model, settings, self.thread, engine.num_slots, lambda: compilations.num_programs)
    self.publisher = Publisher(self._service, engine, restore, pauses=restore_pauses)

  async def run(self, sock: socket.socket, stop: threading.Event | None) -> int:
    self._loop = asyncio.get_running_loop()
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._loop.add_signal_handler(number, self._on_signal, number)
    http = _Uvicorn(
      uvicorn.Config(
        make_app(self._service, self.publisher),
        http='h11',
        ws='none',
        loop='asyncio',
        lifespan='off',
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_CLOSE_LIMIT_S,
      )
    )
    serving = asyncio.create_task(http.serve(sockets=[sock]))
    self.thread.start()
    was_ready = False
    while not (self._signals or self.thread.error or serving.done() or (stop is not None and stop.is_set())):
      if self.thread.is_ready and not was_ready:
        was_ready = True
        self._service.warm()
        self._announce(f'Serving {self._model.name}, step {self._service.model.step}, at {url_of(sock)}')
      self._changed.clear()
      with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(self._changed.wait(), _POLL_S if stop is not None else 1.0)
    await self._drain()
    http.should_exit = True
    await serving
    return exit_codes.INTERRUPTED if signal.SIGINT in self._signals else exit_codes.OK

  async def _drain(self) -> None:
    self._service.is_draining = True
    if not self.thread.is_idle:
      self._announce(f'Draining: at most {self._settings.drain_s:g} s for what has begun.')
    assert self._loop is not None
    end = self._loop.time() + self._settings.drain_s
    while not self.thread.is_idle and self.thread.error is None and len(self._signals) < 2 and self._loop.time() < end:
      await asyncio.sleep(_POLL_S)
    num_cut = self.thread.num_queued + self.thread.scheduler.num_active
    await asyncio.to_thread(self.thread.stop)
    if self.thread.error is None:
      self._announce(f'Drained. Texts cut: {num_cut}.')

  def _post(self, deltas: list[Delta]) -> None:
    assert self._loop is not None
    # The engine must not run away from a loop that is behind: deltas would pile up without a bound.
    is_counted = self._undispatched.acquire(timeout=_DISPATCH_LIMIT_S)
    try:
      self._loop.call_soon_threadsafe(self._dispatch, deltas, is_counted)
    except RuntimeError:
      logging.warning('the event loop ended before the engine did')

  def _dispatch(self, deltas: list[Delta], is_counted: bool) -> None:
    if is_counted:
      self._undispatched.release()
    self._service.dispatch(deltas)

  def _on_change(self) -> None:
    assert self._loop is not None
    with contextlib.suppress(RuntimeError):  # the loop has ended
      self._loop.call_soon_threadsafe(self._changed.set)

  def _on_signal(self, number: int) -> None:
    self._signals.append(number)
    self._changed.set()
