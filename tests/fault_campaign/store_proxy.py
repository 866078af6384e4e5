"""A proxy in front of an emulated object store, which injects faults into the requests of a job.

    with StoreProxy(emulator.url) as proxy:
      proxy.fault = lambda number, request: Fault(status=503) if number == 7 else None

What a job asks for is done by the store, or not, exactly as the fault says.
"""

from collections.abc import Callable
import dataclasses
import http.client
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import threading
import time
from urllib.parse import urlsplit

_OWN_HEADERS = {'connection', 'transfer-encoding', 'content-length', 'keep-alive', 'server', 'date'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
  """The fault of one request.

  Attributes:
    status: this answer in place of the store's, which is not asked; 0 leaves the connection without any.
    retry_after_s: of an answer with a status, how long the client is asked to wait.
    keep: the part of the store's own answer that comes before the connection ends; 0 is a lost answer.
    slow_s: the store's own answer takes so long, in pieces.
    page: a listing gives at most so many names at once.
    before, after: called before the store is asked, and when it has done what was asked, but not answered.
  """

  status: int | None = None
  retry_after_s: int | None = None
  keep: float | None = None
  slow_s: float = 0.0
  page: int | None = None
  before: Callable[[], None] | None = None
  after: Callable[[], None] | None = None


class StoreProxy:
  """Forwards requests of jobs to the store at `target`, with faults.

  Attributes:
    fault: called with the number of a request, from 0, and its method and path.
    requests: methods and paths since `begin`.
    num_faults: how many of them met a fault.
  """

  def __init__(self, target: str):
    self.target = urlsplit(target).netloc
    self.lock = threading.Lock()
    self._server = _Server(('127.0.0.1', 0), type('Handler', (_Handler,), {'proxy': self}))
    self.url = f'http://127.0.0.1:{self._server.server_address[1]}'
    threading.Thread(target=self._server.serve_forever, kwargs={'poll_interval': 0.05}, daemon=True).start()
    self.begin()

  def begin(self, fault: Callable[[int, str], Fault | None] = lambda number, request: None) -> None:
    """Counts requests from 0 again; `fault` returns the fault of each request."""
    with self.lock:
      self.fault, self.requests, self.num_faults = fault, list[str](), 0

  def close(self) -> None:
    self._server.shutdown()
    self._server.server_close()

  def see(self, request: str) -> Fault | None:
    with self.lock:
      self.requests.append(request)
      fault = self.fault(len(self.requests) - 1, request)
      self.num_faults += fault is not None
      return fault


class _Server(ThreadingHTTPServer):
  daemon_threads = True
  request_queue_size = 128

  def handle_error(self, *_: object) -> None:
    pass  # a client that was killed, or does not wait for its answer


class _Handler(BaseHTTPRequestHandler):
  proxy: StoreProxy
  protocol_version = 'HTTP/1.1'

  def log_message(self, *_: object) -> None:
    pass

  def _handle(self) -> None:
    body = self.rfile.read(int(self.headers.get('Content-Length') or 0))
    fault = self.proxy.see(f'{self.command} {self.path}') or Fault()
    if fault.before:
      fault.before()
    if fault.status is not None:
      self.close_connection = fault.status == 0
      return self._answer(fault.status, {'Retry-After': fault.retry_after_s}, b'') if fault.status else None
    status, headers, content = self._forward(_paged(self.path, fault.page), body)
    if fault.after:
      fault.after()
    if fault.keep is not None:
      self.close_connection = True
      if not fault.keep:
        return None
    self._answer(status, headers, content, keep=fault.keep, slow_s=fault.slow_s)

  do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815

  def _forward(self, path: str, body: bytes) -> tuple[int, dict[str, object], bytes]:
    store = http.client.HTTPConnection(self.proxy.target, timeout=60)
    headers = {name: value for name, value in self.headers.items() if name.lower() not in ('connection', 'expect')}
    store.request(self.command, path, body, headers)
    answer = store.getresponse()
    content = answer.read()
    headers = {name: value for name, value in answer.getheaders() if name.lower() not in _OWN_HEADERS}
    if self.command == 'HEAD':
      headers['Content-Length'] = answer.getheader('Content-Length')
    if 'Location' in headers:  # where an upload in parts goes on
      headers['Location'] = headers['Location'].replace(self.proxy.target, urlsplit(self.proxy.url).netloc)
    store.close()
    return answer.status, headers, content

  def _answer(
    self, status: int, headers: dict[str, object], content: bytes, *, keep: float | None = None, slow_s: float = 0.0
  ) -> None:
    self.send_response(status)
    for name, value in {'Content-Length': len(content), **headers}.items():
      if value is not None:
        self.send_header(name, str(value))
    self.end_headers()
    content = content if keep is None else content[: int(keep * len(content))]
    for start in range(0, len(content), piece := len(content) // 4 + 1 if slow_s else len(content) + 1):
      time.sleep(slow_s / 4)
      self.wfile.write(content[start : start + piece])
      self.wfile.flush()


def is_listing(request: str) -> bool:
  """Returns whether a request (method and path) lists names, in Google's API or S3's."""
  method, _, path = request.partition(' ')
  place, _, query = path.partition('?')
  return method == 'GET' and (place.endswith('/o') or 'list-type=2' in query)


def _paged(path: str, page: int | None) -> str:
  if page is None:
    return path
  name = 'max-keys' if 'list-type=2' in path else 'maxResults'
  place, _, query = path.partition('?')
  parameters = [parameter for parameter in query.split('&') if parameter and not parameter.startswith(f'{name}=')]
  return f'{place}?{"&".join([*parameters, f"{name}={page}"])}'
