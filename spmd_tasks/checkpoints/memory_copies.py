"""MemoryCopies: keeps copies of process states as digested files in a RAM disk, and finds them again after a restart.

    <directory>/spmd_tasks_<uid>/<job>/process_<i>/<attempt>_<step>_<owner>.copy

A copy is the part of the live state that lies on the devices of one process, its owner, with the owner's position in
its input. Process i keeps its own copies and those of another process in `process_<i>`. This file does not communicate;
peer_copies.py does.

A file is: a magic line; the length of the header; the header, JSON; the blocks of the arrays; the SHA-256 of all that.
It is written under another name and renamed when it is complete. Directories and files are open to their user alone,
as everybody can write into a RAM disk, and a state may be secret.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import mmap
import os
from pathlib import Path
import shutil
import stat
import struct
from typing import Any, BinaryIO

import jax
import numpy as np

from spmd_tasks.checkpoints.manifest import leaf_entries
from spmd_tasks.errors import UserError

_MAGIC = b'spmd_tasks memory copy 1\n'
_LENGTH = struct.Struct('>Q')
_DIGEST_BYTES = 32
_MAX_HEADER_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 24
_SUFFIX = '.copy'


class DamagedCopyError(Exception):
  """A copy is missing, cut off or changed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyHeader:
  """The header of a copy: which part of which state it is.

  Attributes:
    job: the random name of the job, so that a copy is not taken for one of another job with the same path.
    attempt: the random name of the start that made it: copies of one step from two starts never make one state.
    step: of the state.
    owner, num_processes: whose part of the state, of how many.
    layout: identifies the mesh and the shapes, dtypes and shardings of the state.
    newest_checkpoint: the newest complete checkpoint when the copy was made; None: there was none, or not known.
    input_state: the owner's position in its input.
    blocks: (index of the leaf, start of the block in each dim, its shape), in the order of the file.
  """

  job: str
  attempt: str
  step: int
  owner: int
  num_processes: int
  layout: str
  newest_checkpoint: int | None
  input_state: dict[str, Any] | None
  blocks: list[list[Any]]

  @property
  def file_name(self) -> str:
    return f'{self.attempt}_{self.step:08d}_{self.owner}{_SUFFIX}'


def layout_of(abstract_state: Any) -> str:
  """Identifies the layout of a state: where it is equal, every block lies on the same device of the same process."""
  leaves = jax.tree.leaves(abstract_state)
  mesh = leaves[0].sharding.mesh
  description = [
    list(mesh.shape.items()),
    [[device.process_index, device.id] for device in mesh.devices.flat],
    [[leaf.name, leaf.shape, leaf.dtype] for leaf in leaf_entries(abstract_state)],
    [str(leaf.sharding.spec) for leaf in leaves],
  ]
  return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def local_num_bytes(abstract_state: Any) -> int:
  """Counts the bytes of a copy: every block on this process's devices once."""
  return sum(
    math.prod(shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_state) for _, shape in _blocks_of(leaf)
  )


