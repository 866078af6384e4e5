"""Links: authenticated messages over TCP between processes of a job that prove to each other that they belong to it.

    joined, admitted = connect_pairs('ring', [(0, 1), (1, 2), (2, 0)], limit_s=600)
    link.send(b'any bytes')
    for message in link:      # until the other end closes
      ...

Unlike a collective, a read from a link may wait without cost. The kernel closes the link of a process that ends, in
whatever way, and the other end notices at once; with `silence_limit_s`, a process that is stopped is noticed, too.

Security: a secret of 256 random bits reaches the processes by the job's own collectives; neither the coordination
service nor a file or an environment variable holds it. The process that listens sends a nonce; the one that connects
answers with its own nonce and a tag, and gets a tag back. A tag is an HMAC-SHA256 of the secret over both nonces and
both processes' indices; keys for the two directions are derived in the same way. Every message carries an HMAC over its
number and its bytes: one that is forged, changed, repeated, left out, reordered, or sent back to its sender ends the
link with a LinkError. A message is bytes; never unpickle it. Nothing is encrypted, and neither is JAX's own traffic
(docs/security.md). A process listens only until the others have connected; strangers cannot keep them out meanwhile.
"""

import asyncio
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
import contextlib
import dataclasses
import hmac
from multiprocessing.connection import Connection
import os
import secrets
import socket
import struct
import threading
from typing import NoReturn

from absl import logging
import jax

from spmd_tasks.distributed import roll_call
from spmd_tasks.distributed.agreement import gather
from spmd_tasks.distributed.initialization import coordination
from spmd_tasks.errors import JobError, UserError

_CONNECT_LIMIT_S = 60.0  # from the distribution of the secret until all processes have connected
_GREETING_LIMIT_S = 2.0
_BACKLOG = 256
_MAX_MESSAGE_BYTES = 1 << 30
_PROTOCOL = b'spmd_tasks link 2'
_NONCE_BYTES = _TAG_BYTES = 32
_GREETING = struct.Struct(f'>I{_NONCE_BYTES}s{_TAG_BYTES}s')  # the index of the process that joins, its nonce, its tag


class LinkError(JobError):
  """A link was closed: a message was not what the other process had sent, or none came for too long."""


class Link:
  """An authenticated connection to one other process. One thread reads; any thread may send.

  Attributes:
    process_index: the index of that process.
  """

  def __init__(
    self,
    sock: socket.socket,
    process_index: int,
    *,
    send_key: bytes,
    receive_key: bytes,
    silence_limit_s: float | None = None,
  ):
    """Owns a connected socket from now on.

    Args:
      sock, process_index: the socket, and the process at its other end.
      send_key, receive_key: the keys of the two directions.
      silence_limit_s: seconds without a message, or for one message to be taken, after which the other process counts
        as stopped; None waits for ever. Both ends must have the same limit: each then says often that it is alive.
    """
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send each message at once, without waiting for ACKs
    self.process_index = process_index
    self._sock = sock
    self._connection = Connection(os.dup(sock.fileno()))
    self._silence_limit_s = silence_limit_s
    self._send_key, self._receive_key = send_key, receive_key
    self._num_received = 0
    self._is_closed = threading.Event()
    self._send_lock = threading.Lock()
    self._num_sent = 0  # guarded by _send_lock
    if silence_limit_s is not None:
      limit = struct.pack('ll', int(silence_limit_s), int(silence_limit_s % 1 * 1e6))
      for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)
      threading.Thread(target=self._say_alive, args=(silence_limit_s / 5,), name='link-alive', daemon=True).start()

  def send(self, message: bytes) -> None:
    """Sends a message; not from a signal handler, which may interrupt a send.

    Raises an OSError: the other end is known to be closed, or has not taken the message in time.
    """
    with self._send_lock:
      tag = _tag(self._send_key, self._num_sent, message)
      self._num_sent += 1
      try:
        self._connection.send_bytes(tag + message)
      except OSError:
        self.close()  # a part may have been sent
        raise

  def __iter__(self) -> Iterator[bytes]:
    """Yields what `receive` returns, until that is None."""
    return iter(self.receive, None)

  def receive(self) -> bytes | None:
    """Returns the next message; None if the other end has closed or died, or this end is closed.

    Raises:
      LinkError: what came is not authentic, breaks off within a message, or the other end is silent for too long.
    """
    message = b''  # by which the other end says that it is alive
    while not message:
      try:
        data = self._connection.recv_bytes(_MAX_MESSAGE_BYTES + _TAG_BYTES)
      except (EOFError, ConnectionError):
        return None
      except BlockingIOError:
        self._fail(f'has sent nothing for {self._silence_limit_s:g} s: it is stopped or stuck')
      except OSError as error:
        if self._is_closed.is_set():
          return None
        self._fail(f'is gone: its link broke off at message {self._num_received} ({error})')
      tag, message = data[:_TAG_BYTES], data[_TAG_BYTES:]
      if not hmac.compare_digest(tag, _tag(self._receive_key, self._num_received, message)):
        self._fail(
          f'did not send message {self._num_received} as it came: it was forged, changed, repeated or reordered'
        )
      self._num_received += 1
    return message

  def _fail(self, reason: str) -> NoReturn:
    self.close()
    logging.error('closed the link to process %d: it %s', self.process_index, reason)
    raise LinkError(reason)

  def _say_alive(self, interval_s: float) -> None:
    with contextlib.suppress(OSError):
      while not self._is_closed.wait(interval_s):
        self.send(b'')

  def close(self) -> None:
    """Closes this end; an iteration over the link then ends."""
    self._is_closed.set()
    with contextlib.suppress(OSError):
      self._sock.shutdown(socket.SHUT_RDWR)
    self._sock.close()


