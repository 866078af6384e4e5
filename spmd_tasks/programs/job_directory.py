"""Claims a job_log_dir for one experiment and one running job, and records that steps were saved.

    with claim(job_log_dir, experiment_name='lm.StdlibTiny'):
      ...

A directory belongs to the experiment that its config.json names. While a job runs, it holds the lock of the directory
(job_lock.py). Only process 0 claims.
"""

import contextlib
import dataclasses
import fnmatch
import itertools
import json
import os
import shutil

from etils import epath

from spmd_tasks.checkpoints import Checkpointer, Retention, SaveRecord
from spmd_tasks.checkpoints.manifest import MANIFEST_FILE
from spmd_tasks.errors import UserError
from spmd_tasks.files import (
  glob_below,
  is_inside,
  is_remote,
  make_directory,
  read_text,
  storage_errors,
  write_durably,
)
from spmd_tasks.programs.job_lock import LOCK_FILE, JobLock, lock_directory
from spmd_tasks.runtime.metrics import MEDIA_DIRECTORY, METRICS_FILE
from spmd_tasks.signatures import signed

CONFIG_FILE = 'config.json'
NEWEST_CHECKPOINT_FILE = 'newest_checkpoint.json'
GOODPUT_FILE = 'goodput.json'
PARAMETERS_FILE = 'parameters.txt'
STARTUP_FILE = 'startup.json'
TRACKERS_FILE = 'trackers.json'
PROGRAMS_DIRECTORY = 'compiled'
# Every file and directory that a job reads or writes. Files are replaced, except those that are changed in place.
_CHANGED_IN_PLACE = (LOCK_FILE, METRICS_FILE, f'eval/*/{METRICS_FILE}', 'samples/samples.txt')
_REPLACED = (CONFIG_FILE, NEWEST_CHECKPOINT_FILE, GOODPUT_FILE, PARAMETERS_FILE, STARTUP_FILE, TRACKERS_FILE)
_FILES = (*_REPLACED, *_CHANGED_IN_PLACE)
_DIRECTORIES = ('checkpoints', 'eval', MEDIA_DIRECTORY, 'profile', 'ranks', 'samples', PROGRAMS_DIRECTORY)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobDirectory:
  """A claimed directory; a context manager that releases the lock.

  If a UserError ends a new job before its first step, the files that the job has written are removed.

  Attributes:
    path: the directory.
    lock: held until the context ends.
    existing: the job's paths that existed before a new job; None for a resumed job.
    created: the directories that the claim created, innermost first.
  """

  path: epath.Path
  lock: JobLock
  existing: frozenset[epath.Path] | None = None
  created: tuple[epath.Path, ...] = ()

  def __enter__(self) -> 'JobDirectory':
    return self

  def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
    if isinstance(error, UserError) and self.existing is not None and not (self.path / STARTUP_FILE).exists():
      self._remove_all_but(self.existing)
    self.lock.release()

  def _remove_all_but(self, existing: frozenset[epath.Path]) -> None:
    for path in sorted(
      _job_paths(self.path) - existing, key=lambda path: path.name == LOCK_FILE
    ):  # the lock comes last
      if is_remote(path):
        if not path.name.startswith(LOCK_FILE):  # a released lock keeps its object
          path.rmtree(missing_ok=True)
      elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
      else:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others may have written files there
      for path in self.created:
        path.rmdir()


def claim(job_log_dir: epath.PathLike, *, experiment_name: str) -> JobDirectory:
  """Locks a directory, which is created if it does not exist.

  Raises a UserError: the directory belongs to another experiment or another running job (nothing is written then), or
  it cannot be created or written.
  """
  path = epath.Path(job_log_dir)
  try:
    _check_kinds(path)
    _check_experiment(path, experiment_name)
    existing = frozenset(_job_paths(path))
    created: tuple[epath.Path, ...] = ()
    if not is_remote(path):
      created = tuple(itertools.takewhile(lambda directory: not directory.exists(), (path, *path.parents)))
    make_directory(path)
    lock = lock_directory(path)
    try:
      # Again, now that no other job can write: two new jobs may both have passed the first check.
      is_resumed = _check_experiment(path, experiment_name)
    except BaseException:
      lock.release()
      raise
  except OSError as error:
    failed = error.filename or path
    is_link = os.path.islink(failed) and not os.path.exists(failed)
    raise UserError(
      f'job_log_dir {os.fspath(path)!r} cannot be used: {"a link to nothing" if is_link else error.strerror or error} '
      f'({failed}). Choose a directory that this user can create and write.'
    ) from error
  is_new = not is_resumed and lock.is_exclusive  # otherwise the new files may be another job's
  return JobDirectory(path=path, lock=lock, existing=existing if is_new else None, created=created)


def write_config(job_log_dir: epath.Path, config_json: str) -> None:
  """Writes config.json, signed by this user (signatures.py)."""
  config = signed(json.loads(config_json), job_log_dir)
  write_durably(job_log_dir / CONFIG_FILE, json.dumps(config, indent=1) + '\n')


def has_trained(job_log_dir: epath.Path) -> bool:
  """Returns whether a job has saved a checkpoint in the directory."""
  return (job_log_dir / CONFIG_FILE).exists() and bool(glob_below(job_log_dir, 'checkpoints/checkpoint_*'))


