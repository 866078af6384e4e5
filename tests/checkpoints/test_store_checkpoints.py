"""Checkpoints in object stores are bit-exact, published by one object, and verified."""

from concurrent.futures import ThreadPoolExecutor
import json

from checkpoint_states import abstract_state, assert_restores, device_state, host_state
from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.checkpoints import Checkpointer, Retention
from spmd_tasks.checkpoints.manifest import CheckpointError, CheckpointSaveError
from spmd_tasks.checkpoints.store_directory import StoreDirectory
from spmd_tasks.errors import UserError
from spmd_tasks.files import absolute_path
from spmd_tasks.stores import create, sizes_below
from tests.store_fixtures import one_kind_of_store


def save(directory: epath.Path, *steps: int, **settings) -> None:
  checkpointer = Checkpointer(directory, **settings)
  for step in steps:
    checkpointer.save(step, device_state(step), {'position': step * 10})
  checkpointer.close()


def test_the_newest_step_is_restored_bit_exactly_and_old_ones_are_deleted(store, tmp_path):
  save(store, 1, 2, 3, retention=Retention(max_to_keep=2))
  for mesh_shape in ((2, 4), (1, 1)):
    restored = Checkpointer(store).restore(abstract_state(mesh_shape))
    assert_restores(restored, 3)
    assert restored.input_state == {'position': 30}
  weights = Checkpointer(store, read_only=True).restore_weights(abstract_state()['weights'], 2).state
  assert np.asarray(weights['emb']).tobytes() == host_state(2)['weights']['emb'].tobytes()
  assert {name.split('/')[0] for name in sizes_below(store)} == {'checkpoint_00000002', 'checkpoint_00000003'}

  # A copy on a disk is a checkpoint there.
  for name in sizes_below(store):
    (epath.Path(tmp_path) / name).parent.mkdir(parents=True, exist_ok=True)
    (epath.Path(tmp_path) / name).write_bytes((store / name).read_bytes())
  assert_restores(Checkpointer(tmp_path).restore(abstract_state()), 3)


@one_kind_of_store
def test_a_copy_from_a_disk_is_restored_in_a_store(directory, store):
  for path in (path for path in directory.rglob('*') if path.is_file() and 'checkpoint_00000003' in str(path)):
    (store / str(path.relative_to(directory))).write_bytes(path.read_bytes())
  assert_restores(Checkpointer(store).restore(abstract_state()), 3)


