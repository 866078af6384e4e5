"""Process 0's side: an engine whose calls every process makes, and a watch over the other processes.

    with lead(engine, links, restore=restore, leave=leave) as leader:
      code = run_server(leader, model, settings, sock, restore=leader.restore, restore_pauses=True, stop=leader.stop,
                        leave=leader.leave)
      leader.end(code)

`LeadingEngine` sends each call, numbered, to every other process (follower.py runs it there), and then makes the call
on its own engine. A collective with a dead process may never return, so that a worker thread makes the calls: when
`Followers` sees that a process is lost, the caller gets a PeerFailedError at once and the worker is abandoned.

A link shows the end of its process at once: a failing process sends its reason and then closes the link, and the kernel
closes the link of a killed process. JAX's heartbeats find a machine that vanishes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
import contextlib
import functools
import os
import threading
import time
from typing import Any, NoReturn

import numpy as np

from spmd_tasks import exit_codes
from spmd_tasks.decoding.engine_contract import Engine, Launched, TokenMasks
from spmd_tasks.decoding.requests import Chunk
from spmd_tasks.decoding.step_functions import Outputs
from spmd_tasks.distributed.links import Link, LinkError
from spmd_tasks.errors import JobError
from spmd_tasks.serving.multi_process.messages import from_message, pack_masks, to_message

_LOST_LIMIT_S = 20.0  # from the loss of a process: to tell the clients, and to end in order
_FAREWELL_LIMIT_S = 5.0  # for the others to log why they leave, before the coordination service ends with process 0


class PeerFailedError(JobError):
  """Another process has ended or failed; the message names the process and its reason."""


@contextlib.contextmanager
def lead(
  engine: Engine,
  links: Sequence[Link],
  *,
  restore: Callable[[int | None], tuple[Any, int]],
  leave: Callable[[int, str], object],
) -> Iterator['LeadingEngine']:
  """Leads the other processes while the body runs; the body's last call is `LeadingEngine.end`.

  If the body raises, the other processes leave too.

  Args:
    engine: this process's own engine.
    links: links to all other processes.
    restore: returns a checkpoint's (weights, step) when every process calls it.
    leave: ends this process at once, given an exit code and a reason; called when another process is lost.

  Raises:
    whatever the body raised.
  """
  followers = Followers(links, leave=functools.partial(leave, exit_codes.PEER_FAILED))
  try:
    yield LeadingEngine(engine, followers, restore)
  except BaseException as error:
    lost = followers.lost.exception() if followers.lost.done() else None
    followers.dismiss(exit_codes.PEER_FAILED, str(lost or f'process 0 failed: {type(error).__name__}: {error}'))
    if lost is not None:
      leave(exit_codes.PEER_FAILED, str(lost))
    raise


class LeadingEngine:
  """An Engine (decoding/engine_contract.py) that every process runs.

  Every method raises a PeerFailedError at once when a process is lost.

  Attributes:
    stop: an event, set when the server must end because a process got a signal or is lost.
  """

  def __init__(self, engine: Engine, followers: 'Followers', restore: Callable[[int | None], tuple[Any, int]]):
    """Leads from now on.

    Args:
      engine: this process's own engine.
      followers: all other processes.
      restore: returns a checkpoint's (weights, step) when every process calls it.
    """
    self.stop = followers.stop
    self.num_slots, self.max_len = engine.num_slots, engine.max_len
    self.block_tokens, self.num_blocks, self.num_parts = engine.block_tokens, engine.num_blocks, engine.num_parts
    self.prefill_chunk, self.can_reuse = engine.prefill_chunk, engine.can_reuse
    self.num_drafts, self.has_draft_model = engine.num_drafts, engine.has_draft_model
    self._engine = engine
    self._followers = followers
    self._restore = restore
    self._caller = ThreadPoolExecutor(1, thread_name_prefix='leading-engine')

  @property
  def cache_epoch(self) -> int:
    return self._engine.cache_epoch

  @property
  def weights(self) -> Any:
    """The weights that process 0 holds; `restore` gave the other processes their parts."""
    return self._engine.weights

  @weights.setter
  def weights(self, weights: Any) -> None:
    if weights is None:
      self._followers.send('drop_weights')
    self._engine.weights = weights

  def warm_up(self) -> None:
    self._followers.send('warm_up')
    self._await(self._engine.warm_up)

  def reset(self) -> None:
    """Never empties the slots of all processes: a failed call may have been launched on some of them only."""
    if self._followers.lost.done():
      self._followers.lost.result()
    raise JobError('a step failed, and a server of several processes does not go on after that: start it again.')

  def prefill_shape(self, chunk: Chunk) -> tuple[int, int]:
    return self._engine.prefill_shape(chunk)

  def prefill(
    self, chunks: Sequence[Chunk], *, score_prompts: bool = False, masks: TokenMasks | None = None
  ) -> Launched:
    self._followers.send('prefill', list(chunks), score_prompts, pack_masks(masks))
    call = functools.partial(self._engine.prefill, chunks, score_prompts=score_prompts, masks=masks)
    return _Awaited(self._await, self._await(call))

  def step(
    self,
    keep: np.ndarray,
    masks: TokenMasks | None = None,
    grown: Sequence[tuple[int, int]] = (),
    drafts: Mapping[int, Sequence[int]] | None = None,
  ) -> Launched:
    self._followers.send('step', keep.tolist(), pack_masks(masks), list(grown), list((drafts or {}).items()))
    return _Awaited(self._await, self._await(self._engine.step, keep, masks, grown, drafts))

  def restore(self, step: int | None) -> tuple[Any, int]:
    """Returns a checkpoint's (weights, step), for `weights`; the other processes replace their weights themselves."""
    self._followers.send('restore', step)
    return self._await(self._restore, step)

  def leave(self, code: int) -> NoReturn:
    """Ends every process at once, because process 0 ends in the middle of an operation."""
    self._followers.dismiss(code, 'process 0 ended in the middle of an operation')
    os._exit(code)

  def end(self, code: int) -> None:
    """Makes every other process end with this exit code, after all operations sent so far.

    Raises:
      PeerFailedError: a process is lost.
    """
    if self._followers.lost.done():
      self._followers.lost.result()
    self._followers.end(code)

  def _await(self, call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns or raises what the call does, unless a process is lost first."""
    future = self._caller.submit(call, *arguments)
    lost = self._followers.lost
    wait((future, lost), return_when=FIRST_COMPLETED)
    return lost.result() if lost.done() else future.result()


class _Awaited:
  """Outputs that LeadingEngine's worker thread reads."""

  def __init__(self, await_call: Callable[..., Any], launched: Launched):
    self._await = await_call
    self._launched = launched

  def read(self) -> Outputs:
    return self._await(self._launched.read)


class Followers:
  """All other processes, as process 0 sees them: sends operations to them, and watches for their end.

  Attributes:
    stop: set when the server must end because a process got a signal or is lost.
    lost: a future that raises the PeerFailedError once a process is lost.
  """

  def __init__(self, links: Sequence[Link], *, leave: Callable[[str], object]):
    """Watches the links from now on.

    Args:
      links: one link to each process.
      leave: ends this process, given a reason; called if it still runs 20 s after another process was lost.
    """
    self.stop = threading.Event()
    self.lost: Future[Any] = Future()
    self._links = links
    self._leave = leave
    self._is_over = threading.Event()
    self._lock = threading.Lock()
    # Guarded by _lock:
    self._num_sent = 0
    self._is_ending = False
    self._threads = [threading.Thread(target=self._watch, args=(link,), daemon=True) for link in links]
    for thread in self._threads:
      thread.start()

  def send(self, name: str, *arguments: Any) -> None:
    """Makes every process run an operation, after all operations sent before."""
    with self._lock:
      self._send({'number': self._num_sent, 'name': name, 'arguments': arguments})
      self._num_sent += 1

  def end(self, code: int) -> None:
    """Makes every process end with this exit code, after all operations sent before."""
    with self._lock:
      self._is_ending = True
      self._send({'number': self._num_sent, 'name': 'end', 'arguments': [code]})
    self._close()

  def dismiss(self, code: int, reason: str) -> None:
    """Makes every process leave at once, whatever it is doing; waits at most 5 s for that."""
    with self._lock:
      self._is_ending = True
      self._send({'leave': code, 'reason': reason})
    self._close()

  def _send(self, message: dict[str, Any]) -> None:
    data = to_message(message)
    for link in self._links:
      with contextlib.suppress(OSError):  # the thread that watches the link notices that it is closed
        link.send(data)

  def _close(self) -> None:
    self._is_over.set()
    end = time.monotonic() + _FAREWELL_LIMIT_S
    for thread in self._threads:
      thread.join(max(0.0, end - time.monotonic()))
    for link in self._links:
      link.close()

  def _watch(self, link: Link) -> None:
    reason = 'is gone: it was killed, or its log says why it ended'
    try:
      for message in map(from_message, link):
        if 'signal' in message:
          self.stop.set()
        else:
          reason = f'failed: {message["error"]}'
    except LinkError as error:
      reason = str(error)
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
