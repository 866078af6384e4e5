"""Finds weights by patterns of their names, and says which names are near where none is found.

A pattern may come from a stranger's config, and Python's `re` takes for ever over `(a+)+$` or `.?` thirty times. So it
matches only patterns that leave it few choices. Others are matched by RE2, in time proportional to the name.
"""

from collections.abc import Collection, Sequence
import difflib
import functools
import math
import re
from typing import Any

from spmd_tasks.errors import UserError

_NUM_NEAR = 3
_MAX_LENGTH = 1000
_MAX_CHOICES, _REPEATS = 1e8, 64  # so four `.*` are matched by `re`, and five are not
_QUANTIFIER = re.compile(r'(\?|[*+]|\{(\d*)(,?)\d*\})[?+]?')
_GROUP = re.compile(r'\((\?(P?<\w+>|P=|P>|<?[=!]|>|[a-zA-Z-]*:?))?')
_CLASS = re.compile(r'\[\^?\]?(\\.|[^\]\\])*\]', re.DOTALL)


def check_pattern(pattern: str, setting: str) -> None:
  """Raises a UserError that names the setting if `compile_pattern` refuses the pattern."""
  try:
    compile_pattern(pattern)
  except ValueError as error:
    raise UserError(f'{setting} has {pattern!r:.200}, {error}.') from error


@functools.lru_cache(maxsize=1000)
def compile_pattern(pattern: str) -> Any:
  """Returns an object with the methods `search` and `match`, of `re` or of RE2.

  Raises a ValueError: the pattern is no regular expression, is too long, or would need RE2, which is not installed or
  cannot match it.
  """
  if len(pattern) > _MAX_LENGTH:
    raise ValueError(f'which has {len(pattern)} characters: at most {_MAX_LENGTH} are read')
  try:
    compiled = re.compile(pattern)
    if _num_choices(pattern) <= _MAX_CHOICES:
      return compiled
  except (re.error, OverflowError, RecursionError) as error:
    raise ValueError(f'which is no regular expression: {error}') from error
  too_many = 'which leaves so many choices that a match may take for ever: write several patterns'
  try:
    import re2
  except ImportError as error:
    raise ValueError(f'{too_many}, or pip install google-re2, which matches it at once') from error
  options = re2.Options()
  options.log_errors = False
  try:
    return re2.compile(pattern, options)
  except (re2.error, UnicodeEncodeError) as error:
    raise ValueError(f'{too_many} (RE2 cannot match this one: {error})') from error


def _num_choices(pattern: str) -> float:
  """Bounds in how many ways a matcher that backtracks may try to match a valid pattern from one place of a name."""
  end = len(pattern)

  def alternatives(at: int) -> tuple[float, int]:
    total = 0.0
    while True:
      product, at = sequence(at)
      total += product
      if at >= end or pattern[at] == ')':
        return total, at
      at += 1  # |

  def sequence(at: int) -> tuple[float, int]:
    product = 1.0
    while at < end and pattern[at] not in '|)':
      choices = 1.0
      if pattern[at] == '(':
        choices, at = alternatives(_GROUP.match(pattern, at).end())  # type: ignore[union-attr]
        at += 1
      elif pattern[at] == '[' and (whole := _CLASS.match(pattern, at)):
        at = whole.end()
      else:
        at += 2 if pattern[at] == '\\' else 1
      while at < end and (quantifier := _QUANTIFIER.match(pattern, at)):
        at = quantifier.end()
        if quantifier[1] == '?':
          choices += 1
        elif choices > 1:
          choices = math.inf  # what is repeated has choices of its own
        elif quantifier[2] is None or quantifier[3]:
          choices = _REPEATS
      product *= choices
    return product, at

  return alternatives(0)[0]


def matching_names(patterns: Sequence[str], names: Collection[str], *, setting: str) -> list[str]:
  """Returns the names in which a pattern is found, in their order.

  Patterns are regular expressions that are searched in a name: 'attention/(query|value)' is found in
  'stack/layers/attention/query/kernel'. `setting` says where they are from, for errors.

  Raises a UserError: `compile_pattern` refuses a pattern, or it is found in no name.
  """
  if isinstance(patterns, str):
    raise UserError(f'{setting} is {patterns!r}; it must be a tuple of patterns: ({patterns!r},).')
  if not patterns:
    raise UserError(f'{setting} has no pattern: give one, such as ("attention/",).')
  found: set[str] = set()
  for pattern in patterns:
    check_pattern(pattern, setting)
    search = compile_pattern(pattern).search
    matched = [name for name in names if search(name)]
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
