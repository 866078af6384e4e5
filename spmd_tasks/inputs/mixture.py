"""Mixture: batches whose rows are from several inputs, by named weights.

    Mixture(
      sources={'code': TextInput(...), 'web': tf_data},
      weights={'code': 0.3, 'web': 0.7},
      weight_changes=((10_000, {'code': 0.5, 'web': 0.5}),),   # for the batches behind the first 10,000
    )

A source that has its rows in one order (base.OrderedIterator) gives the next of them, as many as a batch takes. Of
other sources, row r of the mixture's batches takes the rows r of the source's batches, one after another. So each row
of a source is used once, a host reads of every source the rows that are its own, and the batches are the same ones for
any number of hosts. All hosts compute the choice for all rows (_row_choice.py), so they agree without a word when a
source has ended, which ends the mixture, and the saved positions fit together when the number of hosts changes.

The sources of a mixture within a mixture are mixed with all others, by the products of the weights.

A batch has one more entry, `row_sources`, bool [B, S], which says from which of the S sources a row is, in the order of
`source_names`. With it losses report `loss/<source>` and `loss_weight/<source>` (layers.losses_by_source).

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
  """Batches whose rows are from several inputs of the same batch size and shapes.

  Fields:
    sources: name -> input, or data as inputs/batches.py takes them. Names become parts of names of metrics. The mixture
      ends before the first batch that lacks a row of a source: `num_epochs=None` repeats one.
    weights: name -> the source's part of the rows, in proportion to their sum; 0 leaves it out for now.
    weight_changes: (number of batches, weights) pairs: behind that many batches other weights hold.
    seed: of the numbers that decide which rows of a batch are from which source; that of the outermost mixture counts.
  """

  sources: Mapping[str, base.Input]
  weights: Mapping[str, float]
  weight_changes: Sequence[tuple[int, Mapping[str, float]]] = ()
  seed: int = 0

  def __post_init__(self):
    _check_names(self.sources)
    made = {name: as_input(f'source {name!r}', source, repeats=True) for name, source in self.sources.items()}
    object.__setattr__(self, 'sources', made)
    _check_weights('weights', self.weights, self.sources)
    _check_changes(self.weight_changes, self.sources)
    if not isinstance(self.seed, int) or self.seed < 0:
      raise UserError(f'seed {self.seed!r} of the mixture must be an integer that is not negative.')

  @property
  def batch_size(self) -> int:
    return next(iter(self.sources.values())).batch_size

  @property
  def tokenizer(self) -> Tokenizer | None:
    """The tokenizer of the sources that have one; they have the same one."""
    tokenizers = map(tokenizer_of, self.sources.values())
    return next((tokenizer for tokenizer in tokenizers if tokenizer is not None), None)

  @property
  def source_names(self) -> tuple[str, ...]:
    return tuple(self.sources)

  @functools.cached_property
  def leaves(self) -> dict[str, base.Input]:
    """The sources that are no mixtures by name, `name.inner` for those of a mixture within this one."""
    leaves: dict[str, base.Input] = {}
    for name, source in self.sources.items():
      inner = source.leaves if isinstance(source, Mixture) else None
      leaves |= {name: source} if inner is None else {f'{name}.{key}': leaf for key, leaf in inner.items()}
    return leaves

  @functools.cached_property
  def schedule(self) -> list[tuple[int, list[Fraction]]]:
    """(first batch, proportions of the leaves) pairs; the first pair begins at batch 0."""
    own = [(first, _proportions(self, weights)) for first, weights in ((0, self.weights), *self.weight_changes)]
    inner = [
      _schedule_within(source, [(first, shares[i]) for first, shares in own])
      for i, source in enumerate(self.sources.values())
    ]
    at = lambda schedule, batch: [weights for first, weights in schedule if first <= batch][-1]
    return [
      (first, [share * part for share, within in zip(at(own, first), inner) for part in at(within, first)])
      for first in sorted({first for schedule in (own, *inner) for first, _ in schedule})
    ]

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    """The spec of all sources, and `row_sources`.

    Raises a UserError: the sources' specs differ; the message names two of them.
    """
    row_sources = jax.ShapeDtypeStruct((self.batch_size, len(self.sources)), np.bool_)
    return {**_common_spec(self.sources), 'row_sources': row_sources}

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'MixtureIterator':
    return MixtureIterator(self, shard_index, shard_count)

  def reshard_states(self, states: Sequence[base.State], shard_count: int) -> list[base.State]:
    for state in states:
      base.check_state(state, {'kind': 'mixture', 'names': list(self.leaves)})
    numbers = [[state['choice'], *(each.get('first_batch') for each in state['sources'].values())] for state in states]
    if any(each != numbers[0] for each in numbers):
      raise UserError(f'the shards were saved at different batches, {[s["choice"]["num_batches"] for s in states]}.')
    resharded: list[base.State] = [{**states[0], 'sources': {}} for _ in range(shard_count)]
    for name, source in self.leaves.items():
      own = [state['sources'][name] for state in states]
      with _naming(name):
        positions = source.reshard_states([each['position'] for each in own], shard_count)
      for state, position in zip(resharded, positions, strict=True):
        state['sources'][name] = {**own[0], 'position': position}
    return resharded

  def progress(self, state: base.State) -> dict[str, float]:
    """Metrics of a position: `rows/<source>`, the rows that it has given, and `epochs/<source>` where that is known.

    Of a mixture within this one, the sources have these too, as `<source>.<its source>`.
    """
    choice, metrics = state['choice'], dict[str, float]()
    for name, least, beyond in zip(state['names'], choice['rows_read'], choice['rows_read_beyond'], strict=True):
      path = name.split('.')
      for length in range(1, len(path) + 1):
        counted = f'rows/{".".join(path[:length])}'
        metrics[counted] = metrics.get(counted, 0.0) + float(least * len(beyond) + sum(beyond))
    for name, source in self.leaves.items():
      epochs = base.epochs_of(source, state['sources'][name]['position'])
      if epochs is not None:
        metrics[f'epochs/{name}'] = epochs
    return metrics


class MixtureIterator(base.InputIterator):
  """The batches of one shard of a Mixture. Its state is plain JSON data."""

  def __init__(self, settings: Mixture, shard_index: int, shard_count: int):
    spec = settings.element_spec()
    _check_tokenizers(settings.sources)
    self._settings, self._schedule = settings, settings.schedule
    names = list(settings.sources)
    self._top_sources = np.array([names.index(leaf.split('.')[0]) for leaf in settings.leaves])  # of the leaves
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
    if self._closed:
      raise UserError('this input iterator has been closed: make another one from its Input.')
    # Every host makes the same choice, reads as many rows and finds the same ends.
    choice = self.next_choice()
    needed = self._choice.num_batches_needed(choice)
    ended = [
      reader
      for reader, num in zip(self._readers, needed, strict=True)
      if not reader.is_in_order() and not reader.read_until(num)
    ]
    batch = None if ended else self._assemble(choice, ended)
    for reader in ended:
      if not self._choice.rows_read[self._readers.index(reader)].any():
        raise UserError(f'source {reader.name!r} of the mixture is empty: put examples in it, or leave it out.')
    if batch is None:
      raise StopIteration
    self._choice.advance(choice)
    for reader, rows_read in zip(self._readers, self._choice.rows_read, strict=True):
      reader.forget_until(int(rows_read.min()))
    return batch

  def next_choice(self) -> np.ndarray:
    """Returns the leaf of each row of the next batch, of all shards, int32 [B]."""
    return self._choice.choose()

  def _assemble(self, choice: np.ndarray, ended: 'list[_SourceReader]') -> base.Batch | None:
    """Returns this shard's rows of the batch whose rows have the leaves `choice`, int32 [B].

    Returns None, and adds to `ended`, if a source that is read in order has too few rows.
    """
    own = slice(self._rows.start, self._rows.stop)
    is_from = choice[own, None] == np.arange(len(self._readers))
    batch = {name: np.zeros((len(is_from), *entry.shape[1:]), entry.dtype) for name, entry in self._spec.items()}
    for source, reader in enumerate(self._readers):
      rows = np.flatnonzero(is_from[:, source])
      if not reader.is_in_order():
        numbers = self._choice.rows_read[source, self._rows.start + rows]
        for number in np.unique(numbers):
          of_batch = rows[numbers == number]
          _put(reader.name, batch, of_batch, {name: x[of_batch] for name, x in reader.batch(int(number)).items()})
      elif (count := int((choice == source).sum())) > 0:
        places = np.cumsum(choice == source)[own][rows] - 1
        if (read := reader.next_rows(count, places.tolist())) is None:
          ended.append(reader)
          return None
        _put(reader.name, batch, rows, read)
    top_sources = self._top_sources[choice[own], None]
    return {**batch, 'row_sources': top_sources == np.arange(len(self._settings.sources))}

  def _identity(self, num_batches: int) -> base.State:
    """Returns the fields that a position depends on; of the weights, those of the first `num_batches` batches."""
    s = self._settings
    decided = [[first, [str(weight) for weight in weights]] for first, weights in self._schedule if first < num_batches]
    identity = {'kind': 'mixture', 'names': list(s.leaves), 'batch_size': s.batch_size, 'seed': s.seed}
    return {**identity, 'weights': decided}

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


def _put(source: str, batch: base.Batch, rows: np.ndarray, read: base.Batch) -> None:
  """Writes what was read of a source into rows of a batch. Raises a UserError: it has other shapes."""
  for name, values in batch.items():
    if values.shape[1:] != read[name].shape[1:]:
      raise UserError(
        f'source {source!r} of the mixture has {name!r} of the shape {list(read[name].shape)} in a batch, and not '
        f'{[len(read[name]), *values.shape[1:]]}: give all batches rows of one size.'
      )
    if values.dtype != read[name].dtype:  # the placement refuses what the spec's dtype cannot hold
      batch[name] = values = values.astype(np.result_type(values, read[name]))
    values[rows] = read[name]


def _proportions(settings: Mixture, weights: Mapping[str, float]) -> list[Fraction]:
  """The weights in the order of the sources, exactly as they are written, divided by their sum."""
  exact = [Fraction(str(weights[name])) for name in settings.sources]
  return [weight / sum(exact) for weight in exact]


def _schedule_within(source: base.Input, shares: Sequence[tuple[int, Fraction]]) -> list[tuple[int, list[Fraction]]]:
  """Returns the schedule of a source in batches of the mixture, of which it gives `shares` from these batches on."""
  if not isinstance(source, Mixture):
    return [(0, [Fraction(1)])]
  moved = [(_first_batch_behind(number, shares), proportions) for number, proportions in source.schedule]
  return [(first, proportions) for first, proportions in moved if first is not None]


def _first_batch_behind(number: int, shares: Sequence[tuple[int, Fraction]]) -> int | None:
  """Returns before which batch of a mixture a source has given `number` batches of rows; None if it never has."""
  left = Fraction(number)
  for (first, share), (end, _) in zip(shares, [*shares[1:], (None, None)]):
    if not left:
      return first
    if share and (end is None or left <= share * (end - first)):
      return first + math.ceil(left / share)
    left -= share * (0 if end is None else end - first)
  return None


def sources_of(given: base.Input) -> Iterator[base.Input]:
  """Yields the sources of a mixture, also of mixtures within it; of another input, the input itself."""
  if not isinstance(given, Mixture):
    yield given
    return
  for source in given.sources.values():
    yield from sources_of(source)


def map_sources(function: Callable[[str, base.Input], base.Input], given: base.Input, name: str = '') -> base.Input:
  """Returns a mixture with function(name.key, source) for each source; of another input, function(name, input)."""
  if not isinstance(given, Mixture):
    return function(name, given)
  sources = {key: map_sources(function, source, f'{name}.{key}') for key, source in given.sources.items()}
  return dataclasses.replace(given, sources=sources)


class _SourceReader:
  """The rows of one source, in their order, or by the numbers of its batches.

  Of the batches, counted in `num_read`, it forgets those behind the oldest one in use. Its state then is the position
  before that batch, so that a restore reads the few batches behind it again.
  """

  def __init__(self, name: str, source: base.Input, shard_index: int, shard_count: int):
    self.name = name
    self.num_read = 0
    self._batch_size = source.batch_size
    self._is_in_order: bool | None = None  # before the first row is read, None
    self._num_repeated = 0  # rows that a position of an earlier version has read, but is before
    self._kept: deque[tuple[base.State, base.Batch]] = deque()  # each with the position before it
    with _naming(name):
      self._iterator = source.make_iterator(shard_index, shard_count)

  def is_in_order(self) -> bool:
    """Whether rows are read by `next_rows`, and not by batches."""
    if self._is_in_order is None:
      with _naming(self.name):
        self._is_in_order = base.is_in_order(self._iterator)
    return self._is_in_order

  def next_rows(self, count: int, places: Sequence[int]) -> base.Batch | None:
    """As of OrderedIterator; returns None if fewer rows are left."""
    iterator = cast(base.OrderedIterator, self._iterator)
    with _naming(self.name), contextlib.suppress(StopIteration):
      if self._num_repeated:
        iterator.next_rows(self._num_repeated, [])
        self._num_repeated = 0
      return iterator.next_rows(count, places)
    return None

  def read_until(self, num_batches: int) -> bool:
    """Reads until so many batches have been read; returns False if the source ends before."""
    with _naming(self.name):
      while self.num_read < num_batches:
        before = self._iterator.get_state()
        try:
          batch = next(self._iterator)
        except StopIteration:
          return False
        self._kept.append((before, batch))
        self.num_read += 1
    return True

  def batch(self, number: int) -> base.Batch:
    """Returns batch `number`, counted from 0, which has been read and not been forgotten."""
    return self._kept[number - self.num_read][1]

  def forget_until(self, number: int) -> None:
    """Forgets the batches before `number`."""
    while self._kept and self.num_read - len(self._kept) < number:
      self._kept.popleft()

  def get_state(self) -> base.State:
    """The position; not in order, that before the oldest batch that is kept, and the number of this batch."""
    with _naming(self.name):
      position = self._kept[0][0] if self._kept else self._iterator.get_state()
    if self._is_in_order and not self._num_repeated:
      return {'position': position}
    return {'first_batch': self.num_read - len(self._kept), 'position': position}

  def set_state(self, state: base.State, num_rows: int) -> None:
    """Goes to a position behind so many rows."""
    with _naming(self.name):
      self._iterator.set_state(state['position'])
    self._kept.clear()
    self._is_in_order = None if 'first_batch' in state else True
    self.num_read = int(state.get('first_batch', 0))
    self._num_repeated = max(num_rows - self.num_read * self._batch_size, 0) if 'first_batch' in state else 0

  def close(self) -> None:
    self._iterator.close()


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
  """Puts the source's name in front of the sentence of an error."""
  try:
    yield
  except (UserError, JobError) as error:
    kind = JobError if isinstance(error, JobError) else UserError
    raise kind(f'source {name!r} of the mixture: {error}') from error


