"""Claims a job_log_dir for one experiment, and for one running job at a time; remembers that steps were saved.

    with claim(job_log_dir, experiment_name='lm.StdlibTiny'):
      ...

A directory belongs to the experiment that its config.json names. The claim is a kernel lock (`flock`) on `job.lock`.
The kernel releases the lock when the process ends, kill -9 included, so nothing has to be cleaned up. The file also
names the holder. Object stores (`gs://...`) have no locks: store_claim.py claims there. Only process 0 claims.
"""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import fnmatch
import io
import itertools
import json
import os
import shutil
import socket
from typing import TYPE_CHECKING

from absl import logging
from etils import epath

from spmd_tasks.checkpoints import Checkpointer, Retention, SaveRecord
from spmd_tasks.checkpoints.manifest import MANIFEST_FILE
from spmd_tasks.errors import UserError
from spmd_tasks.files import (
  glob_below,
  is_inside,
  is_remote,
  make_directory,
  open_descriptor,
  read_text,
  storage_errors,
  write_durably,
)
from spmd_tasks.runtime.metrics import METRICS_FILE
from spmd_tasks.signatures import signed

if TYPE_CHECKING:
  from spmd_tasks.programs.store_claim import StoreClaim

CONFIG_FILE = 'config.json'
LOCK_FILE = 'job.lock'
NEWEST_CHECKPOINT_FILE = 'newest_checkpoint.json'
GOODPUT_FILE = 'goodput.json'
PARAMETERS_FILE = 'parameters.txt'
STARTUP_FILE = 'startup.json'
# What a job reads or writes, by kind; a path below may be missing.
_CHANGED = (LOCK_FILE, METRICS_FILE, f'eval/*/{METRICS_FILE}', 'samples/samples.txt')  # all others are replaced
_FILES = (CONFIG_FILE, NEWEST_CHECKPOINT_FILE, GOODPUT_FILE, PARAMETERS_FILE, STARTUP_FILE, *_CHANGED)
PROGRAMS_DIRECTORY = 'compiled'
_DIRECTORIES = ['checkpoints', 'eval', 'profile', 'ranks', 'samples', PROGRAMS_DIRECTORY]
# The errors of flock on a file system without locks (Lustre without -o flock, some FUSE).
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobDirectory:
  """A claimed directory. Leaving it as a context releases the claim.

  A UserError before the first step of a new job refuses it: what the job has written by then is removed again.
  """

  path: epath.Path
  lock_file: 'io.FileIO | StoreClaim | None'  # open and locked; None on a file system without locks
  earlier: frozenset[epath.Path] | None = None  # what a new job found; None for a job that has been here before
  made: tuple[epath.Path, ...] = ()  # the directories that the claim has made, innermost first

  def release(self) -> None:
    """Frees the directory for another job; the end of the process does the same."""
    if self.lock_file is not None:
      self.lock_file.close()

  def check(self) -> None:
    """Raises a JobError if another job has taken the directory; asked before a checkpoint is published."""
    if self.lock_file is not None and not isinstance(self.lock_file, io.FileIO):
      self.lock_file.check()

  def __enter__(self) -> 'JobDirectory':
    return self

  def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
    if isinstance(error, UserError) and self.earlier is not None and not (self.path / STARTUP_FILE).exists():
      self._remove_what_is_new(self.earlier)
    self.release()

  def _remove_what_is_new(self, earlier: frozenset[epath.Path]) -> None:
    for path in sorted(_own_paths(self.path) - earlier, key=lambda path: path.name == LOCK_FILE):  # the lock comes last
      if is_remote(path):
        if not path.name.startswith(LOCK_FILE):  # the claim is released, which keeps its object
          path.rmtree(missing_ok=True)
      elif path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
      else:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # others may have put something there
      for path in self.made:
        path.rmdir()


