"""DraftModel: a smaller model that guesses the next tokens of texts, which a step of a larger model then checks.

    steps = DecodeSteps(model, settings, draft=DraftModel(model=small, variables=weights))
    inputs = steps.make_inputs(keep, drafts={0: (0, 0, 0), 2: (0, 0)})       # how many drafts, of which slots
    state, outputs = steps.step(variables, state, steps.draft.guess(state, inputs))

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

from spmd_tasks.decoding.requests import PrefillBatch
from spmd_tasks.decoding.step_functions import DecodeState, Forward, StepInputs, step
from spmd_tasks.decoding.weight_storage import local_bytes
from spmd_tasks.errors import UserError
from spmd_tasks.runtime import DecodeSettings, PartitionedModel
from spmd_tasks.runtime.task import Variables
from spmd_tasks.sharding import padding


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


class DraftSteps:
  """The compiled steps of a draft model, and its cache.

  Attributes:
    block_bytes: of the cache, of one block on each device.
  """

  def __init__(self, draft: DraftModel, make: Callable[[PartitionedModel, DecodeSettings], Any], settings: Any):
    """Compiles nothing yet.

    Args:
      draft: the model.
      make: DecodeSteps.
      settings: of the larger model, with all sizes of its cache.

    Raises:
      UserError: the model has windows or an encoder, or its cache is split otherwise.
    """
    own = dataclasses.replace(
      settings, weights_dtype=draft.weights_dtype, num_drafts=0, num_top_logprobs=0, draft_model=None
    )
    self.steps = make(draft.model, own)
    if not self.steps.can_reuse:
      raise UserError('a draft model has no attention windows, prefixes or encoder: leave draft_model out.')
    pools = jax.tree.leaves(self.steps.padded_state.cache)
    self.block_bytes = sum(map(local_bytes, pools)) * self.steps.num_parts / self.steps.num_blocks
    self._make: Callable[[], Any] | None = functools.partial(self.steps.storage.store, draft.variables)
    self._variables: Any = None  # of the devices, where _make is None
    self._state: Any = None

  def init(self) -> None:
    """Empties the cache, and brings the weights to the devices if they are not there."""
    if self._make is not None:
      self._variables, self._make = self.steps.arrange(self._make()), None
    self._state = None  # before there is another
    self._state = self.steps.init()

  def free(self) -> None:
    """Frees the cache and moves the weights to the host's memory, until `init`."""
    self._state = None
    if self._make is None:
      shardings = jax.tree.map(lambda leaf: leaf.sharding, self._variables)
      self._make = functools.partial(jax.device_put, jax.device_get(self._variables), shardings)
      self._variables = None

  def prefill(self, batch: PrefillBatch) -> None:
    """Reads the chunks that the larger model reads."""
    self._state, _ = self.steps.prefill(self._variables, self._state, own_batch(batch))

  def guess(self, state: DecodeState, inputs: StepInputs) -> StepInputs:
    """Reads the newest tokens of a step's slots, and guesses the next ones if the step has rows for drafts.

    Args:
      state: the state of the larger model.
      inputs: the inputs of its step.

    Returns:
      The inputs with the drafts, which stay on the device.
    """
    arguments = self._arguments(state, inputs)
    self._state, tokens = self._program(inputs, arguments)(self._variables, self._state, *arguments)
    return inputs if inputs.drafts is None else inputs.replace(drafts=inputs.drafts.replace(tokens=tokens))

  def compile(self, state: DecodeState, inputs: StepInputs) -> None:
    """Compiles `guess` for inputs of these shapes; `state` has the shapes of the larger model's state."""
    self._program(inputs, self._arguments(state, inputs))

  def _arguments(self, state: DecodeState, inputs: StepInputs) -> tuple[Any, ...]:
    """Returns the arrays that the program takes: the state, `keep`, n slots, their tables, columns and owners of R."""
    steps, drafts, tables = self.steps, inputs.drafts, inputs.tables
    num_slots = steps.settings.num_slots
    slots = inputs.slots
    if slots is None or len(slots) == num_slots:
      slots = np.arange(num_slots, dtype=np.int32)
    if drafts is None:
      columns = owners = np.zeros(1, np.int32)
    else:
      columns, owners = drafts.columns, np.minimum(drafts.owners, len(slots) - 1)
      tables = drafts.tables_of_slots(tables, steps.num_blocks // steps.num_parts)
    return (state.replace(cache=None), inputs.keep, slots, tables, columns, owners)

  def _program(self, inputs: StepInputs, arguments: tuple[Any, ...]) -> Any:
    num = 0 if inputs.drafts is None else inputs.drafts.rows.shape[1] - 1
    name = ('guess', len(arguments[2]), num, len(arguments[4]))
    return self.steps._compile_stateful(name, self._guess(num), *arguments)

  def _guess(self, num: int) -> Callable[..., Any]:
    steps = self.steps

    def guess(padded_variables, padded_state, given, keep, slots, tables, columns, places):
      own = padding.unpad(padded_state, steps.abstract_state)
      rows = jax.tree.map(lambda x: jnp.take(x, slots, axis=0, mode='clip'), given)
      busy = jnp.take(keep, slots, mode='fill', fill_value=False)
      rows = rows.replace(cache=own.cache, active=rows.active & busy)
      forward = _with_vocabulary(steps._forward, given.seen.shape[-1])
      variables = steps._true(padded_variables)

      def one(rows: DecodeState, _: Any) -> Any:
        inputs = StepInputs(keep=jnp.ones(len(slots), jnp.bool_), tables=tables)
        rows, outputs = step(forward, variables, rows, inputs)
        return rows, outputs.tokens

      # Once more than there are drafts: the last one may be right, and is then to be in the cache.
      rows, tokens = jax.lax.scan(one, rows, length=num + 1)
      drafts = jnp.where(columns > 0, tokens[jnp.maximum(columns - 1, 0), places], 0)
      return padding.pad(own.replace(cache=rows.cache), steps.padded_state), drafts

    return guess


def own_batch(batch: PrefillBatch) -> PrefillBatch:
  """What a draft model reads of a prefill."""
  return batch.replace(targets=None, masks=None)


def _with_vocabulary(forward: Forward, size: int) -> Forward:
  """A forward function whose logits have V entries: noise is drawn for so many."""

  def fitted(variables: Any, cache: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
    logits, new = forward(variables, cache, batch)
    added = max(size - logits.shape[-1], 0)
    return jnp.pad(logits[..., :size], ((0, 0), (0, 0), (0, added)), constant_values=-jnp.inf), new

  return fitted
