"""Checkpoints in one process are bit-exact on any mesh, refuse mismatches, and keep the newest."""

import os

from checkpoint_states import (
  abstract_state,
  assert_is_state,
  assert_restores,
  device_state,
  host_state,
  names,
  sharding,
)
from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from spmd_tasks.checkpoints import Checkpointer, Retention
from spmd_tasks.checkpoints.arrays import copy_to_host, read_arrays
from spmd_tasks.checkpoints.checkpoint_directory import CheckpointDirectory
from spmd_tasks.checkpoints.manifest import CheckpointError


@pytest.mark.parametrize('mesh_shape', [(4, 2), (1, 1), (2,)])
def test_the_newest_step_is_restored_bit_exactly_on_any_mesh(directory, mesh_shape):
  abstract = abstract_state(mesh_shape)
  restored = Checkpointer(directory).restore(abstract)
  assert_restores(restored, 3)
  assert restored.input_state == {'position': 30}
  assert restored.input_states == [{'position': 30}]
  for leaf, wanted in zip(jax.tree.leaves(restored.state), jax.tree.leaves(abstract)):
    assert leaf.sharding == wanted.sharding


@pytest.mark.parametrize('name', ['a*b?[1]', os.fsdecode(b'\xff'), 'back\\slash ü %20#{x}\n'])
def test_a_directory_may_have_any_name(tmp_path, name):
  """TensorStore itself accepts only UTF-8."""
  (tmp_path / name).mkdir()
  checkpointer = Checkpointer(tmp_path / name)
  checkpointer.save(3, device_state(3))
  checkpointer.close()
  assert_restores(Checkpointer(tmp_path / name).restore(abstract_state()), 3)


def test_a_step_is_restored_by_number(directory):
  checkpointer = Checkpointer(directory)
  assert checkpointer.all_steps() == [1, 2, 3]
  assert_restores(checkpointer.restore(abstract_state(), step=2), 2)
  with pytest.raises(CheckpointError, match=r'has no checkpoint of step 7; it has \[1, 2, 3\]'):
    checkpointer.restore(abstract_state(), step=7)


def test_the_state_may_be_donated_as_soon_as_save_returns(tmp_path):
  """The state is large enough for the write to be still running when the buffers are overwritten."""
  values = np.arange(2_000_000, dtype=np.uint32).reshape(2000, 1000)
  state = {'x': jax.device_put(values, sharding((2, 4), 'data', 'mdl'))}
  update = jax.jit(lambda tree: {'x': tree['x'] * 3 + 1}, donate_argnums=0)
  abstract = {'x': jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=state['x'].sharding)}
  checkpointer = Checkpointer(tmp_path, retention=Retention(max_to_keep=None))
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


def test_orbax_opens_the_arrays(directory):
  path = directory / 'checkpoint_00000003' / 'state'
  checkpointer = ocp.StandardCheckpointer()
  without_target = checkpointer.restore(path)
  assert_is_state(jax.tree.unflatten(jax.tree.structure(host_state(3)), jax.tree.leaves(without_target)), 3)

  def target(leaf):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding((2, 4), *('data', 'mdl')[: leaf.ndim]))

  emb = checkpointer.restore(path, jax.tree.map(target, without_target))['weights']['emb']
  assert emb.sharding == sharding((2, 4), 'data', 'mdl')
  np.testing.assert_array_equal(emb, host_state(3)['weights']['emb'])


@pytest.mark.parametrize('subtree', ['weights', 'weights/ffn', 'learner/0/mu'])
def test_weights_are_restored_without_the_optimizer(directory, subtree):
  def pick(tree):
    parts = {'weights': tree['weights'], 'weights/ffn': tree['weights']['ffn'], 'learner/0/mu': tree['learner'][0].mu}
    return parts[subtree]

  restored = Checkpointer(directory, read_only=True).restore_weights(pick(abstract_state()), subtree=subtree)
  assert restored.step == 3
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored.state), pick(host_state(3)))


