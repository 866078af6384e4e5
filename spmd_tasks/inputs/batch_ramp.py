"""BatchRamp: the batch size changes during training, and every row of the source is read once.

    BatchRamp(source=TextInput(..., batch_size=8), sizes=((0, 8), (1000, 16), (3000, 32)))

A batch of k B rows has the next k batches of the source, which has B rows: row q k + j is row q of the j-th. So the
batches do not depend on the number of hosts. The position is the source's, so a job may get a ramp when it resumes, or
another one.
"""

from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

from absl import logging
import jax
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import base
from spmd_tasks.inputs.batches import as_input
from spmd_tasks.inputs.tokenizers import Tokenizer, tokenizer_of

_KIND = 'batch_ramp'


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchRamp:
  """Batches whose size changes after given numbers of batches.

  Fields:
    source: an input with the batch size B.
    sizes: (number of batches, batch size) pairs: the size, a multiple of B, that applies after that many batches. The
      first pair begins at 0. If a job gets its ramp when it resumes, batches before that do not count.
  """

  source: base.Input
  sizes: Sequence[tuple[int, int]]

  def __post_init__(self):
    object.__setattr__(self, 'source', as_input('source', self.source, repeats=True))
    object.__setattr__(self, 'sizes', tuple((first, size) for first, size in self.sizes))
    firsts, own = [first for first, _ in self.sizes], self.source.batch_size
    if not firsts or firsts[0] != 0 or any(a >= b for a, b in itertools.pairwise(firsts)):
      raise UserError(
        f'sizes of BatchRamp are {self.sizes}: they must be (number of batches, batch size) pairs, with 0 batches in '
        'the first pair, and more in each of the next.'
      )
    for _, size in self.sizes:
      if size < own or size % own:
        raise UserError(f'batch size {size} of BatchRamp must be a multiple of the batch size of its source, {own}.')

  @property
  def batch_size(self) -> int:
    """The largest batch size, which `element_spec` has."""
    return max(self.batch_sizes)

  @property
  def batch_sizes(self) -> tuple[int, ...]:
    """All batch sizes, once each."""
    return tuple(dict.fromkeys(size for _, size in self.sizes))

  @property
  def tokenizer(self) -> Tokenizer | None:
    return tokenizer_of(self.source)

  @property
  def source_names(self) -> tuple[str, ...]:
    return base.source_names(self.source)

  def size_of(self, index: int) -> int:
    """Returns the batch size of a batch, counted from 0."""
    return [size for first, size in self.sizes if first <= index][-1]

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of the largest batch. Raises a UserError if the source has inputs without a batch dim."""
    spec = self.source.element_spec()
    if scalars := [name for name, x in spec.items() if not x.shape]:
      raise UserError(f'input {scalars[0]!r} has no batch dim: BatchRamp cannot join batches of it.')
    return {name: jax.ShapeDtypeStruct((self.batch_size, *x.shape[1:]), x.dtype) for name, x in spec.items()}

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'BatchRampIterator':
    return BatchRampIterator(self, self.source.make_iterator(shard_index, shard_count))

  def reshard_states(self, states: Sequence[base.State], shard_count: int) -> list[base.State]:
    states = [self.as_own(state) for state in states]
    sources = self.source.reshard_states([state['source'] for state in states], shard_count)
    return [{**states[0], 'source': source} for source in sources]

  def epochs(self, state: base.State) -> float | None:
    return base.epochs_of(self.source, self.as_own(state)['source'])

  def progress(self, state: base.State) -> dict[str, float]:
    """Returns the batch size before a position, and the progress of the source."""
    state = self.as_own(state)
    size = self.size_of(max(0, state['num_batches'] - 1))
    return {'batch_size': size} | base.progress_of(self.source, state['source'])

  def as_own(self, state: base.State) -> base.State:
    """Converts a position of the source, which a job saved before it had a ramp."""
    return state if state.get('kind') == _KIND else {'kind': _KIND, 'num_batches': 0, 'source': state}


class BatchRampIterator(base.InputIterator):
  """One shard's rows of a BatchRamp's batches."""

  def __init__(self, ramp: BatchRamp, source: base.InputIterator):
    self._ramp, self._source, self._num_batches = ramp, source, 0
    self._origins: list[list[list[str]] | None] = []

  def __next__(self) -> base.Batch:
    count = self._ramp.size_of(self._num_batches) // self._ramp.source.batch_size
    position, batches, self._origins = self._source.get_state(), [], []
    try:
      for _ in range(count):
        batches.append(next(self._source))
        self._origins.append(self._source.origins() if hasattr(self._source, 'origins') else None)
    except StopIteration:
      if batches:
        logging.warning('The input ended within a batch: %d of its %d parts are not used.', len(batches), count)
      raise
    except BaseException:
      self._source.set_state(position)  # the next attempt reads the whole batch
      raise
    self._num_batches += 1
    return {name: _interleave([batch[name] for batch in batches]) for name in batches[0]}

  def origins(self) -> list[Any] | None:
    """Returns what the source's `origins` says about the rows of the last batch; None if it says nothing."""
    if any(origins is None for origins in self._origins):
      return None
    return [origin for row in zip(*self._origins, strict=True) for origin in row]

  def get_state(self) -> base.State:
    return {'kind': _KIND, 'num_batches': self._num_batches, 'source': self._source.get_state()}

  def set_state(self, state: base.State) -> None:
    state = self._ramp.as_own(state)
    self._source.set_state(state['source'])
    self._num_batches = int(state['num_batches'])

  def close(self) -> None:
    self._source.close()


def _interleave(parts: Sequence[np.ndarray]) -> np.ndarray:
  """Joins k arrays [R, ...] to [R k, ...]: row q k + j is row q of array j."""
  return np.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:])
