"""Errors that the binary prints as one sentence, without a traceback; any other exception has one.

    raise UserError(f'num_slots={num_slots} must be at least 1.')       # the value, the constraint, the remedy

    with own_code_errors('the loss'):                                 # turns an error of the experiment's code into one
      loss(predictions, batch)

Experiments and other packages may raise them as well.
"""

from collections.abc import Iterable, Iterator
import contextlib

from spmd_tasks import exit_codes


class UserError(ValueError):
  """A user's value cannot be used; the message states the value, the constraint and the remedy."""


class JobError(RuntimeError):
  """A running job cannot continue; the message states why, and the remedy."""

  exit_code = exit_codes.FAILED


class ExitError(JobError):
  """The experiment's own code, or a library, has called sys.exit before the job was finished."""

  exit_code = exit_codes.EXITED


def user_error_code(error: BaseException) -> int | None:
  """Returns the exit code of a UserError or JobError; None for any other error, which is a bug."""
  if isinstance(error, JobError):
    return error.exit_code
  return exit_codes.USAGE if isinstance(error, UserError) else None


@contextlib.contextmanager
def refuse_exit() -> Iterator[None]:
  """Turns sys.exit into an ExitError that says where it was called, as its code is not the job's."""
  try:
    yield
  except SystemExit as error:
    from spmd_tasks.user_code import place_of_error

    raise ExitError(
      f'sys.exit({"" if error.code is None else repr(error.code)[:200]}) was called ({place_of_error(error)}) before '
      'the end of the command: return, or raise an exception that says what is wrong. Complete checkpoints are intact.'
    ) from error


@contextlib.contextmanager
def own_code_errors(what: str, *, keys: Iterable[str] = (), part: object = None) -> Iterator[None]:
  """Turns an error of an experiment's own code into a UserError with the error, its file and its line.

  Other errors keep their traceback, and so do all errors with JAX_TRACEBACK_FILTERING=off.

  Args:
    what: what the body computes, for the message.
    keys: the keys of the batch, for errors about a wrong key or a dict that was used as an array.
    part: the object that the body calls. If the experiment's code defines it, errors raised in a library count as the
      experiment's own, and the message says where the object is defined.
  """
  try:
    yield
  except (UserError, JobError):
    raise
  except Exception as error:
    from spmd_tasks.user_code import describe

    sentence = describe(error, what, keys=keys, part=part if part is not None and is_own(part) else None)
    if sentence is None:
      raise
    raise UserError(sentence) from error


def is_own(part: object) -> bool:
  """Returns whether an object, such as a loss, is defined outside of this package."""
  return not type(part).__module__.startswith('spmd_tasks.')