class MemoryCopies:
  """The copies of one job on this host. Methods raise OSError where the RAM disk cannot be used."""

  def __init__(self, directory: str, job_path: str, process_index: int):
    """Makes the directory of this process in a RAM disk; `job_path` is the job's directory, which names its copies.

    Raises a UserError: the directory cannot be made, or belongs to another user.
    """
    job = f'{Path(job_path).name[:40]}_{hashlib.sha256(job_path.encode()).hexdigest()[:16]}'
    root = Path(directory) / f'spmd_tasks_{os.getuid()}'
    self._job = root / job
    self.path = self._job / f'process_{process_index}'
    try:
      for path in (root, self._job, self.path):
        _make_private(path)
    except OSError as error:
      raise UserError(
        f'peer_copy_directory = {directory!r} cannot hold copies of the state: {error.strerror or error} '
        f'({error.filename}). Name a RAM disk that this user can write, such as /dev/shm, or set '
        'peer_copy_every_steps=None.'
      ) from error

  def free_bytes(self) -> int:
    """Returns how much the RAM disk can take, what this job's copies hold included."""
    system = os.statvfs(self.path)
    return system.f_bavail * system.f_frsize + sum(path.stat().st_size for path in self._files())

  def write(self, header: CopyHeader, state: Any) -> Path:
    """Writes all but the digest of a copy of `state`, which may be donated afterwards; returns the unfinished file."""
    partial = self.path / f'{header.file_name}.partial'
    head = json.dumps(dataclasses.asdict(header)).encode()
    with _create_private(partial) as file:
      file.write(_MAGIC + _LENGTH.pack(len(head)) + head)
      for leaf in jax.tree.leaves(state):
        shards = {_block(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
        for block in _blocks_of(leaf):
          file.write(np.ascontiguousarray(shards[block]).reshape(-1).view(np.uint8).data)
    return partial

  def finish(self, partial: Path) -> Path:
    """Appends the digest to an unfinished copy and gives it its name."""
    digest = hashlib.sha256()
    with open(partial, 'rb+') as file:
      while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
      file.write(digest.digest())
    final = partial.with_suffix('')
    partial.rename(final)
    return final

  def receive(self, name: str, chunks: Iterator[bytes]) -> None:
    """Writes a copy that another process has finished; nothing of it is left if `chunks` raises."""
    if Path(name).name != name or not name.endswith(_SUFFIX):
      raise ValueError(f'{name!r} is not the name of a copy')
    partial = self.path / f'{name}.partial'
    try:
      with _create_private(partial) as file:
        for chunk in chunks:
          file.write(chunk)
      partial.rename(self.path / name)
    except BaseException:
      partial.unlink(missing_ok=True)
      raise

  def headers(self) -> dict[Path, CopyHeader]:
    """Returns the headers of all complete files of this job on this host, whole or not; own files come first."""
    found = {}
    for path in sorted(self._files(), key=lambda path: (path.parent != self.path, path)):
      if path.suffix == _SUFFIX:
        try:
          with open(path, 'rb') as file:
            found[path] = _read_header(file)[0]
        except (OSError, ValueError, RecursionError, DamagedCopyError):
          continue
    return found

  def keep_only(self, is_kept: Callable[[str, int], bool]) -> None:
    """Deletes this job's copies on this host, finished or not, but for those whose (attempt, step) `is_kept`."""
    for path in self._files():
      attempt, _, rest = path.name.partition('_')
      step = rest.partition('_')[0]
      if not step.isdecimal() or not is_kept(attempt, int(step)):
        path.unlink(missing_ok=True)

  def remove(self) -> None:
    """Removes this process's directory, and the job's if it was the last."""
    shutil.rmtree(self.path, ignore_errors=True)
    with contextlib.suppress(OSError):  # another process of this host is not done yet
      self._job.rmdir()

  def _files(self) -> list[Path]:
    return [path for path in self._job.glob('process_*/*') if path.is_file()]


def verify(path: Path) -> CopyHeader:
  """Reads a whole copy and compares its digest. Raises a DamagedCopyError if it is not what was written."""
  try:
    with open(path, 'rb') as file:
      header, start = _read_header(file)
      left = os.fstat(file.fileno()).st_size - _DIGEST_BYTES
      if left < start:
        raise DamagedCopyError('it is cut off')
      file.seek(0)
      digest = hashlib.sha256()
      while chunk := file.read(min(left, _CHUNK_BYTES)):
        digest.update(chunk)
        left -= len(chunk)
      if file.read() != digest.digest():
        raise DamagedCopyError('its content has changed (SHA-256)')
      return header
  except (OSError, ValueError, RecursionError) as error:
    raise DamagedCopyError(str(error)) from error


def read_state(path: Path, abstract_state: Any) -> Any:
  """Reads the live state from a verified copy of this process's part, of the layout of `abstract_state`.

  A collective call where several processes have parts.
  """
  leaves, structure = jax.tree.flatten(abstract_state)
  with open(path, 'rb') as file:
    header, offset = _read_header(file)
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
      blocks: list[dict[Any, np.ndarray]] = [{} for _ in leaves]
      for number, start, shape in header.blocks:
        dtype = leaves[number].dtype
        count = math.prod(shape)
        # A copy: JAX may use a numpy array's memory as its own.
        block = np.frombuffer(data, dtype, count=count, offset=offset).reshape(shape).copy()
        blocks[number][tuple(start), tuple(shape)] = block
        offset += count * dtype.itemsize

  def restore(leaf: jax.ShapeDtypeStruct, own: Mapping[Any, np.ndarray]) -> jax.Array:
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: own[_block(index or (), leaf.shape)])

  return jax.tree.unflatten(structure, [restore(leaf, own) for leaf, own in zip(leaves, blocks, strict=True)])


def block_table(abstract_state: Any) -> list[list[Any]]:
  """The `blocks` of a header, in the order in which `MemoryCopies.write` writes them."""
  return [
    [number, list(start), list(shape)]
    for number, leaf in enumerate(jax.tree.leaves(abstract_state))
    for start, shape in _blocks_of(leaf)
  ]


def _blocks_of(leaf: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
  """(start, shape) of every block of an array or a ShapeDtypeStruct that lies on this process's devices, once."""
  indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
  return list(dict.fromkeys(_block(index, leaf.shape) for index in indices))


def _block(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """(start, shape) of a shard."""
  bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
  return tuple(start for start, _, _ in bounds), tuple(stop - start for start, stop, _ in bounds)


def _read_header(file: Any) -> tuple[CopyHeader, int]:
  """Returns the header and the offset of the first block."""
  if file.read(len(_MAGIC)) != _MAGIC:
    raise DamagedCopyError('it does not begin like a copy')
  (length,) = _LENGTH.unpack(file.read(_LENGTH.size).ljust(_LENGTH.size, b'\0'))
  head = file.read(length) if length <= _MAX_HEADER_BYTES else b''
  if len(head) != length:
    raise DamagedCopyError('its header is cut off')
  fields = json.loads(head)
  if not isinstance(fields, dict) or fields.keys() != {field.name for field in dataclasses.fields(CopyHeader)}:
    raise DamagedCopyError('its header has other fields')
  return CopyHeader(**fields), file.tell()


def _make_private(path: Path) -> None:
  """Makes a directory for this user alone; refuses one that somebody else has put there."""
  path.mkdir(mode=0o700, parents=False, exist_ok=True)
  found = path.lstat()
  if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
    raise PermissionError(errno.EPERM, 'it belongs to another user', str(path))
  if found.st_mode & 0o077:
    path.chmod(0o700)


def _create_private(path: Path) -> BinaryIO:
  """Opens a new file for writing, or an emptied old one, that only this user can read."""
  return open(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600), 'wb')
