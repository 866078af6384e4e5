"""The manifest of a checkpoint: the size and SHA-256 of every file, and the name, shape and dtype of every array.

`manifest.json` is written last; a directory without it is no checkpoint. The manifest carries a digest of itself, and
the versions of the packages that wrote it. Array files have no usable digests of their own: TensorStore restores
flipped bits silently. A manifest that is intact but of another format is refused, not damaged.

Cost: saving and restoring each read every byte once, at about 1 GB/s per thread: 1 TB takes about 2 minutes with 8
threads on storage that delivers 8 GB/s.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import errno
import hashlib
import importlib.metadata
import json
from typing import Any, NamedTuple

from etils import epath

from spmd_tasks.errors import JobError, UserError
from spmd_tasks.files import open_bytes, read_bytes, sync_path, write_durably
from spmd_tasks.sharding.weights import leaves_by_name

MANIFEST_FILE = 'manifest.json'
STATE = 'state'  # below a checkpoint: the directory of the arrays; longer where store_checkpoints.py wrote it
FORMAT = 1
_PACKAGES = ('spmd_tasks', 'jax', 'orbax-checkpoint')
_CHUNK_BYTES = 1 << 22
NUM_HASH_THREADS = 8  # so many files are hashed at a time
# Nothing is there, or a directory or a FIFO is.
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENXIO)
_DIGESTS = 'digests'  # below a checkpoint that is being written


class CheckpointError(UserError):
  """A checkpoint cannot be saved or restored; the message states which one, why, and what to do."""


class CheckpointChoiceError(CheckpointError):
  """Process 0 found no checkpoint to restore; raised on every process, before any has read arrays."""


class CheckpointSaveError(CheckpointError, JobError):
  """A checkpoint could not be saved while the job was running."""


class DamagedCheckpointError(Exception):
  """A file of a checkpoint is missing or has changed. `file` is relative to the checkpoint's directory."""

  def __init__(self, file: str, reason: str):
    super().__init__(f'{file}: {reason}')
    self.file = file
    self.reason = reason


class FileEntry(NamedTuple):
  """One file: its path below the checkpoint's directory, its size in bytes and its SHA-256 in hexadecimal.

  The SHA-256 is '' for a file that has a digest in itself (store_checkpoints.py).
  """

  path: str
  num_bytes: int
  sha256: str


class LeafEntry(NamedTuple):
  """One array of the state: its key path ('weights/ffn/kernel'), global shape and dtype name."""

  name: str
  shape: tuple[int, ...]
  dtype: str

  def __str__(self) -> str:
    return f'{self.dtype}[{",".join(map(str, self.shape))}]'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """The content of a checkpoint, which `num_processes` processes wrote."""

  step: int
  num_processes: int
  files: tuple[FileEntry, ...]
  leaves: tuple[LeafEntry, ...]

  @property
  def state_name(self) -> str:
    """The directory of the arrays."""
    return next((first for each in self.files if (first := each.path.split('/')[0]).startswith(STATE)), STATE)


def leaf_entries(tree: Any) -> tuple[LeafEntry, ...]:
  """Lists the leaves of a tree of arrays or ShapeDtypeStructs, in the tree's order."""
  return tuple(LeafEntry(name, tuple(leaf.shape), str(leaf.dtype)) for name, leaf in leaves_by_name(tree).items())


def write_digests(directory: epath.Path, process_index: int) -> None:
  """Hashes one process's array files, below Orbax's `ocdbt.process_<index>`, for `write_manifest`. Raises OSError."""
  paths = [path for path in _files_below(directory) if f'ocdbt.process_{process_index}' in path.split('/')]
  entries = _hash_files(directory, paths).values()
  (directory / _DIGESTS).mkdir(exist_ok=True)
  write_durably(directory / _DIGESTS / f'process_{process_index}.json', json.dumps([*entries]))


def write_manifest(directory: epath.Path, *, step: int, num_processes: int, leaves: Sequence[LeafEntry]) -> None:
  """Completes the digests of all files below `directory`, then writes the manifest atomically. Raises OSError.

  Takes the digests of the processes that have called `write_digests`, flushes and hashes all other files itself.
  """
  known: dict[str, FileEntry] = {}
  if (directory / _DIGESTS).exists():
    for path in (directory / _DIGESTS).iterdir():
      known |= {entry[0]: FileEntry(*entry) for entry in json.loads(path.read_text())}
    (directory / _DIGESTS).rmtree()
  paths = sorted(_files_below(directory))
  hashed = _hash_files(directory, [path for path in paths if path not in known])
  files = [(known | hashed)[path] for path in paths]
  for subdirectory in sorted({(directory / path).parent for path in paths}):
    sync_path(subdirectory)
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
  """Reads and checks the manifest itself, not the files that it lists.

  Raises:
    DamagedCheckpointError: the manifest is missing or has changed since it was written.
    CheckpointError: the manifest is intact, but of another format.
  """
  try:
    data = read_bytes(directory / MANIFEST_FILE)
  except OSError as error:
    if error.errno not in NO_FILE:
      raise
    raise DamagedCheckpointError(MANIFEST_FILE, 'missing') from None
  try:
    body = json.loads(data)['body']
    # The encoding is canonical: the file must equal what this body is written as, digest included.
    if _encode(body).encode() != data:
      raise ValueError('the manifest has changed')
    if body['format'] == FORMAT:
      return Manifest(
        step=body['step'],
        num_processes=body['num_processes'],
        files=tuple(FileEntry(*entry) for entry in body['files']),
        leaves=tuple(LeafEntry(name, tuple(shape), dtype) for name, shape, dtype in body['leaves']),
      )
  except (ValueError, TypeError, KeyError, RecursionError):
    raise DamagedCheckpointError(MANIFEST_FILE, 'its own digest does not match') from None
  raise CheckpointError(
    f'{directory / MANIFEST_FILE} has format {body["format"]}, but this version of spmd_tasks reads format {FORMAT}; '
    f'the checkpoint is not damaged. It was written by {_describe(body.get("versions"))}; here is '
    f'{_describe(_versions())}. Restore it with the version that wrote it, or train in a new job_log_dir.'
  )


def _hash_files(directory: epath.Path, paths: Sequence[str]) -> dict[str, FileEntry]:
  """Flushes and hashes files."""

  def entry_of(path: str) -> FileEntry:
    sync_path(directory / path)
    return FileEntry(path, *hash_file(directory / path))

  with ThreadPoolExecutor(NUM_HASH_THREADS, thread_name_prefix='checkpoint_hash') as pool:
    return dict(zip(paths, pool.map(entry_of, paths)))


def _encode(body: Any) -> str:
  digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
  return json.dumps({'body': body, 'sha256': digest}, indent=1) + '\n'


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


def _files_below(directory: epath.Path, prefix: str = '') -> Iterator[str]:
  for path in directory.iterdir():
    if path.is_dir():
      yield from _files_below(path, f'{prefix}{path.name}/')
    elif prefix or path.name != MANIFEST_FILE:
      yield f'{prefix}{path.name}'


def hash_file(path: epath.Path) -> tuple[int, str]:
  """Returns the size of a file and its SHA-256."""
  digest, num_bytes = hashlib.sha256(), 0
  with open_bytes(path) as file:
    while chunk := file.read(_CHUNK_BYTES):
      digest.update(chunk)
      num_bytes += len(chunk)
  return num_bytes, digest.hexdigest()
