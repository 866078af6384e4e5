"""StoreDirectory: names and deletes the checkpoints in an object store, which has no renames.

    checkpoint_00000100/
      state_3f2a.../           the arrays (arrays.py)
      input/process_0_of_2.json, base.json
      manifest.json            written last, by a conditional write; the checkpoint is then complete
      manifest.damaged-<file>.json   in its place if a restore set the checkpoint aside; never read or deleted again

A directory without a manifest is not a checkpoint, and the next job deletes it. To delete a checkpoint, its manifest is
deleted first. Each job writes its arrays below a random name: a job that lost its lock to another one
(programs/job_lock.py) and is still writing changes no checkpoint. The manifest has no digests of the arrays' objects,
whose CRCs are checked as they are read.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import functools
import hashlib
import secrets

from absl import logging
from etils import epath

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
from spmd_tasks.files import glob_below
from spmd_tasks.stores import create, exists, modified_s, read, sizes_below, write

_DAMAGED = 'manifest.damaged-*'


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreDirectory(CheckpointDirectory):
  """The checkpoints below `path`, which is in an object store."""

  @functools.cached_property
  def state_name(self) -> str:
    return f'{STATE}_{secrets.token_hex(6)}'

  def partial_path(self, step: int) -> epath.Path:
    return self.step_path(step)

  def listed_steps(self) -> dict[int, epath.Path]:
    paths = super().listed_steps()
    with ThreadPoolExecutor(NUM_HASH_THREADS) as pool:
      has_manifest = pool.map(lambda path: exists(path / MANIFEST_FILE), paths.values())
      return {step: path for (step, path), is_complete in zip(paths.items(), has_manifest) if is_complete}

  def complete_steps(self) -> list[int]:
    return list(self.listed_steps())

  def has_step(self, step: int) -> bool:
    return exists(self.step_path(step) / MANIFEST_FILE)

  def stamp(self, step: int) -> Stamp:
    try:
      return step, int(modified_s(self.step_path(step) / MANIFEST_FILE))
    except FileNotFoundError:
      return step, 0

  def open(self) -> None:
    complete = self.listed_steps()
    incomplete = self._without_manifest(complete)
    leftovers = [path for path in incomplete if not glob_below(path, _DAMAGED)]
    if not complete and leftovers == incomplete:
      self.refuse_loss()
    for path in leftovers:
      logging.info('Removing %s, left by an interrupted job.', path)
      path.rmtree(missing_ok=True)

  def is_unused(self) -> bool:
    return not self.listed_steps() and super().is_unused()

  def publish(self, step: int, leaves: Sequence[LeafEntry], num_processes: int) -> None:
    path = self.step_path(step)
    sizes = sizes_below(path)
    missing = [name for i in range(num_processes) if (name := input_file(i, num_processes)) not in sizes]
    if missing:
      self.record.before_publishing()  # raises if another job has taken over and deleted the file
      raise CheckpointSaveError(
        f'{path / missing[0]} is missing: choose a job_log_dir that all processes share, in one bucket'
      )
    entries = []
    for name in sorted(sizes):
      if name.startswith(f'{STATE}_') and not name.startswith(f'{self.state_name}/'):
        continue  # of a job that lost its lock and is still writing
      digest = '' if name.startswith(f'{STATE}_') else hashlib.sha256(read(path / name)).hexdigest()
      entries.append(FileEntry(path=name, num_bytes=sizes[name], digest=digest))
    text = manifest_text(step=step, num_processes=num_processes, leaves=leaves, files=entries)
    flush()  # the metrics of earlier steps, which no later job writes again
    self.record.before_publishing()
    if not create(path / MANIFEST_FILE, text.encode()):
      raise CheckpointSaveError(f'another job has saved step {step} in {self.path}')

  def discard_partial(self, step: int) -> None:
    arrays = self.step_path(step) / self.state_name  # other files may be of a job that has taken over
    try:
      if not self.has_step(step) or read_manifest(self.step_path(step)).state_name != self.state_name:
        arrays.rmtree(missing_ok=True)
    except (OSError, CheckpointError) as error:
      logging.error('Could not remove %s: %s', arrays, error)

  def set_aside(self, path: epath.Path, suffix: str) -> epath.Path:
    aside = path / f'manifest.{suffix}.json'
    write(aside, read(path / MANIFEST_FILE))
    (path / MANIFEST_FILE).unlink(missing_ok=True)  # missing if an earlier attempt's response was lost
    return aside

  def damaged(self) -> list[str]:
    complete = self.listed_steps()
    aside = [manifest for path in self._without_manifest(complete) for manifest in glob_below(path, _DAMAGED)]
    return sorted([path.name for path in complete.values()] + [f'{path.parent.name}/{path.name}' for path in aside])

  def _list(self) -> list[epath.Path]:
    return glob_below(self.path, '*')

  def _without_manifest(self, complete: Mapping[int, epath.Path]) -> list[epath.Path]:
    return [path for step, path in super().listed_steps().items() if step not in complete]

  def _delete(self, step: int) -> None:
    (self.step_path(step) / MANIFEST_FILE).unlink(missing_ok=True)
    self.step_path(step).rmtree(missing_ok=True)
