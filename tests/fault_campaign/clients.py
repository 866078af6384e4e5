"""Servers: with hostile, broken and slow clients, under signals, with damaged checkpoints, and of two processes.

One server is shared by the faults of clients. After each it must be well, give the same answer as before, have no
connection or thread more than before, and have logged no traceback.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
import contextlib
import json
from pathlib import Path
import re
import shutil
import signal
import socket
import time
from typing import Any

import httpx

from spmd_tasks import exit_codes
from tests.fault_campaign import damage, judge
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.judge import check
from tests.fault_campaign.processes import Pair, check_ends
from tests.fault_campaign.scene import HangError, Scene, Started

COMPLETIONS = '/v1/completions'
KEY = 'a-secret-key'
SIZES = tuple(f'--set=task.decode.{setting}' for setting in ('max_len=256', 'prefill_chunk=16', 'num_slots=3'))
HEADERS = {'authorization': f'Bearer {KEY}'}
BODY = {'prompt': '3: the 7th line', 'max_tokens': 8, 'temperature': 0}
LONG = BODY | {'max_tokens': 200, 'ignore_eos': True, 'stream': True}
ANSWER_LIMIT_S = 30.0


class Server:
  """A running server of the job `Text`, its newest checkpoint served."""

  def __init__(self, scene: Scene, *flags: object):
    scene.job = 'Text'
    scene.begun(20, 20)
    self.scene = scene
    key = scene.path / 'key'
    key.write_text(KEY)
    own = [*scene.command('serve'), *SIZES, '--port', 0, '--api_key_file', key, '--drain_s', 3]
    self.process = scene.start(*own, *flags)
    self.url = url_of(scene, self.process)
    self.port = int(self.url.rpartition(':')[2])
    self.model = self.get('/v1/models').json()['data'][0]['id']
    self.answer = self.complete()
    self.num_descriptors, self.num_threads = self.resources()

  def get(self, path: str) -> httpx.Response:
    return httpx.get(self.url + path, headers=HEADERS, timeout=ANSWER_LIMIT_S)

  def post(self, body: Any, path: str = COMPLETIONS, **settings: Any) -> httpx.Response:
    settings = {'headers': HEADERS, 'timeout': ANSWER_LIMIT_S} | settings
    if isinstance(body, dict) and path == COMPLETIONS:
      body = {'model': self.model} | body
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = settings.pop('headers') | {'content-type': 'application/json'}
    return httpx.post(self.url + path, content=content, headers=headers, **settings)

  def complete(self) -> str:
    response = self.post(BODY)
    check(response.status_code == 200, f'a good request is answered {response.status_code}: {response.text[:100]}')
    return response.json()['choices'][0]['text']

  def resources(self) -> tuple[int, int]:
    directory = Path(f'/proc/{self.process.pid}')
    return len(list((directory / 'fd').iterdir())), len(list((directory / 'task').iterdir()))

  def connect(self) -> socket.socket:
    return socket.create_connection(('127.0.0.1', self.port), timeout=ANSWER_LIMIT_S)

  def long_request(self) -> tuple[bytes, bytes]:
    """The header and the body, as bytes for a socket, of a request whose answer is a long stream."""
    body = json.dumps({'model': self.model} | LONG).encode()
    head = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
    return head + b'Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n' % (KEY.encode(), len(body)), body

  def check_well(self, log_before: str) -> None:
    """Healthy, with the same answer, without a traceback, and soon with as few connections and threads as before."""
    check(self.process.is_running(), f'the server has ended: {judge.last_line(self.process.stderr)}')
    try:
      for path in ('/health', '/ready'):
        check(self.get(path).status_code == 200, f'{path} fails after the fault')
      check(self.complete() == self.answer, 'the same request has another answer after the fault')
    except httpx.TransportError as error:
      raise HangError(f'the server does not answer a good client: {type(error).__name__}: {error}') from error
    log = self.process.stderr.removeprefix(log_before)
    judge.check_no_traceback(log)
    check(log.count('\n') < 30, f'the log has {log.count(chr(10))} lines of one fault')
    end = time.monotonic() + 40  # half a header may stay for a while
    while True:
      descriptors, threads = self.resources()
      if descriptors <= self.num_descriptors + 1 and threads <= self.num_threads + 2:
        return
      if time.monotonic() > end:
        check(False, f'descriptors {self.num_descriptors} -> {descriptors}, threads {self.num_threads} -> {threads}')
      time.sleep(0.1)

  def stop(self) -> None:
    self.process.send(signal.SIGTERM)
    ended = self.scene.finish(self.process)
    check(ended.returncode == exit_codes.OK, f'after SIGTERM the server ended with {ended.returncode}')


def url_of(scene: Scene, process: Started) -> str:
  started = scene.wait_until(process, lambda: re.search(r'Serving \S+ step \d+, at (\S+)', process.stdout))
  check(started, f'the server ended before it served: {judge.sentence_of(process)}')
  return re.search(r'Serving \S+ step \d+, at (\S+)', process.stdout)[1]


@contextlib.contextmanager
def shared(scene: Scene) -> Iterator[Server]:
  """The campaign's server, well before and after what happens inside."""
  with scene.campaign_server(Server) as server:
    log_before = server.process.stderr
    yield server
    server.check_well(log_before)


