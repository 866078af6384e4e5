"""FakeEngine: an engine without a model, whose tokens are known in advance.

The engine answers a prompt with the prompt's own bytes, repeated in a cycle, and records its calls in `log`. It reads
the bytes from a cache in which each cell depends on all cells before it, as keys and values do: a cell that was
computed with other weights, after other tokens or not at all changes the answer.
"""

from collections.abc import Sequence
import dataclasses
import threading

import numpy as np

from spmd_tasks.decoding import Request
from spmd_tasks.decoding.decode_state import Outputs
from spmd_tasks.decoding.requests import Chunk
from spmd_tasks.inputs import ByteTokenizer

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos_id
NO_TOKEN = ord('#')
MIN_BUCKET = 4


class Launched:
  def __init__(self, outputs, error=None):
    self.outputs, self.error = outputs, error

  def read(self):
    if self.error is not None:
      raise self.error
    return self.outputs


def cell(before: int, token: int) -> int:
  """The cell of a token, given the cell before it."""
  return (before * 1_000_003 + 12_345) % 2**31 * 512 + token


def token_of(before: int, here: int) -> int:
  """The token of a cell; NO_TOKEN if the cell does not follow from the one before it."""
  token = here % 512
  return token if cell(before, token) == here else NO_TOKEN


@dataclasses.dataclass
class Slot:
  """A request, how many tokens of its prompt were read, and how many tokens were generated."""

  request: Request
  length: int
  num_tokens: int = 0


