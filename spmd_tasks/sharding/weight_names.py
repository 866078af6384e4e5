"""Weights by name: `match_fn`, for settings that select weights."""

from collections.abc import Callable
import re


def match_fn(prefix: str | None) -> Callable[[str], bool]:
  """Whether a weight's name ('stack/layers/ffn/up/kernel') begins with what the regular expression matches.

  An empty prefix, or None, matches nothing (T5X contrib/moe).
  """
  if not prefix:
    return lambda name: False
  pattern = re.compile(prefix)
  return lambda name: pattern.match(name) is not None
