"""Step: generates the next token of every slot, or several tokens by checking drafts.

    step = Step(programs)
    state, outputs = step(variables, state, step.make_inputs(keep))

A program computes `generate_tokens` for one of a few numbers of rows. Slots that are finished, or whose prompts are not
read to the end, stay unchanged. With drafts (drafts.py) a slot has several rows, one for each token that is checked.

Shapes: N slots, n of them in a step, R rows with drafts, M blocks of a text in D parts, k drafts, V vocabulary, W words
of V bits.
"""

from collections.abc import Mapping, Sequence
import functools
import itertools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.decoding import nextn_drafts
from spmd_tasks.decoding.cache_arrays import write_tokens
from spmd_tasks.decoding.constraints import mask_rows
from spmd_tasks.decoding.decode_programs import DecodePrograms
from spmd_tasks.decoding.decode_state import (
  DecodeState,
  Forward,
  Outputs,
  append_tokens,
  put_rows,
  sample_next_tokens,
  sample_outputs,
)
from spmd_tasks.decoding.drafts import DraftRows
from spmd_tasks.runtime.task import Variables

_FEWEST_ROWS, _MANY_ROWS = 2, 64  # of the smallest step: accelerators read all weights for one row as for 64
_LEAST_ROWS = {'gpu': 16}  # of any step: XLA multiplies fewer rows by kernels that take longer


class StepInputs(struct.PyTreeNode):
  """What a step takes besides the variables and the state.

  Attributes:
    keep: bool [N]; slots with False become inactive.
    slots: int32 [n], the slot of each of n rows, all different; N or more for an unused row. None: row i is slot i.
    tables: int32 [D, R/D, M], the blocks of each row, see `write_tokens`; None if the cache has no blocks.
    masks: uint32 [N, W], the tokens that each slot may take (constraints.py); None allows all.
    drafts: R rows for the newest tokens and drafts of the n slots; None: one row for each slot.
  """

  keep: Any
  slots: Any = None
  tables: Any = None
  masks: Any = None
  drafts: DraftRows | None = None


def generate_tokens(
  forward: Forward,
  variables: Any,
  state: DecodeState,
  inputs: StepInputs,
  *,
  num_top_logprobs: int = 0,
  heads: Sequence[int] = (),
) -> tuple[DecodeState, Outputs]:
  """Samples the next token of every active slot. Outputs are [N].

  With drafts, outputs are [k + 1, N], up to k + 1 tokens of each slot. If the model has `heads`, they guessed these
  drafts in the step before, and guess the next ones now.
  """
  state = state.replace(active=state.active & inputs.keep)
  rows, masks = state.replace(cache=None), inputs.masks
  if inputs.slots is not None:
    rows, masks = jax.tree.map(lambda x: jnp.take(x, inputs.slots, axis=0, mode='clip'), (rows, masks))
    rows = rows.replace(active=rows.active & (inputs.slots < inputs.keep.shape[0]))
  call = forward, variables, state.cache, rows, inputs
  if inputs.drafts is None:
    rows, outputs, cache = next_tokens(*call, masks, num_top_logprobs, heads)
  else:
    rows, outputs, cache = _check_drafts(*call, num_top_logprobs, heads)
  if inputs.slots is not None:
    rows = put_rows(state.replace(cache=None), rows, inputs.slots)
    outputs = _outputs_of_slots(outputs, inputs)
  return rows.replace(cache=cache), outputs


