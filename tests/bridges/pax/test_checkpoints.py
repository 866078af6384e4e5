"""Reads a checkpoint written by Paxml 1.4.0 (tests/data/paxml_1_4_0), and small ones in its format."""

import json
from pathlib import Path
import re
import tarfile
from typing import Any, NamedTuple

from etils import epath
from flax import struct, traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from spmd_tasks.bridges.pax import checkpoint_format, open_pax_checkpoint, pax_checkpoints, read_pax_checkpoint
from spmd_tasks.checkpoints import Checkpointer, Retention
from spmd_tasks.errors import UserError

REAL = Path(__file__).parents[2] / 'data/paxml_1_4_0/dense_lm_ema.tar.xz'


@pytest.fixture(scope='module')
def real(tmp_path_factory):
  """Returns the directory `checkpoints` of a job of Paxml 1.4.0: DenseLmEma on a mesh 1 x 4 x 2, after 3 steps."""
  directory = tmp_path_factory.mktemp('paxml')
  with tarfile.open(REAL) as archive:
    archive.extractall(directory, filter='data')
  return epath.Path(directory) / 'checkpoints'


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
  """Returns a tree whose key paths have these names."""
  return traverse_util.unflatten_dict(leaves, sep='.')


def write(directory: Path, step: int, arrays: dict[str, np.ndarray], true_shapes: dict[str, Any]) -> epath.Path:
  """Writes a checkpoint in Paxml's format, with unpadded shapes of some arrays in its metadata."""
  path = epath.Path(directory) / f'checkpoint_{step:08d}'
  for name, array in arrays.items():
    store = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': f'{path}/state/{name}/'}}
    ts.open(store, create=True, dtype=array.dtype.name, shape=array.shape).result().write(array).result()
  described = {
    name: {'_array_metadata_tag': True, 'unpadded_shape': [*shape], 'dtype': 'float32', 'is_optax_masked_node': False}
    for name, shape in true_shapes.items()
  }
  (path / 'metadata').mkdir(parents=True)
  (path / 'metadata/metadata').write_text(json.dumps({'version': 1.1, 'train_state_metadata': nested(described)}))
  return path


def flat(tree: Any) -> dict[str, Any]:
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): x for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def abstract(array: Any, sharding: NamedSharding | None = None) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def even_sharding(shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> NamedSharding:
  """Shards the last dims over as many axes as divide them."""
  axes, spec = [*mesh.axis_names], []
  for size in reversed(shape):
    fits = bool(axes) and size % mesh.shape[axes[-1]] == 0
    spec.append(axes.pop() if fits else None)
  return NamedSharding(mesh, jax.P(*reversed(spec)))


def read_raw(path: epath.Path, name: str) -> np.ndarray:
  spec = {'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': f'{path}/state/{name}/'}}
  return ts.open(spec).result().read().result()


@pytest.mark.parametrize(
  'mesh_shape', [(4, 2), *(pytest.param(shape, marks=pytest.mark.exhaustive) for shape in ((1, 1), (1, 8)))]
)
def test_all_arrays_are_read_onto_any_mesh(real, mesh_shape):
  stored = open_pax_checkpoint(real).arrays
  mesh = jax.make_mesh(mesh_shape, ('data', 'mdl'), devices=jax.devices()[: mesh_shape[0] * mesh_shape[1]])
  target = nested({name: abstract(array, even_sharding(array.shape, mesh)) for name, array in stored.items()})
  state = flat(read_pax_checkpoint(real, target))
  assert len(state) == 71
  for name, array in state.items():
    assert array.sharding == even_sharding(array.shape, mesh)
    np.testing.assert_array_equal(array, read_raw(real / 'checkpoint_00000003', name))


def test_names_shapes_and_dtypes_equal_paxml(real):
  expected = json.loads((real.parent / 'expected.json').read_text())['checkpoints']['a']['arrays']
  # Paxml's names have `_i` for item i of a list or tuple; expected.json separates all keys by dots.
  expected = {re.sub(r'^opt_states\.0\.([^.]+)\.', r'opt_states_0.\1_', name): leaf for name, leaf in expected.items()}
  stored = open_pax_checkpoint(real).arrays
  assert {name: [[*array.shape], np.dtype(array.dtype).name] for name, array in stored.items()} == expected


