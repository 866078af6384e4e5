"""The capacity computation over meshes; test_flaxformer.py and test_megablocks.py have their numbers."""

import collections
import functools
import re

from dropless_reference import (
  DOWN_SPLIT_DIMS,
  UP_SPLIT_DIMS,
  draw_expert_ids,
  draw_inputs,
  mesh_and_rules,
  value_and_gradients,
)
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.layers.moe import CapacityGather, Dropless, Experts, MixtureOfExperts, TopKRouter
from spmd_tasks.sharding import padding, split_dims_to_partition_spec

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
CASES = [pytest.param(MESHES[name], id=name, marks=[pytest.mark.exhaustive] * (i > 1)) for i, name in enumerate(MESHES)]
TOKENS = ('batch', 'seq', None)
SPLIT_DIMS = {'x': TOKENS, 'gates': TOKENS, 'up': UP_SPLIT_DIMS, 'gate': UP_SPLIT_DIMS, 'down': DOWN_SPLIT_DIMS}


DIMS = {'B': 8, 'T': 6, 'E': 6}
DROPOUT = {'dropout_rate': 0.25, 'dropout_key': jax.random.key(3)}


@functools.cache
def on_one_device():
  """The computation, what it is given, and the result, gradients and statistics of one device."""
  rng = np.random.default_rng(0)
  inputs, d_y = draw_inputs(rng, **DIMS, F=7)
  expert_ids = draw_expert_ids(rng, 'mixed', **DIMS)
  computation = CapacityGather(capacity_factor=1.0, min_capacity=1, group_size=3)
  arguments = ({name: jnp.asarray(x) for name, x in inputs.items()}, jnp.asarray(expert_ids), jnp.float32(d_y))
  return computation, arguments, value_and_gradients(computation, **DROPOUT)(*arguments)


@pytest.mark.parametrize('case', CASES)
def test_eight_devices_compute_what_one_does(case):
  """6 experts and 7 hidden units, which no mesh here divides. Tokens move by all-to-alls, and weights not at all."""
  axes, rules, num_all_to_alls, num_all_gathers = case
  mesh, rules = mesh_and_rules(axes, rules)
  computation, arguments, (y, gradients, expected_statistics) = on_one_device()

  # jit's own inputs and outputs have to be even.
  tokens = split_dims_to_partition_spec(TOKENS, mesh.axis_names, rules)
  specs = {name: split_dims_to_partition_spec(dims, mesh.axis_names, rules) for name, dims in SPLIT_DIMS.items()}

  def even(x, spec):
    shape = padding.padded_shape(x.shape, spec, mesh.shape)
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

  padded = jax.tree.map(even, arguments, (specs, tokens, tokens))
  padded_outputs = jax.tree.map(even, (y, gradients), (tokens, specs))
  run = value_and_gradients(computation, mesh, rules, **DROPOUT)

  def step(*arguments_of_mesh):
    y, gradients, statistics = run(*padding.unpad(arguments_of_mesh, arguments))
    return padding.pad((y, gradients), padded_outputs), statistics

  shardings = jax.tree.map(lambda x: x.sharding, (padded, padded_outputs))
  compiled = jax.jit(step, in_shardings=shardings[0], out_shardings=(shardings[1], None)).lower(*padded).compile()
  outputs, statistics = compiled(*jax.device_put(padding.pad(arguments, padded), shardings[0]))
  for actual, array in zip(jax.tree.leaves(padding.unpad(outputs, (y, gradients))), jax.tree.leaves((y, gradients))):
    np.testing.assert_allclose(actual, array, rtol=1e-5, atol=1e-5)
  for name, value in expected_statistics.items():
    np.testing.assert_allclose(statistics[name], value, rtol=1e-6)
  collectives = re.findall(r' (all-to-all|all-gather|collective-permute)(?:-start)?\(', compiled.as_text())
  expected = collections.Counter({'all-to-all': num_all_to_alls, 'all-gather': num_all_gathers})
  assert collections.Counter(collectives) == expected


def test_all_slots_of_an_expert_in_a_group_share_a_dropout_mask():
  """Flaxformer's MlpBlock, which is mapped over experts, drops along its rows. Experts here return their input."""
  layer = MixtureOfExperts(
    router=TopKRouter(num_experts=2, num_selected=2, normalize_gates=1.0),
    experts=Experts(num_experts=2, hidden_dim=64, gated=False, activation='linear', dropout_rate=0.5),
    computation=CapacityGather(capacity_factor=0, group_size=3),
  )
  unit = jnp.broadcast_to(jnp.eye(64), (2, 64, 64))
  params = {'router': {'kernel': jnp.zeros((64, 2))}, 'experts': {'up': unit, 'down': unit}}
  settings = {'rngs': {'dropout': jax.random.key(0)}}
  apply = lambda train: layer.apply({'params': params}, jnp.ones((2, 3, 64)), train=train, **settings)[0]
  evaluated, y = (np.asarray(jax.jit(apply, static_argnums=0)(train)) for train in (False, True))
  np.testing.assert_allclose(evaluated, 1.0)
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
