"""matching_names: finds weights by patterns of their names, and says which names are near where none is found."""

from collections.abc import Collection, Iterable, Sequence
import difflib
import re

from spmd_tasks.errors import UserError

_NUM_NEAR = 3


def matching_names(patterns: Sequence[str], names: Collection[str], *, setting: str) -> list[str]:
  """Returns the names in which a pattern is found, in their order.

  Args:
    patterns: regular expressions that are searched in a name: 'attention/(query|value)' is found in
      'stack/layers/attention/query/kernel'.
    names: of weights.
    setting: where the patterns are from, for errors.

  Raises:
    UserError: a pattern is no regular expression, or is found in no name.
  """
  if isinstance(patterns, str):
    raise UserError(f'{setting} is {patterns!r}; it must be a tuple of patterns: ({patterns!r},).')
  if not patterns:
    raise UserError(f'{setting} has no pattern: give one, such as ("attention/",).')
  found: set[str] = set()
  for pattern in patterns:
    try:
      compiled = re.compile(pattern)
    except re.error as error:
      raise UserError(f'{setting} has {pattern!r}, which is no regular expression: {error}.') from error
    matched = [name for name in names if compiled.search(name)]
    if not matched:
      near = ', '.join(near_names(pattern, names)) or 'there are none'
      raise UserError(f'{setting} has {pattern!r}, which is in no name of a weight: near are {near}.')
    found.update(matched)
  return [name for name in names if name in found]


def near_names(pattern: str, names: Iterable[str]) -> list[str]:
  """Returns the names whose ends are most like a pattern, the most alike first."""

  def likeness(name: str) -> float:
    parts = name.split('/')
    ends = ['/'.join(parts[i:]) for i in range(len(parts))] + parts
    return max(difflib.SequenceMatcher(None, pattern, end).ratio() for end in ends)

  return sorted(names, key=likeness, reverse=True)[:_NUM_NEAR]
