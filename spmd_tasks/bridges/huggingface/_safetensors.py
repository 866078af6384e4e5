"""Reads slices of tensors from safetensors files, and writes such files.

    tensors = read_tensors(folder)                      # name -> LazyArray, from model.safetensors or its shards
    writer = write_tensors(folder, {name: array})       # shards of at most 5 GB, and their index

The format: 8 bytes with the length of the header, the header in JSON (name -> dtype, shape, offsets), the data. The
`safetensors` library checks the header. The data is read here, because the library's numpy interface has no float8.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import fcntl
import json
import math
import os
from pathlib import Path
import re
import shutil
import struct
from typing import Any

from etils import epath
import ml_dtypes
import numpy as np

from spmd_tasks.bridges._lazy_arrays import Index, LazyArray, contiguous
from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require
from spmd_tasks.files import open_bytes, read_text, storage_errors, sync_path

_DTYPES = {
  **{f'F{bits}': np.dtype(f'float{bits}') for bits in (64, 32, 16)},
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
  'F8_E5M2': np.dtype(ml_dtypes.float8_e5m2),
  **{f'I{bits}': np.dtype(f'int{bits}') for bits in (64, 32, 16, 8)},
  'U8': np.dtype('uint8'),
  'BOOL': np.dtype('bool'),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
MAX_SHARD_BYTES = 5 * 10**9  # as in `transformers`
SINGLE_FILE, INDEX_FILE = 'model.safetensors', 'model.safetensors.index.json'


def dtype_of(name: str) -> np.dtype:
  """Returns the dtype with this name, such as bfloat16. Raises a UserError if weights cannot have it."""
  for dtype in _NAMES:
    if dtype.name == name and (dtype.kind == 'f' or name == 'bfloat16'):
      return dtype
  raise UserError(f'weights cannot have the dtype {name!r}: use float32, bfloat16 or float16.')


def read_tensors(folder: Path) -> dict[str, LazyArray]:
  """Returns all tensors of a folder. Reads only headers, and checks them against the sizes of the files.

  As in `transformers`, model.safetensors takes precedence over an index, which an earlier save may have left.

  Raises a UserError if there is no safetensors file, or a file is truncated, damaged or contradicts the index.
  """
  if os.path.lexists(folder / INDEX_FILE) and not os.path.isfile(folder / SINGLE_FILE):
    return _read_sharded(folder)
  if os.path.lexists(folder / SINGLE_FILE):
    return read_file(folder / SINGLE_FILE)
  pickles = sorted(path.name for pattern in ('*.bin', '*.pt', '*.pth') for path in folder.glob(pattern))
  if pickles:
    raise UserError(
      f'{folder} has its weights in a pickle ({pickles[0]}), which can run code: convert them to safetensors with '
      'save_pretrained of transformers.'
    )
  raise UserError(f'{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: use a folder with weights.')


def tensor_names(folder: Path) -> set[str]:
  """Returns the names of a folder's tensors; none without safetensors files. Raises a UserError like `read_tensors`."""
  has_files = os.path.lexists(folder / INDEX_FILE) or os.path.lexists(folder / SINGLE_FILE)
  return {*read_tensors(folder)} if has_files else set()


def _read_sharded(folder: Path) -> dict[str, LazyArray]:
  try:
    weight_map = json.loads(read_text(folder / INDEX_FILE))['weight_map']
    files = sorted(set(weight_map.values()))
  except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
    raise UserError(f'{folder / INDEX_FILE} cannot be read ({error!r}): download it again.') from error
  for file in files:
    if not isinstance(file, str) or not re.fullmatch(r'[\w.-]+\.safetensors', file):
      raise UserError(f'{folder / INDEX_FILE} names the file {file!r}, which must be a safetensors file beside it.')
    if not (folder / file).is_file():
      raise UserError(f'{folder} lacks {file}, which its {INDEX_FILE} names: download it again.')
  tensors: dict[str, LazyArray] = {}
  for file in files:
    shard = read_file(folder / file)
    indexed = {name for name, shard_file in weight_map.items() if shard_file == file}
    if different := sorted(indexed ^ shard.keys()):
      raise UserError(
        f'{folder / file} and {INDEX_FILE} disagree about the tensor {different[0]}: download both again.'
      )
    tensors |= shard
  return tensors


def read_file(path: Path) -> dict[str, LazyArray]:
  """Returns all tensors of one file. Raises a UserError like `read_tensors`."""
  require('huggingface', 'safetensors', wants=path.name)
  import safetensors

  try:
    with open_bytes(path) as file:
      safetensors.safe_open(path, 'np')  # checks shapes, dtypes, offsets and the file's size
      (length,) = struct.unpack('<Q', file.read(8))
      entries = json.loads(file.read(length))
  except (OSError, ValueError, safetensors.SafetensorError) as error:
    raise UserError(
      f'{path} cannot be read or is not a complete safetensors file ({error}): make it readable, or download it again.'
    ) from error
  entries.pop('__metadata__', None)
  tensors = {}
  for name, entry in entries.items():
    if entry['dtype'] not in _DTYPES:
      raise UserError(f'{path} has {name} in the dtype {entry["dtype"]}, which must be one of {sorted(_DTYPES)}.')
    shape, dtype = tuple(entry['shape']), _DTYPES[entry['dtype']]
    tensors[name] = LazyArray(shape, dtype, _reader(path, 8 + length + entry['data_offsets'][0], shape, dtype))
  return tensors