def next_tokens(
  forward: Forward,
  variables: Any,
  cache: Any,
  rows: DecodeState,
  inputs: StepInputs,
  masks: jax.Array | None = None,
  num_top_logprobs: int = 0,
  heads: Sequence[int] = (),
) -> tuple[DecodeState, Outputs, Any]:
  """Samples a token of each of n rows; returns them without a cache, outputs [n] and the new cache."""
  batch = model_batch(rows.tokens, rows.positions, rows.active, rows.adapters, inputs.slots, inputs.tables, heads)
  logits, new = forward(variables, cache, batch)
  new_rows, outputs = sample_next_tokens(logits[:, 0], rows, masks, num_top_logprobs)
  if heads:
    following = {'following': outputs.tokens[:, None], 'lengths': jnp.ones_like(rows.tokens)}
    new_rows, new = nextn_drafts.update_drafts(new_rows, forward, variables, cache, batch, new, heads, **following)
  lengths = rows.active.astype(jnp.int32)
  cache = write_tokens(cache, new, starts=rows.positions, lengths=lengths, slots=inputs.slots, tables=inputs.tables)
  return new_rows, outputs, cache


def _check_drafts(
  forward: Forward,
  variables: Any,
  cache: Any,
  rows: DecodeState,
  inputs: StepInputs,
  num_top_logprobs: int,
  heads: Sequence[int],
) -> tuple[DecodeState, Outputs, Any]:
  """Samples up to k + 1 tokens of each of n texts, whose newest tokens and drafts are R rows of one call.

  Returns the texts without a cache, outputs [k + 1, n] and the new cache.
  """
  drafts = inputs.drafts
  assert drafts is not None
  assert inputs.slots is not None
  if heads:
    drafts = drafts.replace(tokens=nextn_drafts.tokens_of_rows(rows.drafts, drafts))
  of_text = functools.partial(jnp.take, indices=drafts.owners, mode='clip')
  # Of N texts, text i is in slot i, whose state needs no gather from other devices.
  drafts = drafts.replace(slots=None if len(inputs.slots) == len(inputs.keep) else inputs.slots)
  slots, positions = of_text(inputs.slots), of_text(rows.positions) + drafts.columns
  tokens = jnp.where(drafts.columns == 0, of_text(rows.tokens), drafts.tokens)
  active = of_text(rows.active) & (drafts.owners < len(rows.tokens))
  batch = model_batch(tokens, positions, active, of_text(rows.adapters), slots, inputs.tables, heads)
  batch |= {'drafts': drafts}
  logits, new = forward(variables, cache, batch)
  new_rows, outputs = _sample_drafted(logits[:, 0], rows, drafts, num_top_logprobs)
  # A text keeps the newest token and the right drafts, from each of which a valid token was sampled.
  num_read = jnp.sum(outputs.is_valid, axis=0)
  active &= drafts.columns < of_text(num_read)
  lengths = active.astype(jnp.int32)
  if heads:
    batch |= {'segment_ids': lengths[:, None]}
    following = {'following': outputs.tokens.T, 'lengths': num_read, 'rows': drafts}
    new_rows, new = nextn_drafts.update_drafts(new_rows, forward, variables, cache, batch, new, heads, **following)
  places: Any = {'slots': slots, 'tables': inputs.tables, 'drafts': drafts}
  cache = write_tokens(cache, new, starts=positions, lengths=lengths, **places)
  return new_rows, outputs, cache


def model_batch(
  tokens: jax.Array,
  positions: jax.Array,
  active: jax.Array,
  adapters: jax.Array,
  slots: jax.Array | None,
  tables: jax.Array | None,
  heads: Sequence[int],
) -> dict[str, Any]:
  """Returns the model's batch of one token per row."""
  return {
    'ids': tokens[:, None],
    'segment_ids': active[:, None].astype(jnp.int32),
    'segment_pos': jnp.where(active, positions, 0)[:, None],
    'adapters': adapters,
    **({} if slots is None else {'slots': slots}),
    **({} if tables is None else {'tables': tables}),
    **({'returns_hidden': True} if heads else {}),
  }


def _outputs_of_slots(outputs: Outputs, inputs: StepInputs) -> Outputs:
  """Returns the outputs of all N slots from those of the n of a step."""
  column = () if inputs.drafts is None else (slice(None),)

  def put(x: jax.Array) -> jax.Array:
    shape = (*x.shape[: len(column)], len(inputs.keep), *x.shape[len(column) + 1 :])
    return jnp.zeros(shape, x.dtype).at[(*column, inputs.slots)].set(x, mode='drop', unique_indices=True)

  return jax.tree.map(put, outputs)


