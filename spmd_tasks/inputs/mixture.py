"""Mixture: batches whose rows come from several inputs, in proportion to their weights.

    Mixture(
      sources={'code': TextInput(...), 'web': tf_data},
      weights={'code': 0.3, 'web': 0.7},
      weight_changes=((10_000, {'code': 0.5, 'web': 0.5}),),   # from batch 10,000 on
    )

From a source that reads rows (base.RowIterator), a batch takes the next rows. From any other source, row r of the
mixture takes row r of the source's batches, one after another. Either way each row of a source is used once, a host
reads only its own rows, and the batches do not depend on the number of hosts. Every host computes the choice for all
rows (_row_choice.py), so all hosts agree when a source has ended, which ends the mixture.

A mixture within a mixture is flattened: its sources are mixed with all others, by the products of the weights.

A batch has one more array, `row_sources`, bool [B, S]: which of the S sources each row comes from, in the order of
`source_names`. From it losses report `loss/<source>` and `loss_weight/<source>` (layers.losses_by_source).

Grain's own mixing is not used: `MapDataset.mix` needs random access, which packed rows lack, and `IterDataset.mix`
mixes the stream of one process, so that batches and positions depend on the number of processes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
from fractions import Fraction
import functools
import math
import re
from typing import Any, cast

import jax
import numpy as np

from spmd_tasks.errors import JobError, UserError
from spmd_tasks.inputs import base
from spmd_tasks.inputs._row_choice import RowChoice
from spmd_tasks.inputs.batches import as_input
from spmd_tasks.inputs.tokenizers import Tokenizer, tokenizer_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
  """Batches whose rows come from several inputs of the same batch size and shapes.

  Fields:
    sources: name -> input, or plain data as described in inputs/batches.py. Names become part of metric names. The
      mixture ends when a source has too few rows for the next batch; `num_epochs=None` makes a source endless.
    weights: name -> weight; rows are divided in proportion to the weights, and 0 pauses a source.
    weight_changes: (number of batches, weights) pairs: the weights that apply after that many batches.
    seed: determines which rows of a batch come from which source; only the outermost mixture's seed is used.
  """

  sources: Mapping[str, base.Input]
  weights: Mapping[str, float]
  weight_changes: Sequence[tuple[int, Mapping[str, float]]] = ()
  seed: int = 0

  def __post_init__(self):
    _check_names(self.sources)
    inputs = {name: as_input(f'source {name!r}', source, repeats=True) for name, source in self.sources.items()}
    object.__setattr__(self, 'sources', inputs)
    _check_weights('weights', self.weights, self.sources)
    _check_changes(self.weight_changes, self.sources)
    if not isinstance(self.seed, int) or self.seed < 0:
      raise UserError(f'seed {self.seed!r} of the mixture must be an integer of at least 0.')

  @property
  def batch_size(self) -> int:
    return next(iter(self.sources.values())).batch_size

  @property
  def tokenizer(self) -> Tokenizer | None:
    """The tokenizer of the sources; all sources that have one have the same."""
    tokenizers = map(tokenizer_of, self.sources.values())
    return next((tokenizer for tokenizer in tokenizers if tokenizer is not None), None)

  @property
  def source_names(self) -> tuple[str, ...]:
    return tuple(self.sources)

  @functools.cached_property
  def leaves(self) -> dict[str, base.Input]:
    """The sources by name, with `name.inner` for the sources of a mixture within this one."""
    leaves: dict[str, base.Input] = {}
    for name, source in self.sources.items():
      inner = source.leaves if isinstance(source, Mixture) else None
      leaves |= {name: source} if inner is None else {f'{name}.{key}': leaf for key, leaf in inner.items()}
    return leaves

  @functools.cached_property
  def schedule(self) -> list[tuple[int, list[Fraction]]]:
    """(first batch, fractions of the leaves) pairs; the first pair begins at batch 0."""
    own = [(first, _fractions(self, weights)) for first, weights in ((0, self.weights), *self.weight_changes)]
    inner = [
      _inner_schedule(source, [(first, shares[i]) for first, shares in own])
      for i, source in enumerate(self.sources.values())
    ]
    weights_at = lambda schedule, batch: [weights for first, weights in schedule if first <= batch][-1]
    return [
      (
        first,
        [
          outer * inner_weight
          for outer, schedule in zip(weights_at(own, first), inner)
          for inner_weight in weights_at(schedule, first)
        ],
      )
      for first in sorted({first for schedule in (own, *inner) for first, _ in schedule})
    ]

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of the sources and `row_sources`. Raises a UserError if the specs of two sources differ."""
    row_sources = jax.ShapeDtypeStruct((self.batch_size, len(self.sources)), np.bool_)
    return {**_common_spec(self.sources), 'row_sources': row_sources}

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'MixtureIterator':
    return MixtureIterator(self, shard_index, shard_count)

  def reshard_states(self, states: Sequence[base.State], shard_count: int) -> list[base.State]:
    for state in states:
      base.check_state(state, {'kind': 'mixture', 'names': list(self.leaves)})
    assert all(state['choice'] == states[0]['choice'] for state in states)
    resharded: list[base.State] = [{**states[0], 'sources': {}} for _ in range(shard_count)]
    for name, source in self.leaves.items():
      saved = [state['sources'][name] for state in states]
      with _source_errors(name):
        positions = source.reshard_states([shard['position'] for shard in saved], shard_count)
      for state, position in zip(resharded, positions, strict=True):
        state['sources'][name] = {**saved[0], 'position': position}
    return resharded

  def progress(self, state: base.State) -> dict[str, float]:
    """Returns metrics of a position: `rows/<source>`, the rows read, and `epochs/<source>` if the source counts epochs.

    The sources of a mixture within this one are named `<source>.<inner source>`.
    """
    choice, metrics = state['choice'], dict[str, float]()
    for name, least, beyond in zip(state['names'], choice['rows_read'], choice['rows_read_beyond'], strict=True):
      path = name.split('.')
      for length in range(1, len(path) + 1):
        metric = f'rows/{".".join(path[:length])}'
        metrics[metric] = metrics.get(metric, 0.0) + float(least * len(beyond) + sum(beyond))
    for name, source in self.leaves.items():
      epochs = base.epochs_of(source, state['sources'][name]['position'])
      if epochs is not None:
        metrics[f'epochs/{name}'] = epochs
    return metrics