def _check_names(sources: Mapping[str, Any]) -> None:
  """Raises a UserError unless there are sources, with names that can be parts of names of metrics."""
  if not isinstance(sources, Mapping) or not sources:
    raise UserError(f"sources = {sources!r} of the mixture must be a dict of at least one: {{'name': input, ...}}.")
  for name in sources:
    if not isinstance(name, str) or not re.fullmatch(r'[A-Za-z0-9_-]+', name):
      raise UserError(f'the source name {name!r} becomes part of names of metrics: use letters, digits, _ and - only.')


def _check_weights(what: str, weights: Any, sources: Mapping[str, Any]) -> None:
  """Raises a UserError unless `weights` has one usable number for every source and no other name."""
  names = {*weights} if isinstance(weights, Mapping) else set()
  differ = {'missing': sorted({*sources} - names), 'too many': sorted(names - {*sources}, key=str)}
  if any(differ.values()):
    wrong = ' and '.join(f'{found} {word}' for word, found in differ.items() if found)
    wanted = f'a dict with a weight for each of the sources {sorted(sources)}, 0 to leave one out'
    raise UserError(f'{what} = {weights!r} must be {wanted}: {wrong}.')
  for name, weight in weights.items():
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or weight < 0:
      raise UserError(f'the weight {weight!r} of source {name!r} in {what} must be a finite number of at least 0.')
  if not any(weights.values()):
    raise UserError(f'{what} = {dict(weights)!r} are all 0: give at least one source a positive weight.')


