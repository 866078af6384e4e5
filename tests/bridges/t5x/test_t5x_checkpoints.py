"""Exports checkpoints byte for byte as T5X, and reads them again."""

import filecmp
import functools
import types

from flax import serialization, traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.bridges.t5x import T5xOrigin, open_checkpoint, write_checkpoint
from spmd_tasks.bridges.t5x._weights import Layout
from spmd_tasks.bridges.t5x.origin import layout_of, moments_of, write_state
from spmd_tasks.errors import UserError
from spmd_tasks.learning import Adafactor, Learner
from spmd_tasks.runtime import TrainState
from spmd_tasks.sharding import WeightSpec

L, D, H, K, F, E, V, N = 2, 64, 4, 16, 128, 8, 256, 32


def attention(name, *, d=D, h=H, k=K):
  return {f'{name}/{part}/kernel': (d, h, k) for part in ('query', 'key', 'value')} | {f'{name}/out/kernel': (h, k, d)}


def ffn(*, gated=True, d=D, f=F):
  return {f'ffn/{part}/kernel': (d, f) for part in (('gate', 'up') if gated else ('up',))} | {'ffn/down/kernel': (f, d)}


MIXTURE = {'ffn/experts/gate': (E, D, F), 'ffn/experts/up': (E, D, F), 'ffn/experts/down': (E, F, D)}
MIXTURE |= {'ffn/router/kernel': (D, E)}
NORMS = {'attention_norm/scale': (D,), 'ffn_norm/scale': (D,)}
ENCODER = attention('attention') | NORMS
DECODER = ENCODER | attention('cross_attention') | {'cross_attention_norm/scale': (D,)}
WHOLE = {
  'embedding/table': (V, D),
  'embedding/softmax_kernel': (D, V),
  'encoder_norm/scale': (D,),
  'final_norm/scale': (D,),
}
SHARED_BIASES = {'encoder_position_bias/table': (H, N), 'position_bias/table': (H, N)}


def stacked(prefix, shapes, num=L):
  return {f'{prefix}/layers/{name}': (num, *shape) for name, shape in shapes.items()}


# The case `moe` of T5X: every second layer is a mixture. `scalable_t5`: a bias per layer.
MOE = WHOLE | SHARED_BIASES
for side, layer in (('encoder_stack', ENCODER), ('stack', DECODER)):
  for i, sublayer in enumerate((ffn(), MIXTURE)):
    MOE |= {f'{side}/layers/block_{i}/{name}': (1, *shape) for name, shape in (layer | sublayer).items()}
BIAS = {'attention/position_bias/table': (H, N)}
SCANNED = {
  **WHOLE,
  **stacked('encoder_stack', ENCODER | ffn() | BIAS, 3),
  **stacked('stack', DECODER | ffn() | BIAS, 3),
}
WIDE = {'d': 128, 'h': 4, 'k': 32}
DECODER_ONLY = {
  'embedding/table': (V, 128),
  'embedding/softmax_kernel': (128, V),
  'position_bias/table': (H, N),
  'final_norm/scale': (128,),
  **stacked('stack', attention('attention', **WIDE) | ffn(gated=False, d=128, f=256)),
  **stacked('stack', {name: (128,) for name in NORMS}),
}


def spec_of(name, shape):
  num_input_dims = 2 if name.endswith('out/kernel') else 0 if name.endswith(('table', 'softmax_kernel')) else 1
  is_norm = name.endswith('scale')
  return WeightSpec(
    shape=shape,
    init=None,
    stacked=int('stack/' in name),
    tags=('no_decay',) if is_norm else ('expert',) if '/experts/' in name else (),
    num_input_dims=None if is_norm else num_input_dims,
  )


def tree(flat):
  return traverse_util.unflatten_dict(flat, sep='/')


def state_of(shapes, rng, **settings):
  """Returns a state of step 20 with random numbers."""

  def drawn(leaf):
    return jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)

  specs = tree({name: spec_of(name, shape) for name, shape in shapes.items()})
  weights = tree({name: drawn(jax.ShapeDtypeStruct(shape, jnp.float32)) for name, shape in shapes.items()})
  learner = Learner(optimizer=Adafactor.as_t5x(learning_rate=0.1, **settings))
  state = jax.eval_shape(lambda weights: learner.init(weights, specs), weights)
  return types.SimpleNamespace(weights=weights, learner=jax.tree.map(drawn, state), step=jnp.int32(20))


def without_numbers(path):
  contents = serialization.msgpack_restore(path.read_bytes())
  return jax.tree.map(lambda x: (x.shape, x.dtype) if isinstance(x, np.ndarray) and x.size > 1 else x, contents)


