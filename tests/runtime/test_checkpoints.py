"""Checkpoints in one process: bit-exact on any mesh, damage set aside, mismatches refused, errors surfaced."""

from collections.abc import Callable
import errno
import os
import pathlib
import re
import resource
import shutil
import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

from spmd_tasks.runtime import manifest
from spmd_tasks.runtime.checkpoints import Checkpointer, CheckpointError, Restored


class Moments(NamedTuple):
  mu: Any
  nu: Any


def sharding(mesh_shape: tuple[int, ...], *axes: str | None) -> NamedSharding:
  names = ('data', 'mdl')[: len(mesh_shape)]
  devices = jax.devices()[: int(np.prod(mesh_shape))]
  mesh = jax.make_mesh(mesh_shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)
  return NamedSharding(mesh, PartitionSpec(*axes))


def host_state(step: int) -> Any:
  """What a state of `step` holds: every kind of container and dtype that a train state has."""
  rng = np.random.default_rng(step)
  weights = {
    'ffn': {'kernel': rng.normal(size=(8, 16)).astype(np.float32), 'bias': rng.normal(size=16).astype(jnp.bfloat16)},
    'emb': rng.normal(size=(16, 8)).astype(np.float32),
  }
  return {
    'step': np.int32(step),
    'rng': rng.integers(2**32, size=2, dtype=np.uint32),
    'weights': weights,
    'learner': (Moments(mu=jax.tree.map(lambda x: x * 2, weights), nu=None), ()),
  }


def abstract_state(mesh_shape: tuple[int, ...] = (2, 4)) -> Any:
  def abstract(leaf):
    axes = ('data', 'mdl')[: len(mesh_shape)] if leaf.ndim == 2 else ()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(mesh_shape, *axes))

  return jax.tree.map(abstract, host_state(0))


def device_state(step: int, mesh_shape: tuple[int, ...] = (2, 4)) -> Any:
  return jax.tree.map(lambda leaf, to: jax.device_put(leaf, to.sharding), host_state(step), abstract_state(mesh_shape))


def assert_is_state(state: Any, step: int) -> None:
  expected = host_state(step)
  assert jax.tree.structure(state) == jax.tree.structure(expected)
  for restored, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected)):
    assert restored.dtype == wanted.dtype
    assert np.asarray(restored).tobytes() == np.asarray(wanted).tobytes()


def assert_restores(restored: Restored | None, step: int) -> None:
  assert restored is not None
  assert restored.step == step
  assert_is_state(restored.state, step)


def names(directory: pathlib.Path) -> list[str]:
  return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope='module')
def three_steps(tmp_path_factory) -> pathlib.Path:
  """A directory with checkpoints 1, 2 and 3."""
  directory = tmp_path_factory.mktemp('three_steps') / 'checkpoints'
  checkpointer = Checkpointer(directory)
  for step in (1, 2, 3):
    checkpointer.save(step, device_state(step), {'position': step * 10}, {'config': 'abc'})
  checkpointer.close()
  return directory


@pytest.fixture
def directory(three_steps, tmp_path) -> pathlib.Path:
  return pathlib.Path(shutil.copytree(three_steps, tmp_path / 'checkpoints'))


# Restoring.


def test_a_fresh_directory_restores_nothing(tmp_path):
  checkpointer = Checkpointer(tmp_path / 'new')
  assert checkpointer.restore(abstract_state()) is None
  assert checkpointer.latest_step() is None
  checkpointer.close()


@pytest.mark.parametrize('mesh_shape', [(2, 4), (4, 2), (8, 1), (1, 1), (2,)])
def test_the_newest_step_comes_back_bit_exactly_on_any_mesh(directory, mesh_shape):
  abstract = abstract_state(mesh_shape)
  restored = Checkpointer(directory).restore(abstract)
  assert_restores(restored, 3)
  assert restored.input_state == {'position': 30}
  assert restored.input_states == [{'position': 30}]
  assert restored.metadata == {'config': 'abc'}
  for leaf, wanted in zip(jax.tree.leaves(restored.state), jax.tree.leaves(abstract)):
    assert leaf.sharding == wanted.sharding


def test_without_shardings_it_comes_back_on_one_device(directory):
  abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), host_state(0))
  assert_restores(Checkpointer(directory).restore(abstract), 3)


