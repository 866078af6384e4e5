"""Both forms of the capacity computation: against loops in float64, against a dense network, and over meshes.

And what the gather form moves and saves.
"""

import collections
import contextlib
import functools
import re

from capacity_reference import capacity_result, central_differences, expert_ffn, kept_choices, quotients
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from spmd_tasks.layers.moe import (
  CapacityEinsum,
  CapacityGather,
  Experts,
  ExpertWeights,
  RouterOutput,
  Slots,
)
from spmd_tasks.sharding import padding, split_dims_to_partition_spec
from spmd_tasks.sharding.specs import sharding_scope

FORMS = [CapacityEinsum, CapacityGather]
both_forms = pytest.mark.parametrize('form', FORMS, ids=lambda form: form.__name__)


def draw_weights(rng, *, num_experts, model_dim, hidden_dim, gated):
  draw = lambda *shape: rng.normal(size=shape, scale=shape[1] ** -0.5)
  up, gate = (draw(num_experts, model_dim, hidden_dim) for _ in range(2))
  return up, draw(num_experts, hidden_dim, model_dim), gate if gated else None


def expert_weights(up, down, gate, dtype='float32'):
  return ExpertWeights(
    up=jnp.asarray(up, dtype),
    down=jnp.asarray(down, dtype),
    gate=None if gate is None else jnp.asarray(gate, dtype),
    activation='silu',
    up_split_dims=Experts.up_split_dims,
    down_split_dims=Experts.down_split_dims,
  )


def draw_routing(rng, shape, num_experts, num_choices=2, with_padding=False):
  """(scores [B, T, E], expert_ids and gates [B, T, k]), experts of a token distinct, and expert 0 crowded."""
  scores = rng.random((*shape, num_experts)) + np.where(np.arange(num_experts) == 0, 0.3, 0.0)
  scores /= scores.sum(axis=-1, keepdims=True)
  expert_ids = np.argsort(-scores, axis=-1)[..., :num_choices].astype(np.int32)
  gates = np.take_along_axis(scores, expert_ids, axis=-1)
  if with_padding:
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
  """(y, (d x, d gates, d weights), statistics), of sum(y * cotangent)."""

  def loss(x, gates, weights):
    y, ratios = computation(x, routing.replace(gates=gates), weights, train=True)
    return jnp.sum(y * cotangent), (y, quotients(ratios))

  gradients, (y, statistics) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, routing.gates, weights)
  return y, gradients, statistics


# Not to be used within a sharding_scope, of which jit's cache knows nothing.
jitted_value_and_gradients = jax.jit(value_and_gradients, static_argnums=0)


# Name -> (settings, the S and C that follow for 4 rows of 6 tokens and 3 experts, gated, with padding).
CASES = {
  'gated, with padding': ({'capacity_factor': 1.5, 'min_capacity': 1}, 6, 3, True, True),
  'by score': (
    {'capacity_factor': 1.0, 'min_capacity': 1, 'priority': 'score'}, 6, 2, False, True
  ),
  'by token': ({'capacity_factor': 1.0, 'min_capacity': 1, 'priority': 'token'}, 6, 2, False, True),
  'across rows': ({'capacity_factor': 1.0, 'min_capacity': 1, 'group_size': 4}, 4, 1, False, False),
  'nothing dropped': ({'capacity_factor': 0}, 6, 6, True, True),
}  # fmt: skip


