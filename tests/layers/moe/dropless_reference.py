"""The dropless computation as loops in float64 numpy, with its gradients written out, and problems to compute.

Shapes: B batch, T sequence, D model, F ffn, E experts, k choices per token.
"""

import contextlib

from capacity_reference import quotients
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.layers.moe import ExpertWeights, RouterOutput
from spmd_tasks.sharding import MeshSpec
from spmd_tasks.sharding.specs import check_axis_rules, sharding_scope

UP_SPLIT_DIMS = ('expert', 'expert_embed', 'expert_mlp')
DOWN_SPLIT_DIMS = ('expert', 'expert_mlp', 'expert_embed')
BIASES = ('up_bias', 'gate_bias', 'down_bias')
LOGICAL_NAMES = ('batch', 'seq', 'act_embed', 'expert', 'expert_embed', 'expert_mlp')


def draw_inputs(rng, *, B=8, T=3, D=4, F=6, E=4, k=2, gated=True, bias=False):
  """The arrays that have gradients: x, gates and weights, by name; and d_y [B, T, D]. Biases are of gated experts."""
  inputs = {
    'x': rng.normal(size=(B, T, D)),
    'gates': rng.uniform(0.1, 1.0, size=(B, T, k)),
    'up': rng.normal(size=(E, D, F)) / D**0.5,
    'down': rng.normal(size=(E, F, D)) / F**0.5,
  }
  if gated:
    inputs['gate'] = rng.normal(size=(E, D, F)) / D**0.5
  if bias:
    inputs |= {name: rng.normal(size=(E, size)) for name, size in zip(BIASES, (F, F, D))}
  return {name: array.astype(np.float32) for name, array in inputs.items()}, rng.normal(size=(B, T, D))


def draw_expert_ids(rng, kind, *, B=8, T=3, E=4, k=2):
  """int32 [B, T, k]; 'mixed' has padding and an expert without tokens, in 'one expert' the first takes all."""
  ids = np.argsort(rng.normal(size=(B, T, E)), axis=-1)[..., :k]
  if kind == 'mixed':
    ids[0] = E
    ids[ids == 1] = E
  elif kind == 'one expert':
    ids = np.full_like(ids, E)
    ids[..., 0] = 0
  elif kind == 'no expert':
    ids[:] = E
  return ids.astype(np.int32)


def loop_over_assignments(inputs, expert_ids, d_y):
  """Returns (y, gradients of sum(y * d_y) by name), token by token and choice by choice."""
  inputs = {name: np.asarray(array, np.float64) for name, array in inputs.items()}
  x, gates, up, down, gate = (inputs.get(name) for name in ('x', 'gates', 'up', 'down', 'gate'))
  y, d = np.zeros_like(x), {name: np.zeros_like(array) for name, array in inputs.items()}
  for b, t, choice in np.ndindex(*expert_ids.shape):
    e = expert_ids[b, t, choice]
    if e == len(up):
      continue
    token, weight, d_token = x[b, t], gates[b, t, choice], d_y[b, t]
    up_bias, gate_bias, down_bias = (inputs[name][e] if name in inputs else 0.0 for name in BIASES)
    pre_activation = token @ (up if gate is None else gate)[e] + gate_bias
    sigmoid = 1 / (1 + np.exp(-pre_activation))
    act, d_act = pre_activation * sigmoid, sigmoid * (1 + pre_activation * (1 - sigmoid))
    linear = 1.0 if gate is None else token @ up[e] + up_bias
    result = (act * linear) @ down[e] + down_bias
    y[b, t] += weight * result
    d['gates'][b, t, choice] += result @ d_token
    d_hidden = down[e] @ (weight * d_token)
    d['down'][e] += np.outer(act * linear, weight * d_token)
    d_pre_activation = d_hidden * linear * d_act
    d['up' if gate is None else 'gate'][e] += np.outer(token, d_pre_activation)
    d['x'][b, t] += (up if gate is None else gate)[e] @ d_pre_activation
    if gate is not None:
      d['up'][e] += np.outer(token, d_hidden * act)
      d['x'][b, t] += up[e] @ (d_hidden * act)
    if 'up_bias' in inputs:
      for name, d_result in zip(BIASES, (d_hidden * act, d_pre_activation, weight * d_token)):
        d[name][e] += d_result
  return y, d


def expert_weights(inputs):
  return ExpertWeights(
    up=inputs['up'],
    down=inputs['down'],
    gate=inputs.get('gate'),
    activation='silu',
    up_split_dims=UP_SPLIT_DIMS,
    down_split_dims=DOWN_SPLIT_DIMS,
    **{name: inputs[name] for name in BIASES if name in inputs},
  )


def routing_of(expert_ids, gates, num_experts=1):
  """What a router gives to a computation; the rest is not read by one."""
  nothing = jnp.zeros((*expert_ids.shape[:2], num_experts))
  return RouterOutput(logits=nothing, scores=nothing, token_mask=None, expert_ids=expert_ids, gates=gates)


def compute(computation, inputs, expert_ids, **fields):
  """(y, statistics). Gates are 0 for choices that are not routed, as in a RouterOutput; `fields` are of the weights."""
  inputs = jax.tree.map(jnp.asarray, inputs)
  num_experts = len(inputs['up'])
  gates = jnp.where(expert_ids == num_experts, 0.0, inputs['gates'])
  routing, weights = routing_of(expert_ids, gates, num_experts), expert_weights(inputs).replace(**fields)
  y, ratios = computation(inputs['x'], routing, weights, train=True)
  return y, quotients(ratios)


def mesh_and_rules(axis_sizes, rules):
  """A Mesh of these axes, and axis rules: None for names that `rules` lacks, no rule for names that are axes."""
  num_devices = int(np.prod(list(axis_sizes.values())))
  spec = MeshSpec(axis_names=tuple(axis_sizes), ici_mesh_shape=tuple(axis_sizes.values()))
  axis_rules = tuple((name, rules.get(name)) for name in LOGICAL_NAMES if name not in axis_sizes)
  check_axis_rules(axis_rules, tuple(axis_sizes))
  return spec.build(jax.devices()[:num_devices]), axis_rules


def value_and_gradients(computation, mesh=None, rules=(), **fields):
  """A compiled function of (inputs, expert_ids, d_y): (y, gradients of sum(y * d_y), statistics)."""

  def loss(inputs, expert_ids, d_y):
    with contextlib.nullcontext() if mesh is None else sharding_scope(mesh, rules):
      y, statistics = compute(computation, inputs, expert_ids, **fields)
    return jnp.sum(y.astype(jnp.float32) * d_y), (y, statistics)

  @jax.jit
  def run(inputs, expert_ids, d_y):
    gradients, (y, statistics) = jax.grad(loss, has_aux=True)(inputs, expert_ids, d_y.astype(jnp.float32))
    return y, gradients, statistics

  return run


def assert_is_reference(result, inputs, expert_ids, d_y):
  """Forward to 1e-4 and gradients to 1e-5, as float32 has them for numbers of about 1."""
  y, gradients, _ = result
  expected_y, expected = loop_over_assignments(inputs, expert_ids, d_y)
  np.testing.assert_allclose(y, expected_y, rtol=1e-4, atol=1e-5, err_msg='y')
  for name, gradient in gradients.items():
    np.testing.assert_allclose(gradient, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
