"""Every backend of the grouped matmul is the same mathematics, forward and backward.

Shapes: R = 64 rows, E = 4 groups, K = 6 in, N = 5 out.
"""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

from spmd_tasks.layers.moe.grouped_matmul import grouped_matmul
from spmd_tasks.planning import parse_target
from spmd_tasks.planning.targets import has_compiler
from spmd_tasks.planning.traced_step import walk_jaxpr
from spmd_tasks.sharding import MeshSpec
from spmd_tasks.sharding.specs import sharding_scope

NUM_ROWS, NUM_GROUPS, NUM_INPUTS, NUM_OUTPUTS = 64, 4, 6, 5
GROUP_SIZES = {
  'balanced': (16, 16, 16, 16),
  'skewed': (37, 3, 20, 4),
  'empty groups': (0, 30, 0, 34),
  'one has all': (0, 0, 64, 0),
  'none has any': (0, 0, 0, 0),
  'rows past the end': (5, 9, 0, 13),
}
BACKENDS = ['loop', 'megablox', 'triton', 'ragged_dot']
TOLERANCES = {'float32': 1e-5, 'bfloat16': 2e-2}  # of the largest value; the reference reads the same rounded inputs


@functools.cache
def compiled(backend):
  """The result and both gradients, jitted: sizes are arguments, so that all cases share one compilation."""

  def run(rows, weights, group_sizes, d_result):
    multiply = functools.partial(grouped_matmul, group_sizes=group_sizes, backend=backend)
    result, pull_back = jax.vjp(multiply, rows, weights)
    return result, *pull_back(d_result)

  return jax.jit(run)


def reference(rows, weights, group_sizes, d_result):
  """The same in float64, row by row."""
  result, d_rows, d_weights = np.zeros_like(d_result), np.zeros_like(rows), np.zeros_like(weights)
  for row, group in enumerate(np.repeat(np.arange(NUM_GROUPS), group_sizes)):
    result[row] = rows[row] @ weights[group]
    d_rows[row] = weights[group] @ d_result[row]
    d_weights[group] += np.outer(rows[row], d_result[row])
  return result, d_rows, d_weights


def make_inputs(rng, group_sizes, dtype):
  rows, weights, d_result = (
    jnp.asarray(rng.standard_normal(shape), dtype)
    for shape in ((NUM_ROWS, NUM_INPUTS), (NUM_GROUPS, NUM_INPUTS, NUM_OUTPUTS), (NUM_ROWS, NUM_OUTPUTS))
  )
  return rows, weights, jnp.array(group_sizes, jnp.int32), d_result


def assert_equals_reference(actual, inputs, dtype):
  rows, weights, group_sizes, d_result = inputs
  expected = reference(*(np.asarray(x, np.float64) for x in (rows, weights)), group_sizes, np.asarray(d_result, float))
  for name, ours, theirs in zip(('result', 'd_rows', 'd_weights'), actual, expected, strict=True):
    assert ours.dtype == dtype
    if name != 'd_weights':  # what is behind the last group is undefined
      ours, theirs = ours[: sum(group_sizes)], theirs[: sum(group_sizes)]
    tolerance = TOLERANCES[dtype] * max(1.0, np.abs(theirs).max(initial=0.0))
    np.testing.assert_allclose(np.asarray(ours, np.float64), theirs, atol=tolerance, rtol=0, err_msg=name)


@pytest.mark.parametrize('dtype', TOLERANCES)
@pytest.mark.parametrize('name', GROUP_SIZES)
@pytest.mark.parametrize('backend', BACKENDS)
def test_equals_float64_reference(rng, backend, name, dtype):
  inputs = make_inputs(rng, GROUP_SIZES[name], dtype)
  assert_equals_reference(compiled(backend)(*inputs), inputs, dtype)


@pytest.mark.parametrize('backend', BACKENDS)
def test_rows_past_the_end_may_hold_anything(rng, backend):
  inputs = make_inputs(rng, GROUP_SIZES['rows past the end'], 'float32')
  rows, weights, group_sizes, d_result = inputs
  end = sum(GROUP_SIZES['rows past the end'])
  spoilt = compiled(backend)(rows.at[end:].set(np.nan), weights, group_sizes, d_result.at[end:].set(np.nan))
  assert_equals_reference(spoilt, inputs, 'float32')


def test_no_rows():
  given = jnp.ones((0, 6)), jnp.ones((2, 6, 5)), jnp.zeros(2, jnp.int32)
  assert [grouped_matmul(*given, backend=name).shape for name in ('loop', 'triton')] == [(0, 5)] * 2


@pytest.mark.skipif(not has_compiler('gpu'), reason="CUDA is not installed: pip install '.[plan-gpu]'")
@pytest.mark.filterwarnings('ignore:The Pallas Triton backend is deprecated:DeprecationWarning')  # from jax 0.11 on
@pytest.mark.parametrize('target', ['h100:1', 'b200:1'])
def test_triton_compiles_for_gpus_and_copies_no_operand(target):
  mesh = MeshSpec(axis_names=('data',), ici_mesh_shape=(1,)).build(parse_target(target).devices())
  place = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, jax.P()))
  given = place((1024, 1408), 'bfloat16'), place((4, 1408, 1024), 'bfloat16'), place((4,), 'int32')

  def compute(rows, weights, group_sizes, d_result):
    with sharding_scope(mesh, ()):
      result, pull_back = jax.vjp(functools.partial(grouped_matmul, group_sizes=group_sizes), rows, weights)
      return result, *pull_back(d_result)

  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    arguments = *given, place((1024, 1024), 'bfloat16')
    traced = jax.jit(compute).trace(*arguments)
    text = traced.lower().compile().as_text()
  assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3
  assert not re.search(r'= bf16\S* (transpose|copy|pad|fusion)\(', text)
  step = walk_jaxpr(traced.jaxpr, arguments, dict(mesh.shape))
  assert sum(operation.flops for operation, _ in step.walk()) == 3 * 2 * 1024 * 1408 * 1024


@pytest.mark.exhaustive
def test_megablox_compiles_for_a_tpu():
  """Tiles of the sizes that the recipes have, for the memory of the oldest TPU: result and both gradients."""
  pytest.importorskip('libtpu', reason="the TPU compiler is not installed: pip install '.[plan-tpu]'")
  mesh = MeshSpec(axis_names=('data',), ici_mesh_shape=(4,)).build(parse_target('v5e:2x2').devices())
  place = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, jax.P()))
  rows, weights = place((1024, 1408), 'bfloat16'), place((4, 1408, 1024), 'bfloat16')

  def loss(rows, weights, group_sizes):
    with sharding_scope(mesh, ()):
      return jnp.sum(grouped_matmul(rows, weights, group_sizes).astype(jnp.float32) ** 2)

  on_devices = jax.shard_map(
    jax.grad(loss, argnums=(0, 1)), mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
  )
  compiled = jax.jit(on_devices).lower(rows, weights, place((4,), 'int32')).compile()
  assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3
