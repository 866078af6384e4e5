"""The errors that the binary answers in one sentence; every other exception keeps its traceback.

    raise UserError(f'num_slots={num_slots} must be at least 1.')       # the value, the constraint, the remedy

    with naming_own_code('the loss'):                                   # so are errors of an experiment's own code
      loss(predictions, batch)

Experiments and other packages may raise them too.
"""

import ast
from collections.abc import Iterable, Iterator
import contextlib
import os
from pathlib import Path
import traceback

from spmd_tasks import exit_codes

_PACKAGE = Path(__file__).parent
_LIBRARIES = (_PACKAGE, Path(ast.__file__).parent)
_REGISTERED = (_PACKAGE / '_experiments', _PACKAGE.parent / 'experiments')  # where experiments.py finds them


class UserError(ValueError):
  """A value that the user gave cannot be used; the message states the value, the constraint and the remedy."""


class JobError(RuntimeError):
  """A job that ran cannot go on; the message states why, and what to do."""

  exit_code = exit_codes.FAILED


def user_error_code(error: BaseException) -> int | None:
  """The exit code of an error that is a sentence for the user; None for any other error, which is a bug."""
  if isinstance(error, JobError):
    return error.exit_code
  return exit_codes.USAGE if isinstance(error, UserError) else None


@contextlib.contextmanager
def naming_own_code(what: str, *, keys: Iterable[str] = (), part: object = None) -> Iterator[None]:
  """Turns an error of an experiment's own code into a UserError with the error, its file and its line.

  Every other error keeps its traceback; with JAX_TRACEBACK_FILTERING=off so does that of own code.

  Args:
    what: is computed in the context.
    keys: of the batch, which the sentence lists where a key is wrong or the dict was taken for an array.
    part: is called in the context; if it is the experiment's own, so are errors that come from a library alone.
  """
  try:
    yield
  except (UserError, JobError):
    raise
  except Exception as error:
    if os.environ.get('JAX_TRACEBACK_FILTERING') == 'off' or not (
      _own_frames(error) or (part is not None and is_own(part))
    ):
      raise
    message = ' '.join(str(error).partition('\n\n')[0].split())
    message = message if len(message) <= 400 else f'{message[:400]}...'
    is_key = isinstance(error, KeyError) or "'dict' object" in message
    listed = f'; the batch is a dict of {sorted(keys)}' if is_key and keys else ''
    place = f' ({place_of_error(error)})' if _own_frames(error) else ''
    raise UserError(
      f'{what} fails with {type(error).__name__}: {message}{listed}{place}: correct that code; '
      'JAX_TRACEBACK_FILTERING=off shows the whole traceback.'
    ) from error


def is_own(part: object) -> bool:
  """Whether an object, such as a loss, is of an experiment's own code rather than of this package."""
  return not type(part).__module__.startswith('spmd_tasks.')


def place_of_error(error: BaseException) -> str:
  """Returns file:line of the innermost frame in an experiment's own code, not in a library or in this package."""
  if isinstance(error, SyntaxError) and error.filename:
    return f'{error.filename}:{error.lineno}'
  last = (_own_frames(error) or traceback.extract_tb(error.__traceback__))[-1]
  return f'{last.filename}:{last.lineno}'


def _own_frames(error: BaseException) -> list[traceback.FrameSummary]:
  return [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own_code(Path(frame.filename))]


def _is_own_code(path: Path) -> bool:
  if any(map(path.is_relative_to, _REGISTERED)):
    return True
  is_installed = not {'site-packages', 'dist-packages'}.isdisjoint(path.parts)  # the latter on Debian
  return path.is_file() and not is_installed and not any(map(path.is_relative_to, _LIBRARIES))
