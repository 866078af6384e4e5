"""connect_pairs: makes links (links.py) between processes that prove to each other that they belong to the job.

    joined, admitted = connect_pairs('ring', [(0, 1), (1, 2), (2, 0)], limit_s=600)

A secret of 256 random bits reaches the processes by the job's own collectives; neither the coordination service nor a
file or an environment variable holds it. The process that listens sends a nonce; the one that connects answers with its
own nonce and a tag, and gets a tag back. A tag is an HMAC of the secret over both nonces and both processes' indices.
Keys for the two directions are derived in the same way, so that no message of one connection is valid in another.

A process listens only until the others have connected. Other hosts that connect meanwhile cannot keep them out.
"""

import asyncio
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
import contextlib
import dataclasses
import hmac
import secrets
import socket
import struct

from absl import logging
import jax

from spmd_tasks.distributed import initialization
from spmd_tasks.distributed.agreement import gather
from spmd_tasks.distributed.links import Link
from spmd_tasks.errors import JobError, UserError

_CONNECT_LIMIT_S = 60.0  # from the distribution of the secret until all processes have connected
_GREETING_LIMIT_S = 2.0
_BACKLOG = 256
_PROTOCOL = b'spmd_tasks link 2'
_NONCE_BYTES = 32
_TAG_BYTES = 32
_GREETING = struct.Struct(f'>I{_NONCE_BYTES}s{_TAG_BYTES}s')  # the index of the process that joins, its nonce, its tag


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

  Returns:
    This process's links to those that it connected to, and to those that connected to it, by their indices.

  Raises:
    UserError: a process cannot listen; raised on every process.
    JobError: a process did not connect.
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

  Raises:
    UserError: a launcher chose the address, and this version of JAX does not tell it.
  """
  address = initialization.explicit_coordinator or getattr(initialization.coordination(), 'coordinator_address', None)
  if address is None:
    raise UserError(
      f'jax {jax.__version__} does not tell the address of process 0, which serving needs: give --coordinator_address, '
      '--num_processes and --process_id.'
    )
  return address.rpartition(':')[0].strip('[]')
