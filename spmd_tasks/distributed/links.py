"""Links: authenticated messages over TCP between two processes of a job.

    link.send(b'any bytes')
    for message in link:      # until the other end closes
      ...

link_connections.py makes the links.

Unlike a collective, a read from a link may wait without cost. The kernel closes the link of a process that ends, in
whatever way, and the other end notices at once; with `silence_limit_s`, a process that is stopped is noticed, too.

Security: each direction of each connection has a key of its own. Every message carries an HMAC-SHA256 over its number
and its bytes: a message that is forged, changed, repeated, left out, reordered, or sent back to its sender ends the
link with a LinkError. A message is bytes; never unpickle it. Nothing is encrypted, and neither is JAX's own traffic
(docs/security.md).
"""

from collections.abc import Iterator
import contextlib
import hmac
from multiprocessing.connection import Connection
import os
import socket
import struct
import threading
from typing import NoReturn

from absl import logging

from spmd_tasks.errors import JobError

_MAX_MESSAGE_BYTES = 1 << 30
_TAG_BYTES = 32


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
      sock: the socket.
      process_index: the process at the other end.
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

    Raises:
      OSError: the other end is known to be closed, or has not taken the message in time.
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
    """Yields the other end's messages until that end closes or dies, or this end is closed.

    Raises:
      LinkError: what came is not authentic, breaks off within a message, or the other end is silent for too long.
    """
    return iter(self.receive, None)

  def receive(self) -> bytes | None:
    """Returns the next message; None if the other end has closed or died, or this end is closed.

    Raises:
      LinkError: as `__iter__`.
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
