"""The errors that checkpoints raise to their users."""

from spmd_tasks.errors import JobError, UserError


class CheckpointError(UserError):
  """A checkpoint could not be saved or restored; the message says which, why, and what to do."""


class CheckpointChoiceError(CheckpointError):
  """Process 0 found no checkpoint that can be restored; raised on every process of several, before any has read."""


class CheckpointSaveError(CheckpointError, JobError):
  """A checkpoint could not be saved while the job was running."""