def _tag(key: bytes, number: int, message: bytes) -> bytes:
  mac = hmac.new(key, struct.pack('>Q', number), 'sha256')
  mac.update(message)
  return mac.digest()


def connect_pairs(
  name: str,
  pairs: Collection[tuple[int, int]],
  *,
  limit_s: int,
  bind_address: str | None = None,
  silence_limit_s: float | None = None,
) -> tuple[dict[int, Link], dict[int, Link]]:
  """Links pairs of processes; every process calls it with the same pairs.

  Args:
    name: what the links are for; names the barriers.
    pairs: (the process that connects, the one that listens for it).
    limit_s: how many seconds the processes wait for the slowest one to call it.
    bind_address: HOST:PORT; process 0 listens on HOST, at any free port. None is the coordinator's address.
    silence_limit_s: see Link.

  Returns this process's links to those that it connected to, and to those that connected to it, by their indices.

  Raises:
    UserError, JobError: a process cannot listen, raised on every process; or one did not connect.
  """
  own = jax.process_index()
  guests = [joins for joins, admits in pairs if admits == own]
  bind_host = (bind_address or '').rpartition(':')[0].strip('[]') if own == 0 else ''
  with contextlib.ExitStack() as stack:
    said: list[str | int] = []
    if guests:
      try:
        host = coordinator_host() if own == 0 else _own_address()
        listener = stack.enter_context(listen_for_processes(bind_host or host))
        said = [host, listener.getsockname()[1]]
      except (OSError, UserError) as error:
        said = [str(error)]
    rows = gather([secrets.token_hex(32) if own == 0 else '', *said], f'{name}_connect', limit_s=limit_s)
    for process, row in enumerate(rows):
      if len(row) == 2:
        raise UserError(
          f'process {process} cannot listen for the other processes: {row[1]}. Name an address of its host with '
          '--coordinator_bind_address.'
        )
    secret = bytes.fromhex(rows[0][0])
    pool = stack.enter_context(ThreadPoolExecutor(1))
    admitting = guests and pool.submit(admit, listener, secret, own, guests, silence_limit_s=silence_limit_s)
    joined = {
      admits: join(rows[admits][1], rows[admits][2], secret, (admits, own), silence_limit_s=silence_limit_s)
      for joins, admits in pairs
      if joins == own
    }
    return joined, dict(zip(guests, admitting.result(), strict=True)) if admitting else {}


def _own_address() -> str:
  """Returns the address that this host has on the network of process 0."""
  family, _, _, _, address = socket.getaddrinfo(coordinator_host(), 9, type=socket.SOCK_DGRAM)[0]
  with socket.socket(family, socket.SOCK_DGRAM) as probe:
    probe.connect(address)  # of a datagram socket: nothing is sent
    return probe.getsockname()[0]


