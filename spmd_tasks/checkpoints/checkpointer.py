"""Checkpointer: saves and restores a tree of sharded arrays, asynchronously, with digests, on any mesh.

One checkpoint is one directory:

    checkpoint_00000100/
      state/                   the arrays, each under its key path (arrays.py)
      base.json                where the frozen weights are, if the checkpoint holds only the trained weights
      input/process_0_of_2.json   the input position of each process
      manifest.json            size and digest of every file, the leaf table; written last

A checkpoint is written as `checkpoint_00000100.partial` and renamed when it is complete (for object stores see
store_directory.py). A kill at any time leaves the earlier checkpoints and a `.partial`, which the next job removes.
`save` returns once the arrays are copied to the host; they are written in the background. The next `save` or `wait`
first waits for that, and raises its error.

A restore compares every file with the manifest, and checks the CRC of each shard as it reads it. A damaged checkpoint
is renamed to `checkpoint_00000100.damaged-<file>`, and the previous one is restored. If a damaged step was requested by
number, the restore raises instead.

With several processes (one shared directory), every process calls every method, in the same order, from its main
thread. Each process writes and reads its own shards. Only process 0 writes manifests, deletes, renames and decides
which step is restored. An error is raised on the process where it happens; the job's failure handling ends the others.
Processes wait for each other for at most `timeout_secs` plus 10 s per GB.

The training job owns the directory (programs/job_directory.py). Other readers (eval, decode) pass `read_only=True`. If
the owner deletes a checkpoint during a read, the reader restores the newest remaining one. A reader reads a damaged
checkpoint only once, and `latest_step` ignores it from then on.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
import dataclasses
import json
import time
from typing import Any, NamedTuple

from absl import logging
from etils import epath
import jax

from spmd_tasks.checkpoints.arrays import copy_to_host, num_bytes, read_arrays
from spmd_tasks.checkpoints.checkpoint_directory import CheckpointDirectory, Retention, SaveRecord, Stamp, input_file
from spmd_tasks.checkpoints.manifest import (
  CheckpointChoiceError,
  CheckpointError,
  CheckpointSaveError,
  DamagedCheckpointError,
  LeafEntry,
  leaf_entries,
  read_manifest,
)
from spmd_tasks.checkpoints.store_directory import StoreDirectory
from spmd_tasks.checkpoints.verifying import choose
from spmd_tasks.distributed import barrier
from spmd_tasks.distributed.agreement import PrimaryError, gather, primary_decides
from spmd_tasks.errors import UserError
from spmd_tasks.files import is_remote, make_directory, read_text, write_durably
from spmd_tasks.storage_problems import describe_storage_error

__all__ = ['CheckpointError', 'Checkpointer', 'Restored']

_BASE_FILE = 'base.json'
_SLOWEST_BYTES_PER_S = 100_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
  """A restored checkpoint.

  Attributes:
    step: its step.
    state: the tree of jax.Arrays, with the shardings of `abstract_state`.
    input_state: what this process passed to `save`; None if the number of processes has changed.
    input_states: what each process passed to `save`.
    base: what `base` of `save` returned.
  """

  step: int
  state: Any
  input_state: dict[str, Any] | None
  input_states: list[dict[str, Any] | None]
  base: dict[str, Any] | None = None


class _Save(NamedTuple):
  """A save that may still be running; processes wait for each other at most `limit_s` at its end."""

  step: int
  done: Future[None]
  limit_s: int


class Checkpointer:
  """Saves and restores the checkpoints below one directory."""

  def __init__(
    self,
    directory: epath.PathLike,
    *,
    retention: Retention = Retention(),
    record: SaveRecord | None = None,
    read_only: bool = False,
    timeout_secs: int = 1200,
  ):
    """Creates the directory and removes the incomplete checkpoint of an interrupted job.

    Args:
      directory: a directory for checkpoints only.
      retention: which checkpoints are kept after each save.
      record: what the job records about its checkpoints outside of the directory.
      read_only: saves, renames and removes nothing.
      timeout_secs: how long processes wait for each other in a save or restore of a small state, in seconds.

    Raises:
      CheckpointError: the directory cannot be created or written; or it is empty, although `record` says that a
        checkpoint was saved.
    """
    path = epath.Path(directory)
    kind = StoreDirectory if is_remote(path) else CheckpointDirectory
    self._directory = kind(path=path, record=record or SaveRecord())
    self._retention = retention
    self._read_only = read_only
    self._timeout_secs = timeout_secs
    self._is_primary = jax.process_index() == 0
    self._background = ThreadPoolExecutor(1, thread_name_prefix='checkpoint_save')
    self._pending: _Save | None = None
    self._rejected: set[Stamp] = set()
    if read_only:
      barrier('checkpoint_open', limit_s=timeout_secs)
      return

    def open_here() -> str:
      self._directory.open()
      return self._directory.state_name

    try:
      self._state_name = primary_decides(open_here, 'checkpoint_open', limit_s=timeout_secs)
    except PrimaryError as error:
      raise CheckpointChoiceError(str(error)) from error
    except OSError as error:
      reason, remedy = describe_storage_error(error, path) or (str(error), 'check the storage')
      raise CheckpointError(f'checkpoint directory {path} cannot be used: {reason}. {remedy.capitalize()}.') from error

  @property
  def path(self) -> epath.Path:
    return self._directory.path

  @property
  def is_saving(self) -> bool:
    """Whether this process is still writing the last save."""
    return self._pending is not None and not self._pending.done.done()

  def save(
    self,
    step: int,
    state: Any,
    input_state: Mapping[str, Any] | None = None,
    *,
    base: Callable[[], Mapping[str, Any]] | None = None,
  ) -> None:
    """Starts to save `state` as checkpoint `step`; returns once the arrays may be donated.

    Args:
      step: greater than every step in the directory.
      state: a tree of jax.Arrays.
      input_state: JSON, of this process.
      base: returns JSON from which the caller completes a restored state. Every process calls it; as a collective, it
        may take longer than the barriers of the save.

    Raises a CheckpointError: the previous save failed, or this one could not be started.
    """
    self.wait()
    if self._read_only:
      raise CheckpointError(f'{self._directory.path} was opened read-only: no checkpoint can be saved.')
    steps = self._directory.listed_steps()
    if steps and step <= max(steps):
      raise CheckpointError(
        f'step {step} cannot be saved: {self._directory.path} already holds step {max(steps)}. If training restarted '
        'from an earlier step on purpose, move the later checkpoints away first.'
      )
    leaves, limit_s = leaf_entries(state), self._limit_s(num_bytes(state))
    partial = self._directory.partial_path(step)
    try:
      base_state = None if base is None else base()
      own_input = partial / input_file(jax.process_index(), jax.process_count())
      make_directory(own_input.parent)
      write_durably(own_input, _to_json(input_state))
      if base_state is not None and self._is_primary:
        write_durably(partial / _BASE_FILE, _to_json(base_state))
      write = copy_to_host(partial / self._state_name, state)
    except Exception as error:
      raise self._save_error(step, error) from error
    self._pending = _Save(step, self._background.submit(self._complete, step, leaves, write, limit_s), limit_s)

  def wait(self) -> None:
    """Waits until the last save is complete on every process. Raises a CheckpointError if it failed."""
    if self._pending is None:
      return
    step, done, limit_s = self._pending
    started = time.monotonic()
    try:
      done.result()
    except Exception as error:
      self._pending = None
      raise self._save_error(step, error) from error
    self._pending = None  # kept if the wait is interrupted, so that the next call waits again
    barrier(f'checkpoint_saved_{step}', limit_s=limit_s)
    waited = time.monotonic() - started
    if waited > 1:
      logging.info('Waited %.1f s for checkpoint %d to be complete.', waited, step)

  def close(self) -> None:
    """Waits for the last save and ends the background thread; nothing can be saved afterwards."""
    try:
      self.wait()
    finally:
      self._background.shutdown()

  def all_steps(self) -> list[int]:
    """Returns the steps of the complete checkpoints, ascending; their files are not verified."""
    return self._directory.complete_steps()

  def latest_step(self) -> int | None:
    """Returns the newest of `all_steps` that no restore of this object found damaged; None if there is none."""
    steps = [step for step in self.all_steps() if self._directory.stamp(step) not in self._rejected]
    if not steps and (loss := self._directory.describe_loss()):
      logging.log_every_n_seconds(logging.WARNING, '%s', 60, loss)
    return max(steps, default=None)

  def is_fresh(self) -> bool:
    """Returns whether there is no checkpoint, not even a damaged one, and no record of one."""
    return self._directory.is_unused()

  def restore(self, abstract_state: Any, step: int | None = None, *, subtree: str | None = None) -> Restored | None:
    """Restores a state, bit-exactly, onto the shardings of `abstract_state`.

    Args:
      abstract_state: a tree of ShapeDtypeStructs with shardings (default: this process's first device).
      step: None restores the newest undamaged checkpoint, and returns None if no checkpoint was ever saved.
      subtree: the key path of `abstract_state` in the saved state; nothing else is read. None is the whole state.

    Raises a CheckpointError: the checkpoint has a leaf of another name, shape or dtype; the requested step is missing
    or damaged; all checkpoints are damaged; or the checkpoints were lost.
    """
    self.wait()
    limit_s = self._limit_s(num_bytes(abstract_state))
    unreadable: dict[int, DamagedCheckpointError] = {}
    while True:
      chosen = self._choose(step, abstract_state, f'{subtree}/' if subtree else '', unreadable)
      if chosen is None:
        return None
      restored: Restored | None = None
      damage: list[str] | None = None
      try:
        restored = self._read(chosen, abstract_state, subtree)
      except DamagedCheckpointError as error:
        damage = [error.file, error.reason]
      outcomes = gather((restored is not None, damage), 'checkpoint_read', limit_s=limit_s)
      if all(was_read for was_read, _ in outcomes):
        return restored
      damages = [damage for _, damage in outcomes if damage]
      if damages:
        unreadable[chosen] = DamagedCheckpointError(*damages[0])
      else:
        logging.info('Checkpoint %d was deleted while it was read; looking again.', chosen)

  def restore_weights(self, abstract_weights: Any, step: int | None = None, *, subtree: str = 'weights') -> Restored:
    """Restores one subtree: 'weights', or 'learner/ema_weights' for the averaged weights.

    Raises a CheckpointError: as `restore`, and if the directory has no checkpoint.
    """
    restored = self.restore(abstract_weights, step, subtree=subtree)
    if restored is None:
      raise CheckpointError(
        f'{self._directory.path} has no checkpoint to restore weights from: correct the path, or train first.'
      )
    return restored

  def saved_leaves(self, step: int | None = None, *, subtree: str = 'weights') -> tuple[LeafEntry, ...]:
    """Returns the names (below `subtree`), shapes and dtypes in one checkpoint; verifies nothing.

    Raises a CheckpointError: there is no such checkpoint, or no readable one.
    """
    leaves = self._directory.saved_leaves(step)
    if leaves is None:
      which = 'with a readable manifest' if step is None else f'of step {step}'
      raise CheckpointError(
        f'{self._directory.path} has no checkpoint {which}, only steps {self.all_steps()}: correct the path or the '
        'step, or train first.'
      )
    prefix = f'{subtree}/'
    return tuple(leaf._replace(name=leaf.name.removeprefix(prefix)) for leaf in leaves if leaf.name.startswith(prefix))

  def _limit_s(self, num_bytes: int) -> int:
    """Returns how long processes wait for each other in a write or read of `num_bytes`, in seconds."""
    return self._timeout_secs + num_bytes // _SLOWEST_BYTES_PER_S

  def _complete(self, step: int, leaves: tuple[LeafEntry, ...], write: Callable[[], None], limit_s: int) -> None:
    """Runs in the background: writes this process's shards; process 0 publishes the checkpoint after all processes."""
    write()
    barrier(f'checkpoint_written_{step}', limit_s=limit_s)
    if not self._is_primary:
      return
    self._directory.publish(step, leaves, jax.process_count())
    self._directory.record.after_publishing(step)
    self._directory.delete_old(self._retention)

  def _choose(
    self, step: int | None, abstract: Any, prefix: str, unreadable: Mapping[int, DamagedCheckpointError]
  ) -> int | None:
    """Returns the step that every process restores; shares which checkpoints process 0 has rejected as damaged."""
    wanted = [leaf._replace(name=prefix + leaf.name) for leaf in leaf_entries(abstract)]
    rejected = self._rejected if self._read_only else None

    def decide() -> tuple[int | None, list[Stamp]]:
      if step is None and self._directory.is_unused():
        return None, []
      chosen = choose(self._directory, step, wanted, prefix=prefix, rejected=rejected, unreadable=unreadable)
      return chosen, list(self._rejected)

    limit_s = self._limit_s(self._directory.num_bytes() if jax.process_count() > 1 else 0)
    try:
      chosen, stamps = primary_decides(decide, 'checkpoint_decided', limit_s=limit_s)
    except PrimaryError as error:
      raise CheckpointChoiceError(str(error)) from error
    self._rejected.update((step, time) for step, time in stamps)
    return chosen

  def _read(self, step: int, abstract: Any, subtree: str | None) -> Restored | None:
    """Reads a checkpoint; returns None if its owner deletes it meanwhile.

    Raises a DamagedCheckpointError if a shard of this process is missing or its CRC does not match.
    """
    path = self._directory.step_path(step)
    try:
      manifest = read_manifest(path)
      num_processes = manifest.num_processes
      state = read_arrays(
        path / manifest.state_name,
        abstract,
        prefix=f'{subtree}/' if subtree else '',
        is_ocdbt=manifest.is_ocdbt,
      )
      input_states = [json.loads(read_text(path / input_file(index, num_processes))) for index in range(num_processes)]
      has_base = any(entry.path == _BASE_FILE for entry in manifest.files)
      base = json.loads(read_text(path / _BASE_FILE)) if has_base else None
    except Exception as error:
      if self._read_only and not self._directory.has_step(step):
        return None
      if isinstance(error, DamagedCheckpointError):
        raise
      raise CheckpointError(f'checkpoint {path} could not be read: {type(error).__name__}: {error}') from error
    if self._read_only and not self._directory.has_step(step):
      # Its files are deleted after its name. Since then TensorStore may have read deleted chunks of an OCDBT checkpoint
      # as zeros.
      return None
    return Restored(
      step=step,
      state=state,
      input_state=input_states[jax.process_index()] if num_processes == jax.process_count() else None,
      input_states=input_states,
      base=base,
    )

  def _save_error(self, step: int, error: Exception) -> CheckpointSaveError:
    """Removes the files of the failed save and describes the failure."""
    reason, remedy = f'{type(error).__name__}: {error}', ''
    # Before the files are removed, which frees space and inodes.
    if problem := describe_storage_error(error, self._directory.path):
      reason, remedy = problem[0], f', all intact: {problem[1]}, and start the same command again'
    if self._is_primary:
      self._directory.discard_partial(step)
    is_saved = step in self._directory.listed_steps()
    outcome = 'was saved, but recording it or deleting old ones failed' if is_saved else 'could not be saved'
    return CheckpointSaveError(
      f'checkpoint of step {step} {outcome} in {self._directory.path}: {reason}. '
      f'Complete checkpoints: {self.all_steps()}{remedy}.'
    )


def _to_json(input_state: Any) -> str:
  try:
    return json.dumps(input_state) + '\n'
  except (TypeError, ValueError) as error:
    raise UserError(f'input_state must be JSON (dicts, lists, strings, numbers, booleans, None): {error}') from error
