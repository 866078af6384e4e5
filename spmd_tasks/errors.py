"""The errors that the binary answers in one sentence; every other exception keeps its traceback.

    raise UserError(f'num_slots={num_slots} must be at least 1.')       # the value, the constraint, the remedy

    with naming_own_code('the loss'):                                   # so are errors of an experiment's own code
      loss(predictions, batch)

Experiments and other packages may raise them too.
"""

from collections.abc import Iterable, Iterator
import contextlib

from spmd_tasks import exit_codes


class UserError(ValueError):
  """A value that the user gave cannot be used; the message states the value, the constraint and the remedy."""


class JobError(RuntimeError):
  """A job that ran cannot go on; the message states why, and what to do."""

  exit_code = exit_codes.FAILED


class ExitError(JobError):
  """The experiment's own code, or a library that it uses, has called sys.exit: the job is not finished."""

  exit_code = exit_codes.EXITED


def user_error_code(error: BaseException) -> int | None:
  """The exit code of an error that is a sentence for the user; None for any other error, which is a bug."""
  if isinstance(error, JobError):
    return error.exit_code
  return exit_codes.USAGE if isinstance(error, UserError) else None


@contextlib.contextmanager
def refuse_exit() -> Iterator[None]:
  """Turns sys.exit into an ExitError that says where it was called: its code is not that of the job."""
  try:
    yield
  except SystemExit as error:
    from spmd_tasks.user_code import place_of_error

    raise ExitError(
      f'sys.exit({"" if error.code is None else repr(error.code)[:200]}) was called ({place_of_error(error)}) before '
      'the end of the command: return, or raise an exception that says what is wrong. Checkpoints that were complete '
      'before are intact.'
    ) from error


@contextlib.contextmanager
def naming_own_code(what: str, *, keys: Iterable[str] = (), part: object = None) -> Iterator[None]:
  """Turns an error of an experiment's own code into a UserError with the error, its file and its line.

  Every other error keeps its traceback; with JAX_TRACEBACK_FILTERING=off so does that of own code.

  Args:
    what: is computed in the context.
    keys: of the batch, which the sentence lists where a key is wrong or the dict was taken for an array.
    part: is called in the context; if it is the experiment's own, so are errors that come from a library alone, and the
      sentence says where it is defined.
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
  """Whether an object, such as a loss, is of an experiment's own code rather than of this package."""
  return not type(part).__module__.startswith('spmd_tasks.')
