"""Serves an engine over HTTP until a signal stops the server.

    sock = listen(settings)
    exit_code = run_server(engine, model, settings, sock)

The server answers /health at once, and is ready once the engine is warm. On SIGTERM it rejects new requests, waits up
to `drain_s` seconds for running requests, and ends the answers of the remaining ones with an error. A second signal
skips the wait.
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
from spmd_tasks.activity import set_activity
from spmd_tasks.decoding.engine_contract import Engine
from spmd_tasks.decoding.generated_sequence import Delta
from spmd_tasks.decoding.scheduler import Scheduler
from spmd_tasks.errors import UserError
from spmd_tasks.runtime.compilation import CompilationCounter
from spmd_tasks.serving.engine_thread import EngineThread
from spmd_tasks.serving.publisher import Publisher
from spmd_tasks.serving.requests import ServedModel
from spmd_tasks.serving.routes import make_app
from spmd_tasks.serving.scoring import ScoringEngine
from spmd_tasks.serving.service import Service
from spmd_tasks.serving.settings import ServerSettings
from spmd_tasks.serving.tracing import RequestTracer
from spmd_tasks.sigterm import ending_signals

_BACKLOG = 128  # connections that may wait to be accepted
_SEND_BUFFER = (
  1 << 18
)  # bytes; with the default size, a stream that its client does not read blocks only after megabytes
_DISPATCH_LIMIT_S = 5.0
_MAX_UNDISPATCHED = 4  # steps whose deltas may wait for the event loop
_POLL_S = 0.02
_KEEP_ALIVE_S = 30  # closes a connection that is idle for this long after an answer
_CLOSE_LIMIT_S = 5  # for connections to close after all data is sent


def listen(settings: ServerSettings) -> socket.socket:
  """Opens the server's socket. Raises a UserError if the process cannot listen on the address."""
  try:
    family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
    is_dualstack = settings.host == '::' and socket.has_dualstack_ipv6()  # `::` also listens on IPv4
    sock = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=is_dualstack)
  except OSError as error:
    where = f'{settings.host}:{settings.port}'
    raise UserError(
      f'cannot listen on {where}: {error.strerror}. Set another --host or --port; port 0 takes any free port.'
    ) from error
  sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)  # connections inherit it
  return sock


def url_of(sock: socket.socket) -> str:
  """Returns the URL of a listening socket."""
  host, port = sock.getsockname()[:2]
  return f'http://{f"[{host}]" if ":" in host else host}:{port}'


def run_server(
  engine: Engine | ScoringEngine,
  model: ServedModel,
  settings: ServerSettings,
  sock: socket.socket,
  *,
  restore: Callable[[int | None], tuple[Any, int]] | None = None,
  restore_pauses: bool = False,
  announce: Callable[[str], None] = print,
  stop: threading.Event | None = None,
  leave: Callable[[int], NoReturn] = os._exit,
  tracer: RequestTracer | None = None,
) -> int:
  """Serves until SIGTERM, Ctrl-C or `stop`; returns an exit code.

  Args:
    engine: the engine; the server warms it up.
    model: the served model.
    settings: the address and the limits.
    sock: a socket from `listen`.
    restore: reads the weights of another checkpoint; see Publisher.
    restore_pauses: whether `restore` must run on the engine's thread; see `pauses` of Publisher.
    announce: called with a line when the server is ready, starts to drain, and has drained.
    stop: an event that acts like SIGTERM, for callers that get no signals (other threads, other processes).
    leave: exits the process with a code. Called if a thread is still in native code at the end, in a step or reading a
      checkpoint, because a normal exit of Python would crash or wait for that thread.
    tracer: records requests; closed at the end.

  Raises the engine's error if the engine failed.
  """
  with CompilationCounter() as compilations:
    publishing = {'restore': restore, 'pauses': restore_pauses}
    server = _Server(engine, model, settings, announce, compilations, tracer, publishing)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
      code = runner.run(server.run(sock, stop))
  if tracer is not None:
    tracer.close()
  if server.thread.is_alive or server.publisher.is_reading:
    sys.stdout.flush()
    sys.stderr.flush()
    leave(code if server.thread.error is None else exit_codes.FAILED)
  if server.thread.error is not None:
    raise server.thread.error
  return code


class _Uvicorn(uvicorn.Server):
  """A uvicorn server without signal handlers, because uvicorn's would cut streams without an error event."""

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    yield


class _Server:
  def __init__(
    self,
    engine: Engine | ScoringEngine,
    model: ServedModel,
    settings: ServerSettings,
    announce: Callable[[str], None],
    compilations: CompilationCounter,
    tracer: RequestTracer | None,
    publishing: dict[str, Any],
  ):
    self._settings = settings
    self._model = model
    self._announce = announce
    self._loop: asyncio.AbstractEventLoop | None = None
    self._changed = asyncio.Event()
    self._signals: list[int] = []
    self._undispatched = threading.Semaphore(_MAX_UNDISPATCHED)
    self.thread = EngineThread(
      engine
      if isinstance(engine, ScoringEngine)
      else Scheduler(engine, on_admit=lambda sequence: sequence.owner.note_admission()),
      warm_up=engine.warm_up,
      post=self._post,
      max_queued=settings.max_queued,
      on_change=self._on_change,
    )
    num_compilations = lambda: compilations.num_programs
    self._service = Service(model, settings, self.thread, engine.num_slots, num_compilations, tracer)
    self.publisher = Publisher(self._service, engine, **publishing)

  async def run(self, sock: socket.socket, stop: threading.Event | None) -> int:
    self._loop = asyncio.get_running_loop()
    if threading.current_thread() is threading.main_thread():
      for number in ending_signals():
        self._loop.add_signal_handler(number, self._on_signal, number)
    http = _Uvicorn(
      uvicorn.Config(
        make_app(self._service, self.publisher),
        http='h11',
        ws='none',
        loop='asyncio',
        lifespan='off',
        log_config=None,
        log_level='error',  # uvicorn warns about every request that is not HTTP
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        limit_concurrency=self._settings.max_connections + 1,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_CLOSE_LIMIT_S,
      )
    )
    serving = asyncio.create_task(http.serve(sockets=[sock]))
    self.thread.start()
    was_ready = False
    while not (self._signals or self.thread.error or serving.done() or (stop is not None and stop.is_set())):
      if self.thread.is_ready and not was_ready:
        was_ready = True
        self._service.count_late_compilations()
        set_activity(None)
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
      self._announce(f'Stopping: waiting up to {self._settings.drain_s:g} s for running requests.')
    assert self._loop is not None
    end = self._loop.time() + self._settings.drain_s
    while not self.thread.is_idle and self.thread.error is None and len(self._signals) < 2 and self._loop.time() < end:
      await asyncio.sleep(_POLL_S)
    num_cut = self.thread.num_queued + self.thread.scheduler.num_active
    await asyncio.to_thread(self.thread.stop)
    if self.thread.error is None:
      self._announce(f'Server stopped; requests cut off: {num_cut}.')

  def _post(self, deltas: list[Delta]) -> None:
    assert self._loop is not None
    # Let the engine wait if the event loop falls behind; otherwise deltas would queue up without bound.
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
    with contextlib.suppress(RuntimeError):  # the event loop has ended
      self._loop.call_soon_threadsafe(self._changed.set)

  def _on_signal(self, number: int) -> None:
    self._signals.append(number)
    self._changed.set()
