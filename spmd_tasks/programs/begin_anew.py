"""--begin_anew: sets aside what a job has left whose checkpoints are lost (saved_steps.py), so that it begins again."""

from collections.abc import Sequence
import itertools

from absl import logging
from etils import epath

from spmd_tasks.checkpoints.checkpoint_directory import PEER_COPIES_FILE, CheckpointDirectory
from spmd_tasks.files import glob_below, storage_errors, sync_path
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


def set_aside(job_log_dir: epath.Path) -> None:
  """Sets aside what the job has left, if it has no checkpoint to go on from.

  Files go to `earlier_1` (`_2`, ...), those in `checkpoints/` to `checkpoints/earlier_1`: that may be another file
  system. `config.json` is copied, as a start without --exp needs it.

  Raises:
    StorageError: a file cannot be moved; the same call goes on where this one has ended.
  """
  checkpoints = job_log_dir / 'checkpoints'
  with storage_errors(job_log_dir):
    if CheckpointDirectory(path=checkpoints).claimed_steps():
      logging.warning('--begin_anew changes nothing: there are checkpoints in %s to go on from.', checkpoints)
      return
    left = [path for pattern in _LEFT for path in glob_below(job_log_dir, pattern)]
    incomplete = [path for path in _children(checkpoints) if not path.name.startswith('earlier_')]
    if not left and not incomplete:
      return
    names = (f'earlier_{number}' for number in itertools.count(1))
    name = next(name for name in names if not (job_log_dir / name).exists())
    aside = job_log_dir / name
    aside.mkdir()
    if (job_log_dir / CONFIG_FILE).exists():
      (job_log_dir / CONFIG_FILE).copy(aside / CONFIG_FILE)
    _move(incomplete, checkpoints / name)
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
