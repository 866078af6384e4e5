"""Writes and reads the arrays of a checkpoint with TensorStore, on disks and in object stores.

    state/weights.ffn.kernel/zarr.json     shape, dtype and chunks of one array (Zarr 3)
    state/weights.ffn.kernel/c.0.1         one shard; its last four bytes are the CRC-32C of the rest
    state/_METADATA                        the tree, for Orbax: `orbax.checkpoint` restores `state` as a PyTree

Each shard is one file (or object). One of the devices that hold a shard writes it; replicas take turns, so that all
processes of a data-parallel job write. TensorStore checks the CRC of each shard that it reads.

Checkpoints of earlier versions, which Orbax wrote as OCDBT, can be read as well.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import json
import os
import re
from typing import Any
from urllib.parse import quote

from etils import epath
import jax
import numpy as np

from spmd_tasks.checkpoints.manifest import DamagedCheckpointError
from spmd_tasks.files import is_remote
from spmd_tasks.sharding.weights import leaves_by_name
from spmd_tasks.stores import kvstore_spec

# TensorStore takes 0.3 s to import, so it is imported only when arrays are written or read.

_IN_FLIGHT_BYTES = 8_000_000_000  # that a restore holds in the host's memory
_CONCURRENT_REQUESTS = 128
_DIGESTS = re.compile(r'stored digest is (\w+) but computed digest is (\w+)')
_UNSAFE = re.compile(r'[\\\ud800-\udfff]')


def num_bytes(tree: Any) -> int:
  """Returns the size in bytes of all arrays (or ShapeDtypeStructs) of a tree."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def copy_to_host(path: epath.Path, state: Any) -> Callable[[], None]:
  """Copies this process's shards of a tree of jax.Arrays; returns a function that writes the copies below `path`.

  The arrays may be donated as soon as this returns. The function returns once all shards are stored, and raises
  TensorStore's ValueError if a shard could not be written.
  """
  leaves = leaves_by_name(state)
  shards = {name: _own_shards(leaf, turn) for turn, (name, leaf) in enumerate(leaves.items())}
  for shard in (shard for shards_of_leaf in shards.values() for shard in shards_of_leaf):
    shard.data.copy_to_host_async()
  # On a CPU np.asarray returns a view of the array's memory, which may be donated.
  to_host = np.array if jax.default_backend() == 'cpu' else np.asarray
  specs = {name: _write_spec(leaf) for name, leaf in leaves.items()}
  shapes = {name: leaf.shape for name, leaf in leaves.items()}
  blocks = {name: [(shard.index, to_host(shard.data)) for shard in shards[name]] for name in leaves}

  def write() -> None:
    import tensorstore as ts

    context = _context()
    with _safe_name(path) as directory:
      commits: list[Any] = []
      if jax.process_index() == 0:
        metadata = json.dumps(_orbax_metadata(shapes)).encode()
        commits.append(ts.KvStore.open(kvstore_spec(directory)).result().write('_METADATA', metadata))
      for name, spec in specs.items():
        where = {'kvstore': kvstore_spec(directory / _directory_names(directory, name)[0])}
        store = ts.open(spec | where, context=context, open=True, assume_metadata=True).result()
        if jax.process_index() == 0:
          # TensorStore itself would write this conditionally, and fail on its own object if a response is lost.
          metadata = json.dumps(store.spec(retain_context=False).to_json()['metadata']).encode()
          assert store.kvstore is not None
          commits.append(store.kvstore.write('zarr.json', metadata))
        commits += [
          store[index].write(block, can_reference_source_data_indefinitely=True).commit for index, block in blocks[name]
        ]
      errors = [error for commit in commits if (error := commit.exception()) is not None]
    if errors:  # raised after all writes have ended, as the caller deletes the files
      raise errors[0]

  return write


def read_arrays(path: epath.Path, abstract: Any, *, prefix: str = '', is_ocdbt: bool = False) -> Any:
  """Reads a tree of arrays.

  Args:
    path: the directory of the arrays.
    abstract: a tree of ShapeDtypeStructs, whose key paths name the arrays. Without a sharding, an array is read onto
      this process's first device.
    prefix: precedes the names in the checkpoint.
    is_ocdbt: whether Orbax wrote the directory as OCDBT.

  Raises:
    DamagedCheckpointError: a shard is missing, or its CRC does not match.
    ValueError: TensorStore could not read a shard for another reason.
  """
  leaves = leaves_by_name(abstract)
  arrays, waiting, in_flight = [], [], 0
  with _safe_name(path) as directory, damage_of(path):
    stores = open_arrays(directory, [prefix + name for name in leaves], is_ocdbt=is_ocdbt)
    for leaf, store in zip(leaves.values(), stores):
      waiting.append(_start_reading(leaf, store))
      in_flight += leaf.size * leaf.dtype.itemsize
      if in_flight > _IN_FLIGHT_BYTES:
        arrays += [finish() for finish in waiting]
        waiting, in_flight = [], 0
    arrays += [finish() for finish in waiting]
  return jax.tree.unflatten(jax.tree.structure(abstract), arrays)


def open_arrays(path: epath.Path, names: Sequence[str], *, is_ocdbt: bool = False) -> list[Any]:
  """Opens arrays as tensorstore.TensorStores; reads only metadata."""
  import tensorstore as ts

  context, spec_of = _context(), _ocdbt_spec if is_ocdbt else _read_spec
  opening = [ts.open(spec_of(path, name), open=True, read=True, context=context) for name in names]
  return [store.result() for store in opening]