# --- clients ---


@kind('serving/clients that leave', share=3)
def clients_leave(scene: Scene) -> str:
  """At any byte of what they send or read, orderly or by a reset."""
  with shared(scene) as server:
    request = b''.join(server.long_request())
    num_clients = scene.rng.randrange(1, 30)
    scene.where = f'{num_clients} clients'
    for _ in range(num_clients):
      with server.connect() as sock, contextlib.suppress(OSError):
        if scene.rng.random() < 0.6:
          sock.sendall(request[: scene.rng.randrange(1, len(request))])
        else:
          sock.sendall(request)
          sock.recv(scene.rng.randrange(1, 1000))
        if scene.rng.random() < 0.5:
          sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\x01\x00\x00\x00\x00\x00\x00\x00')
  return 'the server is as before'


@kind('serving/clients that send nothing or half a header', share=2)
def silent_clients(scene: Scene) -> str:
  """Many of them, without a key: a good client is answered meanwhile, and they are closed in bounded time."""
  with shared(scene) as server, contextlib.ExitStack() as stack:
    num_clients = scene.rng.choice((20, 60, 200))
    head, body = server.long_request()
    part = scene.rng.choice((b'', b'G', b'GET /health HTTP/1.1\r\n', head[:70], head + body[:5]))
    scene.where = f'{num_clients} clients, {len(part)} bytes each'
    sockets = []
    for _ in range(num_clients):
      try:
        sockets.append(stack.enter_context(server.connect()))
        sockets[-1].sendall(part)
      except OSError:  # refused: also an answer
        break
    check(server.get('/health').status_code == 200, '/health fails while they wait')
    server.complete()
    end = time.monotonic() + 60
    for sock in sockets:
      sock.settimeout(max(0.1, end - time.monotonic()))
      try:
        while sock.recv(4096):
          pass
      except TimeoutError:
        check(False, f'connections with {len(part)} bytes of a request are still open after 60 s')
      except OSError:
        pass
  return 'a good client was answered; they were closed'


@kind('serving/bodies', share=4)
def bodies(scene: Scene) -> str:
  """Deep, huge, mutated, of other types: an answer below 500 that names the error."""
  rng = scene.rng
  with shared(scene) as server:
    whole = json.dumps({'model': server.model} | BODY).encode()
    name = rng.choice(('deep', 'huge', 'mutated', 'types', 'unicode'))
    scene.where = name
    for _ in range(rng.randrange(2, 8)):
      if name == 'deep':
        depth = rng.choice((1000, 10_000, 400_000))
        body = rng.choice((b'[' * depth, b'{"a":' * depth, b'{"prompt":' + b'[' * depth + b']' * depth + b'}'))
      elif name == 'huge':
        body = b'{"prompt": "' + b'a' * rng.choice((3_000_000, 1_999_000, 500_000)) + b'"}'
      elif name == 'mutated':
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
          data[rng.randrange(len(data))] = rng.randrange(256)
        body = bytes(data[: rng.randrange(1, len(data) + 1)])
      elif name == 'types':
        field = rng.choice((*BODY, 'n', 'stop', 'seed', 'top_p', 'logprobs', 'stream', 'top_k'))
        value = rng.choice((None, [], {}, -1, 0, 1e9, 1e300, 'x' * 5000, [[]], True, [1, 'a'], 2**70, 'nan'))
        body = json.dumps({'model': server.model} | BODY | {field: value}).encode()
      else:
        body = json.dumps({'model': server.model} | BODY | {'prompt': '\ud800\x00\U0010ffff' * 5}).encode()
      response = server.post(body)
      check(response.status_code < 500, f'answered {response.status_code}: {response.text[:100]}')
      if response.status_code >= 400:
        check(response.json()['error']['message'], 'the error says nothing')
  return 'answered below 500; the server is as before'


