"""Both forms of the capacity computation over meshes; test_flaxformer.py and test_megablocks.py have their numbers."""

import collections
import re

from capacity_reference import quotients
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.layers.moe import (
  CapacityEinsum,
  CapacityGather,
  Dropless,
  Experts,
  ExpertWeights,
  MixtureOfExperts,
  RouterOutput,
  TopKRouter,
)
from spmd_tasks.sharding import padding, split_dims_to_partition_spec
from spmd_tasks.sharding.specs import sharding_scope

FORMS = [CapacityEinsum, CapacityGather]


def draw_weights(rng, *, num_experts, model_dim, hidden_dim):
  draw = lambda *shape: rng.normal(size=shape, scale=shape[1] ** -0.5)
  up, gate = (draw(num_experts, model_dim, hidden_dim) for _ in range(2))
  return up, draw(num_experts, hidden_dim, model_dim), gate


def expert_weights(up, down, gate):
  return ExpertWeights(
    up=jnp.asarray(up, 'float32'),
    down=jnp.asarray(down, 'float32'),
    gate=jnp.asarray(gate, 'float32'),
    activation='silu',
    up_split_dims=Experts.up_split_dims,
    down_split_dims=Experts.down_split_dims,
  )


def draw_routing(rng, shape, num_experts, num_choices=2):
  """(scores [B, T, E], expert_ids and gates [B, T, k]), experts of a token distinct, and expert 0 crowded."""
  scores = rng.random((*shape, num_experts)) + np.where(np.arange(num_experts) == 0, 0.3, 0.0)
  scores /= scores.sum(axis=-1, keepdims=True)
  expert_ids = np.argsort(-scores, axis=-1)[..., :num_choices].astype(np.int32)
  gates = np.take_along_axis(scores, expert_ids, axis=-1)
  is_padding = rng.random(shape) < 0.3
  expert_ids[is_padding], gates[is_padding] = num_experts, 0.0
  return scores, expert_ids, gates


def router_output(scores, expert_ids, gates):
  scores = jnp.asarray(scores, jnp.float32)
  return RouterOutput(
    logits=jnp.log(scores),
    scores=scores,
    token_mask=None,
    expert_ids=jnp.asarray(expert_ids, jnp.int32),
    gates=jnp.asarray(gates, jnp.float32),
  )


def value_and_gradients(computation, x, routing, weights, cotangent):
  """(y, (d x, d gates, d weights), statistics), of sum(y * cotangent), with dropout in the experts."""
  dropout = {'dropout_rate': 0.25, 'dropout_key': jax.random.key(3)}

  def loss(x, gates, weights):
    y, ratios = computation(x, routing.replace(gates=gates), weights.replace(**dropout), train=True)
    return jnp.sum(y * cotangent), (y, quotients(ratios))

  gradients, (y, statistics) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, routing.gates, weights)
  return y, gradients, statistics


# Name -> (axis names and sizes, rules, all-to-alls and all-gathers in the step, forward and backward).
MESHES = {
  'T5X: experts 4, data 2': (
    {'expert_axis': 4, 'data': 2}, {'batch': ('expert_axis', 'data'), 'expert': 'expert_axis'}, 4, 0
  ),
  'experts over the data axis, hidden dim over mdl': (
    {'data': 4, 'mdl': 2}, {'batch': 'data', 'expert': 'data', 'expert_mlp': 'mdl'}, 4, 0
  ),
  'hidden sharding': (
    {'data': 4, 'mdl': 2}, {'batch': ('mdl', 'data'), 'expert': 'data', 'expert_mlp': 'mdl'}, 4, 2
  ),
  'experts over two axes': ({'a': 4, 'b': 2}, {'batch': ('b', 'a'), 'expert': ('a', 'b')}, 8, 0),
  'experts beside the batch': ({'data': 2, 'mdl': 4}, {'batch': 'data', 'expert': 'mdl'}, 0, 2),
}  # fmt: skip
UNSHARDED = dict.fromkeys(('batch', 'seq', 'act_embed', 'expert', 'expert_embed', 'expert_mlp'))


def mesh_and_rules(axes, rules):
  mesh = Mesh(np.array(jax.devices()).reshape(tuple(axes.values())), tuple(axes))
  return mesh, tuple((UNSHARDED | rules).items())


NUM_ROWS, LENGTH, NUM_EXPERTS, MODEL_DIM, HIDDEN_DIM = 8, 6, 6, 4, 7


# By default the meshes have the two forms in turns.
TURNS = [
  pytest.param(MESHES[name], form, id=f'{name}-{form.__name__}', marks=[pytest.mark.exhaustive] * ((i + j) % 2))
  for i, name in enumerate(MESHES)
  for j, form in enumerate(FORMS)
]


