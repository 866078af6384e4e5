"""No client can take the server down: random bodies, raw bytes and broken connections over real sockets.

Silent, slow or excess connections are closed, and other clients do not wait for them.
"""

import contextlib
import json
import socket
import time
from urllib.parse import urlsplit

import numpy as np
import pytest

from spmd_tasks.serving.server import listen
from spmd_tasks.serving.settings import ServerSettings
from tests.serving.fake_engine import FakeEngine
from tests.serving.served import metric, serving, wait_for

GET = b'GET /health HTTP/1.1\r\nHost: localhost\r\n'
JSON = b'Content-Type: application/json\r\n'
POST = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n' + JSON


def connect(url, *, receive_buffer=None):
  at = urlsplit(url)
  sock = socket.socket()
  sock.settimeout(5)
  if receive_buffer is not None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
  sock.connect((at.hostname, at.port))
  return sock


def is_closed(sock) -> bool:
  """Whether the server has closed the connection; drops what it has sent."""
  sock.setblocking(False)
  try:
    while sock.recv(65536):
      pass
  except BlockingIOError:
    return False
  except ConnectionResetError:
    pass
  return True


# --- clients that take their time ---

# What a client sends first, and then byte by byte, if anything.
SLOW = {
  'a body that does not come': (POST + b'Content-Length: 1000\r\n\r\n{', b''),
  'a body byte by byte': (POST + b'Content-Length: 1000\r\n\r\n{', b'a' * 900),
  'a chunked body byte by byte': (POST + b'Transfer-Encoding: chunked\r\n\r\n', b'1\r\na\r\n' * 200),
}


def test_slow_bodies_time_out():
  with serving(FakeEngine(), body_timeout_s=1.0) as served, contextlib.ExitStack() as stack:
    started = time.monotonic()
    left = {}
    for name, (first, rest) in SLOW.items():
      sock = stack.enter_context(connect(served.url))
      sock.sendall(first)
      left[name] = (sock, bytearray(rest))
    while left and time.monotonic() < started + 15:
      time.sleep(0.02)
      for name, (sock, rest) in list(left.items()):
        if is_closed(sock):
          del left[name]
        elif rest:
          with contextlib.suppress(OSError):
            sock.send(bytes([rest.pop(0)]))
    assert not left


def test_more_connections_than_allowed_are_answered_503():
  with serving(FakeEngine(), max_connections=3) as served, contextlib.ExitStack() as stack:
    kept = [stack.enter_context(connect(served.url)) for _ in range(3)]
    time.sleep(0.1)
    with connect(served.url) as refused:
      refused.sendall(GET + b'\r\n')
      assert b'HTTP/1.1 503' in refused.recv(1000)
      wait_for(lambda: is_closed(refused))
    kept[0].sendall(GET + b'\r\n')
    assert kept[0].recv(1000).startswith(b'HTTP/1.1 200')


# --- what clients send ---

FIELDS = """
  model prompt messages max_tokens max_completion_tokens n temperature top_p top_k min_p seed stop stop_token_ids stream
  stream_options logprobs top_logprobs echo best_of suffix user tools response_format logit_bias presence_penalty
""".split()  # noqa: SIM905
GOOD = {'model': 'fake.Model', 'prompt': 'abc', 'messages': [{'role': 'user', 'content': 'hi'}], 'max_tokens': 5}


@pytest.fixture(scope='module')
def served():
  with serving(FakeEngine(num_slots=2), max_body_bytes=50_000, body_timeout_s=1.0) as served:
    yield served


def check_alive(served):
  with served.client() as client:
    wait_for(lambda: metric(client, 'active_slots') == 0)  # every slot is given back
    body = {'model': 'fake.Model', 'prompt': [70, 71], 'max_tokens': 4}
    assert client.post('/v1/completions', json=body).json()['choices'][0]['text'] == 'CDCD'
    assert client.get('/health').status_code == client.get('/ready').status_code == 200


def random_value(rng: np.random.Generator, depth: int = 0):
  scalars = [None, True, False, 0, 1, -1, 2**31, 2**70, 0.5, -1e300, 1e308, '', 'a', 'é😀', '\ud800', '\x00', 'x' * 300]
  kind = int(rng.integers(0, 10))
  if kind < 7 or depth > 3:
    return scalars[int(rng.integers(len(scalars)))]
  if kind < 9:
    return [random_value(rng, depth + 1) for _ in range(int(rng.integers(0, 4)))]
  names = [*FIELDS, 'role', 'content', 'type', 'include_usage', '\ud800']
  return {str(rng.choice(names)): random_value(rng, depth + 1) for _ in range(int(rng.integers(0, 4)))}


