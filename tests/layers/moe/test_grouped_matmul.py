"""Every backend of the grouped matmul is the same mathematics, forward and backward.

Shapes: R = 64 rows, E = 4 groups, K = 6 in, N = 5 out.
"""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

from spmd_tasks.layers.moe import (
  _grouped_matmul,
  agree_on_grouped_matmul_backend,
  best_grouped_matmul_backend,
  grouped_matmul,
)
from spmd_tasks.planning import has_compiler, parse_target
from spmd_tasks.sharding import MeshSpec, sharding_scope

NUM_ROWS, NUM_GROUPS, NUM_INPUTS, NUM_OUTPUTS = 64, 4, 6, 5
GROUP_SIZES = {
  'balanced': (16, 16, 16, 16),
  'skewed': (37, 3, 20, 4),
  'empty groups': (0, 30, 0, 34),
  'one has all': (0, 0, 64, 0),
  'none has any': (0, 0, 0, 0),
  'rows past the end': (5, 9, 0, 13),
}
TOKAMAX = pytest.param('tokamax', marks=pytest.mark.skipif(not importlib.util.find_spec('tokamax'), reason='optional'))
TRITON = pytest.param('triton', marks=pytest.mark.exhaustive)  # the interpreter compiles for long
BACKENDS = ['loop', 'megablox', TRITON, 'ragged_dot', TOKAMAX]
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
    tolerance = TOLERANCES[dtype] * max(1.0, np.abs(theirs).max())
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


@pytest.mark.exhaustive
@pytest.mark.parametrize('dtype', TOLERANCES)
def test_triton_with_groups_of_several_tiles(rng, dtype):
  """Groups of no, one, two and three tiles of 128 rows, and several tiles of both dims of the matrices."""
  sizes, num_rows, num_in, num_out = (0, 128, 200, 0, 300, 3), 640, 150, 290
  rows, weights, d_result = (
    jnp.asarray(rng.standard_normal(shape) / 8, dtype)
    for shape in ((num_rows, num_in), (len(sizes), num_in, num_out), (num_rows, num_out))
  )
  result, d_rows, d_weights = compiled('triton')(rows, weights, jnp.array(sizes, jnp.int32), d_result)
  wide = [np.asarray(x, np.float64) for x in (rows, weights, d_result)]
  starts = np.cumsum(sizes) - sizes
  for group, (start, size) in enumerate(zip(starts, sizes)):
    mine = slice(start, start + size)
    assert_near(result[mine], wide[0][mine] @ wide[1][group], dtype)
    assert_near(d_rows[mine], wide[2][mine] @ wide[1][group].T, dtype)
    assert_near(d_weights[group], wide[0][mine].T @ wide[2][mine], dtype)
  assert not np.asarray(result[sum(sizes) :]).any()