def claim(job_log_dir: epath.PathLike, *, experiment_name: str) -> JobDirectory:
  """Creates the directory if need be, and locks it.

  Raises a UserError: the directory belongs to another experiment or another running job (nothing is written then), or
  it cannot be created or written.
  """
  path = epath.Path(job_log_dir)
  try:
    _check_kinds(path)
    _check_experiment(path, experiment_name)
    earlier = frozenset(_own_paths(path))
    made: tuple[epath.Path, ...] = ()
    if not is_remote(path):
      made = tuple(itertools.takewhile(lambda each: not each.exists(), (path, *path.parents)))
    make_directory(path)
    lock_file = _lock(path)
    try:
      # Again, now that nobody else can write: two first jobs may have passed the first check together.
      is_known = _check_experiment(path, experiment_name)
    except BaseException:
      if lock_file is not None:
        lock_file.close()
      raise
  except OSError as error:
    where = error.filename or path
    is_link = os.path.islink(where) and not os.path.exists(where)
    raise UserError(
      f'job_log_dir {os.fspath(path)!r} cannot be used: {"a link to nothing" if is_link else error.strerror or error} '
      f'({where}). Choose a directory that this user can create and write.'
    ) from error
  is_new = not is_known and lock_file is not None  # without a lock, what is new may be another job's
  return JobDirectory(path=path, lock_file=lock_file, earlier=earlier if is_new else None, made=made)


def write_config(job_log_dir: epath.Path, config_json: str) -> None:
  """Writes config.json, signed by this user (signatures.py)."""
  config = signed(json.loads(config_json), job_log_dir)
  write_durably(job_log_dir / CONFIG_FILE, json.dumps(config, indent=1) + '\n')


def has_trained(job_log_dir: epath.Path) -> bool:
  """Whether a job has left a checkpoint in the directory."""
  return (job_log_dir / CONFIG_FILE).exists() and bool(glob_below(job_log_dir, 'checkpoints/checkpoint_*'))


def refuse_lost_config(job_log_dir: epath.Path) -> None:
  """Raises a UserError if there are checkpoints of a job without the config that says what they are of."""
  path = job_log_dir / CONFIG_FILE
  if not path.exists() and (left := glob_below(job_log_dir, f'checkpoints/checkpoint_*/{MANIFEST_FILE}')):
    what = 'is a link to nothing' if not is_remote(path) and os.path.islink(path) else 'is missing'
    raise UserError(
      f'{path} {what}, but a job has left {left[-1].parent}, and without it nothing says with which settings: put the '
      'file back, choose another job_log_dir, or go on with the settings of this command: --accept_config_changes.'
    )


def _own_paths(job_log_dir: epath.Path) -> set[epath.Path]:
  """Returns the files and directories of a job that are in its directory."""
  patterns = (*_DIRECTORIES, *_FILES, 'events.out.tfevents.*')
  if is_remote(job_log_dir):
    parts = tuple(f'{name}.*' for name in (METRICS_FILE, LOCK_FILE))
    found = glob_below(job_log_dir, '*')
    return {path for path in found if any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns + parts)}
  return {path for pattern in patterns if '/' not in pattern for path in glob_below(job_log_dir, pattern)}


def _check_kinds(job_log_dir: epath.Path) -> None:
  """Raises a UserError if something else is in the place of a file of the job (a FIFO would block) or a directory."""
  if is_remote(job_log_dir):
    return
  for kind, is_kind, patterns in (('file', os.path.isfile, _FILES), ('directory', os.path.isdir, _DIRECTORIES)):
    for path in (path for pattern in patterns for path in glob_below(job_log_dir, pattern)):
      if path.exists() and not is_kind(path):
        raise UserError(f'{os.fspath(path)!r} is not a {kind}, but the job needs one there: move it away.')
  links = [path for pattern in _CHANGED for path in glob_below(job_log_dir, pattern) if os.path.islink(path)]
  directories = (path for pattern in _DIRECTORIES for path in glob_below(job_log_dir, pattern))
  for path in (*links, *(path for path in directories if os.path.islink(path) and _leads_away(path, job_log_dir))):
    raise UserError(
      f'{os.fspath(path)!r} is a symbolic link to {os.path.realpath(path)!r}, but a job writes into its own directory '
      f'alone: put a {"file" if path in links else "directory"} in its place. The directory and its checkpoints may be '
      "links, but not to another job's."
    )


def _leads_away(path: epath.Path, job_log_dir: epath.Path) -> bool:
  """Whether a directory of the job is a link to where it must not write; checkpoints may lie on another disk."""
  if is_inside(path, job_log_dir):
    return False
  around = os.path.dirname(os.path.realpath(path))
  return path.name != 'checkpoints' or os.path.exists(os.path.join(around, CONFIG_FILE))