@pytest.mark.parametrize('name, shapes', [('moe', MOE), ('decoder_only', DECODER_ONLY)])
def test_a_checkpoint_has_the_msgpack_file_of_t5x(name, shapes, rng, tmp_path, request):
  """Compares names, shapes, and the chunks and compression of arrays outside of the file with a checkpoint of T5X."""
  state = state_of(shapes, rng)
  path = write_state(tmp_path, state, layout_of(state, Adafactor.as_t5x(learning_rate=0.1)))
  expected = request.config.rootpath / 'tests' / 'data' / 't5x' / f'{name}.checkpoint'
  assert without_numbers(path / 'checkpoint') == without_numbers(expected)


def test_an_array_is_written_byte_for_byte(tmp_path, request):
  original = request.config.rootpath / 'tests' / 'data' / 't5x' / 'target.decoder.decoder_norm.scale'
  import tensorstore as ts

  store = ts.open({'driver': 'zarr', 'kvstore': {'driver': 'file', 'path': f'{original}/'}}, open=True).result()
  values = store.read().result()
  path = write_checkpoint(tmp_path, 20, {'target/decoder/decoder_norm/scale': values}, ())
  same, _, _ = filecmp.cmpfiles(original, path / original.name, ['.zarray', '0'], shallow=False)
  assert same == ['.zarray', '0']
  with pytest.raises(UserError, match='checkpoint_20 exists'):
    write_checkpoint(tmp_path, 20, {'target/decoder/decoder_norm/scale': values}, ())


def test_bfloat16_arrays_are_read(tmp_path):
  values = np.arange(12, dtype=jnp.bfloat16).reshape(3, 4)
  path = write_checkpoint(tmp_path, 5, {'target/kernel': values}, ())
  for _ in range(2):
    arrays = open_checkpoint(path).arrays['target/kernel']
    assert arrays.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(arrays), values)
    (path / 'target.kernel' / '.zarray').unlink(missing_ok=True)  # as in T5X's own test data


class Model:
  """The part of a PartitionedModel that T5xOrigin needs, on one device."""

  def __init__(self, state):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    self._state = state
    self.canonical_state = types.SimpleNamespace(
      weights=self._abstract(state.weights, sharding),
      learner=types.SimpleNamespace(opt_state=self._abstract(state.learner.opt_state, sharding)),
    )
    self.abstract_state = self.padded_state = self.canonical_state

  def init(self, seed):
    """Returns a state of zeros."""
    del seed
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    weights, learner = zeros(self._state.weights), zeros(self._state.learner)
    return TrainState(step=jnp.int32(0), rng=jax.random.key(0), weights=weights, learner=learner, non_trainable={})

  def from_canonical(self, canonical, part):
    del part
    return canonical  # without padding

  @staticmethod
  def _abstract(tree, sharding):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


@pytest.mark.parametrize(
  'shapes, layout, settings',
  [
    (MOE, Layout(), {}),
    (DECODER_ONLY, Layout(decoder_only=True), {'momentum': 0.9}),
    (SCANNED, Layout(scanned=True), {'scanned': True, 'momentum': 0.9}),
    (SCANNED, Layout(heads_apart=True), {'heads_apart': True}),
  ],
)
def test_exported_states_are_restored(shapes, layout, settings, rng, tmp_path):
  state = state_of(shapes, rng, **settings)
  assert layout_of(state, Adafactor.as_t5x(learning_rate=0.1, **settings)) == layout
  checkpoint = open_checkpoint(write_state(tmp_path, state, layout))
  assert checkpoint.step == 20
  assert Layout.of(checkpoint.weights, '') == Layout(**{**vars(layout), 'source': ''})
  origin, model = T5xOrigin(path=str(tmp_path)), Model(state)
  variables, step, place = origin.weights(model, lambda state: state.variables)  # for eval and decode jobs
  assert (step, place) == (20, str(checkpoint.path))
  jax.tree.map(np.testing.assert_array_equal, variables['params'], state.weights)
  restored, step, _ = origin.start(model, 0)  # for training jobs
  assert step == restored.step == 20
  jax.tree.map(np.testing.assert_array_equal, restored.weights, state.weights)
  flat = traverse_util.flatten_dict(state.weights, sep='/')
  moments, expected = (moments_of(s.learner.opt_state, flat) for s in (restored, state))
  assert sum(map(len, expected.values())) > len(flat)
  jax.tree.map(np.testing.assert_array_equal, moments, expected)
  arrays = {name: array.shape for name, array in checkpoint.arrays.items()}
  if layout.heads_apart:  # like `scalable_t5` without a scan
    assert arrays['target/decoder/layers_1/self_attention/out/kernel'] == (H, K, D)
    assert arrays['state/param_states/decoder/layers_1/self_attention/out/kernel/v_col'] == (H, K)
    assert arrays['state/param_states/decoder/layers_1/mlp/wo/kernel/v'] == (F, D)
  if layout.scanned:  # layers are in dim 1
    assert arrays['target/decoder/decoder/self_attention/out/kernel'] == (H, 3, K, D)
    assert arrays['state/param_states/decoder/decoder/self_attention/out/kernel/v_col'] == (H, 3, K)
    assert arrays['state/param_states/decoder/decoder/self_attention/out/kernel/v_row'] == (3, D)
    assert arrays['state/param_states/encoder/encoder/relpos_bias/rel_embedding/v'] == (H, 3, N)


