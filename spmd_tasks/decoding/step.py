"""Step: generates the next token of every slot, by one program for each number of rows.

    step = Step(programs)
    state, outputs = step(variables, state, step.make_inputs(keep))

Shapes: N slots, R rows of a step, M blocks of a text in D parts, k drafts.
"""

from collections.abc import Mapping, Sequence
import functools
import itertools
from typing import Any

import numpy as np

from spmd_tasks.decoding import step_functions
from spmd_tasks.decoding.constraints import mask_rows
from spmd_tasks.decoding.decode_programs import DecodePrograms
from spmd_tasks.decoding.drafts import DraftRows
from spmd_tasks.decoding.step_functions import DecodeState, Outputs, StepInputs
from spmd_tasks.runtime.task import Variables

_FEWEST_ROWS, _MANY_ROWS = 2, 64  # of the smallest step: accelerators read all weights for one row as for 64
_LEAST_ROWS = {'gpu': 16}  # of any step: XLA multiplies fewer rows by kernels that take longer


class Step:
  """The compiled steps of a model.

  Attributes:
    row_counts: how many rows a step may compute, in order: the least that hold all busy slots; on GPUs and TPUs 64 or N
      at least, on GPUs never fewer than 16, which may be more than N. One row would not have the bits of several, whose
      products are of another kind. Where the mesh splits slots, each step computes all N.
    num_drafts: k, how many drafts of a slot a step may check.
  """

  def __init__(self, programs: DecodePrograms):
    """Compiles nothing yet."""
    self._programs, self._model, self._layout = programs, programs.model, programs.layout
    self._num_slots = self._model.settings.num_slots
    self.num_drafts = self._model.settings.num_drafts
    self.row_counts = self._row_counts()

  def __call__(self, variables: Variables, state: DecodeState, inputs: StepInputs) -> tuple[DecodeState, Outputs]:
    """Samples the next token of every active slot; see step_functions.step."""
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
      keep: bool [N].
      masks: the token masks of some slots; without any another program runs.
      blocks: the blocks of the slots to keep; None: each slot has its own.
      drafts: up to k tokens of some slots, which masks exclude. If a model guesses them, they say only how many; a slot
        that may have some later has none here.
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

  def any_inputs(self, *, constrain: bool = False) -> list[StepInputs]:
    """Returns inputs for each program; a step of them keeps no slot. With `constrain`, also those with token masks."""
    inputs = []
    for num_rows in self.row_counts:
      inputs += [self._any_inputs(num_rows, masked=masked) for masked in ((False, True) if constrain else (False,))]
      if self.num_drafts:
        inputs += [self._any_inputs(num_rows, draft_rows=rows) for rows in self.draft_row_counts(num_rows)]
    return inputs

  def draft_row_counts(self, num_rows: int) -> tuple[int, ...]:
    """Returns how many rows a step with drafts may compute, in order, if it has `num_rows` without."""
    if self._layout.num_parts > 1:
      return (self._layout.num_parts * self._layout.slots_per_part * (self.num_drafts + 1),)
    return tuple(dict.fromkeys(num_rows * (num + 1) for num in (1, self.num_drafts)))

  def _row_counts(self) -> tuple[int, ...]:
    num_slots, platform, is_split = self._num_slots, self._model.platform, self._layout.num_parts > 1
    many = platform != 'cpu' and not self.num_drafts  # which give a slot several rows
    fewest = _MANY_ROWS if many else _FEWEST_ROWS
    fewer = () if is_split else (fewest * 4**i for i in range(num_slots))
    most = max(num_slots, _LEAST_ROWS.get(platform, 1)) if many and not is_split else num_slots
    return (*itertools.takewhile(lambda rows: rows < num_slots, fewer), most)

  def _function(self, inputs: StepInputs) -> Any:
    # A step without masks and drafts is of slots that have no drafts later either.
    heads = () if inputs.masks is None and inputs.drafts is None else self._model.heads
    num_top_logprobs = self._model.settings.num_top_logprobs
    return functools.partial(step_functions.step, num_top_logprobs=num_top_logprobs, heads=heads)

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
    """Assigns rows to the busy slots' tokens, each in its slot's part. Returns them and their tables."""
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
