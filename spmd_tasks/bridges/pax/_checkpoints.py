"""Finds and reads the checkpoints of Paxml. Needs neither Paxml nor its TensorFlow.

    state = read_pax_checkpoint(job / 'checkpoints' / 'checkpoint_00000100', abstract_state)

    checkpoints/checkpoint_00000100/metadata/metadata   JSON: the true shapes of the model's variables
    checkpoints/checkpoint_00000100/state/<name>/       one array: zarr v2; all in one OCDBT store from version 1.2 on
    checkpoints/*.orbax-checkpoint-tmp-*                being written, or left by a kill

A name is the path of a leaf in Paxml's TrainState: `step`, `mdl_vars.params.lm.final_ln.scale`, or
`opt_states_0.p#2#i-1_2.m.params.lm....`: learner 0, the variables with the repeat prefix [2], link 2 of its chain of
gradient transformations. An array is stored as it lay on the mesh: zeros follow in every dim that the mesh did not
divide. They are cut off when it is read. Each process reads its own shards only.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import json
import re
from typing import Any, Literal

from etils import epath
import jax
import numpy as np

from spmd_tasks.bridges._lazy_arrays import LazyArray, place_on_mesh
from spmd_tasks.checkpoints.checkpoint_directory import CheckpointDirectory
from spmd_tasks.checkpoints.verifying import describe_mismatches
from spmd_tasks.errors import UserError
from spmd_tasks.files import absolute_path, is_remote, read_text
from spmd_tasks.stores import kvstore_spec

_STATE, _METADATA = 'state', 'metadata/metadata'
_STEP_DIRECTORY = re.compile(r'checkpoint_(\d+)')
_COMMITTED = 'commit_success.txt'
_OCDBT_MANIFEST = 'manifest.ocdbt'
_ARRAY_TAG = '_array_metadata_tag'


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredArray:
  """An array of a checkpoint, not read yet.

  Attributes:
    store: a tensorstore.TensorStore, whose shape includes the padding.
    true_shape: without padding; None for optimizer state, which Paxml does not describe.
  """

  store: Any
  true_shape: tuple[int, ...] | None

  @property
  def shape(self) -> tuple[int, ...]:
    """The true shape if it is known, else the stored one."""
    return tuple(self.store.shape) if self.true_shape is None else self.true_shape

  @property
  def dtype(self) -> Any:
    return self.store.dtype.numpy_dtype

  def fits(self, shape: Sequence[int]) -> bool:
    """Whether the array may have this shape without its padding."""
    if self.true_shape is not None:
      return self.true_shape == tuple(shape)
    return len(shape) == self.store.rank and all(n <= m for n, m in zip(shape, self.store.shape, strict=True))


@dataclasses.dataclass(frozen=True)
class PaxCheckpoint:
  """One complete checkpoint of Paxml; `path` is its directory, `checkpoint_<step>`."""

  path: epath.Path

  @property
  def step(self) -> int:
    return int(self.path.name.rpartition('_')[2])

  @functools.cached_property
  def is_ocdbt(self) -> bool:
    """Whether all arrays share one store; version 1.1 has a directory per array."""
    return (self.path / _STATE / _OCDBT_MANIFEST).exists()

  @functools.cached_property
  def arrays(self) -> dict[str, StoredArray]:
    """Every array by its name. Reads metadata only.

    Raises a UserError if Paxml wrote the checkpoint in a form that cannot be read here.
    """
    opening = {name: self._open(name) for name in sorted(self._list())}  # all at once
    if not opening:
      what = 'one msgpack file, as of a pmap job' if (self.path / _STATE / 'checkpoint').exists() else 'no array'
      raise UserError(f'{self.path / _STATE} holds {what}: only checkpoints of partitioned (pjit) jobs can be read.')
    shapes, stores = self._true_shapes(), {name: future.result() for name, future in opening.items()}
    return {
      name: StoredArray(store=store, true_shape=shapes.get(name) if store.rank else ())
      for name, store in stores.items()
    }

  def name_of(self, path: Sequence[Any]) -> str:
    """Returns the name of the leaf with this key path in a TrainState."""
    return _ocdbt_name(path) if self.is_ocdbt else _pax_name(path)

  def _open(self, name: str) -> Any:
    import tensorstore as ts  # here and below: a start without a checkpoint of Paxml does not need it

    store = kvstore_spec(self.path / _STATE / name)
    if self.is_ocdbt:
      store = {'driver': 'ocdbt', 'base': kvstore_spec(self.path / _STATE), 'path': f'{name}/'}
    return ts.open({'driver': 'zarr', 'kvstore': store}, open=True, read=True)

  def _list(self) -> Iterator[str]:
    import tensorstore as ts

    if not self.is_ocdbt:
      yield from (path.name for path in (self.path / _STATE).iterdir() if (path / '.zarray').exists())
      return
    store = ts.KvStore.open({'driver': 'ocdbt', 'base': kvstore_spec(self.path / _STATE)})
    for key in store.result().list().result():
      name, _, file = key.decode().rpartition('/')
      if file == '.zarray':
        yield name

  def _true_shapes(self) -> dict[str, tuple[int, ...]]:
    described = json.loads(read_text(self.path / _METADATA)).get('train_state_metadata', {})
    arrays = jax.tree_util.tree_leaves_with_path(
      described, is_leaf=lambda node: isinstance(node, Mapping) and bool(node.get(_ARRAY_TAG))
    )
    return {
      _ocdbt_name(path): tuple(array['unpadded_shape'])
      for path, array in arrays
      if isinstance(array, Mapping) and 'unpadded_shape' in array
    }


def _pax_name(path: Sequence[Any]) -> str:
  """Returns Paxml's name of the leaf with a key path: keys joined by dots, `_i` for item i of a list or a tuple."""
  keys = (
    f'_{key.idx}' if isinstance(key, jax.tree_util.SequenceKey) else '.' + jax.tree_util.keystr((key,), simple=True)
    for key in path
  )
  return ''.join(keys).removeprefix('.')


