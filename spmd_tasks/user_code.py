"""Describes errors of an experiment's own code, rather than of libraries and this package."""

import ast
from collections.abc import Iterable
import inspect
import os
from pathlib import Path
import traceback
from typing import Any

_PACKAGE = Path(__file__).parent
_LIBRARIES = (_PACKAGE, Path(ast.__file__).parent)
_EXPERIMENTS = (_PACKAGE / '_experiments', _PACKAGE.parent / 'experiments')  # as in experiments.py


def describe(error: Exception, what: str, *, keys: Iterable[str], part: object) -> str | None:
  """Returns a sentence for an error of own code; None for other errors, or if the user wants tracebacks.

  The arguments are as in `errors.own_code_errors`, but `part` is None if it is not own code.
  """
  frames = _own_frames(error)
  if os.environ.get('JAX_TRACEBACK_FILTERING') == 'off' or not (frames or part is not None):
    return None
  message = _message(error)
  is_key = isinstance(error, KeyError) or "'dict' object" in message
  listed = f'; the batch is a dict of {sorted(keys)}' if is_key and keys else ''
  place = place_of_error(error) if frames else _place_of_definition(part)
  name = type(error).__name__
  is_traced = type(error).__module__ == 'jax.errors' and name.startswith(('Concretization', 'NonConcrete', 'Tracer'))
  rule = ', which runs inside jax.jit: use jnp, and no float(), if or numpy on its arrays' if is_traced else ''
  return (
    f'{what} fails with {name}{message and f": {message}"}{listed}{place and f" ({place})"}: correct that code{rule}; '
    'JAX_TRACEBACK_FILTERING=off shows the traceback.'
  )


def describe_raised(error: Exception) -> str | None:
  """Returns the sentence that precedes the traceback of an error of own code, such as a hook; None for other errors."""
  if not _own_frames(error):
    return None
  return f'{type(error).__name__}: {_message(error)} ({place_of_error(error)}); the traceback follows.'


def describe_out_of_memory(error: BaseException) -> str:
  """Returns the sentence for a device's out-of-memory error."""
  return (
    f'the devices do not have enough memory ({" ".join(str(error).split())[:300]}): lower batch_size or seq_len, raise '
    'task.learner.num_microbatches, or shard the model over more devices; --mode plan lists what uses the memory.'
  )


def place_of_error(error: BaseException) -> str:
  """Returns file:line of the innermost frame in an experiment's own code, if any, else of the innermost frame."""
  if isinstance(error, SyntaxError) and error.filename:
    return f'{error.filename}:{error.lineno}'
  last = (_own_frames(error) or traceback.extract_tb(error.__traceback__))[-1]
  return f'{last.filename}:{last.lineno}'


def _place_of_definition(part: object) -> str:
  """Returns file:line of a function, a class or the class of an object; '' if it is not an experiment's own code."""
  definition: Any = part if inspect.isroutine(part) or inspect.isclass(part) else type(part)
  try:
    file, (_, line) = inspect.getsourcefile(definition), inspect.getsourcelines(definition)
  except (OSError, TypeError):
    return ''
  return f'{file}:{line}' if file and _is_own_code(Path(file)) else ''


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
  return [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own_code(Path(frame.filename))]


def _is_own_code(path: Path) -> bool:
  if any(map(path.is_relative_to, _EXPERIMENTS)):
    return True
  is_installed = not {'site-packages', 'dist-packages'}.isdisjoint(path.parts)  # dist-packages: on Debian
  return path.is_file() and not is_installed and not any(map(path.is_relative_to, _LIBRARIES))


def _message(error: Exception) -> str:
  """Returns the first paragraph of an error; if it only announces the next, with a colon, the beginning of all."""
  message = ' '.join(str(error).partition('\n\n')[0].split())
  limit = 400
  if message.endswith(':'):
    message, limit = ' '.join(str(error).split()), 600
  return message if len(message) <= limit else f'{message[:limit]}...'
