"""The digest of a job's base: a SHA-256 over the folder that a job's frozen weights are from.

    base = start_digest(folder, job_log_dir)      # hashes on other threads, while the folder is read
    base()                                        # the same dict as below; all processes call it, and wait together
    base = describe_base(folder, job_log_dir)     # {'folder': ..., 'sha256': ...}; all processes call it
    check_base(restored, base, checkpoints)       # a checkpoint of adapters belongs to one base

Hashing reads the whole folder, as long as reading the weights takes. So the training program keeps the digest in its
directory, with the size, the times and the inode of each file; as long as all of these are the same, the files are not
hashed again.

A base of a terabyte on slow storage may still be hashed when the job first saves, or when it restores. No process then
goes on to where barriers have limits before all know the digest: process 0 tells the others every half minute how far
it is.
"""

from collections.abc import Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
from pathlib import Path
import threading
import time
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
_ROUND_S = 30.0  # in which process 0 tells how far it is
_STALLED_S = 600.0

# [name, bytes, time of the last change of the content and of the inode in ns, inode] of each file.
_FileStates = list[list[Any]]


def describe_base(folder: str, job_log_dir: epath.Path | None = None) -> dict[str, str]:
  """Returns what a checkpoint of trained weights says about the folder with the others; all processes call it.

  All wait together, and log every half minute how far process 0 is with hashing.

  Args:
    folder: in Hugging Face's format.
    job_log_dir: a job's directory, in which its training program may have kept the digest.
  """
  return _StartedDigest(folder, _begin(folder, job_log_dir, keep=False), contextlib.nullcontext)()


def folder_digest(folder: str, job_log_dir: epath.Path | None = None) -> str:
  """Returns a SHA-256 over config.json and all safetensors files of a folder, in hexadecimal.

  Reads them whole, unless `job_log_dir` has the digest of the same files.
  """
  return _digest(folder, job_log_dir, keep=False).digest.result()


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
  return _StartedDigest(folder, _begin(folder, job_log_dir, keep=True), allow)


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Hashing:
  """A digest that may still be computed.

  Fields:
    digest: the SHA-256.
    num_bytes: of each file, how much of it has been read; threads write to it.
    total: bytes of all files.
  """

  digest: Future[str]
  num_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
  total: int = 0


class _StartedDigest:
  """Waits with all processes for the digest that process 0 computes; see `start_digest`."""

  def __init__(self, folder: str, hashing: _Hashing | None, allow: Callable[[], contextlib.AbstractContextManager]):
    self._folder, self._hashing, self._allow = folder, hashing, allow
    self._sha256: str | None = None
    self._last_count, self._counted_at = -1, time.monotonic()

  def __call__(self) -> dict[str, str]:
    while self._sha256 is None:
      with self._allow():
        state = primary_decides(self._look, 'base_digest', limit_s=_LIMIT_S)
      self._sha256 = state.get('sha256')
      if self._sha256 is None:
        logging.warning('The job waits for the hash of its base %s: %s.', self._folder, state['progress'])
    return {'folder': self._folder, 'sha256': self._sha256}

  def _look(self) -> dict[str, str]:
    """Returns the digest, or how far it is after a round; of process 0."""
    assert self._hashing is not None
    if futures.wait([self._hashing.digest], timeout=_ROUND_S).done:
      return {'sha256': self._hashing.digest.result()}
    count, now = sum(list(self._hashing.num_bytes.values())), time.monotonic()
    if count > self._last_count:
      self._last_count, self._counted_at = count, now
    elif now - self._counted_at > _STALLED_S:
      raise UserError(f'nothing of {self._folder} was read for {_STALLED_S:.0f} s: look whether its storage hangs.')
    return {'progress': f'{count / 1e9:.1f} of {self._hashing.total / 1e9:.1f} GB'}


def _begin(folder: str, job_log_dir: epath.Path | None, *, keep: bool) -> _Hashing | None:
  """Begins to hash on process 0. An error there is that of the digest, for all processes, which wait for it."""
  if not is_primary():
    return None
  try:
    return _digest(folder, job_log_dir, keep=keep)
  except Exception as error:
    failed: Future[str] = Future()
    failed.set_exception(error)
    return _Hashing(digest=failed)


_lock = threading.Lock()
_digests: dict[str, _Hashing] = {}  # by the folder and the states of its files; each is hashed once a process


def _digest(folder: str, job_log_dir: epath.Path | None, *, keep: bool) -> _Hashing:
  paths = sorted(path for pattern in ('config.json', '*.safetensors') for path in Path(folder).glob(pattern))
  states = _states(paths)
  key = json.dumps([folder, states])
  with _lock:
    if key not in _digests or (_digests[key].digest.done() and _digests[key].digest.exception()):
      kept = None if job_log_dir is None else _read_kept(job_log_dir, states)
      _digests[key] = _start_hashing(paths, states) if kept is None else _Hashing(digest=_completed(kept))
    hashing = _digests[key]
  if keep and job_log_dir is not None and _read_kept(job_log_dir, states) is None:
    kept_digest = _on_thread(functools.partial(_keep, hashing.digest, job_log_dir, paths, states))
    return dataclasses.replace(hashing, digest=kept_digest)
  return hashing


def _start_hashing(paths: list[Path], states: _FileStates) -> _Hashing:
  num_bytes: dict[str, int] = {}
  digest = _on_thread(functools.partial(_hash_files, paths, num_bytes))
  return _Hashing(digest=digest, num_bytes=num_bytes, total=sum(size for _, size, *_ in states))


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


def _keep(digest: Future[str], job_log_dir: epath.Path, paths: list[Path], states: _FileStates) -> str:
  """Waits for the digest, writes it and returns it. Raises a UserError if a file has changed meanwhile."""
  sha256 = digest.result()
  if _states(paths) != states:
    raise UserError(f'{paths[0].parent} has changed while it was read: start again when nothing writes there.')
  try:
    write_durably(job_log_dir / BASE_DIGEST_FILE, json.dumps({'sha256': sha256, 'files': states}, indent=1) + '\n')
  except OSError as error:
    logging.warning('%s cannot be written (%s): the next start hashes again.', job_log_dir / BASE_DIGEST_FILE, error)
  return sha256


class _CountedFile(io.FileIO):
  """A file that notes how much of it has been read."""

  def __init__(self, path: Path, num_bytes: dict[str, int]):
    super().__init__(path)
    self._path, self._num_bytes = str(path), num_bytes

  def readinto(self, buffer: Any) -> int:
    count = super().readinto(buffer) or 0
    self._num_bytes[self._path] = self._num_bytes.get(self._path, 0) + count
    return count


def _hash_files(paths: list[Path], num_bytes: dict[str, int]) -> str:
  free = threading.Semaphore(_NUM_THREADS)

  def hash_file(path: Path) -> str:
    with free, _CountedFile(path, num_bytes) as file:
      return hashlib.file_digest(file, 'sha256').hexdigest()

  digests = [_on_thread(functools.partial(hash_file, path)) for path in paths]
  lines = [f'{digest.result()}  {path.name}\n' for path, digest in zip(paths, digests)]
  return hashlib.sha256(''.join(lines).encode()).hexdigest()


def _completed(digest: str) -> Future[str]:
  future: Future[str] = Future()
  future.set_result(digest)
  return future


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
