"""The files of T5X's checkpoints: `open_checkpoint` lists the arrays, `write_checkpoint` writes a version 3 one.

    MODEL_DIR/checkpoint_20/checkpoint                    version 3: msgpack of the tree, with small arrays in it
    MODEL_DIR/checkpoint_20/target.encoder....kernel/     and an array of zarr for each of the others
    MODEL_DIR/checkpoint_20/state/                        Orbax: one OCDBT store, or directories as above
    t5_1_1.checkpoint_0                                   everything in one msgpack file

An array's name is its path in T5X's state: `target/encoder/.../kernel`, `state/param_states/.../v_row`, `state/step`.
"""

from collections.abc import Collection, Iterator, Mapping
import contextlib
import dataclasses
import math
import re
from typing import Any

from etils import epath
from flax import serialization, traverse_util
import numpy as np

from spmd_tasks.bridges._lazy_arrays import LazyArray, lazy_array
from spmd_tasks.errors import UserError
from spmd_tasks.files import absolute_path, storage_errors, write_durably
from spmd_tasks.stores import kvstore_spec

VERSION = 3
_STEP = re.compile(r'checkpoint_(\d+)')
_PLACEHOLDER = 'PLACEHOLDER://'  # Orbax's, in its older checkpoints
_MOST_BYTES = 64 * 2**20  # of a chunk


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class T5xCheckpoint:
  """One checkpoint of T5X, a file or a directory; nothing has been read of arrays that have files of their own."""

  path: epath.Path
  arrays: Mapping[str, LazyArray]

  @property
  def step(self) -> int:
    with _refusing_damage(f'{self.path}: state/step'):
      return int(np.asarray(self.arrays['state/step'])) if 'state/step' in self.arrays else 0

  @property
  def weights(self) -> dict[str, LazyArray]:
    """The arrays below `target/`, without it."""
    return {name.removeprefix('target/'): a for name, a in self.arrays.items() if name.startswith('target/')}


def open_checkpoint(place: epath.PathLike, step: int | None = None) -> T5xCheckpoint:
  """Opens a checkpoint: a file, a directory `checkpoint_<step>`, or of a MODEL_DIR the newest or that of a step.

  Raises a UserError if there is none, or it is of another format.
  """
  path = absolute_path(place)
  if not path.exists():
    raise UserError(f'{path} does not exist: name a checkpoint of T5X, or the MODEL_DIR with them.')
  if path.is_dir() and not (path / 'checkpoint').exists() and not (path / 'state').is_dir():
    found = {int(match[1]): each for each in path.iterdir() if (match := _STEP.fullmatch(each.name))}
    if not found or (step is not None and step not in found):
      wanted = '' if step is None else f' of step {step}'
      remedy = f'its steps are {sorted(found)}, choose one' if found else 'name a directory with some checkpoint_<step>'
      raise UserError(f'{path} holds no checkpoint of T5X{wanted}: {remedy}.')
    path, step = found[max(found) if step is None else step], None
  root = path / 'state' if path.is_dir() and (path / 'state').is_dir() else path
  read = _ocdbt if (root / 'manifest.ocdbt').exists() else _msgpack
  checkpoint = T5xCheckpoint(path=path, arrays=dict(read(root)))
  if step is not None and checkpoint.step != step:
    raise UserError(f'{path} is of step {checkpoint.step}, not of {step}: leave the step out, or name the MODEL_DIR.')
  return checkpoint


def _ocdbt(root: epath.Path) -> Iterator[tuple[str, LazyArray]]:
  import tensorstore as ts

  store = {'driver': 'ocdbt', 'base': kvstore_spec(root)}
  with _refusing_damage(root):
    keys = ts.KvStore.open(store).result().list().result()
  for key in keys:
    name, _, file = key.decode(errors='replace').rpartition('/')
    if file == '.zarray':
      spec = {'driver': 'zarr', 'kvstore': store | {'path': f'{name}/'}}
      yield name.replace('.', '/'), _lazy(root / name, spec)


def _msgpack(root: epath.Path) -> Iterator[tuple[str, LazyArray]]:
  file = root / 'checkpoint' if root.is_dir() else root
  try:
    contents = dict(serialization.msgpack_restore(file.read_bytes()))
    tree = next((contents[key] for key in ('optimizer', '_optimizer') if key in contents), contents)
    flat = traverse_util.flatten_dict(tree, is_leaf=lambda _, node: 'driver' in node, sep='/')
  except Exception as error:  # whatever msgpack raises for bytes that are none
    raise UserError(f'{file} is no checkpoint of T5X or is damaged ({error!r:.200}).') from error
  if contents.get('version', VERSION) != VERSION:
    raise UserError(f'{file} has the version {contents["version"]}; T5X wrote version {VERSION} since June 2021.')
  for name, leaf in flat.items():
    if isinstance(leaf, str) and leaf.startswith(_PLACEHOLDER):
      yield name, _open_zarr(root, leaf.removeprefix(_PLACEHOLDER), None)
    elif isinstance(leaf, Mapping):
      with _refusing_damage(f'{file}: {name}'):
        place = leaf.get('path') or leaf['kvstore']['path']
        array = _open_zarr(root, place.strip('/'), leaf)
      yield name, array
    elif leaf is not None:
      yield name, lazy_array(np.asarray(leaf))