class MixtureIterator(base.InputIterator):
  """Yields the batches of one shard of a Mixture."""

  def __init__(self, settings: Mixture, shard_index: int, shard_count: int):
    spec = settings.element_spec()
    _check_tokenizers(settings.sources)
    self._settings, self._schedule = settings, settings.schedule
    names = list(settings.sources)
    self._source_of_leaf = np.array([names.index(leaf.split('.')[0]) for leaf in settings.leaves])
    self._rows = base.shard_rows(settings.batch_size, shard_index, shard_count)
    self._spec = {name: entry for name, entry in spec.items() if name != 'row_sources'}
    self._choice = RowChoice(settings.batch_size, self._schedule, settings.seed)
    self._closed = False
    self._readers: list[_SourceReader] = []
    try:
      for name, source in settings.leaves.items():
        self._readers.append(_SourceReader(name, source, shard_index, shard_count))
    except BaseException:
      self.close()
      raise

  def __next__(self) -> base.Batch:
    assert not self._closed, 'the iterator is closed'
    # All hosts make the same choice, and read the same number of rows, so they agree which sources have ended.
    choice = self.next_choice()
    needed = self._choice.num_batches_needed(choice)
    ended = [
      reader
      for reader, num in zip(self._readers, needed, strict=True)
      if not reader.reads_rows() and not reader.read_until(num)
    ]
    batch = None if ended else self._assemble(choice, ended)
    for reader in ended:
      if not self._choice.rows_read[self._readers.index(reader)].any():
        raise UserError(f'source {reader.name!r} of the mixture is empty: add examples, or remove the source.')
    if batch is None:
      raise StopIteration
    self._choice.advance(choice)
    for reader, rows_read in zip(self._readers, self._choice.rows_read, strict=True):
      reader.discard_until(int(rows_read.min()))
    return batch

  def next_choice(self) -> np.ndarray:
    """Returns the leaf of each row of the next batch, of all shards, int32 [B]."""
    return self._choice.choose()

  def _assemble(self, choice: np.ndarray, ended: 'list[_SourceReader]') -> base.Batch | None:
    """Returns this shard's rows of the batch; `choice`, int32 [B], is the leaf of each row of the global batch.

    Returns None, and adds the reader to `ended`, if a source that reads rows has too few.
    """
    own = slice(self._rows.start, self._rows.stop)
    is_from = choice[own, None] == np.arange(len(self._readers))
    batch = {name: np.zeros((len(is_from), *entry.shape[1:]), entry.dtype) for name, entry in self._spec.items()}
    for source, reader in enumerate(self._readers):
      rows = np.flatnonzero(is_from[:, source])
      if not reader.reads_rows():
        numbers = self._choice.rows_read[source, self._rows.start + rows]
        for number in np.unique(numbers):
          selected = rows[numbers == number]
          values = {name: x[selected] for name, x in reader.batch(int(number)).items()}
          _write_rows(reader.name, batch, selected, values)
      elif (count := int((choice == source).sum())) > 0:
        indices = np.cumsum(choice == source)[own][rows] - 1
        if (next_rows := reader.next_rows(count, indices.tolist())) is None:
          ended.append(reader)
          return None
        _write_rows(reader.name, batch, rows, next_rows)
    row_sources = self._source_of_leaf[choice[own], None]
    return {**batch, 'row_sources': row_sources == np.arange(len(self._settings.sources))}

  def _identity(self, num_batches: int) -> base.State:
    """Returns the fields that determine the first `num_batches` batches; weights that apply later may still change."""
    s = self._settings
    weights = [[first, [str(weight) for weight in weights]] for first, weights in self._schedule if first < num_batches]
    identity = {'kind': 'mixture', 'names': list(s.leaves), 'batch_size': s.batch_size, 'seed': s.seed}
    return {**identity, 'weights': weights}

  def get_state(self) -> base.State:
    sources = {reader.name: reader.get_state() for reader in self._readers}
    return {**self._identity(self._choice.num_batches), 'choice': self._choice.get_state(), 'sources': sources}

  def set_state(self, state: base.State) -> None:
    base.check_state(state, {'kind': 'mixture'})
    base.check_state(state, self._identity(int(state['choice']['num_batches'])))
    self._choice.set_state(state['choice'])
    for reader, rows_read in zip(self._readers, self._choice.rows_read, strict=True):
      reader.set_state(state['sources'][reader.name], int(rows_read.sum()))

  def close(self) -> None:
    self._closed = True
    for reader in self._readers:
      reader.close()


