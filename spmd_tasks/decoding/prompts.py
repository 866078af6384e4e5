r"""Prompts: what a decoding job continues, from a JSON lines file.

    {"prompt": "def fibonacci(", "max_tokens": 40, "temperature": 0.8, "seed": 7, "n": 3, "stop": ["\n\n"]}
    {"prompt_ids": [1, 17, 34], "score_prompt": true}

Every field but the prompt has a default in the task's DecodeSettings.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import difflib
import math
import os
from typing import Any, Protocol

from etils import epath

from spmd_tasks.errors import UserError
from spmd_tasks.inputs.records import parse_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """One line; None where it says nothing.

  Fields:
    prompt, prompt_ids: text, or tokens as they are (no token for the beginning of text is put before them).
    n: how many continuations are wanted.
    seed, max_tokens, temperature, top_k, top_p, min_p, repetition_penalty: of the sampling.
    stop: strings that end a continuation; stop_ids: tokens that do, beside the end of text.
    score_prompt: whether the prompt's own log-probabilities are wanted.
    id: anything; it is put on the output's line.
  """

  prompt: str | None = None
  prompt_ids: tuple[int, ...] | None = None
  n: int | None = None
  seed: int | None = None
  max_tokens: int | None = None
  temperature: float | None = None
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  repetition_penalty: float | None = None
  stop: tuple[str, ...] = ()
  stop_ids: tuple[int, ...] = ()
  score_prompt: bool = False
  id: Any = None


class PromptSource(Protocol):
  """The settings of a decode input."""

  def read(self) -> list[Prompt]:
    """All prompts, the same on every process and each time."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptFile:
  """A JSON lines file, one prompt per line; blank lines are skipped."""

  path: str

  def read(self) -> list[Prompt]:
    """The prompts.

    Raises:
      UserError: the file cannot be read, or a line is no prompt; the message names it.
    """
    try:
      data = epath.Path(os.path.expanduser(self.path)).read_bytes()
    except OSError as error:
      raise UserError(f'prompts {self.path} cannot be read: {error.strerror or error}.') from error
    lines = enumerate(data.splitlines(), start=1)
    prompts = [parse_prompt(line, f'{self.path} line {number}') for number, line in lines if line.strip()]
    if not prompts:
      raise UserError(f'{self.path} holds no prompts: write one JSON object per line, such as {{"prompt": "Once"}}.')
    return prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
  """Prompts that stand in the experiment itself; every one is text."""

  prompts: tuple[str, ...]

  def read(self) -> list[Prompt]:
    return [Prompt(prompt=text) for text in self.prompts]


def parse_prompt(line: bytes, where: str) -> Prompt:
  """A Prompt from a line of JSON.

  Raises:
    UserError: it is none; the message begins with `where`.
  """
  record = parse_json(line, where)
  if not isinstance(record, dict):
    raise UserError(f'{where}: expected an object such as {{"prompt": "Once"}}, found {type(record).__name__}.')
  for name, value in record.items():
    if name not in _IS_VALID:
      near = difflib.get_close_matches(name, _IS_VALID, n=1)
      hint = f'nearest: {near[0]!r}' if near else f'there are {", ".join(_IS_VALID)}'
      raise UserError(f'{where}: there is no field {name!r}; {hint}.')
    is_valid, expected = _IS_VALID[name]
    if not is_valid(value):
      raise UserError(f'{where}: {name} = {value!r} must be {expected}.')
  if ('prompt' in record) == ('prompt_ids' in record):
    raise UserError(f"{where}: give one of 'prompt' (text) and 'prompt_ids' (tokens).")
  fields: dict[str, Any] = dict(record)
  if isinstance(fields.get('stop'), str):
    fields['stop'] = (fields['stop'],)
  for name in ('prompt_ids', 'stop', 'stop_ids'):
    if name in fields:
      fields[name] = tuple(fields[name])
  return Prompt(**fields)


def _is_int(least: int, most: int = 2**31 - 1) -> Callable[[Any], bool]:
  return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_list(value: Any, is_item: Callable[[Any], bool]) -> bool:
  return isinstance(value, Sequence) and not isinstance(value, str) and all(map(is_item, value))


def _is_text(value: Any) -> bool:
  return isinstance(value, str) and bool(value)


_NUMBER = (_is_number, 'a number')
_IS_VALID: Mapping[str, tuple[Callable[[Any], bool], str]] = {
  'prompt': (lambda value: isinstance(value, str), 'text'),
  'prompt_ids': (lambda value: _is_list(value, _is_int(0)) and bool(value), 'a list of tokens, at least one'),
  'n': (_is_int(1), 'an integer of at least 1'),
  'seed': (_is_int(0, 2**32 - 1), 'an integer from 0 to 4294967295'),
  'max_tokens': (_is_int(0), 'an integer of at least 0'),
  'temperature': _NUMBER,
  'top_k': (_is_int(0), 'an integer of at least 0'),
  'top_p': _NUMBER,
  'min_p': _NUMBER,
  'repetition_penalty': _NUMBER,
  'stop': (lambda value: _is_text(value) or _is_list(value, _is_text), 'text or a list of texts, none of them empty'),
  'stop_ids': (lambda value: _is_list(value, _is_int(0)), 'a list of tokens'),
  'score_prompt': (lambda value: isinstance(value, bool), 'true or false'),
  'id': (lambda value: True, 'anything'),
}