@both_forms
@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_equals_a_loop_over_tokens(case, form, rng):
  settings, group_size, capacity, gated, with_padding = case
  x, cotangent = rng.normal(size=(2, 4, 6, 2))
  scores, expert_ids, gates = draw_routing(rng, x.shape[:2], 3, with_padding=with_padding)
  weights = draw_weights(rng, num_experts=3, model_dim=2, hidden_dim=3, gated=gated)
  kept = kept_choices(
    expert_ids, 3, scores, group_size=group_size, capacity=capacity, priority=settings.get('priority', 'position')
  )
  reference = functools.partial(capacity_result, expert_ids=expert_ids, kept=kept)
  arrays = [x, gates, *weights]
  expected = central_differences(lambda *arrays: np.sum(reference(*arrays) * cotangent), arrays)

  y, (d_x, d_gates, d_weights), statistics = jitted_value_and_gradients(
    form(**settings),
    jnp.asarray(x, jnp.float32),
    router_output(scores, expert_ids, gates),
    expert_weights(*weights),
    cotangent,
  )
  np.testing.assert_allclose(y, reference(*arrays), rtol=1e-5, atol=1e-5)
  # A choice without a slot takes no gradient, and neither does padding; the reference has the same zeros.
  for actual, gradient in zip((d_x, d_gates, d_weights.up, d_weights.down, d_weights.gate), expected, strict=True):
    if gradient is not None:
      np.testing.assert_allclose(actual, gradient, rtol=1e-4, atol=1e-5)
  num_chosen, num_kept = np.sum(expert_ids < 3), np.sum(kept)
  assert (num_kept == num_chosen) == (settings['capacity_factor'] == 0)
  np.testing.assert_allclose(statistics['fraction_dropped'], 1 - num_kept / num_chosen, atol=1e-6)
  np.testing.assert_allclose(statistics['expert_usage'], num_kept / (24 // group_size * 3 * capacity), atol=1e-6)


def test_the_factor_outside_of_training_is_another(rng):
  x = jnp.asarray(rng.normal(size=(2, 6, 2)), jnp.float32)
  routing = router_output(*draw_routing(rng, x.shape[:2], 3))
  weights = expert_weights(*draw_weights(rng, num_experts=3, model_dim=2, hidden_dim=3, gated=False))

  def fraction_dropped(train, **settings):
    computation = CapacityGather(min_capacity=1, capacity_factor=0.5, **settings)
    ratios = jax.jit(lambda *args: computation(*args, train=train)[1])(x, routing, weights)
    return quotients(ratios)['fraction_dropped']

  assert fraction_dropped(True, eval_capacity_factor=0) == fraction_dropped(False) > 0
  assert fraction_dropped(False, eval_capacity_factor=0) == 0


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


@pytest.mark.parametrize('mesh_name, form', [(None, CapacityGather), ('T5X: experts 4, data 2', CapacityEinsum)])
def test_experts_that_chose_their_tokens(mesh_name, form, rng):
  """Groups of 8 tokens over rows of 6; a token may be in several slots, or in none, and slots may be empty."""
  x, cotangent = rng.normal(size=(2, 4, 6, 2))
  up, down, _ = weights = draw_weights(rng, num_experts=3, model_dim=2, hidden_dim=3, gated=False)
  token_ids = np.stack([[rng.permutation(8)[:4] for _ in range(3)] for _ in range(3)])
  gates = rng.uniform(0.1, 1.0, token_ids.shape)
  token_ids[1, :, 3], gates[1, :, 3] = 8, 0.0

  def reference(x, gates, up, down):
    tokens, result = x.reshape(3, 8, 2), np.zeros((3, 8, 2))
    for group, expert, slot in np.ndindex(*token_ids.shape):
      token = token_ids[group, expert, slot]
      if token < 8:
        y = expert_ffn(tokens[group, token], up[expert], down[expert], None)
        result[group, token] += gates[group, expert, slot] * y
    return result.reshape(x.shape)

  arrays = [x, gates, up, down]
  expected = central_differences(lambda *arrays: np.sum(reference(*arrays) * cotangent), arrays)
  scores = jnp.full((4, 6, 3), 1 / 3)

  def loss(x, gates, weights):
    slots = Slots(token_ids=jnp.asarray(token_ids, jnp.int32), gates=gates)
    routing = RouterOutput(logits=scores, scores=scores, token_mask=None, slots=slots)
    y, ratios = form()(x, routing, weights, train=True)
    return jnp.sum(y * cotangent), (y, quotients(ratios))

  with contextlib.nullcontext() if mesh_name is None else sharding_scope(*mesh_and_rules(*MESHES[mesh_name][:2])):
    (d_x, d_gates, d_weights), (y, statistics) = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(
      jnp.asarray(x, jnp.float32), jnp.asarray(gates, jnp.float32), expert_weights(*weights)
    )
  np.testing.assert_allclose(y, reference(*arrays), rtol=1e-5, atol=1e-5)
  for actual, gradient in zip((d_x, d_gates, d_weights.up, d_weights.down), expected, strict=True):
    np.testing.assert_allclose(actual, gradient, rtol=1e-4, atol=1e-5)
  assert statistics == {'fraction_dropped': 0.0, 'expert_usage': pytest.approx(33 / 36)}


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
  scores, expert_ids, gates = draw_routing(rng, x.shape[:2], NUM_EXPERTS, with_padding=True)
  weights = draw_weights(rng, num_experts=NUM_EXPERTS, model_dim=MODEL_DIM, hidden_dim=HIDDEN_DIM, gated=True)
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