def _write_rows(source: str, batch: base.Batch, rows: np.ndarray, values: base.Batch) -> None:
  """Writes rows of a source into `rows` of a batch. Raises a UserError if they have other shapes than the batch."""
  for name, array in batch.items():
    if array.shape[1:] != values[name].shape[1:]:
      raise UserError(
        f'source {source!r} of the mixture has rows of shape {[*values[name].shape[1:]]} in {name!r}, but its first '
        f'batch has rows of shape {[*array.shape[1:]]}: give all rows one shape.'
      )
    if array.dtype != values[name].dtype:  # the placement on devices refuses values that the spec's dtype cannot hold
      batch[name] = array = array.astype(np.result_type(array, values[name]))
    array[rows] = values[name]


def _fractions(settings: Mixture, weights: Mapping[str, float]) -> list[Fraction]:
  """Returns the weights in the order of the sources, divided by their sum; exact in their decimal digits."""
  exact = [Fraction(str(weights[name])) for name in settings.sources]
  return [weight / sum(exact) for weight in exact]


def _inner_schedule(source: base.Input, outer: Sequence[tuple[int, Fraction]]) -> list[tuple[int, list[Fraction]]]:
  """Returns the schedule of a source in batches of the mixture around it.

  `outer` are (first batch, the source's fraction) pairs of the mixture around it.
  """
  if not isinstance(source, Mixture):
    return [(0, [Fraction(1)])]
  schedule = [(_first_batch_after(number, outer), fractions) for number, fractions in source.schedule]
  return [(first, fractions) for first, fractions in schedule if first is not None]


