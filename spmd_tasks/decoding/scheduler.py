"""Scheduler: assigns sequences to slots, step by step (continuous batching: Yu et al., Orca, 2022).

    scheduler.submit(sequences)
    while scheduler.has_work:
      for delta in scheduler.advance():
        ...

Prompts are read in chunks between the steps, so that a long prompt delays the other sequences by no more than a chunk
(Agrawal et al., Sarathi, 2023). A prompt that begins like an earlier one reuses the chunks that a slot still holds.

The device is one step ahead of the host: step t + 1 is launched before step t is read. So the host learns one step late
that a sequence ended by its own tokens, and discards the step that was launched in between; a sequence that ends by its
length frees its slot at once. While a constrained sequence is in a slot (constraints.py), each step is read before the
next one is launched. The scheduler uses no threads, networks or clocks: the same submissions give the same
launches on every process.

Shapes: N slots, C tokens of a whole chunk.
"""

from collections import deque
from collections.abc import Iterable, Set

import numpy as np

from spmd_tasks.decoding.engine_contract import Engine, Launched
from spmd_tasks.decoding.generated_sequence import Delta, FinishReason, GeneratedSequence
from spmd_tasks.decoding.requests import Chunk, Request

# (row of the outputs, slot, the row's sequence, the chunk that a prefill read)
_Row = tuple[int, int, GeneratedSequence, Chunk | None]


