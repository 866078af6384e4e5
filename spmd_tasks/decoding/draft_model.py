"""Draft and DraftModel: what guesses the next tokens of texts, which a step then checks.

    steps = DecodeSteps(model, settings, draft=DraftModel(model=small, variables=weights))
    inputs = steps.step.make_inputs(keep, drafts={0: (0, 0, 0), 2: (0, 0)})       # how many drafts, of which slots
    state, outputs = steps.step(variables, state, steps.draft.guess(state, inputs))

A draft model is smaller than the model that checks its drafts, its target. It reads the same prompts into a cache of
its own, in blocks with the same numbers: a block that is shared, evicted or freed is so in both caches. It keeps
nothing else: it continues from the target's newest token, with the sampling parameters of the request and the noise of
the positions, with which the target samples too. So both sample the same token as often as their probabilities agree,
and the text does not depend on the drafts (drafts.py).

If layers of a draft model have states, these are kept as they were before its last drafts. It reads the right ones of
these again, with the newest token, as rows of one call.

Shapes: N slots, n rows of slots, R rows of a step that checks drafts, k drafts, V vocabulary.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.decoding.cache_arrays import is_state, write_tokens
from spmd_tasks.decoding.decode_layout import DecodeLayout
from spmd_tasks.decoding.decode_model import DecodeModel
from spmd_tasks.decoding.decode_programs import DecodePrograms
from spmd_tasks.decoding.decode_state import DecodeState, Forward, put_rows, sample_next_tokens
from spmd_tasks.decoding.drafts import DraftRows
from spmd_tasks.decoding.prefill import Prefill
from spmd_tasks.decoding.requests import PrefillBatch
from spmd_tasks.decoding.step import StepInputs, model_batch, next_tokens
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.task import Variables


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DraftModel:
  """A model with the target's tokens on the target's mesh.

  Fields:
    model: the model.
    variables: its padded variables, as training stores them.
    weights_dtype: how its weights are stored, as in DecodeSettings.
  """

  model: PartitionedModel
  variables: Variables
  weights_dtype: str | None = None


class Draft:
  """Guesses the drafts of a step; the methods of this class do nothing.

  It stands for drafts that the caller finds by n-grams of the text (drafts.py), and for drafts by the model's own
  heads, which guess in the program of the step before (nextn_drafts.py).

  Attributes:
    is_model: whether a model guesses, so that the caller only says how many drafts it wants.
  """

  def __init__(self, *, is_model: bool = False):
    self.is_model = is_model

  def init(self) -> None:
    """Empties all slots."""

  def prefill(self, batch: PrefillBatch) -> None:
    """Reads the chunks that the target reads."""
    del batch

  def guess(self, state: DecodeState, inputs: StepInputs) -> StepInputs:
    """Returns the inputs of a step with its drafts, which may stay on the device.

    Args:
      state: the target's state before the step.
      inputs: the inputs, with rows for the drafts. Without rows, a draft model only reads the newest tokens.
    """
    del state
    return inputs

  def compile_prefill(self, batch: PrefillBatch) -> None:
    """Compiles `prefill` for batches of this size."""

  def compile_guess(self, state: DecodeState, inputs: StepInputs) -> None:
    """Compiles `guess` for a state and inputs of these shapes."""


class ModelDraft(Draft):
  """Guesses drafts by a draft model, with a cache of its own."""

  def __init__(self, draft: DraftModel, model: DecodeModel, target: DecodeLayout, num_drafts: int):
    """Compiles nothing yet.

    Args:
      draft: the draft model.
      model: the same model, as `decode_model_of` returns it.
      target: the layout of the target.
      num_drafts: k.

    Raises:
      UserError: the draft model has windows, prefixes or an encoder, or the mesh splits its cache into other parts.
    """
    super().__init__(is_model=True)
    self._programs = DecodePrograms(model, DecodeLayout(model, target=target))
    self._prefill = Prefill(self._programs)
    self._padded_variables = draft.variables
    self._variables: Any = None  # stored and arranged by the first `init`
    self._state: Any = None
    self._drafts: Any = None  # int32 [N, k], the last drafts of each slot
    self._num_drafts = num_drafts

  def init(self) -> None:
    if self._variables is None:
      model = self._programs.model
      self._variables, self._padded_variables = model.arrange(model.storage.store(self._padded_variables)), {}
    self._state = None  # `init_state` allocates another one
    self._state = self._programs.init_state()
    self._drafts = self._no_drafts()

  def prefill(self, batch: PrefillBatch) -> None:
    self._state, _ = self._prefill(self._variables, self._state, _own_batch(batch))

  def guess(self, state: DecodeState, inputs: StepInputs) -> StepInputs:
    arguments = self._arguments(state, inputs, self._drafts)
    program = self._program(inputs, arguments)
    self._state, (tokens, self._drafts) = program(self._variables, self._state, *arguments)
    return inputs if inputs.drafts is None else inputs.replace(drafts=inputs.drafts.replace(tokens=tokens))

  def compile_prefill(self, batch: PrefillBatch) -> None:
    self._prefill.compile(_own_batch(batch))

  def compile_guess(self, state: DecodeState, inputs: StepInputs) -> None:
    self._program(inputs, self._arguments(state, inputs, self._no_drafts()))

  def _no_drafts(self) -> np.ndarray:
    return np.zeros((self._programs.model.settings.num_slots, self._num_drafts), np.int32)

  def _arguments(self, state: DecodeState, inputs: StepInputs, last_drafts: Any) -> tuple[Any, ...]:
    """Returns the arguments of `_guess` after `own_state`."""
    drafts, tables, slots = inputs.drafts, inputs.tables, inputs.slots
    num_slots = self._programs.model.settings.num_slots
    if slots is None or len(slots) == num_slots:
      slots = np.arange(num_slots, dtype=np.int32)
    if drafts is None:
      columns = owners = np.zeros(1, np.int32)
    else:
      columns, owners = drafts.columns, np.minimum(drafts.owners, len(slots) - 1)
      tables = drafts.tables_of_slots(tables, self._programs.layout.blocks_per_part)
    return (state.replace(cache=None), last_drafts, inputs.keep, slots, tables, columns, owners)

  def _program(self, inputs: StepInputs, arguments: tuple[Any, ...]) -> Any:
    num = 0 if inputs.drafts is None else inputs.drafts.rows.shape[1] - 1
    *_, slots, _, columns, _ = arguments
    name = ('guess', len(slots), num, len(columns))
    has_states = self._programs.model.has_states
    return self._programs.update(name, functools.partial(_guess, num, has_states), *arguments)


def decode_model_of(draft: DraftModel, target: DecodeModel) -> DecodeModel:
  """Returns the DecodeModel of a draft model, with the sizes of its target."""
  settings = dataclasses.replace(
    target.settings,
    max_len=target.max_len,
    weights_dtype=draft.weights_dtype,
    num_drafts=0,
    num_top_logprobs=0,
    draft_model=None,
  )
  return DecodeModel(draft.model, settings)


def _guess(
  num: int,
  has_states: bool,
  forward: Forward,
  variables: Any,
  own_state: DecodeState,
  state: DecodeState,
  last_drafts: jax.Array,
  keep: jax.Array,
  slots: jax.Array,
  tables: jax.Array,
  columns: jax.Array,
  owners: jax.Array,
) -> tuple[DecodeState, tuple[jax.Array, jax.Array]]:
  """Guesses `num` tokens of n slots.

  Args:
    num: how many.
    has_states: whether layers of the draft model have states.
    forward, variables, own_state: the draft model and its state, of which the cache is used; if layers have states also
      the positions, of the first token that these have not read.
    state: the target's state, without its cache.
    last_drafts: int32 [N, k], the drafts of the last call.
    keep: bool [N], the slots that have a sequence.
    slots, tables: int32 [n] and [D, n/D, M], the slots and their blocks.
    columns, owners: as in DraftRows.

  Returns:
    The draft model's new state; the draft of each row of the step, int32 [R], and the drafts of this call, [N, k].
  """
  rows = jax.tree.map(lambda x: jnp.take(x, slots, axis=0, mode='clip'), state)
  busy = jnp.take(keep, slots, mode='fill', fill_value=False)
  rows = rows.replace(cache=own_state.cache, active=rows.active & busy)
  assert state.seen is not None
  fitted = _with_vocabulary(forward, state.seen.shape[-1])
  # Of N texts, text i is in slot i.
  inputs = StepInputs(keep=None, slots=None if len(slots) == len(keep) else slots, tables=tables)

  def next_token(rows: DecodeState, _: Any) -> Any:
    new_rows, outputs, cache = next_tokens(fitted, variables, rows.cache, rows.replace(cache=None), inputs)
    return new_rows.replace(cache=cache), outputs.tokens

  if has_states:
    first = jnp.take(own_state.positions, slots, mode='clip')
    unread = jnp.take(last_drafts, slots, axis=0, mode='clip')
    rows, tokens = _read_again(fitted, variables, rows, inputs, first, unread)
    read, tokens = rows.cache, tokens[None]
    rows, further = jax.lax.scan(next_token, rows, length=max(num - 1, 0))
    tokens = jnp.concatenate([tokens, further])
    cache = jax.tree_util.tree_map_with_path(lambda path, x, y: x if is_state(path) else y, read, rows.cache)
    positions = put_rows(own_state.positions, jnp.take(state.positions, slots, mode='clip') + 1, slots)
    own_state = own_state.replace(cache=cache, positions=positions)
  else:
    # Once more than there are drafts: if the last one is right, its keys and values must be in the cache.
    rows, tokens = jax.lax.scan(next_token, rows, length=num + 1)
    own_state = own_state.replace(cache=rows.cache)
  if num:
    last_drafts = put_rows(last_drafts, tokens[:num].T, slots)
  return own_state, (jnp.where(columns > 0, tokens[jnp.maximum(columns - 1, 0), owners], 0), last_drafts)


def _read_again(
  forward: Forward,
  variables: Any,
  rows: DecodeState,
  inputs: StepInputs,
  first: jax.Array,
  drafts: jax.Array,
) -> tuple[DecodeState, jax.Array]:
  """Reads the tokens of n texts that the states have not read, and samples the next one.

  Args:
    forward, variables: the draft model.
    rows: the texts, with the draft model's cache.
    inputs: has their slots and blocks.
    first: int32 [n], the position of each text's first token that the states have not read.
    drafts: int32 [n, k], the drafts for this position and the next ones, the first of which are the text's tokens.

  Returns:
    The texts with their next tokens and the new cache, and these tokens, int32 [n].
  """
  num_texts, num_drafts = drafts.shape
  owners, columns = (x.reshape(-1) for x in jnp.indices((num_texts, num_drafts + 1), jnp.int32))
  num_rows = len(owners)
  counts = jnp.clip(rows.positions - first, 0, num_drafts) + 1
  back = jnp.arange(num_drafts)[None, :]
  of_text = DraftRows(
    owners=owners,
    columns=columns,
    tokens=None,
    earlier=jnp.where(back < columns[:, None], jnp.arange(num_rows)[:, None] - 1 - back, num_rows),
    rows=jnp.arange(num_rows).reshape(num_texts, -1),
    slots=inputs.slots,
  )
  is_newest, active = columns == counts[owners] - 1, (columns < counts[owners]) & rows.active[owners]
  tokens = jnp.where(is_newest, rows.tokens[owners], drafts[owners, jnp.minimum(columns, num_drafts - 1)])
  starts = rows.positions[owners] + 1 - counts[owners] + columns
  slots = owners if inputs.slots is None else inputs.slots[owners]
  tables = jnp.repeat(inputs.tables, num_drafts + 1, axis=1)
  batch = model_batch(tokens, starts, active, rows.adapters[owners], slots, tables, ())
  last = of_text.rows[jnp.arange(num_texts), counts - 1]
  logits, new = forward(variables, rows.cache, batch | {'drafts': of_text, 'logit_rows': last})
  cache, lengths = rows.cache, active.astype(jnp.int32)
  cache = write_tokens(cache, new, starts, lengths, slots=slots, tables=tables, drafts=of_text)
  rows, outputs = sample_next_tokens(logits[:, 0], rows.replace(cache=None), None, 0)
  return rows.replace(cache=cache), outputs.tokens


def _own_batch(batch: PrefillBatch) -> PrefillBatch:
  """Returns the batch without what a draft model does not compute: scores, and masks of the first token."""
  return batch.replace(targets=None, masks=None)


def _with_vocabulary(forward: Forward, size: int) -> Forward:
  """Returns `forward` with logits of the target's V entries, as noise is drawn for V tokens."""

  def fitted(variables: Any, cache: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
    logits, new = forward(variables, cache, batch)
    added = max(size - logits.shape[-1], 0)
    return jnp.pad(logits[..., :size], ((0, 0), (0, 0), (0, added)), constant_values=-jnp.inf), new

  return fitted
