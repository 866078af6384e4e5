"""Faults of servers: hostile, broken and slow clients, signals, damaged checkpoints, two processes.

One server is shared by the faults of clients. After each it must be well, give the same answer as before, have no
connection or thread more than before, and have logged no traceback.
"""

from collections.abc import Iterator
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
  """A running server of the newest checkpoint of the job `Text`."""

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
    """Returns the bytes of a request, header and body, whose answer is a long stream."""
    body = json.dumps({'model': self.model} | LONG).encode()
    head = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
    return head + b'Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n' % (KEY.encode(), len(body)), body

  def check_well(self, log_before: str) -> None:
    """Checks that the server is healthy, gives the same answer, and soon has few connections and threads."""
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
    end = time.monotonic() + 60  # half a header may stay for a while
    while True:
      descriptors, threads = self.resources()
      blocks = re.search(r'^spmd_tasks_used_cache_blocks (\S+)$', self.get('/metrics').text, re.MULTILINE)[1]
      if descriptors <= self.num_descriptors + 1 and threads <= self.num_threads + 2 and float(blocks) == 0:
        return
      if time.monotonic() > end:
        counts = f'descriptors {self.num_descriptors} -> {descriptors}, threads {self.num_threads} -> {threads}'
        check(False, f'{counts}, used blocks {blocks}')
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
  """Yields the campaign's server, and checks it before and after the body."""
  with scene.campaign_server(Server) as server:
    log_before = server.process.stderr
    yield server
    server.check_well(log_before)


@kind('serving/hostile clients', share=12)
def hostile_clients(scene: Scene) -> str:
  """Clients disconnect at any byte, stop sending, or send garbage; tests/serving tests them one by one."""
  rng = scene.rng
  with shared(scene) as server, contextlib.ExitStack() as stack:
    head, body = server.long_request()
    request, num_clients = head + body, rng.randrange(5, 80)
    kinds = rng.sample(('leaves', 'resets', 'is silent', 'garbage', 'mutated'), 2)
    scene.where = f'{num_clients} clients: {" or ".join(kinds)}'
    for _ in range(num_clients):
      name = rng.choice(kinds)
      with contextlib.suppress(OSError):  # refused: also an answer
        sock = stack.enter_context(server.connect())
        if name == 'is silent':
          sock.sendall(request[: rng.randrange(len(head) + 5)])
          continue
        if name == 'garbage':
          sock.sendall(rng.randbytes(rng.randrange(1, 3000)))
        elif name == 'mutated':
          data = bytearray(request)
          for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
          sock.sendall(data)
        else:
          sock.sendall(request[: rng.randrange(1, len(request) + 1)])
        if name in ('garbage', 'mutated'):
          sock.shutdown(socket.SHUT_WR)
          answer = sock.recv(65536)
          check(not answer.startswith(b'HTTP/1.1 5'), f'a client that sends {name} is answered {answer[:40]!r}')
        elif name == 'resets':
          sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\x01\x00\x00\x00\x00\x00\x00\x00')
        sock.close()
    server.complete()
  return 'a good client was answered; the server is as before'


def stream(url: str) -> contextlib.AbstractContextManager[httpx.Response]:
  """Yields a long answer of the server while it arrives."""
  return httpx.stream('POST', url + COMPLETIONS, json=LONG, headers=HEADERS, timeout=60)


@kind('serving/SIGTERM while it streams', share=2)
def sigterm_while_streaming(scene: Scene) -> str:
  """Running requests end or get an error, and the exit code is 0."""
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
  """A damaged checkpoint is skipped or refused at the start; at a publish the server keeps its weights."""
  server = Server(scene)
  path = scene.rng.choice(damage.files_of(scene, 20))
  name = scene.rng.choice(('one bit', 'emptied', 'deleted', 'garbage', 'truncated'))
  damage.DAMAGES[name](path, scene.rng)
  scene.where = f'{name}: {path.relative_to(scene.checkpoints)}'
  before = sorted(path.name for path in scene.checkpoints.iterdir())
  response = server.post({'step': 20}, '/admin/publish')
  check(response.status_code == 409, f'publish of the damaged step is answered {response.status_code}')
  check(server.complete() == server.answer, 'after a refused publish the answers are others')
  response = server.post({'step': 15}, '/admin/publish')
  check(
    response.status_code == 200, f'publish of a whole step is answered {response.status_code}: {response.text[:80]}'
  )
  check(sorted(path.name for path in scene.checkpoints.iterdir()) == before, 'the server has renamed something')
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
    """Waits until the server runs; returns its address."""
    return url_of(self.scene, self.pair.ranks[0])

  def complete(self) -> str:
    response = httpx.post(self.url + COMPLETIONS, json=BODY, headers=HEADERS, timeout=60)
    check(response.status_code == 200, f'a good request is answered {response.status_code}')
    return response.json()['choices'][0]['text']


@kind('processes/a server loses one', share=3)
def server_loses_one(scene: Scene) -> str:
  """Streams end with an error, both processes end within seconds, and a new server gives the same answer."""
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
  codes = [result.returncode for result in ended]
  if signum == signal.SIGTERM:
    check(codes == [exit_codes.OK] * 2, f'exit codes {codes} after SIGTERM')
    check(rest[-1] == 'data: [DONE]', f'the stream ended with {rest[-1][:80]!r}')
  else:
    check_ends(ended, signalled={rank: signum})
    if rank == 1 and rest:
      has_end = 'error' in ''.join(rest[-3:]) or any('finish_reason": "' in line for line in rest)
      check(has_end, f'the stream ended with {rest[-1][:80]!r}')
  shutil.rmtree(scene.job_log_dir)
  again = PairServer(scene)
  check(again.complete() == answer, 'the same request has another answer after the restart')
  for rank in again.pair.ranks:
    rank.send(signal.SIGTERM)
  codes_again = [result.returncode for result in again.pair.finish()]
  check(codes_again == [exit_codes.OK] * 2, f'after SIGTERM the servers ended with {codes_again}')
  return f'exit codes {codes}; the same answer after the restart'
