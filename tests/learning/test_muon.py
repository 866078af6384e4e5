"""Muon updates each layer's matrix as torch.optim.Muon does, on any mesh, and all other weights as AdamW does."""

import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention import Attention
from spmd_tasks.learning import AdamW, Learner, Muon, MuonClip
from spmd_tasks.learning.layer_weights import layer_matrix
from spmd_tasks.sharding import MeshSpec, WeightSpec, padding, split_dims_to_partition_spec
from spmd_tasks.sharding.specs import sharding_scope
from spmd_tasks.sharding.weights import unbox_weights
from tests.layers.tiny_model import random_weights

RULES = (('embed', 'data'), ('mlp', 'mdl'), ('heads', 'mdl'), ('expert', 'data'), ('stages', 'mdl'))
NUM_STEPS, RATE, DECAY = 3, 0.1, 0.2


def kernel(shape, split_dims, stacked=0, num_input_dims=1, tags=()):
  return WeightSpec(
    shape=shape, init=None, split_dims=split_dims, stacked=stacked, num_input_dims=num_input_dims, tags=tags
  )


MATRICES = {
  'wide': kernel((6, 10), ('embed', 'mlp')),
  'tall layers': kernel((9, 10, 6), (None, 'embed', 'mlp'), 1),
  'few layers': kernel((3, 6, 9), (None, 'embed', 'mlp'), 1),
  'query': kernel((3, 8, 3, 5), (None, 'embed', 'heads', None), 1),
  'out': kernel((3, 3, 5, 8), (None, 'heads', None, 'embed'), 1, 2),
  'stages': kernel((2, 3, 6, 4), (None, 'stages', 'embed', None), 2),
  'experts': kernel((2, 6, 5, 7), (None, 'expert', None, 'mlp'), 1, tags=('expert',)),
}
OTHERS = {
  'table': kernel((9, 6), ('mlp', 'embed'), num_input_dims=0),
  'norms': WeightSpec(shape=(3, 6), init=None, stacked=1, split_dims=(None, None), tags=('no_decay',)),
  'biases of heads': WeightSpec(shape=(3, 2, 4), init=None, stacked=1, split_dims=(None,) * 3, tags=('no_decay',)),
}
SPECS = MATRICES | OTHERS


def muon(scale='original', nesterov=True):
  return Muon(learning_rate=RATE, weight_decay=DECAY, scale=scale, nesterov=nesterov, adam_scale=0.25)


@functools.cache
def start_and_grads():
  """Initial weights, and the gradients of each step."""
  rng = np.random.default_rng(0)
  start, *grads = ({name: rng.normal(size=spec.shape) for name, spec in SPECS.items()} for _ in range(1 + NUM_STEPS))
  return start, grads


def only(names, tree):
  return {name: tree[name] for name in names}


@functools.cache
def trained_alone(optimizer, names=tuple(SPECS)):
  start, grads = start_and_grads()
  return trained(optimizer, only(names, start), [only(names, g) for g in grads], only(names, SPECS))[0]


def trained(optimizer, start, grads, specs=SPECS, mesh=None):
  """The weights after the steps, and the compiled step, which takes padded arrays if there is a mesh."""
  learner = Learner(optimizer=optimizer)
  weights = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), start)
  step = lambda g, i, state, w: learner.update(g, jnp.float32(1), i, state, w, specs)[:2]
  state = learner.init(weights, specs)
  if mesh is None:
    compiled = jax.jit(step)
  else:
    true = (weights, state)
    all_specs = (specs, learner.state_split_dims(state, specs))
    split = lambda s: split_dims_to_partition_spec(s.split_dims, mesh.axis_names, RULES)
    padded = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(
        padding.padded_shape(x.shape, split(s), mesh.shape), x.dtype, sharding=jax.NamedSharding(mesh, split(s))
      ),
      true,
      all_specs,
    )

    def on_mesh(g, i, state, w):
      with sharding_scope(mesh, RULES):
        g, w, state = padding.unpad(g, true[0]), padding.unpad(w, true[0]), padding.unpad(state, true[1])
        return padding.pad(step(g, i, state, w), padded)

    compiled = jax.jit(on_mesh, out_shardings=jax.tree.map(lambda x: x.sharding, padded))
    weights, state = padding.pad((weights, state), padded)
    grads = [padding.pad(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), g), padded[0]) for g in grads]
    compiled = compiled.lower(grads[0], jnp.int32(0), state, weights).compile()
  for i, g in enumerate(grads):
    weights, state = compiled(g if mesh else jax.tree.map(jnp.float32, g), jnp.int32(i), state, weights)
  return (weights, compiled) if mesh is None else (padding.unpad(weights, true[0]), compiled)


