"""Links: messages over TCP between process 0 and the other processes of a job, by `multiprocessing.connection`.

    links = connect_to_primary(limit_s=600)   # every process calls it; process 0 gets a link to each other process
    links[0].send(b'any bytes')
    for message in links[0]:                  # until the other end closes
      ...

Unlike a collective, a read from a link may wait without cost. When a process ends, even by kill -9, the kernel closes
its link and the other end notices at once; `silence_limit_s` also detects a suspended process.

Security: a connection needs a secret of 256 random bits, which the processes exchange by a collective
(`multiprocessing.connection` proves it by HMAC). Messages are bytes, never pickles. Like JAX's own traffic they are
neither encrypted nor authenticated individually (docs/security.md).
"""

from collections.abc import Iterator
import contextlib
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
import os
import queue
import secrets
import socket
import struct
import threading
import time
from typing import Any, NoReturn

from absl import logging
import jax

from spmd_tasks.distributed.agreement import gather
from spmd_tasks.distributed.initialization import coordination
from spmd_tasks.errors import JobError, UserError

_CONNECT_LIMIT_S = 60.0  # from the exchange of the secret until all processes have connected
_GREETING_LIMIT_S = 2.0  # for a connection to authenticate itself
_BACKLOG = 256
_MAX_MESSAGE_BYTES = 1 << 30


class LinkError(JobError):
  """A link was closed: a message was cut off, or none arrived for too long."""


class Link:
  """A connection to one other process. One thread reads; any thread may send.

  Args:
    connection: an authenticated connection, which the link owns.
    process_index: the index of the process at the other end.
    silence_limit_s: seconds without a message, or for sending one message, after which the other process counts as
      stopped; None waits forever. Both ends need the same limit, as each sends empty messages more often than that.
  """

  def __init__(self, connection: Connection, process_index: int, *, silence_limit_s: float | None = None):
    self.process_index = process_index
    self._connection = connection
    self._silence_limit_s = silence_limit_s
    self._num_received = 0
    self._is_closed = threading.Event()
    self._send_lock = threading.Lock()
    self._sock = socket.socket(fileno=os.dup(connection.fileno()))
    # Otherwise a message waits for the acknowledgement of the previous one.
    self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _set_timeout(self._sock, silence_limit_s or 0.0)
    if silence_limit_s is not None:
      threading.Thread(target=self._send_heartbeats, args=(silence_limit_s / 5,), name='link', daemon=True).start()

  def send(self, message: bytes) -> None:
    """Sends a message. Do not call this from a signal handler, which may interrupt a send.

    Raises an OSError: the other end is closed, or has not received the message in time.
    """
    with self._send_lock:
      try:
        self._connection.send_bytes(message)
      except OSError:
        self.close()  # a part may have been sent
        raise

  def __iter__(self) -> Iterator[bytes]:
    """Yields messages until the other end closes."""
    return iter(self.receive, None)

  def receive(self) -> bytes | None:
    """Returns the next message; None if the other end has closed or died, or this end is closed.

    Raises:
      LinkError: a message is cut off, or the other end is silent for too long.
    """
    message = b''  # a heartbeat
    while not message:
      try:
        message = self._connection.recv_bytes(_MAX_MESSAGE_BYTES)
      except (EOFError, ConnectionError):
        return None
      except BlockingIOError:
        self._fail(f'has sent nothing for {self._silence_limit_s:g} s: it is stopped or stuck')
      except OSError as error:
        if self._is_closed.is_set():
          return None
        self._fail(f'has ended: its message {self._num_received} was cut off ({error})')
    self._num_received += 1
    return message

  def _fail(self, reason: str) -> NoReturn:
    self.close()
    logging.error('closed the link to process %d: it %s', self.process_index, reason)
    raise LinkError(reason)

  def _send_heartbeats(self, interval_s: float) -> None:
    with contextlib.suppress(OSError):
      while not self._is_closed.wait(interval_s):
        self.send(b'')

  def close(self) -> None:
    """Closes this end; an iteration over the link then ends."""
    self._is_closed.set()
    with contextlib.suppress(OSError):
      self._sock.shutdown(socket.SHUT_RDWR)
    self._sock.close()


