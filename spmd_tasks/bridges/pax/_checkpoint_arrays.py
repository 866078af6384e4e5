"""Reads and writes the arrays of Paxml's checkpoints.

    state = read_pax_checkpoint(job / 'checkpoints' / 'checkpoint_00000100', abstract_state)
    write_pax_checkpoint(other / 'checkpoints', 100, state)      # Paxml 1.4.0 restores it

`state` is Paxml's TrainState, or any tree with its key paths, such as {'step': ..., 'mdl_vars': {'params': ...},
'opt_states': [...]}. Its shapes are the true ones, without padding: padding in the files is cut off, and nothing is
padded when written. Each process reads and writes its own shards only.
"""

from collections.abc import Iterator, Mapping, Sequence
import json
from typing import Any

from etils import epath
import jax
import numpy as np

from spmd_tasks.bridges.pax._checkpoint_files import (
  ARRAY_TAG,
  METADATA,
  STATE,
  PaxCheckpoint,
  StoredArray,
  key_value_store,
  open_pax_checkpoint,
  pax_name,
)
from spmd_tasks.checkpoints.manifest import describe_mismatches
from spmd_tasks.distributed import barrier, is_primary
from spmd_tasks.errors import UserError
from spmd_tasks.files import storage_errors, write_durably

_READ_AT_ONCE_BYTES = 2**30
_VERSION = 1.1
_LIMIT_S = 3600

Bounds = tuple[tuple[int, int], ...]  # (start, stop) of each dim


def read_pax_checkpoint(path: epath.PathLike, abstract_state: Any) -> Any:
  """Reads a checkpoint of Paxml into the structure of `abstract_state`.

  Args:
    path: `<job>/checkpoints/checkpoint_<step>`, or `<job>/checkpoints` for the newest.
    abstract_state: a tree of jax.ShapeDtypeStruct with the key paths of Paxml's TrainState and true shapes. A leaf with
      a sharding becomes a jax.Array, one without a numpy array. A tree without `opt_states` reads the variables only.
      Masked leaves of optimizer state (optax.MaskedNode) have no leaf here either.

  Raises:
    UserError: there is no checkpoint, or it lacks an array, has it in another shape or dtype, or has one that the tree
      has no place for; all are named. Integers of another width are converted.
  """
  checkpoint = open_pax_checkpoint(path)
  paths, structure = jax.tree_util.tree_flatten_with_path(abstract_state)
  wanted = {checkpoint.name_of(key_path): leaf for key_path, leaf in paths}
  _check(checkpoint, wanted)
  values = read_arrays(checkpoint.arrays, wanted)
  return jax.tree_util.tree_unflatten(structure, [values[name] for name in wanted])


def read_arrays(stored: Mapping[str, StoredArray], wanted: Mapping[str, Any]) -> dict[str, Any]:
  """Reads arrays by name, cut to the shapes of `wanted`: jax.ShapeDtypeStructs as `read_pax_checkpoint` takes them.

  Raises:
    UserError: an array has another shape or dtype.
  """
  if problems := [line for name, leaf in wanted.items() if (line := _mismatch(name, stored[name], leaf))]:
    raise UserError(f'the checkpoint does not fit the experiment:\n{describe_mismatches(problems)}')
  values: dict[str, Any] = {}
  for names in _batches(wanted):
    reads = {name: _start_to_read(stored[name].store, wanted[name]) for name in names}
    values |= {name: _place(wanted[name], parts) for name, parts in reads.items()}
  return values


def write_pax_checkpoint(directory: epath.PathLike, step: int, state: Any) -> epath.Path:
  """Writes `<directory>/checkpoint_<step>` as Paxml 1.4.0 does (version 1.1, without OCDBT), and returns its path.

  Every process of a job calls it. The directory gets its final name when it is complete.

  Args:
    directory: `<job>/checkpoints`.
    step: that of the state.
    state: a tree of jax.Arrays or of numpy arrays with the key paths of Paxml's TrainState and true shapes.

  Raises:
    UserError: there is a checkpoint of that step.
    StorageError: a file cannot be written.
  """
  path = epath.Path(directory) / f'checkpoint_{step:08d}'
  partial = path.with_name(f'{path.name}.orbax-checkpoint-tmp-0')  # a name that Paxml takes for an unfinished one
  if path.exists():
    raise UserError(f'{path} exists: choose another directory, or delete it.')
  leaves = jax.tree_util.tree_leaves_with_path(state)
  with storage_errors(partial):
    if is_primary():
      if partial.exists():
        partial.rmtree()
      for folder in (partial / STATE, (partial / METADATA).parent):
        folder.mkdir(parents=True)
      write_durably(partial / METADATA, _describe(leaves))
    barrier('pax_checkpoint_started', limit_s=_LIMIT_S)
    writes = [write for key_path, leaf in leaves for write in _start_to_write(partial, pax_name(key_path), leaf)]
    for write in writes:
      write.result()
    barrier('pax_checkpoint_written', limit_s=_LIMIT_S)
    if is_primary():
      partial.rename(path)
    barrier('pax_checkpoint_renamed', limit_s=_LIMIT_S)
  return path


