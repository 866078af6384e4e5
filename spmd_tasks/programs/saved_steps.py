"""SavedSteps: remembers outside of `checkpoints/` that a job has saved steps, so that no job begins again unasked.

    saved = SavedSteps(job_log_dir)
    checkpointer = saved.open_checkpoints(max_to_keep=3)  # records each save; refuses an empty directory after one
    saved.begin_anew()                                    # --begin_anew: sets aside what the lost job has left

A store that is not mounted looks like a new job: `checkpoints/` is gone or empty. The record tells the two apart:
`newest_checkpoint.json`, which is replaced after each save. A job that was ended before its first save begins again.
"""

from collections.abc import Sequence
import itertools
import json
from typing import Any

from absl import logging
from etils import epath

from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.checkpoints.checkpoint_directory import PEER_COPIES_FILE, CheckpointDirectory
from spmd_tasks.files import glob_below, read_text, storage_errors, sync_path, write_durably
from spmd_tasks.programs.job_directory import (
  CONFIG_FILE,
  GOODPUT_FILE,
  NEWEST_CHECKPOINT_FILE,
  PARAMETERS_FILE,
  STARTUP_FILE,
)
from spmd_tasks.runtime.metrics import METRICS_FILE

# What a job leaves beside its checkpoints. The record comes last: as long as it is there, the loss is noticed.
_LEFT = (
  f'{METRICS_FILE}*',
  'events.out.tfevents.*',
  'eval',
  'decode',
  'samples',
  'profile',
  GOODPUT_FILE,
  PEER_COPIES_FILE,
  STARTUP_FILE,
  PARAMETERS_FILE,
  NEWEST_CHECKPOINT_FILE,
)


class SavedSteps:
  """Keeps and reads the record of a job's saved steps beside its checkpoints. Process 0 alone writes."""

  def __init__(self, job_log_dir: epath.Path):
    self._job_log_dir = job_log_dir
    self._checkpoints = job_log_dir / 'checkpoints'
    self._record = job_log_dir / NEWEST_CHECKPOINT_FILE

  def open_checkpoints(self, **settings: Any) -> Checkpointer:
    """Returns the job's Checkpointer; `settings` are arguments of its constructor, which every process calls."""
    return Checkpointer(self._checkpoints, on_saved=self.record, witness=self.witness, **settings)

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

  def begin_anew(self) -> None:
    """Sets aside what the job has left, if it has no checkpoint to go on from.

    Files go to `earlier_1` (`_2`, ...), those in `checkpoints/` to `checkpoints/earlier_1`: that may be another file
    system. `config.json` is copied, as a start without --exp needs it.

    Raises:
      StorageError: a file cannot be moved; the same call goes on where this one has ended.
    """
    with storage_errors(self._job_log_dir):
      if CheckpointDirectory(path=self._checkpoints).claimed_steps():
        logging.warning('--begin_anew changes nothing: there are checkpoints in %s to go on from.', self._checkpoints)
        return
      left = [path for pattern in _LEFT for path in glob_below(self._job_log_dir, pattern)]
      incomplete = [path for path in _children(self._checkpoints) if not path.name.startswith('earlier_')]
      if not left and not incomplete:
        return
      names = (f'earlier_{number}' for number in itertools.count(1))
      name = next(name for name in names if not (self._job_log_dir / name).exists())
      aside = self._job_log_dir / name
      aside.mkdir()
      if (self._job_log_dir / CONFIG_FILE).exists():
        (self._job_log_dir / CONFIG_FILE).copy(aside / CONFIG_FILE)
      _move(incomplete, self._checkpoints / name)
      _move(left, aside)
    logging.warning('--begin_anew: what the job has left is now in %s.', aside)


def _children(path: epath.Path) -> list[epath.Path]:
  return sorted(path.iterdir()) if path.is_dir() else []


def _move(paths: Sequence[epath.Path], target: epath.Path) -> None:
  if not paths:
    return
  target.mkdir(exist_ok=True)
  for path in paths:
    path.rename(target / path.name)
  sync_path(target)
  sync_path(target.parent)
