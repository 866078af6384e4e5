"""Scheduler: assigns sequences to slots, step by step (continuous batching: Yu et al., Orca, 2022).

    scheduler.submit(sequences)
    while scheduler.has_work:
      for delta in scheduler.advance():
        ...

Prompts are read in chunks between the steps, so that a long prompt delays the other sequences by no more than a chunk
(Agrawal et al., Sarathi, 2023). A prompt that begins like an earlier one reuses its chunks (block_pool.py).

A sequence gets blocks of the KV cache for its prompt when it is admitted, and for generated tokens as they come. When
no block is left, the sequence that was admitted last is preempted: it gives up its slot, and starts again when there is
room, before all others in the queue. Its generated tokens are computed again by the same steps, to the same bits.

The device is one step ahead of the host: step t + 1 is launched before step t is read. So the host learns one step late
that a sequence ended by its own tokens, and discards the step that was launched in between. A sequence that ends by its
length frees its slot at once. While a sequence in a slot is constrained (constraints.py) or may have drafts
(drafts.py), each step is read before the next one is launched. The scheduler uses no threads, networks or clocks: the
same calls give the same launches on every process.

Shapes: N slots, C tokens of a whole chunk.
"""

from collections import deque
from collections.abc import Callable, Iterable
import dataclasses
import itertools

import jax
import numpy as np

from spmd_tasks.decoding.block_pool import BlockPool, Text, chunk_keys
from spmd_tasks.decoding.decode_state import Outputs
from spmd_tasks.decoding.engine_contract import Engine, Launched
from spmd_tasks.decoding.generated_sequence import Delta, FinishReason, GeneratedSequence
from spmd_tasks.decoding.requests import Chunk, Request

# (row of the outputs, slot, the row's sequence, the chunk that a prefill read)
_Row = tuple[int, int, GeneratedSequence, Chunk | None]
_Read = tuple[Chunk, GeneratedSequence]  # a chunk to read, and its sequence


