"""Manifest: lists the size and digest of every file of a checkpoint, and the name, shape and dtype of every array.

`manifest.json` is written last; a directory without it is not a checkpoint. The manifest has a digest of itself, and
the versions of the packages that wrote it. An intact manifest of another format is refused, and does not count as
damaged.

A shard of an array ends with its CRC-32C (arrays.py), which TensorStore checks as it reads the shard. On a disk the
manifest repeats the CRC, which detects a shard from another checkpoint. All other files have a SHA-256. Format 1, of
earlier versions, has a SHA-256 of every file.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import errno
import functools
import hashlib
import importlib.metadata
import json
import os
from typing import Any, NamedTuple

from etils import epath

from spmd_tasks.errors import JobError, UserError
from spmd_tasks.files import open_bytes, read_bytes, sync_path, write_durably
from spmd_tasks.sharding.weights import leaves_by_name

MANIFEST_FILE = 'manifest.json'
STATE = 'state'  # below a checkpoint: the directory of the arrays; with a suffix in a store (store_directory.py)
FORMAT = 2
_READABLE_FORMATS = (1, 2)
_PACKAGES = ('spmd_tasks', 'jax', 'tensorstore')
_CRC = 'crc32c:'
_CRC_BYTES = 4
_CHUNK_BYTES = 1 << 22
NUM_HASH_THREADS = 8
# The errors of opening a path without a regular file: nothing, a directory or a FIFO.
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENXIO)


class CheckpointError(UserError):
  """A checkpoint cannot be saved or restored; the message states which one, why, and what to do."""


class CheckpointChoiceError(CheckpointError):
  """Process 0 finds no checkpoint to restore; raised on every process before arrays are read."""


class CheckpointSaveError(CheckpointError, JobError):
  """A checkpoint could not be saved while the job was running."""


class DamagedCheckpointError(Exception):
  """A file of a checkpoint is missing or has changed. `file` is relative to the checkpoint's directory."""

  def __init__(self, file: str, reason: str):
    super().__init__(f'{file}: {reason}')
    self.file = file
    self.reason = reason


class FileEntry(NamedTuple):
  """One file of a checkpoint.

  Attributes:
    path: relative to the checkpoint.
    num_bytes: its size.
    digest: a SHA-256 in hexadecimal; `crc32c:` and the CRC at the end of a shard; '' for an array's objects in a store.
  """

  path: str
  num_bytes: int
  digest: str


class LeafEntry(NamedTuple):
  """One array of the state: its key path ('weights/ffn/kernel'), global shape and dtype name."""

  name: str
  shape: tuple[int, ...]
  dtype: str

  def __str__(self) -> str:
    return f'{self.dtype}[{",".join(map(str, self.shape))}]'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """The content of a checkpoint that `num_processes` processes wrote."""

  step: int
  num_processes: int
  files: tuple[FileEntry, ...]
  leaves: tuple[LeafEntry, ...]

  @property
  def state_name(self) -> str:
    """The directory of the arrays."""
    return next((name for file in self.files if (name := file.path.split('/')[0]).startswith(STATE)), STATE)

  @property
  def is_ocdbt(self) -> bool:
    """Whether Orbax wrote the arrays as OCDBT."""
    return any(file.path == f'{STATE}/manifest.ocdbt' for file in self.files)


def leaf_entries(tree: Any) -> tuple[LeafEntry, ...]:
  """Lists the leaves of a tree of arrays or ShapeDtypeStructs, in the tree's order."""
  return tuple(LeafEntry(name, tuple(leaf.shape), str(leaf.dtype)) for name, leaf in leaves_by_name(tree).items())


def write_manifest(directory: epath.Path, *, step: int, num_processes: int, leaves: Sequence[LeafEntry]) -> None:
  """Flushes and digests all files below `directory`, then writes the manifest atomically. Raises OSError."""
  root = os.fspath(directory)  # there are many files, and a string is a tenth of the work of an epath.Path

  def entry_of(path: str) -> FileEntry:
    file = f'{root}/{path}'
    if not path.startswith(STATE):  # TensorStore has flushed its files
      sync_path(file)
    return FileEntry(path, *digest_file(file, is_shard=_is_shard(path)))

  paths = sorted(_files_below(root))
  with ThreadPoolExecutor(NUM_HASH_THREADS, thread_name_prefix='checkpoint_hash') as pool:
    files = list(pool.map(entry_of, paths))
    list(pool.map(sync_path, {os.path.dirname(f'{root}/{path}') for path in paths}))
  text = manifest_text(step=step, num_processes=num_processes, leaves=leaves, files=files)
  write_durably(directory / MANIFEST_FILE, text)