def _check_experiment(path: epath.Path, experiment_name: str) -> bool:
  """Returns whether an experiment owns the directory by its config.json; raises UserError if another one does."""
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


def _lock(path: epath.Path) -> 'io.FileIO | StoreClaim | None':
  """Locks the lock file and writes the holder into it; returns None on a file system without locks."""
  if is_remote(path):
    from spmd_tasks.programs.store_claim import claim_store

    return claim_store(path, LOCK_FILE)
  # Close-on-exec: a subprocess must not keep the lock after this process has died.
  lock_file = io.FileIO(open_descriptor(path / LOCK_FILE, os.O_RDWR | os.O_CREAT), 'r+')
  try:
    fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.path.samestat(os.fstat(lock_file.fileno()), os.stat(path / LOCK_FILE)):
      raise BlockingIOError  # a job that was refused has just removed the file, and another one has made it anew
    if os.fstat(lock_file.fileno()).st_nlink > 1:  # of a job's copy by hard links, whose lock stays as it is
      write_durably(path / LOCK_FILE, b'')
      lock_file.close()
      return _lock(path)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    lock_file.truncate(0)
    lock_file.write(f'host {socket.gethostname()}, pid {os.getpid()}, since {now}\n'.encode())
  except (BlockingIOError, FileNotFoundError):
    holder = lock_file.read(1000).decode(errors='replace').strip()
    is_shared = os.fstat(lock_file.fileno()).st_nlink > 1
    lock_file.close()
    copied = f', or, if it runs in a directory that this one is a copy of, remove {path / LOCK_FILE}'
    raise UserError(
      f'job_log_dir {os.fspath(path)!r} is in use by another running job ({holder or "no name left"}): stop that job '
      f'first{copied if is_shared else ""}, or choose another job_log_dir.'
    ) from None
  except OSError as error:
    lock_file.close()
    if error.errno not in _NO_LOCKS:
      raise
    logging.warning('%s is on a file system without locks: a second job in it will not be noticed.', path)
    return None
  return lock_file


class SavedSteps(SaveRecord):
  """Records the saved steps outside of `checkpoints/`, so that no job starts over by mistake.

  A store that is not mounted looks like a new job: `checkpoints/` is missing or empty. `newest_checkpoint.json`, which
  process 0 replaces after each save, tells the two apart. A job that ended before its first save starts over.
  """

  def __init__(self, job_log_dir: epath.Path):
    self._job_log_dir = job_log_dir
    self._checkpoints = job_log_dir / 'checkpoints'
    self._file = job_log_dir / NEWEST_CHECKPOINT_FILE
    self.claimed: JobDirectory | None = None  # on process 0 of the job that saves

  def open_checkpoints(self, *, retention: Retention = Retention(), read_only: bool = False) -> Checkpointer:
    """Returns the job's Checkpointer; every process calls this."""
    return Checkpointer(self._checkpoints, record=self, retention=retention, read_only=read_only)

  def before_publishing(self) -> None:
    if self.claimed is not None:
      self.claimed.check()

  def after_publishing(self, step: int) -> None:
    self.write(step)

  def write(self, step: int, *, is_last: bool = False) -> None:
    """Records that the checkpoint of `step` is complete; 0 records that nothing was saved yet. Raises OSError.

    `is_last` records that the job has ended with this checkpoint, before its last step.
    """
    write_durably(self._file, json.dumps({'step': step} | ({'is_last': True} if is_last else {})) + '\n')

  def has_ended_at(self, step: int) -> bool:
    """Returns whether the record says that the job has ended early, with the checkpoint of `step`."""
    try:
      return json.loads(read_text(self._file)) == {'step': step, 'is_last': True}
    except (OSError, ValueError, RecursionError):
      return False

  def evidence(self) -> str | None:
    """Returns a phrase that names the file by which a checkpoint was saved here; None if there is none.

    Raises a StorageError: the file exists, but cannot be read.
    """
    with storage_errors(self._job_log_dir):
      try:
        step = int(json.loads(read_text(self._file))['step'])
      except FileNotFoundError:
        return None
      except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return f'{self._file}, which names the newest one, is damaged'
    return f'{self._file} says that step {step} was saved' if step > 0 else None