def _open_zarr(root: epath.Path, name: str, spec: Mapping[str, Any] | None) -> LazyArray:
  if '..' in name.split('/'):
    raise UserError(f'{root} names an array outside of the checkpoint ({name!r:.200}): copy its arrays into it.')
  given: dict[str, Any] = {'driver': 'zarr', 'kvstore': kvstore_spec(root / name)}
  if (root / name / '.zarray').exists():
    return _lazy(root / name, given)
  if spec is None or not (root / name).is_dir():
    raise UserError(f'{root / name} has no .zarray, which says what the array is: copy the checkpoint again, with it.')
  dtype = spec['dtype']
  dtype = dtype if dtype == 'bfloat16' else np.dtype(dtype).newbyteorder('<').str  # as zarr names it
  rest = {'dtype': dtype, 'fill_value': None, 'filters': None, 'order': 'C', 'zarr_format': 2}
  given['metadata'] = rest | spec['metadata']
  return _lazy(root / name, given, assume_metadata=True)


def _lazy(place: epath.Path, spec: Mapping[str, Any], **how: Any) -> LazyArray:
  """Opens an array of zarr, whose values are read later. Raises a UserError if it is none, as does reading it."""
  import tensorstore as ts

  with _refusing_damage(place):
    store = ts.open(spec, open=True, read=True, **how).result()

  def read(index: Any) -> np.ndarray:
    with _refusing_damage(place):
      return store[index].read().result()

  return LazyArray(store.shape, store.dtype.numpy_dtype, read)


@contextlib.contextmanager
def _refusing_damage(place: object) -> Iterator[None]:
  """Turns what numpy and TensorStore raise for damaged files, and Python for unknown ones, into a UserError."""
  try:
    yield
  except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
    if isinstance(error, UserError):
      raise
    said = ' '.join(str(error).split())[:300]
    raise UserError(f'{place} is no array of a checkpoint of T5X, or is damaged ({said}): copy it again.') from error


def write_checkpoint(
  model_dir: epath.PathLike, step: int, arrays: Mapping[str, Any], inline: Collection[str], *, is_writer: bool = True
) -> epath.Path:
  """Writes `<model_dir>/checkpoint_<step>` as T5X's Checkpointer does (version 3); returns its path.

  Args:
    model_dir, step: the directory, new or not; a checkpoint of that step in it is a UserError.
    arrays: by name; LazyArrays that are sharded are read by every process, one after the other.
    inline: the names of those that are part of the msgpack file.
    is_writer: whether this process writes.
  """
  import tensorstore as ts

  path = absolute_path(model_dir) / f'checkpoint_{step}'
  if path.exists():
    raise UserError(f'{path} exists: choose another directory, or delete it.')
  partial = path.with_name(f'{path.name}.tmp-0')  # a name that T5X takes for an unfinished one
  flat: dict[str, Any] = {}
  with storage_errors(partial):
    if is_writer:
      if partial.exists():
        partial.rmtree()
      partial.mkdir(parents=True)
    for name in sorted(arrays):
      values = np.asarray(arrays[name])
      if name in inline:
        flat[name] = values
        continue
      spec = {
        'driver': 'zarr',
        'dtype': values.dtype.name,
        'kvstore': {'driver': 'file', 'path': name.replace('/', '.')},
        'metadata': {'compressor': {'id': 'gzip'}, 'shape': values.shape, 'chunks': _chunks(values)},
      }
      flat[name] = ts.Spec(spec).to_json()
      if is_writer:
        place = kvstore_spec(partial / name.replace('/', '.'))
        ts.open(spec | {'kvstore': place}, create=True).result().write(values).result()
    if is_writer:
      contents = {'version': VERSION, 'optimizer': traverse_util.unflatten_dict(flat, sep='/')}  # in this order
      write_durably(partial / 'checkpoint', serialization.msgpack_serialize(contents, in_place=True))
      partial.rename(path)
  return path


def _chunks(array: np.ndarray) -> list[int]:
  """Returns even chunks of at most 64 MiB, the largest dim cut first."""
  chunks = list(array.shape)
  while math.prod(chunks) * array.dtype.itemsize > _MOST_BYTES:
    dim = chunks.index(max(chunks))
    chunks[dim] = next(n for n in range(chunks[dim] - 1, 0, -1) if array.shape[dim] % n == 0)
  return chunks
