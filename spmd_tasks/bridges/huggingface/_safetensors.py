"""Reads and writes safetensors files: lazily, by slices, without pickle.

    tensors = read_tensors(folder)                      # name -> LazyArray, of model.safetensors or of its shards
    writer = write_tensors(folder, {name: array})       # shards of at most 5 GB, and their index

The format: 8 bytes with the length of the header, the header in JSON (name -> dtype, shape, offsets), the data. The
`safetensors` library checks a file. A part of a tensor is read here, into the array that is asked for: the library's
interface to numpy has no float8.
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
MAX_SHARD_BYTES = 5 * 10**9  # as `transformers` writes them
SINGLE_FILE, INDEX_FILE = 'model.safetensors', 'model.safetensors.index.json'


def dtype_of(name: str) -> np.dtype:
  """Returns the dtype of a name in a config.json, such as bfloat16. Raises a UserError if weights cannot have it."""
  for dtype in _NAMES:
    if dtype.name == name and (dtype.kind == 'f' or name == 'bfloat16'):
      return dtype
  raise UserError(f'the dtype {name!r} is not one of weights: choose float32, bfloat16 or float16.')


def read_tensors(folder: Path) -> dict[str, LazyArray]:
  """Returns every tensor of a folder. Headers are read and checked against the sizes of the files, and no data.

  As in `transformers`, a whole model.safetensors comes before an index, which an earlier save may have left there.

  Raises a UserError if there is no safetensors file, or one is truncated, damaged or not as its index says.
  """
  if os.path.lexists(folder / INDEX_FILE) and not os.path.isfile(folder / SINGLE_FILE):
    return _read_sharded(folder)
  if os.path.lexists(folder / SINGLE_FILE):
    return read_file(folder / SINGLE_FILE)
  pickles = sorted(path.name for pattern in ('*.bin', '*.pt', '*.pth') for path in folder.glob(pattern))
  if pickles:
    raise UserError(
      f'{folder} has its weights as pickle ({pickles[0]}), which can run code and is not read here: convert them to '
      'safetensors, as save_pretrained(...) of transformers does.'
    )
  raise UserError(f'{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: give a folder with weights.')


def tensor_names(folder: Path) -> set[str]:
  """Returns the names of a folder's tensors; none where it has no safetensors files. Raises as `read_tensors`."""
  has_any = os.path.lexists(folder / INDEX_FILE) or os.path.lexists(folder / SINGLE_FILE)
  return {*read_tensors(folder)} if has_any else set()


def _read_sharded(folder: Path) -> dict[str, LazyArray]:
  try:
    weight_map = json.loads(read_text(folder / INDEX_FILE))['weight_map']
    files = sorted(set(weight_map.values()))
  except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
    raise UserError(f'{folder / INDEX_FILE} cannot be read ({error!r}): download it again.') from error
  for file in files:
    if not isinstance(file, str) or not re.fullmatch(r'[\w.-]+\.safetensors', file):
      raise UserError(f'{folder / INDEX_FILE} names the file {file!r}: only safetensors files beside it are read.')
    if not (folder / file).is_file():
      raise UserError(f'{folder} lacks {file}, which its {INDEX_FILE} names: download it again.')
  tensors: dict[str, LazyArray] = {}
  for file in files:
    found = read_file(folder / file)
    wrong = sorted({name for name, place in weight_map.items() if place == file} ^ found.keys())
    if wrong:
      raise UserError(f'{folder / file} and {INDEX_FILE} disagree about the tensor {wrong[0]}: download both again.')
    tensors |= found
  return tensors