def listen_for_processes(host: str) -> socket.socket:
  """Listens on any free port of `host`."""
  family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
  return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def admit(
  listener: socket.socket,
  secret: bytes,
  process_index: int,
  others: Collection[int],
  *,
  silence_limit_s: float | None = None,
) -> list[Link]:
  """Accepts a link from each of the processes `others`, which call `join`, and returns the links in that order.

  Args:
    listener: from `listen_for_processes`; the caller closes it.
    secret: random bytes that only the job's processes know.
    process_index, others: this process, and those that call `join`.
    silence_limit_s: see Link.

  Raises a JobError: a process did not connect in time.
  """
  links: dict[int, Link] = {}
  all_here = asyncio.Event()

  async def greet(sock: socket.socket, address: object) -> None:
    """Admits a process that proves that it knows the secret; closes any other connection."""
    loop, nonce = asyncio.get_running_loop(), secrets.token_bytes(_NONCE_BYTES)
    sock.setblocking(False)
    try:
      async with asyncio.timeout(_GREETING_LIMIT_S):
        await loop.sock_sendall(sock, nonce)
        greeting = b''
        while len(greeting) < _GREETING.size:
          if not (more := await loop.sock_recv(sock, _GREETING.size - len(greeting))):
            raise ConnectionError('left without saying who it is')
          greeting += more
        index, join_nonce, tag = _GREETING.unpack(greeting)
        handshake = _Handshake(secret, process_index, index, nonce, join_nonce)
        if not hmac.compare_digest(tag, handshake.derive('join')):
          raise ConnectionError('does not know the secret of this job')
        if index not in others or index in links:
          raise ConnectionError(f'is a second or unexpected connection of process {index}')
        await loop.sock_sendall(sock, handshake.derive('admit'))
      links[index] = handshake.link(sock, index, silence_limit_s)
      if len(links) == len(others):
        all_here.set()
    except BaseException as error:
      sock.close()
      if not isinstance(error, OSError):
        raise
      reason = 'did not say in time who it is' if isinstance(error, TimeoutError) else error
      logging.log_every_n_seconds(logging.WARNING, 'closed a connection from %s, which %s', 1, address, reason)

  async def listen() -> None:
    listener.setblocking(False)
    greetings = set()
    while True:
      try:
        greetings.add(asyncio.create_task(greet(*await asyncio.get_running_loop().sock_accept(listener))))
      except OSError:  # strangers have all files that may be open: they are closed within _GREETING_LIMIT_S
        await asyncio.sleep(0.1)

  async def wait_for_all() -> None:
    listening = asyncio.create_task(listen())
    try:
      await asyncio.wait_for(all_here.wait(), _CONNECT_LIMIT_S)
    finally:
      listening.cancel()

  try:
    asyncio.run(wait_for_all())
  except TimeoutError:
    for link in links.values():
      link.close()
    missing = ', '.join(str(index) for index in others if index not in links)
    raise JobError(
      f'process {missing} did not connect to process {process_index} within {_CONNECT_LIMIT_S:g} s: see its log, '
      'and check that no firewall keeps the processes from reaching each other on any port.'
    ) from None
  return [links[index] for index in others]


def join(host: str, port: int, secret: bytes, ends: tuple[int, int], *, silence_limit_s: float | None = None) -> Link:
  """Connects this process to one that calls `admit` and listens at a host and port; returns the link.

  Args: as of `admit`; `ends` are the indices of the other process and of this one.

  Raises a JobError: the other process cannot be reached, or does not know the secret.
  """
  other, own = ends
  try:
    sock = socket.create_connection((host, port), timeout=_CONNECT_LIMIT_S)
  except OSError as error:
    raise JobError(
      f'process {own} cannot connect to process {other} at {host}:{port}: {error}. The processes must reach each '
      "other on any port. If that process's host resolves this name to another address (such as 127.0.1.1 in "
      '/etc/hosts), name the address to listen on with --coordinator_bind_address.'
    ) from error
  try:
    handshake = _Handshake(secret, other, own, _receive_exactly(sock, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES))
    sock.sendall(_GREETING.pack(own, handshake.join_nonce, handshake.derive('join')))
    tag = _receive_exactly(sock, _TAG_BYTES)
  except OSError as error:
    sock.close()
    raise JobError(f'process {other} at {host}:{port} did not admit process {own}: {error}') from error
  if not hmac.compare_digest(tag, handshake.derive('admit')):
    sock.close()
    raise JobError(f'what listens at {host}:{port} is not process {other} of this job: it does not know the secret.')
  return handshake.link(sock, other, silence_limit_s)


@dataclasses.dataclass(frozen=True)
class _Handshake:
  """One connection's nonces and process indices, which both ends know after their greetings.

  Fields:
    secret: of the job.
    admits, joins: the indices of the process that listens and of the one that connects.
    admit_nonce, join_nonce: theirs.
  """

  secret: bytes
  admits: int
  joins: int
  admit_nonce: bytes
  join_nonce: bytes

  def derive(self, purpose: str) -> bytes:
    """Derives a tag or a key for one purpose on this connection."""
    ends = struct.pack('>II', self.admits, self.joins)
    parts = (_PROTOCOL, ends, self.admit_nonce, self.join_nonce, purpose.encode())
    return hmac.digest(self.secret, b''.join(parts), 'sha256')

  def link(self, sock: socket.socket, other: int, silence_limit_s: float | None) -> Link:
    """Makes the link to process `other`."""
    keys = {self.admits: self.derive('from admit'), self.joins: self.derive('from join')}
    receive_key = keys.pop(other)
    (send_key,) = keys.values()
    return Link(sock, other, send_key=send_key, receive_key=receive_key, silence_limit_s=silence_limit_s)


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
  data = b''
  while len(data) < count:
    more = sock.recv(count - len(data))
    if not more:
      raise ConnectionResetError('it closed the connection')
    data += more
  return data


def coordinator_host() -> str:
  """The host of process 0 as the other processes reach it, in a job of several processes.

  Raises a UserError: a launcher chose the address, and this version of JAX does not tell it.
  """
  address = roll_call.explicit_coordinator or getattr(coordination(), 'coordinator_address', None)
  if address is None:
    raise UserError(
      f'jax {jax.__version__} does not tell the address of process 0, which serving needs: give --coordinator_address, '
      '--num_processes and --process_id.'
    )
  return address.rpartition(':')[0].strip('[]')
