r"""Matches regular expressions from an untrusted config in linear time.

    ranks = NumberByPattern(file, 'rank_pattern', {'q_proj': 4, r'layers\.\d\.': 8})
    ranks.find('model.layers.0.self_attn.q_proj')     # 4: the first pattern that matches wins, as in `peft`

Python's `re` can take exponential time, for example over `(a+)+`. RE2 takes time proportional to the lengths of pattern
and name, but has neither lookaround nor backreferences. Plain module names, the common case, need no RE2.
"""

from collections.abc import Mapping
from pathlib import Path
import re
from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require

_MAX_LENGTH = 1000  # characters of a pattern
_MAX_PATTERNS = 100  # patterns that are not plain names
_NAME = re.compile(r'(?:[\w-]|\\[.-])+')


class NumberByPattern:
  """Numbers that a config assigns to modules by patterns of their names."""

  def __init__(self, file: Path, key: str, numbers: Mapping[str, Any]):
    """Compiles the patterns.

    Args:
      file, key: the place of `numbers`, for errors.
      numbers: pattern -> number.

    Raises:
      UserError: a pattern is too long or invalid in RE2, or RE2 is needed but not installed.
    """
    self._names: dict[str, tuple[int, Any]] = {}  # name -> (position in `numbers`, number)
    self._patterns: list[tuple[int, Any, Any]] = []
    for i, (pattern, number) in enumerate(numbers.items()):
      setting = f'{file} has {key} {pattern!r:.60}'
      if len(pattern) > _MAX_LENGTH:
        raise UserError(
          f'{setting}... of {len(pattern)} characters, but at most {_MAX_LENGTH} are read: name the modules.'
        )
      if _NAME.fullmatch(pattern):
        self._names.setdefault(pattern.replace('\\', ''), (i, number))
        continue
      if len(self._patterns) == _MAX_PATTERNS:
        raise UserError(
          f'{setting} after {_MAX_PATTERNS} patterns, but at most {_MAX_PATTERNS} are read: name the modules.'
        )
      require('huggingface', 're2', wants=f'{setting}, a regular expression,')
      import re2

      options = re2.Options()
      options.log_errors = False
      try:
        self._patterns.append((i, re2.compile(rf'(.*\.)?({pattern})$', options), number))
      except (re2.error, UnicodeEncodeError) as error:
        raise UserError(f'{setting}, but RE2 cannot compile it ({error}): name the modules.') from error

  def find(self, module: str) -> Any:
    """Returns the number of the first pattern that matches a module's name or its last parts, or None."""
    parts = module.split('.')
    suffixes = ('.'.join(parts[i:]) for i in range(len(parts)))
    matches = [self._names[suffix] for suffix in suffixes if suffix in self._names]
    matches += [(i, number) for i, pattern, number in self._patterns if pattern.match(module)][:1]
    return min(matches, key=lambda match: match[0])[1] if matches else None
