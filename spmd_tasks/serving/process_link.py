"""Links: how the processes of a serving job talk to process 0, beside the devices.

    links = connect_processes(limit_s=600)    # on process 0 one to each other process, elsewhere one to process 0
    links[0].send(to_line({'name': 'step', 'arguments': []}))
    for message in links[0]:                  # until the other end is closed
      ...

JSON over TCP, one message per line: to wait costs nothing and has no limit, as it would in a collective, and however a
process ends, its link is closed, which the other end sees at once.

Security: process 0 listens on the coordinator's address only, and only until all have come; it admits who knows a
secret that went over the job's own collectives. A message is data, never a pickle. Nothing is encrypted, as JAX's own
traffic is not: the network between the processes must be the job's.
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
from spmd_tasks.distributed.agreement import PrimaryError, primary_decides
from spmd_tasks.distributed.initialization import coordinator_host
from spmd_tasks.errors import JobError, UserError

_TYPES = {
  'Chunk': Chunk,
  'Request': Request,
  'SamplingParams': SamplingParams,
}  # what a message may hold beside JSON's own types
_CONNECT_LIMIT_S = 60.0  # from the secret's being known until all have come
_GREETING_LIMIT_S = 2.0
_MAX_GREETING_BYTES = 1024


def to_line(message: Mapping[str, Any]) -> bytes:
  """A message as a link sends it."""
  return json.dumps(message, default=_to_json).encode() + b'\n'


class Link:
  """A connection to one other process.

  Attributes:
    process_index: that process.
  """

  def __init__(self, sock: socket.socket, process_index: int):
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # no message waits for another's acknowledgement
    self.process_index = process_index
    self._sock = sock
    self._lines = sock.makefile('rb')

  def send(self, line: bytes) -> None:
    """Sends a message of `to_line`; an OSError if the other end is closed, and that is known already."""
    self._sock.sendall(line)

  def __iter__(self) -> Iterator[Any]:
    """The other end's messages, until it is closed, in whatever way."""
    with contextlib.suppress(OSError), self._lines:
      for line in self._lines:
        if line.endswith(b'\n'):
          yield json.loads(line, object_hook=_from_json)

  def close(self) -> None:
    """Closes this end; who iterates over it comes to an end."""
    with contextlib.suppress(OSError):
      self._sock.shutdown(socket.SHUT_RDWR)
    self._sock.close()


def connect_processes(*, limit_s: int, bind_host: str | None = None) -> list[Link]:
  """Links process 0 with all others; every process calls it.

  Args:
    limit_s: how long the processes wait for the slowest to come here.
    bind_host: what process 0 listens on; None is the coordinator's address.

  Raises:
    UserError: process 0 cannot listen there; on every process.
    RuntimeError: a process did not come.
  """
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
      f'process 0 cannot listen for the other processes: {error}. Name an address of its own by '
      '--coordinator_bind_address.'
    ) from error
  if listener is None:
    return [join(host, port, secret, jax.process_index())]
  with listener:
    return admit(listener, secret, jax.process_count() - 1)


def listen_for_processes(host: str, num_processes: int) -> socket.socket:
  """A socket on any free port of `host`."""
  family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
  return socket.create_server(address[:2], family=family, backlog=num_processes)


def admit(listener: socket.socket, secret: str, num_others: int) -> list[Link]:
  """Process 0's links to processes 1 to `num_others`, in that order."""
  links: dict[int, Link] = {}
  end = time.monotonic() + _CONNECT_LIMIT_S
  while len(links) < num_others:
    left = end - time.monotonic()
    try:
      if left <= 0:
        raise TimeoutError  # also where strangers keep coming
      listener.settimeout(left)
      sock, address = listener.accept()
    except TimeoutError as error:
      missing = ', '.join(str(index) for index in range(1, num_others + 1) if index not in links)
      raise JobError(
        f'process {missing} did not connect to process 0 within {_CONNECT_LIMIT_S:g} s: see its log, and whether a '
        'firewall lets the processes reach each other on any port.'
      ) from error
    index = _greeted(sock, secret)
    if index is None or not 1 <= index <= num_others or index in links:
      logging.warning('a connection from %s that is no process of this job was closed', address)
      sock.close()
    else:
      links[index] = Link(sock, index)
  return [links[index] for index in sorted(links)]


def join(host: str, port: int, secret: str, process_index: int) -> Link:
  """Another process's link to process 0."""
  try:
    sock = socket.create_connection((host, port), timeout=_CONNECT_LIMIT_S)
  except OSError as error:
    raise JobError(
      f'process {process_index} cannot connect to process 0 at {host}:{port}: {error}. The processes must reach each '
      'other on any port; where its host takes this name for another address, such as 127.0.1.1 by /etc/hosts, name '
      'the one to listen on by --coordinator_bind_address.'
    ) from error
  link = Link(sock, 0)
  link.send(to_line({'secret': secret, 'process': process_index}))
  return link


def _greeted(sock: socket.socket, secret: str) -> int | None:
  """The process that is at the other end; None: it does not know the secret."""
  line = b''
  end = time.monotonic() + _GREETING_LIMIT_S
  try:
    while not line.endswith(b'\n') and len(line) < _MAX_GREETING_BYTES:
      sock.settimeout(max(0.001, end - time.monotonic()))
      byte = sock.recv(1)  # not one more than the greeting has: what follows belongs to the link
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
