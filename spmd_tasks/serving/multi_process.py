"""Serves a model that spans several processes: process 0 leads, all other processes follow.

    links = connect_to_primary(limit_s=600)   # serving/links.py; every process calls it
    if jax.process_index() == 0:
      with lead(engine, links, restore=restore, leave=leave) as leader:
        code = run_server(leader, ..., stop=leader.stop, leave=leader.leave)
        leader.end(code)
    else:
      code = follow(engine, links[0], restore=restore, leave=leave)

Each process has its shards of the weights and runs its own engine. Process 0 answers HTTP and schedules. Its
`LeadingEngine` sends every call to the other processes as a numbered operation before it makes the call itself, so all
devices run the same programs in the same order. An operation that fails on any process ends the job.

A collective with a dead process may never return. Process 0 therefore makes its calls on a worker thread: when
`Followers` detects a lost process, the caller gets a PeerFailedError at once, and the worker thread is abandoned. A
link (package distributed) reports the end of its process immediately: a failing process sends its reason and closes
the link, and the kernel closes the link of a killed process. JAX's heartbeats detect a machine that disappears.

Messages are JSON with the engine's chunks, requests and sampling settings. They are never pickled, so a message cannot
execute code.
"""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
import contextlib
import functools
import json
import os
import queue
import signal
import threading
import time
import types
from typing import Any, NoReturn

from absl import logging
import numpy as np

from spmd_tasks import exit_codes
from spmd_tasks.checkpoints.manifest import CheckpointChoiceError
from spmd_tasks.decoding import Request, SamplingParams
from spmd_tasks.decoding.engine_contract import Engine, Launched, TokenMasks
from spmd_tasks.decoding.requests import Chunk
from spmd_tasks.distributed.shutdown import is_lost_connection
from spmd_tasks.errors import JobError
from spmd_tasks.serving.links import Link, LinkError
from spmd_tasks.sigterm import ending_signals

_NOTICE_S = 2.0  # for the link of a dead process to close, after a collective failed
_LOST_LIMIT_S = 20.0  # after the loss of a process, to report errors to clients and shut down
_FAREWELL_LIMIT_S = 5.0  # for the others to log why they exit, before the coordination service ends with process 0
_SETTLE_S = 0.5  # without a new operation, before the outputs of the last launch are read
_MAX_REASON_CHARS = 500
_GONE = 'is gone: it was killed, or its log has the reason'
# Classes that a message may contain in addition to JSON types.
_TYPES = {'Chunk': Chunk, 'Request': Request, 'SamplingParams': SamplingParams}


class PeerFailedError(JobError):
  """Another process has exited or failed; the message has its index and the reason."""


# --- process 0 ---


@contextlib.contextmanager
def lead(
  engine: Engine,
  links: Sequence[Link],
  *,
  restore: Callable[[int | None], tuple[Any, int]],
  leave: Callable[[int, str], object],
) -> Iterator['LeadingEngine']:
  """Leads the other processes inside the `with` block; makes them exit if the block raises.

  Args:
    engine: this process's engine.
    links: links to all other processes.
    restore: returns (weights, step) of a checkpoint; every process must call it.
    leave: exits this process at once with an exit code and a reason; called when another process is lost.
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
  """An Engine (decoding/engine_contract.py) that repeats every call on all processes.

  Every method raises a PeerFailedError at once when a process is lost.

  Attributes:
    stop: an event that is set when the server must stop because a process got a signal or is lost.
  """

  def __init__(self, engine: Engine, followers: 'Followers', restore: Callable[[int | None], tuple[Any, int]]):
    self.stop = followers.stop
    self.num_slots, self.max_len = engine.num_slots, engine.max_len
    self.block_tokens, self.num_blocks, self.num_parts = engine.block_tokens, engine.num_blocks, engine.num_parts
    self.prefill_chunk, self.can_reuse = engine.prefill_chunk, engine.can_reuse
    self.num_snapshots = engine.num_snapshots
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
    """Process 0's shards of the weights; `restore` loads the shards of the other processes."""
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
    """Always raises: a failed call may have been launched on some processes only, so slots cannot be reset."""
    if self._followers.lost.done():
      self._followers.lost.result()
    raise JobError('a step failed, and a server of several processes cannot recover from that: restart it.')

  def prefill_shape(self, chunk: Chunk) -> tuple[int, int]:
    return self._engine.prefill_shape(chunk)

  def prefill(
    self, chunks: Sequence[Chunk], *, score_prompts: bool = False, masks: TokenMasks | None = None
  ) -> Launched:
    self._followers.send('prefill', list(chunks), score_prompts, pack_masks(masks))
    return self._launch(functools.partial(self._engine.prefill, chunks, score_prompts=score_prompts, masks=masks))

  def step(
    self,
    keep: np.ndarray,
    masks: TokenMasks | None = None,
    grown: Sequence[tuple[int, int]] = (),
    drafts: Mapping[int, Sequence[int]] | None = None,
  ) -> Launched:
    pairs = list((drafts or {}).items())
    self._followers.send('step', keep.tolist(), pack_masks(masks), list(grown), pairs)
    return self._launch(self._engine.step, keep, masks, grown, drafts)

  def _launch(self, call: Callable[..., Launched], *arguments: Any) -> Any:
    """Launches a call on the worker thread; `read` of the result waits on the worker thread too."""
    return types.SimpleNamespace(read=functools.partial(self._await, self._await(call, *arguments).read))

  def restore(self, step: int | None) -> tuple[Any, int]:
    """Returns (weights, step) of a checkpoint, for `weights`; the other processes set their own weights."""
    self._followers.send('restore', step)
    return self._await(self._restore, step)

  def leave(self, code: int) -> NoReturn:
    """Exits every process at once; for an end of process 0 in the middle of an operation."""
    self._followers.dismiss(code, 'process 0 ended in the middle of an operation')
    os._exit(code)

  def end(self, code: int) -> None:
    """Makes every other process exit with this code after all operations sent so far.

    Raises a PeerFailedError if a process is lost.
    """
    if self._followers.lost.done():
      self._followers.lost.result()
    self._followers.end(code)

  def _await(self, call: Callable[..., Any], *arguments: Any) -> Any:
    """Makes a call on the worker thread; raises a PeerFailedError if a process is lost before it returns."""
    future = self._caller.submit(call, *arguments)
    lost = self._followers.lost
    wait((future, lost), return_when=FIRST_COMPLETED)
    return lost.result() if lost.done() else future.result()


