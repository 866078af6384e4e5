"""Links: authenticated messages over TCP between two processes of a job.

    link.send(b'any bytes')
    for message in link:      # until the other end closes
      ...

link_connections.py makes the links.

Unlike a collective, a read from a link may wait without cost. The kernel closes the link of a process that ends, in
whatever way, and the other end notices at once; with `silence_limit_s`, a process that is stopped is noticed, too.

Security: each direction of each connection has a key of its own. Every message carries an HMAC-SHA256 over its number,
its length and its bytes: a message that is forged, changed, repeated, left out, reordered, or sent back to its sender
ends the link with a LinkError. A message is bytes; never unpickle it. Nothing is encrypted, and neither is JAX's own
traffic (docs/security.md).
"""

from collections.abc import Iterator
import contextlib
import hmac
import socket
import struct
import threading
from typing import NoReturn

from absl import logging

from spmd_tasks.errors import JobError

_MAX_MESSAGE_BYTES = 1 << 30
_MAX_JOINED_BYTES = 1 << 16  # up to here, one copy and one packet are faster than three calls
_FIRST_BYTES = 1 << 20
_TAG_BYTES = 32
_LENGTH = struct.Struct('>Q')
_NUMBER_AND_LENGTH = struct.Struct('>QQ')


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
    max_message_bytes: int = _MAX_MESSAGE_BYTES,
  ):
    """Owns a connected socket from now on.

    Args:
      sock: the socket.
      process_index: the process at the other end.
      send_key, receive_key: the keys of the two directions.
      silence_limit_s: seconds without a message, or for one message to be taken, after which the other process counts
        as stopped; None waits for ever. Both ends must have the same limit: each then says often that it is alive.
      max_message_bytes: the longest message in either direction.
    """
    sock.settimeout(silence_limit_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send each message at once, without waiting for ACKs
    self.process_index = process_index
    self._sock = sock
    self._silence_limit_s = silence_limit_s
    self._max_message_bytes = max_message_bytes
    self._send_mac = hmac.new(send_key, digestmod='sha256')
    self._receive_mac = hmac.new(receive_key, digestmod='sha256')
    self._num_received = 0
    self._is_closed = threading.Event()
    self._send_lock = threading.Lock()
    self._num_sent = 0  # guarded by _send_lock
    if silence_limit_s is not None:
      threading.Thread(target=self._say_alive, args=(silence_limit_s / 5,), name='link-alive', daemon=True).start()

  def send(self, message: bytes | bytearray | memoryview) -> None:
    """Sends a message; not from a signal handler, which may interrupt a send.

    Raises:
      OSError: the other end is known to be closed, or has not taken the message in time.
      ValueError: the message is too long.
    """
    length = memoryview(message).nbytes
    if length > self._max_message_bytes:
      raise ValueError(f'a message of {length} bytes is longer than {self._max_message_bytes}: send it in parts.')
    with self._send_lock:
      tag = _tag(self._send_mac, self._num_sent, message, length)
      self._num_sent += 1
      try:
        if length <= _MAX_JOINED_BYTES:
          self._sock.sendall(b''.join((_LENGTH.pack(length), message, tag)))
        else:
          for part in (_LENGTH.pack(length), message, tag):
            self._sock.sendall(part)
      except OSError:
        self.close()  # a part may have been sent
        raise

  def __iter__(self) -> Iterator[bytearray]:
    """Yields the other end's messages until that end closes or dies, or this end is closed.

    Raises:
      LinkError: what came is not authentic, breaks off within a message, or the other end is silent for too long.
    """
    while (message := self.receive()) is not None:
      yield message

  def receive(self) -> bytearray | None:
    """Returns the next message; None if the other end has closed or died, or this end is closed.

    Raises:
      LinkError: as `__iter__`.
    """
    while True:
      try:
        message = self._receive()
      except TimeoutError:
        self._fail(f'has sent nothing for {self._silence_limit_s:g} s: it is stopped or stuck')
      except OSError:
        return None
      if message is None or message:
        return message

  def _receive(self) -> bytearray | None:
    header = self._receive_bytes(_LENGTH.size, may_end=True)
    if header is None:
      return None
    (length,) = _LENGTH.unpack(header)
    if length > self._max_message_bytes:
      self._fail(f'claims a message of {length} bytes, more than {self._max_message_bytes}')
    message = self._receive_bytes(length)
    tag = self._receive_bytes(_TAG_BYTES)
    if message is None or tag is None:
      return None
    if not hmac.compare_digest(tag, _tag(self._receive_mac, self._num_received, message, length)):
      self._fail(f'did not send message {self._num_received} as it came: it was forged, changed, repeated or reordered')
    self._num_received += 1
    return message

  def _receive_bytes(self, count: int, *, may_end: bool = False) -> bytearray | None:
    data = bytearray(min(count, _FIRST_BYTES))
    filled = 0
    while filled < count:
      if filled == len(data):  # memory grows with what came, not with what is claimed
        data += bytes(min(filled, count - filled))
      with memoryview(data) as view:
        num_read = self._sock.recv_into(view[filled:])
      if not num_read:
        if self._is_closed.is_set() or (may_end and not filled):
          return None
        self._fail(f'is gone: its link broke off within message {self._num_received}')
      filled += num_read
    return data

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


def _tag(keyed: 'hmac.HMAC', number: int, message: bytes | bytearray | memoryview, length: int) -> bytes:
  mac = keyed.copy()
  mac.update(_NUMBER_AND_LENGTH.pack(number, length))
  mac.update(message)
  return mac.digest()
