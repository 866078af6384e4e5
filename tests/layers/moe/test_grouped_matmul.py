"""Every backend of the grouped matmul is the same mathematics, forward and backward.

Shapes: R = 64 rows, E = 4 groups, K = 6 in, N = 5 out.
"""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

from spmd_tasks.layers.moe import _megablox_backend
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


@pytest.mark.parametrize('name', GROUP_SIZES)
@pytest.mark.parametrize(
  'backend, dtype',
  [  # XLA accumulates in float32 for the others as in the tests of layers
    pytest.param(*case, marks=[pytest.mark.exhaustive] * (case[0] in ('loop', 'ragged_dot') and case[1] == 'bfloat16'))
    for case in itertools.product(BACKENDS, TOLERANCES)
  ],
)
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


@pytest.mark.parametrize('dtype', ['float32', pytest.param('bfloat16', marks=pytest.mark.exhaustive)])
def test_megablox_of_many_tiles(rng, monkeypatch, dtype):
  """Inputs and outputs that tiles do not divide, in several tiles each."""
  monkeypatch.setattr(_megablox_backend, '_DEFAULT_TILE_BYTES', 750_000 * jnp.dtype(dtype).itemsize)
  sizes = (37, 3, 250, 4)
  rows, weights, d_result = (
    jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((300, 1100), (NUM_GROUPS, 1100, 260), (300, 260))
  )
  inputs = rows, weights, jnp.array(sizes, jnp.int32), d_result
  _megablox_backend._best_tile.cache_clear()
  try:
    for sums_rows in (False, True):
      tile = _megablox_backend._best_tile('cpu', 512, NUM_GROUPS, 1100, 260, rows.dtype.itemsize, sums_rows=sums_rows)
      assert tile[1] < 1100
    assert_equals_reference(compiled('megablox')(*inputs), inputs, dtype)
  finally:
    _megablox_backend._best_tile.cache_clear()


# Rows of a device, experts, inputs and outputs of the recipes, and FLOPs per byte of HBM traffic of the chips.
RECIPES = {
  'moe.Mixtral8x7B': (24_576, 8, 4096, 14_336),
  'moe.FineGrained16B': (147_456, 64, 2048, 1408),
  'moe.DeepSeekV3Like': (32_768, 8, 7168, 2048),
}
CHIPS = {'TPU v5 lite': 241, 'TPU v5': 166, 'TPU v6 lite': 560, 'TPU7x': 313}


@pytest.mark.parametrize('recipe', RECIPES)
@pytest.mark.parametrize('kind', CHIPS)
def test_tiles_take_little_more_than_the_products(rng, kind, recipe):
  """The longer of products and traffic of all visited tiles, for the result and both gradients, is at most 1.2 times
  as long as the products of rows with their own matrix. With tiles of 512 x 1,024 x 1,024 it is up to 2.4 times.
  """
  num_rows, num_groups, num_in, num_out = RECIPES[recipe]
  ends = np.sort(rng.integers(0, num_rows, num_groups - 1))
  ends = np.append(ends, num_rows)
  starts = np.append(0, ends[:-1])
  total = 0.0
  for ins, outs, sums_rows in ((num_in, num_out, False), (num_out, num_in, False), (num_in, num_out, True)):
    tile = _megablox_backend._best_tile(kind, num_rows, num_groups, ins, outs, 2, sums_rows=sums_rows)
    visits = [
      (i, group) for group, (a, b) in enumerate(zip(starts, ends)) for i in range(a // tile[0], -(-b // tile[0]))
    ]
    num_in_tiles, num_out_tiles = -(-ins // tile[1]), -(-outs // tile[2])
    # A block is read again unless the step before had the same one; results are written once.
    if sums_rows:
      read = len(visits) * tile[0] * (tile[1] + tile[2]) * num_in_tiles * num_out_tiles + num_groups * ins * outs
    elif num_in_tiles == 1:
      read = num_out_tiles * (len({i for i, _ in visits}) * tile[0] * tile[1] + num_groups * tile[1] * tile[2])
      read += num_rows * outs
    else:
      read = len(visits) * num_in_tiles * num_out_tiles * (tile[0] + tile[2]) * tile[1] + num_rows * outs
    flops = 2 * len(visits) * math.prod(tile) * num_in_tiles * num_out_tiles
    total += max(flops, 2 * read * CHIPS[kind]) / (2 * num_rows * ins * outs)
  assert total / 3 <= 1.2


@pytest.mark.exhaustive
@pytest.mark.parametrize('target', ['v5e:2x2', 'v6e:2x2'])
@pytest.mark.parametrize('recipe', RECIPES)
def test_megablox_compiles_for_a_tpu(target, recipe):
  """The tiles of the recipes fit in the vector memory that kernels get by default: result and both gradients."""
  pytest.importorskip('libtpu', reason="the TPU compiler is not installed: pip install '.[plan-tpu]'")
  mesh = MeshSpec(axis_names=('data',), ici_mesh_shape=(4,)).build(parse_target(target).devices())
  place = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, jax.P()))
  num_rows, num_groups, num_in, num_out = RECIPES[recipe]
  rows, weights = place((num_rows, num_in), 'bfloat16'), place((num_groups, num_in, num_out), 'bfloat16')

  def loss(rows, weights, group_sizes):
    with sharding_scope(mesh, ()):
      return jnp.sum(grouped_matmul(rows, weights, group_sizes).astype(jnp.float32) ** 2)

  on_devices = jax.shard_map(
    jax.grad(loss, argnums=(0, 1)), mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
  )
  compiled = jax.jit(on_devices).lower(rows, weights, place((num_groups,), 'int32')).compile()
  assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3