@pytest.mark.parametrize(
  'change, problem',
  [
    ({'mdl_vars.params.lm.new.w': (3, 4)}, r'mdl_vars.params.lm.new.w float32\[3, 4\] is not in the checkpoint'),
    (
      {'mdl_vars.params.lm.final_ln.bias': (33,)},
      r'mdl_vars.params.lm.final_ln.bias must be float32\[33\], but the checkpoint has float32\[32\]',
    ),
    ({'opt_states_0.no_prefix_4.count': None}, r'no_prefix_4.count int32\[\] .* not in the model'),
  ],
  ids=['missing', 'too large', 'left over'],
)
def test_mismatches_are_listed(real, change, problem):
  leaves = {name: abstract(array) for name, array in open_pax_checkpoint(real).arrays.items()}
  for name, shape in change.items():
    leaves.pop(name, None)
    if shape is not None:
      leaves[name] = jax.ShapeDtypeStruct(shape, 'float32')
  with pytest.raises(UserError, match=problem):
    read_pax_checkpoint(real, nested(leaves))


class Moments(NamedTuple):
  count: Any
  m: Any


class State(struct.PyTreeNode):
  """Has the key paths of Paxml's TrainState."""

  step: Any
  mdl_vars: Any
  opt_states: Any
  extra_state: Any = ()


def test_padding_is_cut_off(tmp_path):
  """A mesh of 4 devices stored [3, 7] as [4, 8]; the checkpoint has no unpadded shapes of optimizer state."""
  stored = np.zeros((4, 8), np.float32)
  stored[:3, :7] = np.arange(21).reshape(3, 7)
  names = ('mdl_vars.params.w', 'opt_states_0_0.m.params.w')
  path = write(tmp_path, 0, dict.fromkeys(names, stored), {names[0]: (3, 7)})
  restored = read_pax_checkpoint(path, nested({name: jax.ShapeDtypeStruct((3, 7), 'float32') for name in names}))
  for name in names:
    np.testing.assert_array_equal(flat(restored)[name], np.arange(21).reshape(3, 7))
  with pytest.raises(UserError, match=r'params.w must be float32\[4, 8\], but the checkpoint has float32\[3, 7\]'):
    read_pax_checkpoint(path, nested({names[0]: jax.ShapeDtypeStruct((4, 8), 'float32')}))
  with pytest.raises(UserError, match=r'm.params.w must be float32\[5, 7\], but the checkpoint has float32\[4, 8\]'):
    read_pax_checkpoint(path, nested({names[1]: jax.ShapeDtypeStruct((5, 7), 'float32')}))


def test_a_checkpoint_with_ocdbt_is_read(tmp_path):
  """Version 1.2, which Paxml writes with tensorstore_use_ocdbt: one store with Orbax's names."""
  weights = {'w': np.arange(48, dtype=np.float32).reshape(6, 8), 'b': jnp.arange(3, dtype=jnp.bfloat16)}
  moments = Moments(count=np.int32(3), m={'w': np.ones((6, 8), np.float32), 'b': optax.MaskedNode()})
  state = State(
    step=np.uint32(3),
    mdl_vars={'params': weights, 'non_trainable': {'n': np.int8([1, 2])}},
    opt_states=[{'no_prefix': (optax.EmptyState(), moments), 'p#2.3#i-1.i-1': (moments,)}],
  )
  state = jax.tree.map(jnp.asarray, state)
  path = epath.Path(tmp_path) / 'checkpoint_00000003'
  (path / 'metadata').mkdir(parents=True)
  (path / 'metadata/metadata').write_text('{"version": 1.2, "train_state_metadata": {}}')
  handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True)
  handler.save(path / 'state', args=ocp.args.PyTreeSave(state))
  handler.finalize(path / 'state')
  handler.close()
  restored = read_pax_checkpoint(path, jax.tree.map(abstract, state))
  jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_complete_checkpoints_are_distinguished_from_ours(real, tmp_path):
  directory = epath.Path(tmp_path)
  assert checkpoint_format(directory / 'missing') is None
  assert checkpoint_format(directory) is None
  own = Checkpointer(directory, retention=Retention(max_to_keep=1))
  own.save(5, {'w': jnp.zeros(2)}, input_state={})
  own.close()
  assert checkpoint_format(directory) == 'spmd_tasks'
  for step in (3, 12):
    write(directory, step, {'step': np.array(step, np.uint32)}, {})
  unfinished = directory / 'checkpoint_00000020.orbax-checkpoint-tmp-17'
  (unfinished / 'metadata').mkdir(parents=True)
  (unfinished / 'metadata/metadata').write_text('{}')
  assert [*pax_checkpoints(directory)] == [3, 12]
  assert checkpoint_format(directory) == 'pax'
  assert open_pax_checkpoint(directory).step == 12
  with pytest.raises(UserError, match=r'step 20: .*\[3, 12\]'):
    open_pax_checkpoint(directory, 20)
  with pytest.raises(UserError, match='of a Pax job'):
    open_pax_checkpoint(directory / 'missing')
