"""CheckpointDirectory: names, renames and deletes the checkpoints below one directory.

    checkpoint_00000100                       complete: gets this name once its manifest is written
    checkpoint_00000200.partial               being written, or left by a kill: removed by the next job
    checkpoint_00000100.deleting              being deleted, or left by a kill: removed by the next job
    checkpoint_00000100.damaged-<file>        set aside by a restore; never read or deleted again

Other names, such as a user's copy `checkpoint_00000100.partial-backup`, are ignored. Nothing here communicates between
processes; only process 0 calls the methods that rename or delete.
"""

from collections.abc import Sequence
import contextlib
import dataclasses
import math
import os
import re

from absl import logging
from etils import epath

from spmd_tasks.checkpoints.manifest import (
  MANIFEST_FILE,
  STATE,
  CheckpointError,
  CheckpointSaveError,
  DamagedCheckpointError,
  LeafEntry,
  read_manifest,
  write_manifest,
)
from spmd_tasks.errors import UserError
from spmd_tasks.files import sync_path

_STEP_DIRECTORY = re.compile(r'checkpoint_(\d+)')
_LEFTOVER = re.compile(r'(checkpoint_\d+)\.(partial|deleting(-\d+)?)')

Stamp = tuple[int, int]


def input_file(process_index: int, num_processes: int) -> str:
  """Returns the path, below a checkpoint, of a process's position in its input."""
  return f'input/process_{process_index}_of_{num_processes}.json'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
  """Which checkpoints a job keeps.

  Attributes:
    max_to_keep: number of newest checkpoints to keep; None keeps all.
    keep_every_n_steps: also keeps checkpoints whose step is a multiple of this number.
    keep_every_hours: also keeps the oldest checkpoint, and then one checkpoint per this many hours.
  """

  max_to_keep: int | None = 3
  keep_every_n_steps: int | None = None
  keep_every_hours: float | None = None

  def __post_init__(self) -> None:
    if self.keep_every_hours is not None and not self.keep_every_hours > 0:
      raise UserError(f'keep_every_hours = {self.keep_every_hours} must be a positive number, or None.')
    for name in ('max_to_keep', 'keep_every_n_steps'):
      if (value := getattr(self, name)) is not None and value < 1:
        raise UserError(f'{name} = {value} must be at least 1, or None.')


