"""LeadingEngine: process 0's engine, which the other processes' engines follow.

    code = lead(ModelEngine(steps, weights), links, serve, restore=restore, leave=leave)

What it is asked goes to every other process, numbered, and then runs here: all devices run the same programs in the
same order (following.py is the other end). The calls of its own engine are made by a thread of its own, because one
that waits for a process that is gone may wait for ever: it is given up, and the caller gets a PeerFailedError.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
import dataclasses
import functools
import os
from typing import Any, NoReturn

import numpy as np

from spmd_tasks import exit_codes
from spmd_tasks.decoding import Chunk, Engine, Launched, Outputs
from spmd_tasks.serving.followers import Followers
from spmd_tasks.serving.process_link import Link


def lead(
  engine: Engine,
  links: Sequence[Link],
  serve: Callable[..., int],
  *,
  restore: Callable[[int | None], tuple[Any, int]],
  leave: Callable[[int, str], object],
) -> int:
  """Serves on process 0, and has all others follow and end with the same exit code, which it returns.

  Args:
    engine: this process's own.
    links: to all others.
    serve: server.serve, of an engine.
    restore: a checkpoint's weights and its step, if every process calls it.
    leave: ends this process at once, with an exit code and a reason: another one is lost.

  Raises:
    whatever ended the engine.
  """
  followers = Followers(links, leave=functools.partial(leave, exit_codes.PEER_FAILED))

  def leave_together(code: int) -> NoReturn:
    followers.dismiss(code, 'process 0 ended in the middle of an operation')
    os._exit(code)

  leading = LeadingEngine(engine, followers, restore)
  try:
    code = serve(leading, restore=leading.restore, restore_pauses=True, stop=followers.stop, leave=leave_together)
    if followers.lost.done():
      followers.lost.result()
  except BaseException as error:
    lost = followers.lost.exception() if followers.lost.done() else None
    followers.dismiss(exit_codes.PEER_FAILED, str(lost or f'process 0 failed: {type(error).__name__}: {error}'))
    if lost is not None:
      leave(exit_codes.PEER_FAILED, str(lost))
    raise
  followers.end(code)
  return code


class LeadingEngine:
  """An engine that others follow; see engine_contract.py for what each method promises.

  Every method raises a PeerFailedError, at once, when a process is lost.
  """

  def __init__(self, engine: Engine, followers: Followers, restore: Callable[[int | None], tuple[Any, int]]):
    """Leads from now on.

    Args:
      engine: this process's own.
      followers: all other processes.
      restore: a checkpoint's weights and its step, if every process calls it.
    """
    self._engine = engine
    self._followers = followers
    self._restore = restore
    self._caller = ThreadPoolExecutor(1, thread_name_prefix='leading-engine')

  @property
  def num_slots(self) -> int:
    return self._engine.num_slots

  @property
  def prefill_rows(self) -> int:
    return self._engine.prefill_rows

  @property
  def prefill_chunk(self) -> int:
    return self._engine.prefill_chunk

  @property
  def can_reuse(self) -> bool:
    return self._engine.can_reuse

  @property
  def max_len(self) -> int:
    return self._engine.max_len

  @property
  def cache_epoch(self) -> int:
    return self._engine.cache_epoch

  @property
  def weights(self) -> Any:
    """Here is this process's part; the other processes have what `restore` gave them."""
    return self._engine.weights

  @weights.setter
  def weights(self, weights: Any) -> None:
    if weights is None:
      self._followers.send('drop_weights')
    self._engine.weights = weights

  def warm_up(self) -> None:
    self._lead('warm_up')

  def reset(self) -> None:
    self._lead('reset')
    # Others may be held up for ever in what failed here before it was launched: they would take the next one for it.
    self._await(self._followers.await_reset)

  def prefill_cost(self, chunk: Chunk) -> int:
    return self._engine.prefill_cost(chunk)

  def prefill(self, chunks: Sequence[Chunk], *, score_prompts: bool = False) -> Launched:
    self._followers.send('prefill', [_without_later_tokens(chunk) for chunk in chunks], score_prompts)
    launched = self._await(functools.partial(self._engine.prefill, chunks, score_prompts=score_prompts))
    return _Awaited(self._await, launched)

  def step(self, keep: np.ndarray) -> Launched:
    self._followers.send('step', keep.tolist())
    return _Awaited(self._await, self._await(self._engine.step, keep))

  def restore(self, step: int | None) -> tuple[Any, int]:
    """A checkpoint's weights and its step, for `weights`; the other processes have theirs already."""
    self._followers.send('restore', step)
    return self._await(self._restore, step)

  def _lead(self, name: str) -> None:
    self._followers.send(name)
    self._await(getattr(self._engine, name))

  def _await(self, call: Callable[..., Any], *arguments: Any) -> Any:
    """What the call returns or raises, unless a process is lost before."""
    future = self._caller.submit(call, *arguments)
    lost = self._followers.lost
    wait((future, lost), return_when=FIRST_COMPLETED)
    return lost.result() if lost.done() else future.result()


def _without_later_tokens(chunk: Chunk) -> Chunk:
  """The chunk, of a prompt that ends with the token behind it: what comes later need not be sent yet."""
  ids = chunk.request.ids[: chunk.stop + 1]
  return dataclasses.replace(chunk, request=dataclasses.replace(chunk.request, ids=ids))


class _Awaited:
  """Outputs that are read by the engine's caller."""

  def __init__(self, await_call: Callable[..., Any], launched: Launched):
    self._await = await_call
    self._launched = launched

  def read(self) -> Outputs:
    return self._await(self._launched.read)