def _sample_drafted(
  logits: jax.Array, state: DecodeState, drafts: DraftRows, num_top_logprobs: int
) -> tuple[DecodeState, Outputs]:
  """Samples up to k + 1 tokens of each of n texts from logits [R, V]; outputs are [k + 1, n].

  Samples all rows at once, each as if the drafts before it were right; drops the tokens after the first wrong draft.
  """
  num_rows, vocab_size = logits.shape
  take: Any = functools.partial(jnp.take, indices=drafts.owners, axis=0, mode='clip')
  rows = jax.tree.map(take, state.replace(cache=None, seen=None, counts=None))
  is_used = rows.active & (drafts.owners < len(state.tokens))
  rows = rows.replace(positions=rows.positions + drafts.columns, active=is_used)
  tokens = jnp.where(drafts.columns > 0, drafts.tokens, vocab_size)  # the scatters drop V
  earlier = jnp.take(tokens, drafts.earlier, mode='fill', fill_value=vocab_size)
  read = jnp.concatenate([tokens[:, None], earlier], axis=1)  # the drafts that precede what a row samples

  def occurrences() -> tuple[jax.Array, jax.Array]:
    numbers, seen, counts = jnp.arange(num_rows)[:, None], take(state.seen), take(state.counts)
    return seen.at[numbers, read].set(True, mode='drop'), counts.at[numbers, read].add(1, mode='drop')

  by_row = sample_outputs(logits, rows, None, None if state.seen is None else occurrences, num_top_logprobs)
  outputs = jax.tree.map(lambda x: jnp.take(x, drafts.rows.T, axis=0, mode='clip'), by_row)
  next_rows = drafts.rows.T[1:]
  is_right = (next_rows < num_rows) & (jnp.take(drafts.tokens, next_rows, mode='clip') == outputs.tokens[:-1])
  continues = is_right & ~outputs.is_finished[:-1]
  is_valid = jnp.stack([*itertools.accumulate([state.active, *continues], jnp.logical_and)])
  outputs = outputs.replace(is_valid=is_valid)
  last = jnp.maximum(jnp.sum(is_valid, axis=0) - 1, 0)
  tokens, is_finished = (x[last, jnp.arange(len(last))] for x in (outputs.tokens, outputs.is_finished))
  added = jnp.where(is_valid, outputs.tokens, vocab_size)
  return append_tokens(state, tokens, state.positions + 1 + last, is_finished, added), outputs