def torch_muon(monkeypatch, scale, nesterov, start, grads):
  """Trains with torch.optim.Muon in float64 instead of bfloat16; its matrices are [outputs, inputs]."""
  import torch  # takes seconds

  float64_torch = types.SimpleNamespace(**vars(torch))
  float64_torch.bfloat16 = torch.float64
  monkeypatch.setattr('torch.optim._muon.torch', float64_torch)

  def matrices(name, x):
    return torch.tensor(x.reshape(-1, *layer_matrix(SPECS[name])).swapaxes(-1, -2).copy())

  weights = {name: [torch.nn.Parameter(w) for w in matrices(name, start[name])] for name in MATRICES}
  settings = {'lr': RATE, 'weight_decay': DECAY, 'adjust_lr_fn': scale, 'nesterov': nesterov}
  optimizer = torch.optim.Muon([w for layers in weights.values() for w in layers], **settings)
  for g in grads:
    for name, layers in weights.items():
      for weight, grad in zip(layers, matrices(name, g[name])):
        weight.grad = grad
    optimizer.step()
  return {name: np.stack([w.detach().numpy().T for w in layers]) for name, layers in weights.items()}


@pytest.mark.parametrize(
  'scale, nesterov',
  [
    ('original', True),
    ('match_rms_adamw', False),
    pytest.param('spectral_unclamped', True, marks=pytest.mark.exhaustive),
  ],
)
def test_matrices_agree_with_torch_and_other_weights_with_adamw(scale, nesterov, monkeypatch):
  start, grads = start_and_grads()
  got = trained_alone(muon(scale, nesterov))
  expected = torch_muon(monkeypatch, scale, nesterov, start, grads)
  for name, spec in MATRICES.items():
    for ours, theirs in zip(got[name].reshape(-1, *layer_matrix(spec)), expected[name]):
      assert np.linalg.norm(ours - theirs) < 1e-6 * np.linalg.norm(theirs), name
  others = trained_alone(AdamW(learning_rate=0.25 * RATE, weight_decay=DECAY, beta2=0.95), tuple(OTHERS))
  for name in OTHERS:
    np.testing.assert_allclose(got[name], others[name], rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.parametrize('shape', [(4, 2), pytest.param((2, 4), marks=pytest.mark.exhaustive)])
def test_a_mesh_gives_the_same_result_without_an_all_gather(shape):
  names = ('few layers', 'query', 'stages', 'experts', 'table')
  start, grads = start_and_grads()
  mesh = MeshSpec(axis_names=('data', 'mdl'), ici_mesh_shape=shape).build()
  got, compiled = trained(muon(), only(names, start), [only(names, g) for g in grads], only(names, SPECS), mesh)
  assert ' all-gather(' not in compiled.as_text()
  alone = trained_alone(muon())
  for name in names:
    error = np.linalg.norm(got[name] - alone[name])
    assert error < 1e-6 * np.linalg.norm(alone[name]), name


def test_whole_layers_move_to_devices_by_all_to_all():
  """With an even stack, every product is of whole matrices on one device."""
  specs = {'up': kernel((8, 16, 32), (None, 'embed', 'mlp'), 1)}
  mesh = MeshSpec(axis_names=('data', 'mdl'), ici_mesh_shape=(4, 2)).build()
  zeros = {'up': np.zeros((8, 16, 32))}
  text = trained(Muon(learning_rate=RATE), zeros, [zeros], specs, mesh)[1].as_text()
  assert ' all-gather(' not in text
  assert text.count(' all-to-all(') == 4
  assert 'f32[16,32]{1,0} dot(' in text


def test_a_matrix_must_declare_its_input_dims():
  specs = {'ffn': {'kernel': WeightSpec(shape=(2, 4, 6), init=None, stacked=1)}}
  weights = {'ffn': {'kernel': jnp.zeros((2, 4, 6))}}
  with pytest.raises(UserError, match=r'Muon .* ffn/kernel .*: pass num_input_dims .* use Linear'):
    Learner(optimizer=Muon(learning_rate=0.1)).init(weights, specs)


@pytest.mark.parametrize(
  'settings',
  [
    {'scale': 'moonshot'},
    {'coefficients': (1.5, -0.5)},
    {'num_iterations': 0},
    {'dtype': 'int8'},
    {'adam_scale': -1.0},
  ],
)
def test_invalid_settings_are_refused(settings):
  ((name, value),) = settings.items()
  with pytest.raises(UserError, match=re.escape(f'Muon.{name} is {value!r}; it must be ')):
    Muon(learning_rate=0.1, **settings)


@pytest.mark.parametrize('num_kv_heads', [4, 2])
def test_qk_clip_shrinks_heads_whose_largest_logit_exceeds_the_bound(num_kv_heads, rng):
  """Rows have several documents and padding; 300 tokens are two blocks of queries."""
  attention = Attention(num_heads=4, num_kv_heads=num_kv_heads, rotary=None, qk_clip=3.0, window=280)
  x = jnp.asarray(rng.normal(size=(2, 300, 8)), jnp.float32)
  segment_ids = jnp.asarray([[1] * 200 + [2] * 90 + [0] * 10, [1] * 300], jnp.int32)
  weights = random_weights(attention, x, segment_ids)
  x = x.at[0, 290:].mul(100.0)  # padding does not count
  weights['query']['kernel'] *= 5 * jnp.asarray([0.01, 1, 3, 6])[None, :, None]
  apply = jax.jit(lambda variables: attention.apply(variables, x, segment_ids, train=True, mutable='weight_factors'))
  factors = unbox_weights(apply({'params': weights})[1]['weight_factors'])

  wide = lambda name: np.einsum('btd,dhk->bthk', np.asarray(x, np.float64), np.asarray(weights[name]['kernel'], float))
  logits = np.einsum('bthk,bshk->bhts', wide('query'), np.repeat(wide('key'), 4 // num_kv_heads, axis=2)) / np.sqrt(2)
  distance = np.subtract.outer(np.arange(300), np.arange(300))
  same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids != 0)[:, :, None]
  may_see = np.asarray(same) & ((distance >= 0) & (distance < 280))
  gamma = np.minimum(1, 3.0 / np.where(may_see[:, None], logits, -np.inf).max((0, 2, 3)))[:, None]
  assert (gamma.min() < 0.7, gamma.max() == 1) == (True, True)
  expected = (
    {'query.kernel': np.sqrt(gamma), 'key.kernel': np.sqrt(gamma)} if num_kv_heads == 4 else {'query.kernel': gamma}
  )
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), dict(factors), expected)


