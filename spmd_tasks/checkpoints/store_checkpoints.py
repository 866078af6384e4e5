"""Checkpoints in an object store: where they differ from those on a disk.

    checkpoint_00000100/
      state_3f2a.../           the arrays, by TensorStore (Zarr 3), each shard an object with a CRC-32C of its own
      input/process_0_of_2.json, base.json
      manifest.json            written last, by a conditional write: from then on there is a checkpoint
      manifest.damaged-<file>.json   instead: set aside by a restore; never read or deleted again

A directory without a manifest is no checkpoint, and the next job deletes it. A checkpoint is deleted by deleting its
manifest first. Each job writes arrays below a name of its own, so that what a job still writes that has lost its
directory to another one (programs/job_directory.py) changes no checkpoint. Arrays have no SHA-256 in the manifest: a
shard is verified by its CRC while it is read, and a shard that is missing is an error.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
import dataclasses
import functools
import hashlib
import json
import secrets
from typing import Any
from urllib.parse import quote

from absl import logging
from etils import epath
import jax
import numpy as np

from spmd_tasks.append_objects import flush
from spmd_tasks.checkpoints.checkpoint_directory import CheckpointDirectory, Stamp, input_file
from spmd_tasks.checkpoints.manifest import (
  MANIFEST_FILE,
  NUM_HASH_THREADS,
  STATE,
  CheckpointError,
  CheckpointSaveError,
  FileEntry,
  LeafEntry,
  manifest_text,
  read_manifest,
)
from spmd_tasks.checkpoints.orbax_arrays import SLOWEST_BYTES_PER_S
from spmd_tasks.files import glob_below
from spmd_tasks.sharding.weights import leaves_by_name
from spmd_tasks.stores import create, exists, kvstore_spec, modified_s, read, sizes_below, write

_DAMAGED = 'manifest.damaged-*'
_IN_FLIGHT_BYTES = 8_000_000_000  # of a restore, in the host's memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreDirectory(CheckpointDirectory):
  """The checkpoints below `path`, which is in an object store."""

  @functools.cached_property
  def state_name(self) -> str:
    return f'{STATE}_{secrets.token_hex(6)}'

  def partial(self, step: int) -> epath.Path:
    return self.final(step)

  def claimed_steps(self) -> dict[int, epath.Path]:
    found = super().claimed_steps()
    with ThreadPoolExecutor(NUM_HASH_THREADS) as pool:
      is_complete = pool.map(lambda path: exists(path / MANIFEST_FILE), found.values())
      return {step: path for (step, path), each in zip(found.items(), is_complete) if each}

  def complete_steps(self) -> list[int]:
    return list(self.claimed_steps())

  def holds(self, step: int) -> bool:
    return exists(self.final(step) / MANIFEST_FILE)

  def stamp(self, step: int) -> Stamp:
    try:
      return step, int(modified_s(self.final(step) / MANIFEST_FILE))
    except FileNotFoundError:
      return step, 0

  def open(self) -> None:
    complete = self.claimed_steps()
    others = self._without_manifest(complete)
    left = [path for path in others if not glob_below(path, _DAMAGED)]
    if not complete and left == others:
      self.refuse_loss()
    for path in left:
      logging.info('Removing %s, left by an interrupted job.', path)
      path.rmtree(missing_ok=True)

  def is_unused(self) -> bool:
    return not self.claimed_steps() and super().is_unused()

  def write_digests(self, step: int, process_index: int) -> None:
    pass  # TensorStore has written a CRC into each shard

  def complete(self, step: int, leaves: Sequence[LeafEntry], num_processes: int) -> None:
    path = self.final(step)
    sizes = sizes_below(path)
    missing = [name for i in range(num_processes) if (name := input_file(i, num_processes)) not in sizes]
    if missing:
      self.before_publishing()  # another job that has taken the directory has deleted it
      raise CheckpointSaveError(f'there is no {missing[0]} in {path}: that process writes elsewhere')
    entries = []
    for name in sorted(sizes):
      if name.startswith(f'{STATE}_') and not name.startswith(f'{self.state_name}/'):
        continue  # of a job that has lost the directory, and writes on
      sha256 = '' if name.startswith(f'{STATE}_') else hashlib.sha256(read(path / name)).hexdigest()
      entries.append(FileEntry(path=name, num_bytes=sizes[name], sha256=sha256))
    text = manifest_text(step=step, num_processes=num_processes, leaves=leaves, files=entries)
    flush()  # the rows of the steps before it would be missing for ever
    self.before_publishing()
    if not create(path / MANIFEST_FILE, text.encode()):
      raise CheckpointSaveError(f'another job has saved step {step} in {self.path}')

  def discard_partial(self, step: int) -> None:
    arrays = self.final(step) / self.state_name  # the rest may be another job's, which has taken the directory
    try:
      if not self.holds(step) or read_manifest(self.final(step)).state_name != self.state_name:
        arrays.rmtree(missing_ok=True)
    except (OSError, CheckpointError) as error:
      logging.error('Could not remove %s: %s', arrays, error)

  def set_aside(self, path: epath.Path, suffix: str) -> epath.Path:
    aside = path / f'manifest.{suffix}.json'
    write(aside, read(path / MANIFEST_FILE))
    (path / MANIFEST_FILE).unlink(missing_ok=True)  # an answer may have been lost
    return aside

  def damaged(self) -> list[str]:
    complete = self.claimed_steps()
    aside = [each for path in self._without_manifest(complete) for each in glob_below(path, _DAMAGED)]
    return sorted([path.name for path in complete.values()] + [f'{each.parent.name}/{each.name}' for each in aside])

  def _list(self) -> list[epath.Path]:
    return glob_below(self.path, '*')

  def _without_manifest(self, complete: Mapping[int, epath.Path]) -> list[epath.Path]:
    return [path for step, path in super().claimed_steps().items() if step not in complete]

  def _delete(self, step: int) -> None:
    (self.final(step) / MANIFEST_FILE).unlink(missing_ok=True)
    self.final(step).rmtree(missing_ok=True)


class StoreArrays:
  """Has the methods of `OrbaxArrays`: writes and reads each array under its key path as a Zarr 3 array.

  Of the devices that hold the same shard one writes it, by turns, so that all processes of a data-parallel job write.
  """

  def __init__(self, timeout_secs: int):
    self._timeout_secs = timeout_secs
    self.write_limit_s = timeout_secs
    self._thread = ThreadPoolExecutor(1, thread_name_prefix='checkpoint_upload')
    self._started: list[Future[list[Any]]] = []

  def prepare(self) -> None:
    import tensorstore  # noqa: F401

  def limit_s(self, num_bytes: int) -> int:
    return self._timeout_secs + num_bytes // SLOWEST_BYTES_PER_S

  def write(self, path: epath.Path, state: Any) -> None:
    leaves = leaves_by_name(state)
    self.write_limit_s = self.limit_s(sum(leaf.nbytes for leaf in leaves.values()))
    shards = {name: _own_shards(leaf, turn) for turn, (name, leaf) in enumerate(leaves.items())}
    for shard in (shard for each in shards.values() for shard in each):
      shard.data.copy_to_host_async()
    # On a CPU NumPy would look at the very memory that is donated.
    to_host, context = np.array if jax.default_backend() == 'cpu' else np.asarray, _context()
    self._started = []
    for name, leaf in leaves.items():
      hosts = [(shard.index, to_host(shard.data)) for shard in shards[name]]
      self._started.append(self._thread.submit(_start_writing, _array_spec(path, name, leaf), context, hosts))

  def wait_until_written(self) -> None:
    for started in self._started:
      for commit in started.result():
        commit.result()

  def read(self, path: epath.Path, abstract: Any, subtree: str | None) -> Any:
    """Reads as OrbaxArrays does; also what Orbax has written on a disk, if it was copied into a store."""
    import tensorstore as ts

    is_ours = path.name != STATE
    context = _context()
    prefix = f'{subtree}/' if subtree else ''
    specs = [_read_spec(path, prefix + name, is_ours) for name in leaves_by_name(abstract)]
    opened = [ts.open(spec, open=True, read=True, context=context) for spec in specs]
    leaves, arrays, waiting, num_bytes = jax.tree.leaves(abstract), [], [], 0
    for leaf, store in zip(leaves, opened):
      waiting.append(_start_reading(leaf, store.result()))
      num_bytes += leaf.size * leaf.dtype.itemsize
      if num_bytes > _IN_FLIGHT_BYTES:
        arrays += [finish() for finish in waiting]
        waiting, num_bytes = [], 0
    arrays += [finish() for finish in waiting]
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays)

  def close(self) -> None:
    self._thread.shutdown()


def _own_shards(leaf: jax.Array, turn: int) -> list[Any]:
  """Returns the shards of an array that this process writes."""
  holders: dict[str, list[Any]] = {}
  for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
    holders.setdefault(str(index), []).append(device)
  writers = {devices[turn % len(devices)] for devices in holders.values()}
  return [shard for shard in leaf.addressable_shards if shard.device in writers]


def _start_writing(spec: dict[str, Any], context: Any, hosts: list[tuple[Any, np.ndarray]]) -> list[Any]:
  """Starts to write the shards of an array; returns TensorStore's futures."""
  import tensorstore as ts

  store = ts.open(spec, context=context, open=True, assume_metadata=True).result()
  commits: list[Any] = []
  if jax.process_index() == 0:
    # Not by TensorStore's own conditional write: when its answer is lost, it takes its own object for another's.
    metadata = json.dumps(store.spec(retain_context=False).to_json()['metadata'])
    assert store.kvstore is not None
    commits.append(store.kvstore.write('zarr.json', metadata))
  return commits + [
    store[index].write(data, can_reference_source_data_indefinitely=True).commit for index, data in hosts
  ]


