"""Finds and reads checkpoints of Paxml, without Paxml and TensorFlow.

    state = read_pax_checkpoint(job / 'checkpoints' / 'checkpoint_00000100', abstract_state)

    checkpoints/checkpoint_00000100/metadata/metadata   JSON with the unpadded shapes of the model's variables
    checkpoints/checkpoint_00000100/state/<name>/       one array in zarr v2; from version 1.2 on, all in an OCDBT store
    checkpoints/*.orbax-checkpoint-tmp-*                incomplete

A name is the path of a leaf in Paxml's TrainState, such as `step`, `mdl_vars.params.lm.final_ln.scale`, or
`opt_states_0.p#2#i-1_2.m.params.lm....` (learner 0, variables with the repeat prefix [2], gradient transformation 2 of
the chain). Paxml stores arrays padded with zeros in dims that the mesh does not divide; the padding is cut off. Each
process reads only the shards of its devices.
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
  """An array of a checkpoint, read lazily.

  Attributes:
    store: a tensorstore.TensorStore, whose shape includes the padding.
    true_shape: the unpadded shape; None for optimizer state, for which Paxml does not save it.
  """

  store: Any
  true_shape: tuple[int, ...] | None

  @property
  def shape(self) -> tuple[int, ...]:
    """The unpadded shape if it is known, or else the stored shape."""
    return tuple(self.store.shape) if self.true_shape is None else self.true_shape

  @property
  def dtype(self) -> Any:
    return self.store.dtype.numpy_dtype

  def fits(self, shape: Sequence[int]) -> bool:
    """Whether this may be the unpadded shape of the array."""
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
    """Whether all arrays share one OCDBT store; version 1.1 has a directory per array."""
    return (self.path / _STATE / _OCDBT_MANIFEST).exists()

  @functools.cached_property
  def arrays(self) -> dict[str, StoredArray]:
    """The arrays by name; reads only metadata.

    Raises a UserError if the checkpoint is not one of a partitioned job.
    """
    futures = {name: self._open(name) for name in sorted(self._list())}  # concurrently
    if not futures:
      content = 'one msgpack file of a pmap job' if (self.path / _STATE / 'checkpoint').exists() else 'no arrays'
      raise UserError(f'{self.path / _STATE} has {content}: use a checkpoint of a partitioned (pjit) job.')
    shapes, stores = self._true_shapes(), {name: future.result() for name, future in futures.items()}
    return {
      name: StoredArray(store=store, true_shape=shapes.get(name) if store.rank else ())
      for name, store in stores.items()
    }

  def name_of(self, path: Sequence[Any]) -> str:
    """Returns the name of the leaf with this key path in a TrainState."""
    return _ocdbt_name(path) if self.is_ocdbt else _pax_name(path)

  def _open(self, name: str) -> Any:
    import tensorstore as ts  # here and below: only needed if there is a checkpoint of Paxml

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
    metadata = json.loads(read_text(self.path / _METADATA)).get('train_state_metadata', {})
    arrays = jax.tree_util.tree_leaves_with_path(
      metadata, is_leaf=lambda node: isinstance(node, Mapping) and bool(node.get(_ARRAY_TAG))
    )
    return {
      _ocdbt_name(path): tuple(array['unpadded_shape'])
      for path, array in arrays
      if isinstance(array, Mapping) and 'unpadded_shape' in array
    }


def _pax_name(path: Sequence[Any]) -> str:
  """Returns Paxml's name of a leaf: the keys of its path joined by dots, with `_i` for item i of a list or tuple."""
  keys = (
    f'_{key.idx}' if isinstance(key, jax.tree_util.SequenceKey) else '.' + jax.tree_util.keystr((key,), simple=True)
    for key in path
  )
  return ''.join(keys).removeprefix('.')


def _ocdbt_name(path: Sequence[Any]) -> str:
  """Returns Orbax's name of a leaf, which Paxml uses with OCDBT: the keys of its path joined by dots."""
  return jax.tree_util.keystr(tuple(path), simple=True, separator='.')


def pax_checkpoints(directory: epath.PathLike) -> dict[int, PaxCheckpoint]:
  """Returns Paxml's complete checkpoints in `<job>/checkpoints` by step, in ascending order."""
  directory = absolute_path(directory)
  paths = list(directory.iterdir()) if directory.is_dir() else []
  checkpoints = [PaxCheckpoint(path) for path in paths if is_complete(path)]
  return {checkpoint.step: checkpoint for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.step)}


