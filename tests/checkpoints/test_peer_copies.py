"""Copies in memory: bit-exact, digested, of one job and one start only, private; used only if every part is whole."""

import contextlib
import os
import shutil
import stat

from etils import epath
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from spmd_tasks.checkpoints.memory_copies import DamagedCopyError, local_num_bytes, verify
from spmd_tasks.checkpoints.peer_copies import Choice, Held, PeerCopies, choose
from spmd_tasks.errors import UserError


def make_state(seed: int, axes=('data', 'mdl')) -> dict[str, jax.Array]:
  """Sharded, replicated and partly replicated leaves of several dtypes on 2 x 4 devices."""
  rng = np.random.default_rng(seed)
  mesh = Mesh(np.array(jax.devices()).reshape(2, 4), axes)

  def place(x, *spec):
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

  return {
    'kernel': place(rng.normal(size=(4, 8)).astype(np.float32), *axes),
    'bias': place(rng.normal(size=(8,)).astype(jax.numpy.bfloat16), axes[1]),
    'scale': place(rng.normal(size=(3, 3)).astype(np.float32)),
    'step': place(np.int32(seed)),
    'flags': place(rng.integers(2, size=(4,)).astype(bool), axes[0]),
  }


def abstract(state):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


@pytest.fixture
def start(tmp_path):
  """Starts the copies of a job in `tmp_path`; a start that is not left is a process that was killed."""
  (tmp_path / 'ram').mkdir()
  (tmp_path / 'job').mkdir()

  def make(like=None) -> PeerCopies:
    like = abstract(make_state(0)) if like is None else like
    return PeerCopies(str(tmp_path / 'ram'), epath.Path(tmp_path / 'job'), like, limit_s=60)

  return make


def files(tmp_path) -> list:
  return sorted((tmp_path / 'ram').rglob('*.copy'))


def copy_and_die(copies: PeerCopies, *steps: int, newest_checkpoint=None) -> None:
  for step in steps:
    copies.copy(step, make_state(step), {'position': 10 * step}, newest_checkpoint)
  copies._pending.result()


def assert_restored(restored, step: int) -> None:
  assert (restored.step, restored.input_state) == (step, {'position': 10 * step})
  for name, leaf in make_state(step).items():
    assert restored.state[name].sharding == leaf.sharding
    assert np.asarray(restored.state[name]).tobytes() == np.asarray(leaf).tobytes()


def test_a_restart_goes_on_from_the_newest_copy_bit_for_bit(start, tmp_path):
  copy_and_die(start(), 4, 8, 12)
  assert [path.name.split('_')[1] for path in files(tmp_path)] == ['00000008', '00000012']  # two generations
  copies = start()
  assert_restored(copies.restore(None), 12)
  assert len(files(tmp_path)) == 1  # and it stays until there is a newer one: the process may be killed again
  assert_restored(start().restore(None), 12)


def test_a_job_that_ends_well_leaves_nothing(start, tmp_path):
  with start() as copies:
    copies.copy(4, make_state(4), None, None)
  assert not list((tmp_path / 'ram').glob('*/*'))
  with contextlib.suppress(ArithmeticError), start() as copies:
    copy_and_die(copies, 8)
    raise ArithmeticError
  assert len(files(tmp_path)) == 1


@pytest.mark.parametrize('where', [0, 0.3, -1])
@pytest.mark.parametrize('how', ['flip', 'cut'])
def test_a_damaged_copy_is_found_and_the_one_before_it_is_used(start, tmp_path, where, how, caplog):
  copy_and_die(start(), 4, 8)
  newest = files(tmp_path)[-1]
  data = bytearray(newest.read_bytes())
  place = int(where * len(data)) if isinstance(where, float) else where % len(data)
  data[place] ^= 4
  newest.write_bytes(data if how == 'flip' else data[:place])
  with pytest.raises(DamagedCopyError):
    verify(newest)
  assert_restored(start().restore(None), 4)


def another_job(tmp_path):
  shutil.rmtree(tmp_path / 'job')
  (tmp_path / 'job').mkdir()


def another_mesh(tmp_path):
  return abstract(make_state(0, axes=('replica', 'data')))


