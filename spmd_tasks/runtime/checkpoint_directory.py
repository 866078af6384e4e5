"""The checkpoints below one directory: their names, which of them are whole, setting aside and deleting.

    checkpoint_00000100                       complete: renamed to this name with its manifest already in it
    checkpoint_00000200.partial               being written, or left by a kill: removed by the next job
    checkpoint_00000100.deleting              being deleted, or left by a kill: removed by the next job
    checkpoint_00000100.damaged-<file>        set aside on restore; never read or deleted again

Nothing here knows of Orbax or of other processes: one process calls what renames or deletes.
"""

from collections.abc import Sequence
import dataclasses
import re
import time

from absl import logging
from etils import epath

from spmd_tasks.runtime.checkpoint_errors import CheckpointError
from spmd_tasks.runtime.durable_files import sync_path
from spmd_tasks.runtime.manifest import (
  MANIFEST_FILE,
  DamagedCheckpointError,
  LeafEntry,
  describe_mismatches,
  leaf_mismatches,
  read_manifest,
  verify_files,
  write_manifest,
)

_STEP_DIRECTORY = re.compile(r'checkpoint_(\d+)')
_ANY_DIRECTORY = re.compile(r'checkpoint_\d+\.(partial|deleting|damaged-)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointDirectory:
  """The checkpoints below `path`; `num_hash_threads` files are hashed at a time."""

  path: epath.Path
  num_hash_threads: int

  def final(self, step: int) -> epath.Path:
    return self.path / f'checkpoint_{step:08d}'

  def partial(self, step: int) -> epath.Path:
    return self.path / f'checkpoint_{step:08d}.partial'

  def claimed_steps(self) -> dict[int, epath.Path]:
    """Every directory with the name of a complete checkpoint, whole or not, by ascending step."""
    found = {_step_of(path): path for path in self._list()}
    return {step: found[step] for step in sorted(step for step in found if step is not None)}

  def complete_steps(self) -> list[int]:
    """The steps that have a manifest, ascending; nothing is verified."""
    return [step for step, path in self.claimed_steps().items() if (path / MANIFEST_FILE).exists()]

  def open(self) -> None:
    """Creates the directory and removes what an interrupted job left half-written or half-deleted. Raises OSError."""
    self.path.mkdir(parents=True, exist_ok=True)
    for path in self._list():
      kind = _ANY_DIRECTORY.match(path.name)
      if kind and kind[1] in ('partial', 'deleting'):
        logging.info('Removing %s, left by an interrupted job.', path)
        path.rmtree()

  def complete(self, step: int, leaves: Sequence[LeafEntry], num_processes: int) -> None:
    """Writes the manifest of a partial checkpoint and gives it its final name. Raises OSError."""
    partial = self.partial(step)
    write_manifest(partial, step=step, num_processes=num_processes, leaves=leaves, num_threads=self.num_hash_threads)
    partial.rename(self.final(step))
    sync_path(self.path)

  def discard_partial(self, step: int) -> None:
    """Removes what a failed save has left; a failure to do so is logged only."""
    try:
      if self.partial(step).exists():
        self.partial(step).rmtree()
    except OSError as error:
      logging.error('Could not remove %s: %s', self.partial(step), error)

  def delete_old(self, *, max_to_keep: int, keep_every_n_steps: int | None) -> None:
    """Keeps the newest `max_to_keep` checkpoints and every step that `keep_every_n_steps` divides. Raises OSError."""
    for step in self.complete_steps()[:-max_to_keep]:
      if keep_every_n_steps is None or step % keep_every_n_steps:
        # Renamed first: a half-deleted checkpoint must never look like a damaged one.
        self.set_aside(self.final(step), 'deleting').rmtree()

  def set_aside(self, path: epath.Path, suffix: str) -> epath.Path:
    """Renames `path` to `path.suffix` (`-2`, ... where that is taken); returns the new path. Raises OSError."""
    target, count = path.parent / f'{path.name}.{suffix}', 1
    while target.exists():
      count += 1
      target = path.parent / f'{path.name}.{suffix}-{count}'
    path.rename(target)
    sync_path(path.parent)
    return target

  def choose(self, step: int | None, wanted: Sequence[LeafEntry], *, prefix: str, read_only: bool) -> int | None:
    """The step to restore, every byte of it verified; None if the directory has never held a checkpoint.

    Args:
      step: the step that was asked for; None for the newest that is whole (damaged ones on the way are set aside).
      wanted: the leaves that will be restored.
      prefix: the checkpoint's leaves whose names begin with it must be exactly `wanted`.
      read_only: skip damaged checkpoints without renaming them.

    Raises:
      CheckpointError: see `Checkpointer.restore`.
      OSError: a file is there but cannot be read.
    """
    steps = self.claimed_steps()
    if step is not None:
      if step not in steps:
        raise CheckpointError(f'{self.path} has no checkpoint of step {step}; it has {list(steps)}.')
      try:
        self._verify(steps[step], wanted, prefix)
      except DamagedCheckpointError as damage:
        whole = [other for other in self.complete_steps() if other != step]
        raise CheckpointError(
          f'checkpoint {steps[step]} is damaged: {damage}. Other steps: {whole}. Restore one of them, or give no step '
          'to use the newest that is whole.'
        ) from damage
      return step
    for candidate, path in reversed(steps.items()):
      try:
        self._verify(path, wanted, prefix)
        return candidate
      except DamagedCheckpointError as damage:
        if read_only:
          logging.error('Checkpoint %s is damaged and skipped: %s.', path, damage)
        else:
          aside = self.set_aside(path, f'damaged-{damage.file.replace("/", "_")}')
          logging.error('Checkpoint %s is damaged: %s. It is set aside as %s.', path, damage, aside.name)
    damaged = sorted(path.name for path in self._list() if _step_of(path) is not None or '.damaged-' in path.name)
    if damaged:
      raise CheckpointError(
        f'{self.path} has no checkpoint that is whole; damaged: {damaged}. Repair one and remove the suffix from '
        'its name, or train in a new directory.'
      )
    return None

  def _verify(self, path: epath.Path, wanted: Sequence[LeafEntry], prefix: str) -> None:
    """Refuses another leaf table before reading any array; then reads and digests every file."""
    started = time.monotonic()
    manifest = read_manifest(path)
    if _step_of(path) != manifest.step:
      raise DamagedCheckpointError(MANIFEST_FILE, f'belongs to step {manifest.step}')
    saved = [leaf for leaf in manifest.leaves if leaf.name.startswith(prefix)]
    lines = leaf_mismatches(saved, wanted)
    if lines:
      raise CheckpointError(
        f'checkpoint {path} does not fit the experiment:\n{describe_mismatches(lines)}\nRestore it with the experiment '
        'and settings that saved it (config.json beside it), or train in a new job_log_dir.'
      )
    verify_files(path, manifest, num_threads=self.num_hash_threads)
    num_bytes = sum(entry.num_bytes for entry in manifest.files)
    logging.info('Verified %s: %.3f GB in %.1f s.', path, num_bytes / 1e9, time.monotonic() - started)

  def _list(self) -> list[epath.Path]:
    try:
      return list(self.path.iterdir()) if self.path.is_dir() else []
    except OSError as error:
      raise CheckpointError(f'checkpoint directory {self.path} cannot be listed: {error}.') from error


def _step_of(path: epath.Path) -> int | None:
  match = _STEP_DIRECTORY.fullmatch(path.name)
  return int(match[1]) if match else None