class SaveRecord:
  """What a job records about its checkpoints outside of their directory. Called on process 0."""

  def evidence(self) -> str | None:
    """Returns a phrase that names the record of a saved checkpoint; None if there is no record."""
    return None

  def before_publishing(self) -> None:
    """Called before a checkpoint is published. Raises to prevent it, such as if another job has taken over."""

  def after_publishing(self, step: int) -> None:
    """Called in the background after the checkpoint of `step` is published."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointDirectory:
  """The checkpoints below `path`; `record` is what the job records about them."""

  path: epath.Path
  record: SaveRecord = dataclasses.field(default_factory=SaveRecord)

  @property
  def state_name(self) -> str:
    """The directory, below a checkpoint, of the arrays that this job saves."""
    return STATE

  def step_path(self, step: int) -> epath.Path:
    return self.path / f'checkpoint_{step:08d}'

  def partial_path(self, step: int) -> epath.Path:
    return self.path / f'checkpoint_{step:08d}.partial'

  def listed_steps(self) -> dict[int, epath.Path]:
    """Returns every directory named as a complete checkpoint, even if it has no manifest, by ascending step."""
    return dict(sorted((step, path) for path in self._list() if (step := step_of(path)) is not None))

  def complete_steps(self) -> list[int]:
    """Returns the steps that have a manifest, ascending; verifies nothing."""
    return [step for step, path in self.listed_steps().items() if (path / MANIFEST_FILE).exists()]

  def has_step(self, step: int) -> bool:
    """Returns whether the checkpoint of `step` exists, damaged or not. Its deletion makes this false first."""
    return self.step_path(step).exists() or os.path.islink(self.step_path(step))  # also a link to nothing

  def saved_leaves(self, step: int | None) -> tuple[LeafEntry, ...] | None:
    """Returns the leaves in the manifest of a step (None: of the newest readable manifest), or None."""
    for candidate, path in reversed(self.listed_steps().items()):
      if step in (None, candidate):
        with contextlib.suppress(DamagedCheckpointError):
          return read_manifest(path).leaves
    return None

  def stamp(self, step: int) -> Stamp:
    """Returns a step and the time of its manifest (0: none), as a later job may save the step again."""
    try:
      return step, int((self.step_path(step) / MANIFEST_FILE).stat().mtime)
    except OSError:
      return step, 0

  def num_bytes(self) -> int:
    """Estimates the size of all checkpoints by the newest readable manifest; 0 without one."""
    steps = self.listed_steps()
    for path in reversed(steps.values()):
      with contextlib.suppress(DamagedCheckpointError, CheckpointError, OSError):
        return len(steps) * sum(entry.num_bytes for entry in read_manifest(path).files)
    return 0

  def open(self) -> None:
    """Creates the directory and removes partial checkpoints of a killed job. Raises OSError.

    Raises a CheckpointError before that if the checkpoints were lost.
    """
    if not self.damaged():  # otherwise verifying.py names the damaged ones when it chooses
      self.refuse_loss()
    self.path.mkdir(parents=True, exist_ok=True)
    for path in self._list():
      leftover = _LEFTOVER.fullmatch(path.name)
      if leftover and step_of(path.with_name(leftover[1])) is not None and _is_own_directory(path):
        logging.info('Removing %s, left by an interrupted job.', path)
        path.rmtree()

  def describe_loss(self) -> str | None:
    """Returns a sentence if the record says that a checkpoint was saved, but there is none; else None."""
    if self.listed_steps() or not (evidence := self.record.evidence()) or self.listed_steps():
      return None  # listed twice, as a running job may just have saved its first checkpoint
    state = 'holds no complete checkpoint' if self.path.exists() else 'does not exist'
    return (
      f'{self.path} {state}, but {evidence}. Mount its storage, put the checkpoints back, or start in another '
      '--job_log_dir.'
    )

  def publish(self, step: int, leaves: Sequence[LeafEntry], num_processes: int) -> None:
    """Writes the manifest of a partial checkpoint and renames the checkpoint. Raises OSError.

    Raises a CheckpointSaveError if a process has written nothing here.
    """
    partial = self.partial_path(step)
    for index in range(num_processes):
      if not (partial / input_file(index, num_processes)).exists():
        raise CheckpointSaveError(
          f'process {index} of {num_processes} has not written {partial / input_file(index, num_processes)}: choose a '
          'job_log_dir on storage that all processes share'
        )
    write_manifest(partial, step=step, num_processes=num_processes, leaves=leaves)
    self.record.before_publishing()
    partial.rename(self.step_path(step))
    sync_path(self.path)

  def discard_partial(self, step: int) -> None:
    """Removes the files of a failed save; errors are only logged."""
    try:
      if _is_own_directory(self.partial_path(step)):  # rmtree of a FIFO would block
        self.partial_path(step).rmtree()
    except OSError as error:
      logging.error('Could not remove %s: %s', self.partial_path(step), error)

  def delete_old(self, retention: Retention) -> None:
    """Deletes all checkpoints that `retention` does not keep. Raises OSError."""
    if retention.max_to_keep is None:
      return
    every_steps, every_hours = retention.keep_every_n_steps, retention.keep_every_hours
    last_kept_s = -math.inf
    for step in self.complete_steps()[: -retention.max_to_keep]:
      _, saved_s = self.stamp(step)
      if every_hours is not None and saved_s - last_kept_s >= 3600 * every_hours:
        last_kept_s = saved_s
      elif every_steps is None or step % every_steps:
        self._delete(step)

  def set_aside(self, path: epath.Path, suffix: str) -> epath.Path:
    """Renames `path` to `path.suffix`, or `path.suffix-2`, ... if that exists; returns the new path. Raises OSError."""
    target, count = path.parent / f'{path.name}.{suffix}', 1
    while target.exists():
      count += 1
      target = path.parent / f'{path.name}.{suffix}-{count}'
    path.rename(target)
    sync_path(path.parent)
    return target

  def is_unused(self) -> bool:
    """Returns whether the directory has never held a checkpoint."""
    return not self.damaged() and self.describe_loss() is None

  def refuse_loss(self) -> None:
    """Raises a CheckpointError if the checkpoints were lost."""
    if sentence := self.describe_loss():
      raise CheckpointError(sentence)

  def damaged(self) -> list[str]:
    """Returns the names of checkpoints that were set aside as damaged, and of those that were not verified yet."""
    return sorted(path.name for path in self._list() if step_of(path) is not None or '.damaged-' in path.name)

  def _delete(self, step: int) -> None:
    path = self.step_path(step)
    if os.path.islink(path):
      logging.info('Removing the link %s; the checkpoint behind it is kept.', path)
      path.unlink()
      return
    # Renamed first, so that a half-deleted checkpoint never looks like a damaged one.
    self.set_aside(path, 'deleting').rmtree()

  def _list(self) -> list[epath.Path]:
    try:
      return list(self.path.iterdir()) if self.path.is_dir() else []
    except OSError as error:
      raise CheckpointError(f'checkpoint directory {self.path} cannot be listed: {error}.') from error


def step_of(path: epath.Path) -> int | None:
  """Returns the step of a directory with exactly the name of a checkpoint; None for any other path."""
  match = _STEP_DIRECTORY.fullmatch(path.name)
  return int(match[1]) if match and path.name == f'checkpoint_{int(match[1]):08d}' else None


def _is_own_directory(path: epath.Path) -> bool:
  """Returns whether a path is a directory, and not a user's link to one."""
  return path.is_dir() and not os.path.islink(path)
