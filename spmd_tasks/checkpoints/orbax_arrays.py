"""OrbaxArrays: writes and reads the arrays of a checkpoint with Orbax (OCDBT), each under its key path.

Writing is asynchronous. Each of several processes writes and reads its own shards; all call the same methods in the
same order.

Orbax looks for the parts of a checkpoint by a glob pattern that has the directory's own path in it, and TensorStore
takes UTF-8 without backslashes: a directory with other characters in its path is named to them by its descriptor, on
Linux; elsewhere the write fails, which `wait_until_written` notices.
"""

from collections.abc import Iterator, Mapping
import contextlib
import functools
import logging
import os
import re
import sys
from typing import TYPE_CHECKING, Any
import warnings

from etils import epath
from flax import traverse_util
import jax

from spmd_tasks.files import is_remote

if TYPE_CHECKING:
  import orbax.checkpoint as ocp  # takes a second to import: when something is written or read, or by `prepare`

SLOWEST_BYTES_PER_S = 100_000_000
_MERGED_FILE = 'manifest.ocdbt'
_SPECIAL = re.compile(r'[][*?\\\ud800-\udfff]')


class OrbaxArrays:
  """Writes and reads trees of jax.Arrays; processes wait for each other at most `timeout_secs` plus 10 s per GB.

  Attributes:
    write_limit_s: the time limit of the newest write, in seconds.
  """

  def __init__(self, timeout_secs: int):
    _quiet_failed_writes()
    self._timeout_secs = timeout_secs
    self.write_limit_s = timeout_secs
    self._writer: ocp.AsyncCheckpointer | None = None
    self._written: epath.Path | None = None
    self._named = contextlib.ExitStack()  # the path by which the writer knows `_written`

  def prepare(self) -> None:
    """Imports Orbax and makes the writer, so that the first write does not have to."""
    import orbax.checkpoint as ocp

    if self._writer is None:
      # Replicas share the writing of an array by slicing it, and each slice is compiled. Not worth it for a small one.
      handler = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=2**20)
      registry = ocp.type_handlers.create_type_handler_registry((jax.Array, handler))
      tree_handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
      self._writer = ocp.AsyncCheckpointer(tree_handler, timeout_secs=self.write_limit_s)

  def limit_s(self, num_bytes: int) -> int:
    """Seconds that processes wait for each other around a write or read of `num_bytes`."""
    return self._timeout_secs + num_bytes // SLOWEST_BYTES_PER_S

  def write(self, path: epath.Path, state: Any) -> None:
    """Starts to write; returns when the arrays may be donated."""
    import orbax.checkpoint as ocp

    limit_s = self.limit_s(num_bytes(state))
    if limit_s > self.write_limit_s:  # Orbax takes its limit when it is made
      self.close()
      self.write_limit_s = limit_s
    self.prepare()
    assert self._writer is not None
    self._written = path
    self._writer.save(self._named.enter_context(_plain(path)), args=ocp.args.PyTreeSave(_to_nested(state)))

  def wait_until_written(self) -> None:
    """Returns when the arrays of all processes are written; raises the error of a failed write."""
    if self._writer is None or self._written is None:
      return
    with self._named:
      self._writer.wait_until_finished()
    if not (self._written / _MERGED_FILE).exists():
      raise FileNotFoundError(
        f'Orbax has not merged what the processes wrote: there is no {self._written / _MERGED_FILE}'
      )

  def read(self, path: epath.Path, abstract: Any, subtree: str | None) -> Any:
    """Reads the arrays of `abstract`, the whole tree or that at the key path `subtree`, onto its shardings."""
    import orbax.checkpoint as ocp

    names = subtree.split('/') if subtree else []
    nested = _to_nested(jax.tree.map(_with_sharding, abstract))
    for name in reversed(names):
      nested = {name: nested}
    # The handler itself: a Checkpointer ends with a device collective that a process with an error never enters.
    reader = ocp.PyTreeCheckpointHandler()
    with _plain(path) as plain:
      wanted = ocp.checkpoint_utils.construct_restore_args(nested)
      args = ocp.args.PyTreeRestore(item=nested, restore_args=wanted, partial_restore=subtree is not None)
      arrays = reader.restore(plain, args=args)
    reader.close()
    for name in names:
      arrays = arrays[name]
    return _from_nested(abstract, arrays)

  def close(self) -> None:
    """Ends the threads; call it when every write has been waited for."""
    if self._writer is None:
      return
    try:
      self._writer.close()
    except Exception as error:
      logging.info('Closing Orbax raises again what a failed write has raised: %s', error)
    self._writer = None


@contextlib.contextmanager
def _plain(path: epath.Path) -> Iterator[epath.Path]:
  """Gives `path`, whose parent exists, a name that Orbax and TensorStore can take."""
  if is_remote(path) or not _SPECIAL.search(os.fspath(path)) or not os.path.isdir('/proc/self/fd'):
    yield path
    return
  descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
  try:
    yield epath.Path(f'/proc/self/fd/{descriptor}') / path.name
  finally:
    os.close(descriptor)


def num_bytes(tree: Any) -> int:
  """The size in bytes of all arrays (or ShapeDtypeStructs) of a tree."""
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@functools.cache
def _quiet_failed_writes() -> None:
  """Drops what Orbax says of a failed write (full disk, too many open files), which the save raises as one sentence."""

  def is_other_record(record: logging.LogRecord) -> bool:
    if record.exc_info is None or (error := record.exc_info[1]) is None:
      return True
    from spmd_tasks.storage_problems import describe_storage_error

    return describe_storage_error(error, '.') is None

  for name in ('absl', 'asyncio'):  # the loggers that the threads report to
    logging.getLogger(name).addFilter(is_other_record)
  show = sys.unraisablehook

  def show_others(unraisable: Any) -> None:
    # TensorStore's threads report here that they could not hand their outcome to the write that had failed, and event
    # loops that they could not be made.
    if not str(unraisable.exc_value).endswith(('Event loop is closed', "has no attribute '_ssock'")):
      show(unraisable)

  sys.unraisablehook = show_others
  warnings.filterwarnings('ignore', 'coroutine .* was never awaited')


def _with_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
  sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _key_names(path: tuple[Any, ...]) -> tuple[str, ...]:
  return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _to_nested(tree: Any) -> dict[str, Any]:
  """Any tree as nested dicts of its key names, so that what is stored depends on names alone, not on Python classes."""
  return traverse_util.unflatten_dict(
    {_key_names(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
  )


def _from_nested(like: Any, nested: Mapping[str, Any]) -> Any:
  flat = traverse_util.flatten_dict(nested)
  return jax.tree_util.tree_map_with_path(lambda path, _: flat[_key_names(path)], like)
