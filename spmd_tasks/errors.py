"""The errors that the binary answers in one sentence; every other exception keeps its traceback.

    raise UserError(f'num_slots={num_slots} must be at least 1.')       # the value, the constraint, the remedy

Experiments and other packages may raise them too.
"""

from spmd_tasks import exit_codes


class UserError(ValueError):
  """A value that the user gave cannot be used; the message states the value, the constraint and the remedy."""


class JobError(RuntimeError):
  """A job that ran cannot go on; the message states why, and what to do."""


def user_error_code(error: BaseException) -> int | None:
  """The exit code of an error that is a sentence for the user; None for any other error, which is a bug."""
  if isinstance(error, JobError):
    return exit_codes.FAILED
  return exit_codes.USAGE if isinstance(error, UserError) else None