class Followers:
  """Process 0's links to all other processes: sends operations and watches for lost processes.

  Attributes:
    stop: set when the server must stop because a process got a signal or is lost.
    lost: a future that raises the PeerFailedError once a process is lost.
  """

  def __init__(self, links: Sequence[Link], *, leave: Callable[[str], object]):
    """Starts to watch the links; calls `leave` with a reason if this process still runs 20 s after a loss."""
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
    """Sends an operation to every process, to run after all operations sent before."""
    with self._lock:
      self._send(name=name, arguments=arguments)

  def end(self, code: int) -> None:
    """Makes every process exit with this code after all operations sent before."""
    self._close(name='end', arguments=[code])

  def dismiss(self, code: int, reason: str) -> None:
    """Makes every process exit at once; waits at most 5 s."""
    self._close(leave=code, reason=reason)

  def _send(self, **message: Any) -> None:
    data = to_message({'number': self._num_sent, **message})
    self._num_sent += 1
    for link in self._links:
      with contextlib.suppress(OSError):  # the thread that watches the link detects a closed link
        link.send(data)

  def _close(self, **message: Any) -> None:
    with self._lock:
      self._is_ending = True
      self._send(**message)
    self._is_over.set()
    end = time.monotonic() + _FAREWELL_LIMIT_S
    for thread in self._threads:
      thread.join(max(0.0, end - time.monotonic()))
    for link in self._links:
      link.close()

  def _watch(self, link: Link) -> None:
    reason = _GONE
    try:
      for message in map(from_message, link):
        if 'signal' in message:
          self.stop.set()
        else:
          reason = f'failed: {message["error"]}'
    except LinkError as error:
      reason = str(error)
    lost = PeerFailedError(f'process {link.process_index} of {len(self._links) + 1} {reason}')
    with self._lock:
      if self._is_ending:
        return
      if not self.lost.done():
        self.lost.set_exception(lost)
    self.stop.set()
    if not self._is_over.wait(_LOST_LIMIT_S):
      self._leave(str(lost))


# --- the other processes ---


def follow(
  engine: Engine,
  link: Link,
  *,
  restore: Callable[[int | None], tuple[Any, int]],
  leave: Callable[[int, str], object],
) -> int:
  """Runs process 0's operations until process 0 ends the job; returns the exit code.

  Forwards SIGTERM and Ctrl-C to process 0, which shuts the job down. If an operation fails here, reports the error to
  process 0 and raises it.

  Args:
    engine: this process's engine.
    link: the link to process 0.
    restore: see `lead`.
    leave: see `lead`; called on another thread if process 0 orders an exit or is lost.
  """
  operations: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
  is_over = threading.Event()
  receiver = threading.Thread(target=_receive, args=(link, operations, leave, is_over), name='operations', daemon=True)
  receiver.start()
  try:
    _forward_signals(link)
    return _run(engine, operations, restore)
  except BaseException as error:
    if is_lost_connection(error):  # if process 0 is lost, the receiver thread logs that and exits this process
      receiver.join(_NOTICE_S)
    with contextlib.suppress(OSError):
      link.send(to_message({'error': f'{type(error).__name__}: {error}'[:_MAX_REASON_CHARS]}))
    raise
  finally:
    is_over.set()
    link.close()  # process 0 waits for it


