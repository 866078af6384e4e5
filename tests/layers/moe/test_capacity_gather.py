"""What the gather form moves and keeps; its values are in test_capacity_computation.py."""

import jax
from jax.extend.core import jaxprs_in_params
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers.moe.capacity_gather import CapacityGather
from spmd_tasks.layers.moe.experts import ExpertWeights
from spmd_tasks.layers.moe.routing import RouterOutput

B, T, D, F, E = 2, 8, 64, 16, 3


@pytest.fixture
def inputs(rng):
  """(x, gates, the loss of both for a computation)."""
  scores, x = (
    jnp.asarray(rng.dirichlet(np.ones(E), (B, T)), jnp.float32),
    jnp.asarray(rng.normal(size=(B, T, D)), jnp.float32),
  )
  gates, expert_ids = jax.lax.top_k(scores, 2)
  up, down = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((E, D, F), (E, F, D)))
  weights = ExpertWeights(up=up, down=down, gate=None, activation='silu', up_split_dims=None, down_split_dims=None)

  def result(computation, x, gates):
    routing = RouterOutput(logits=scores, scores=scores, token_mask=None, expert_ids=expert_ids, gates=gates)
    return computation(x, routing, weights, train=True)[0]

  return x, gates, result


def scattered_shapes(jaxpr):
  """The shapes of the results of all scatters in `jaxpr` and in what it calls."""
  shapes = []
  for eqn in jaxpr.eqns:
    if eqn.primitive.name.startswith('scatter'):
      shapes.append(eqn.outvars[0].aval.shape)
    for inner in jaxprs_in_params(eqn.params):
      shapes += scattered_shapes(inner)
  return shapes


def test_rows_are_gathered_in_both_directions_and_never_scattered(inputs):
  x, gates, result = inputs
  gradient = jax.grad(lambda x, gates: jnp.sum(result(CapacityGather(), x, gates) ** 2), argnums=(0, 1))
  shapes = scattered_shapes(jax.make_jaxpr(gradient)(x, gates).jaxpr)
  assert shapes  # numbers of tokens, and gates
  assert [shape for shape in shapes if D in shape] == []


@pytest.mark.parametrize('saved_bits', [4, 8])
def test_saved_bits_keep_fewer_bytes_and_change_the_gradient_of_the_gates_only(inputs, saved_bits):
  x, gates, result = inputs

  def run(saved_bits):
    computation = CapacityGather(saved_bits=saved_bits)
    y, vjp = jax.jit(lambda *args: jax.vjp(lambda *args: result(computation, *args), *args))(x, gates)
    return y, *vjp(jnp.ones_like(y)), sum(leaf.nbytes for leaf in jax.tree.leaves(vjp))

  y, d_x, d_gates, num_bytes = run(None)
  quantized_y, quantized_d_x, quantized_d_gates, quantized_num_bytes = run(saved_bits)
  np.testing.assert_array_equal(quantized_y, y)
  np.testing.assert_array_equal(quantized_d_x, d_x)
  assert 0 < np.max(np.abs(quantized_d_gates - d_gates)) < np.max(np.abs(d_gates))
  num_slots = B * E * 4
  assert num_bytes - quantized_num_bytes == num_slots * (4 * D - D * saved_bits // 8 - 4)