def read_file(path: Path) -> dict[str, LazyArray]:
  """Returns every tensor of one file. Raises a UserError as `read_tensors`."""
  require('huggingface', 'safetensors', wants=path.name)
  import safetensors

  try:
    with open_bytes(path) as file:
      safetensors.safe_open(path, 'np')  # checks shapes, dtypes and offsets against each other and the file
      (length,) = struct.unpack('<Q', file.read(8))
      entries = json.loads(file.read(length))
  except PermissionError as error:
    raise UserError(f'{path} cannot be read: {error.strerror}. Give this user the right to read it.') from error
  except (OSError, ValueError, safetensors.SafetensorError) as error:
    raise UserError(f'{path} is no whole safetensors file ({error}): download it again.') from error
  entries.pop('__metadata__', None)
  tensors = {}
  for name, entry in entries.items():
    if entry['dtype'] not in _DTYPES:
      raise UserError(f'{path} has {name} in the dtype {entry["dtype"]}: known here are {sorted(_DTYPES)}.')
    shape, dtype = tuple(entry['shape']), _DTYPES[entry['dtype']]
    tensors[name] = LazyArray(shape, dtype, _reader(path, 8 + length + entry['data_offsets'][0], shape, dtype))
  return tensors


def _reader(path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> Callable[[Index], np.ndarray]:
  def read(index: Index) -> np.ndarray:
    sizes = [part.stop - part.start for part in index]
    if sizes[1:] == list(shape[1:]):  # whole rows: one run of the file
      row = math.prod(shape[1:]) * dtype.itemsize
      made = np.empty(sizes, dtype)
      with path.open('rb', buffering=0) as file:
        file.seek(offset + (index[0].start * row if index else 0))
        view: Any = made.reshape(-1).view(np.uint8).data
        done = 0
        while done < len(view):
          if not (count := file.readinto(view[done:])):
            raise UserError(f'{path} has become shorter while it was read: download it again.')
          done += count
      return made
    mapped = np.memmap(path, np.uint8, 'r', offset, (math.prod(shape) * dtype.itemsize,))
    return np.array(mapped.view(dtype).reshape(shape)[index])  # a copy, so that the map can go

  return read


def check_free(target: Path) -> None:
  """Raises a UserError if there is something at a path, or nothing can be made there."""
  if target.exists():
    raise UserError(f'{target} exists: name a folder that does not, or move it away.')
  parent = next(each for each in target.absolute().parents if each.exists())
  if not (parent.is_dir() and os.access(parent, os.W_OK)):
    raise UserError(f'{target} cannot be made: {parent} is no directory that this user can write; name another one.')


@contextlib.contextmanager
def new_folder(target: Path, is_writer: bool = True) -> Iterator[Path]:
  """Yields the folder to write into; it appears as `target` when it is complete.

  Raises:
    UserError: there is something at the target, or another process writes it.
    StorageError: it cannot be written. What was written is removed.
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
      raise UserError(f'{target} is being written by another export: wait for its end, or name another one.') from None
    except OSError:  # a file system without locks
      pass
    stack.callback(shutil.rmtree, partial, ignore_errors=True)
    for left in partial.iterdir():  # by a kill
      shutil.rmtree(left) if left.is_dir() else left.unlink()
    yield partial
    os.replace(partial, target)
    sync_path(epath.Path(target.parent))


def write_tensors(
  folder: Path, tensors: Mapping[str, LazyArray], *, is_writer: bool = True, max_shard_bytes: int = MAX_SHARD_BYTES
) -> Iterator[str]:
  """Writes the tensors into one file, or into shards with an index; yields the name of each that is written.

  Each is read once, whole, one after the other. Processes that do not write read too, where reading is a computation of
  all of them. A shard is closed before it would be larger than `max_shard_bytes`.
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
  entries: dict[str, Any] = {'__metadata__': {'format': 'pt'}}  # `transformers` asks for it
  start = 0
  for name, tensor in tensors.items():
    stop = start + _num_bytes(tensor)
    entries[name] = {'dtype': _NAMES[tensor.dtype], 'shape': list(tensor.shape), 'data_offsets': [start, stop]}
    start = stop
  header = json.dumps(entries).encode()
  header += b' ' * (-len(header) % 8)
  return struct.pack('<Q', len(header)) + header
