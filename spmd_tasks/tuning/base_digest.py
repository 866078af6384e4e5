"""The digest of a job's base: a SHA-256 over the folder that a job's frozen weights are from.

    base = start_digest(folder, job_log_dir)      # hashes on other threads, while the folder is read
    base()                                        # the same dict as below; all processes call it, and wait together
    base = describe_base(folder, job_log_dir)     # {'folder': ..., 'sha256': ...}; all processes call it
    check_base(restored, base, checkpoints)       # a checkpoint of adapters belongs to one base

Hashing reads the whole folder, as long as reading the weights takes. So the training program keeps the digest in its
directory, with the size, the times and the inode of each file; as long as all of these are the same, the files are not
hashed again.

A base of a terabyte on slow storage may still be hashed when the job first saves, or when it restores. No process then
goes on to where barriers have limits before all know the digest: they wait in rounds of half a minute.
"""

from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
import contextlib
import functools
import hashlib
import json
import os
from pathlib import Path
import threading
from typing import TYPE_CHECKING, Any

from absl import logging
from etils import epath

from spmd_tasks.checkpoints.checkpointer import Restored
from spmd_tasks.checkpoints.manifest import CheckpointError
from spmd_tasks.distributed import is_primary
from spmd_tasks.distributed.agreement import primary_decides
from spmd_tasks.errors import UserError
from spmd_tasks.files import read_text, write_durably
from spmd_tasks.programs.job_directory import BASE_DIGEST_FILE

if TYPE_CHECKING:  # most jobs begin without a folder
  from spmd_tasks.bridges.huggingface import AdapterFolder

_LIMIT_S = 3600
_NUM_THREADS = 8
_ROUND_S = 30.0

# [name, bytes, time of the last change of the content and of the inode in ns, inode] of each file.
_FileStates = list[list[Any]]


def describe_base(folder: str, job_log_dir: epath.Path | None = None) -> dict[str, str]:
  """Returns what a checkpoint of trained weights says about the folder with the others; all processes call it.

  Args:
    folder: in Hugging Face's format.
    job_log_dir: a job's directory, in which its training program may have kept the digest.
  """
  return _await_together(folder, job_log_dir, keep=False)()


def folder_digest(folder: str, job_log_dir: epath.Path | None = None, *, keep: bool = False) -> str:
  """Returns a SHA-256 over config.json and all safetensors files of a folder, in hexadecimal.

  Reads them whole, unless `job_log_dir` has the digest of the same files; with `keep` it has afterwards.

  Raises:
    UserError: a file has changed while it was hashed.
  """
  paths = sorted(path for pattern in ('config.json', '*.safetensors') for path in Path(folder).glob(pattern))
  states = _states(paths)
  if job_log_dir is not None and (kept := _read_kept(job_log_dir, states)) is not None:
    return kept
  with _lock:
    sha256 = _hash_files(tuple(paths), json.dumps(states))
  if _states(paths) != states:
    raise UserError(f'{folder} has changed while it was read: start again when nothing writes there.')
  if job_log_dir is not None and keep:
    try:
      write_durably(job_log_dir / BASE_DIGEST_FILE, json.dumps({'sha256': sha256, 'files': states}, indent=1) + '\n')
    except OSError as error:
      logging.warning('%s cannot be written (%s): the next start hashes again.', job_log_dir / BASE_DIGEST_FILE, error)
  return sha256


