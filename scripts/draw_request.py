"""Draws a request's way through the server from HTTP to text, and slots over time from the real scheduler."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import svg

from spmd_tasks.decoding import Request
from spmd_tasks.decoding.decode_state import Outputs
from spmd_tasks.decoding.generated_sequence import GeneratedSequence
from spmd_tasks.decoding.requests import Chunk
from spmd_tasks.decoding.scheduler import Scheduler

# (prompt tokens, tokens to generate) of the drawn requests, in the order of their arrival.
REQUESTS = ((12, 7), (4, 9), (20, 5), (6, 8), (3, 4), (9, 6))
TOKEN = 65


class RecordingEngine:
  """An engine without a model: records each launch by slot, and returns the same token for every sequence."""

  num_slots = 3
  prefill_chunk = 8
  can_reuse, num_snapshots = False, 0
  num_drafts, has_draft_model = 0, False
  max_len = 64
  block_tokens, num_blocks, num_parts = 8, 24, 1
  cache_epoch = 0
  weights = None

  def __init__(self):
    self.launches: list[tuple[str, dict[int, int]]] = []  # (prefill or step, request by slot)
    self._by_slot: dict[int, Request] = {}
    self._generated: dict[int, int] = {}

  def warm_up(self) -> None:
    """Does nothing."""

  def reset(self) -> None:
    """Does nothing, to keep the record."""

  def prefill_shape(self, chunk: Chunk) -> tuple[int, int]:
    """The size of a chunk: the whole prompt."""
    return self.prefill_chunk, 1

  def prefill(self, chunks: Sequence[Chunk], *, score_prompts: bool = False, masks: Any = None) -> Any:
    """Records the chunks' slots."""
    assert masks is None  # no request is constrained
    self.launches.append(('prefill', {chunk.slot: chunk.request.seed for chunk in chunks}))
    finished = []
    for chunk in chunks:
      self._by_slot[chunk.slot], self._generated[chunk.slot] = chunk.request, 0
      finished.append(chunk.stop == len(chunk.request.ids) and self._next(chunk.slot))
    return _Launched(finished)

  def step(self, keep: np.ndarray, masks: Any = None, grown: Any = (), drafts: Any = None, chunks: Any = ()) -> Any:
    """Records the slots in use."""
    assert masks is None
    assert not drafts
    assert not chunks
    slots = [int(slot) for slot in np.flatnonzero(keep)]
    self.launches.append(('step', {slot: self._by_slot[slot].seed for slot in slots}))
    return _Launched([slot in slots and self._next(slot) for slot in range(self.num_slots)])

  def _next(self, slot: int) -> bool:
    self._generated[slot] += 1
    return self._generated[slot] >= self._by_slot[slot].max_tokens


class _Launched:
  """Returns the outputs of a launch, which are ready at once."""

  def __init__(self, finished: Sequence[bool]):
    rows = len(finished)
    arrays: dict[str, Any] = {
      'tokens': np.full(rows, TOKEN, np.int32),
      'logprobs': np.zeros(rows, np.float32),
      'top_ids': np.zeros((rows, 0), np.int32),
      'top_logprobs': np.zeros((rows, 0), np.float32),
      'is_valid': np.ones(rows, np.bool_),
      'is_finished': np.array(finished, np.bool_),
    }
    self._outputs = Outputs(**arrays)

  def read(self) -> Outputs:
    return self._outputs


def schedule() -> list[tuple[str, dict[int, int]]]:
  """Returns the scheduler's launches for REQUESTS."""
  engine = RecordingEngine()
  scheduler = Scheduler(engine)
  requests = [
    Request(ids=(TOKEN,) * prompt, max_tokens=max_tokens, seed=number)
    for number, (prompt, max_tokens) in enumerate(REQUESTS)
  ]
  scheduler.submit([GeneratedSequence(request, lambda ids: 'A' * len(ids)) for request in requests])
  while scheduler.has_work:
    scheduler.advance()
  return engine.launches


def request_life() -> str:
  """Draws the way of a request, and six requests in three slots."""
  launches = schedule()
  cell, left, top = 27, 90, 262
  drawing = svg.Drawing(max(860, left + cell * len(launches) + 20), 480, "A request's life in the server")
  drawing.text(20, 30, 'One request', size=16, bold=True)
  stations = (
    ('HTTP', 'the key is checked,', 'the body validated'),
    ('Tokens', 'chat template,', 'tokenizer'),
    ('Queue', 'first come,', 'first served'),
    ('Prefill', 'the prompt, in', 'chunks, into a slot'),
    ('Steps', 'one token per slot,', 'drawn on the device'),
    ('Text', 'whole characters,', 'until a stop string'),
    ('Answer', 'at once, or as', 'a stream of events'),
  )
  width, gap = 104, 14
  for i, (name, *notes) in enumerate(stations):
    x = 20 + i * (width + gap)
    drawing.rect(x, 44, width, 76, fill=svg.FILLS[0] if name in ('Prefill', 'Steps') else svg.PALE)
    drawing.text(x + width / 2, 66, name, size=15, anchor='middle', bold=True)
    for row, note in enumerate(notes):
      drawing.text(x + width / 2, 88 + 16 * row, note, size=10, anchor='middle', color=svg.FAINT)
    if i:
      drawing.arrow((x - gap, 82), (x - 1, 82))
  owners = (('event loop', 0, 2), ("the engine's thread and the devices", 2, 6), ('event loop', 6, 7))
  for owner, first, stop in owners:
    x, end = 20 + first * (width + gap), 20 + stop * (width + gap) - gap
    drawing.line([(x, 128), (x, 134), (end, 134), (end, 128)])
    drawing.text((x + end) / 2, 150, owner, size=12, anchor='middle', color=svg.FAINT)

  engine = RecordingEngine
  drawing.text(20, top - 62, f'{len(REQUESTS)} requests in {engine.num_slots} slots', size=16, bold=True)
  note = (
    f'Each column is one launch. P reads a chunk of at most {engine.prefill_chunk} tokens of a prompt; a number is one '
    'token of that request.'
  )
  drawing.text(20, top - 42, note, size=13, color=svg.FAINT)
  drawing.text(20, top - 10, 'launch', size=12, color=svg.FAINT)
  for column, (kind, by_slot) in enumerate(launches):
    x = left + column * cell
    drawing.text(x + cell / 2 - 1, top - 10, str(column), size=11, color=svg.FAINT, anchor='middle')
    for slot in range(engine.num_slots):
      y = top + slot * 36
      number = by_slot.get(slot)
      if number is None:
        drawing.rect(x, y, cell - 2, 30, fill='white', line=svg.PADDING, radius=2)
        continue
      drawing.rect(x, y, cell - 2, 30, fill=svg.FILLS[number], radius=2)
      drawing.text(x + cell / 2 - 1, y + 20, 'P' if kind == 'prefill' else str(number), size=13, anchor='middle')
  for slot in range(engine.num_slots):
    drawing.text(20, top + slot * 36 + 20, f'slot {slot}', size=13)
  for number, (prompt, max_tokens) in enumerate(REQUESTS):
    x, y = 20 + (number % 3) * 275, top + 140 + 26 * (number // 3)
    drawing.rect(x, y - 13, 16, 16, fill=svg.FILLS[number], radius=2)
    drawing.text(x + 24, y, f'request {number}: prompt of {prompt}, {max_tokens} tokens out', size=13)
  note = (
    'The last P of a prompt gives its first token. A free slot takes the next request at once: continuous batching.'
  )
  drawing.text(20, top + 202, note, size=13)
  return drawing.svg()
