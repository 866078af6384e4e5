"""connect_processes: makes links (links.py) between processes that prove to each other that they belong to the job.

    links = connect_processes('serve', limit_s=600)   # process 0: one link to each other process; others: one to it
    joined, admitted = connect_pairs('ring', [(0, 1), (1, 2), (2, 0)], limit_s=600)

A secret of 256 random bits reaches the processes by the job's own collectives; neither the coordination service nor a
file or an environment variable holds it. The process that listens sends a nonce; the one that connects answers with its
own nonce and a tag, and gets a tag back. A tag is an HMAC of the secret over both nonces and both processes' indices.
Keys for the two directions are derived in the same way, so that no message of one connection is valid in another.

A process listens only until the others have connected. Other hosts that connect meanwhile cannot keep them out.
"""

from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
import contextlib
import dataclasses
import hmac
import secrets
import selectors
import socket
import struct
import time
from typing import Any

from absl import logging
import jax

from spmd_tasks.distributed.agreement import PrimaryError, gather, primary_decides
from spmd_tasks.distributed.initialization import coordinator_host
from spmd_tasks.distributed.links import Link
from spmd_tasks.errors import JobError, UserError

_CONNECT_LIMIT_S = 60.0  # from the distribution of the secret until all processes have connected
_GREETING_LIMIT_S = 2.0
_MAX_UNPROVEN = 256  # connections whose greeting is awaited; the oldest is closed when there are more
_RETRY_S = 0.2
_BACKLOG = 256
_PROTOCOL = b'spmd_tasks link 1'
_NONCE_BYTES = 32
_TAG_BYTES = 32
_GREETING = struct.Struct(f'>I{_NONCE_BYTES}s{_TAG_BYTES}s')  # the index of the process that joins, its nonce, its tag


def connect_processes(
  name: str, *, limit_s: int, bind_address: str | None = None, silence_limit_s: float | None = None
) -> list[Link]:
  """Links process 0 with all other processes; every process calls it.

  Args:
    name: what the links are for; names the barrier.
    limit_s: how many seconds the processes wait for the slowest one to call it.
    bind_address: HOST:PORT; process 0 listens on HOST, at any free port. None is the coordinator's address.
    silence_limit_s: see Link.

  Raises:
    UserError: process 0 cannot listen there; raised on every process.
    JobError: a process did not connect.
  """
  bind_host = (bind_address or '').rpartition(':')[0].strip('[]')
  listener: socket.socket | None = None

  def invite() -> list[Any]:
    nonlocal listener
    host = coordinator_host()
    listener = listen_for_processes(bind_host or host)
    return [host, listener.getsockname()[1], secrets.token_hex(32)]

  try:
    host, port, secret = primary_decides(invite, f'{name}_connect', limit_s=limit_s)
  except PrimaryError as error:
    raise UserError(
      f'process 0 cannot listen for the other processes: {error}. Name an address of its host with '
      '--coordinator_bind_address.'
    ) from error
  if listener is None:
    return [join(host, port, bytes.fromhex(secret), (0, jax.process_index()), silence_limit_s=silence_limit_s)]
  with listener:
    others = range(1, jax.process_count())
    return admit(listener, bytes.fromhex(secret), 0, others, silence_limit_s=silence_limit_s)


def connect_pairs(
  name: str, pairs: Collection[tuple[int, int]], *, limit_s: int
) -> tuple[dict[int, Link], dict[int, Link]]:
  """Links pairs of processes; every process calls it with the same pairs.

  Args:
    name: what the links are for; names the barriers.
    pairs: (the process that connects, the one that listens for it).
    limit_s: how many seconds the processes wait for the slowest one to call it.

  Returns:
    This process's links to those that it connected to, and to those that connected to it, by their indices.

  Raises:
    JobError: a process did not connect.
  """
  own = jax.process_index()
  secret = bytes.fromhex(primary_decides(lambda: secrets.token_hex(32), f'{name}_secret', limit_s=limit_s))
  with listen_for_processes(_own_address()) as listener, ThreadPoolExecutor(1) as pool:
    addresses = gather(listener.getsockname()[:2], f'{name}_addresses', limit_s=limit_s)
    guests = [joins for joins, admits in pairs if admits == own]
    admitted = pool.submit(admit, listener, secret, own, guests)
    joined = {}
    for host, port, admits in [(*addresses[admits], admits) for joins, admits in pairs if joins == own]:
      joined[admits] = join(host, port, secret, (admits, own))
    return joined, dict(zip(guests, admitted.result(), strict=True))


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
  """Accepts a link from each of the processes `others`, and returns the links in that order.

  Args:
    listener: from `listen_for_processes`; the caller closes it.
    secret: random bytes that only the job's processes know.
    process_index: this process.
    others: the indices of the processes that call `join`.
    silence_limit_s: see Link.

  Raises:
    JobError: a process did not connect in time.
  """
  links: dict[int, Link] = {}
  end = time.monotonic() + _CONNECT_LIMIT_S
  with (
    contextlib.closing(_Handshakes(listener, secret, process_index)) as handshakes,
    contextlib.ExitStack() as on_error,
  ):
    while len(links) < len(others):
      if time.monotonic() > end:
        missing = ', '.join(str(index) for index in others if index not in links)
        raise JobError(
          f'process {missing} did not connect to process {process_index} within {_CONNECT_LIMIT_S:g} s: see its log, '
          'and check that no firewall keeps the processes from reaching each other on any port.'
        )
      for sock, handshake in handshakes.completed():
        index = handshake.joins
        if index in others and index not in links:
          with contextlib.suppress(OSError):  # it is gone already, and its link says so
            sock.sendall(handshake.derive('admit'))
          links[index] = on_error.enter_context(contextlib.closing(handshake.link(sock, index, silence_limit_s)))
        else:
          logging.warning('closed a second or unexpected connection of process %d', index)
          sock.close()
    on_error.pop_all()
  return [links[index] for index in others]


