"""A reader beside the job that owns the directory: deletions do not end it, damage is looked at once."""

import os
import pathlib

from checkpoint_states import abstract_state, array_file, assert_restores, flip_bit, names
from etils import epath
import orbax.checkpoint as ocp
import pytest

from spmd_tasks.checkpoints import Checkpointer, verifying


class Owner:
  """Completes step 3 and deletes step 2, as a training job does between two looks of a reader."""

  def __init__(self, directory: pathlib.Path):
    self.directory = directory
    self.hidden = directory.parent / 'hidden'
    (directory / 'checkpoint_00000003').rename(self.hidden)

  def go_on(self) -> None:
    if self.hidden.exists():
      self.hidden.rename(self.directory / 'checkpoint_00000003')
      epath.Path(self.directory / 'checkpoint_00000002').rename(self.directory / 'checkpoint_00000002.deleting')
      epath.Path(self.directory / 'checkpoint_00000002.deleting').rmtree()


def test_a_step_that_is_deleted_while_it_is_verified_gives_way_to_the_newest(directory, monkeypatch):
  owner, verify_files = Owner(directory), verifying.verify_files

  def verify_late(*args, **kwargs):
    owner.go_on()
    verify_files(*args, **kwargs)

  monkeypatch.setattr(verifying, 'verify_files', verify_late)
  assert_restores(Checkpointer(directory, read_only=True).restore(abstract_state()), 3)
  assert names(directory) == ['checkpoint_00000001', 'checkpoint_00000003']


@pytest.mark.parametrize('moment', ['before', 'after'])
def test_a_step_that_is_deleted_while_it_is_read_gives_way_to_the_newest(directory, monkeypatch, moment):
  owner, restore = Owner(directory), ocp.PyTreeCheckpointHandler.restore

  def restore_beside_the_owner(*args, **kwargs):
    if moment == 'before':
      owner.go_on()
    arrays = restore(*args, **kwargs)
    owner.go_on()
    return arrays

  monkeypatch.setattr(ocp.PyTreeCheckpointHandler, 'restore', restore_beside_the_owner)
  assert_restores(Checkpointer(directory, read_only=True).restore(abstract_state()), 3)


def test_a_damaged_step_is_read_once_and_reported_as_the_latest_again_only_when_it_was_replaced(directory, monkeypatch):
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
  assert reader.latest_step() == 3, 'nobody has looked at it yet'
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