class FakeEngine:
  """Slots in host memory; `fail_next` makes the next step raise when it is read."""

  has_draft_model = False

  def __init__(
    self,
    *,
    num_slots=4,
    prefill_rows=1,
    prefill_chunk=8,
    max_len=128,
    num_top=2,
    can_reuse=True,
    num_snapshots=0,
    num_parts=1,
    num_blocks=None,
    gate: threading.Event | None = None,
  ):
    self.num_slots, self.prefill_rows, self.max_len, self.num_top = num_slots, prefill_rows, max_len, num_top
    self.prefill_chunk, self.can_reuse, self.num_snapshots = prefill_chunk, can_reuse, num_snapshots
    self.block_tokens, self.num_parts, self.num_drafts = 4, num_parts, 0
    self.num_blocks = num_blocks or num_parts * -(-num_slots // num_parts) * -(-max_len // 4)
    self.log: list[tuple] = []
    self.tokens: list[list[int]] = []  # of each launch
    self.fail_next: Exception | None = None
    self.gate = gate
    self.is_warm = False
    self.cache_epoch = 0
    self._weights = 0  # added to each token, as is the number of the request's adapter
    self._empty()

  @property
  def weights(self):
    return self._weights

  @weights.setter
  def weights(self, weights):
    self._weights = weights
    self.cache_epoch += 1

  def warm_up(self):
    self.is_warm = True

  def reset(self):
    self._empty()
    self.cache_epoch += 1
    self.log.append(('reset',))

  def _empty(self):
    self.slots: list[Slot | None] = [None] * self.num_slots
    self.pool: dict[tuple[int, int], int] = {}  # (block, place in it) -> cell
    self.blocks: list[list[int]] = [[] for _ in range(self.num_slots)]
    self.states = [0] * self.num_slots  # of each slot, the cell of the prompt's last token that was read
    self.snapshots = [0] * self.num_snapshots

  def _place(self, slot: int, position: int) -> tuple[int, int]:
    """Where a position of a slot's text is."""
    block = self.blocks[slot][position // self.block_tokens]
    assert block // (self.num_blocks // self.num_parts) == slot // -(-self.num_slots // self.num_parts)
    return block, position % self.block_tokens

  def _cell(self, slot: int, position: int) -> int:
    return self.pool.get(self._place(slot, position), 0) if position >= 0 else 0

  def prefill_shape(self, chunk: Chunk) -> tuple[int, int]:
    bucket = max(MIN_BUCKET, 1 << (chunk.stop - chunk.start - 1).bit_length())
    return min(bucket, self.prefill_chunk), self.prefill_rows

  def prefill(self, chunks: Sequence[Chunk], *, score_prompts: bool = False, masks=None) -> Launched:
    self.log.append(('prefill', tuple(chunk.slot for chunk in chunks)))
    assert 0 < len(chunks) <= self.prefill_rows
    assert len({chunk.slot for chunk in chunks}) == len(chunks)
    saved = [chunk.saved for chunk in chunks if chunk.saved is not None]
    assert len(set(saved)) == len(saved)
    assert len({(chunk.start > 0, self.prefill_shape(chunk)) for chunk in chunks}) == 1
    for chunk in chunks:
      self._check(chunk, score_prompts)
      self.blocks[chunk.slot] = list(chunk.blocks)
    rows, snapshots = [], list(self.snapshots)
    for chunk in chunks:
      state = self._cell(chunk.slot, chunk.start - 1)
      if self.num_snapshots and chunk.start:  # what the blocks have is not enough
        state = self.states[chunk.slot] if chunk.restored is None else snapshots[chunk.restored]
      for place in range(chunk.start, chunk.stop):
        token = (chunk.request.ids[place] + self.weights + chunk.request.adapter) % 512
        self.pool[self._place(chunk.slot, place)] = state = cell(state, token)
      self.states[chunk.slot] = state
      if chunk.saved is not None:
        self.snapshots[chunk.saved] = state
      self.slots[chunk.slot] = Slot(chunk.request, chunk.stop)
      rows.append(self._next(chunk.slot, (masks or {}).get(len(rows))))
    outputs = self._outputs(rows + [None] * (self.prefill_rows - len(rows)))
    return Launched(self._score(outputs, chunks) if score_prompts else outputs)

  def _check(self, chunk: Chunk, score_prompts: bool):
    request = chunk.request
    assert chunk.start % self.prefill_chunk == 0
    assert chunk.start < chunk.stop == min(chunk.start + self.prefill_chunk, len(request.ids))
    assert len(request.ids) <= self.max_len - request.max_tokens
    assert score_prompts == request.score_prompt
    slot_state = self.slots[chunk.slot]
    is_next = slot_state is not None and slot_state.request is request and slot_state.length == chunk.start
    assert chunk.start == 0 or is_next or (self.can_reuse and not score_prompts)

  def step(self, keep: np.ndarray, masks=None, grown=(), drafts=None) -> Launched:
    assert not drafts  # num_drafts is 0
    if self.gate is not None:
      self.gate.wait(10)
    for slot, block in grown:
      self.blocks[slot].append(block)
    self.log.append(('step', tuple(keep.tolist())))
    for slot, kept in enumerate(keep):
      slot_state = self.slots[slot]
      if not kept and slot_state is not None and slot_state.length == len(slot_state.request.ids):
        self.slots[slot] = None
    error, self.fail_next = self.fail_next, None
    outputs = self._outputs([self._next(slot, (masks or {}).get(slot)) for slot in range(self.num_slots)])
    return Launched(outputs, error)

  def _next(self, slot: int, mask=None):
    slot_state = self.slots[slot]
    if slot_state is None or slot_state.length < len(slot_state.request.ids) or not slot_state.request.max_tokens:
      return None
    place = slot_state.num_tokens % slot_state.length
    token = token_of(self._cell(slot, place - 1), self._cell(slot, place))
    if mask is not None:  # the first allowed token from there on
      allowed = [other for other in range(TOKENIZER.vocab_size) if mask[other // 32] >> np.uint32(other % 32) & 1]
      token = min(allowed, key=lambda other: (other < token, other))
    if (
      slot_state.num_tokens
    ):  # a step writes the token before; it is in no chunk, so no other prompt may reuse its cell
      self.pool[self._place(slot, slot_state.length + slot_state.num_tokens - 1)] = 0
    slot_state.num_tokens += 1
    is_finished = token in slot_state.request.stop_ids or slot_state.num_tokens >= slot_state.request.max_tokens
    if is_finished:
      self.slots[slot] = None
    return token, is_finished

  def _outputs(self, rows) -> Outputs:
    tokens = np.array([0 if row is None else row[0] for row in rows], np.int32)
    self.tokens.append(tokens.tolist())
    return Outputs(
      tokens=tokens,
      logprobs=-tokens.astype(np.float32) / 100,
      top_ids=(tokens[:, None] + np.arange(self.num_top)) % 512,
      top_logprobs=self._top_logprobs(len(rows)),
      is_valid=np.array([row is not None for row in rows]),
      is_finished=np.array([row is not None and row[1] for row in rows]),
    )

  def _score(self, outputs: Outputs, chunks: Sequence[Chunk]) -> Outputs:
    targets = np.zeros((self.prefill_rows, self.prefill_chunk), np.int32)
    for row, chunk in enumerate(chunks):
      following = chunk.request.ids[chunk.start + 1 : chunk.stop + 1]
      targets[row, : len(following)] = following
    return outputs.replace(
      prompt_logprobs=-targets.astype(np.float32) / 100,
      prompt_top_ids=(targets[..., None] + np.arange(self.num_top)) % 512,
      prompt_top_logprobs=self._top_logprobs(self.prefill_rows, self.prefill_chunk),
    )

  def _top_logprobs(self, *shape: int) -> np.ndarray:
    return np.broadcast_to(-np.arange(self.num_top, dtype=np.float32), (*shape, self.num_top))