class Scheduler:
  """Serves sequences first come, first served, over the slots of an engine.

  Attributes:
    num_steps: decode steps launched so far.
    num_slot_steps: the sum over those steps of the slots that had a sequence in them.
    num_prefills, num_chunks: prefills launched so far, and the chunks of prompts that they read.
    num_prompt_tokens, num_reused_tokens: tokens of prompts that were read, and that a slot held already.
    num_generated_tokens: of all sequences; like the two above without padding.
  """

  def __init__(self, engine: Engine, *, prefill_budget: int | None = None):
    """Launches nothing yet.

    Args:
      engine: the caller warms it up before the first `advance`.
      prefill_budget: how many prompt tokens, padding included, may be read between two steps, which bounds the time
        between two tokens of a sequence; one prefill is always allowed. None: the most that one prefill can read.
    """
    self._engine = engine
    self._prefill_budget = engine.prefill_chunk * engine.prefill_rows if prefill_budget is None else prefill_budget
    self._prefixes = _PrefixTable(engine)
    self._queue: deque[GeneratedSequence] = deque()
    self._slots: list[GeneratedSequence | None] = [None] * engine.num_slots
    self._free = list(range(engine.num_slots))  # least recently used first
    self._starts: dict[int, int] = {}  # slots whose prompt is being read, oldest first: where the next chunk starts
    self._in_flight: deque[tuple[Launched, list[_Row]]] = deque()
    self._outbox: list[Delta] = []
    self.num_steps = 0
    self.num_slot_steps = 0
    self.num_prefills = 0
    self.num_chunks = 0
    self.num_prompt_tokens = 0
    self.num_reused_tokens = 0
    self.num_generated_tokens = 0

  @property
  def num_queued(self) -> int:
    """Sequences that wait for a slot."""
    return len(self._queue)

  @property
  def num_active(self) -> int:
    """Slots that have a sequence in them."""
    return len(self._slots) - len(self._free)

  @property
  def has_work(self) -> bool:
    """Whether `advance` has anything to do."""
    return bool(self._queue or self._in_flight or self._outbox or self.num_active)

  def submit(self, sequences: Iterable[GeneratedSequence]) -> None:
    """Appends sequences to the queue; they must fit the engine."""
    self._queue.extend(sequences)

  def end(self, sequences: Iterable[GeneratedSequence], reason: FinishReason) -> None:
    """Ends sequences, queued or running; their slots are free for the next step."""
    self._outbox += [sequence.end(reason) for sequence in sequences if sequence.finish_reason is None]
    self._queue = deque(sequence for sequence in self._queue if sequence.finish_reason is None)
    for slot, sequence in enumerate(self._slots):
      if sequence is not None and sequence.finish_reason is not None:
        self._release(slot)

  def end_all(self, reason: FinishReason) -> list[Delta]:
    """Ends every sequence without another launch."""
    self.end([*self._queue, *self._launched()], reason)
    self._in_flight.clear()
    return self._take_outbox()

  def advance(self, *, admit: bool = True) -> list[Delta]:
    """Launches prefills and a step, then fetches the outputs of the launches before that step.

    Args:
      admit: whether queued sequences may take slots.
    """
    self._prefill(admit)
    if any(sequence is not None and sequence.matcher is not None for sequence in self._slots):
      self._fetch_all()  # the next tokens that a grammar allows follow from the tokens so far
    rows: list[_Row] = [
      (slot, slot, sequence, None)
      for slot, sequence in enumerate(self._slots)
      if sequence is not None and slot not in self._starts
    ]
    if rows:
      keep = np.zeros(len(self._slots), np.bool_)
      keep[[slot for slot, *_ in rows]] = True
      self._launch(self._engine.step(keep, _masks({slot: sequence for slot, _, sequence, _ in rows})), rows)
      self.num_steps += 1
      self.num_slot_steps += len(rows)
    self._fetch_all(but=1 if self.num_active else 0)
    return self._take_outbox()

  def recover(self) -> list[Delta]:
    """Call it after an exception of `advance`: ends the launched sequences as errors and empties the engine."""
    self.end(self._launched(), 'error')
    self._in_flight.clear()
    self._engine.reset()
    return self._take_outbox()

  def _prefill(self, admit: bool) -> None:
    budget = self._prefill_budget
    while chunks := self._next_chunks(admit):
      cost = self._engine.prefill_cost(chunks[0])
      if cost > budget and budget < self._prefill_budget:
        return
      budget -= cost
      self._launch_prefill(chunks)

  def _next_chunks(self, admit: bool) -> list[Chunk]:
    """The chunks of the next prefill: of prompts that are being read, then of the queue. Changes nothing."""
    chunks: list[Chunk] = []
    for slot, start in self._starts.items():
      sequence = self._slots[slot]
      assert sequence is not None
      chunk = self._chunk(sequence, slot, start, slot)
      if len(chunks) < self._engine.prefill_rows and self._can_join(chunks, chunk):
        chunks.append(chunk)
    free = list(self._free)
    for sequence in self._queue if admit else ():
      if not free or len(chunks) == self._engine.prefill_rows:
        break
      chunk = self._first_chunk(sequence, free)
      if not self._can_join(chunks, chunk):
        break  # first come, first served: a later sequence does not overtake
      free.remove(chunk.slot)
      chunks.append(chunk)
    return chunks

  def _first_chunk(self, sequence: GeneratedSequence, free: list[int]) -> Chunk:
    """Chooses a prompt's slot and its source: the slot that holds its beginning, or else the least useful slot."""
    request = sequence.request
    length, holders = (0, frozenset[int]()) if request.score_prompt else self._prefixes.longest(request)
    exact = [slot for slot in free if slot in holders and self._prefixes.num_held(slot) == length]
    slot = exact[0] if exact else min(free, key=lambda slot: self._prefixes.num_held(slot) > 0)
    return self._chunk(sequence, slot, length, slot if slot in holders or not holders else min(holders))

  def _chunk(self, sequence: GeneratedSequence, slot: int, start: int, source: int) -> Chunk:
    stop = min(start + self._engine.prefill_chunk, len(sequence.request.ids))
    return Chunk(request=sequence.request, slot=slot, start=start, stop=stop, source=source)

  def _can_join(self, chunks: list[Chunk], new: Chunk) -> bool:
    """Whether one prefill may read a chunk with others: by the same program, and none copies from another's slot."""
    return not chunks or (
      self._program(new) == self._program(chunks[0])
      and all(new.source != other.slot and new.slot != other.source for other in chunks)
      and not any(self._repeats(new, other) for other in chunks)
    )

  def _program(self, chunk: Chunk) -> tuple[bool, bool, int]:
    """The key of the compiled prefill that reads the chunk."""
    return chunk.start == 0, chunk.request.score_prompt, self._engine.prefill_cost(chunk)

  def _repeats(self, new: Chunk, other: Chunk) -> bool:
    """Whether a chunk has the same tokens as another one, so that it can reuse that one after this prefill."""
    ids = new.request.ids
    return (
      new.request.adapter == other.request.adapter
      and self._prefixes.can_be_reused(other)
      and other.start == new.start
      and other.stop < len(ids)
      and ids[: other.stop] == other.request.ids[: other.stop]
    )

  def _launch_prefill(self, chunks: list[Chunk]) -> None:
    rows: list[_Row] = []
    for row, chunk in enumerate(chunks):
      sequence = self._slots[chunk.slot]
      if sequence is None:
        self._free.remove(chunk.slot)  # before popleft: another thread may read has_work in between
        sequence = self._slots[chunk.slot] = self._queue.popleft()
        sequence.num_reused = chunk.start
        self.num_reused_tokens += chunk.start
      rows.append((row, chunk.slot, sequence, chunk))
    score = chunks[0].request.score_prompt
    last = {row: sequence for row, _, sequence, chunk in rows if chunk and chunk.stop == len(chunk.request.ids)}
    launched = self._engine.prefill(chunks, score_prompts=score, masks=_masks(last))
    self.num_prefills += 1
    for chunk in chunks:
      self._prefixes.note(chunk)
      self.num_chunks += 1
      self.num_prompt_tokens += chunk.stop - chunk.start
      if chunk.stop < len(chunk.request.ids):
        self._starts[chunk.slot] = chunk.stop
      else:
        self._starts.pop(chunk.slot, None)
    self._launch(launched, rows)

  def _launch(self, launched: Launched, rows: list[_Row]) -> None:
    """Records a launch, and frees the slots whose last token it computes."""
    self._in_flight.append((launched, rows))
    for _, slot, sequence, _ in rows:
      if slot not in self._starts:
        sequence.num_launched += 1
        if sequence.num_launched >= sequence.request.max_tokens:
          self._release(slot)

  def _release(self, slot: int) -> None:
    self._slots[slot] = None
    self._free.append(slot)
    self._starts.pop(slot, None)

  def _launched(self) -> list[GeneratedSequence]:
    """The sequences in slots, and those whose last token was launched but not fetched."""
    in_flight = [sequence for _, rows in self._in_flight for _, _, sequence, _ in rows]
    return list(dict.fromkeys([*in_flight, *(sequence for sequence in self._slots if sequence is not None)]))

  def _take_outbox(self) -> list[Delta]:
    deltas, self._outbox = self._outbox, []
    return deltas

  def _fetch_all(self, but: int = 0) -> None:
    """Fetches the outputs of all launches but the last `but` ones."""
    while len(self._in_flight) > but:
      self._fetch(*self._in_flight[0])
      self._in_flight.popleft()  # after the fetch: if it raises, `recover` still needs the rows

  def _fetch(self, launched: Launched, rows: list[_Row]) -> None:
    outputs = launched.read()
    for row, slot, sequence, chunk in rows:
      if sequence.finish_reason is not None:
        continue  # launched before the host knew that the sequence had ended
      delta = sequence.take(outputs, row, chunk)
      self.num_generated_tokens += bool(outputs.is_valid[row])
      if delta.finish_reason is not None and self._slots[slot] is sequence:
        self._release(slot)
      if delta.text or delta.logprobs or delta.finish_reason is not None:
        self._outbox.append(delta)