def test_a_step_that_is_asked_for_by_number(directory):
  checkpointer = Checkpointer(directory)
  assert checkpointer.all_steps() == [1, 2, 3]
  assert_restores(checkpointer.restore(abstract_state(), step=2), 2)
  with pytest.raises(CheckpointError, match=r'has no checkpoint of step 7; it has \[1, 2, 3\]'):
    checkpointer.restore(abstract_state(), step=7)


def test_the_state_may_be_donated_as_soon_as_save_returns(tmp_path):
  """Large enough for the write to be still running when the donated step overwrites the buffers."""
  values = np.arange(2_000_000, dtype=np.uint32).reshape(2000, 1000)
  state = {'x': jax.device_put(values, sharding((2, 4), 'data', 'mdl'))}
  update = jax.jit(lambda tree: {'x': tree['x'] * 3 + 1}, donate_argnums=0)
  abstract = {'x': jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=state['x'].sharding)}
  checkpointer = Checkpointer(tmp_path, max_to_keep=None)
  expected = {}
  for step in range(1, 4):
    expected[step] = values
    checkpointer.save(step, state)
    for _ in range(5):
      state, values = update(state), values * np.uint32(3) + np.uint32(1)
    jax.block_until_ready(state)
  for step in range(1, 4):
    restored = checkpointer.restore(abstract, step=step)
    np.testing.assert_array_equal(np.asarray(restored.state['x']), expected[step])
    update(restored.state)  # restored buffers may be donated too, and what is on disk stays
    np.testing.assert_array_equal(np.asarray(checkpointer.restore(abstract, step=step).state['x']), expected[step])
  checkpointer.close()


@pytest.mark.parametrize('subtree', ['weights', 'weights/ffn', 'learner/0/mu'])
def test_weights_alone(directory, subtree):
  def pick(tree):
    return {'weights': tree['weights'], 'weights/ffn': tree['weights']['ffn'], 'learner/0/mu': tree['learner'][0].mu}[
      subtree
    ]

  restored = Checkpointer(directory, read_only=True).restore_weights(pick(abstract_state()), subtree=subtree)
  assert restored.step == 3
  jax.tree.map(
    lambda leaf, wanted: np.testing.assert_array_equal(np.asarray(leaf), wanted), restored.state, pick(host_state(3))
  )


def test_weights_of_a_directory_without_checkpoints_are_an_error(tmp_path):
  with pytest.raises(CheckpointError, match='has no checkpoint to restore weights from'):
    Checkpointer(tmp_path).restore_weights(abstract_state()['weights'])


# Mismatches.


def change(tree: Any, edit: Callable[[Any], None]) -> Any:
  copy = jax.tree.map(lambda leaf: leaf, tree)
  edit(copy)
  return copy


MISMATCHES = {
  'shape': (
    lambda tree: tree['weights'].update(emb=jax.ShapeDtypeStruct((17, 8), jnp.float32)),
    r'weights/emb: the experiment has float32\[17,8\], the checkpoint has float32\[16,8\]',
  ),
  'dtype': (
    lambda tree: tree['weights'].update(emb=jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)),
    r'weights/emb: the experiment has bfloat16\[16,8\], the checkpoint has float32\[16,8\]',
  ),
  'missing': (
    lambda tree: tree['weights'].update(new=jax.ShapeDtypeStruct((3,), jnp.float32)),
    r'weights/new: the experiment has float32\[3\], the checkpoint has no such leaf',
  ),
  'extra': (
    lambda tree: tree['weights'].pop('emb'),
    r'weights/emb: the experiment has no such leaf, the checkpoint has float32\[16,8\]',
  ),
}


@pytest.mark.parametrize('kind', MISMATCHES)
@pytest.mark.parametrize('whole', [True, False])
def test_a_mismatch_is_refused_with_leaf_both_sides_and_remedy_and_changes_nothing(directory, kind, whole):
  edit, message = MISMATCHES[kind]
  abstract = change(abstract_state(), edit)
  checkpointer = Checkpointer(directory)
  restore = checkpointer.restore if whole else checkpointer.restore_weights
  with pytest.raises(CheckpointError, match=f'(?s){message}.*Restore it with the experiment'):
    restore(abstract if whole else abstract['weights'])
  assert checkpointer.all_steps() == [1, 2, 3]


# Damage.


def array_file(step_directory: pathlib.Path) -> pathlib.Path:
  return max((step_directory / 'state').rglob('d/*'), key=lambda path: path.stat().st_size)


def flip_bit(path: pathlib.Path, position: float = 0.5) -> None:
  data = bytearray(path.read_bytes())
  data[int(position * (len(data) - 1))] ^= 4
  path.write_bytes(bytes(data))