def _check(checkpoint: PaxCheckpoint, wanted: Mapping[str, Any]) -> None:
  stored = checkpoint.arrays
  parts = {name.split('.')[0] for name in wanted}
  problems = []
  for name, leaf in wanted.items():
    if (array := stored.get(name)) is None:
      problems.append(f'{name} {_describe_array(leaf)} is not in the checkpoint')
    elif line := _mismatch(name, array, leaf):
      problems.append(line)
  problems += [
    f'{name} {_describe_array(array)} of the checkpoint has no place in the model'
    for name, array in stored.items()
    if name not in wanted and name.split('.')[0] in parts
  ]
  if problems:
    raise UserError(
      f'{checkpoint.path} does not fit the experiment:\n{describe_mismatches(problems)}\nUse the experiment that wrote '
      'it, with its sizes, layers and learner.'
    )


def _mismatch(name: str, array: StoredArray, leaf: Any) -> str | None:
  if array.fits(leaf.shape) and _is_convertible(array.dtype, leaf.dtype):
    return None
  return f'{name} must be {_describe_array(leaf)}, but the checkpoint has {_describe_array(array)}'


def _describe_array(array: Any) -> str:
  return f'{np.dtype(array.dtype).name}{list(array.shape)}'


def _is_convertible(stored: Any, wanted: Any) -> bool:
  """Counters may have another width; for anything else a conversion would lose or invent digits."""
  return stored == wanted or (np.issubdtype(stored, np.integer) and np.issubdtype(wanted, np.integer))


def _batches(wanted: Mapping[str, Any]) -> Iterator[list[str]]:
  """Cuts the names into runs whose arrays may be in memory twice at a time: as read, and on the devices."""
  batch: list[str] = []
  num_bytes = 0
  for name, leaf in wanted.items():
    num_bytes += leaf.size * leaf.dtype.itemsize
    if batch and num_bytes > _READ_AT_ONCE_BYTES:
      yield batch
      batch, num_bytes = [], leaf.size * leaf.dtype.itemsize
    batch.append(name)
  yield batch


def _bounds(index: Any, shape: Sequence[int]) -> Bounds:
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _start_to_read(store: Any, leaf: Any) -> dict[Bounds, Any]:
  """Returns the futures of the parts that this process needs; replicas share one."""
  indices: Any = [tuple(slice(0, size) for size in leaf.shape)]
  if leaf.sharding is not None:
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
  bounds = {_bounds(index, leaf.shape) for index in indices}
  return {part: store[tuple(slice(*limits) for limits in part)].read() for part in bounds}


def _place(leaf: Any, parts: Mapping[Bounds, Any]) -> Any:
  arrays = {part: np.asarray(future.result(), leaf.dtype) for part, future in parts.items()}
  if leaf.sharding is None:
    return next(iter(arrays.values()))
  return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: arrays[_bounds(index, leaf.shape)])


def _start_to_write(partial: epath.Path, name: str, leaf: Any) -> list[Any]:
  """Returns the futures of the parts that this process writes: of each part of the array one replica, as one file."""
  import tensorstore as ts  # here: a start that writes no checkpoint of Paxml does not need it

  is_sharded = isinstance(leaf, jax.Array)
  if not is_sharded and not is_primary():
    return []
  chunk = leaf.sharding.shard_shape(leaf.shape) if is_sharded else leaf.shape
  base = key_value_store(partial / STATE)
  spec = {
    'driver': 'zarr',
    'kvstore': base | {'path': f'{base["path"]}{name}/'},
    'dtype': leaf.dtype.name,
    'metadata': {'shape': leaf.shape, 'chunks': [max(1, n) for n in chunk], 'compressor': {'id': 'zstd', 'level': 1}},
  }
  store = ts.open(spec, create=True, open=True).result()
  if not is_sharded:
    return [store.write(leaf)]
  return [
    store[shard.index].write(np.asarray(shard.data)) for shard in leaf.addressable_shards if shard.replica_id == 0
  ]


def _describe(leaves: Sequence[tuple[Any, Any]]) -> str:
  """Returns the JSON that Paxml compares with an experiment's variables before it restores them."""
  described: dict[str, Any] = {}
  for key_path, leaf in leaves:
    *parents, last = [jax.tree_util.keystr((key,), simple=True) for key in key_path]
    if parents[:1] == ['mdl_vars']:
      place = described
      for name in parents:
        place = place.setdefault(name, {})
      place[last] = {
        ARRAY_TAG: True,
        'is_optax_masked_node': False,
        'unpadded_shape': list(leaf.shape),
        'dtype': leaf.dtype.name,
      }
  return json.dumps({'version': _VERSION, 'train_state_metadata': described})