def _first_batch_after(num_batches: int, outer: Sequence[tuple[int, Fraction]]) -> int | None:
  """Returns the mixture's first batch after it has read `num_batches` batches of a source; None if it never does."""
  remaining = Fraction(num_batches)
  for (first, fraction), (end, _) in zip(outer, [*outer[1:], (None, None)]):
    if not remaining:
      return first
    if fraction and (end is None or remaining <= fraction * (end - first)):
      return first + math.ceil(remaining / fraction)
    remaining -= fraction * (0 if end is None else end - first)
  return None


def sources_of(source: base.Input) -> Iterator[base.Input]:
  """Yields the sources of a mixture and of mixtures within it; yields any other input itself."""
  if not isinstance(source, Mixture):
    yield source
    return
  for inner in source.sources.values():
    yield from sources_of(inner)


def map_sources(function: Callable[[str, base.Input], base.Input], source: base.Input, name: str = '') -> base.Input:
  """Returns a mixture with function(name.key, source) for each source; function(name, input) for any other input."""
  if not isinstance(source, Mixture):
    return function(name, source)
  sources = {key: map_sources(function, inner, f'{name}.{key}') for key, inner in source.sources.items()}
  return dataclasses.replace(source, sources=sources)


class _SourceReader:
  """Reads the rows of one source in order, or its batches by their numbers.

  Batches are buffered until all their rows have been used. The state is the position before the oldest buffered batch,
  so that a restore reads the buffered batches again.
  """

  def __init__(self, name: str, source: base.Input, shard_index: int, shard_count: int):
    self.name = name
    self.num_read = 0
    self._batch_size = source.batch_size
    self._reads_rows: bool | None = None  # unknown before the first row is read
    self._num_to_skip = 0  # rows that were read before a position of an earlier version was saved
    self._buffer: deque[tuple[base.State, base.Batch]] = deque()  # (position before the batch, batch) pairs
    with _source_errors(name):
      self._iterator = source.make_iterator(shard_index, shard_count)

  def reads_rows(self) -> bool:
    """Whether to read by `next_rows`; if not, by `batch`."""
    if self._reads_rows is None:
      with _source_errors(self.name):
        self._reads_rows = base.reads_rows(self._iterator)
    return self._reads_rows

  def next_rows(self, count: int, indices: Sequence[int]) -> base.Batch | None:
    """Like RowIterator.next_rows, but returns None if fewer rows are left."""
    iterator = cast(base.RowIterator, self._iterator)
    with _source_errors(self.name), contextlib.suppress(StopIteration):
      if self._num_to_skip:
        iterator.next_rows(self._num_to_skip, [])
        self._num_to_skip = 0
      return iterator.next_rows(count, indices)
    return None

  def read_until(self, num_batches: int) -> bool:
    """Buffers batches until `num_batches` have been read; returns False if the source ends before."""
    with _source_errors(self.name):
      while self.num_read < num_batches:
        before = self._iterator.get_state()
        try:
          batch = next(self._iterator)
        except StopIteration:
          return False
        self._buffer.append((before, batch))
        self.num_read += 1
    return True

  def batch(self, number: int) -> base.Batch:
    """Returns a buffered batch by its number, counted from 0."""
    return self._buffer[number - self.num_read][1]

  def discard_until(self, number: int) -> None:
    """Removes the batches before `number` from the buffer."""
    while self._buffer and self.num_read - len(self._buffer) < number:
      self._buffer.popleft()

  def get_state(self) -> base.State:
    """Returns the source's position; if it reads batches, the position and number of the oldest buffered batch."""
    with _source_errors(self.name):
      position = self._buffer[0][0] if self._buffer else self._iterator.get_state()
    if self._reads_rows and not self._num_to_skip:
      return {'position': position}
    return {'first_batch': self.num_read - len(self._buffer), 'position': position}

  def set_state(self, state: base.State, num_rows: int) -> None:
    """Moves to a position; `num_rows` rows of the source have been used before it."""
    with _source_errors(self.name):
      self._iterator.set_state(state['position'])
    self._buffer.clear()
    self._reads_rows = None if 'first_batch' in state else True
    self.num_read = int(state.get('first_batch', 0))
    self._num_to_skip = max(num_rows - self.num_read * self._batch_size, 0) if 'first_batch' in state else 0

  def close(self) -> None:
    self._iterator.close()


