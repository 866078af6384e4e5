"""SavedSteps: remembers outside of `checkpoints/` that a job has saved steps, so that no job begins again unasked.

    saved = SavedSteps(job_log_dir)
    checkpointer = saved.open_checkpoints(max_to_keep=3)  # records each save; refuses an empty directory after one

A store that is not mounted looks like a new job: `checkpoints/` is gone or empty. The record tells the two apart:
`newest_checkpoint.json`, which is replaced after each save. A job that was ended before its first save begins again.
"""

import json
from typing import Any

from etils import epath

from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.files import read_text, storage_errors, write_durably
from spmd_tasks.programs.job_directory import NEWEST_CHECKPOINT_FILE, JobDirectory


class SavedSteps:
  """Keeps and reads the record of a job's saved steps beside its checkpoints. Process 0 alone writes."""

  def __init__(self, job_log_dir: epath.Path):
    self._job_log_dir = job_log_dir
    self._checkpoints = job_log_dir / 'checkpoints'
    self._record = job_log_dir / NEWEST_CHECKPOINT_FILE
    self.claimed: JobDirectory | None = None  # on process 0 of the job that saves

  def open_checkpoints(self, **settings: Any) -> Checkpointer:
    """Returns the job's Checkpointer; `settings` are arguments of its constructor, which every process calls."""
    own: dict[str, Any] = {'on_saved': self.record, 'witness': self.witness, 'before_publishing': self._check}
    return Checkpointer(self._checkpoints, **own, **settings)

  def _check(self) -> None:
    if self.claimed is not None:
      self.claimed.check()

  def record(self, step: int, *, is_last: bool = False) -> None:
    """Records that the checkpoint of `step` is complete; 0 records that nothing was saved yet. Raises OSError.

    `is_last` says that the job has ended with it before its last step.
    """
    write_durably(self._record, json.dumps({'step': step} | ({'is_last': True} if is_last else {})) + '\n')

  def has_ended_at(self, step: int) -> bool:
    """Returns whether the record says that the job has ended early, with the checkpoint of `step`."""
    try:
      return json.loads(read_text(self._record)) == {'step': step, 'is_last': True}
    except (OSError, ValueError, RecursionError):
      return False

  def witness(self) -> str | None:
    """Says by which file it is known that a checkpoint was saved; None if nothing speaks for it.

    Raises:
      StorageError: the file is there, but cannot be read.
    """
    with storage_errors(self._job_log_dir):
      try:
        step = int(json.loads(read_text(self._record))['step'])
      except FileNotFoundError:
        return None
      except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return f'{self._record}, which names the newest one, is damaged'
    return f'{self._record} says that step {step} was saved' if step > 0 else None
