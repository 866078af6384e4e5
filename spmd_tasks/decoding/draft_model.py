"""DraftModel: a smaller model that guesses the next tokens of texts, which a step of a larger model then checks.

    steps = DecodeSteps(model, settings, draft=DraftModel(model=small, variables=weights))
    state, outputs = steps.step(variables, state, keep, drafts={0: (0, 0, 0), 2: (0, 0)})     # how many, of which slots

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

from spmd_tasks.decoding.drafts import DraftRows
from spmd_tasks.decoding.requests import PrefillBatch
from spmd_tasks.decoding.step_functions import DecodeState, Forward, step
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

  def guess(
    self, state: DecodeState, keep: np.ndarray, slots: np.ndarray, tables: np.ndarray, rows: DraftRows | None, num: int
  ) -> Any:
    """Reads the newest tokens of slots, and guesses the next ones.

    Args:
      state: of the larger model.
      keep: bool [N], the slots that are busy.
      slots: int32 [n], of which as many as are busy stand first, or each at its own place where n is N.
      tables: int32 [D, n / D, M], their blocks.
      rows: int32 [R] etc., whose owners are places among these slots; None where num is 0.
      num: k.

    Returns:
      int32 [R], the drafts of the rows, on the device; 0 in rows of newest tokens. None without `rows`.
    """
    num_slots = len(keep)
    whole = len(slots) == num_slots
    columns = np.zeros(1, np.int32) if rows is None else rows.columns
    owners = np.zeros(1, np.int32) if rows is None else np.minimum(rows.owners, len(slots) - 1)
    places = np.minimum(slots[owners], num_slots - 1) if whole else owners
    of_rows = np.arange(num_slots, dtype=np.int32) if whole else slots
    given = (state.replace(cache=None), keep, of_rows, tables, columns, places.astype(np.int32))
    self._state, tokens = self._program(given, num)(self._variables, self._state, *given)
    return None if rows is None else tokens

  def compile(self, state: DecodeState, num_slots: int, num_rows: int, num: int) -> None:
    """Compiles a guess for so many slots and rows; `state` has the shapes of the larger model's."""
    steps = self.steps
    tables = np.zeros((steps.num_parts, -(-num_slots // steps.num_parts), steps.table_len), np.int32)
    slots, columns = np.zeros(num_slots, np.int32), np.zeros(num_rows, np.int32)
    keep = np.zeros(steps.settings.num_slots, np.bool_)
    self._program((state.replace(cache=None), keep, slots, tables, columns, columns), num)

  def _program(self, given: tuple[Any, ...], num: int) -> Any:
    return self.steps._compile_stateful(('guess', len(given[2]), num, len(given[4])), self._guess(num), *given)

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
        rows, outputs = step(forward, variables, rows, jnp.ones(len(slots), jnp.bool_), tables)
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