def _check_changes(changes: Any, sources: Mapping[str, Any]) -> None:
  """Raises a UserError unless `changes` are (number of batches, weights) pairs in order."""
  if not isinstance(changes, Sequence) or isinstance(changes, str):
    raise UserError(f'weight_changes = {changes!r} must be (number of batches, weights) pairs.')
  before = 0
  for change in changes:
    is_pair = isinstance(change, Sequence) and len(change) == 2
    if not is_pair or type(change[0]) is not int or change[0] <= before:
      raise UserError(
        f'weight_changes has {change!r}, which must be a pair (number of batches, weights) with a number of at least '
        f'{before + 1}: list the changes in order.'
      )
    before = change[0]
    _check_weights(f'the weights after {before} batches', change[1], sources)


def _check_tokenizers(sources: Mapping[str, Any]) -> None:
  """Raises a UserError if two sources have different tokenizers."""
  tokenizers = {name: tokenizer for name, source in sources.items() if (tokenizer := tokenizer_of(source)) is not None}
  found = {tokenizer.fingerprint(): name for name, tokenizer in tokenizers.items()}
  if len(found) > 1:
    raise UserError(
      f'the sources {list(found.values())} of the mixture have different tokenizers, so that one id would stand for '
      'different tokens: give all sources the same tokenizer.'
    )


def _common_spec(sources: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
  """The element spec of all sources, without `row_sources` of those that are mixtures.

  Raises a UserError: two sources differ in it or in their batch size; the message names both and the first difference.
  """
  specs = {}
  for name, source in sources.items():
    with _naming(name):
      specs[name] = {key: x for key, x in source.element_spec().items() if key != 'row_sources'}
      for key, x in specs[name].items():
        if not x.shape or x.shape[0] != source.batch_size:
          raise UserError(
            f'its entry {key!r} has shape {tuple(x.shape)}, but only rows are mixed: the first dim must be its '
            f'batch_size {source.batch_size}.'
          )
  (first, wanted), *others = specs.items()
  for name, spec in others:
    for key in wanted | spec:
      own, its = (
        f'{np.dtype(each[key].dtype)}{list(each[key].shape)}' if key in each else 'nothing' for each in (wanted, spec)
      )
      if own != its:
        raise UserError(
          f'the sources {first!r} and {name!r} of the mixture differ in {key!r}, {own} and {its}: give all sources the '
          'same batch_size, seq_len, entries and dtypes.'
        )
  return wanted
