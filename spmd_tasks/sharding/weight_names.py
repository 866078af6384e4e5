"""Finds weights by patterns of their names, and says which names are near where none is found."""

from collections.abc import Collection, Sequence
import difflib
import functools
import re

from spmd_tasks.errors import UserError

_NUM_NEAR = 3


def check_pattern(pattern: str, setting: str) -> None:
  """Raises a UserError that names the setting if the pattern is no regular expression."""
  try:
    re.compile(pattern)
  except re.error as error:
    raise UserError(f'{setting} has {pattern!r}, which is no regular expression: {error}.') from error


def matching_names(patterns: Sequence[str], names: Collection[str], *, setting: str) -> list[str]:
  """Returns the names in which a pattern is found, in their order.

  Patterns are regular expressions that are searched in a name: 'attention/(query|value)' is found in
  'stack/layers/attention/query/kernel'. `setting` says where they are from, for errors.

  Raises a UserError: a pattern is no regular expression, or is found in no name.
  """
  if isinstance(patterns, str):
    raise UserError(f'{setting} is {patterns!r}; it must be a tuple of patterns: ({patterns!r},).')
  if not patterns:
    raise UserError(f'{setting} has no pattern: give one, such as ("attention/",).')
  found: set[str] = set()
  for pattern in patterns:
    check_pattern(pattern, setting)
    matched = [name for name in names if re.search(pattern, name)]
    if not matched:
      near = sorted(names, key=functools.partial(_likeness, pattern[:200]), reverse=True)[:_NUM_NEAR]
      near_text = ', '.join(near) or 'there are none'
      raise UserError(f'{setting} has {pattern!r:.200}, which is in no name of a weight: near are {near_text}.')
    found.update(matched)
  return [name for name in names if name in found]


def _likeness(pattern: str, name: str) -> float:
  """How much an end of a name is like a pattern, from 0 to 1."""
  parts = name.split('/')
  ends = ['/'.join(parts[i:]) for i in range(len(parts))] + parts
  return max(difflib.SequenceMatcher(None, pattern, end).ratio() for end in ends)
