"""The batches that are compared: the experiment's own, then ragged ones, so that a wrong mean cannot hide.

Equal numbers of tokens in all rows would make the mean of the shards' means the mean of the batch. So every batch but
the first has rows of different lengths: weights of 0 at the end, and in some rows segment ids of 0 too, as in padding.

Shapes: B batch rows, T sequence.
"""

from collections.abc import Mapping
import contextlib
import dataclasses
import itertools
from typing import Any

import jax
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.inputs import Input
from spmd_tasks.tuning.preferences import without_references

Batch = dict[str, np.ndarray]


def draw_batches(train_input: Input, num_batches: int, seed: int) -> list[Batch]:
  """Reads that many batches and makes all but the first ragged, where they have `weights` [B, T].

  Raises:
    UserError: the input ends before.
  """
  with contextlib.closing(without_references(train_input).make_iterator()) as iterator:
    read = [{name: np.array(values) for name, values in x.items()} for x in itertools.islice(iterator, num_batches)]
  if len(read) < num_batches:
    raise UserError(
      f'the training input ends after {len(read)} batches, but {num_batches} steps are compared: let it repeat itself.'
    )
  rng = np.random.default_rng(seed)
  return [*read[:1], *(_ragged(batch, rng) for batch in read[1:])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
  """Gives the training batches another number of rows, those of as many batches as it takes; a change of a Setting.

  Attributes:
    num_rows: of a batch.
    num_columns: tokens of a row, the first ones; None keeps all.
    is_bare: whether segments are left out: without them no layer can tell padding.
  """

  num_rows: int
  num_columns: int | None = None
  is_bare: bool = False

  def __call__(self, job: Job) -> Job:
    return dataclasses.replace(job, train_input=_CutInput(job.train_input, self))


@dataclasses.dataclass(frozen=True)
class _CutInput:
  """Another input, cut."""

  whole: Input
  cut: Cut

  @property
  def batch_size(self) -> int:
    return self.cut.num_rows

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    def cut(spec):
      shape = (self.cut.num_rows, *spec.shape[1:])
      if self.cut.num_columns and len(shape) > 1:
        shape = (shape[0], min(shape[1], self.cut.num_columns), *shape[2:])
      return jax.ShapeDtypeStruct(shape, spec.dtype)

    return {name: cut(spec) for name, spec in self.whole.element_spec().items() if self._is_kept(name)}

  def reshard_states(self, states: Any, shard_count: int) -> Any:
    raise NotImplementedError('its iterators have no position to save')

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> Any:
    """Yields the batches, of a single process."""
    assert shard_count == 1
    num_rows, num_columns = self.cut.num_rows, self.cut.num_columns
    num_batches = -(-num_rows // self.whole.batch_size)
    with contextlib.closing(without_references(self.whole).make_iterator()) as iterator:
      while len(batches := list(itertools.islice(iterator, num_batches))) == num_batches:
        rows = {name: np.concatenate([each[name] for each in batches])[:num_rows] for name in batches[0]}
        yield {name: x[:, :num_columns] if x.ndim > 1 else x for name, x in rows.items() if self._is_kept(name)}

  def _is_kept(self, name: str) -> bool:
    return not (self.cut.is_bare and name.startswith('segment_'))


def _ragged(batch: Mapping[str, Any], rng: np.random.Generator) -> Batch:
  batch = dict(batch)
  weights = batch.get('weights')
  if weights is None or weights.ndim != 2 or weights.shape[1] < 2:
    return batch
  num_rows, seq_len = weights.shape
  lengths = rng.integers(1, seq_len + 1, num_rows)
  lengths[rng.integers(num_rows)] = seq_len
  is_kept = np.arange(seq_len) < lengths[:, None]
  batch['weights'] = np.where(is_kept, weights, 0).astype(weights.dtype)
  is_padded = rng.random(num_rows) < 0.5
  for name in ('segment_ids', 'segment_pos'):
    if name in batch and batch[name].shape == weights.shape:
      batch[name] = np.where(is_kept | ~is_padded[:, None], batch[name], 0).astype(batch[name].dtype)
  return batch
