"""Connections that are silent, slow or too many are closed, and nobody else waits for them: real sockets."""

import contextlib
import socket
import time
from urllib.parse import urlsplit

import httpx

from tests.serving.fake_engine import FakeEngine
from tests.serving.served import HELLO, metric, serving, wait_for

GET = b'GET /health HTTP/1.1\r\nHost: localhost\r\n'
POST = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'


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
  'nothing': (b'', b''),
  'half a header': (GET[:-5], b''),
  'a header byte by byte': (b'', GET + b'X-Padding: ' + b'a' * 1000),
  'half a header after an answer': (GET + b'\r\n' + GET, b''),
  'a body that nobody asked for': (GET + b'Content-Length: 1000\r\n\r\n', b'a' * 1000),
  'a body that does not come': (POST + b'Content-Length: 1000\r\n\r\n{', b''),
  'a body byte by byte': (POST + b'Content-Length: 1000\r\n\r\n{', b'a' * 900),
  'a chunked body byte by byte': (POST + b'Transfer-Encoding: chunked\r\n\r\n', b'1\r\na\r\n' * 200),
}


def test_slow_clients_are_given_up(monkeypatch):
  monkeypatch.setattr('spmd_tasks.serving.server._KEEP_ALIVE_S', 1.0)
  with serving(FakeEngine(), header_timeout_s=1.0, body_timeout_s=1.0) as served, contextlib.ExitStack() as stack:
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
    with served.client() as client:
      assert metric(client, 'open_connections') == 1
      assert 'spmd_tasks_closed_connections_total{reason="no_header"}' in client.get('/metrics').text


def test_clients_that_do_not_read_their_answers_are_given_up():
  with (
    serving(FakeEngine(), send_timeout_s=0.4) as served,
    connect(served.url, receive_buffer=4096) as sock,
    served.client() as client,
  ):
    sock.settimeout(0.2)
    with contextlib.suppress(TimeoutError, ConnectionError):
      for _ in range(2000):  # the page of each answer has some KB
        sock.sendall((b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n') * 20)
    wait_for(lambda: 'closed_connections_total{reason="not_read"} 1' in client.get('/metrics').text)
    assert metric(client, 'open_connections') == 1


def test_health_is_answered_while_200_connections_are_silent():
  """They send nothing or half a header; then they are closed."""
  with serving(FakeEngine(), header_timeout_s=2.0) as served, served.client() as kept, contextlib.ExitStack() as stack:
    for number in range(200):
      sock = stack.enter_context(connect(served.url))
      if number % 2:
        with contextlib.suppress(OSError):
          sock.sendall(GET[: number % 40])
      if number % 20 == 0:
        started = time.monotonic()
        assert httpx.get(f'{served.url}/health', timeout=5).status_code == kept.get('/health').status_code == 200
        assert time.monotonic() - started < 2
    assert kept.post('/v1/completions', json=HELLO).status_code == 200
    wait_for(lambda: metric(kept, 'open_connections') == 1)  # within header_timeout_s


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