def _reader(path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> Callable[[Index], np.ndarray]:
  def read(index: Index) -> np.ndarray:
    sizes = [part.stop - part.start for part in index]
    if sizes[1:] == list(shape[1:]):  # whole rows are contiguous in the file
      row = math.prod(shape[1:]) * dtype.itemsize
      result = np.empty(sizes, dtype)
      with path.open('rb', buffering=0) as file:
        file.seek(offset + (index[0].start * row if index else 0))
        view: Any = result.reshape(-1).view(np.uint8).data
        num_read = 0
        while num_read < len(view):
          if not (count := file.readinto(view[num_read:])):
            raise UserError(f'{path} was truncated while it was read: download it again.')
          num_read += count
      return result
    mapped = np.memmap(path, np.uint8, 'r', offset, (math.prod(shape) * dtype.itemsize,))
    return np.array(mapped.view(dtype).reshape(shape)[index])  # a copy, so that the file is unmapped

  return read


def check_free(target: Path) -> None:
  """Raises a UserError if a path exists, or a folder cannot be created there."""
  if target.exists():
    raise UserError(f'{target} exists: choose another folder, or move it away.')
  parent = next(parent for parent in target.absolute().parents if parent.exists())
  if not (parent.is_dir() and os.access(parent, os.W_OK)):
    raise UserError(f'{target} cannot be created, because {parent} is not a writable directory: choose another folder.')


@contextlib.contextmanager
def new_folder(target: Path, is_writer: bool = True) -> Iterator[Path]:
  """Yields a temporary folder to write into, and renames it to `target` at the end.

  Raises:
    UserError: the target exists, or another process writes it.
    StorageError: the folder cannot be written; it is removed.
  """
  partial = target.parent / f'.{target.name}.partial'
  if not is_writer:
    yield partial
    return
  with contextlib.ExitStack() as stack, storage_errors(partial):
    check_free(target)
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise UserError(f'{target} is being written by another export: wait for it, or choose another folder.') from None
    except OSError:  # a file system without locks
      pass
    stack.callback(shutil.rmtree, partial, ignore_errors=True)
    for path in partial.iterdir():  # left by a process that was killed
      shutil.rmtree(path) if path.is_dir() else path.unlink()
    yield partial
    os.replace(partial, target)
    sync_path(epath.Path(target.parent))


def write_tensors(
  folder: Path, tensors: Mapping[str, LazyArray], *, is_writer: bool = True, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Iterator[str]:
  """Writes tensors to one file, or to shards of at most `max_shard_bytes` and an index; yields each name once written.

  Reads the tensors one at a time. Processes with `is_writer` false read them too, because reading may be a computation
  that all processes must join.
  """
  shards = _shards(tensors, max_shard_bytes)
  weight_map: dict[str, str] = {}
  for number, names in enumerate(shards, 1):
    file_name = SINGLE_FILE if len(shards) == 1 else f'model-{number:05}-of-{len(shards):05}.safetensors'
    weight_map |= dict.fromkeys(names, file_name)
    path = folder / file_name if is_writer else Path(os.devnull)
    with path.open('wb') as file:
      file.write(_header({name: tensors[name] for name in names}))
      for name in names:
        array = contiguous(np.asarray(tensors[name]))
        file.write(array.reshape(-1).view(np.uint8).data)
        yield name
      file.flush()
      if is_writer:
        os.fsync(file.fileno())
  if is_writer and len(shards) > 1:
    index = {'metadata': {'total_size': sum(map(_num_bytes, tensors.values()))}, 'weight_map': weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + '\n', encoding='utf-8')


def _shards(tensors: Mapping[str, LazyArray], max_bytes: int) -> list[list[str]]:
  shards: list[list[str]] = [[]]
  size = 0
  for name, tensor in tensors.items():
    size += _num_bytes(tensor)
    if size > max_bytes and shards[-1]:
      shards.append([])
      size = _num_bytes(tensor)
    shards[-1].append(name)
  return shards


def _num_bytes(tensor: Any) -> int:
  return math.prod(tensor.shape) * tensor.dtype.itemsize


def _header(tensors: Mapping[str, LazyArray]) -> bytes:
  entries: dict[str, Any] = {'__metadata__': {'format': 'pt'}}  # `transformers` requires it
  start = 0
  for name, tensor in tensors.items():
    stop = start + _num_bytes(tensor)
    entries[name] = {'dtype': _NAMES[tensor.dtype], 'shape': list(tensor.shape), 'data_offsets': [start, stop]}
    start = stop
  header = json.dumps(entries).encode()
  header += b' ' * (-len(header) % 8)
  return struct.pack('<Q', len(header)) + header