def manifest_text(*, step: int, num_processes: int, leaves: Sequence[LeafEntry], files: Sequence[FileEntry]) -> str:
  """Returns the content of a manifest."""
  return _encode(
    {
      'format': FORMAT,
      'step': step,
      'num_processes': num_processes,
      'versions': _versions(),
      'files': [*files],
      'leaves': [*leaves],
    }
  )


def read_manifest(directory: epath.Path) -> Manifest:
  """Reads the manifest and checks its own digest, but not the files that it lists.

  Raises:
    DamagedCheckpointError: the manifest is missing, or has changed since it was written.
    CheckpointError: the manifest is intact, but has another format.
  """
  try:
    data = read_bytes(directory / MANIFEST_FILE)
  except OSError as error:
    if error.errno not in NO_FILE:
      raise
    raise DamagedCheckpointError(MANIFEST_FILE, 'missing') from None
  try:
    body = json.loads(data)['body']
    # The encoding is canonical: the file must equal the encoded body, digest included.
    if _encode(body).encode() != data:
      raise ValueError('the manifest has changed')
    if body['format'] in _READABLE_FORMATS:
      return Manifest(
        step=body['step'],
        num_processes=body['num_processes'],
        files=tuple(FileEntry(*entry) for entry in body['files']),
        leaves=tuple(LeafEntry(name, tuple(shape), dtype) for name, shape, dtype in body['leaves']),
      )
  except (ValueError, TypeError, KeyError, RecursionError):
    raise DamagedCheckpointError(MANIFEST_FILE, 'its own digest does not match') from None
  raise CheckpointError(
    f'{directory / MANIFEST_FILE} has format {body["format"]}, but this version of spmd_tasks reads formats '
    f'{" and ".join(map(str, _READABLE_FORMATS))}; the checkpoint is not damaged. It was written by '
    f'{_describe(body.get("versions"))}; installed are {_describe(_versions())}. Restore it with the version that '
    'wrote it, or train in a new job_log_dir.'
  )


def _encode(body: Any) -> str:
  digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
  return json.dumps({'body': body, 'sha256': digest}, indent=1) + '\n'


@functools.cache
def _versions() -> dict[str, str]:
  versions = {}
  for package in _PACKAGES:
    try:
      versions[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from its sources
      versions[package] = 'not installed'
  return versions


def _describe(versions: Any) -> str:
  known = versions if isinstance(versions, dict) else {}
  return ', '.join(f'{package} {version}' for package, version in known.items()) or 'unknown versions'


def _files_below(directory: str, prefix: str = '') -> Iterator[str]:
  with os.scandir(directory) as entries:
    for entry in entries:
      if entry.is_dir():
        yield from _files_below(entry.path, f'{prefix}{entry.name}/')
      elif prefix or entry.name != MANIFEST_FILE:
        yield f'{prefix}{entry.name}'


def digest_file(path: epath.PathLike, *, is_shard: bool) -> tuple[int, str]:
  """Returns the size and the digest of a file; the digest of a shard is the CRC-32C at its end."""
  digest, num_bytes = hashlib.sha256(), 0
  with open_bytes(path) as file:
    if is_shard:
      num_bytes = file.seek(0, os.SEEK_END)
      file.seek(max(0, num_bytes - _CRC_BYTES))
      return num_bytes, f'{_CRC}{file.read().hex()}'
    while chunk := file.read(_CHUNK_BYTES):
      digest.update(chunk)
      num_bytes += len(chunk)
  return num_bytes, digest.hexdigest()


def _is_shard(path: str) -> bool:
  """Returns whether a file is a shard: `state/weights.ffn.kernel/c.0.1`, or `state/step/c` of a scalar."""
  names = path.split('/')
  return names[0].startswith(STATE) and len(names) == 3 and names[2].split('.')[0] == 'c'