def empty(step_directory: pathlib.Path) -> None:
  shutil.rmtree(step_directory)
  step_directory.mkdir()


DAMAGES: dict[str, tuple[Callable[[pathlib.Path], Any], str]] = {
  'bit in array data': (lambda d: flip_bit(array_file(d)), 'state/.*content has changed'),
  'bit in input state': (lambda d: flip_bit(d / 'input/process_0_of_1.json'), 'input/process_0_of_1.json'),
  'bit in manifest': (lambda d: flip_bit(d / 'manifest.json'), 'manifest.json: its own digest'),
  'truncated array file': (lambda d: array_file(d).write_bytes(array_file(d).read_bytes()[:-7]), 'bytes instead of'),
  'empty array file': (lambda d: array_file(d).write_bytes(b''), 'has 0 bytes instead of'),
  'deleted array file': (lambda d: array_file(d).unlink(), 'state/.*: missing'),
  'deleted arrays': (lambda d: shutil.rmtree(d / 'state'), 'state/.*: missing'),
  'no manifest': (lambda d: (d / 'manifest.json').unlink(), 'manifest.json: missing'),
  'empty directory': (empty, 'manifest.json: missing'),
  'a file in its place': (lambda d: (shutil.rmtree(d), d.write_text('')), 'manifest.json: missing'),
  'another step': (lambda d: (shutil.rmtree(d), shutil.copytree(d.parent / 'checkpoint_00000001', d)), 'step 1'),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_newest_step_is_set_aside_by_name_and_the_one_before_is_used(directory, damage, caplog):
  spoil, message = DAMAGES[damage]
  spoil(directory / 'checkpoint_00000003')

  with pytest.raises(CheckpointError, match=rf'(?s)checkpoint_00000003 is damaged: .*{message}.*Other steps: \[1, 2\]'):
    Checkpointer(directory).restore(abstract_state(), step=3)
  assert len(names(directory)) == 3, 'a step that was asked for is left where it is'

  assert_restores(Checkpointer(directory, read_only=True).restore(abstract_state()), 2)
  assert 'checkpoint_00000003' in names(directory), 'a reader renames nothing'

  checkpointer = Checkpointer(directory)
  assert_restores(checkpointer.restore(abstract_state()), 2)
  assert [name for name in names(directory) if name.startswith('checkpoint_00000003.damaged-')]
  assert re.search(rf'{message}.*set aside as checkpoint_00000003.damaged-', caplog.text)
  assert 'checkpoint_00000003' not in names(directory)
  checkpointer.save(3, device_state(3))  # its name is free again
  checkpointer.close()
  assert_restores(Checkpointer(directory).restore(abstract_state()), 3)


def test_no_whole_checkpoint_is_an_error_now_and_at_the_next_start(directory):
  for step in (1, 2, 3):
    flip_bit(array_file(directory / f'checkpoint_{step:08d}'))
  for _ in range(2):
    with pytest.raises(CheckpointError, match=r'has no checkpoint that is whole; damaged: .*00000001.damaged-state'):
      Checkpointer(directory).restore(abstract_state())


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


# Which steps are kept.


@pytest.mark.parametrize(
  'max_to_keep, keep_every_n_steps, kept',
  [(None, None, [1, 2, 3, 4, 5, 6]), (1, None, [6]), (2, None, [5, 6]), (1, 2, [2, 4, 6]), (2, 3, [3, 5, 6])],
)
def test_kept_steps(tmp_path, max_to_keep, keep_every_n_steps, kept):
  checkpointer = Checkpointer(tmp_path, max_to_keep=max_to_keep, keep_every_n_steps=keep_every_n_steps)
  for step in range(1, 7):
    checkpointer.save(step, {'x': jnp.full(3, step)})
  checkpointer.close()
  assert names(tmp_path) == [f'checkpoint_{step:08d}' for step in kept]


@pytest.mark.parametrize('setting', ['max_to_keep', 'keep_every_n_steps'])
def test_settings_below_one_are_refused(tmp_path, setting):
  with pytest.raises(ValueError, match=f'{setting} = 0 must be at least 1'):
    Checkpointer(tmp_path, **{setting: 0})


def test_a_step_that_is_not_newer_is_refused(directory):
  checkpointer = Checkpointer(directory)
  assert_restores(checkpointer.restore(abstract_state(), step=1), 1)
  with pytest.raises(CheckpointError, match=r'step 2 cannot be saved: .* already holds step 3'):
    checkpointer.save(2, device_state(2))
  checkpointer.close()
  assert checkpointer.all_steps() == [1, 2, 3]


def test_what_an_interrupted_job_left_is_removed_by_the_next_but_not_by_a_reader(directory):
  for name in ('checkpoint_00000004.partial', 'checkpoint_00000000.deleting', 'checkpoint_00000005.damaged-x.partial'):
    (directory / name / 'state').mkdir(parents=True)
  before = names(directory)
  Checkpointer(directory, read_only=True)
  assert names(directory) == before
  Checkpointer(directory)
  assert set(before) - set(names(directory)) == {'checkpoint_00000004.partial', 'checkpoint_00000000.deleting'}


# Errors of a save.


def test_a_full_disk_while_arrays_are_written_surfaces_at_the_next_call(directory):
  """RLIMIT_FSIZE makes the kernel refuse to grow a file, as a full disk does, without the rights to mount one."""
  checkpointer = Checkpointer(directory)
  big = {'x': jax.random.normal(jax.random.key(0), (1 << 19,))}
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
  try:
    checkpointer.save(4, big)
    with pytest.raises(CheckpointError, match=r'(?s)step 4 could not be saved .*Complete checkpoints: \[1, 2, 3\]'):
      checkpointer.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert names(directory) == [f'checkpoint_{step:08d}' for step in (1, 2, 3)], 'nothing is left to grow'
  assert_restores(checkpointer.restore(abstract_state()), 3)
  checkpointer.save(4, device_state(4))
  checkpointer.close()
  assert_restores(Checkpointer(directory).restore(abstract_state()), 4)


@pytest.mark.parametrize('next_call', ['save', 'wait', 'close', 'restore'])
def test_a_full_disk_while_the_manifest_is_written_surfaces_at_the_next_call(directory, monkeypatch, next_call):
  def no_space(*args):
    raise OSError(errno.ENOSPC, 'No space left on device')

  checkpointer = Checkpointer(directory)
  monkeypatch.setattr(manifest, 'write_durably', no_space)
  checkpointer.save(4, device_state(4))
  calls: dict[str, Callable[[], Any]] = {
    'save': lambda: checkpointer.save(5, device_state(5)),
    'wait': checkpointer.wait,
    'close': checkpointer.close,
    'restore': lambda: checkpointer.restore(abstract_state()),
  }
  with pytest.raises(CheckpointError, match=r'step 4 could not be saved .*No space left on device'):
    calls[next_call]()
  assert names(directory) == [f'checkpoint_{step:08d}' for step in (1, 2, 3)]


def test_a_directory_that_cannot_be_made_is_an_error_at_once(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(CheckpointError, match=r'cannot be used: .*Not a directory'):
    Checkpointer(tmp_path / 'file' / 'checkpoints')


def test_a_directory_that_has_gone_is_an_error_of_the_save(tmp_path):
  checkpointer = Checkpointer(tmp_path / 'checkpoints')
  (tmp_path / 'checkpoints').rmdir()
  (tmp_path / 'checkpoints').write_text('')
  with pytest.raises(CheckpointError, match='step 1 could not be saved'):
    checkpointer.save(1, device_state(1))


def test_a_directory_without_write_permission_is_an_error_of_the_save():
  with tempfile.TemporaryDirectory() as directory:  # tmp_path's parents are closed to other users
    checkpointer = Checkpointer(directory)
    state = device_state(1)
    os.chmod(directory, 0o555)
    user = os.geteuid()
    os.seteuid(65534 if user == 0 else user)  # root may write anywhere
    try:
      with pytest.raises(CheckpointError, match=r'step 1 could not be saved .*Permission denied'):
        checkpointer.save(1, state)
    finally:
      os.seteuid(user)
      os.chmod(directory, 0o755)
    checkpointer.save(1, state)
    checkpointer.close()
    assert checkpointer.all_steps() == [1]


@pytest.mark.parametrize('argument', ['input_state', 'metadata'])
def test_what_is_not_json_is_refused_and_leaves_nothing(tmp_path, argument):
  checkpointer = Checkpointer(tmp_path)
  with pytest.raises(CheckpointError, match=f'{argument} must be JSON'):
    checkpointer.save(1, device_state(1), **{argument: {'x': object()}})
  assert names(tmp_path) == []


def test_a_reader_cannot_save(directory):
  with pytest.raises(CheckpointError, match='read-only'):
    Checkpointer(directory, read_only=True).save(4, device_state(4))
