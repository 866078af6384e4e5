"""Selects weights by regular expressions on their names.

A pattern may come from someone else's config, and Python's `re` never finishes some of them, such as `(a+)+$`. So `re`
matches only patterns with little backtracking. RE2 matches the others, in time linear in the name.
"""

from collections.abc import Collection, Sequence
import difflib
import functools
import math
import re
from typing import Any

from spmd_tasks.errors import UserError

_NUM_SUGGESTIONS = 3
_MAX_LENGTH = 1000
_MAX_CHOICES, _REPEATS = 1e8, 64  # `re` matches four `.*`, but not five
_QUANTIFIER = re.compile(r'(\?|[*+]|\{(\d*)(,?)\d*\})[?+]?')
_GROUP = re.compile(r'\((\?(P?<\w+>|P=|P>|<?[=!]|>|[a-zA-Z-]*:?))?')
_CLASS = re.compile(r'\[\^?\]?(\\.|[^\]\\])*\]', re.DOTALL)


def check_pattern(pattern: str, setting: str) -> None:
  """Raises a UserError that names the setting if `compile_pattern` rejects the pattern."""
  try:
    compile_pattern(pattern)
  except ValueError as error:
    raise UserError(f'{setting} has the pattern {pattern!r:.200}, {error}.') from error


@functools.lru_cache(maxsize=1000)
def compile_pattern(pattern: str) -> Any:
  """Compiles a pattern with `re` or RE2. The result has the methods `search` and `match`.

  Raises a ValueError if the pattern is not a regular expression, is too long, or needs RE2, which is not installed or
  does not support it.
  """
  if len(pattern) > _MAX_LENGTH:
    raise ValueError(f'which has {len(pattern)} characters: use at most {_MAX_LENGTH}')
  try:
    compiled = re.compile(pattern)
    if _num_choices(pattern) <= _MAX_CHOICES:
      return compiled
  except (re.error, OverflowError, RecursionError) as error:
    raise ValueError(f'which is not a regular expression ({error}): correct it') from error
  too_many = 'whose backtracking may never finish: split it into several patterns'
  try:
    import re2
  except ImportError as error:
    raise ValueError(f'{too_many}, or pip install google-re2') from error
  options = re2.Options()
  options.log_errors = False
  try:
    return re2.compile(pattern, options)
  except (re2.error, UnicodeEncodeError) as error:
    raise ValueError(f'{too_many} (RE2 does not support this one: {error})') from error


def _num_choices(pattern: str) -> float:
  """Returns an upper bound on the ways in which a backtracking matcher may match a valid pattern at one position."""
  end = len(pattern)

  def alternatives(start: int) -> tuple[float, int]:
    total, position = 0.0, start
    while True:
      product, position = sequence(position)
      total += product
      if position >= end or pattern[position] == ')':
        return total, position
      position += 1  # |

  def sequence(start: int) -> tuple[float, int]:
    product, position = 1.0, start
    while position < end and pattern[position] not in '|)':
      choices = 1.0
      if pattern[position] == '(':
        choices, position = alternatives(_GROUP.match(pattern, position).end())  # type: ignore[union-attr]
        position += 1
      elif pattern[position] == '[' and (character_class := _CLASS.match(pattern, position)):
        position = character_class.end()
      else:
        position += 2 if pattern[position] == '\\' else 1
      while position < end and (quantifier := _QUANTIFIER.match(pattern, position)):
        position = quantifier.end()
        if quantifier[1] == '?':
          choices += 1
        elif choices > 1:
          choices = math.inf  # the repeated part has choices of its own
        elif quantifier[2] is None or quantifier[3]:
          choices = _REPEATS
      product *= choices
    return product, position

  return alternatives(0)[0]


def matching_names(patterns: Sequence[str], names: Collection[str], *, setting: str) -> list[str]:
  """Returns the names that match any of the patterns, in their order.

  A pattern is a regular expression that may match anywhere in a name: 'attention/(query|value)' matches
  'stack/layers/attention/query/kernel'. `setting` is the setting with the patterns, for errors.

  Raises a UserError if `compile_pattern` rejects a pattern, or if the pattern matches no name.
  """
  if isinstance(patterns, str):
    raise UserError(f'{setting} is {patterns!r}; it must be a tuple of patterns: ({patterns!r},).')
  if not patterns:
    raise UserError(f'{setting} has no pattern: give one, such as ("attention/",).')
  all_matches: set[str] = set()
  for pattern in patterns:
    check_pattern(pattern, setting)
    search = compile_pattern(pattern).search
    matches = [name for name in names if search(name)]
    if not matches:
      similar = sorted(names, key=functools.partial(_similarity, pattern[:200]), reverse=True)[:_NUM_SUGGESTIONS]
      hint = f'; the most similar names are {", ".join(similar)}' if similar else ''
      raise UserError(f'{setting} has the pattern {pattern!r:.200}, which matches no weight: correct it{hint}.')
    all_matches.update(matches)
  return [name for name in names if name in all_matches]


def _similarity(pattern: str, name: str) -> float:
  """Returns how similar a pattern is to a name, one of its suffixes or one of its parts, from 0 to 1."""
  parts = name.split('/')
  candidates = ['/'.join(parts[i:]) for i in range(len(parts))] + parts
  return max(difflib.SequenceMatcher(None, pattern, candidate).ratio() for candidate in candidates)
