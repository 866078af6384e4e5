"""Draft and DraftModel: what guesses the next tokens of texts, which a step then checks.

    steps = DecodeSteps(model, settings, draft=DraftModel(model=small, variables=weights))
    inputs = steps.step.make_inputs(keep, drafts={0: (0, 0, 0), 2: (0, 0)})       # how many drafts, of which slots
    state, outputs = steps.step(variables, state, steps.draft.guess(state, inputs))

A draft model is smaller than the model that checks its drafts, its target. It reads the same prompts into a cache of
its own, in blocks with the same numbers: a block that is shared, evicted or freed is so in both caches. It keeps
nothing else: it continues from the target's newest token, with the sampling parameters of the request and the noise of
the positions, with which the target samples too. So both sample the same token as often as their probabilities agree,
and the text does not depend on the drafts (drafts.py).

Shapes: N slots, n rows of slots, R rows of a step that checks drafts, k drafts, V vocabulary.
"""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.decoding.decode_layout import DecodeLayout
from spmd_tasks.decoding.decode_model import DecodeModel
from spmd_tasks.decoding.decode_programs import DecodePrograms
from spmd_tasks.decoding.decode_state import DecodeState, Forward
from spmd_tasks.decoding.prefill import Prefill
from spmd_tasks.decoding.requests import PrefillBatch
from spmd_tasks.decoding.step import StepInputs, generate_tokens
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

  def __init__(self, draft: DraftModel, model: DecodeModel, target: DecodeLayout):
    """Compiles nothing yet.

    Args:
      draft: the draft model.
      model: the same model, as `decode_model_of` returns it.
      target: the layout of the target.

    Raises:
      UserError: the draft model has windows or an encoder, or the mesh splits its cache into other parts.
    """
    super().__init__(is_model=True)
    self._programs = DecodePrograms(model, DecodeLayout(model, target=target))
    self._prefill = Prefill(self._programs)
    self._padded_variables = draft.variables
    self._variables: Any = None  # stored and arranged by the first `init`
    self._state: Any = None

  def init(self) -> None:
    if self._variables is None:
      model = self._programs.model
      self._variables, self._padded_variables = model.arrange(model.storage.store(self._padded_variables)), {}
    self._state = None  # `init_state` allocates another one
    self._state = self._programs.init_state()

  def prefill(self, batch: PrefillBatch) -> None:
    self._state, _ = self._prefill(self._variables, self._state, _own_batch(batch))

  def guess(self, state: DecodeState, inputs: StepInputs) -> StepInputs:
    arguments = self._arguments(state, inputs)
    self._state, tokens = self._program(inputs, arguments)(self._variables, self._state, *arguments)
    return inputs if inputs.drafts is None else inputs.replace(drafts=inputs.drafts.replace(tokens=tokens))

  def compile_prefill(self, batch: PrefillBatch) -> None:
    self._prefill.compile(_own_batch(batch))

  def compile_guess(self, state: DecodeState, inputs: StepInputs) -> None:
    self._program(inputs, self._arguments(state, inputs))

  def _arguments(self, state: DecodeState, inputs: StepInputs) -> tuple[Any, ...]:
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
    return (state.replace(cache=None), inputs.keep, slots, tables, columns, owners)

  def _program(self, inputs: StepInputs, arguments: tuple[Any, ...]) -> Any:
    num = 0 if inputs.drafts is None else inputs.drafts.rows.shape[1] - 1
    name = ('guess', len(arguments[2]), num, len(arguments[4]))
    return self._programs.update(name, functools.partial(_guess, num), *arguments)


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
  forward: Forward,
  variables: Any,
  own_state: DecodeState,
  state: DecodeState,
  keep: jax.Array,
  slots: jax.Array,
  tables: jax.Array,
  columns: jax.Array,
  owners: jax.Array,
) -> tuple[DecodeState, jax.Array]:
  """Guesses `num` tokens of n slots.

  Args:
    num: how many.
    forward, variables, own_state: the draft model and its state, of which only the cache is used.
    state: the target's state, without its cache.
    keep: bool [N], the slots that have a sequence.
    slots, tables: int32 [n] and [D, n/D, M], the slots and their blocks.
    columns, owners: as in DraftRows.

  Returns:
    The draft model's new state, and the draft of each row of the step, int32 [R].
  """
  rows = jax.tree.map(lambda x: jnp.take(x, slots, axis=0, mode='clip'), state)
  busy = jnp.take(keep, slots, mode='fill', fill_value=False)
  rows = rows.replace(cache=own_state.cache, active=rows.active & busy)
  assert state.seen is not None
  fitted = _with_vocabulary(forward, state.seen.shape[-1])

  def next_token(rows: DecodeState, _: Any) -> Any:
    inputs = StepInputs(keep=jnp.ones(len(slots), jnp.bool_), tables=tables)
    rows, outputs = generate_tokens(fitted, variables, rows, inputs)
    return rows, outputs.tokens

  # Once more than there are drafts: if the last one is right, its keys and values must be in the cache.
  rows, tokens = jax.lax.scan(next_token, rows, length=num + 1)
  drafts = jnp.where(columns > 0, tokens[jnp.maximum(columns - 1, 0), owners], 0)
  return own_state.replace(cache=rows.cache), drafts


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