@kind('serving/keys and paths', share=2)
def keys_and_paths(scene: Scene) -> str:
  """Without the right key every route is refused; no path leads anywhere."""
  rng = scene.rng
  with shared(scene) as server:
    keys = ('', 'Bearer', f'Bearer {KEY}x', f'Bearer {KEY[:-1]}', 'Basic eDp5', KEY * 2000)
    paths = ('/health', '/ready', '/metrics', '/v1/models', '/', '/admin/publish', '/../../etc/passwd', '/v1/..%2f')
    methods = ('GET', 'POST', 'PUT', 'DELETE', 'OPTIONS', 'HEAD', 'TRACE')
    for _ in range(12):
      key, path = rng.choice(keys), rng.choice(paths)
      headers = {'authorization': key} if key else {}
      scene.where = f'{path} with a key of {len(key)} characters'
      response = httpx.request(rng.choice(methods), server.url + path, headers=headers, timeout=ANSWER_LIMIT_S)
      check(response.status_code in (400, 401, 403, 404, 405, 431), f'{scene.where} is answered {response.status_code}')
      check(KEY not in response.text and 'root:' not in response.text, 'the answer tells a secret')
    for step in ('../../..', '/etc/passwd', -1, 99, 1e9, 'x', None, [], {'a': 1}):
      response = server.post({'step': step}, '/admin/publish')
      check(response.status_code in (200, 400, 404, 409), f'publish of {step!r} is answered {response.status_code}')
      check(response.status_code != 200 or step is None, f'publish of {step!r} was accepted')
  return 'refused; the server is as before'


@kind('serving/garbage on the port', share=2)
def garbage(scene: Scene) -> str:
  rng = scene.rng
  with shared(scene) as server:
    post = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n'
    messages = (
      b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03',
      b'GET / HTTP/9.9\r\n\r\n',
      b'GET ' + b'/' * 70_000 + b' HTTP/1.1\r\n\r\n',
      b'GET /%ff%00%zz HTTP/1.1\r\nHost: localhost\r\n\r\n',
      b'GET / HTTP/1.1\r\n' + b'A: b\r\n' * 20_000 + b'\r\n',
      b'GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n',
      post + b'Content-Length: -5\r\n\r\n',
      post + b'Content-Length: 99999999999999999999999\r\nContent-Type: application/json\r\n\r\n',
      post + b'Transfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\nzz\r\n',
      post + b'Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n',
      post + b'Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n',
      post + b'Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n',
      post + b'Expect: 100-continue\r\nContent-Length: 10\r\n\r\n',
    )
    for _ in range(10):
      message = rng.choice((rng.choice(messages), rng.randbytes(rng.randrange(1, 3000))))
      with server.connect() as sock, contextlib.suppress(OSError):
        sock.sendall(message)
        sock.shutdown(socket.SHUT_WR)
        answer = sock.recv(65536)
        check(answer == b'' or answer.startswith(b'HTTP/1.1'), f'answered {answer[:40]!r}')
        check(not answer.startswith(b'HTTP/1.1 5'), f'{message[:30]!r} is answered {answer[:40]!r}')
  return 'the server is as before'


@kind('serving/a flood', share=1)
def flood(scene: Scene) -> str:
  with shared(scene) as server, ThreadPoolExecutor(16) as pool:
    num_requests = scene.rng.randrange(20, 60)
    scene.where = f'{num_requests} requests of 16 texts'
    body = BODY | {'n': 16, 'max_tokens': 20}
    answers = list(pool.map(lambda _: server.post(body, timeout=120), range(num_requests)))
    statuses = {answer.status_code for answer in answers}
    check(statuses <= {200, 429} and 200 in statuses, f'answered {sorted(statuses)}')
    for answer in answers:
      check(answer.status_code != 200 or len(answer.json()['choices']) == 16, 'an answer lacks texts')
  return f'answered {sorted(statuses)}; the server is as before'


def stream(url: str) -> contextlib.AbstractContextManager[httpx.Response]:
  """A long answer of the server, while it comes."""
  return httpx.stream('POST', url + COMPLETIONS, json=LONG, headers=HEADERS, timeout=60)


@kind('serving/SIGTERM while it streams', share=2)
def sigterm_while_streaming(scene: Scene) -> str:
  """Running requests end or are told so, the exit code is 0."""
  server = Server(scene)
  delay, again = scene.rng.uniform(0, 0.5), scene.rng.random() < 0.5
  scene.where = f'after {delay:.2f} s' + (', twice' if again else '')
  with stream(server.url) as response:
    lines = response.iter_lines()
    first = next(lines)
    time.sleep(delay)
    server.process.send(signal.SIGTERM)
    if again:
      time.sleep(0.05)
      server.process.send(signal.SIGTERM)
    rest = [line for line in [first, *lines] if line]
  check(rest[-1] == 'data: [DONE]', f'the stream ended with {rest[-1][:80]!r}')
  ended = scene.finish(server.process)
  check(ended.returncode == exit_codes.OK, f'exit code {ended.returncode}: {judge.last_line(ended.stderr)}')
  judge.check_no_traceback(ended.stderr)
  return 'drained, exit code 0'


