"""The digest manifest of one checkpoint: what its files must hold, byte for byte, and which arrays it carries.

`manifest.json` is written last, and a checkpoint counts only with it. It lists every other file with its size and
SHA-256, and every array with its name, shape and dtype; a digest of its own covers itself. Array files carry no usable
digest of their own: TensorStore restores flipped bits silently. The versions of the packages that wrote it are there
for whoever has to read it later.

A manifest that is intact but of another format is no damage: it is refused, and nothing is renamed.

Cost: writing and verifying each read every byte once. `hashlib` releases the GIL, so one process hashes `num_threads`
files at a time, at about 1 GB/s per thread (measured 1.4 with SHA instructions). A checkpoint of 1 TB takes about 2
minutes with 8 threads on storage that delivers 8 GB/s: in the background of a save, but before the arrays are read in a
restore.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import hashlib
import importlib.metadata
import json
from typing import Any

from etils import epath
import jax

from spmd_tasks.checkpoints.checkpoint_errors import CheckpointError
from spmd_tasks.checkpoints.durable_files import sync_path, write_durably
from spmd_tasks.errors import UserError

MANIFEST_FILE = 'manifest.json'
FORMAT = 1
_PACKAGES = ('spmd_tasks', 'jax', 'orbax-checkpoint')
_CHUNK_BYTES = 1 << 22
_MAX_LISTED = 10


class DamagedCheckpointError(Exception):
  """A file of a checkpoint is missing or not what was saved. `file` is relative to the checkpoint's directory."""

  def __init__(self, file: str, reason: str):
    super().__init__(f'{file}: {reason}')
    self.file = file
    self.reason = reason


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
  """One file: its path below the checkpoint's directory, its size in bytes and its SHA-256 in hexadecimal."""

  path: str
  num_bytes: int
  sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafEntry:
  """One array of the state: its key path ('weights/ffn/kernel'), global shape and dtype name."""

  name: str
  shape: tuple[int, ...]
  dtype: str

  def __str__(self) -> str:
    return f'{self.dtype}[{",".join(map(str, self.shape))}]'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """What a checkpoint holds. `num_processes` wrote it, each with its own input state; `versions` of packages."""

  step: int
  num_processes: int
  files: tuple[FileEntry, ...]
  leaves: tuple[LeafEntry, ...]
  versions: dict[str, str]


def leaf_entries(tree: Any) -> tuple[LeafEntry, ...]:
  """The leaf table of a tree of arrays or ShapeDtypeStructs, in the tree's order."""
  return tuple(
    LeafEntry(
      name=jax.tree_util.keystr(path, simple=True, separator='/'), shape=tuple(leaf.shape), dtype=str(leaf.dtype)
    )
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  )


def leaf_mismatches(saved: Sequence[LeafEntry], wanted: Sequence[LeafEntry]) -> list[str]:
  """One line for each leaf that is not the same on both sides, both sides named; [] if the tables agree."""
  saved_by_name = {leaf.name: leaf for leaf in saved}
  wanted_by_name = {leaf.name: leaf for leaf in wanted}
  lines = []
  for name, leaf in wanted_by_name.items():
    if name not in saved_by_name:
      lines.append(f'{name}: the experiment has {leaf}, the checkpoint has no such leaf')
    elif (leaf.shape, leaf.dtype) != (saved_by_name[name].shape, saved_by_name[name].dtype):
      lines.append(f'{name}: the experiment has {leaf}, the checkpoint has {saved_by_name[name]}')
  lines += [
    f'{name}: the experiment has no such leaf, the checkpoint has {leaf}'
    for name, leaf in saved_by_name.items()
    if name not in wanted_by_name
  ]
  return lines


def describe_mismatches(lines: Sequence[str]) -> str:
  """The first ten mismatches, one per line, and how many more there are."""
  shown = [f'  {line}' for line in lines[:_MAX_LISTED]]
  if len(lines) > _MAX_LISTED:
    shown.append(f'  ... and {len(lines) - _MAX_LISTED} more')
  return '\n'.join(shown)