@one_kind_of_store
def test_a_checkpoint_without_a_manifest_is_ignored_and_removed(store, monkeypatch):
  save(store, 1)
  monkeypatch.setattr(StoreDirectory, 'publish', lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
  monkeypatch.setattr(StoreDirectory, 'discard_partial', lambda *_: None)  # killed
  broken = Checkpointer(store)
  broken.save(2, device_state(2))
  with pytest.raises(KeyboardInterrupt):
    broken.close()
  monkeypatch.undo()
  assert any('00000002/state_' in name for name in sizes_below(store))
  reader = Checkpointer(store, read_only=True)
  assert reader.all_steps() == [1]
  assert_restores(reader.restore(abstract_state()), 1)
  assert_restores(Checkpointer(store).restore(abstract_state()), 1)
  assert not any('00000002/' in name for name in sizes_below(store))
  save(store, 2)
  assert_restores(Checkpointer(store).restore(abstract_state()), 2)


@one_kind_of_store
def test_a_late_job_removes_its_files_from_the_checkpoint_of_another(store, monkeypatch):
  publish = StoreDirectory.publish

  def publish_late(*arguments):
    monkeypatch.undo()
    monkeypatch.setattr(StoreDirectory, 'open', lambda _: None)  # the other job opened the directory before
    save(store, 1)
    publish(*arguments)

  monkeypatch.setattr(StoreDirectory, 'publish', publish_late)
  late = Checkpointer(store)
  late.save(1, jax.tree.map(jnp.zeros_like, device_state(1)), {'position': 10})
  with pytest.raises(CheckpointSaveError, match='another job has saved step 1'):
    late.close()
  monkeypatch.undo()
  assert len({name.split('/')[1] for name in sizes_below(store) if '/state_' in name}) == 1
  assert_restores(Checkpointer(store).restore(abstract_state()), 1)


@one_kind_of_store
def test_damage_is_detected(store):
  save(store, 1, 2)
  shards = [name for name in sizes_below(store) if 'weights.emb/c.' in name and name.startswith('checkpoint_00000002')]
  whole = (store / shards[0]).read_bytes()
  (store / shards[0]).write_bytes(bytes([whole[0] ^ 4]) + whole[1:])
  with pytest.raises(CheckpointError, match=r'damaged: state_\w+/weights.emb/c\..*CRC-32C'):
    Checkpointer(store).restore(abstract_state(), 2)
  assert_restores(Checkpointer(store, read_only=True).restore(abstract_state()), 1)
  (store / shards[0]).unlink()
  assert_restores(Checkpointer(store, read_only=True).restore(abstract_state()), 1)
  assert_restores(Checkpointer(store).restore(abstract_state()), 1)
  assert Checkpointer(store).all_steps() == [1]
  assert any('manifest.damaged-' in name for name in Checkpointer(store)._directory.damaged())
  (store / 'checkpoint_00000001' / 'input' / 'process_0_of_1.json').write_text('{"position": 11}')
  with pytest.raises(CheckpointError, match='no intact checkpoint'):
    Checkpointer(store).restore(abstract_state())


def test_one_of_several_concurrent_calls_creates_an_object(store):
  won: list[int] = []

  def race(number: int) -> None:
    if create(store / 'object', json.dumps(number).encode()):
      won.append(number)

  with ThreadPoolExecutor(8) as pool:
    list(pool.map(race, range(8)))
  assert won == [json.loads((store / 'object').read_text())]
  assert create(store / 'object', json.dumps(won[0]).encode()), 'the own object, after a lost response'


def test_temporary_faults_of_a_store_are_retried(gcs_emulator):
  directory = absolute_path('gs://bucket/faults')
  faults = {3: 503, 4: 'lost', 5: 429, 9: 503, 14: 'lost', 20: 'lost', 25: 503, 31: 429}
  first = len(gcs_emulator.requests)
  gcs_emulator.fault = lambda request, number: faults.get(number - first)
  try:
    save(directory, 1)
    assert_restores(Checkpointer(directory).restore(abstract_state()), 1)
  finally:
    gcs_emulator.fault = lambda request, number: None


@pytest.mark.parametrize(
  'url, sentence',
  [
    ('gs:///job', 'has no bucket'),
    ('ftp://host/job', 'unknown kind: give gs://'),
    ('gs://no-such-bucket/job', 'there is no such bucket; gcloud storage buckets create gs://no-such-bucket'),
    ('s3://no-such-bucket/job', 'there is no such bucket; aws s3 mb s3://no-such-bucket'),
  ],
)
def test_an_unusable_url_is_refused(gcs_emulator, s3_emulator, url, sentence):
  with pytest.raises(UserError, match=sentence):
    absolute_path(url)


@pytest.mark.parametrize(
  'status, remedy', [(401, 'log in: gcloud auth application-default login'), (403, 'give this user the right to list')]
)
def test_missing_credentials_and_permissions_are_reported(gcs_emulator, caplog, status, remedy):
  gcs_emulator.fault = lambda request, number: status
  try:
    with pytest.raises(UserError, match=f'gs://closed cannot be used: .*{remedy}'):
      absolute_path('gs://closed/job')
  finally:
    gcs_emulator.fault = lambda request, number: None
  assert not caplog.records


def test_a_restart_lists_little(gcs_emulator):
  directory = absolute_path('gs://bucket/listed')
  save(directory, 1, 2, 3)
  first = len(gcs_emulator.requests)
  assert_restores(Checkpointer(directory).restore(abstract_state()), 3)
  listings = [request for request in gcs_emulator.requests[first:] if '/o?' in request]
  assert len(listings) <= 8, listings