def _ocdbt_name(path: Sequence[Any]) -> str:
  """Returns Orbax's name of a leaf, which Paxml uses with OCDBT: all keys joined by dots."""
  return jax.tree_util.keystr(tuple(path), simple=True, separator='.')


def pax_checkpoints(directory: epath.PathLike) -> dict[int, PaxCheckpoint]:
  """Returns Paxml's complete checkpoints in `<job>/checkpoints` by ascending step; {} if there is none."""
  directory = absolute_path(directory)
  paths = list(directory.iterdir()) if directory.is_dir() else []
  found = [PaxCheckpoint(path) for path in paths if is_complete(path)]
  return {checkpoint.step: checkpoint for checkpoint in sorted(found, key=lambda checkpoint: checkpoint.step)}


def checkpoint_format(directory: epath.PathLike) -> Literal['pax', 'spmd_tasks'] | None:
  """Says by files who wrote the newest checkpoint in a directory: Paxml or this project; None without a checkpoint.

  Both use the names `checkpoint_<step>`.
  """
  directory = epath.Path(directory)
  own = CheckpointDirectory(path=directory).complete_steps() if directory.is_dir() else []
  newest, own_newest = max(pax_checkpoints(directory), default=-1), max(own, default=-1)
  if newest > own_newest:
    return 'pax'
  return 'spmd_tasks' if own_newest >= 0 else None


def open_pax_checkpoint(directory: epath.PathLike, step: int | None = None) -> PaxCheckpoint:
  """Returns the checkpoint of a step (None: the newest) in `<job>/checkpoints`, or the one that `directory` itself is.

  Raises a UserError if there is none.
  """
  directory = absolute_path(directory)
  if step is None and is_complete(directory):
    return PaxCheckpoint(directory)
  found = pax_checkpoints(directory)
  if not found or (step is not None and step not in found):
    wanted = '' if step is None else f' of step {step}'
    has = f'its steps are {[*found]}, choose one' if found else 'name the directory `checkpoints` of a Pax job'
    raise UserError(f'{directory} holds no complete checkpoint of Paxml{wanted}: {has}.')
  return found[max(found) if step is None else step]


def is_complete(path: epath.Path) -> bool:
  """Whether Paxml gave a directory its final name. In an object store, where nothing is renamed, a file says so."""
  return (
    _STEP_DIRECTORY.fullmatch(path.name) is not None
    and (path / _METADATA).exists()
    and (not is_remote(path) or (path / _COMMITTED).exists())
  )


def read_pax_checkpoint(path: epath.PathLike, abstract_state: Any) -> Any:
  """Reads a checkpoint of Paxml into the structure of `abstract_state`.

  Args:
    path: `<job>/checkpoints/checkpoint_<step>`, or `<job>/checkpoints` for the newest.
    abstract_state: a tree of jax.ShapeDtypeStruct with the key paths of Paxml's TrainState and true shapes. A leaf with
      a sharding becomes a jax.Array, one without a numpy array. A tree without `opt_states` reads the variables only.
      Masked leaves of optimizer state (optax.MaskedNode) have no leaf here either.

  Raises a UserError: there is no checkpoint, or it lacks an array, has it in another shape or dtype, or has one that
  the tree has no place for; all are named. Integers of another width are converted.
  """
  checkpoint = open_pax_checkpoint(path)
  paths, structure = jax.tree_util.tree_flatten_with_path(abstract_state)
  wanted = {checkpoint.name_of(key_path): leaf for key_path, leaf in paths}
  parts = {name.split('.')[0] for name in wanted}
  stored = {name: array for name, array in checkpoint.arrays.items() if name.split('.')[0] in parts}
  values = read_arrays(stored, wanted, str(checkpoint.path))
  return jax.tree_util.tree_unflatten(structure, [values[name] for name in wanted])


def read_arrays(stored: Mapping[str, StoredArray], wanted: Mapping[str, Any], source: str) -> dict[str, Any]:
  """Reads arrays by name, cut to the shapes of `wanted`: jax.ShapeDtypeStructs as `read_pax_checkpoint` takes them.

  Raises a UserError if an array has another shape or dtype.
  """
  problems, integers = [], np.integer  # which may have another width: any other conversion loses or invents digits
  for name, leaf in wanted.items():
    if (array := stored.get(name)) is None:
      problems.append(f'{name} {_describe_array(leaf)} is not in the checkpoint')
      continue
    are_integers = np.issubdtype(array.dtype, integers) and np.issubdtype(leaf.dtype, integers)
    if not (array.fits(leaf.shape) and (array.dtype == leaf.dtype or are_integers)):
      problems.append(f'{name} must be {_describe_array(leaf)}, but the checkpoint has {_describe_array(array)}')
  for name in stored.keys() - wanted.keys():
    problems.append(f'{name} {_describe_array(stored[name])} of the checkpoint has no place in the model')
  if problems:
    raise UserError(
      f'{source} does not fit the experiment:\n{describe_mismatches(problems)}\nUse the experiment that wrote it, with '
      'its sizes, layers and learner.'
    )
  return {name: _read(stored[name], leaf) for name, leaf in wanted.items()}


def _describe_array(array: Any) -> str:
  return f'{np.dtype(array.dtype).name}{list(array.shape)}'


def _read(array: StoredArray, leaf: Any) -> Any:
  lazy = LazyArray(leaf.shape, leaf.dtype, lambda index: array.store[index].read().result())
  return np.asarray(lazy) if leaf.sharding is None else place_on_mesh(lazy, leaf)