def _run(engine: Engine, operations: queue.SimpleQueue, restore: Callable[[int | None], tuple[Any, int]]) -> int:
  """Runs operations until `end`; returns its exit code."""

  def restore_weights(step: int | None) -> None:
    try:
      engine.weights, _ = restore(step)
    except CheckpointChoiceError as error:
      logging.warning('the weights are not replaced: %s', error)

  calls: dict[str, Callable[..., Launched | None]] = {
    'warm_up': engine.warm_up,
    'prefill': lambda chunks, score, masks: engine.prefill(chunks, score_prompts=score, masks=unpack_masks(masks)),
    'step': lambda keep, masks, grown, drafts: engine.step(
      np.array(keep, np.bool_), unpack_masks(masks), grown, dict(drafts)
    ),
    'restore': restore_weights,
    'drop_weights': lambda: setattr(engine, 'weights', None),
  }
  launched: Launched | None = None  # the last launch, which may still fail
  number = 0
  while True:
    try:
      operation = operations.get(timeout=None if launched is None else _SETTLE_S)
    except queue.Empty:
      _settle(launched)
      launched, operation = None, operations.get()
    if operation['number'] != number:
      raise RuntimeError(f'received operation {operation["number"]} instead of {number}: this is a bug.')
    if operation['name'] == 'end':
      return operation['arguments'][0]
    previous, launched = launched, calls[operation['name']](*operation['arguments'])
    _settle(previous)
    number += 1


def _settle(launched: Launched | None) -> None:
  """Reads the outputs of a launch, as process 0 does, to surface its error."""
  if launched is not None:
    launched.read()


def _receive(
  link: Link, operations: queue.SimpleQueue, leave: Callable[[int, str], object], is_over: threading.Event
) -> None:
  reason = _GONE
  try:
    for message in map(from_message, link):
      if 'leave' in message:
        leave(message['leave'], message['reason'])
        return
      operations.put(message)
      if message['name'] == 'end':
        return
  except LinkError as error:
    reason = str(error)
  if not is_over.is_set():  # otherwise this process closed the link itself, and has reported why
    leave(exit_codes.PEER_FAILED, f'process 0 {reason}')


def _forward_signals(link: Link) -> None:
  def send(number: int) -> None:
    with contextlib.suppress(OSError):
      link.send(to_message({'signal': number}))

  def forward(number: int, _: Any) -> None:
    threading.Thread(target=send, args=(number,), daemon=True).start()  # the handler may have interrupted a send

  if threading.current_thread() is threading.main_thread():
    for number in ending_signals():
      signal.signal(number, forward)


# --- messages ---


def to_message(fields: Mapping[str, Any]) -> bytes:
  """Encodes a message of JSON types, chunks, requests and sampling settings."""
  return json.dumps(fields, default=_to_json).encode()


def from_message(message: bytes) -> dict[str, Any]:
  """Decodes a message of `to_message`; arrays inside chunks, requests and sampling settings become tuples."""
  return json.loads(message, object_hook=_from_json)


def pack_masks(masks: TokenMasks | None) -> list[list[Any]]:
  """Encodes token masks as pairs of a row and its uint32 words in base64; only process 0 computes masks."""
  return [[row, base64.b64encode(mask.astype('<u4').tobytes()).decode()] for row, mask in (masks or {}).items()]


def unpack_masks(pairs: list[list[Any]]) -> TokenMasks | None:
  """Decodes the masks of `pack_masks`."""
  return {row: np.frombuffer(base64.b64decode(words), '<u4') for row, words in pairs} or None


def _to_json(value: Any) -> dict[str, Any]:
  return {'type': type(value).__name__, **vars(value)}


def _from_json(fields: dict[str, Any]) -> Any:
  cls = _TYPES.get(fields.get('type', ''))
  if cls is None:
    return fields
  return cls(**{name: _to_tuples(value) for name, value in fields.items() if name != 'type'})


def _to_tuples(value: Any) -> Any:
  return tuple(map(_to_tuples, value)) if isinstance(value, list) else value