def test_parts_are_restored_by_assignment_maps(rng, tmp_path):
  state = state_of(DECODER_ONLY, rng)
  write_state(tmp_path, state, Layout(decoder_only=True))
  model = Model(state)

  def restore(**settings):
    origin = T5xOrigin(path=str(tmp_path), with_optimizer=False, **settings)
    return traverse_util.flatten_dict(origin.start(model, 0)[0].weights, sep='/')

  weights = restore(assignment_map=((r'target/decoder/logits_dense/.*', None),))
  assert {name for name, weight in weights.items() if not weight.any()} == {'embedding/softmax_kernel'}
  weights = restore(assignment_map=((r'target/decoder/layers_0/(.*_norm/scale)', r'target/decoder/layers_1/\1'),))
  norms = state.weights['stack']['layers']['ffn_norm']['scale']
  np.testing.assert_array_equal(weights['stack/layers/ffn_norm/scale'], norms[np.array([1, 1])])
  with pytest.raises(UserError, match=r'patterns that match no weight: target/nothing'):
    restore(assignment_map=(('target/nothing', None),))
  del model.canonical_state.weights['stack']['layers']['ffn_norm']
  with pytest.raises(UserError, match='has decoder/layers_0/pre_mlp_layer_norm/scale'):
    restore()


def test_other_optimizers_and_rules_are_refused(rng, tmp_path):
  write_state(tmp_path, state_of(DECODER_ONLY, rng), Layout(decoder_only=True))
  other = Model(state_of(DECODER_ONLY, rng, min_dim_size_to_factor=1000))
  with pytest.raises(UserError, match=r'moments \(v\)(.|\n)*Adafactor.as_t5x'):
    T5xOrigin(path=str(tmp_path)).start(other, 0)


def test_other_files_are_refused(tmp_path):
  with pytest.raises(UserError, match='does not exist'):
    open_checkpoint(tmp_path / 'nothing')
  with pytest.raises(UserError, match='has no checkpoint of T5X'):
    open_checkpoint(tmp_path)
  (tmp_path / 'checkpoint_3').mkdir()
  (tmp_path / 'checkpoint_3' / 'checkpoint').write_bytes(b'nothing')
  with pytest.raises(UserError, match=r'steps \[3\]'):
    open_checkpoint(tmp_path, 4)
  with pytest.raises(UserError, match='damaged or not a checkpoint of T5X'):
    open_checkpoint(tmp_path)


def refused_when_opened_or_read(path):
  with pytest.raises(UserError, match=r'damaged or not an array of T5X|has an array outside'):
    np.asarray(open_checkpoint(path).arrays['target/kernel'])


@pytest.mark.parametrize('content', ['', '{', '[]', '{"shape": [3, 4]}', None])
def test_arrays_with_damaged_metadata_are_refused(content, tmp_path):
  path = write_checkpoint(tmp_path, 5, {'target/kernel': np.ones((3, 4), np.float32)}, ())
  file = path / 'target.kernel' / '.zarray'
  file.write_text(content if content is not None else file.read_text().replace('<f4', '<f5'))
  refused_when_opened_or_read(path)


@pytest.mark.parametrize(
  'leaf',
  [
    {'driver': 'zarr'},
    {'driver': 'zarr', 'kvstore': 5},
    {'driver': 'zarr', 'kvstore': {'path': 7}},
    {'driver': 'zarr', 'kvstore': {'path': '../../elsewhere'}},
    {'driver': 'zarr', 'path': 'target.kernel', 'dtype': 'no dtype', 'metadata': {}},
    {'driver': 'zarr', 'path': 'target.kernel', 'dtype': 'float32', 'metadata': {'shape': 'x', 'chunks': [-1]}},
    {'driver': 'zarr', 'path': 'target.kernel', 'dtype': 'float32'},
  ],
  ids=str,
)
def test_damaged_paths_of_arrays_are_refused(leaf, tmp_path):
  path = write_checkpoint(tmp_path, 5, {'target/kernel': np.ones((3, 4), np.float32)}, ())
  (path / 'target.kernel' / '.zarray').unlink()
  contents = {'version': 3, 'optimizer': {'target': {'kernel': leaf}}}
  (path / 'checkpoint').write_bytes(serialization.msgpack_serialize(contents))
  refused_when_opened_or_read(path)


def test_truncated_chunks_are_refused_when_they_are_read(tmp_path):
  path = write_checkpoint(tmp_path, 5, {'target/kernel': np.ones((3, 4), np.float32)}, ())
  chunk = path / 'target.kernel' / '0.0'
  chunk.write_bytes(chunk.read_bytes()[:7])
  refused_when_opened_or_read(path)