def assert_near(actual, expected, dtype):
  tolerance = TOLERANCES[dtype] * np.abs(expected).max(initial=1.0)
  np.testing.assert_allclose(np.asarray(actual, np.float64), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize('check_vma', [True, False])
def test_loop_within_shard_map(rng, check_vma):
  """Rows and sizes differ per device; the weights are the same on both, and their gradient is the sum."""
  halves = [make_inputs(rng, sizes, 'float32') for sizes in ((16, 16, 16, 16), (5, 9, 0, 13))]
  rows, sizes, d_result = (jnp.concatenate([half[i] for half in halves]) for i in (0, 2, 3))
  weights = halves[0][1]
  mesh = jax.make_mesh((2,), ('data',), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
  split, whole = jax.P('data'), jax.P()

  def run(rows, weights, sizes, d_result):
    local = functools.partial(grouped_matmul, backend='loop')
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(split, whole, split), out_specs=split, check_vma=check_vma)
    result, pull_back = jax.vjp(lambda rows, weights: mapped(rows, weights, sizes), rows, weights)
    return result, *pull_back(d_result)

  result, d_rows, d_weights = jax.jit(run)(rows, weights, sizes, d_result)
  expected = [compiled('loop')(half[0], weights, half[2], half[3]) for half in halves]
  np.testing.assert_allclose(result, np.concatenate([e[0] for e in expected]), atol=1e-5)
  np.testing.assert_allclose(d_rows, np.concatenate([e[1] for e in expected]), atol=1e-5)
  np.testing.assert_allclose(d_weights, expected[0][2] + expected[1][2], atol=1e-5)


def test_a_backend_of_another_name_is_refused():
  with pytest.raises(ValueError, match="'einsum' is unknown: choose one of"):
    grouped_matmul(jnp.ones((2, 2)), jnp.ones((1, 2, 2)), jnp.array([2]), backend='einsum')


@pytest.mark.parametrize(
  'platform, failure, expected',
  [
    ('cpu', '', 'loop'),
    ('gpu', '', 'tokamax'),
    ('tpu', 'no such kernel', 'megablox'),
    ('gpu', 'no such kernel', 'triton'),
    ('rocm', '', 'ragged_dot'),
  ],
)
def test_the_best_backend_is_found_and_logged_once(monkeypatch, platform, failure, expected):
  messages = []
  monkeypatch.setattr(_grouped_matmul, '_why_tokamax_fails', lambda: failure)
  monkeypatch.setattr(_grouped_matmul.logging, 'info', lambda message, *args: messages.append(message % args))
  monkeypatch.setattr(_grouped_matmul, '_chosen', {})
  assert [best_grouped_matmul_backend(platform), best_grouped_matmul_backend(platform)] == [expected] * 2
  (message,) = messages
  assert repr(expected) in message
  assert platform == 'tpu' or failure in message


def test_the_trial_of_tokamax_says_why_it_fails():
  error = _grouped_matmul._why_tokamax_fails()
  assert error == '' if importlib.util.find_spec('tokamax') else 'not installed' in error


def test_without_a_kernel_a_gpu_multiplies_by_the_loop(monkeypatch):
  monkeypatch.setattr(_grouped_matmul, '_why_tokamax_fails', lambda: 'not installed')
  monkeypatch.setattr(_grouped_matmul.jax, 'default_backend', lambda: 'gpu')
  monkeypatch.setattr(_grouped_matmul, 'multiply_by_triton', lambda rows, weights, sizes: rows @ weights[0])
  monkeypatch.setattr(_grouped_matmul, '_chosen', {})
  assert best_grouped_matmul_backend('gpu') == 'loop'  # the trial finds wrong numbers


@pytest.mark.parametrize(
  'others, agreed, worse',
  [
    (['triton', 'triton'], 'triton', None),
    (['tokamax', 'triton'], 'triton', [0, 2]),
    (['loop', 'tokamax'], 'loop', [1]),
    ([None, 'triton'], 'triton', None),
  ],
)
def test_processes_whose_trials_end_differently_agree_on_what_works_on_all(monkeypatch, others, agreed, worse):
  warnings = []
  monkeypatch.setattr(_grouped_matmul, '_chosen', {'gpu': 'triton'})
  monkeypatch.setattr(_grouped_matmul.logging, 'warning', lambda message, *args: warnings.append(message % args))
  agree_on_grouped_matmul_backend('gpu', lambda own: [own, *others])
  assert best_grouped_matmul_backend('gpu') == agreed
  assert [f'processes {worse} can use nothing better' in warning for warning in warnings] == [True] * (
    worse is not None
  )


def test_triton_is_refused_on_a_tpu(monkeypatch):
  monkeypatch.setattr('spmd_tasks.layers.moe._triton_backend.current_platform', lambda: 'tpu')
  with pytest.raises(ValueError, match="'triton' is a kernel for GPUs, and the devices are of the platform 'tpu'"):
    grouped_matmul(jnp.ones((2, 2)), jnp.ones((1, 2, 2)), jnp.array([2]), backend='triton')


def test_megablox_is_refused_on_a_gpu(monkeypatch):
  monkeypatch.setattr('spmd_tasks.layers.moe._megablox_backend.current_platform', lambda: 'gpu')
  with pytest.raises(ValueError, match="'megablox' is a kernel for TPUs, and the devices are of the platform 'gpu'"):
    grouped_matmul(jnp.ones((2, 2)), jnp.ones((1, 2, 2)), jnp.array([2]), backend='megablox')


def test_megablox_compiles_for_a_tpu():
  """Tiles of the sizes that the recipes have, for the memory of the oldest TPU: result and both gradients."""
  pytest.importorskip('libtpu', reason="the TPU compiler is not installed: pip install '.[plan-tpu]'")
  mesh = MeshSpec(axis_names=('data',), ici_mesh_shape=(4,)).build(parse_target('v5e:2x2').devices())
  place = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, jax.P()))
  rows, weights = place((1024, 1408), 'bfloat16'), place((4, 1408, 1024), 'bfloat16')

  def loss(rows, weights, group_sizes):
    with sharding_scope(mesh, ()):
      return jnp.sum(grouped_matmul(rows, weights, group_sizes, clear_rest=False).astype(jnp.float32) ** 2)

  on_devices = jax.shard_map(
    jax.grad(loss, argnums=(0, 1)), mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False
  )
  compiled = jax.jit(on_devices).lower(rows, weights, place((4,), 'int32')).compile()
  assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3


def gradients_by_triton(rows, weights, group_sizes):
  loss = lambda rows, weights: jnp.sum(grouped_matmul(rows, weights, group_sizes, clear_rest=False, backend='triton'))
  return jax.value_and_grad(loss, argnums=(0, 1))(rows, weights)


@pytest.mark.skipif(
  jax.__version_info__ > (0, 10, 2) and not has_compiler('gpu'), reason='JAX 0.11 needs its plugin for CUDA to lower it'
)
def test_triton_is_called_on_a_gpu(monkeypatch):
  """Result and both gradients, lowered without JAX's plugin for CUDA."""
  monkeypatch.setattr('spmd_tasks.layers.moe._triton_backend.current_platform', lambda: 'gpu')
  shapes = [jax.ShapeDtypeStruct((1000, 200), 'bfloat16'), jax.ShapeDtypeStruct((4, 200, 300), 'bfloat16')]
  traced = jax.jit(gradients_by_triton).trace(*shapes, jax.ShapeDtypeStruct((4,), 'int32'))
  assert len(re.findall(r'custom_call @\S*triton', traced.lower(lowering_platforms=('cuda',)).as_text())) == 3


@pytest.mark.skipif(not has_compiler('gpu'), reason="CUDA is not installed: pip install '.[plan-gpu]'")
@pytest.mark.parametrize('dtype', TOLERANCES)
def test_triton_compiles_for_a_gpu(dtype):
  mesh = MeshSpec(axis_names=('data',), ici_mesh_shape=(8,)).build(parse_target('h200:8').devices())
  place = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, jax.P()))

  def gradients(*arrays):
    with sharding_scope(mesh, ()):
      return gradients_by_triton(*arrays)

  on_devices = jax.shard_map(gradients, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
  arguments = place((1000, 200), dtype), place((4, 200, 300), dtype), place((4,), 'int32')
  compiled = jax.jit(on_devices).lower(*arguments).compile()
  assert len(re.findall('custom_call_target="[^"]*triton', compiled.as_text())) == 3