class Scheduler:
  """Serves sequences first come, first served, over the slots of an engine.

  Attributes:
    num_steps: decode steps launched so far.
    num_slot_steps: the busy slots of these steps, summed.
    num_prefills, num_chunks: prefills launched so far, and the chunks of prompts that they read.
    num_prompt_tokens, num_reused_tokens: prompt tokens that were read, and that were in the cache already; no padding.
    num_generated_tokens: tokens of all sequences.
    num_drafted_tokens, num_accepted_tokens: drafts that steps checked, and the right ones among them.
    num_preemptions: how often a sequence had to start again because no block was left.
    num_blocks: the number of blocks of the KV cache.
  """

  def __init__(
    self,
    engine: Engine,
    *,
    prefill_budget: int | None = None,
    on_admit: Callable[[GeneratedSequence], None] = lambda sequence: None,
  ):
    """Launches nothing yet.

    Args:
      engine: the caller warms it up before the first `advance`.
      prefill_budget: how many prompt tokens, padding included, may be read between two steps, which bounds the time
        between two tokens of a sequence; one prefill is always allowed. None: the length of a chunk.
      on_admit: called when a sequence gets a slot.
    """
    self._engine = engine
    self._prefill_budget = engine.prefill_chunk if prefill_budget is None else prefill_budget
    self._on_admit = on_admit
    self._pool = BlockPool(engine)
    self._epoch = engine.cache_epoch
    self._slots_of_part = -(-engine.num_slots // engine.num_parts)
    self._texts: dict[int, Text] = {}  # by slot, in the order of their admission
    self._queue: deque[GeneratedSequence] = deque()
    self._preempted: deque[GeneratedSequence] = deque()  # go before the queue
    self._slots: list[GeneratedSequence | None] = [None] * engine.num_slots
    self._free = list(range(engine.num_slots))  # least recently used first
    self._starts: dict[int, int] = {}  # slots whose prompt is being read, oldest first: where the next chunk starts
    self._in_flight: deque[tuple[Launched, list[_Row]]] = deque()
    self._outbox: list[Delta] = []
    self.num_steps = self.num_slot_steps = self.num_prefills = self.num_chunks = self.num_preemptions = 0
    self.num_prompt_tokens = self.num_reused_tokens = self.num_generated_tokens = 0
    self.num_drafted_tokens = self.num_accepted_tokens = 0
    self.num_blocks = self._pool.num_blocks

  @property
  def num_queued(self) -> int:
    """The number of sequences that wait for a slot."""
    return len(self._queue)

  @property
  def num_active(self) -> int:
    """The number of sequences that have started: in slots, or preempted."""
    return len(self._slots) - len(self._free) + len(self._preempted)

  @property
  def num_used_blocks(self) -> int:
    """The number of blocks of the KV cache that sequences in slots have."""
    return self._pool.num_used

  @property
  def has_work(self) -> bool:
    """Whether `advance` has anything to do."""
    return bool(self._queue or self._in_flight or self._outbox or self.num_active)

  def submit(self, sequences: Iterable[GeneratedSequence]) -> None:
    """Adds sequences, which must fit the engine, to the queue, after the ones of their priority."""
    self._queue.extend(sequences)
    if any(sequence.request.priority for sequence in self._queue):
      self._queue = deque(sorted(self._queue, key=lambda sequence: sequence.request.priority))

  def end(self, sequences: Iterable[GeneratedSequence], reason: FinishReason) -> None:
    """Ends sequences, queued or running; their slots are free for the next step."""
    self._outbox += [sequence.end(reason) for sequence in sequences if sequence.finish_reason is None]
    self._queue = deque(sequence for sequence in self._queue if sequence.finish_reason is None)
    self._preempted = deque(sequence for sequence in self._preempted if sequence.finish_reason is None)
    for slot, sequence in enumerate(self._slots):
      if sequence is not None and sequence.finish_reason is not None:
        self._release(slot)

  def end_all(self, reason: FinishReason) -> list[Delta]:
    """Ends every sequence without another launch."""
    self.end([*self._queue, *self._preempted, *self._launched()], reason)
    self._in_flight.clear()
    return self._take_outbox()

  def advance(self, *, admit: bool = True) -> list[Delta]:
    """Launches prefills and a step, then fetches the outputs of all launches before that step.

    Args:
      admit: whether queued sequences may take slots; preempted ones always may.
    """
    self._prefill(admit)
    generating = [
      slot for slot, sequence in enumerate(self._slots) if sequence is not None and slot not in self._starts
    ]
    if any(sequence.is_constrained or self._may_draft(sequence) for sequence in self._slots if sequence is not None):
      self._fetch_all()  # masks and drafts depend on all tokens so far
    drafts = self._draft(generating)
    grown = self._grow(generating, drafts)
    rows: list[_Row] = [
      (slot, slot, sequence, None) for slot in generating if (sequence := self._slots[slot]) is not None
    ]
    if rows:
      keep = np.zeros(len(self._slots), np.bool_)
      keep[[slot for slot, *_ in rows]] = True
      launched = self._engine.step(keep, _masks(rows), grown, **({'drafts': drafts} if drafts else {}))
      for slot, _, sequence, _ in rows:
        sequence.num_drafted += len(drafts.get(slot, ()))
      self.num_drafted_tokens += sum(map(len, drafts.values()))
      self._launch(launched, rows)
      self.num_steps += 1
      self.num_slot_steps += len(rows)
    self._fetch_all(but=1 if self.num_active else 0)
    return self._take_outbox()

  def recover(self) -> list[Delta]:
    """Ends the launched sequences as errors and empties the engine, after an exception of `advance`."""
    self.end(self._launched(), 'error')
    self._in_flight.clear()
    self._engine.reset()
    return self._take_outbox()

  def _prefill(self, admit: bool) -> None:
    budget = self._prefill_budget
    while reads := self._next_reads(admit):
      num_tokens, num_rows = self._engine.prefill_shape(reads[0][0])
      cost = num_tokens * (num_rows if len(reads) > 1 else 1)
      if cost > budget and budget < self._prefill_budget:
        return
      budget -= cost
      self._read(reads)

  def _next_reads(self, admit: bool) -> list[_Read]:
    """Returns the chunks of the next prefill: of prompts in slots, then of the queue. Admits nothing yet.

    Skips a chunk that needs another program than the first one; it keeps its place for the next prefill.
    """
    if self._epoch != self._engine.cache_epoch:
      self._epoch = self._engine.cache_epoch
      self._pool.forget()
    reads: list[_Read] = []
    for slot, start in self._starts.items():
      sequence = self._slots[slot]
      assert sequence is not None
      chunk = self._chunk(sequence, slot, start)
      if self._can_join(reads, chunk):
        reads.append((chunk, sequence))
    free, pledged = list(self._free), dict.fromkeys(range(self._engine.num_parts), 0)
    for sequence in itertools.chain(self._preempted, self._queue if admit else ()):
      first = None if self._is_full(reads) else self._first_chunk(sequence, free, pledged)
      if first is None:
        break  # first come, first served
      free.remove(first.slot)
      if self._can_join(reads, first):
        reads.append((first, sequence))
    return reads

  def _is_full(self, reads: list[_Read]) -> bool:
    return bool(reads) and len(reads) >= self._engine.prefill_shape(reads[0][0])[1]

  def _first_chunk(self, sequence: GeneratedSequence, free: list[int], pledged: dict[int, int]) -> Chunk | None:
    """Returns the first chunk of a prompt, with its slot; None if no part has enough blocks yet.

    Chooses the part that has most of the prompt's chunks already, then the one with most blocks. Adds the blocks of the
    prompt to `pledged`, the blocks of each part that the prompts of this prefill take.
    """
    places = []
    for part, slot in {slot // self._slots_of_part: slot for slot in reversed(free)}.items():
      chunks = self._pool.longest(self._reusable_keys(sequence), part)
      needed = self._pool.num_needed(self._num_known(sequence), chunks)
      left = self._pool.num_available(part) - pledged[part] - needed
      # A step starts a new block for about one of 16 texts: leave some, so that no text is preempted at once.
      if left >= sum(text.part == part for text in self._texts.values()) // 8:
        places.append((len(chunks), left, -part, slot, needed))
    if not places:
      return None
    num_chunks, _, part, slot, needed = max(places)
    pledged[-part] += needed
    return self._chunk(sequence, slot, num_chunks * self._engine.prefill_chunk)

  def _num_known(self, sequence: GeneratedSequence) -> int:
    """Returns the number of tokens of a waiting sequence, with the generated tokens of a preempted one."""
    return len(sequence.request.ids) + sequence.num_tokens

  def _keys(self, sequence: GeneratedSequence) -> list[bytes]:
    """Returns the keys of the whole chunks of a prompt; none if they may not be shared."""
    if sequence.chunk_keys is None:
      may_share = self._may_share(sequence.request)
      sequence.chunk_keys = chunk_keys(sequence.request, self._engine.prefill_chunk) if may_share else []
    return sequence.chunk_keys

  def _reusable_keys(self, sequence: GeneratedSequence) -> list[bytes]:
    """Returns the keys of the chunks of a prompt that it may reuse; at least one token is left to read."""
    return self._keys(sequence)[: (len(sequence.request.ids) - 1) // self._engine.prefill_chunk]

  def _may_share(self, request: Request) -> bool:
    # Scored prompts are read by different programs, whose numbers may differ in the last bits.
    return self._engine.can_reuse and not request.score_prompt

  def _chunk(self, sequence: GeneratedSequence, slot: int, start: int) -> Chunk:
    stop = min(start + self._engine.prefill_chunk, len(sequence.request.ids))
    return Chunk(request=sequence.request, slot=slot, start=start, stop=stop)

  def _can_join(self, reads: list[_Read], new: Chunk) -> bool:
    """Returns whether one prefill may read a chunk with others: by the same program, and without repeated chunks."""
    return not reads or (
      not self._is_full(reads)
      and self._program(new) == self._program(reads[0][0])
      and not any(self._repeats(new, other) for other, _ in reads)
    )

  def _program(self, chunk: Chunk) -> tuple[bool, bool, int]:
    """Returns the key of the compiled prefill that reads the chunk."""
    return chunk.start == 0, chunk.request.score_prompt, self._engine.prefill_shape(chunk)[0]

  def _repeats(self, new: Chunk, other: Chunk) -> bool:
    """Returns whether a chunk has the tokens of another one, so that it can reuse it after this prefill."""
    ids = new.request.ids
    return (
      (new.request.adapter, new.request.cache_key) == (other.request.adapter, other.request.cache_key)
      and self._may_share(other.request)
      and other.stop - other.start == self._engine.prefill_chunk
      and other.start == new.start
      and other.stop < len(ids)
      and ids[: other.stop] == other.request.ids[: other.stop]
    )

  def _read(self, reads: list[_Read]) -> None:
    """Admits the new prompts of a prefill, and launches it."""
    for chunk, sequence in reads:
      if self._slots[chunk.slot] is None:
        self._admit(chunk, sequence)
    read = []
    for chunk, sequence in reads:  # after all prompts have their shared chunks, as this may evict chunks
      text = self._texts[chunk.slot]
      has_blocks = self._pool.grow(text, self._num_known(sequence))
      assert has_blocks
      chunk = dataclasses.replace(chunk, blocks=tuple(text.blocks), restored=text.snapshot)
      text.snapshot = None  # later chunks continue the slot's own state
      read.append((chunk, sequence))
    rows: list[_Row] = [(row, chunk.slot, sequence, chunk) for row, (chunk, sequence) in enumerate(read)]
    self.num_prefills += 1
    saved: dict[int, int] = {}  # snapshot -> the row that saves it, the last one of several
    for row, (chunk, sequence) in enumerate(read):
      for key in self._keys(sequence)[chunk.start // self._engine.prefill_chunk :][:1]:
        if (snapshot := self._pool.share(self._texts[chunk.slot], key, chunk)) is not None:
          saved[snapshot] = row
      self.num_chunks += 1
      self.num_prompt_tokens += chunk.stop - chunk.start
      if chunk.stop < len(chunk.request.ids):
        self._starts[chunk.slot] = chunk.stop
      else:
        self._starts.pop(chunk.slot, None)
    of_row = {row: snapshot for snapshot, row in saved.items()}
    chunks = [dataclasses.replace(chunk, saved=of_row.get(row)) for row, (chunk, _) in enumerate(read)]
    score = chunks[0].request.score_prompt
    self._launch(self._engine.prefill(chunks, score_prompts=score, masks=_masks(rows)), rows)

  def _admit(self, chunk: Chunk, sequence: GeneratedSequence) -> None:
    """Gives the slot of a prompt's first chunk to its sequence."""
    self._free.remove(chunk.slot)  # before it leaves the queue: another thread may read has_work in between
    was_preempted = sequence in self._preempted
    (self._preempted if was_preempted else self._queue).remove(sequence)
    self._slots[chunk.slot] = sequence
    part = chunk.slot // self._slots_of_part
    self._texts[chunk.slot] = self._pool.open(part, self._reusable_keys(sequence))
    if not was_preempted:  # it would count its own chunks
      sequence.num_reused = chunk.start
    self.num_reused_tokens += chunk.start
    self._on_admit(sequence)

  def _may_draft(self, sequence: GeneratedSequence) -> bool:
    return sequence.may_draft(self._engine.num_drafts)

  def _draft(self, generating: list[int]) -> dict[int, tuple[int, ...]]:
    """Returns the drafts of the next step, by slot; a step with token masks checks none.

    If a model guesses, also slots without drafts in this step are keys, if they may have some later.
    """
    sequences = {slot: sequence for slot in generating if (sequence := self._slots[slot]) is not None}
    num, by_model = self._engine.num_drafts, self._engine.has_draft_model
    if not num or ((is_masked := any(each.is_constrained for each in sequences.values())) and not by_model):
      return {}
    drafts = {
      slot: () if is_masked else sequence.draft(num, by_model=by_model)
      for slot, sequence in sequences.items()
      if self._may_draft(sequence)
    }
    return {slot: tokens for slot, tokens in drafts.items() if tokens or by_model}

  def _grow(self, generating: list[int], drafts: dict[int, tuple[int, ...]]) -> list[tuple[int, int]]:
    """Gives blocks to the sequences whose next tokens need one, and returns (slot, block) of each new block.

    Drops drafts without a block, and preempts sequences if there are too few blocks.
    """
    grown = []
    chosen = {*generating}
    slots = [slot for slot in self._texts if slot in chosen]
    for slot in slots:
      while (sequence := self._slots[slot]) is not None:
        text = self._texts[slot]
        num_blocks = len(text.blocks)
        # The step writes the newest token, which the host may not know yet.
        num_tokens = len(sequence.request.ids) + sequence.num_launched
        if slot in drafts:
          ahead = num_tokens + len(drafts[slot])
          # A head that continues from its own activations writes keys and values ahead of the drafts, if there is room.
          further = max(self._engine.num_drafts - 2, 0) if self._engine.has_draft_model else 0
          counts = min(ahead + further, self._engine.max_len), ahead
          if not any(self._pool.grow(text, count) for count in counts):
            del drafts[slot]
        if self._pool.grow(text, num_tokens):
          grown += [(slot, block) for block in text.blocks[num_blocks:]]
          break
        if self._in_flight:
          self._fetch_all()  # some sequences may have ended
        else:
          self._preempt(drafts, self._last_admitted(text.part))
    return [(slot, block) for slot, block in grown if self._slots[slot] is not None]

  def _last_admitted(self, part: int) -> int:
    """Returns the slot of a part to preempt first: of the lowest priority, the one that was admitted last."""
    slots = [slot for slot in reversed(self._texts) if self._texts[slot].part == part]
    sequences = {slot: sequence for slot in slots if (sequence := self._slots[slot]) is not None}
    return max(sequences, key=lambda slot: sequences[slot].request.priority)

  def _preempt(self, drafts: dict[int, tuple[int, ...]], slot: int) -> None:
    """Makes the sequence of a slot wait for blocks and start again; no launch of it is in flight."""
    sequence = self._slots[slot]
    assert sequence is not None
    sequence.begin_again()
    drafts.pop(slot, None)
    self._preempted.appendleft(sequence)  # before the release: another thread may read has_work in between
    self._release(slot)
    self.num_preemptions += 1

  def _launch(self, launched: Launched, rows: list[_Row]) -> None:
    """Records a launch, and frees the slots of sequences whose last token it computes."""
    self._in_flight.append((launched, rows))
    for _, slot, sequence, _ in rows:
      if slot not in self._starts:
        sequence.num_launched += 1
        if sequence.num_launched >= sequence.request.max_tokens:
          self._release(slot)

  def _release(self, slot: int) -> None:
    self._pool.close(self._texts.pop(slot))
    self._slots[slot] = None
    self._free.append(slot)
    self._starts.pop(slot, None)

  def _launched(self) -> list[GeneratedSequence]:
    """Returns the sequences in slots, and sequences whose last token was launched but not fetched."""
    in_flight = [sequence for _, rows in self._in_flight for _, _, sequence, _ in rows]
    return list(dict.fromkeys([*in_flight, *(sequence for sequence in self._slots if sequence is not None)]))

  def _take_outbox(self) -> list[Delta]:
    deltas, self._outbox = self._outbox, []
    return deltas

  def _fetch_all(self, but: int = 0) -> None:
    """Fetches the outputs of all launches except the last `but`."""
    while len(self._in_flight) > but:
      self._fetch(*self._in_flight[0])
      self._in_flight.popleft()  # after the fetch: if it raises, `recover` still needs the rows

  def _fetch(self, launched: Launched, rows: list[_Row]) -> None:
    outputs = launched.read()
    if np.ndim(outputs.tokens) == 1:
      self._take(outputs, rows)
      return
    for column in range(len(outputs.tokens)):
      column_outputs = jax.tree.map(lambda x, column=column: x[column], outputs)
      valid_rows = [row for row in rows if column_outputs.is_valid[row[0]]]
      if column:
        for _, _, sequence, _ in valid_rows:
          sequence.num_launched += 1
          sequence.num_accepted += 1
        self.num_accepted_tokens += len(valid_rows)
      self._take(column_outputs, valid_rows)

  def _take(self, outputs: Outputs, rows: list[_Row]) -> None:
    for row, slot, sequence, chunk in rows:
      if sequence.finish_reason is not None:
        continue  # was launched before the host knew that the sequence had ended
      num_tokens = sequence.num_tokens
      delta = sequence.take(outputs, row, chunk)
      self.num_generated_tokens += sequence.num_tokens - num_tokens
      if delta.finish_reason is not None and self._slots[slot] is sequence:
        self._release(slot)
      if delta.text or delta.logprobs or delta.finish_reason is not None:
        self._outbox.append(delta)


def _masks(rows: list[_Row]) -> dict[int, np.ndarray] | None:
  """Returns the token masks of constrained rows, also of chunks that end no prompt; None if there are none."""
  return {row: mask for row, _, each, _ in rows if (mask := each.mask) is not None} or None
