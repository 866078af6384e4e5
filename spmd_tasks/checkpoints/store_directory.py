"""StoreDirectory: the checkpoints of a directory in an object store, which has no renames.

    checkpoint_00000100/
      state_3f2a.../           the arrays (arrays.py)
      input/process_0_of_2.json, base.json
      manifest.json            written last, by a conditional write: from then on there is a checkpoint
      manifest.damaged-<file>.json   instead: set aside by a restore; never read or deleted again

A directory without a manifest is no checkpoint, and the next job deletes it. A checkpoint is deleted by deleting its
manifest first. Each job writes arrays below a name of its own: a job that has lost its directory to another one
(programs/store_claim.py), and still writes, changes no checkpoint. The manifest has no digests of the arrays' objects,
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

  def partial(self, step: int) -> epath.Path:
    return self.final(step)

  def claimed_steps(self) -> dict[int, epath.Path]:
    paths = super().claimed_steps()
    with ThreadPoolExecutor(NUM_HASH_THREADS) as pool:
      has_manifest = pool.map(lambda path: exists(path / MANIFEST_FILE), paths.values())
      return {step: path for (step, path), is_complete in zip(paths.items(), has_manifest) if is_complete}

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

  def complete(self, step: int, leaves: Sequence[LeafEntry], num_processes: int) -> None:
    path = self.final(step)
    sizes = sizes_below(path)
    missing = [name for i in range(num_processes) if (name := input_file(i, num_processes)) not in sizes]
    if missing:
      self.record.before_publishing()  # another job that has taken the directory has deleted it
      raise CheckpointSaveError(f'there is no {missing[0]} in {path}: that process writes elsewhere')
    entries = []
    for name in sorted(sizes):
      if name.startswith(f'{STATE}_') and not name.startswith(f'{self.state_name}/'):
        continue  # another job has lost the directory, and still writes
      digest = '' if name.startswith(f'{STATE}_') else hashlib.sha256(read(path / name)).hexdigest()
      entries.append(FileEntry(path=name, num_bytes=sizes[name], digest=digest))
    text = manifest_text(step=step, num_processes=num_processes, leaves=leaves, files=entries)
    flush()  # the rows of the steps before it would be missing for ever
    self.record.before_publishing()
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
    aside = [manifest for path in self._without_manifest(complete) for manifest in glob_below(path, _DAMAGED)]
    return sorted([path.name for path in complete.values()] + [f'{path.parent.name}/{path.name}' for path in aside])

  def _list(self) -> list[epath.Path]:
    return glob_below(self.path, '*')

  def _without_manifest(self, complete: Mapping[int, epath.Path]) -> list[epath.Path]:
    return [path for step, path in super().claimed_steps().items() if step not in complete]

  def _delete(self, step: int) -> None:
    (self.final(step) / MANIFEST_FILE).unlink(missing_ok=True)
    self.final(step).rmtree(missing_ok=True)