def start_digest(
  folder: str,
  job_log_dir: epath.Path,
  *,
  allow: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Callable[[], dict[str, str]]:
  """Begins to hash a folder on other threads of process 0 and keeps the digest in the job's directory.

  Args:
    folder, job_log_dir: as in `describe_base`.
    allow: a context for each round of waiting, such as a watchdog's `allow`.

  Returns:
    A function that waits for the digest and returns what `describe_base` does; all processes call it.
  """
  return _await_together(folder, job_log_dir, keep=True, allow=allow)


def check_base(restored: Restored, base: Mapping[str, str], checkpoints: os.PathLike | str) -> None:
  """Raises a CheckpointError if a checkpoint belongs to another base than that of the job."""
  if said := _another_base(restored.base or {}, base):
    raise CheckpointError(f'the checkpoint of step {restored.step} in {checkpoints} {said}')


def check_base_of_folder(adapter: 'AdapterFolder', folder: str) -> None:
  """Raises a UserError if a folder of `peft` says that it belongs to another base; all processes call it.

  One without base.json, as `peft` writes them, belongs to any base that it fits.
  """
  saved = primary_decides(adapter.base, 'base_of_adapter', limit_s=_LIMIT_S)
  if saved is not None and (said := _another_base(saved, describe_base(folder))):
    raise UserError(f'{adapter.path} {said}')


def _another_base(saved: Mapping[str, Any], base: Mapping[str, str]) -> str:
  """Returns the rest of the sentence about adapters that belong to another base than this; '' if they do not."""
  if saved.get('sha256') == base['sha256']:
    return ''
  return (
    f'has adapters of the base {saved.get("folder")} with the digest {str(saved.get("sha256"))[:12]}, but '
    f'{base["folder"]} has {base["sha256"][:12]}: give the folder that they were trained on, unchanged.'
  )


def _await_together(
  folder: str,
  job_log_dir: epath.Path | None,
  *,
  keep: bool,
  allow: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Callable[[], dict[str, str]]:
  """Begins to hash on process 0. The function that it returns waits in rounds; an error is raised there, on all."""
  hashing = _on_thread(functools.partial(folder_digest, folder, job_log_dir, keep=keep)) if is_primary() else None

  def look() -> str | None:
    assert hashing is not None
    return hashing.result() if futures.wait([hashing], timeout=_ROUND_S).done else None

  @functools.cache
  def wait() -> dict[str, str]:
    while True:
      with allow():
        sha256 = primary_decides(look, 'base_digest', limit_s=_LIMIT_S)
      if sha256 is not None:
        return {'folder': folder, 'sha256': sha256}
      logging.warning('The job waits for the hash of its base %s.', folder)

  return wait


def _states(paths: list[Path]) -> _FileStates:
  found = [(path.name, path.stat()) for path in paths]
  return [[name, each.st_size, each.st_mtime_ns, each.st_ctime_ns, each.st_ino] for name, each in found]


def _read_kept(job_log_dir: epath.Path, states: _FileStates) -> str | None:
  """The digest that the job's directory has of files in these states; None if it has none."""
  try:
    record = json.loads(read_text(job_log_dir / BASE_DIGEST_FILE))
    return str(record['sha256']) if record['files'] == states else None
  except (OSError, ValueError, TypeError, KeyError, RecursionError):
    return None


_lock = threading.Lock()  # so that a folder is hashed once a process, also where two ask at a time


@functools.cache
def _hash_files(paths: tuple[Path, ...], states: str) -> str:
  """Hashes files in these states, several at a time."""
  del states
  free = threading.Semaphore(_NUM_THREADS)

  def hash_file(path: Path) -> str:
    with free, open(path, 'rb') as file:
      return hashlib.file_digest(file, 'sha256').hexdigest()

  digests = [_on_thread(functools.partial(hash_file, path)) for path in paths]
  lines = [f'{digest.result()}  {path.name}\n' for path, digest in zip(paths, digests)]
  return hashlib.sha256(''.join(lines).encode()).hexdigest()


def _on_thread(function: Callable[[], str]) -> Future[str]:
  """Calls a function on a daemon thread, which does not keep a process that has failed from ending."""
  future: Future[str] = Future()

  def run() -> None:
    try:
      future.set_result(function())
    except BaseException as error:
      future.set_exception(error)

  threading.Thread(target=run, daemon=True, name='folder_digest').start()
  return future
