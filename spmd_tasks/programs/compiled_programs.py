"""Where the compiled programs of a job are kept for its next start, so that nobody else's program is ever run.

    path = programs_directory(job_log_dir)      # job_log_dir/compiled/NAME; None, after one warning: nowhere

JAX runs what it finds in its cache, and a job's directory may come from anyone. So a directory's programs are used only
if this user has signed its config (signatures.py) or no job has begun there, and they are in a folder whose name nobody
without this user's key can guess: what a stranger has put beside it is never read.
"""

import contextlib
import json
import os
from pathlib import Path
import stat

from absl import logging
from etils import epath

from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.agreement import gather, primary_decides
from spmd_tasks.files import is_missing, is_remote, read_text
from spmd_tasks.programs.job_directory import CONFIG_FILE, PROGRAMS_DIRECTORY
from spmd_tasks.programs.restore import LOOK_LIMIT_S
from spmd_tasks.signatures import KeyProblemError, secret_name, why_unsigned
from spmd_tasks.store_files import mirror


def programs_directory(job_log_dir: epath.Path) -> epath.Path | None:
  """Returns where JAX may keep the compiled programs of a job, which may not be there yet.

  None if that is not this user's own place, which a warning says, or if this user may only read the directory.
  """
  if not is_remote(job_log_dir) and job_log_dir.exists() and not os.access(job_log_dir, os.W_OK):
    return None
  directory = job_log_dir / PROGRAMS_DIRECTORY
  try:
    path = directory / secret_name(PROGRAMS_DIRECTORY, job_log_dir)
    why_not = _why_config_unsigned(job_log_dir) or ('' if is_remote(path) else _why_not_own(Path(path)))
  except KeyProblemError as problem:
    why_not = str(problem)
  if why_not:
    logging.warning(
      'Compiled programs are neither read from %s nor kept there: %s. --compilation_cache DIR names another place.',
      directory,
      why_not,
    )
    return None
  return path


def copy_from_store(url: epath.Path, stack: contextlib.ExitStack) -> epath.Path | None:
  """Returns a copy on this disk of a folder of compiled programs; process 0 uploads what JAX adds, until `stack` ends.

  None, after a warning, if the processes do not have the same copies: a process that compiles a program which another
  one has read may wait for it forever. A collective call.
  """

  def copy(*, uploads: bool) -> str:
    try:
      return os.fspath(stack.enter_context(mirror(url, uploads=uploads)))
    except OSError as error:
      logging.warning('Compiled programs of %s are not used, because there is no place for copies: %s', url, error)
      return ''

  directory = primary_decides(lambda: copy(uploads=True), 'copies of programs', limit_s=LOOK_LIMIT_S)
  if not is_primary():
    directory = copy(uploads=False)
  names = sorted(path.name for path in Path(directory).iterdir() if path.is_file()) if directory else None
  if any(others != names for others in gather(names, 'names of programs', limit_s=LOOK_LIMIT_S)):
    logging.warning('Compiled programs of %s are not used, because the processes have different copies of it.', url)
    return None
  return epath.Path(directory) if directory else None


def _why_config_unsigned(job_log_dir: epath.Path) -> str:
  path = job_log_dir / CONFIG_FILE
  try:
    problem = '' if is_missing(path) else why_unsigned(json.loads(read_text(path)), job_log_dir)
  except (OSError, ValueError, TypeError, RecursionError) as error:
    problem = f'it cannot be read ({type(error).__name__})'
  return problem and f'{path} does not count as written by this user, because {problem}'


def _why_not_own(path: Path) -> str:
  """Returns why what is in a directory may be another user's; '' if it cannot be, and from now on nobody may write."""
  if not os.path.lexists(path):
    return ''
  if not path.is_dir() or any(os.lstat(each).st_uid != os.geteuid() for each in (path, *path.iterdir())):
    return f'{path} or a file in it belongs to another user'
  if stat.S_IMODE(path.stat().st_mode) & 0o022:
    path.chmod(0o700)
  return ''