@contextlib.contextmanager
def _source_errors(name: str) -> Iterator[None]:
  """Prepends the source's name to the message of an error."""
  try:
    yield
  except (UserError, JobError) as error:
    kind = JobError if isinstance(error, JobError) else UserError
    raise kind(f'source {name!r} of the mixture: {error}') from error


def _check_names(sources: Mapping[str, Any]) -> None:
  """Raises a UserError unless there are sources, and their names can be part of metric names."""
  if not isinstance(sources, Mapping) or not sources:
    raise UserError(f"sources = {sources!r} of the mixture must be a dict {{'name': input, ...}} that is not empty.")
  for name in sources:
    if not re.fullmatch(r'[A-Za-z0-9_-]+', name):
      raise UserError(f'source name {name!r} becomes part of metric names: use only letters, digits, _ and -.')


def _check_weights(what: str, weights: Any, sources: Mapping[str, Any]) -> None:
  """Raises a UserError unless `weights` has a finite weight >= 0 for each source, one of them positive."""
  if not isinstance(weights, Mapping) or {*weights} != {*sources}:
    raise UserError(f'{what} = {weights!r} must be a dict with a weight for each source, {sorted(sources)}.')
  if not all(0 <= weight < math.inf for weight in weights.values()) or not any(weights.values()):
    raise UserError(f'{what} = {weights!r} must be finite and at least 0, and one of them positive.')


def _check_changes(changes: Any, sources: Mapping[str, Any]) -> None:
  """Raises a UserError unless `changes` are (number of batches, weights) pairs in ascending order."""
  before = 0
  for change in changes:
    if not isinstance(change, Sequence) or len(change) != 2 or change[0] <= before:
      raise UserError(
        f'{change!r} in weight_changes must be a pair (number of batches, weights) with a number of at least '
        f'{before + 1}: list the changes in ascending order.'
      )
    before = change[0]
    _check_weights(f'the weights after {before} batches', change[1], sources)


def _check_tokenizers(sources: Mapping[str, Any]) -> None:
  """Raises a UserError if two sources have different tokenizers."""
  tokenizers = {name: tokenizer for name, source in sources.items() if (tokenizer := tokenizer_of(source)) is not None}
  names = {tokenizer.fingerprint(): name for name, tokenizer in tokenizers.items()}
  if len(names) > 1:
    raise UserError(
      f'the sources {list(names.values())} of the mixture have different tokenizers: give all sources the same '
      'tokenizer.'
    )


def _common_spec(sources: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the element spec that all sources have, without `row_sources`. Raises a UserError if two of them differ."""
  specs = {}
  for name, source in sources.items():
    with _source_errors(name):
      specs[name] = {key: x for key, x in source.element_spec().items() if key != 'row_sources'}
      for key, x in specs[name].items():
        if not x.shape or x.shape[0] != source.batch_size:
          raise UserError(
            f'array {key!r} has shape {tuple(x.shape)}: the first dim must be the batch_size, {source.batch_size}, '
            'because rows are mixed.'
          )
  shape_in = lambda spec, key: f'{np.dtype(spec[key].dtype)}{[*spec[key].shape]}' if key in spec else 'nothing'
  (first, first_spec), *others = specs.items()
  for name, spec in others:
    for key in first_spec | spec:
      if shape_in(first_spec, key) != shape_in(spec, key):
        raise UserError(
          f'the sources {first!r} and {name!r} of the mixture differ in {key!r}, {shape_in(first_spec, key)} and '
          f'{shape_in(spec, key)}: give all sources the same batch_size, seq_len, arrays and dtypes.'
        )
  return first_spec
