"""Checkpoints of a tree of sharded arrays: asynchronous, digested, and independent of the mesh.

    checkpointer = Checkpointer(job_log_dir / 'checkpoints', max_to_keep=3)
    restored = checkpointer.restore(abstract_state)         # None in a fresh directory
    checkpointer.save(step, state, input_state=iterator.get_state(), metadata={...})
    checkpointer.close()

One checkpoint is one directory:

    checkpoint_00000100/
      state/                   the arrays, by Orbax (OCDBT), each under its key path
      input/process_0_of_2.json   where each process stands in its input
      metadata.json
      manifest.json            size and digest of every file, the leaf table; written last

It is written as `checkpoint_00000100.partial` and renamed when it is complete, so a kill at any time leaves the earlier
checkpoints and a `.partial` that the next job removes. `save` returns once the arrays are held on the host (the state
may be donated at once); Orbax's write, the hashing and the rename run behind. The next `save` first waits for them, so
at any time everything up to the save before the last is on disk, and an error of a save is raised by the next `save`
or `wait`.

On restore every byte is verified (manifest.py says what that costs). A damaged checkpoint is renamed to
`checkpoint_00000100.damaged-<file>` and the one before it is used; a step that was asked for by number fails instead.

With several processes (one shared directory) every process calls every method, in the same order, from its main thread;
process 0 alone writes manifests, deletes, renames and decides which step is restored. An error is raised on the process
that has it; the others are ended by the job's crash handling. The caller owns the directory (see job_directory.py);
a second reader (eval, decode) passes `read_only=True`.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
import dataclasses
import json
import time
from typing import Any

from absl import logging
from etils import epath
import jax
from jax.experimental import multihost_utils
import numpy as np
import orbax.checkpoint as ocp

from spmd_tasks.runtime.checkpoint_directory import CheckpointDirectory
from spmd_tasks.runtime.checkpoint_errors import CheckpointError, CheckpointSaveError
from spmd_tasks.runtime.durable_files import write_durably
from spmd_tasks.runtime.manifest import LeafEntry, leaf_entries, read_manifest

__all__ = ['CheckpointError', 'Checkpointer', 'Restored']

_STATE, _INPUT, _METADATA = 'state', 'input', 'metadata.json'
_BROADCAST_BYTES = 16384


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
  """A restored checkpoint.

  Attributes:
    step: the step it was saved at.
    state: the tree that was asked for, of jax.Arrays with its shardings.
    input_state: what this process passed to `save`; None if it passed None, or if the number of processes has changed.
    input_states: what every process passed to `save`, in the order of the processes that saved.
    metadata: what process 0 passed to `save`.
  """

  step: int
  state: Any
  input_state: dict[str, Any] | None
  input_states: list[dict[str, Any] | None]
  metadata: dict[str, Any]


class Checkpointer:
  """Saves and restores the checkpoints below one directory. See the module's docstring."""

  def __init__(
    self,
    directory: epath.PathLike,
    *,
    max_to_keep: int | None = 3,
    keep_every_n_steps: int | None = None,
    read_only: bool = False,
    num_hash_threads: int = 8,
    timeout_secs: int = 1200,
  ):
    """Creates the directory and removes what an interrupted job left half-written in it.

    Args:
      directory: holds the checkpoints and nothing else.
      max_to_keep: the newest checkpoints kept; None keeps all.
      keep_every_n_steps: checkpoints whose step is a multiple of it are kept for ever, beside the newest ones.
      read_only: change nothing: no saving, no cleaning up, damaged checkpoints are skipped where they lie.
      num_hash_threads: files hashed at a time.
      timeout_secs: how long processes wait for each other around one save or restore.

    Raises:
      CheckpointError: the directory cannot be created or written.
      ValueError: a setting is out of range.
    """
    for name, value in (('max_to_keep', max_to_keep), ('keep_every_n_steps', keep_every_n_steps)):
      if value is not None and value < 1:
        raise ValueError(f'{name} = {value} must be at least 1, or None.')
    self._directory = CheckpointDirectory(path=epath.Path(directory), num_hash_threads=num_hash_threads)
    self._max_to_keep = max_to_keep
    self._keep_every_n_steps = keep_every_n_steps
    self._read_only = read_only
    self._timeout_secs = timeout_secs
    self._is_primary = jax.process_index() == 0
    self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), timeout_secs=timeout_secs)
    self._background = ThreadPoolExecutor(1, thread_name_prefix='checkpoint_seal')
    self._pending: tuple[int, Future[None]] | None = None
    if self._is_primary and not read_only:
      try:
        self._directory.open()
      except OSError as error:
        raise CheckpointError(f'checkpoint directory {self._directory.path} cannot be used: {error}.') from error
    self._barrier('open')

  def save(
    self, step: int, state: Any, input_state: Mapping[str, Any] | None = None, metadata: Mapping[str, Any] | None = None
  ) -> None:
    """Starts to save `state` as checkpoint `step`; returns when the arrays may be donated.

    Args:
      step: greater than every step in the directory.
      state: a tree of jax.Arrays (no typed keys: save their key data).
      input_state: JSON, this process's own.
      metadata: JSON, process 0's is kept.

    Raises:
      CheckpointError: the save before this one failed, or this one could not be started.
    """
    self.wait()
    if self._read_only:
      raise CheckpointError(f'{self._directory.path} was opened read-only: no checkpoint can be saved.')
    steps = self._directory.claimed_steps()
    if steps and step <= max(steps):
      raise CheckpointError(
        f'step {step} cannot be saved: {self._directory.path} already holds step {max(steps)}. If '
        'training went back on purpose, move the later checkpoints away first.'
      )
    leaves = leaf_entries(state)
    partial = self._directory.partial(step)
    try:
      (partial / _INPUT).mkdir(parents=True, exist_ok=True)
      name = f'process_{jax.process_index()}_of_{jax.process_count()}.json'
      write_durably(partial / _INPUT / name, _to_json('input_state', input_state))
      if self._is_primary:
        write_durably(partial / _METADATA, _to_json('metadata', dict(metadata or {})))
      self._orbax.save(partial / _STATE, args=ocp.args.PyTreeSave(_to_nested(state)))
    except Exception as error:
      raise self._save_error(step, error) from error
    self._pending = step, self._background.submit(self._seal, step, leaves)

  def wait(self) -> None:
    """Returns when the last save is complete on disk, on every process; a CheckpointError if it failed."""
    if self._pending is None:
      return
    step, sealed = self._pending
    started = time.monotonic()
    try:
      sealed.result()
    except Exception as error:
      self._pending = None
      raise self._save_error(step, error) from error
    self._pending = None
    self._barrier(f'sealed_{step}')
    waited = time.monotonic() - started
    if waited > 1:
      logging.info('Waited %.1f s for checkpoint %d to be complete.', waited, step)

  def close(self) -> None:
    """Waits for the last save and ends the background threads. The checkpointer cannot be used afterwards."""
    try:
      self.wait()
    finally:
      self._background.shutdown()
      self._orbax.close()

  def all_steps(self) -> list[int]:
    """The steps of the complete checkpoints, ascending (their files are not verified here)."""
    return self._directory.complete_steps()

  def latest_step(self) -> int | None:
    """The newest of `all_steps`; None if there is none."""
    return max(self.all_steps(), default=None)

  def restore(self, abstract_state: Any, step: int | None = None) -> Restored | None:
    """Restores a whole state, bit-exactly, onto the shardings of `abstract_state`.

    Args:
      abstract_state: a tree of ShapeDtypeStructs with shardings (none: this process's first device).
      step: the step to restore; None restores the newest checkpoint that is not damaged.

    Returns:
      The checkpoint, or None if `step` is None and the directory has never held one.

    Raises:
      CheckpointError: the state differs from the checkpoint in any leaf's name, shape or dtype; the step that was asked
        for is missing or damaged; or there are checkpoints, and none that is whole.
    """
    return self._restore(abstract_state, step, subtree=None)

  def restore_weights(self, abstract_weights: Any, step: int | None = None, *, subtree: str = 'weights') -> Restored:
    """Restores one subtree of the state, reading no other arrays; `Restored.state` is that subtree.

    Args:
      abstract_weights: a tree of ShapeDtypeStructs, as in `restore`.
      step: as in `restore`.
      subtree: its key path in the saved state: 'weights', or 'learner/ema_weights' for the averaged ones.

    Raises:
      CheckpointError: as `restore`; also if the directory has no checkpoint.
    """
    restored = self._restore(abstract_weights, step, subtree=subtree)
    if restored is None:
      raise CheckpointError(
        f'{self._directory.path} has no checkpoint to restore weights from: correct the path, or train first.'
      )
    return restored

  def _seal(self, step: int, leaves: tuple[LeafEntry, ...]) -> None:
    """In the background: waits for Orbax, then makes the checkpoint count."""
    # Returns when the arrays of all processes are written; each process wrote its input state before that.
    self._orbax.wait_until_finished()
    if not self._is_primary:
      return
    self._directory.complete(step, leaves, jax.process_count())
    if self._max_to_keep is not None:
      self._directory.delete_old(max_to_keep=self._max_to_keep, keep_every_n_steps=self._keep_every_n_steps)

  def _restore(self, abstract: Any, step: int | None, *, subtree: str | None) -> Restored | None:
    self.wait()
    prefix = f'{subtree}/' if subtree else ''
    wanted = [dataclasses.replace(leaf, name=prefix + leaf.name) for leaf in leaf_entries(abstract)]
    chosen = self._agree(lambda: self._directory.choose(step, wanted, prefix=prefix, read_only=self._read_only))
    if chosen is None:
      return None
    path = self._directory.final(chosen)
    nested = _to_nested(jax.tree.map(_with_sharding, abstract))
    for name in reversed(subtree.split('/') if subtree else []):
      nested = {name: nested}
    try:
      arrays = self._orbax.restore(
        path / _STATE,
        args=ocp.args.PyTreeRestore(
          item=nested,
          restore_args=ocp.checkpoint_utils.construct_restore_args(nested),
          partial_restore=subtree is not None,
        ),
      )
      num_processes = read_manifest(path).num_processes
      input_states = [
        json.loads((path / _INPUT / f'process_{index}_of_{num_processes}.json').read_text())
        for index in range(num_processes)
      ]
      metadata = json.loads((path / _METADATA).read_text())
    except Exception as error:
      raise CheckpointError(f'checkpoint {path} could not be read: {type(error).__name__}: {error}') from error
    for name in subtree.split('/') if subtree else []:
      arrays = arrays[name]
    return Restored(
      step=chosen,
      state=_from_nested(abstract, arrays),
      input_state=input_states[jax.process_index()] if num_processes == jax.process_count() else None,
      input_states=input_states,
      metadata=metadata,
    )

  def _agree(self, decide: Callable[[], int | None]) -> int | None:
    """Process 0 decides; every process returns its decision, or raises its error."""
    if jax.process_count() == 1:
      return decide()
    outcome: dict[str, Any] = {}
    if self._is_primary:
      try:
        outcome = {'step': decide()}
      except Exception as error:
        outcome = {'error': str(error)[:2000]}
    # Verifying may take minutes: waited for at the coordination service, not inside a device collective.
    self._barrier('decided')
    encoded = json.dumps(outcome).encode().ljust(_BROADCAST_BYTES)
    received = multihost_utils.broadcast_one_to_all(np.frombuffer(encoded, np.uint8))
    outcome = json.loads(np.asarray(received).astype(np.uint8).tobytes())
    if 'error' in outcome:
      raise CheckpointError(outcome['error'])
    return outcome['step']

  def _barrier(self, name: str) -> None:
    if jax.process_count() > 1:
      barrier = ocp.multihost.get_barrier_sync_fn()
      barrier(key=f'spmd_tasks_checkpoint_{name}', timeout_ms=self._timeout_secs * 1000)

  def _save_error(self, step: int, error: Exception) -> CheckpointSaveError:
    """Removes what the failed save left and describes the failure."""
    if self._is_primary:
      self._directory.discard_partial(step)
    saved = step in self._directory.claimed_steps()
    what = 'was saved, but older checkpoints could not be deleted' if saved else 'could not be saved'
    return CheckpointSaveError(
      f'checkpoint of step {step} {what} in {self._directory.path}: {type(error).__name__}: {error}. '
      f'Complete checkpoints: {self.all_steps()}.'
    )


def _to_json(name: str, value: Any) -> str:
  try:
    return json.dumps(value) + '\n'
  except (TypeError, ValueError) as error:
    raise ValueError(f'{name} must be JSON (dicts, lists, strings, numbers, booleans, None): {error}') from error


def _with_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
  sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _key_names(path: tuple[Any, ...]) -> list[str]:
  return [jax.tree_util.keystr((key,), simple=True) for key in path]


def _to_nested(tree: Any) -> dict[str, Any]:
  """Any tree as nested dicts of its key names, so that what is stored depends on names alone, not on Python classes."""
  nested: dict[str, Any] = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    *parents, last = _key_names(path)
    place = nested
    for name in parents:
      place = place.setdefault(name, {})
    place[last] = leaf
  return nested


def _from_nested(like: Any, nested: Mapping[str, Any]) -> Any:
  paths, structure = jax.tree_util.tree_flatten_with_path(like)
  leaves = []
  for path, _ in paths:
    place: Any = nested
    for name in _key_names(path):
      place = place[name]
    leaves.append(place)
  return jax.tree_util.tree_unflatten(structure, leaves)
