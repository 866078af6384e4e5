"""Chooses the checkpoint to restore: compares its leaves with the wanted ones, and every file with the manifest.

The shards of arrays are verified later, as they are read (arrays.py). If that fails, the caller chooses again and
passes the damage.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
import time
import types

from absl import logging
from etils import epath

from spmd_tasks.checkpoints.checkpoint_directory import CheckpointDirectory, Stamp, step_of
from spmd_tasks.checkpoints.manifest import (
  MANIFEST_FILE,
  NO_FILE,
  NUM_HASH_THREADS,
  CheckpointError,
  DamagedCheckpointError,
  FileEntry,
  LeafEntry,
  Manifest,
  digest_file,
  read_manifest,
)
from spmd_tasks.files import is_remote
from spmd_tasks.storage_problems import describe_storage_error
from spmd_tasks.stores import sizes_below

_MAX_LISTED = 10
_MAX_SUFFIX_CHARS = 100  # a file name has at most 255 bytes


def choose(
  directory: CheckpointDirectory,
  step: int | None,
  wanted: Sequence[LeafEntry],
  *,
  prefix: str,
  rejected: set[Stamp] | None = None,
  unreadable: Mapping[int, DamagedCheckpointError] = types.MappingProxyType({}),
) -> int | None:
  """Returns the step to restore; None if the directory has never held a checkpoint.

  Args:
    directory: the checkpoints.
    step: the requested step; None for the newest undamaged checkpoint. Newer damaged ones are set aside.
    wanted: the leaves to restore.
    prefix: the checkpoint's leaves with this prefix must be exactly `wanted`.
    rejected: of a reader that does not own the directory. Nothing is renamed then: damaged checkpoints are added to
      this set and not read again, and the directory is listed again if its owner deletes a checkpoint.
    unreadable: the damage of steps whose arrays could not be read.

  Raises a CheckpointError: see `Checkpointer.restore`.
  """
  steps = directory.listed_steps()
  if step is not None and step not in steps:
    raise CheckpointError(f'{directory.path} has no checkpoint of step {step}; it has {list(steps)}.')
  for candidate in reversed(steps) if step is None else [step]:
    path, stamp = steps[candidate], (candidate, 0) if rejected is None else directory.stamp(candidate)
    if step is None and rejected and stamp in rejected:
      continue
    try:
      if candidate in unreadable:
        raise unreadable[candidate]
      _verify(path, wanted, prefix)
      return candidate
    except (DamagedCheckpointError, OSError) as problem:
      if rejected is not None and not directory.has_step(candidate):
        logging.info('Checkpoint %s was deleted while it was verified; looking again.', path)
        return choose(directory, step, wanted, prefix=prefix, rejected=rejected, unreadable=unreadable)
      if isinstance(problem, OSError):
        reason, remedy = describe_storage_error(problem, path) or (str(problem), 'check the storage')
        raise CheckpointError(f'checkpoint {path} cannot be read: {reason}. It may be intact: {remedy}.') from problem
      if step is not None:
        others = [other for other in directory.complete_steps() if other != step]
        raise CheckpointError(
          f'checkpoint {path} is damaged: {problem}. Other steps: {others}. Restore one of them, or give no step to '
          'restore the newest intact one.'
        ) from problem
      if rejected is not None:
        rejected.add(stamp)
        logging.error('Checkpoint %s is damaged and skipped: %s.', path, problem)
      else:
        aside = directory.set_aside(path, f'damaged-{problem.file.replace("/", "_")}'[:_MAX_SUFFIX_CHARS])
        logging.error('Checkpoint %s is damaged: %s. It is set aside as %s.', path, problem, aside.name)
  if damaged := directory.damaged():
    suffix = ' and remove the suffix from its name' if any('.damaged-' in name for name in damaged) else ''
    raise CheckpointError(
      f'{directory.path} has no intact checkpoint; damaged: {damaged}. Repair one{suffix}, or train in a new directory.'
    )
  directory.refuse_loss()
  return None


def _verify(path: epath.Path, wanted: Sequence[LeafEntry], prefix: str) -> None:
  """Compares the leaves, then every file, with the manifest."""
  started = time.monotonic()
  manifest = read_manifest(path)
  if step_of(path) != manifest.step:
    raise DamagedCheckpointError(MANIFEST_FILE, f'belongs to step {manifest.step}')
  saved = [leaf for leaf in manifest.leaves if leaf.name.startswith(prefix)]
  lines = leaf_mismatches(saved, wanted)
  if lines:
    raise CheckpointError(
      f'checkpoint {path} does not fit the experiment:\n{describe_mismatches(lines)}\nRestore it with the experiment '
      'and settings that saved it (config.json beside it), or train in a new job_log_dir.'
    )
  verify_files(path, manifest)
  logging.info('Verified %d files of %s in %.1f s.', len(manifest.files), path, time.monotonic() - started)


def leaf_mismatches(saved: Sequence[LeafEntry], wanted: Sequence[LeafEntry]) -> list[str]:
  """Returns one line for each leaf that differs, with both sides; [] if all agree."""
  ours, theirs = ({leaf.name: leaf for leaf in leaves} for leaves in (wanted, saved))
  none = 'no such leaf'
  return [
    f'{name}: the experiment has {ours.get(name, none)}, the checkpoint has {theirs.get(name, none)}'
    for name in ours | theirs
    if ours.get(name) != theirs.get(name)
  ]


def describe_mismatches(lines: Sequence[str]) -> str:
  """Formats the first ten mismatches, one per line, and the number of the rest."""
  shown = [f'  {line}' for line in lines[:_MAX_LISTED]]
  if len(lines) > _MAX_LISTED:
    shown.append(f'  ... and {len(lines) - _MAX_LISTED} more')
  return '\n'.join(shown)


def verify_files(directory: epath.Path, manifest: Manifest) -> None:
  """Compares the size and digest of every file in the manifest; ignores other files.

  Raises:
    DamagedCheckpointError: a file is missing or differs; names the first in the manifest's order.
    OSError: a file exists, but cannot be read (permission, I/O), so it may be intact.
  """
  sizes: dict[str, int] | None = None
  if is_remote(directory):
    sizes = sizes_below(directory)

  def problem_of(entry: FileEntry) -> str | None:
    path = directory / entry.path
    try:
      num_bytes = path.stat().length if sizes is None else sizes.get(entry.path)
      if num_bytes is None:
        return 'missing'
      if num_bytes != entry.num_bytes:
        return f'has {num_bytes} bytes instead of {entry.num_bytes}'
      is_shard = entry.digest.startswith('crc32c:')
      if not entry.digest or (is_shard and sizes is not None):
        return None
      _, digest = digest_file(path, is_shard=is_shard)
    except OSError as error:
      if error.errno not in NO_FILE:
        raise
      return 'missing'
    if digest != entry.digest:
      return f'its content has changed (digest {digest[:15]}, was {entry.digest[:15]})'
    return None

  with ThreadPoolExecutor(NUM_HASH_THREADS, thread_name_prefix='checkpoint_hash') as pool:
    for entry, problem in zip(manifest.files, pool.map(problem_of, manifest.files)):
      if problem:
        pool.shutdown(wait=False, cancel_futures=True)
        raise DamagedCheckpointError(entry.path, problem)