def refuse_lost_config(job_log_dir: epath.Path) -> None:
  """Raises a UserError if there are checkpoints, but no config of the job that saved them."""
  path = job_log_dir / CONFIG_FILE
  if not path.exists() and (manifests := glob_below(job_log_dir, f'checkpoints/checkpoint_*/{MANIFEST_FILE}')):
    state = 'is a link to nothing' if not is_remote(path) and os.path.islink(path) else 'is missing'
    raise UserError(
      f'{path} {state}, but there is {manifests[-1].parent}, saved with settings that only this file records: put the '
      'file back, choose another job_log_dir, or resume with the settings of this command: --accept_config_changes.'
    )


def _job_paths(job_log_dir: epath.Path) -> set[epath.Path]:
  """Returns the existing files and directories of a job."""
  patterns = (*_DIRECTORIES, *_FILES, 'events.out.tfevents.*')
  if is_remote(job_log_dir):
    parts = tuple(f'{name}.*' for name in (METRICS_FILE, LOCK_FILE))
    paths = glob_below(job_log_dir, '*')
    return {path for path in paths if any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns + parts)}
  return {path for pattern in patterns if '/' not in pattern for path in glob_below(job_log_dir, pattern)}


def _check_kinds(job_log_dir: epath.Path) -> None:
  """Raises a UserError if a file of the job is not a regular file (a FIFO would block), or a directory not one."""
  if is_remote(job_log_dir):
    return
  for kind, is_kind, patterns in (('file', os.path.isfile, _FILES), ('directory', os.path.isdir, _DIRECTORIES)):
    for path in (path for pattern in patterns for path in glob_below(job_log_dir, pattern)):
      if path.exists() and not is_kind(path):
        raise UserError(f'{os.fspath(path)!r} is not a {kind}, but the job needs one there: move it away.')
  links = [path for pattern in _CHANGED_IN_PLACE for path in glob_below(job_log_dir, pattern) if os.path.islink(path)]
  directories = (path for pattern in _DIRECTORIES for path in glob_below(job_log_dir, pattern))
  for path in (*links, *(path for path in directories if os.path.islink(path) and _leads_away(path, job_log_dir))):
    raise UserError(
      f'{os.fspath(path)!r} is a symbolic link to {os.path.realpath(path)!r}, but a job writes only into its own '
      f'directory: put a {"file" if path in links else "directory"} in its place. The directory and its checkpoints '
      "may be links, but not to another job's."
    )


def _leads_away(path: epath.Path, job_log_dir: epath.Path) -> bool:
  """Returns whether a directory of the job links to another job's; checkpoints may be on another disk."""
  if is_inside(path, job_log_dir):
    return False
  parent = os.path.dirname(os.path.realpath(path))
  return path.name != 'checkpoints' or os.path.exists(os.path.join(parent, CONFIG_FILE))


def _check_experiment(path: epath.Path, experiment_name: str) -> bool:
  """Returns whether the experiment owns the directory by its config.json; raises UserError if another one does."""
  try:
    owner = json.loads(read_text(path / CONFIG_FILE))['experiment']
  except FileNotFoundError:
    return False
  except (ValueError, TypeError, KeyError, RecursionError):
    raise UserError(
      f'{os.fspath(path / CONFIG_FILE)!r} does not say which experiment the directory belongs to: put the file back, '
      'or choose another job_log_dir.'
    ) from None
  if owner != experiment_name:
    raise UserError(
      f'job_log_dir {os.fspath(path)!r} belongs to experiment {owner!r}, not to {experiment_name!r}: choose another '
      'job_log_dir.'
    )
  return True


class CheckpointRecord(SaveRecord):
  """Records the newest saved step outside of `checkpoints/`, so that no job starts over by mistake.

  If the disk with `checkpoints/` is not mounted, a resumed job looks like a new one. `newest_checkpoint.json`, which
  process 0 replaces after each save, tells the two apart. A job that ended before its first save starts over.
  """

  def __init__(self, job_log_dir: epath.Path):
    self._job_log_dir = job_log_dir
    self._checkpoints = job_log_dir / 'checkpoints'
    self._file = job_log_dir / NEWEST_CHECKPOINT_FILE
    self.claimed: JobDirectory | None = None  # on process 0 of a training job

  def open_checkpoints(self, *, retention: Retention = Retention(), read_only: bool = False) -> Checkpointer:
    """Returns the job's Checkpointer; every process calls this."""
    return Checkpointer(self._checkpoints, record=self, retention=retention, read_only=read_only)

  def before_publishing(self) -> None:
    if self.claimed is not None:
      self.claimed.lock.check()

  def after_publishing(self, step: int) -> None:
    self.write(step)

  def write(self, step: int, *, is_last: bool = False) -> None:
    """Records that the checkpoint of `step` is complete; 0 records that nothing was saved yet. Raises OSError.

    `is_last` records that the job ended with this checkpoint, before `num_train_steps`.
    """
    write_durably(self._file, json.dumps({'step': step} | ({'is_last': True} if is_last else {})) + '\n')

  def has_ended_at(self, step: int) -> bool:
    """Returns whether the job has ended early, with the checkpoint of `step`."""
    try:
      return json.loads(read_text(self._file)) == {'step': step, 'is_last': True}
    except (OSError, ValueError, RecursionError):
      return False

  def evidence(self) -> str | None:
    """Returns a phrase that names the record of a saved checkpoint; None if there is no record.

    Raises a StorageError: the record exists, but cannot be read.
    """
    with storage_errors(self._job_log_dir):
      try:
        step = int(json.loads(read_text(self._file))['step'])
      except FileNotFoundError:
        return None
      except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return f'{self._file}, which names the newest checkpoint, is damaged'
    return f'{self._file} says that step {step} was saved' if step > 0 else None
