"""Reads and writes the files of T5X's checkpoints.

    MODEL_DIR/checkpoint_20/checkpoint                    version 3: msgpack of the tree, with small arrays in it
    MODEL_DIR/checkpoint_20/target.encoder....kernel/     and a zarr array for each of the others
    MODEL_DIR/checkpoint_20/state/                        Orbax: one OCDBT store, or directories as above
    t5_1_1.checkpoint_0                                   everything in one msgpack file

An array's name is its path in T5X's state: `target/encoder/.../kernel`, `state/param_states/.../v_row`, `state/step`.
`open_checkpoint` reads all of these formats; `write_checkpoint` writes version 3.
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
_PLACEHOLDER = 'PLACEHOLDER://'  # in older checkpoints of Orbax
_MAX_CHUNK_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class T5xCheckpoint:
  """A checkpoint of T5X, a file or a directory; arrays with files of their own are read lazily."""

  path: epath.Path
  arrays: Mapping[str, LazyArray]

  @property
  def step(self) -> int:
    with _report_damage(f'{self.path}: state/step'):
      return int(np.asarray(self.arrays['state/step'])) if 'state/step' in self.arrays else 0

  @property
  def weights(self) -> dict[str, LazyArray]:
    """The arrays below `target/`, by names without that prefix."""
    prefix = 'target/'
    return {name.removeprefix(prefix): array for name, array in self.arrays.items() if name.startswith(prefix)}


def open_checkpoint(place: epath.PathLike, step: int | None = None) -> T5xCheckpoint:
  """Opens a checkpoint.

  Args:
    place: a file, a directory `checkpoint_<step>`, or a MODEL_DIR.
    step: the step in a MODEL_DIR; None for the newest.

  Raises a UserError if there is no such checkpoint, or it is damaged or not T5X's.
  """
  path = absolute_path(place)
  if not path.exists():
    raise UserError(f'{path} does not exist: use a checkpoint of T5X, or the MODEL_DIR that contains it.')
  if path.is_dir() and not (path / 'checkpoint').exists() and not (path / 'state').is_dir():
    by_step = {int(match[1]): child for child in path.iterdir() if (match := _STEP.fullmatch(child.name))}
    if not by_step or (step is not None and step not in by_step):
      of_step = '' if step is None else f' of step {step}'
      remedy = f'choose one of the steps {sorted(by_step)}' if by_step else 'use a directory with checkpoint_<step>'
      raise UserError(f'{path} has no checkpoint of T5X{of_step}: {remedy}.')
    path, step = by_step[max(by_step) if step is None else step], None
  root = path / 'state' if path.is_dir() and (path / 'state').is_dir() else path
  read = _read_ocdbt if (root / 'manifest.ocdbt').exists() else _read_msgpack
  checkpoint = T5xCheckpoint(path=path, arrays=dict(read(root)))
  if step is not None and checkpoint.step != step:
    raise UserError(f'{path} has step {checkpoint.step}, not {step}: leave the step out, or use the MODEL_DIR.')
  return checkpoint


def _read_ocdbt(root: epath.Path) -> Iterator[tuple[str, LazyArray]]:
  import tensorstore as ts

  store = {'driver': 'ocdbt', 'base': kvstore_spec(root)}
  with _report_damage(root):
    keys = ts.KvStore.open(store).result().list().result()
  for key in keys:
    name, _, file = key.decode(errors='replace').rpartition('/')
    if file == '.zarray':
      spec = {'driver': 'zarr', 'kvstore': store | {'path': f'{name}/'}}
      yield name.replace('.', '/'), _lazy_zarr(root / name, spec)


def _read_msgpack(root: epath.Path) -> Iterator[tuple[str, LazyArray]]:
  file = root / 'checkpoint' if root.is_dir() else root
  try:
    contents = dict(serialization.msgpack_restore(file.read_bytes()))
    tree = next((contents[key] for key in ('optimizer', '_optimizer') if key in contents), contents)
    flat = traverse_util.flatten_dict(tree, is_leaf=lambda _, node: 'driver' in node, sep='/')
  except Exception as error:  # msgpack raises errors of many types
    raise UserError(f'{file} is damaged or not a checkpoint of T5X ({error!r:.200}): copy it again.') from error
  if contents.get('version', VERSION) != VERSION:
    raise UserError(
      f'{file} has the version {contents["version"]}, which must be {VERSION}: save it with T5X of June 2021 or later.'
    )
  for name, leaf in flat.items():
    if isinstance(leaf, str) and leaf.startswith(_PLACEHOLDER):
      yield name, _open_zarr(root, leaf.removeprefix(_PLACEHOLDER), None)
    elif isinstance(leaf, Mapping):
      with _report_damage(f'{file}: {name}'):
        place = leaf.get('path') or leaf['kvstore']['path']
        array = _open_zarr(root, place.strip('/'), leaf)
      yield name, array
    elif leaf is not None:
      yield name, lazy_array(np.asarray(leaf))


def _open_zarr(root: epath.Path, name: str, spec: Mapping[str, Any] | None) -> LazyArray:
  if '..' in name.split('/'):
    raise UserError(f'{root} has an array outside of the checkpoint ({name!r:.200}): copy its arrays into it.')
  zarr_spec: dict[str, Any] = {'driver': 'zarr', 'kvstore': kvstore_spec(root / name)}
  if (root / name / '.zarray').exists():
    return _lazy_zarr(root / name, zarr_spec)
  if spec is None or not (root / name).is_dir():
    raise UserError(f'{root / name} has no .zarray, its metadata: copy the checkpoint again.')
  dtype = spec['dtype']
  dtype = dtype if dtype == 'bfloat16' else np.dtype(dtype).newbyteorder('<').str  # the name in zarr
  defaults = {'dtype': dtype, 'fill_value': None, 'filters': None, 'order': 'C', 'zarr_format': 2}
  zarr_spec['metadata'] = defaults | spec['metadata']
  return _lazy_zarr(root / name, zarr_spec, assume_metadata=True)


def _lazy_zarr(place: epath.Path, spec: Mapping[str, Any], **open_options: Any) -> LazyArray:
  """Opens a zarr array and reads it lazily. Opening and reading raise a UserError if it is damaged."""
  import tensorstore as ts

  with _report_damage(place):
    store = ts.open(spec, open=True, read=True, **open_options).result()

  def read(index: Any) -> np.ndarray:
    with _report_damage(place):
      return store[index].read().result()

  return LazyArray(store.shape, store.dtype.numpy_dtype, read)


@contextlib.contextmanager
def _report_damage(place: object) -> Iterator[None]:
  """Converts errors that NumPy, TensorStore and Python raise for damaged files to a UserError."""
  try:
    yield
  except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
    if isinstance(error, UserError):
      raise
    message = ' '.join(str(error).split())[:300]
    raise UserError(f'{place} is damaged or not an array of T5X ({message}): copy it again.') from error


def write_checkpoint(
  model_dir: epath.PathLike, step: int, arrays: Mapping[str, Any], inline: Collection[str], *, is_writer: bool = True
) -> epath.Path:
  """Writes `<model_dir>/checkpoint_<step>` as T5X's Checkpointer does (version 3); returns its path.

  Args:
    model_dir: the directory, which may exist.
    step: the step of the checkpoint.
    arrays: name -> array. All processes read sharded LazyArrays together, one at a time.
    inline: the names of arrays that are written into the msgpack file.
    is_writer: whether this process writes.

  Raises:
    UserError: the directory has a checkpoint of that step.
  """
  import tensorstore as ts

  path = absolute_path(model_dir) / f'checkpoint_{step}'
  if path.exists():
    raise UserError(f'{path} exists: choose another directory, or delete it.')
  partial = path.with_name(f'{path.name}.tmp-0')  # T5X ignores directories with such names
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
      contents = {'version': VERSION, 'optimizer': traverse_util.unflatten_dict(flat, sep='/')}  # in T5X's order
      write_durably(partial / 'checkpoint', serialization.msgpack_serialize(contents, in_place=True))
      partial.rename(path)
  return path


def _chunks(array: np.ndarray) -> list[int]:
  """Returns even chunks of at most 64 MiB, splitting the largest dim first."""
  chunks = list(array.shape)
  while math.prod(chunks) * array.dtype.itemsize > _MAX_CHUNK_BYTES:
    dim = chunks.index(max(chunks))
    chunks[dim] = next(n for n in range(chunks[dim] - 1, 0, -1) if array.shape[dim] % n == 0)
  return chunks