class Step:
  """The compiled steps of a model.

  Attributes:
    row_counts: numbers of rows that steps are compiled for, ascending. A step takes the least that holds all busy
      slots: at least 2, as products of one row have other bits; on GPUs and TPUs at least 64 or N, on GPUs at least 16,
      which may be more than N. If the mesh splits slots, a step computes all N.
    num_drafts: k, how many drafts of a slot a step may check.
  """

  def __init__(self, programs: DecodePrograms):
    """Compiles nothing yet."""
    self._programs, self._model, self._layout = programs, programs.model, programs.layout
    self._num_slots = self._model.settings.num_slots
    self.num_drafts = self._model.settings.num_drafts
    self.row_counts = self._row_counts()

  def __call__(self, variables: Variables, state: DecodeState, inputs: StepInputs) -> tuple[DecodeState, Outputs]:
    """Samples the next token of every active slot; see generate_tokens."""
    return self.compile(inputs)(self._model.arrange(variables), state, inputs)

  def compile(self, inputs: StepInputs) -> Any:
    """Compiles the step of inputs of these shapes."""
    num_rows = self._num_slots if inputs.slots is None else len(inputs.slots)
    name = ('step', num_rows, inputs.masks is not None, inputs.drafts and len(inputs.drafts.owners))
    return self._programs.update(name, self._function(inputs), inputs)

  def lower(self) -> Any:
    """Lowers the step of all slots and drafts, for inspection and planning."""
    num_rows = self.row_counts[-1]
    draft_rows = self.draft_row_counts(num_rows)[-1] if self.num_drafts else 0
    inputs = self._any_inputs(num_rows, draft_rows=draft_rows)
    return self._programs.lower_update(self._function(inputs), inputs)

  def make_inputs(
    self,
    keep: np.ndarray,
    *,
    masks: Mapping[int, np.ndarray] | None = None,
    blocks: Mapping[int, Sequence[int]] | None = None,
    drafts: Mapping[int, Sequence[int]] | None = None,
  ) -> StepInputs:
    """Returns the inputs of the smallest step for these slots, as host arrays.

    Args:
      keep: bool [N], the slots that have a sequence.
      masks: the token masks of some slots; a step with masks is another program.
      blocks: the blocks of the slots to keep; None: each slot has its own.
      drafts: up to k tokens of some slots; not together with masks. If a model guesses them, only their number counts;
        a slot that may have drafts in a later step has an empty tuple.
    """
    (busy,) = np.nonzero(keep)
    num_rows = next(rows for rows in self.row_counts if rows >= len(busy))
    slots, tables = self._slots_and_tables(busy, num_rows, blocks)
    if drafts and (any(drafts.values()) or (self._model.heads and not masks)):
      num_tokens = len(busy) + sum(map(len, drafts.values()))
      draft_rows = next(rows for rows in self.draft_row_counts(num_rows) if rows >= num_tokens)
      rows, tables = self._draft_rows(slots, tables, drafts, draft_rows)
      return StepInputs(keep=keep, slots=slots, tables=tables, drafts=rows)
    return StepInputs(
      keep=keep,
      slots=None if num_rows == self._num_slots else slots,
      tables=tables,
      masks=mask_rows(masks, self._num_slots, self._model.vocab_size) if masks else None,
    )

  def any_inputs(self, *, constrain: bool = False, num_texts: int | None = None) -> list[StepInputs]:
    """Returns inputs for each program that up to `num_texts` texts need; a step of them keeps no slot.

    None: as many texts as there are slots. With `constrain`, also programs with token masks.
    """
    inputs = []
    most = self._num_slots if num_texts is None else min(num_texts, self._num_slots)
    larger = [rows for rows in self.row_counts if rows >= most]
    for num_rows in (*(rows for rows in self.row_counts if rows < most), *larger[:1]):
      inputs += [self._any_inputs(num_rows, masked=masked) for masked in ((False, True) if constrain else (False,))]
      if self.num_drafts:
        inputs += [self._any_inputs(num_rows, draft_rows=rows) for rows in self.draft_row_counts(num_rows)]
    return inputs

  def draft_row_counts(self, num_rows: int) -> tuple[int, ...]:
    """Returns the numbers of rows of steps that check drafts of `num_rows` slots, ascending."""
    if self._layout.num_parts > 1:
      return (self._layout.num_parts * self._layout.slots_per_part * (self.num_drafts + 1),)
    return tuple(dict.fromkeys(num_rows * (num + 1) for num in (1, self.num_drafts)))

  def _row_counts(self) -> tuple[int, ...]:
    num_slots, platform, is_split = self._num_slots, self._model.platform, self._layout.num_parts > 1
    pads_rows = platform != 'cpu' and not self.num_drafts  # drafts give a slot several rows
    fewest = _MANY_ROWS if pads_rows else _FEWEST_ROWS
    smaller = () if is_split else (fewest * 4**i for i in range(num_slots))
    most = max(num_slots, _LEAST_ROWS.get(platform, 1)) if pads_rows and not is_split else num_slots
    return (*itertools.takewhile(lambda rows: rows < num_slots, smaller), most)

  def _function(self, inputs: StepInputs) -> Any:
    # No slot of a step without masks and drafts may have drafts later.
    heads = () if inputs.masks is None and inputs.drafts is None else self._model.heads
    num_top_logprobs = self._model.settings.num_top_logprobs
    return functools.partial(generate_tokens, num_top_logprobs=num_top_logprobs, heads=heads)

  def _any_inputs(self, num_rows: int, *, masked: bool = False, draft_rows: int = 0) -> StepInputs:
    layout, num_slots = self._layout, self._num_slots
    tables: Any = np.zeros_like(layout.empty_tables(num_rows))
    slots, drafts = np.full(num_rows, num_slots, np.int32), None
    if draft_rows:
      drafts, tables = self._draft_rows(slots, tables, {}, draft_rows)
    return StepInputs(
      keep=np.zeros(num_slots, np.bool_),
      slots=None if num_rows == num_slots and not draft_rows else slots,
      tables=tables,
      masks=mask_rows({}, num_slots, self._model.vocab_size) if masked else None,
      drafts=drafts,
    )

  def _slots_and_tables(
    self, busy: np.ndarray, num_rows: int, blocks: Mapping[int, Sequence[int]] | None
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns the slot of each row and the rows' tables; of N rows, row i has slot i."""
    layout = self._layout
    slots = self._num_slots + np.arange(num_rows, dtype=np.int32)
    rows = busy if num_rows == self._num_slots else np.arange(len(busy))
    slots[rows] = busy
    tables = layout.empty_tables(num_rows)
    for row, slot in zip(rows.tolist(), busy.tolist(), strict=True):
      row_blocks = layout.own_blocks(slot) if blocks is None else blocks.get(slot, ())
      part, row_of_part = divmod(row, tables.shape[1])
      table = tables[part, row_of_part]
      table[: len(row_blocks)] = row_blocks
      if part:
        table[: len(row_blocks)] -= part * layout.blocks_per_part
    return slots, tables

  def _draft_rows(
    self, slots: np.ndarray, tables: np.ndarray, drafts: Mapping[int, Sequence[int]], num_rows: int
  ) -> tuple[DraftRows, np.ndarray]:
    """Assigns rows to the newest tokens and drafts, each in the part of its slot; returns them and their tables."""
    layout = self._layout
    (places,) = np.nonzero(slots < self._num_slots)
    tokens = [(0, *drafts.get(slot, ())) for slot in slots[places].tolist()]
    counts, parts = np.array([*map(len, tokens)], np.int32), slots[places] // layout.slots_per_part
    before, rows_per_part = np.cumsum(counts) - counts, num_rows // layout.num_parts
    firsts = parts * rows_per_part + before - before[np.searchsorted(parts, parts)]
    columns = np.arange(self.num_drafts + 1)
    is_used = columns < counts[:, None]
    rows: Any = DraftRows(
      owners=np.full(num_rows, len(slots), np.int32),
      columns=np.zeros(num_rows, np.int32),
      tokens=np.zeros(num_rows, np.int32),
      earlier=np.full((num_rows, self.num_drafts), num_rows, np.int32),
      rows=np.full((len(slots), self.num_drafts + 1), num_rows, np.int32),
    )
    rows.rows[places] = np.where(is_used, firsts[:, None] + columns, num_rows)
    used = rows.rows[places][is_used]
    rows.owners[used] = np.repeat(places, counts)
    rows.columns[used] = is_used.nonzero()[1]
    rows.tokens[used] = [*itertools.chain(*tokens)]
    rows.earlier[used] = np.where(columns[:-1] < rows.columns[used, None], used[:, None] - 1 - columns[:-1], num_rows)
    row_tables = layout.empty_tables(num_rows).reshape(num_rows, -1)
    row_tables[used] = tables.reshape(-1, layout.table_len)[rows.owners[used]]
    return rows, row_tables.reshape(layout.num_parts, rows_per_part, -1)