def _context() -> Any:
  import tensorstore as ts

  limit = {'limit': 128}
  return ts.Context({'gcs_request_concurrency': limit, 's3_request_concurrency': limit})


def _array_spec(path: epath.Path, name: str, leaf: jax.Array) -> dict[str, Any]:
  shard_shape = leaf.sharding.shard_shape(leaf.shape)
  return _read_spec(path, name, True) | {
    'store_data_equal_to_fill_value': True,  # what is missing is damage, not zeros
    'metadata': {
      'shape': leaf.shape,
      'data_type': leaf.dtype.name,
      'chunk_grid': {'name': 'regular', 'configuration': {'chunk_shape': [max(size, 1) for size in shard_shape]}},
      'codecs': [{'name': 'bytes', 'configuration': {'endian': 'little'}}, {'name': 'crc32c'}],
    },
  }


def _read_spec(path: epath.Path, name: str, is_ours: bool) -> dict[str, Any]:
  if not is_ours:
    key = f'{name.replace("/", ".")}/'
    return {'driver': 'auto', 'kvstore': {'driver': 'ocdbt', 'base': kvstore_spec(path), 'path': key}}
  spec = kvstore_spec(path / quote(name.replace('/', '.'), safe=''))
  return {'driver': 'zarr3', 'kvstore': spec, 'fill_missing_data_reads': False}


def _start_reading(leaf: Any, store: Any) -> Callable[[], jax.Array]:
  """Starts to read the shards of this process; returns what waits for them."""
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
