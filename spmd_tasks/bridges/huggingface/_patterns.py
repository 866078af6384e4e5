r"""Regular expressions of a folder's config, which may come from anyone: matched in linear time, or refused.

    ranks = NumberByPattern(file, 'rank_pattern', {'q_proj': 4, r'layers\.\d\.': 8})
    ranks.find('model.layers.0.self_attn.q_proj')     # 4: of the first pattern that matches, as `peft` finds it

Python's own `re` may take for ever over `(a+)+` or `.?` thirty times. RE2 takes time in proportion to pattern and name,
but has neither lookaround nor backreferences. Names of modules, which are most of what folders have, need no matcher.
"""

from collections.abc import Mapping
from pathlib import Path
import re
from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require

_MAX_LENGTH, _MAX_PATTERNS = 1000, 100  # of a pattern, and of those that are no plain names
_NAME = re.compile(r'(?:[\w-]|\\[.-])+')


class NumberByPattern:
  """The numbers that a config gives to modules by patterns of their names."""

  def __init__(self, file: Path, key: str, numbers: Mapping[str, Any]):
    """Raises a UserError if a pattern is too long or none of RE2's, or if patterns need RE2, which is not installed."""
    self._names: dict[str, tuple[int, Any]] = {}  # with the place among the patterns
    self._patterns: list[tuple[int, Any, Any]] = []
    for i, (pattern, number) in enumerate(numbers.items()):
      said = f'{file} has {key} {pattern!r:.60}'
      if len(pattern) > _MAX_LENGTH:
        raise UserError(f'{said}... of {len(pattern)} characters: at most {_MAX_LENGTH} are read; name the modules.')
      if _NAME.fullmatch(pattern):
        self._names.setdefault(pattern.replace('\\', ''), (i, number))
        continue
      if len(self._patterns) == _MAX_PATTERNS:
        raise UserError(f'{said} and {_MAX_PATTERNS} patterns before it: at most so many are read; name the modules.')
      require('huggingface', 're2', wants=f'{said}, a regular expression of a file,')
      import re2

      options = re2.Options()
      options.log_errors = False
      try:
        self._patterns.append((i, re2.compile(rf'(.*\.)?({pattern})$', options), number))
      except (re2.error, UnicodeEncodeError) as error:
        raise UserError(
          f'{said}, which is no regular expression of RE2, without lookaround and backreferences ({error}): name the '
          'modules.'
        ) from error

  def find(self, module: str) -> Any:
    """Returns the number of the first pattern that matches a module's name or an end of it; None without one."""
    parts = module.split('.')
    ends = ('.'.join(parts[i:]) for i in range(len(parts)))
    found = [self._names[end] for end in ends if end in self._names]
    found += [(i, number) for i, pattern, number in self._patterns if pattern.match(module)][:1]
    return min(found, key=lambda each: each[0])[1] if found else None
