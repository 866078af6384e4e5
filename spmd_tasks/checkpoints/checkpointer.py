"""Checkpointer: saves and restores a tree of sharded arrays, asynchronously, with digests, on any mesh.

One checkpoint is one directory:

    checkpoint_00000100/
      state/                   the arrays, by Orbax (OCDBT), each under its key path
      base.json                where the frozen weights are, if the checkpoint has only those that are trained
      input/process_0_of_2.json   where each process stands in its input
      manifest.json            size and digest of every file, the leaf table; written last

A checkpoint is written as `checkpoint_00000100.partial` and renamed when it is complete, so a kill at any time leaves
the earlier checkpoints and a `.partial`, which the next job removes. `save` returns when the arrays are copied to the
host; Orbax's write, the hashing and the rename run in the background. The next `save` or `wait` waits for them first,
and raises their error.

A restore verifies every byte (verifying.py). A damaged checkpoint is renamed to `checkpoint_00000100.damaged-<file>`,
and the one before it is used; a step requested by number raises instead.

With several processes (one shared directory), every process calls every method, in the same order, from its main
thread. Each process hashes the array files that it wrote. Process 0 alone writes manifests, deletes, renames and
decides which step is restored. An error is raised on the process that has it; the job's failure handling ends the
others. Processes wait for each other, and for Orbax's write, for at most `timeout_secs` plus 10 s per GB.

The caller owns the directory (programs/job_directory.py). A second reader (eval, decode) passes `read_only=True`. If
the owner deletes a checkpoint while the reader reads it, the reader takes the newest one that is left. It reads a
damaged checkpoint once, and does not report it as `latest_step`.
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

from spmd_tasks.checkpoints.checkpoint_directory import CheckpointDirectory, Stamp, input_file
from spmd_tasks.checkpoints.manifest import (
  STATE,
  CheckpointChoiceError,
  CheckpointError,
  CheckpointSaveError,
  LeafEntry,
  leaf_entries,
  read_manifest,
)
from spmd_tasks.checkpoints.orbax_arrays import OrbaxArrays, num_bytes
from spmd_tasks.distributed import barrier
from spmd_tasks.distributed.agreement import PrimaryError, all_agree, primary_decides
from spmd_tasks.errors import UserError
from spmd_tasks.files import is_remote, make_directory, read_text, write_durably

__all__ = ['CheckpointError', 'Checkpointer', 'Restored']

_BASE_FILE = 'base.json'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
  """A restored checkpoint: `state` is the tree that was asked for, of jax.Arrays with its shardings.

  `input_states` are what the processes that saved it passed to `save`, in their order; `input_state` is this process's
  own, None if the number of processes has changed. `base` is what the function `base` returned when it was saved.
  """

  step: int
  state: Any
  input_state: dict[str, Any] | None
  input_states: list[dict[str, Any] | None]
  base: dict[str, Any] | None = None


class Checkpointer:
  """Saves and restores the checkpoints below one directory."""

  def __init__(
    self,
    directory: epath.PathLike,
    *,
    max_to_keep: int | None = 3,
    keep_every_n_steps: int | None = None,
    keep_every_hours: float | None = None,
    read_only: bool = False,
    on_saved: Callable[[int], None] | None = None,
    witness: Callable[[], str | None] = lambda: None,
    before_publishing: Callable[[], None] = lambda: None,
    base: Callable[[], Mapping[str, Any]] | None = None,
    timeout_secs: int = 1200,
  ):
    """Creates the directory and removes the incomplete checkpoint of an interrupted job.

    Args:
      directory: a directory for checkpoints only.
      max_to_keep: number of newest checkpoints to keep; None keeps all.
      keep_every_n_steps: also keeps every checkpoint whose step is a multiple of this number.
      keep_every_hours: also keeps the oldest checkpoint, and the next one that was saved so many hours after the last
        of those.
      read_only: saves, renames and removes nothing.
      on_saved: called on process 0, in the background, with the step of each checkpoint that is complete.
      witness, before_publishing: see CheckpointDirectory; called on process 0.
      base: returns JSON that the checkpoint keeps: what its state is to be completed with. Every process calls it at
        each save; it may wait, with all of them, for longer than the barriers of the save.
      timeout_secs: seconds that processes wait for each other around one save or restore of a small state.

    Raises:
      CheckpointError: the directory cannot be created or written; or it is empty, and there is a witness of a save.
      UserError: a setting is out of range.
    """
    if keep_every_hours is not None and not keep_every_hours > 0:
      raise UserError(f'keep_every_hours = {keep_every_hours} must be a positive number, or None.')
    for name, value in (('max_to_keep', max_to_keep), ('keep_every_n_steps', keep_every_n_steps)):
      if value is not None and value < 1:
        raise UserError(f'{name} = {value} must be at least 1, or None.')
    path = epath.Path(directory)
    self._arrays: Any
    kind: type[CheckpointDirectory] = CheckpointDirectory
    if is_remote(path):
      from spmd_tasks.checkpoints.store_checkpoints import StoreArrays, StoreDirectory

      kind, self._arrays = StoreDirectory, StoreArrays(timeout_secs)
    else:
      self._arrays = OrbaxArrays(timeout_secs)
    self._directory = kind(path=path, witness=witness, before_publishing=before_publishing)
    self._max_to_keep = max_to_keep
    self._kept_beside: dict[str, Any] = {'keep_every_n_steps': keep_every_n_steps, 'keep_every_hours': keep_every_hours}
    self._read_only = read_only
    self._base = base
    self._on_saved = on_saved
    self._is_primary = jax.process_index() == 0
    self._background = ThreadPoolExecutor(1, thread_name_prefix='checkpoint_seal')
    self._pending: tuple[int, Future[None]] | None = None
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
      from spmd_tasks.storage_problems import describe_storage_error

      path = self._directory.path
      reason, remedy = describe_storage_error(error, path) or (str(error), 'check the storage')
      raise CheckpointError(f'checkpoint directory {path} cannot be used: {reason}. {remedy.capitalize()}.') from error

  @property
  def path(self) -> epath.Path:
    return self._directory.path

  @property
  def is_saving(self) -> bool:
    """Whether the last save is still being written by this process."""
    return self._pending is not None and not self._pending[1].done()

  def prepare(self) -> None:
    """Makes everything that the first `save` needs, such as the import of Orbax."""
    self._arrays.prepare()

  def save(self, step: int, state: Any, input_state: Mapping[str, Any] | None = None) -> None:
    """Starts to save `state` as checkpoint `step`; returns when the arrays may be donated.

    `step` is greater than every step in the directory; `input_state` is JSON, this process's own.

    Raises a CheckpointError: the save before this one failed, or this one could not be started.
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
      base = None if self._base is None else self._base()
      own_input = partial / input_file(jax.process_index(), jax.process_count())
      make_directory(own_input.parent)
      write_durably(own_input, _to_json(input_state))
      if base is not None and self._is_primary:
        write_durably(partial / _BASE_FILE, _to_json(base))
      self._arrays.write(partial / self._state_name, state)
    except Exception as error:
      raise self._save_error(step, error) from error
    self._pending = step, self._background.submit(self._seal, step, leaves)

  def wait(self) -> None:
    """Returns when the last save is complete on disk, on every process. Raises a CheckpointError if it failed."""
    if self._pending is None:
      return
    step, sealed = self._pending
    started = time.monotonic()
    try:
      sealed.result()
    except Exception as error:
      self._pending = None
      raise self._save_error(step, error) from error
    self._pending = None  # not where the wait was interrupted: the next one waits again
    barrier(f'checkpoint_sealed_{step}', limit_s=self._arrays.write_limit_s)
    waited = time.monotonic() - started
    if waited > 1:
      logging.info('Waited %.1f s for checkpoint %d to be complete.', waited, step)

  def close(self) -> None:
    """Waits for the last save and ends the background threads. The object cannot be used afterwards."""
    try:
      self.wait()
    finally:
      self._background.shutdown()
      self._arrays.close()

  def all_steps(self) -> list[int]:
    """The steps of the complete checkpoints, ascending (their files are not verified here)."""
    return self._directory.complete_steps()

  def latest_step(self) -> int | None:
    """The newest of `all_steps` that this object has not found damaged; None if there is none."""
    steps = [step for step in self.all_steps() if self._directory.stamp(step) not in self._rejected]
    if not steps and (loss := self._directory.loss()):
      logging.log_every_n_seconds(logging.WARNING, '%s', 60, loss)
    return max(steps, default=None)

  def is_fresh(self) -> bool:
    """Whether there is no checkpoint, whole or damaged, and nothing says that one was ever saved."""
    return self._directory.is_unused()

  def restore(self, abstract_state: Any, step: int | None = None, *, subtree: str | None = None) -> Restored | None:
    """Restores a state, bit-exactly, onto the shardings of `abstract_state`.

    Args:
      abstract_state: a tree of ShapeDtypeStructs with shardings (none: this process's first device).
      step: None restores the newest checkpoint that is not damaged; then None is returned if there has never been one.
      subtree: the key path of `abstract_state` in the saved state, of which nothing else is read; None: the whole.

    Raises a CheckpointError: the state differs from the checkpoint in any leaf's name, shape or dtype; the step that
    was asked for is missing or damaged; there are checkpoints, and none that is whole; or there is none any more.
    """
    self.wait()
    while True:
      chosen = self._choose(step, abstract_state, prefix=f'{subtree}/' if subtree else '')
      if chosen is None:
        return None
      restored = self._read(chosen, abstract_state, subtree)
      limit_s = self._arrays.limit_s(num_bytes(abstract_state))
      if all_agree(restored is not None, 'checkpoint_read', limit_s=limit_s):
        return restored
      logging.info('Checkpoint %d was deleted while it was read; looking again.', chosen)

  def restore_weights(self, abstract_weights: Any, step: int | None = None, *, subtree: str = 'weights') -> Restored:
    """Restores one subtree: 'weights', or 'learner/ema_weights' for the averaged ones.

    Raises a CheckpointError: as `restore`; also if the directory has no checkpoint.
    """
    restored = self.restore(abstract_weights, step, subtree=subtree)
    if restored is None:
      raise CheckpointError(
        f'{self._directory.path} has no checkpoint to restore weights from: correct the path, or train first.'
      )
    return restored

  def saved_leaves(self, step: int | None = None, *, subtree: str = 'weights') -> tuple[LeafEntry, ...]:
    """The names (below `subtree`), shapes and dtypes of one checkpoint; nothing is verified.

    Raises a CheckpointError: there is no such checkpoint, or none that can be read.
    """
    leaves = self._directory.saved_leaves(step)
    if leaves is None:
      which = 'that can be read' if step is None else f'of step {step}'
      raise CheckpointError(
        f'{self._directory.path} has no checkpoint {which}; it has those of {self.all_steps()}: correct the path or '
        'the step, or train first.'
      )
    prefix = f'{subtree}/'
    return tuple(leaf._replace(name=leaf.name.removeprefix(prefix)) for leaf in leaves if leaf.name.startswith(prefix))

  def _seal(self, step: int, leaves: tuple[LeafEntry, ...]) -> None:
    """Runs in the background: waits for Orbax, hashes what this process wrote, and completes the checkpoint."""
    # Returns when the arrays of all processes are written; each process wrote its input state before that.
    self._arrays.wait_until_written()
    if not self._is_primary:
      self._directory.write_digests(step, jax.process_index())
    barrier(f'checkpoint_hashed_{step}', limit_s=self._arrays.write_limit_s)
    if not self._is_primary:
      return
    self._directory.complete(step, leaves, jax.process_count())
    if self._on_saved is not None:
      self._on_saved(step)
    if self._max_to_keep is not None:
      self._directory.delete_old(max_to_keep=self._max_to_keep, **self._kept_beside)

  def _choose(self, step: int | None, abstract: Any, *, prefix: str) -> int | None:
    """Returns the verified step that every process restores, and shares what process 0 found damaged."""
    wanted = [leaf._replace(name=prefix + leaf.name) for leaf in leaf_entries(abstract)]

    def decide() -> tuple[int | None, list[Stamp]]:
      rejected = self._rejected if self._read_only else None
      if step is None and self._directory.is_unused():
        return None, []
      from spmd_tasks.checkpoints.verifying import choose

      return choose(self._directory, step, wanted, prefix=prefix, rejected=rejected), list(self._rejected)

    limit_s = self._arrays.limit_s(self._directory.num_bytes() if jax.process_count() > 1 else 0)
    try:
      chosen, rejected = primary_decides(decide, 'checkpoint_decided', limit_s=limit_s)
    except PrimaryError as error:
      raise CheckpointChoiceError(str(error)) from error
    self._rejected.update((step, time) for step, time in rejected)
    return chosen

  def _read(self, step: int, abstract: Any, subtree: str | None) -> Restored | None:
    """Reads a verified checkpoint; returns None if its owner has deleted it in the meantime."""
    path = self._directory.final(step)
    try:
      manifest = read_manifest(path)
      num_processes, reader = manifest.num_processes, self._arrays
      if manifest.state_name != STATE and not is_remote(path):  # copied from a store to this disk
        from spmd_tasks.checkpoints.store_checkpoints import StoreArrays

        reader = StoreArrays(1)
      state = reader.read(path / manifest.state_name, abstract, subtree)
      input_states = [json.loads(read_text(path / input_file(index, num_processes))) for index in range(num_processes)]
      has_base = any(entry.path == _BASE_FILE for entry in manifest.files)
      base = json.loads(read_text(path / _BASE_FILE)) if has_base else None
    except Exception as error:
      if self._read_only and not self._directory.holds(step):
        return None
      raise CheckpointError(f'checkpoint {path} could not be read: {type(error).__name__}: {error}') from error
    if self._read_only and not self._directory.holds(step):
      # Its files are deleted after its name: as long as that is there nothing was missing, and from then on TensorStore
      # may have read chunks that are gone as zeros.
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
    if self._is_primary:
      self._directory.discard_partial(step)
    saved = step in self._directory.claimed_steps()
    what = 'was saved, but what follows a save failed' if saved else 'could not be saved'
    reason, remedy = f'{type(error).__name__}: {error}', ''
    from spmd_tasks.storage_problems import describe_storage_error

    if problem := describe_storage_error(error, self._directory.path):
      reason, remedy = problem[0], f', all intact: {problem[1]}, and start the same command again'
    return CheckpointSaveError(
      f'checkpoint of step {step} {what} in {self._directory.path}: {reason}. '
      f'Complete checkpoints: {self.all_steps()}{remedy}.'
    )


def _to_json(input_state: Any) -> str:
  try:
    return json.dumps(input_state) + '\n'
  except (TypeError, ValueError) as error:
    raise UserError(f'input_state must be JSON (dicts, lists, strings, numbers, booleans, None): {error}') from error
