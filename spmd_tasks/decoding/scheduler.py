"""Scheduler: which sequence is in which slot, step by step (continuous batching: Yu et al., Orca, 2022).

    scheduler.submit(sequences)
    while scheduler.has_work:
      for delta in scheduler.advance():
        ...

The device is one step ahead of the host: step t + 1 is launched before step t is read. So a sequence that ends by its
own tokens is known to have ended one step late, and what was launched for it in between is thrown away; one that ends
by its length makes room at once. Nothing here knows of threads or networks.

Shapes: N slots.
"""

from collections import deque
from collections.abc import Iterable
import itertools

import numpy as np

from spmd_tasks.decoding.engine_contract import Engine, Launched
from spmd_tasks.decoding.requests import chunk_prompt
from spmd_tasks.decoding.sequence import Delta, FinishReason, Sequence

# (row of the outputs, slot, whose token it is)
_Row = tuple[int, int, Sequence]


class Scheduler:
  """First come, first served, over the slots of an engine.

  Attributes:
    num_steps: decode steps launched so far.
    num_slot_steps: the slots of those steps that had a sequence in them.
    num_prefills: prefills launched so far.
    num_prompt_tokens, num_generated_tokens: of all sequences, padding excluded.
  """

  def __init__(self, engine: Engine, *, prefill_budget: int | None = None):
    """Nothing is launched yet.

    Args:
      engine: warmed up by whoever calls `advance`.
      prefill_budget: how many prompt tokens, padding included, may be read between two steps, so that those who wait
        for their next token do not wait for long; one prompt is always read. None: as many as fit one slot.
    """
    self._engine = engine
    self._prefill_budget = engine.max_len if prefill_budget is None else prefill_budget
    self._queue: deque[Sequence] = deque()
    self._slots: list[Sequence | None] = [None] * engine.num_slots
    self._in_flight: deque[tuple[Launched, list[_Row]]] = deque()
    self._outbox: list[Delta] = []
    self.num_steps = 0
    self.num_slot_steps = 0
    self.num_prefills = 0
    self.num_prompt_tokens = 0
    self.num_generated_tokens = 0

  @property
  def num_queued(self) -> int:
    """Sequences that wait for a slot."""
    return len(self._queue)

  @property
  def num_active(self) -> int:
    """Slots that have a sequence in them."""
    return sum(sequence is not None for sequence in self._slots)

  @property
  def has_work(self) -> bool:
    """Whether `advance` would do anything."""
    return bool(self._queue or self._in_flight or self._outbox or self.num_active)

  def submit(self, sequences: Iterable[Sequence]) -> None:
    """Puts sequences that fit the engine at the end of the queue."""
    self._queue.extend(sequences)

  def end(self, sequences: Iterable[Sequence], reason: FinishReason) -> None:
    """Ends sequences, wherever they are; their slots are free for the next step."""
    self._outbox += [sequence.end(reason) for sequence in sequences if sequence.finish_reason is None]
    self._queue = deque(sequence for sequence in self._queue if sequence.finish_reason is None)
    self._slots = [None if slot is None or slot.finish_reason is not None else slot for slot in self._slots]

  def end_all(self, reason: FinishReason) -> list[Delta]:
    """Ends every sequence without asking the engine for anything more."""
    self.end([*self._queue, *self._launched()], reason)
    self._in_flight.clear()
    return self._take_outbox()

  def advance(self, *, admit: bool = True) -> list[Delta]:
    """Fills free slots, launches a step, reads the one before it.

    Args:
      admit: whether sequences of the queue may take slots.
    """
    if admit:
      self._admit()
    if self.num_active:
      rows = [(slot, slot, sequence) for slot, sequence in enumerate(self._slots) if sequence is not None]
      keep = np.array([sequence is not None for sequence in self._slots])
      self._launch(self._engine.step(keep), rows)
      self.num_steps += 1
      self.num_slot_steps += len(rows)
    while len(self._in_flight) > (1 if self.num_active else 0):
      self._read(*self._in_flight[0])
      self._in_flight.popleft()  # only now: a read that raises must not lose whose tokens these were
    return self._take_outbox()

  def recover(self) -> list[Delta]:
    """After an exception of `advance`: ends what was launched as errors, and empties the engine."""
    self.end(self._launched(), 'error')
    self._in_flight.clear()
    self._engine.reset()
    return self._take_outbox()

  def _admit(self) -> None:
    budget = self._prefill_budget
    free = [slot for slot, sequence in enumerate(self._slots) if sequence is None]
    while free and self._queue:
      taken: list[Sequence] = []
      while self._queue and len(taken) < min(len(free), self._engine.prefill_rows):
        chunks = chunk_prompt(self._queue[0].request, free[len(taken)], self._engine.prefill_chunk)
        cost = sum(self._engine.prefill_cost(chunk) for chunk in chunks)
        if cost > budget and budget < self._prefill_budget:
          break
        budget -= cost
        taken.append(self._queue.popleft())
      if not taken:
        return
      slots, free = free[: len(taken)], free[len(taken) :]
      for slot, sequence in zip(slots, taken, strict=True):
        self._slots[slot] = sequence
        self.num_prompt_tokens += len(sequence.request.ids)
      size = self._engine.prefill_chunk
      prompts = [chunk_prompt(s.request, slot, size) for slot, s in zip(slots, taken, strict=True)]
      of_slots = dict(zip(slots, taken, strict=True))
      for column in itertools.zip_longest(*prompts):
        chunks = [chunk for chunk in column if chunk is not None]
        ending = [(row, chunk) for row, chunk in enumerate(chunks) if chunk.stop == len(chunk.request.ids)]
        rows = [(row, chunk.slot, of_slots[chunk.slot]) for row, chunk in ending]
        self._launch(self._engine.prefill(chunks), rows)
        self.num_prefills += 1

  def _launch(self, launched: Launched, rows: list[_Row]) -> None:
    """Remembers what runs, and frees the slots whose last token is among it."""
    self._in_flight.append((launched, rows))
    for _, slot, sequence in rows:
      sequence.num_launched += 1
      if sequence.num_launched >= sequence.request.max_tokens:
        self._slots[slot] = None

  def _launched(self) -> list[Sequence]:
    """Those in slots, and those whose last token is on its way."""
    in_flight = [sequence for _, rows in self._in_flight for _, _, sequence in rows]
    return list(dict.fromkeys([*in_flight, *(sequence for sequence in self._slots if sequence is not None)]))

  def _take_outbox(self) -> list[Delta]:
    deltas, self._outbox = self._outbox, []
    return deltas

  def _read(self, launched: Launched, rows: list[_Row]) -> None:
    outputs = launched.read()
    for row, slot, sequence in rows:
      if sequence.finish_reason is not None or not outputs.is_valid[row]:
        continue  # launched before its end was known
      delta = sequence.take(outputs, row)
      self.num_generated_tokens += 1
      if delta.finish_reason is not None and self._slots[slot] is sequence:
        self._slots[slot] = None
      if delta.text or delta.logprobs or delta.finish_reason is not None:
        self._outbox.append(delta)