def test_factors_multiply_their_weights_unless_the_step_is_skipped(rng):
  weights = {name: {'kernel': jnp.asarray(rng.normal(size=(8, 4, 2)), jnp.float32)} for name in ('query', 'value')}
  factors = {'query.kernel': jnp.asarray([[0.5], [1.0], [0.25], [0.75]])}
  specs = jax.tree.map(lambda w: WeightSpec(shape=w.shape, init=None, num_input_dims=1), weights)
  learner, zeros = Learner(optimizer=MuonClip(learning_rate=0.0)), jax.tree.map(jnp.zeros_like, weights)
  state = learner.init(weights, specs)
  update = jax.jit(lambda loss: learner.update(zeros, loss, jnp.int32(0), state, weights, specs, factors)[0])
  clipped = update(jnp.float32(1))
  expected = weights['query']['kernel'] * factors['query.kernel'][None]
  np.testing.assert_allclose(clipped['query']['kernel'], expected, rtol=1e-5)
  np.testing.assert_array_equal(clipped['value']['kernel'], weights['value']['kernel'])
  jax.tree.map(np.testing.assert_array_equal, update(jnp.float32(jnp.nan)), weights)
  with pytest.raises(UserError, match=r'MuonClip .*: set qk_clip'):
    learner.check_variables({'params': weights})
