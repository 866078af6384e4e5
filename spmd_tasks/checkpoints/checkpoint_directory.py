"""CheckpointDirectory: names, renames and deletes the checkpoints below one directory.

    checkpoint_00000100                       complete: renamed to this name with its manifest already in it
    checkpoint_00000200.partial               being written, or left by a kill: removed by the next job
    checkpoint_00000100.deleting              being deleted, or left by a kill: removed by the next job
    checkpoint_00000100.damaged-<file>        set aside by a restore; never read or deleted again

Other names, such as a user's copy `checkpoint_00000100.partial-backup`, are left alone. Nothing here communicates:
process 0 calls the methods that rename or delete.
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
  """The path, below a checkpoint's directory, of a process's position in its input."""
  return f'input/process_{process_index}_of_{num_processes}.json'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
  """Which checkpoints a job keeps: the newest ones, and those that either other rule keeps for good.

  Attributes:
    max_to_keep: number of newest checkpoints; None keeps all.
    keep_every_n_steps: keeps every checkpoint whose step is a multiple of this number.
    keep_every_hours: keeps the oldest checkpoint, and each that was saved this many hours after the last one kept so.
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
    """Returns a phrase that names the file by which a checkpoint was saved here; None if there is none."""
    return None

  def before_publishing(self) -> None:
    """Called before a checkpoint is published. Raises if it must not be: another job has taken the directory."""

  def after_publishing(self, step: int) -> None:
    """Called in the background with the step of each checkpoint that is complete."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointDirectory:
  """The checkpoints below `path`, of a job that records what it saves in `record`."""

  path: epath.Path
  record: SaveRecord = dataclasses.field(default_factory=SaveRecord)

  @property
  def state_name(self) -> str:
    """The name, below a checkpoint, of the arrays that this job saves."""
    return STATE

  def final(self, step: int) -> epath.Path:
    return self.path / f'checkpoint_{step:08d}'

  def partial(self, step: int) -> epath.Path:
    return self.path / f'checkpoint_{step:08d}.partial'

  def claimed_steps(self) -> dict[int, epath.Path]:
    """Every directory with the name of a complete checkpoint, whole or not, by ascending step."""
    return dict(sorted((step, path) for path in self._list() if (step := step_of(path)) is not None))

  def complete_steps(self) -> list[int]:
    """The steps that have a manifest, ascending; nothing is verified."""
    return [step for step, path in self.claimed_steps().items() if (path / MANIFEST_FILE).exists()]

  def holds(self, step: int) -> bool:
    """Whether the checkpoint of `step` is there, whole or not; it is the first thing that a deletion takes away."""
    return self.final(step).exists() or os.path.islink(self.final(step))  # a link to nothing is there, too

  def saved_leaves(self, step: int | None) -> tuple[LeafEntry, ...] | None:
    """The leaf table of a step (None: of the newest checkpoint that has one), or None. Reads nothing else."""
    for candidate, path in reversed(self.claimed_steps().items()):
      if step in (None, candidate):
        with contextlib.suppress(DamagedCheckpointError):
          return read_manifest(path).leaves
    return None

  def stamp(self, step: int) -> Stamp:
    """Identifies the checkpoint of `step` by its manifest's time (0: none), as a later job may save the step again."""
    try:
      return step, int((self.final(step) / MANIFEST_FILE).stat().mtime)
    except OSError:
      return step, 0

  def num_bytes(self) -> int:
    """About the bytes of all checkpoints, from the newest manifest that can be read; 0 without one."""
    steps = self.claimed_steps()
    for path in reversed(steps.values()):
      with contextlib.suppress(DamagedCheckpointError, CheckpointError, OSError):
        return len(steps) * sum(entry.num_bytes for entry in read_manifest(path).files)
    return 0

  def open(self) -> None:
    """Creates the directory and removes checkpoints half-written or half-deleted by a killed job. Raises OSError.

    Raises a CheckpointError before that if the checkpoints were lost.
    """
    if not self.damaged():  # else verifying.py names them when it chooses one
      self.refuse_loss()
    self.path.mkdir(parents=True, exist_ok=True)
    for path in self._list():
      leftover = _LEFTOVER.fullmatch(path.name)
      if leftover and step_of(path.with_name(leftover[1])) is not None and _is_own_directory(path):
        logging.info('Removing %s, left by an interrupted job.', path)
        path.rmtree()

  def describe_loss(self) -> str | None:
    """Returns a sentence if there is evidence of a saved checkpoint, but no checkpoint; else None."""
    if self.claimed_steps() or not (evidence := self.record.evidence()) or self.claimed_steps():
      return None  # listed twice, as a running job may just have saved its first checkpoint
    what = 'holds no complete checkpoint' if self.path.exists() else 'does not exist'
    return (
      f'{self.path} {what}, but {evidence}. Mount its storage, or put the checkpoints back; or begin at step 0 in '
      'another --job_log_dir.'
    )

  def complete(self, step: int, leaves: Sequence[LeafEntry], num_processes: int) -> None:
    """Writes the manifest of a partial checkpoint and gives it its final name. Raises OSError.

    Raises a CheckpointSaveError if a process has written nothing here, so that its part would be missing.
    """
    partial = self.partial(step)
    for index in range(num_processes):
      if not (partial / input_file(index, num_processes)).exists():
        raise CheckpointSaveError(
          f'process {index} of {num_processes} has written no {input_file(index, num_processes)} into {partial}: that '
          'directory is perhaps not shared by all processes; choose one on storage that every machine mounts'
        )
    write_manifest(partial, step=step, num_processes=num_processes, leaves=leaves)
    self.record.before_publishing()
    partial.rename(self.final(step))
    sync_path(self.path)

  def discard_partial(self, step: int) -> None:
    """Removes the files of a failed save; only logs an error of doing so."""
    try:
      if _is_own_directory(self.partial(step)):  # rmtree of a FIFO would block
        self.partial(step).rmtree()
    except OSError as error:
      logging.error('Could not remove %s: %s', self.partial(step), error)

  def delete_old(self, retention: Retention) -> None:
    """Deletes all checkpoints that `retention` does not keep. Raises OSError."""
    if retention.max_to_keep is None:
      return
    every_steps, every_hours = retention.keep_every_n_steps, retention.keep_every_hours
    kept_at = -math.inf
    for step in self.complete_steps()[: -retention.max_to_keep]:
      _, saved_at = self.stamp(step)
      if every_hours is not None and saved_at - kept_at >= 3600 * every_hours:
        kept_at = saved_at
      elif every_steps is None or step % every_steps:
        self._delete(step)

  def set_aside(self, path: epath.Path, suffix: str) -> epath.Path:
    """Renames `path` to `path.suffix` (`-2`, ... where that is taken); returns the new path. Raises OSError."""
    target, count = path.parent / f'{path.name}.{suffix}', 1
    while target.exists():
      count += 1
      target = path.parent / f'{path.name}.{suffix}-{count}'
    path.rename(target)
    sync_path(path.parent)
    return target

  def is_unused(self) -> bool:
    """Whether the directory has never held a checkpoint."""
    return not self.damaged() and self.describe_loss() is None

  def refuse_loss(self) -> None:
    """Raises a CheckpointError if the checkpoints were lost."""
    if sentence := self.describe_loss():
      raise CheckpointError(sentence)

  def damaged(self) -> list[str]:
    """The names of checkpoints that are set aside as damaged, and of those that have not been looked at."""
    return sorted(path.name for path in self._list() if step_of(path) is not None or '.damaged-' in path.name)

  def _delete(self, step: int) -> None:
    path = self.final(step)
    if os.path.islink(path):
      logging.info('Removing the link %s; the checkpoint that it leads to stays.', path)
      path.unlink()
      return
    # Renamed first: a half-deleted checkpoint must never look like a damaged one.
    self.set_aside(path, 'deleting').rmtree()

  def _list(self) -> list[epath.Path]:
    try:
      return list(self.path.iterdir()) if self.path.is_dir() else []
    except OSError as error:
      raise CheckpointError(f'checkpoint directory {self.path} cannot be listed: {error}.') from error


def step_of(path: epath.Path) -> int | None:
  """The step of a directory with the very name that a checkpoint is given; None for any other path."""
  match = _STEP_DIRECTORY.fullmatch(path.name)
  return int(match[1]) if match and path.name == f'checkpoint_{int(match[1]):08d}' else None


def _is_own_directory(path: epath.Path) -> bool:
  """Whether it is a directory and no link to one: links are made by people."""
  return path.is_dir() and not os.path.islink(path)
