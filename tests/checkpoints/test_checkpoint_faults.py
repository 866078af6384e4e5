"""Checkpoints that are damaged, cannot be written, or are deleted during a read.

Damaged ones are set aside, the next call raises the error of a save, and a reader restores the newest remaining one.
"""

from collections.abc import Callable
import errno
import os
import pathlib
import re
import resource
import shutil
from typing import Any

from checkpoint_states import abstract_state, array_file, assert_restores, device_state, flip_bit, names
from etils import epath
import jax
import pytest

from spmd_tasks.checkpoints import Checkpointer, Retention, manifest, verifying
from spmd_tasks.checkpoints import checkpointer as checkpointing
from spmd_tasks.checkpoints.checkpoint_directory import CheckpointDirectory
from spmd_tasks.checkpoints.manifest import CheckpointError, CheckpointSaveError


def empty(step_directory: pathlib.Path) -> None:
  shutil.rmtree(step_directory)
  step_directory.mkdir()


def replace(path: pathlib.Path, make: Callable[[pathlib.Path], None]) -> None:
  path.unlink()
  make(path)


DAMAGES: dict[str, tuple[Callable[[pathlib.Path], Any], str]] = {
  'bit in array data': (lambda d: flip_bit(array_file(d)), 'state/.*CRC-32C'),
  'shard of another step': (
    lambda d: shutil.copy(array_file(d.parent / 'checkpoint_00000002'), array_file(d)),
    r'state/weights.ffn.kernel/c\..*content has changed',
  ),
  'arrays of another step': (
    lambda d: (shutil.rmtree(d / 'state'), shutil.copytree(d.parent / 'checkpoint_00000002' / 'state', d / 'state')),
    'state/.*content has changed',
  ),
  'bit in manifest': (lambda d: flip_bit(d / 'manifest.json'), 'manifest.json: its own digest'),
  'truncated array file': (lambda d: array_file(d).write_bytes(array_file(d).read_bytes()[:-7]), 'bytes instead of'),
  'deleted array file': (lambda d: array_file(d).unlink(), 'state/.*: missing'),
  'no manifest': (lambda d: (d / 'manifest.json').unlink(), 'manifest.json: missing'),
  'empty directory': (empty, 'manifest.json: missing'),
  'a FIFO as manifest': (lambda d: replace(d / 'manifest.json', os.mkfifo), 'manifest.json: missing'),
  'another step': (lambda d: (shutil.rmtree(d), shutil.copytree(d.parent / 'checkpoint_00000001', d)), 'step 1'),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_newest_step_is_set_aside_and_the_previous_one_is_restored(directory, damage, caplog):
  spoil, message = DAMAGES[damage]
  spoil(directory / 'checkpoint_00000003')

  with pytest.raises(CheckpointError, match=rf'(?s)checkpoint_00000003 is damaged: .*{message}.*Other steps: \[1, 2\]'):
    Checkpointer(directory).restore(abstract_state(), step=3)
  assert len(names(directory)) == 3, 'a step requested by number is not renamed'

  assert_restores(Checkpointer(directory, read_only=True).restore(abstract_state()), 2)
  assert 'checkpoint_00000003' in names(directory), 'a reader renames nothing'

  checkpointer = Checkpointer(directory)
  assert_restores(checkpointer.restore(abstract_state()), 2)
  assert [name for name in names(directory) if name.startswith('checkpoint_00000003.damaged-')]
  assert re.search(rf'{message}.*set aside as checkpoint_00000003.damaged-', caplog.text)
  assert 'checkpoint_00000003' not in names(directory)
  checkpointer.save(3, device_state(3))
  checkpointer.close()
  assert_restores(Checkpointer(directory).restore(abstract_state()), 3)


def test_every_file_of_a_checkpoint_is_covered(directory, rng):
  step_directory = directory / 'checkpoint_00000003'
  checkpointer = Checkpointer(directory, read_only=True)
  for path in sorted(path for path in step_directory.rglob('*') if path.is_file() and path.stat().st_size):
    original = path.read_bytes()
    flip_bit(path, rng.random())
    with pytest.raises(CheckpointError, match=f'damaged: {path.relative_to(step_directory)}'):
      checkpointer.restore(abstract_state(), step=3)
    path.write_bytes(original)
  assert_restores(checkpointer.restore(abstract_state(), step=3), 3)


def test_partial_checkpoints_are_removed_by_the_next_job_but_not_by_a_reader(directory):
  for name in ('checkpoint_00000004.partial', 'checkpoint_00000000.deleting', 'checkpoint_00000005.damaged-x.partial'):
    (directory / name / 'state').mkdir(parents=True)
  before = names(directory)
  Checkpointer(directory, read_only=True)
  assert names(directory) == before
  Checkpointer(directory)
  assert set(before) - set(names(directory)) == {'checkpoint_00000004.partial', 'checkpoint_00000000.deleting'}


def test_a_reader_takes_a_link_to_nothing_for_damaged(tmp_path):
  (tmp_path / 'checkpoint_00000003').symlink_to('not mounted')
  rejected = set()
  directory = CheckpointDirectory(path=epath.Path(tmp_path))
  with pytest.raises(CheckpointError, match=r'damaged: .*_00000003.*Repair one, or train'):
    verifying.choose(directory, None, [], prefix='', rejected=rejected)
  assert rejected == {(3, 0)}


def test_other_names_are_neither_removed_nor_taken_for_checkpoints(directory):
  for name in ('00000055.partial-backup', '7.partial', '00000008.deleting.old', '9'):
    (directory / f'checkpoint_{name}' / 'state').mkdir(parents=True)
  (directory / 'checkpoint_00000056.partial').write_text('a file')
  (directory / 'checkpoint_00000057.partial').symlink_to(directory / 'checkpoint_9')
  shutil.copytree(directory / 'checkpoint_00000003', directory / 'checkpoint_3')
  (directory / 'checkpoint_00000004.deleting-2').mkdir()  # left by a job that was killed twice in the same deletion
  before = names(directory)
  checkpointer = Checkpointer(directory, retention=Retention(max_to_keep=1))
  assert_restores(checkpointer.restore(abstract_state()), 3)
  checkpointer.save(4, device_state(4))
  checkpointer.close()
  ours = {f'checkpoint_{step:08d}' for step in (1, 2, 3)} | {'checkpoint_00000004.deleting-2'}
  assert set(names(directory)) == set(before) - ours | {'checkpoint_00000004'}


def test_no_manifest_is_written_if_a_process_has_written_elsewhere(directory):
  own_input = directory / 'checkpoint_00000004.partial' / 'input' / 'process_0_of_2.json'
  own_input.parent.mkdir(parents=True)
  own_input.write_text('{}')
  steps = CheckpointDirectory(path=epath.Path(directory))
  with pytest.raises(CheckpointSaveError, match=r'process 1 of 2 has not written .* share'):
    steps.publish(4, (), num_processes=2)
  assert not (directory / 'checkpoint_00000004.partial' / manifest.MANIFEST_FILE).exists()
  assert steps.complete_steps() == [1, 2, 3]


def test_the_next_call_raises_if_the_disk_is_full_while_arrays_are_written(directory, capfd):
  """RLIMIT_FSIZE makes the kernel refuse to grow a file, as on a full disk, which only root could mount."""
  checkpointer = Checkpointer(directory)
  big = {'x': jax.random.normal(jax.random.key(0), (1 << 19,))}
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
  try:
    checkpointer.save(4, big)
    with pytest.raises(
      CheckpointError, match=r'^checkpoint of step 4 could not be saved in \S+: File too large\. '
    ) as error:
      checkpointer.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert 'Complete checkpoints: [1, 2, 3], all intact: raise the limit' in str(error.value)
  assert 'Traceback' not in capfd.readouterr().err
  assert names(directory) == [f'checkpoint_{step:08d}' for step in (1, 2, 3)]
  assert_restores(checkpointer.restore(abstract_state()), 3)
  checkpointer.save(4, device_state(4))
  checkpointer.close()
  assert_restores(Checkpointer(directory).restore(abstract_state()), 4)


@pytest.mark.parametrize('next_call', ['save', 'close'])
def test_the_next_call_raises_if_the_disk_has_no_inodes_for_the_manifest(directory, monkeypatch, next_call):
  def no_space(*args):
    raise OSError(errno.ENOSPC, 'No space left on device')

  def statvfs(path):
    free_inodes = 0 if (directory / 'checkpoint_00000004.partial').exists() else 20  # the failed save's own
    return os.statvfs_result((1, 1, 900, 90, 90, 2000, free_inodes, free_inodes, 0, 255))

  checkpointer = Checkpointer(directory)
  monkeypatch.setattr(manifest, 'write_durably', no_space)
  monkeypatch.setattr(os, 'statvfs', statvfs)
  checkpointer.save(4, device_state(4))
  call = checkpointer.close if next_call == 'close' else lambda: checkpointer.save(5, device_state(5))
  with pytest.raises(CheckpointError, match=r'step 4 could not be saved .*No space left on device \(0 of 2,000 inodes'):
    call()
  assert names(directory) == [f'checkpoint_{step:08d}' for step in (1, 2, 3)]


class Owner:
  """Completes step 3 and deletes step 2, as a training job does during a read."""

  def __init__(self, directory: pathlib.Path):
    self.directory = directory
    self.hidden = directory.parent / 'hidden'
    (directory / 'checkpoint_00000003').rename(self.hidden)

  def save_and_delete(self) -> None:
    if self.hidden.exists():
      self.hidden.rename(self.directory / 'checkpoint_00000003')
      epath.Path(self.directory / 'checkpoint_00000002').rename(self.directory / 'checkpoint_00000002.deleting')
      epath.Path(self.directory / 'checkpoint_00000002.deleting').rmtree()


def test_the_newest_step_is_restored_if_its_predecessor_is_deleted_while_it_is_verified(directory, monkeypatch):
  owner, verify_files = Owner(directory), verifying.verify_files

  def verify_late(*args, **kwargs):
    owner.save_and_delete()
    verify_files(*args, **kwargs)

  monkeypatch.setattr(verifying, 'verify_files', verify_late)
  assert_restores(Checkpointer(directory, read_only=True).restore(abstract_state()), 3)
  assert names(directory) == ['checkpoint_00000001', 'checkpoint_00000003']


@pytest.mark.parametrize('moment', ['before', 'after'])
def test_the_newest_step_is_restored_if_its_predecessor_is_deleted_while_it_is_read(directory, monkeypatch, moment):
  owner, read_arrays = Owner(directory), checkpointing.read_arrays

  def read_beside_the_owner(*args, **kwargs):
    if moment == 'before':
      owner.save_and_delete()
    arrays = read_arrays(*args, **kwargs)
    owner.save_and_delete()
    return arrays

  monkeypatch.setattr(checkpointing, 'read_arrays', read_beside_the_owner)
  assert_restores(Checkpointer(directory, read_only=True).restore(abstract_state()), 3)


def test_a_reader_ignores_a_damaged_step_until_it_is_replaced(directory, monkeypatch):
  verified: list[str] = []
  verify_files = verifying.verify_files

  def verify_and_count(path, *args, **kwargs):
    verified.append(path.name)
    verify_files(path, *args, **kwargs)

  monkeypatch.setattr(verifying, 'verify_files', verify_and_count)
  newest = directory / 'checkpoint_00000003'
  whole = {path: path.read_bytes() for path in newest.rglob('*') if path.is_file()}
  flip_bit(array_file(newest))
  reader = Checkpointer(directory, read_only=True)
  assert reader.latest_step() == 3, 'it has not been read yet'
  for _ in range(2):
    assert_restores(reader.restore(abstract_state()), 2)
    assert reader.latest_step() == 2
  assert reader.all_steps() == [1, 2, 3]
  assert verified == ['checkpoint_00000003', 'checkpoint_00000002', 'checkpoint_00000002']

  for path, data in whole.items():
    path.write_bytes(data)
  later = (newest / 'manifest.json').stat().st_mtime + 5
  os.utime(newest / 'manifest.json', (later, later))
  assert reader.latest_step() == 3
  assert_restores(reader.restore(abstract_state()), 3)