def join(host: str, port: int, secret: bytes, ends: tuple[int, int], *, silence_limit_s: float | None = None) -> Link:
  """Connects this process to one that calls `admit`, and returns the link.

  Args:
    host, port: where the other process listens.
    secret: random bytes that only the job's processes know.
    ends: the indices of the other process and of this one.
    silence_limit_s: see Link.

  Raises:
    JobError: the other process cannot be reached, or does not know the secret.
  """
  other, own = ends
  end = time.monotonic() + _CONNECT_LIMIT_S
  while True:
    try:
      sock = socket.create_connection((host, port), timeout=_CONNECT_LIMIT_S)
    except OSError as error:
      raise JobError(
        f'process {own} cannot connect to process {other} at {host}:{port}: {error}. The processes must reach each '
        "other on any port. If that process's host resolves this name to another address (such as 127.0.1.1 in "
        '/etc/hosts), name the address to listen on with --coordinator_bind_address.'
      ) from error
    with contextlib.ExitStack() as on_error:
      on_error.callback(sock.close)
      try:
        handshake = _Handshake(
          secret, other, own, _receive_exactly(sock, _NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
        )
        sock.sendall(_GREETING.pack(own, handshake.join_nonce, handshake.derive('join')))
        tag = _receive_exactly(sock, _TAG_BYTES)
      except OSError as error:  # closed to make room for others, or the secret is wrong
        if time.monotonic() > end:
          raise JobError(f'process {other} at {host}:{port} did not admit process {own}: {error}') from error
        time.sleep(_RETRY_S)
        continue
      if not hmac.compare_digest(tag, handshake.derive('admit')):
        raise JobError(
          f'what listens at {host}:{port} is not process {other} of this job: it does not know the secret.'
        )
      on_error.pop_all()
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


@dataclasses.dataclass
class _Unproven:
  """A connection that has not proved yet that it belongs to the job."""

  address: Any
  nonce: bytes
  end: float
  data: bytes = b''


class _Handshakes:
  """Runs the handshakes of all incoming connections at the same time, so that none delays another."""

  def __init__(self, listener: socket.socket, secret: bytes, process_index: int):
    self._listener = listener
    self._secret = secret
    self._process_index = process_index
    self._unproven: dict[socket.socket, _Unproven] = {}  # the oldest first
    self._selector = selectors.DefaultSelector()
    listener.setblocking(False)
    self._selector.register(listener, selectors.EVENT_READ)

  def completed(self) -> Iterator[tuple[socket.socket, _Handshake]]:
    """Waits for at most 0.1 s, and yields the connections that have proved that they know the secret."""
    for key, _ in self._selector.select(0.1):
      sock = key.fileobj
      assert isinstance(sock, socket.socket)
      with contextlib.suppress(BlockingIOError):
        if sock is self._listener:
          self._accept(*sock.accept())
        elif (handshake := self._read_greeting(sock)) is not None:
          self._forget(sock)
          yield sock, handshake
    for sock, unproven in list(self._unproven.items()):
      if time.monotonic() > unproven.end:
        self._refuse(sock, 'did not say in time who it is')

  def close(self) -> None:
    """Closes the connections whose handshake is not complete."""
    for sock in self._unproven:
      sock.close()
    self._selector.close()

  def _accept(self, sock: socket.socket, address: Any) -> None:
    if len(self._unproven) >= _MAX_UNPROVEN:
      self._refuse(next(iter(self._unproven)), 'did not say who it is while others did')
    unproven = _Unproven(address, secrets.token_bytes(_NONCE_BYTES), time.monotonic() + _GREETING_LIMIT_S)
    sock.setblocking(False)
    self._unproven[sock] = unproven
    self._selector.register(sock, selectors.EVENT_READ)
    with contextlib.suppress(OSError):  # it is gone already, and the next read says so
      sock.sendall(unproven.nonce)

  def _read_greeting(self, sock: socket.socket) -> _Handshake | None:
    """Reads on; returns the handshake once the whole greeting has come and is right."""
    unproven = self._unproven[sock]
    try:
      data = sock.recv(_GREETING.size - len(unproven.data))
    except BlockingIOError:
      return None
    except OSError:
      data = b''
    unproven.data += data
    if not data:
      self._refuse(sock, 'left without saying who it is')
    elif len(unproven.data) == _GREETING.size:
      index, nonce, tag = _GREETING.unpack(unproven.data)
      handshake = _Handshake(self._secret, self._process_index, index, unproven.nonce, nonce)
      if hmac.compare_digest(tag, handshake.derive('join')):
        return handshake
      self._refuse(sock, 'does not know the secret of this job')
    return None

  def _forget(self, sock: socket.socket) -> _Unproven:
    self._selector.unregister(sock)
    return self._unproven.pop(sock)

  def _refuse(self, sock: socket.socket, reason: str) -> None:
    address = self._forget(sock).address
    logging.log_every_n_seconds(logging.WARNING, 'closed a connection from %s, which %s', 1, address, reason)
    sock.close()


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
  data = b''
  while len(data) < count:
    more = sock.recv(count - len(data))
    if not more:
      raise ConnectionResetError('it closed the connection')
    data += more
  return data