@pytest.mark.parametrize('case, form', TURNS)
def test_eight_devices_compute_what_one_does(case, form, rng):
  """6 experts and 7 hidden units, which no mesh here divides. Tokens move by all-to-alls, and weights not at all."""
  axes, rules, num_all_to_alls, num_all_gathers = case
  mesh, rules = mesh_and_rules(axes, rules)
  x, cotangent = rng.normal(size=(2, NUM_ROWS, LENGTH, MODEL_DIM))
  scores, expert_ids, gates = draw_routing(rng, x.shape[:2], NUM_EXPERTS)
  weights = draw_weights(rng, num_experts=NUM_EXPERTS, model_dim=MODEL_DIM, hidden_dim=HIDDEN_DIM)
  computation = form(capacity_factor=1.0, min_capacity=1, group_size=3)

  def step(x, cotangent, scores, expert_ids, gates, up, down, gate):
    routing = router_output(scores, expert_ids, gates)
    y, (d_x, d_gates, d_weights), statistics = value_and_gradients(
      computation, x, routing, expert_weights(up, down, gate), cotangent
    )
    return (y, d_x, d_gates, d_weights.up, d_weights.down, d_weights.gate), statistics

  inputs = [
    jnp.asarray(a, jnp.int32 if a is expert_ids else jnp.float32)
    for a in (x, cotangent, scores, expert_ids, gates, *weights)
  ]
  expected, expected_statistics = jax.jit(step)(*inputs)

  # jit's own inputs and outputs have to be even.
  tokens_spec, up_spec, down_spec = (
    split_dims_to_partition_spec(split_dims, mesh.axis_names, rules)
    for split_dims in (('batch', 'seq', None), Experts.up_split_dims, Experts.down_split_dims)
  )
  even = lambda array, spec: jax.ShapeDtypeStruct(padding.padded_shape(array.shape, spec, mesh.shape), array.dtype)
  input_specs = [*[tokens_spec] * 5, up_spec, down_spec, up_spec]
  output_specs = (*[tokens_spec] * 3, up_spec, down_spec, up_spec)

  def padded_step(*padded):
    with sharding_scope(mesh, rules):
      outputs, statistics = step(*padding.unpad(padded, tuple(inputs)))
    return padding.pad(outputs, tuple(map(even, outputs, output_specs))), statistics

  padded = [padding.pad(a, even(a, spec)) for a, spec in zip(inputs, input_specs, strict=True)]
  compiled = (
    jax.jit(
      padded_step,
      in_shardings=tuple(NamedSharding(mesh, spec) for spec in input_specs),
      out_shardings=(tuple(NamedSharding(mesh, spec) for spec in output_specs), NamedSharding(mesh, PartitionSpec())),
    )
    .lower(*padded)
    .compile()
  )
  outputs, statistics = compiled(*jax.device_put(padded, [NamedSharding(mesh, spec) for spec in input_specs]))
  for actual, array in zip(padding.unpad(outputs, expected), expected, strict=True):
    np.testing.assert_allclose(actual, array, rtol=1e-5, atol=1e-5)
  for name, value in expected_statistics.items():
    np.testing.assert_allclose(statistics[name], value, rtol=1e-6)
  collectives = collections.Counter(
    re.findall(r' (all-to-all|all-gather|collective-permute)(?:-start)?\(', compiled.as_text())
  )
  assert collectives == collections.Counter({'all-to-all': num_all_to_alls, 'all-gather': num_all_gathers})


@pytest.mark.parametrize('form', FORMS)
def test_all_slots_of_an_expert_in_a_group_share_a_dropout_mask(form):
  """Flaxformer's MlpBlock, which is mapped over experts, drops along its rows. Experts here return their input."""
  layer = MixtureOfExperts(
    router=TopKRouter(num_experts=2, num_selected=2, normalize_gates=1.0),
    experts=Experts(num_experts=2, hidden_dim=64, gated=False, activation='linear', dropout_rate=0.5),
    computation=form(capacity_factor=0, group_size=3),
  )
  unit = jnp.broadcast_to(jnp.eye(64), (2, 64, 64))
  params = {'router': {'kernel': jnp.zeros((64, 2))}, 'experts': {'up': unit, 'down': unit}}
  apply = lambda **settings: layer.apply({'params': params}, jnp.ones((2, 3, 64)), **settings)[0]
  np.testing.assert_allclose(apply(), 1.0)
  y = np.asarray(apply(train=True, rngs={'dropout': jax.random.key(0)}))
  np.testing.assert_allclose(y, np.broadcast_to(y[:, :1], y.shape))
  assert {*y.ravel().tolist()} == {0.0, 1.0, 2.0}  # none, one or both of the experts, each doubled and halved
  assert np.any(y[0] != y[1])
  assert abs(y.mean() - 1.0) < 0.25
  with pytest.raises(UserError, match=r'dropout_rate=0\.5 needs slots'):
    layer.clone(computation=Dropless())


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'capacity_factor': -1.0}, 'capacity_factor=-1.0 must be positive, or 0'),
    ({'eval_capacity_factor': float('nan')}, 'eval_capacity_factor=nan must be positive, or 0'),
    ({'min_capacity': -1}, 'min_capacity=-1 must be at least 0'),
    ({'priority': 'gate'}, "priority='gate' must be one of"),
  ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    CapacityGather(**settings)