def test_random_fields_are_served_or_rejected_by_name(served, rng):
  with served.client() as client:
    for number in range(300):
      path = '/v1/completions' if number % 2 else '/v1/chat/completions'
      body = {name: value for name, value in GOOD.items() if name != ('messages' if number % 2 else 'prompt')}
      for _ in range(int(rng.integers(1, 4))):
        body[str(rng.choice(FIELDS))] = random_value(rng)
      response = client.post(path, content=json.dumps(body), headers={'content-type': 'application/json'})
      assert response.status_code in (200, 400, 404, 413), (response.status_code, body, response.text)
      if response.status_code != 200:
        assert response.json()['error']['message']
  check_alive(served)


def test_raw_bytes_instead_of_http(served, rng, caplog):
  post = POST.removesuffix(JSON)
  messages = [
    b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03',  # TLS
    b'GET / HTTP/9.9\r\n\r\n',
    b'GET ' + b'/' * 70_000 + b' HTTP/1.1\r\n\r\n',
    b'GET /%ff%00%zz HTTP/1.1\r\nHost: localhost\r\n\r\n',
    b'GET /../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n',
    b'GET / HTTP/1.1\r\nHost: [::1\r\n\r\n',
    b'GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n',
    post + b'Content-Length: -5\r\n\r\n',
    post + b'Content-Length: 99999999999999999999999\r\nContent-Type: application/json\r\n\r\n',
    post + b'Transfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\nzz\r\n',
    post + b'Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n',
    post + b'Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n',
    *(rng.bytes(int(rng.integers(1, 400))) for _ in range(20)),
  ]
  for message in messages:
    with connect(served.url) as sock:
      sock.sendall(message)
      sock.shutdown(socket.SHUT_WR)
      try:
        answer = sock.recv(65536)
      except ConnectionResetError:
        answer = b''
      assert answer == b'' or answer.startswith(b'HTTP/1.1'), (message[:40], answer[:80])
      assert not answer.startswith(b'HTTP/1.1 5'), (message[:40], answer[:200])
  assert len([record for record in caplog.records if record.name == 'uvicorn.error']) < 4  # not one for each
  check_alive(served)


@pytest.mark.parametrize(
  'header, status',
  [
    (b'Content-Length: %d\r\nTransfer-Encoding: chunked', 400),
    (b'TRANSFER-ENCODING: Chunked\r\ncontent-length: %d', 400),
    (b'Content-Length: %d\r\nContent-Length: 7', 400),
    (b'Transfer-Encoding : chunked\r\nX: %d', 400),
    (b'Transfer-Encoding: chunked\r\nX: %d', 200),
    (b'Host: evil\r\nContent-Length: %d', 400),
  ],
)
def test_ambiguous_lengths_and_hosts_are_rejected(served, header, status):
  """Otherwise a proxy in front may take another place for the begin of the next request."""
  body = json.dumps({'prompt': 'abc', 'max_tokens': 2}).encode()
  body = b'%x\r\n%s\r\n0\r\n\r\n' % (len(body), body)
  with connect(served.url) as sock:
    sock.sendall(POST + header % len(body) + b'\r\n\r\n' + body + b'GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n')
    answer = b''.join(iter(lambda: sock.recv(65536), b''))
  assert answer.startswith(b'HTTP/1.1 %d' % status)
  assert answer.count(b'HTTP/1.1 ') == (2 if status == 200 else 1)  # the next one is answered only where it is known


@pytest.mark.parametrize(
  'host, status',
  [
    *((host, 200) for host in ('localhost', 'LOCALHOST:1', '127.0.0.1:80', '127.8.8.8', '[::1]:80')),
    *((host, 403) for host in ('evil.example', 'localhost.evil', 'localhost:80@evil', '[::1]evil', '10.0.0.1', '')),
  ],
)
def test_a_server_on_localhost_rejects_other_host_names(served, host, status):
  """A page of another site could have its own name resolved to 127.0.0.1 (DNS rebinding)."""
  with served.client() as client:
    assert client.get('/v1/models', headers={'host': host}).status_code == status


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason='no IPv6')
def test_the_ipv6_wildcard_address_accepts_ipv4():
  with listen(ServerSettings(host='::', port=0)) as sock:
    socket.create_connection(('127.0.0.1', sock.getsockname()[1]), timeout=5).close()


def test_connections_that_break_off_at_any_byte(served, rng):
  body = json.dumps({'model': 'fake.Model', 'prompt': 'abc', 'max_tokens': 100, 'stream': True}).encode()
  request = POST + b'Content-Length: %d\r\n\r\n' % len(body) + body
  for number in range(60):
    with connect(served.url) as sock:
      if number % 2:
        sock.sendall(request[: int(rng.integers(1, len(request)))])
      else:
        sock.sendall(request)
        sock.recv(int(rng.integers(1, 2000)))
      if number % 3 == 0:  # reset, rather than an orderly end
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b'\x01\x00\x00\x00\x00\x00\x00\x00')
  check_alive(served)