@contextlib.contextmanager
def damage_of(path: epath.Path) -> Iterator[None]:
  """Turns TensorStore's errors about damaged and missing shards below `path` into DamagedCheckpointErrors."""
  try:
    yield
  except ValueError as error:
    if not str(error).startswith(('DATA_LOSS: ', 'NOT_FOUND: ')):
      raise
    reason = ' '.join(str(error).partition(' [')[0].split())  # without the spec, which follows in brackets
    file = re.match(rf'.*/({re.escape(path.name)}/[^":\s]+)', reason)
    if digests := _DIGESTS.search(reason):
      reason = f'its content has changed (CRC-32C {digests[2]}, was {digests[1]})'
    raise DamagedCheckpointError(file[1] if file else path.name, reason) from error


def _own_shards(leaf: jax.Array, turn: int) -> list[Any]:
  """Returns the shards of an array that this process writes."""
  holders: dict[str, list[Any]] = {}
  for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
    holders.setdefault(str(index), []).append(device)
  writers = {devices[turn % len(devices)] for devices in holders.values()}
  return [shard for shard in leaf.addressable_shards if shard.device in writers]


def _start_reading(leaf: Any, store: Any) -> Callable[[], jax.Array]:
  """Starts to read this process's shards of an array; returns a function that waits for them."""
  sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  if (tuple(store.shape), store.dtype.name) != (leaf.shape, leaf.dtype.name):
    raise ValueError(f'{store.spec().url} is {store.dtype.name}{list(store.shape)}, not {leaf.dtype}{list(leaf.shape)}')
  reads: dict[str, Any] = {}
  for index in sharding.addressable_devices_indices_map(leaf.shape).values():
    if str(index) not in reads:
      reads[str(index)] = store[index].read()

  def finish() -> jax.Array:
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: reads[str(index)].result())

  return finish


def _context() -> Any:
  import tensorstore as ts

  limit = {'limit': _CONCURRENT_REQUESTS}
  return ts.Context({'gcs_request_concurrency': limit, 's3_request_concurrency': limit})


def _directory_names(directory: epath.Path, name: str) -> tuple[str, str]:
  """Returns an array's directory name below `directory`, and its name in a checkpoint copied between disk and store.

  On disks it is the name that Orbax expects. In stores it is quoted, because `#` and `?` have a meaning in URLs.
  """
  plain = name.replace('/', '.')
  quoted = quote(plain, safe='')
  return (quoted, plain) if is_remote(directory) else (plain, quoted)


def _write_spec(leaf: jax.Array) -> dict[str, Any]:
  shard_shape = leaf.sharding.shard_shape(leaf.shape)
  return {
    'driver': 'zarr3',
    'store_data_equal_to_fill_value': True,  # a missing shard is damage, not zeros
    'metadata': {
      'shape': leaf.shape,
      'data_type': leaf.dtype.name,
      'chunk_grid': {'name': 'regular', 'configuration': {'chunk_shape': [max(size, 1) for size in shard_shape]}},
      # A dot instead of nested directories, each of which would have to be flushed.
      'chunk_key_encoding': {'name': 'default', 'configuration': {'separator': '.'}},
      'codecs': [{'name': 'bytes', 'configuration': {'endian': 'little'}}, {'name': 'crc32c'}],
    },
  }


def _read_spec(directory: epath.Path, name: str) -> dict[str, Any]:
  own, copied = (kvstore_spec(directory / directory_name) for directory_name in _directory_names(directory, name))
  is_copy = own != copied and not _has_metadata(own) and _has_metadata(copied)
  return {'driver': 'zarr3', 'kvstore': copied if is_copy else own, 'fill_missing_data_reads': False}


def _has_metadata(spec: dict[str, Any]) -> bool:
  import tensorstore as ts

  return ts.KvStore.open(spec).result().read('zarr.json').result().state == 'value'


def _ocdbt_spec(directory: epath.Path, name: str) -> dict[str, Any]:
  key = f'{name.replace("/", ".")}/'
  return {'driver': 'auto', 'kvstore': {'driver': 'ocdbt', 'base': kvstore_spec(directory), 'path': key}}


def _orbax_metadata(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
  """Returns the content of Orbax's `_METADATA` for a tree of nested dicts in Zarr 3."""
  tree = {}
  for name, shape in shapes.items():
    keys = tuple(name.split('/'))
    tree[str(keys)] = {
      'key_metadata': [{'key': key, 'key_type': 2} for key in keys],  # 2: a key of a dict
      'value_metadata': {'value_type': 'np.ndarray', 'skip_deserialize': False, 'write_shape': list(shape)},
    }
  return {
    'tree_metadata': tree,
    'use_ocdbt': False,
    'use_zarr3': True,
    'store_array_data_equal_to_fill_value': True,
    'custom_metadata': None,
  }


@contextlib.contextmanager
def _safe_name(path: epath.Path) -> Iterator[epath.Path]:
  """Yields a path to `path` that TensorStore accepts: UTF-8 without backslashes. The parent of `path` must exist.

  On Linux, a parent whose name has other characters is opened, and named by its descriptor.
  """
  if is_remote(path) or not _UNSAFE.search(os.fspath(path)) or not os.path.isdir('/proc/self/fd'):
    yield path
    return
  descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
  try:
    yield epath.Path(f'/proc/self/fd/{descriptor}') / path.name
  finally:
    os.close(descriptor)