def connect_to_primary(
  *, limit_s: int, bind_address: str | None = None, silence_limit_s: float | None = None
) -> list[Link]:
  """Links every other process with process 0. A collective call.

  Args:
    limit_s: how many seconds a process waits for the slowest process to call this.
    bind_address: HOST:PORT; process 0 listens on HOST, at any free port. Default: the coordinator's address.
    silence_limit_s: see Link.

  Returns on process 0 the links to processes 1, 2, ..., in order; on the others the link to process 0.

  Raises:
    UserError: process 0 cannot listen, raised on every process.
    JobError: a process did not connect.
  """
  with contextlib.ExitStack() as stack:
    offer: dict[str, Any] = {}
    if jax.process_index() == 0:
      host = coordination().coordinator_address.rpartition(':')[0].strip('[]')
      try:
        listener = stack.enter_context(listen((bind_address or '').rpartition(':')[0].strip('[]') or host))
        offer = {'secret': secrets.token_hex(32), 'host': host, 'port': listener.getsockname()[1]}
      except OSError as error:
        offer = {'error': str(error)}
    offer = gather(offer, 'links_connect', limit_s=limit_s)[0]
    if 'error' in offer:
      raise UserError(
        f'process 0 cannot listen for the other processes: {offer["error"]}. Give an address of its host as '
        '--coordinator_bind_address.'
      )
    secret, host, port = offer['secret'], offer['host'], offer['port']
    key = bytes.fromhex(secret)
    if jax.process_index() == 0:
      return admit(listener, key, jax.process_count() - 1, silence_limit_s=silence_limit_s)
    return [join((host, port), key, jax.process_index(), silence_limit_s=silence_limit_s)]


def listen(host: str) -> socket.socket:
  """Listens on any free port of `host`."""
  family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
  return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def admit(
  listener: socket.socket, secret: bytes, num_others: int, *, silence_limit_s: float | None = None
) -> list[Link]:
  """Accepts a link from each of the processes 1 to `num_others`, which call `join`; returns the links in order.

  Raises a JobError: a process did not connect in time.
  """
  accepted: queue.SimpleQueue[tuple[int, Connection]] = queue.SimpleQueue()

  def greet(sock: socket.socket) -> None:
    connection = _connection(sock)
    try:
      deliver_challenge(connection, secret)
      answer_challenge(connection, secret)
      accepted.put((int.from_bytes(connection.recv_bytes(8), 'big'), connection))
    except (AuthenticationError, AssertionError, EOFError, OSError) as error:
      connection.close()
      logging.log_every_n_seconds(logging.WARNING, 'closed a connection of another program: %s', 1, error)

  links: dict[int, Link] = {}
  end = time.monotonic() + _CONNECT_LIMIT_S
  listener.settimeout(0.05)
  while len(links) < num_others and time.monotonic() < end:
    with contextlib.suppress(TimeoutError, OSError):  # OSError: other programs' connections use all file descriptors
      # In its own thread, because another program may send nothing.
      threading.Thread(target=greet, args=(listener.accept()[0],), name='link-greet', daemon=True).start()
    with contextlib.suppress(queue.Empty):
      index, connection = accepted.get_nowait()
      links[index] = Link(connection, index, silence_limit_s=silence_limit_s)
  if len(links) < num_others:
    for link in links.values():
      link.close()
    missing = ', '.join(str(index) for index in range(1, num_others + 1) if index not in links)
    raise JobError(
      f'process {missing} did not connect to process 0 within {_CONNECT_LIMIT_S:g} s: see its log, and check that the '
      'processes can reach each other on any port.'
    )
  return [links[index] for index in sorted(links)]


def join(address: tuple[str, int], secret: bytes, own: int, *, silence_limit_s: float | None = None) -> Link:
  """Connects process `own` to process 0, which calls `admit`, and returns the link.

  Raises a JobError: process 0 cannot be reached, or has another secret.
  """
  host, port = address
  try:
    connection = _connection(socket.create_connection(address, timeout=_CONNECT_LIMIT_S), limit_s=_CONNECT_LIMIT_S)
    answer_challenge(connection, secret)
    deliver_challenge(connection, secret)
    connection.send_bytes(own.to_bytes(8, 'big'))
  except (AuthenticationError, AssertionError, EOFError, OSError) as error:
    raise JobError(
      f'process {own} cannot connect to process 0 at {host}:{port}: {error or type(error).__name__}. The processes '
      'must reach each other on any port. If the host of process 0 resolves its own name to another address (such as '
      '127.0.1.1 in /etc/hosts), give the address to listen on as --coordinator_bind_address.'
    ) from error
  return Link(connection, 0, silence_limit_s=silence_limit_s)


def _connection(sock: socket.socket, limit_s: float = _GREETING_LIMIT_S) -> Connection:
  """Returns a connection that owns the socket; a read or write that takes longer than `limit_s` raises an OSError."""
  sock.setblocking(True)
  _set_timeout(sock, limit_s)
  return Connection(sock.detach())


def _set_timeout(sock: socket.socket, limit_s: float) -> None:
  """Sets how long a read or a write of the socket may take; 0 is forever."""
  limit = struct.pack('ll', int(limit_s), int(limit_s % 1 * 1e6))
  for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
    sock.setsockopt(socket.SOL_SOCKET, option, limit)
