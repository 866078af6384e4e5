"""Checks the settings of a mixture: weights against names, and the sources against one another."""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import base
from spmd_tasks.inputs._source_reader import naming
from spmd_tasks.inputs.tokenizers import tokenizer_of
from spmd_tasks.row_sources import row_sources


def check_names(sources: Mapping[str, Any]) -> None:
  """Raises a UserError unless there are sources, with names that can be parts of names of metrics."""
  if not isinstance(sources, Mapping) or not sources:
    raise UserError(f"sources = {sources!r} of the mixture must be a dict of at least one: {{'name': input, ...}}.")
  for name in sources:
    if not isinstance(name, str) or not re.fullmatch(r'[A-Za-z0-9_-]+', name):
      raise UserError(f'the source name {name!r} becomes part of names of metrics: use letters, digits, _ and - only.')


def check_weights(what: str, weights: Any, sources: Mapping[str, Any]) -> None:
  """Raises a UserError unless `weights` has one usable number for every source and no other name."""
  if not isinstance(weights, Mapping):
    raise UserError(f'{what} = {weights!r} must be a dict of the sources {sorted(sources)} and their weights.')
  unknown, missing = sorted(set(weights) - set(sources), key=str), sorted(set(sources) - set(weights))
  if unknown or missing:
    found = [f'names {unknown}'] * bool(unknown) + [f'lacks {missing}'] * bool(missing)
    raise UserError(
      f'{what} {" and ".join(found)}, but the sources are {sorted(sources)}: give each of them a weight, 0 to leave it '
      'out for now.'
    )
  for name, weight in weights.items():
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight) or weight < 0:
      raise UserError(f'the weight {weight!r} of source {name!r} in {what} must be a finite number of at least 0.')
  if not any(weights.values()):
    raise UserError(f'{what} = {dict(weights)!r} are all 0: give at least one source a positive weight.')


def check_changes(changes: Any, sources: Mapping[str, Any]) -> None:
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
    check_weights(f'the weights after {before} batches', change[1], sources)


def check_tokenizers(sources: Mapping[str, Any]) -> None:
  """Raises a UserError if two sources have different tokenizers."""
  found: dict[str, str] = {}  # fingerprint -> the first source with it
  for name, source in sources.items():
    tokenizer = tokenizer_of(source)
    if tokenizer is not None:
      found.setdefault(tokenizer.fingerprint(), name)
  if len(found) > 1:
    raise UserError(
      f'the sources {list(found.values())} of the mixture have different tokenizers, so that one id would stand for '
      'different tokens: give all sources the same tokenizer.'
    )


def common_spec(sources: Mapping[str, base.Input]) -> dict[str, jax.ShapeDtypeStruct]:
  """The element spec of all sources, without the ids of the sources' own sources where they are mixtures.

  Raises:
    UserError: two sources differ in it or in their batch size; the message names both and the first difference.
  """
  first, *others = (_SourceSpec.of(name, source) for name, source in sources.items())
  for other in others:
    first.check_equals(other)
  return first.entries


@dataclasses.dataclass(frozen=True)
class _SourceSpec:
  """A source's name, batch size and spec."""

  name: str
  batch_size: int
  entries: dict[str, jax.ShapeDtypeStruct]

  @classmethod
  def of(cls, name: str, source: base.Input) -> '_SourceSpec':
    with naming(name):
      spec = source.element_spec()
      entries = {key: x for key, x in spec.items() if not row_sources({key: x})[0]}
      for key, x in entries.items():
        if not x.shape or x.shape[0] != source.batch_size:
          raise UserError(
            f'its entry {key!r} has shape {tuple(x.shape)}, but only rows are mixed: the first dim must be its '
            f'batch_size {source.batch_size}.'
          )
    return cls(name, source.batch_size, entries)

  def check_equals(self, other: '_SourceSpec') -> None:
    if self.batch_size != other.batch_size:
      raise UserError(
        f'the sources {self.name!r} and {other.name!r} of the mixture have batch_size {self.batch_size} and '
        f'{other.batch_size}: give every source the batch_size of the mixture.'
      )
    for key in sorted(self.entries.keys() | other.entries.keys()):
      own, its = (_describe(spec.entries.get(key)) for spec in (self, other))
      if own != its:
        raise UserError(
          f'the sources {self.name!r} and {other.name!r} of the mixture differ in {key!r}, {own} and {its}: give all '
          'sources the same entries, seq_len and dtypes.'
        )


def _describe(entry: jax.ShapeDtypeStruct | None) -> str:
  return 'nothing' if entry is None else f'{np.dtype(entry.dtype)}{list(entry.shape)}'
