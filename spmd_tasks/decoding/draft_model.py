"""Draft and DraftModel: what guesses the next tokens of texts, which a step then checks.

    steps = DecodeSteps(model, settings, draft=DraftModel(model=small, variables=weights))
    inputs = steps.step.make_inputs(keep, drafts={0: (0, 0, 0), 2: (0, 0)})       # how many drafts, of which slots
    state, outputs = steps.step(variables, state, steps.draft.guess(state, inputs))

A draft model is smaller than the model whose texts it guesses.

It reads the same prompts into a cache of its own with blocks of the same numbers, so that what is shared, evicted or
freed is so for both. It keeps nothing else: it goes on from the larger model's newest token, with that model's sampling
parameters and with the noise of the positions, by which the larger model draws as well. So the two draw the same token
as often as their probabilities agree, and what a text becomes does not depend on the draft (see drafts.py).

Shapes: N slots, n rows of slots, R rows of a step that checks drafts, k drafts, V vocabulary.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.decoding.decode_layout import DecodeLayout
from spmd_tasks.decoding.decode_programs import DecodePrograms
from spmd_tasks.decoding.decode_state import DecodeState, Forward
from spmd_tasks.decoding.decode_steps import DecodeModel
from spmd_tasks.decoding.prefill import Prefill
from spmd_tasks.decoding.requests import PrefillBatch
from spmd_tasks.decoding.step import StepInputs, generate_tokens
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.task import Variables


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DraftModel:
  """A model of the same tokens on the same mesh.

  Fields:
    model: the model.
    variables: its padded variables, as training stores them.
    weights_dtype: how they are held, as of DecodeSettings.
  """

  model: PartitionedModel
  variables: Variables
  weights_dtype: str | None = None


class Draft:
  """What guesses the drafts of a step. This one computes nothing.

  Either the caller has the drafts already, from n-grams of the text (drafts.py), or the model's own heads guess them in
  the program of the step before (nextn_drafts.py).

  Attributes:
    is_model: whether a model guesses, so that the caller says only how many drafts it wants.
  """

  def __init__(self, *, is_model: bool = False):
    self.is_model = is_model

  def init(self) -> None:
    """Begins with empty slots."""

  def free(self) -> None:
    """Frees the memory of the devices, until `init`."""

  def prefill(self, batch: PrefillBatch) -> None:
    """Reads the chunks that the model reads."""
    del batch

  def guess(self, state: DecodeState, inputs: StepInputs) -> StepInputs:
    """Returns the inputs of a step with its drafts, which may stay on the device.

    Args:
      state: the state of the model before the step.
      inputs: the inputs, with rows for the drafts; without, only the newest tokens are read.
    """
    del state
    return inputs

  def compile_prefill(self, batch: PrefillBatch) -> None:
    """Compiles `prefill` for batches of this size."""

  def compile_guess(self, state: DecodeState, inputs: StepInputs) -> None:
    """Compiles `guess` for a state and inputs of these shapes."""


class ModelDraft(Draft):
  """The compiled programs of a draft model, and its cache."""

  def __init__(self, draft: DraftModel, model: DecodeModel, target: DecodeLayout):
    """Compiles nothing yet.

    Args:
      draft: the model.
      model: the same model, as `decode_model_of` makes it.
      target: the layout for the model that checks the drafts.

    Raises:
      UserError: the model has windows or an encoder, or the mesh splits its cache otherwise.
    """
    super().__init__(is_model=True)
    self._programs = DecodePrograms(model, DecodeLayout(model, target=target))
    self._prefill = Prefill(self._programs)
    self._load: Callable[[], Any] | None = functools.partial(model.storage.store, draft.variables)
    self._variables: Any = None  # on the devices, when _load is None
    self._state: Any = None

  def init(self) -> None:
    """Empties the cache, and brings the weights to the devices if they are not there."""
    if self._load is not None:
      self._variables, self._load = self._programs.model.arrange(self._load()), None
    self._state = None  # before there is another
    self._state = self._programs.init_state()

  def free(self) -> None:
    """Frees the cache and moves the weights to the host's memory, until `init`."""
    self._state = None
    if self._load is None:
      shardings = jax.tree.map(lambda leaf: leaf.sharding, self._variables)
      self._load = functools.partial(jax.device_put, jax.device_get(self._variables), shardings)
      self._variables = None

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
    """Returns the arrays that the program takes: the state, `keep`, n slots, their tables, columns and owners of R."""
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
  """Returns the draft model as decoding calls it, with the sizes of the model that checks its drafts."""
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
  """Guesses `num` tokens of n slots; returns the draft model's state and int32 [R], the guess of each row of the step.

  `state` is the state of the model that checks them, without its cache; `columns` and `owners` are as in DraftRows.
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

  # Once more than there are drafts: the last one may be right, and is then to be in the cache.
  rows, tokens = jax.lax.scan(next_token, rows, length=num + 1)
  drafts = jnp.where(columns > 0, tokens[jnp.maximum(columns - 1, 0), owners], 0)
  return own_state.replace(cache=rows.cache), drafts


def _own_batch(batch: PrefillBatch) -> PrefillBatch:
  """Returns what a draft model reads of a prefill."""
  return batch.replace(targets=None, masks=None)


def _with_vocabulary(forward: Forward, size: int) -> Forward:
  """A forward function whose logits have V entries: noise is drawn for so many."""

  def fitted(variables: Any, cache: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
    logits, new = forward(variables, cache, batch)
    added = max(size - logits.shape[-1], 0)
    return jnp.pad(logits[..., :size], ((0, 0), (0, 0), (0, added)), constant_values=-jnp.inf), new

  return fitted