def leaf(shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


MISMATCHES = {
  'shape': (lambda weights: weights.update(emb=leaf((17, 8))), r'float32\[17,8\], the checkpoint has float32\[16,8\]'),
  'dtype': (
    lambda weights: weights.update(emb=leaf((16, 8), jnp.bfloat16)),
    r'bfloat16\[16,8\], the checkpoint has float32\[16,8\]',
  ),
  'missing': (lambda weights: weights.update(new=leaf((3,))), r'float32\[3\], the checkpoint has no such leaf'),
  'extra': (lambda weights: weights.pop('emb'), r'no such leaf, the checkpoint has float32\[16,8\]'),
}


@pytest.mark.parametrize('kind', MISMATCHES)
def test_a_mismatch_is_refused_with_both_sides_and_the_remedy(directory, kind):
  edit, message = MISMATCHES[kind]
  abstract = abstract_state()
  edit(abstract['weights'])
  message = f'(?s)weights/(emb|new): the experiment has {message}.*Restore it with the experiment'
  checkpointer = Checkpointer(directory)
  with pytest.raises(CheckpointError, match=message):
    checkpointer.restore(abstract)
  with pytest.raises(CheckpointError, match=message):
    checkpointer.restore_weights(abstract['weights'])
  assert checkpointer.all_steps() == [1, 2, 3]


@pytest.mark.parametrize(
  'max_to_keep, keep_every_n_steps, kept', [(None, None, [1, 2, 3, 4]), (1, None, [4]), (1, 2, [2, 4])]
)
def test_kept_steps(tmp_path, max_to_keep, keep_every_n_steps, kept):
  retention = Retention(max_to_keep=max_to_keep, keep_every_n_steps=keep_every_n_steps)
  checkpointer = Checkpointer(tmp_path, retention=retention)
  for step in range(1, 5):
    checkpointer.save(step, {'x': jnp.full(3, step)})
  checkpointer.close()
  assert names(tmp_path) == [f'checkpoint_{step:08d}' for step in kept]


def test_one_checkpoint_per_interval_of_hours_is_kept(tmp_path):
  """Checkpoints are saved every half hour, and one late."""
  directory = CheckpointDirectory(path=epath.Path(tmp_path))
  for step, hour in enumerate((0, 0.5, 1, 1.5, 2.4, 2.9, 3.4, 3.9)):
    directory.step_path(step).mkdir()
    (manifest := directory.step_path(step) / 'manifest.json').write_text('')
    os.utime(manifest, (0, 3600 * hour))
  directory.delete_old(Retention(max_to_keep=1, keep_every_hours=1))
  assert directory.complete_steps() == [0, 2, 4, 6, 7]
  directory.delete_old(Retention(max_to_keep=1, keep_every_hours=1))  # the same again
  assert directory.complete_steps() == [0, 2, 4, 6, 7]


def test_deleting_a_linked_checkpoint_removes_only_the_link(tmp_path):
  elsewhere = tmp_path / 'elsewhere'
  directory = CheckpointDirectory(path=epath.Path(tmp_path / 'checkpoints'))
  for path in (elsewhere, directory.step_path(2)):
    path.mkdir(parents=True)
    (path / 'manifest.json').write_text('')
  os.symlink(elsewhere, directory.step_path(1))
  directory.delete_old(Retention(max_to_keep=1))
  assert names(directory.path) == ['checkpoint_00000002']
  assert (elsewhere / 'manifest.json').exists()


def test_a_step_that_is_not_newer_is_refused(directory):
  checkpointer = Checkpointer(directory)
  assert_restores(checkpointer.restore(abstract_state(), step=1), 1)
  with pytest.raises(CheckpointError, match=r'step 2 cannot be saved: .* already holds step 3'):
    checkpointer.save(2, device_state(2))
  checkpointer.close()
  assert checkpointer.all_steps() == [1, 2, 3]


def test_a_copy_from_a_store_is_restored_on_a_disk(tmp_path):
  """A weight's directory has a quoted name in a store, and so in the copy."""
  directory, value = epath.Path(tmp_path), {'p#2': jnp.arange(4.0)}
  copy_to_host(directory, value)()
  (directory / 'p#2').rename(directory / 'p%232')
  np.testing.assert_array_equal(read_arrays(directory, jax.eval_shape(lambda: value))['p#2'], value['p#2'])
