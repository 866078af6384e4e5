"""Links: JSON messages over TCP between process 0 and every other process of a serving job.

    links = connect_processes(limit_s=600)    # process 0: one link to each other process; others: one to process 0
    links[0].send(to_line({'name': 'step', 'arguments': []}))
    for message in links[0]:                  # until the other end closes
      ...

One message is one line. Unlike a collective, a read from a link may wait without a limit and without cost. The kernel
closes the link of a process that ends, in whatever way, and the other end notices at once.

Security: process 0 listens on the coordinator's address, and only until all processes have connected. It admits
connections that know a secret, which the job's own collectives distribute. A message is data, never a pickle. Nothing
is encrypted (neither is JAX's own traffic): the network between the processes must be private to the job.
"""

from collections.abc import Iterator, Mapping
import contextlib
import json
import secrets
import socket
import time
from typing import Any

from absl import logging
import jax

from spmd_tasks.decoding import Chunk, Request, SamplingParams
from spmd_tasks.distributed import PrimaryError, coordinator_host, primary_decides
from spmd_tasks.errors import JobError, UserError

# What a message may contain beside JSON's own types.
_TYPES = {'Chunk': Chunk, 'Request': Request, 'SamplingParams': SamplingParams}
_CONNECT_LIMIT_S = 60.0  # from the distribution of the secret until all processes have connected
_GREETING_LIMIT_S = 2.0
_MAX_GREETING_BYTES = 1024


def to_line(message: Mapping[str, Any]) -> bytes:
  """Encodes a message for `Link.send`."""
  return json.dumps(message, default=_to_json).encode() + b'\n'


class Link:
  """A connection to one other process.

  Attributes:
    process_index: the index of that process.
  """

  def __init__(self, sock: socket.socket, process_index: int):
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send each message at once, without waiting for ACKs
    self.process_index = process_index
    self._sock = sock
    self._lines = sock.makefile('rb')

  def send(self, line: bytes) -> None:
    """Sends a line made by `to_line`; raises an OSError if the other end is known to be closed."""
    self._sock.sendall(line)

  def __iter__(self) -> Iterator[Any]:
    """Yields the other end's messages until that end closes or dies."""
    with contextlib.suppress(OSError), self._lines:
      for line in self._lines:
        if line.endswith(b'\n'):
          yield json.loads(line, object_hook=_from_json)

  def close(self) -> None:
    """Closes this end; an iteration over the link then ends."""
    with contextlib.suppress(OSError):
      self._sock.shutdown(socket.SHUT_RDWR)
    self._sock.close()


def connect_processes(*, limit_s: int, bind_address: str | None = None) -> list[Link]:
  """Links process 0 with all other processes; every process calls it.

  Args:
    limit_s: how many seconds the processes wait for the slowest one to call it.
    bind_address: HOST:PORT; process 0 listens on HOST, at any free port. None is the coordinator's address.

  Raises:
    UserError: process 0 cannot listen there; raised on every process.
    JobError: a process did not connect.
  """
  bind_host = (bind_address or '').rpartition(':')[0].strip('[]')
  listener: socket.socket | None = None

  def invite() -> list[Any]:
    nonlocal listener
    host = coordinator_host()
    listener = listen_for_processes(bind_host or host, jax.process_count())
    return [host, listener.getsockname()[1], secrets.token_hex(32)]

  try:
    host, port, secret = primary_decides(invite, 'serve_connect', limit_s=limit_s)
  except PrimaryError as error:
    raise UserError(
      f'process 0 cannot listen for the other processes: {error}. Name an address of its host with '
      '--coordinator_bind_address.'
    ) from error
  if listener is None:
    return [join(host, port, secret, jax.process_index())]
  with listener:
    return admit(listener, secret, jax.process_count() - 1)


def listen_for_processes(host: str, num_processes: int) -> socket.socket:
  """Listens on any free port of `host`."""
  family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
  return socket.create_server(address[:2], family=family, backlog=num_processes)


def admit(listener: socket.socket, secret: str, num_others: int) -> list[Link]:
  """Accepts the links of processes 1 to `num_others`, and returns them in that order."""
  links: dict[int, Link] = {}
  end = time.monotonic() + _CONNECT_LIMIT_S
  while len(links) < num_others:
    left = end - time.monotonic()
    try:
      if left <= 0:
        raise TimeoutError  # strangers that keep connecting must not extend the wait
      listener.settimeout(left)
      sock, address = listener.accept()
    except TimeoutError as error:
      missing = ', '.join(str(index) for index in range(1, num_others + 1) if index not in links)
      raise JobError(
        f'process {missing} did not connect to process 0 within {_CONNECT_LIMIT_S:g} s: see its log, and check that '
        'no firewall keeps the processes from reaching each other on any port.'
      ) from error
    index = _greeted(sock, secret)
    if index is None or not 1 <= index <= num_others or index in links:
      logging.warning('closed a connection from %s, which is not a process of this job', address)
      sock.close()
    else:
      links[index] = Link(sock, index)
  return [links[index] for index in sorted(links)]


def join(host: str, port: int, secret: str, process_index: int) -> Link:
  """Connects another process to process 0, and returns the link.

  Raises:
    JobError: process 0 cannot be reached.
  """
  try:
    sock = socket.create_connection((host, port), timeout=_CONNECT_LIMIT_S)
  except OSError as error:
    raise JobError(
      f'process {process_index} cannot connect to process 0 at {host}:{port}: {error}. The processes must reach each '
      "other on any port. If process 0's host resolves this name to another address (such as 127.0.1.1 in "
      '/etc/hosts), name the address to listen on with --coordinator_bind_address.'
    ) from error
  link = Link(sock, 0)
  link.send(to_line({'secret': secret, 'process': process_index}))
  return link


def _greeted(sock: socket.socket, secret: str) -> int | None:
  """Returns the index of the process at the other end; None if that end does not know the secret."""
  line = b''
  end = time.monotonic() + _GREETING_LIMIT_S
  try:
    while not line.endswith(b'\n') and len(line) < _MAX_GREETING_BYTES:
      sock.settimeout(max(0.001, end - time.monotonic()))
      byte = sock.recv(1)  # never a byte past the greeting: later bytes belong to the link
      if not byte:
        break
      line += byte
    greeting = json.loads(line)
    if secrets.compare_digest(greeting['secret'], secret):
      return int(greeting['process'])
  except (OSError, ValueError, TypeError, KeyError, RecursionError):
    pass
  return None


def _to_json(value: Any) -> dict[str, Any]:
  return {'type': type(value).__name__, **vars(value)}


def _from_json(fields: dict[str, Any]) -> Any:
  made = _TYPES.get(fields.get('type', ''))
  if made is None:
    return fields
  return made(
    **{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items() if name != 'type'}
  )
