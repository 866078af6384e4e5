"""Tells errors of an experiment's own code from those of libraries and of this package; imported for an error alone."""

import ast
from collections.abc import Iterable
import inspect
import os
from pathlib import Path
import traceback
from typing import Any

_PACKAGE = Path(__file__).parent
_LIBRARIES = (_PACKAGE, Path(ast.__file__).parent)
_REGISTERED = (_PACKAGE / '_experiments', _PACKAGE.parent / 'experiments')  # where experiments.py finds them


def describe(error: Exception, what: str, *, keys: Iterable[str], part: object) -> str | None:
  """Returns the sentence for an error in what is computed; None if it is not of own code, or its traceback is wanted.

  Args: as of errors.naming_own_code; `part` is None unless it is own code.
  """
  frames = _own_frames(error)
  if os.environ.get('JAX_TRACEBACK_FILTERING') == 'off' or not (frames or part is not None):
    return None
  message = _message(error)
  is_key = isinstance(error, KeyError) or "'dict' object" in message
  listed = f'; the batch is a dict of {sorted(keys)}' if is_key and keys else ''
  place = place_of_error(error) if frames else _place_of_definition(part)
  return (
    f'{what} fails with {type(error).__name__}: {message}{listed}{place and f" ({place})"}: correct that code; '
    'JAX_TRACEBACK_FILTERING=off shows the whole traceback.'
  )


def describe_raised(error: Exception) -> str | None:
  """Returns the sentence that precedes the traceback of an error of own code, such as a hook's; None for others."""
  if not _own_frames(error):
    return None
  return f'{type(error).__name__}: {_message(error)} ({place_of_error(error)}); the traceback follows.'


def describe_out_of_memory(error: BaseException) -> str:
  """Returns the sentence for the error of a device that has no memory left."""
  return (
    f'the memory of the devices is not enough ({" ".join(str(error).split())[:300]}): make the batches smaller '
    '(batch_size, seq_len), raise task.learner.num_microbatches, or split the model over more devices; --mode plan '
    'says what takes it.'
  )


def place_of_error(error: BaseException) -> str:
  """Returns file:line of the innermost frame in an experiment's own code, not in a library or in this package."""
  if isinstance(error, SyntaxError) and error.filename:
    return f'{error.filename}:{error.lineno}'
  last = (_own_frames(error) or traceback.extract_tb(error.__traceback__))[-1]
  return f'{last.filename}:{last.lineno}'


def _place_of_definition(part: object) -> str:
  """Returns file:line of a function, or of a class or its instance; '' if it is not in an experiment's own code."""
  definition: Any = part if inspect.isroutine(part) or inspect.isclass(part) else type(part)
  try:
    file, (_, line) = inspect.getsourcefile(definition), inspect.getsourcelines(definition)
  except (OSError, TypeError):
    return ''
  return f'{file}:{line}' if file and _is_own_code(Path(file)) else ''


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
  return [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own_code(Path(frame.filename))]


def _is_own_code(path: Path) -> bool:
  if any(map(path.is_relative_to, _REGISTERED)):
    return True
  is_installed = not {'site-packages', 'dist-packages'}.isdisjoint(path.parts)  # the latter on Debian
  return path.is_file() and not is_installed and not any(map(path.is_relative_to, _LIBRARIES))


def _message(error: Exception) -> str:
  message = ' '.join(str(error).partition('\n\n')[0].split())
  return message if len(message) <= 400 else f'{message[:400]}...'
