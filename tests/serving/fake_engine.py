"""FakeEngine: an engine without a model, whose tokens are known in advance.

A prompt's answer is its own bytes again, in a circle; what was asked of the engine is kept in `log`.
"""

from collections.abc import Sequence
import dataclasses
import threading

import numpy as np

from spmd_tasks.decoding.loop import Outputs
from spmd_tasks.decoding.requests import Chunk, Request
from spmd_tasks.inputs.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos_id


class Launched:
  def __init__(self, outputs, error=None):
    self.outputs, self.error = outputs, error

  def read(self):
    if self.error is not None:
      raise self.error
    return self.outputs


@dataclasses.dataclass
class Slot:
  """A request, and how many of its tokens were given out."""

  request: Request
  num_tokens: int = 0

  def next(self) -> tuple[int, bool]:
    ids = self.request.ids
    token = ids[self.num_tokens % len(ids)]
    self.num_tokens += 1
    return token, token in self.request.stop_ids or self.num_tokens >= self.request.max_tokens


class FakeEngine:
  """Slots in host memory; `fail_next` makes the next step raise when it is read."""

  def __init__(self, *, num_slots=4, prefill_rows=1, max_len=128, num_top=2, gate: threading.Event | None = None):
    self.num_slots, self.prefill_rows, self.max_len, self.num_top = num_slots, prefill_rows, max_len, num_top
    self.prefill_chunk, self.can_reuse = max_len, True
    self.slots: list[Slot | None] = [None] * num_slots
    self.log: list[tuple] = []
    self.fail_next: Exception | None = None
    self.gate = gate
    self.is_warm = False
    self.weights = 0  # added to each token

  def warm_up(self):
    self.is_warm = True

  def reset(self):
    self.slots = [None] * self.num_slots
    self.log.append(('reset',))

  def prefill_cost(self, chunk: Chunk) -> int:
    return chunk.stop - chunk.start

  def prefill(self, chunks: Sequence[Chunk]) -> Launched:
    assert len(chunks) <= self.prefill_rows
    self.log.append(('prefill', tuple(chunk.slot for chunk in chunks)))
    rows = []
    for chunk in chunks:
      assert 0 < len(chunk.request.ids) <= self.max_len - chunk.request.max_tokens
      is_end = chunk.stop == len(chunk.request.ids)
      self.slots[chunk.slot] = Slot(chunk.request) if is_end else None
      rows.append(self._next(chunk.slot))
    return Launched(self._outputs(rows + [None] * (self.prefill_rows - len(rows))))

  def step(self, keep: np.ndarray) -> Launched:
    if self.gate is not None:
      self.gate.wait(10)
    self.log.append(('step', tuple(keep.tolist())))
    for slot, kept in enumerate(keep):
      if not kept:
        self.slots[slot] = None
    error, self.fail_next = self.fail_next, None
    return Launched(self._outputs([self._next(slot) for slot in range(self.num_slots)]), error)

  def _next(self, slot: int):
    held = self.slots[slot]
    if held is None:
      return None
    token, is_finished = held.next()
    token += self.weights
    if is_finished:
      self.slots[slot] = None
    return token, is_finished

  def _outputs(self, rows) -> Outputs:
    tokens = np.array([0 if row is None else row[0] for row in rows], np.int32)
    top = np.arange(self.num_top)
    return Outputs(
      tokens=tokens,
      logprobs=-tokens.astype(np.float32) / 100,
      top_ids=(tokens[:, None] + top[None, :]) % TOKENIZER.vocab_size,
      top_logprobs=np.broadcast_to(-top.astype(np.float32)[None, :], (len(rows), self.num_top)),
      is_valid=np.array([row is not None for row in rows]),
      is_finished=np.array([row is not None and row[1] for row in rows]),
    )
