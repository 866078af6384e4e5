"""Which errors are sentences for the user, and which are bugs that keep their traceback."""

import linecache
import os
from pathlib import Path

from spmd_tasks.runtime.job import exit_codes

_PACKAGE = str(Path(os.path.abspath(__file__)).parents[2])


def user_error_code(error: BaseException) -> int | None:
  """The exit code of an error that this package itself raised, in words for the user; None for any other error.

  A ValueError says that something was asked for that cannot be (USAGE), a RuntimeError that a job could not go on
  (FAILED). Raised by JAX or in a user's own code, the same types are bugs to be found.
  """
  traceback = error.__traceback__
  while traceback is not None and traceback.tb_next is not None:
    traceback = traceback.tb_next
  if traceback is None:
    return None
  path = os.path.abspath(traceback.tb_frame.f_code.co_filename)
  # A sentence of ours comes from a raise statement; a failing unpacking or int() in our code is a bug like any other.
  is_raised = linecache.getline(path, traceback.tb_lineno).lstrip().startswith('raise ')
  if not (is_raised and path.startswith(_PACKAGE + os.sep)):
    return None
  if isinstance(error, RuntimeError):
    return exit_codes.FAILED
  return exit_codes.USAGE if isinstance(error, ValueError) else None