@kind('serving/a signal while it loads', share=2)
def signal_while_loading(scene: Scene) -> str:
  scene.job = 'Text'
  scene.begun(20, 20)
  signum = scene.rng.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGINT))
  delay = scene.rng.uniform(0, 3)
  scene.where = f'{signum.name} after {delay:.2f} s'
  process = scene.start(*scene.command('serve'), *SIZES, '--port', 0, '--drain_s', 1)
  scene.send_after(process, signum, delay)
  ended = scene.finish(process)
  judge.check_no_traceback(ended.stderr)
  check(ended.returncode in judge.CODES_AFTER[signum], f'exit code {ended.returncode} after {signum.name}')
  return f'exit code {ended.returncode}'


@kind('serving/a damaged checkpoint', share=2)
def damaged_checkpoint(scene: Scene) -> str:
  """At the start it is skipped or refused; at a publish the server keeps what it serves."""
  server = Server(scene)
  path = scene.rng.choice(damage.files_of(scene, 20))
  name = scene.rng.choice(('one bit', 'emptied', 'deleted', 'garbage', 'truncated'))
  damage.DAMAGES[name](path, scene.rng)
  scene.where = f'{name}: {path.relative_to(scene.checkpoints)}'
  before = sorted(each.name for each in scene.checkpoints.iterdir())
  response = server.post({'step': 20}, '/admin/publish')
  check(response.status_code == 409, f'publish of the damaged step is answered {response.status_code}')
  check(server.complete() == server.answer, 'after a refused publish the answers are others')
  response = server.post({'step': 15}, '/admin/publish')
  check(
    response.status_code == 200, f'publish of a whole step is answered {response.status_code}: {response.text[:80]}'
  )
  check(sorted(each.name for each in scene.checkpoints.iterdir()) == before, 'the server has renamed something')
  judge.check_no_traceback(server.process.stderr)
  server.stop()
  return 'refused with 409; a whole step was published'


# --- a server of two processes ---


class PairServer:
  """A server of two processes of the job `PairText`."""

  def __init__(self, scene: Scene):
    scene.job = 'PairText'
    scene.begun(20, 20)
    key = scene.path / 'key'
    key.write_text(KEY)
    self.pair = Pair(scene, *SIZES, '--port', 0, '--drain_s', 5, '--api_key_file', key, mode='serve')
    self.scene = scene

  @property
  def url(self) -> str:
    """Where it serves; waits until it does."""
    return url_of(self.scene, self.pair.ranks[0])

  def complete(self) -> str:
    response = httpx.post(self.url + COMPLETIONS, json=BODY, headers=HEADERS, timeout=60)
    check(response.status_code == 200, f'a good request is answered {response.status_code}')
    return response.json()['choices'][0]['text']


@kind('processes/a server loses one', share=3)
def server_loses_one(scene: Scene) -> str:
  """Streams end with an error, both processes end in seconds; a new server gives the same answer."""
  server = PairServer(scene)
  answer = server.complete()
  rank = scene.rng.choice((0, 1, 1))
  signum = scene.rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV))
  delay = scene.rng.uniform(0, 0.3)
  scene.where = f'{signum.name} to process {rank}'
  rest: list[str] = []
  with contextlib.suppress(httpx.TransportError), stream(server.url) as response:
    lines = response.iter_lines()
    rest = [next(lines)]
    time.sleep(delay)
    server.pair.ranks[rank].send(signum)
    rest += [line for line in lines if line]
  ended = server.pair.finish()
  codes = [each.returncode for each in ended]
  if signum == signal.SIGTERM:
    check(codes == [exit_codes.OK] * 2, f'exit codes {codes} after SIGTERM')
    check(rest[-1] == 'data: [DONE]', f'the stream ended with {rest[-1][:80]!r}')
  else:
    check_ends(ended, signalled={rank: signum})
    if rank == 1 and rest:
      told = 'error' in ''.join(rest[-3:]) or any('finish_reason": "' in line for line in rest)
      check(told, f'the stream ended with {rest[-1][:80]!r}')
  shutil.rmtree(scene.job_log_dir)
  again = PairServer(scene)
  check(again.complete() == answer, 'the same request has another answer after the restart')
  for each in again.pair.ranks:
    each.send(signal.SIGTERM)
  codes_again = [each.returncode for each in again.pair.finish()]
  check(codes_again == [exit_codes.OK] * 2, f'after SIGTERM the servers ended with {codes_again}')
  return f'exit codes {codes}; the same answer after the restart'