def write_manifest(
  directory: epath.Path, *, step: int, num_processes: int, leaves: Sequence[LeafEntry], num_threads: int
) -> None:
  """Flushes and hashes every file below `directory`, then writes its manifest atomically. Raises OSError."""
  paths = sorted(_files_below(directory))

  def entry_of(path: str) -> FileEntry:
    sync_path(directory / path)
    num_bytes, digest = _hash_file(directory / path)
    return FileEntry(path=path, num_bytes=num_bytes, sha256=digest)

  with ThreadPoolExecutor(num_threads, thread_name_prefix='checkpoint_hash') as pool:
    files = tuple(pool.map(entry_of, paths))
  for subdirectory in sorted({(directory / path).parent for path in paths}):
    sync_path(subdirectory)
  body = {
    'format': FORMAT,
    'step': step,
    'num_processes': num_processes,
    'versions': _versions(),
    'files': [[entry.path, entry.num_bytes, entry.sha256] for entry in files],
    'leaves': [[leaf.name, list(leaf.shape), leaf.dtype] for leaf in leaves],
  }
  write_durably(directory / MANIFEST_FILE, _encode(body))


def read_manifest(directory: epath.Path) -> Manifest:
  """Reads and checks the manifest itself, not the files that it lists.

  Raises:
    DamagedCheckpointError: it is missing, or anything in it has changed since it was written.
    CheckpointError: it is as it was written, but of another format.
  """
  try:
    data = (directory / MANIFEST_FILE).read_bytes()
  except (FileNotFoundError, NotADirectoryError):
    raise DamagedCheckpointError(MANIFEST_FILE, 'missing') from None
  try:
    body = json.loads(data)['body']
    # Encoding is canonical: whatever is read must be what would be written, digest included.
    if _encode(body).encode() != data:
      raise UserError('not what was written')
    if body['format'] == FORMAT:
      return Manifest(
        step=body['step'],
        num_processes=body['num_processes'],
        files=tuple(FileEntry(path=path, num_bytes=size, sha256=digest) for path, size, digest in body['files']),
        leaves=tuple(LeafEntry(name=name, shape=tuple(shape), dtype=dtype) for name, shape, dtype in body['leaves']),
        versions=dict(body.get('versions', {})),
      )
  except (ValueError, TypeError, KeyError, RecursionError):
    raise DamagedCheckpointError(MANIFEST_FILE, 'its own digest does not match') from None
  raise CheckpointError(
    f'{directory / MANIFEST_FILE} has format {body["format"]}, but this version of spmd_tasks reads format {FORMAT}; '
    f'the checkpoint is not damaged. It was written by {_describe(body.get("versions"))}; here is '
    f'{_describe(_versions())}. Restore it with the version that wrote it, or train in a new job_log_dir.'
  )


def verify_files(directory: epath.Path, manifest: Manifest, *, num_threads: int) -> None:
  """Reads every file that the manifest lists and compares its size and digest. Other files are ignored.

  Raises:
    DamagedCheckpointError: the first file, in the manifest's order, that is missing or differs.
    OSError: a file is there but cannot be read (permission, I/O): not known to be damaged.
  """

  def problem_of(entry: FileEntry) -> str | None:
    path = directory / entry.path
    try:
      num_bytes = path.stat().length
      if num_bytes != entry.num_bytes:
        return f'has {num_bytes} bytes instead of {entry.num_bytes}'
      _, digest = _hash_file(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
      return 'missing'
    return (
      None
      if digest == entry.sha256
      else f'its content has changed (SHA-256 {digest[:12]}..., was {entry.sha256[:12]}...)'
    )

  with ThreadPoolExecutor(num_threads, thread_name_prefix='checkpoint_hash') as pool:
    for entry, problem in zip(manifest.files, pool.map(problem_of, manifest.files)):
      if problem:
        pool.shutdown(wait=False, cancel_futures=True)
        raise DamagedCheckpointError(entry.path, problem)


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
  if not isinstance(versions, dict) or not versions:
    return 'unknown versions'
  return ', '.join(f'{package} {version}' for package, version in versions.items())


def _files_below(directory: epath.Path, prefix: str = '') -> Iterator[str]:
  for path in directory.iterdir():
    if path.is_dir():
      yield from _files_below(path, f'{prefix}{path.name}/')
    elif prefix or path.name != MANIFEST_FILE:
      yield f'{prefix}{path.name}'


def _hash_file(path: epath.Path) -> tuple[int, str]:
  digest, num_bytes = hashlib.sha256(), 0
  with path.open('rb') as file:
    while chunk := file.read(_CHUNK_BYTES):
      digest.update(chunk)
      num_bytes += len(chunk)
  return num_bytes, digest.hexdigest()