def checkpoint_format(directory: epath.PathLike) -> Literal['pax', 'spmd_tasks'] | None:
  """Returns the format of the newest checkpoint in a directory, or None without checkpoints.

  Both formats have names like `checkpoint_<step>`; their files differ.
  """
  directory = epath.Path(directory)
  own = CheckpointDirectory(path=directory).complete_steps() if directory.is_dir() else []
  newest, own_newest = max(pax_checkpoints(directory), default=-1), max(own, default=-1)
  if newest > own_newest:
    return 'pax'
  return 'spmd_tasks' if own_newest >= 0 else None


def open_pax_checkpoint(directory: epath.PathLike, step: int | None = None) -> PaxCheckpoint:
  """Opens a checkpoint of Paxml.

  Args:
    directory: `<job>/checkpoints`, or a checkpoint in it.
    step: the step of the checkpoint; None for the newest.

  Raises a UserError if there is no such checkpoint.
  """
  directory = absolute_path(directory)
  if step is None and is_complete(directory):
    return PaxCheckpoint(directory)
  checkpoints = pax_checkpoints(directory)
  if not checkpoints or (step is not None and step not in checkpoints):
    of_step = '' if step is None else f' of step {step}'
    remedy = (
      f'choose one of the steps {[*checkpoints]}' if checkpoints else 'use the directory `checkpoints` of a Pax job'
    )
    raise UserError(f'{directory} has no complete checkpoint of Paxml{of_step}: {remedy}.')
  return checkpoints[max(checkpoints) if step is None else step]


def is_complete(path: epath.Path) -> bool:
  """Whether a directory is a complete checkpoint of Paxml.

  Paxml renames a complete checkpoint to its final name; in an object store, it writes a marker file instead.
  """
  return (
    _STEP_DIRECTORY.fullmatch(path.name) is not None
    and (path / _METADATA).exists()
    and (not is_remote(path) or (path / _COMMITTED).exists())
  )


def read_pax_checkpoint(path: epath.PathLike, abstract_state: Any) -> Any:
  """Reads a checkpoint of Paxml into the structure of `abstract_state`.

  Args:
    path: `<job>/checkpoints/checkpoint_<step>`, or `<job>/checkpoints` for the newest.
    abstract_state: a tree of jax.ShapeDtypeStructs with the key paths of Paxml's TrainState and unpadded shapes. A leaf
      with a sharding is read as a jax.Array, a leaf without one as a numpy array. Without `opt_states`, only variables
      are read. Masked parts of the optimizer state (optax.MaskedNode) have no leaves.

  Raises:
    UserError: there is no checkpoint, or an array is missing, unused, or has another shape or dtype. The message lists
      all such arrays. Integers may differ in width.
  """
  checkpoint = open_pax_checkpoint(path)
  paths, structure = jax.tree_util.tree_flatten_with_path(abstract_state)
  targets = {checkpoint.name_of(key_path): leaf for key_path, leaf in paths}
  parts = {name.split('.')[0] for name in targets}
  stored = {name: array for name, array in checkpoint.arrays.items() if name.split('.')[0] in parts}
  values = read_arrays(stored, targets, str(checkpoint.path))
  return jax.tree_util.tree_unflatten(structure, [values[name] for name in targets])


def read_arrays(stored: Mapping[str, StoredArray], targets: Mapping[str, Any], source: str) -> dict[str, Any]:
  """Reads arrays without their padding.

  Args:
    stored: the arrays by name.
    targets: jax.ShapeDtypeStructs by name; see `read_pax_checkpoint`.
    source: the name of the checkpoint in errors.

  Raises a UserError if the names, shapes or dtypes do not match.
  """
  problems = []
  for name, leaf in targets.items():
    if (array := stored.get(name)) is None:
      problems.append(f'{name} {_describe_array(leaf)} is not in the checkpoint')
      continue
    # Integers may differ in width; any other conversion would change digits.
    are_integers = np.issubdtype(array.dtype, np.integer) and np.issubdtype(leaf.dtype, np.integer)
    if not (array.fits(leaf.shape) and (array.dtype == leaf.dtype or are_integers)):
      problems.append(f'{name} must be {_describe_array(leaf)}, but the checkpoint has {_describe_array(array)}')
  for name in stored.keys() - targets.keys():
    problems.append(f'{name} {_describe_array(stored[name])} is in the checkpoint, but not in the model')
  if problems:
    raise UserError(
      f'{source} does not fit the experiment:\n{describe_mismatches(problems)}\nUse the experiment that wrote it, with '
      'its sizes, layers and learner.'
    )
  return {name: _read(stored[name], leaf) for name, leaf in targets.items()}


def _describe_array(array: Any) -> str:
  return f'{np.dtype(array.dtype).name}{list(array.shape)}'


def _read(array: StoredArray, leaf: Any) -> Any:
  lazy = LazyArray(leaf.shape, leaf.dtype, lambda index: array.store[index].read().result())
  return np.asarray(lazy) if leaf.sharding is None else place_on_mesh(lazy, leaf)