@pytest.mark.parametrize('change', [another_job, another_mesh])
def test_copies_of_another_job_at_the_same_path_or_of_another_mesh_are_refused(start, tmp_path, change, caplog):
  copy_and_die(start(), 4)
  assert start(change(tmp_path)).restore(None) is None
  assert 'not used: they are those of another job, mesh or number of processes' in caplog.text
  assert not files(tmp_path)


@pytest.mark.parametrize(
  'newest_then, newest_now, is_used', [(4, 8, True), (4, 9, False), (4, None, False), (None, 3, True)]
)
def test_the_store_wins_where_it_is_newer_or_has_gone_back(start, newest_then, newest_now, is_used, caplog):
  copy_and_die(start(), 8, newest_checkpoint=newest_then)
  restored = start().restore(newest_now)
  assert (restored is not None) == is_used
  assert ('the copies in memory are not used: ' in caplog.text) != is_used


def held(*copies):
  return [Held(*copy) for copy in copies]


@pytest.mark.parametrize(
  'processes, expected',
  [
    ([[], []], 'there are none'),
    # Each has its own and that of the process before it.
    (
      [held(('a', 5, 0, 3), ('a', 5, 1, None)), held(('a', 5, 1, None), ('a', 5, 0, 3))],
      Choice(attempt='a', step=5, holders=(0, 1)),
    ),
    # Process 1 was lost with its memory.
    ([held(('a', 5, 0, 3), ('a', 5, 1, None)), []], Choice(attempt='a', step=5, holders=(0, 0))),
    # Killed in the middle of a copy: the one before it.
    (
      [held(('a', 5, 0, 3), ('a', 9, 0, 3), ('a', 5, 1, None)), held(('a', 5, 1, None), ('a', 5, 0, 3))],
      Choice(attempt='a', step=5, holders=(0, 1)),
    ),
    # One step, but of two starts: perhaps with other settings.
    ([held(('a', 5, 0, 3)), held(('b', 5, 1, None))], 'of step 5, no process has the part of process'),
    # The processes have changed their hosts.
    ([held(('a', 5, 1, None)), held(('a', 5, 0, 3))], Choice(attempt='a', step=5, holders=(1, 0))),
    ([held(('a', 2, 0, None)), held(('a', 2, 1, None))], 'those of step 2 are older than the checkpoint of step 3'),
    ([held(('a', 5, 0, 4)), held(('a', 5, 1, None))], 'there was a checkpoint of step 4, which is gone'),
  ],
)
def test_the_newest_copies_of_which_every_part_is_held_are_chosen(processes, expected):
  choice = choose(processes, newest_checkpoint=3)
  assert choice == expected or expected in str(choice)


def test_copies_are_private(start, tmp_path):
  copy_and_die(start(), 4)
  for path in (tmp_path / 'ram').rglob('*'):
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
  root = tmp_path / 'ram' / f'spmd_tasks_{os.getuid()}'
  shutil.rmtree(root)
  (tmp_path / 'elsewhere').mkdir()
  root.symlink_to(tmp_path / 'elsewhere')  # what another user might have put there
  with pytest.raises(UserError, match='belongs to another user'):
    start()


def test_what_cannot_work_is_refused(start, tmp_path, monkeypatch):
  needed = 2 * local_num_bytes(abstract(make_state(0)))
  monkeypatch.setattr('spmd_tasks.checkpoints.memory_copies.MemoryCopies.free_bytes', lambda self: needed - 1)
  with pytest.raises(UserError, match=r'GB of room on host .*enlarge it'):
    start()
  monkeypatch.undo()
  shutil.rmtree(tmp_path / 'ram')
  with pytest.raises(UserError, match=r'peer_copy_directory = .* cannot hold copies'):
    start()


def test_a_full_ram_disk_ends_the_copies_and_not_the_job(start, tmp_path, monkeypatch, caplog):
  copies = start()
  copy_and_die(copies, 4)

  def write(*args):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr('spmd_tasks.checkpoints.memory_copies._create_private', write)
  copies.copy(8, make_state(8), None, None)
  copies.copy(12, make_state(12), None, None)
  assert 'No space left on device' in caplog.text
  assert 'only the checkpoints in the store count' in caplog.text
  monkeypatch.undo()
  assert_restored(start().restore(None), 4)
