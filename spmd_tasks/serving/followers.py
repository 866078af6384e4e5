"""Followers: the other processes of a serving job, as process 0 sees them.

    followers = Followers(links, leave=leave)
    followers.send('step', keep)       # to all; see following.py for what they make of it
    followers.lost.done()              # whether one of them is gone
    followers.end(0)

How one ends is seen by its link, at once: a process that fails says why before it closes it, and the kernel closes that
of one that is killed. A machine that vanishes is found by JAX's heartbeats.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
import contextlib
import threading
import time
from typing import Any

from spmd_tasks.errors import JobError
from spmd_tasks.serving.process_link import Link, to_line

# From the loss of a process: to tell the streams, and to end in order.
_LOST_LIMIT_S = 20.0
_RESET_LIMIT_S = 60.0  # for the others to end what runs, and to empty their slots
_FAREWELL_LIMIT_S = 5.0  # for the others to say why they leave, before the coordination service ends with process 0


class PeerFailedError(JobError):
  """Another process has ended or failed; the message says which, and what it said."""


class Followers:
  """All other processes, as process 0 sees them.

  Attributes:
    stop: set when the server shall end, because a process got a signal or is lost.
    lost: raises the PeerFailedError once there is one.
  """

  def __init__(self, links: Sequence[Link], *, leave: Callable[[str], object]):
    """Watches the links from now on.

    Args:
      links: one for each of them.
      leave: ends this process, if it has not ended 20 s after another was lost.
    """
    self.stop = threading.Event()
    self.lost: Future[Any] = Future()
    self._links = links
    self._leave = leave
    self._is_over = threading.Event()
    self._num_reset = threading.Semaphore(0)
    self._lock = threading.Lock()
    # Guarded by _lock:
    self._num_sent = 0
    self._is_ending = False
    self._threads = [threading.Thread(target=self._watch, args=(link,), daemon=True) for link in links]
    for thread in self._threads:
      thread.start()

  def send(self, name: str, *arguments: Any) -> None:
    """Has every process run an operation after those that were sent before."""
    with self._lock:
      self._send({'number': self._num_sent, 'name': name, 'arguments': arguments})
      self._num_sent += 1

  def await_reset(self) -> None:
    """Waits until every process has done the reset that was sent.

    Raises:
      PeerFailedError: one has not, because something that process 0 asked for and did not run itself holds it up.
    """
    end = time.monotonic() + _RESET_LIMIT_S
    for _ in self._links:
      if not self._num_reset.acquire(timeout=max(0.0, end - time.monotonic())):
        error = PeerFailedError(
          f'a failure was of process 0 alone: within {_RESET_LIMIT_S:g} s not every other process had emptied its slots'
        )
        self._lose(error)
        raise error

  def end(self, code: int) -> None:
    """Has every process end with this exit code, when all that was sent before is done."""
    with self._lock:
      self._is_ending = True
      self._send({'number': self._num_sent, 'name': 'end', 'arguments': [code]})
    self._close()

  def dismiss(self, code: int, reason: str) -> None:
    """Has every process leave at once, whatever it does, and waits some seconds until they have."""
    with self._lock:
      self._is_ending = True
      self._send({'leave': code, 'reason': reason})
    self._close()

  def _send(self, message: dict[str, Any]) -> None:
    line = to_line(message)
    for link in self._links:
      with contextlib.suppress(OSError):  # a closed link is noticed by who watches it
        link.send(line)

  def _close(self) -> None:
    self._is_over.set()
    end = time.monotonic() + _FAREWELL_LIMIT_S
    for thread in self._threads:
      thread.join(max(0.0, end - time.monotonic()))
    for link in self._links:
      link.close()

  def _watch(self, link: Link) -> None:
    reason = 'is gone: it was killed, or its log says why it ended'
    for message in link:
      if 'signal' in message:
        self.stop.set()
      elif 'reset' in message:
        self._num_reset.release()
      else:
        reason = f'failed: {message["error"]}'
    self._lose(PeerFailedError(f'process {link.process_index} of {len(self._links) + 1} {reason}'))

  def _lose(self, error: PeerFailedError) -> None:
    with self._lock:
      if self._is_ending:
        return
      if not self.lost.done():
        self.lost.set_exception(error)
    self.stop.set()
    if not self._is_over.wait(_LOST_LIMIT_S):
      self._leave(str(error))