def _masks(sequences: dict[int, GeneratedSequence]) -> dict[int, np.ndarray] | None:
  """The token masks of constrained sequences; None where there are none."""
  return {row: each.matcher.mask for row, each in sequences.items() if each.matcher is not None} or None


class _Node:
  """A chunk that follows its parent's chunk; `slots` hold this chunk and all before it."""

  def __init__(self, parent: '_Node | None' = None, tokens: tuple[int, ...] = ()):
    self.parent = parent
    self.tokens = tokens
    self.children: dict[tuple[int, ...], _Node] = {}
    self.slots: set[int] = set()


class _PrefixTable:
  """Finds the slots whose KV caches hold the beginning of a new prompt; a new cache_epoch of the engine empties it.

  The table is a tree of whole chunks, keyed by all of their tokens, so that no prompt is mistaken for another (as in
  the radix tree of SGLang: Zheng et al., 2024; here cut at multiples of C). Each low-rank adapter has a tree of its
  own: it gives the same tokens other keys and values. An entry lasts until its slot's next prefill, also after the
  slot's sequence has ended.
  """

  def __init__(self, engine: Engine):
    self._engine = engine
    self._size = engine.prefill_chunk
    self._clear()

  def longest(self, request: Request) -> tuple[int, Set[int]]:
    """Returns (length of the longest held beginning, the slots that hold it); at least one token is left to read."""
    self._check()
    ids, node, length = request.ids, self._roots.get(request.adapter, _Node()), 0
    for stop in range(self._size, len(ids), self._size):
      child = node.children.get(ids[length:stop])
      if child is None:
        break
      node, length = child, stop
    return length, node.slots

  def num_held(self, slot: int) -> int:
    """The number of a prompt's tokens that a slot holds."""
    self._check()
    return len(self._paths[slot]) * self._size

  def can_be_reused(self, chunk: Chunk) -> bool:
    """Whether other prompts may continue after this chunk."""
    # Scored prompts are read by different programs, whose numbers may differ in the last bits.
    is_whole = chunk.stop - chunk.start == self._size
    return self._engine.can_reuse and is_whole and not chunk.request.score_prompt

  def note(self, chunk: Chunk) -> None:
    """Records that the chunk's slot now holds its source's tokens before `start`, and the chunk if it is whole."""
    self._check()
    old, path = self._paths[chunk.slot], self._paths[chunk.source][: chunk.start // self._size]
    if self.can_be_reused(chunk):
      parent = path[-1] if path else self._roots.setdefault(chunk.request.adapter, _Node())
      tokens = chunk.request.ids[chunk.start : chunk.stop]
      path.append(parent.children.setdefault(tokens, _Node(parent, tokens)))
    self._paths[chunk.slot] = path
    for node in path:
      node.slots.add(chunk.slot)
    for node in set(old).difference(path):
      node.slots.remove(chunk.slot)
      if not node.slots and node.parent is not None:
        del node.parent.children[node.tokens]

  def _check(self) -> None:
    if self._epoch != self._engine.cache_epoch:
      self._clear()

  def _clear(self) -> None:
    self._epoch = self._engine.cache_epoch
    self._roots: dict[int, _Node] = {}  # by the adapter's number
    self._paths: list[list[_Node]] = [[] for _ in range(self._engine.num_slots)]
