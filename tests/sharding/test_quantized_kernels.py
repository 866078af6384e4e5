"""Kernels in 8 and 4 bits agree with the published formulas in float64, for dims of any size."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.quantized import dequantized_spec, quantize, quantized_spec

# QLoRA, appendix E.
NF4 = np.array(
  [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
  ]
)
# name -> shape, split dims, tags, layers; the dim of the blocks; the contracted dims
KERNELS = {
  'up, rows of 130': ((130, 5), ('embed', 'mlp'), (), 0, 0, (0,)),
  'odd rows': ((2, 67, 3, 4), ('layers', 'embed', 'heads', 'head_dim'), (), 1, 1, (1,)),
  'out': ((3, 70, 6), ('heads', 'head_dim', 'embed'), (), 0, 1, (0, 1)),
  'experts': ((2, 3, 128, 6), ('layers', 'expert', 'expert_mlp', 'expert_embed'), ('expert',), 1, 2, (2,)),
}


def spec_of(name):
  shape, split_dims, tags, stacked, *_ = KERNELS[name]
  return WeightSpec(shape=shape, init=None, split_dims=split_dims, tags=tags, stacked=stacked)


def random_kernel(shape):
  kernel = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  kernel[..., 0] = 0.0  # a channel of zeros has no scale
  return kernel


def dequantized_reference(kernel, dim, is_double, contracted):
  """Quantizes and dequantizes the kernel as in QLoRA, in float64, block by block."""
  rows = np.moveaxis(kernel.astype(np.float64), dim, -1)
  starts = range(0, rows.shape[-1], 64)
  scales = np.stack([np.abs(rows[..., start : start + 64]).max(-1) for start in starts], -1)
  stored_scales = scales
  if is_double:
    moved = np.moveaxis(scales, -1, dim)
    largest = moved.max(contracted, keepdims=True)
    codes = np.round(255 * moved / np.where(largest > 0, largest, 1))
    stored_scales = np.moveaxis(np.maximum(codes, 1) * largest / 255, dim, -1)
  result = np.empty_like(rows)
  for number, start in enumerate(starts):
    block = rows[..., start : start + 64] / np.where(scales, scales, 1)[..., number, None]
    nearest = np.abs(block[..., None] - NF4).argmin(-1)
    result[..., start : start + 64] = NF4[nearest] * stored_scales[..., number, None]
  return np.moveaxis(result, -1, dim)


@pytest.mark.parametrize('dtype', [pytest.param('nf4', marks=pytest.mark.exhaustive), 'nf4_double'])
@pytest.mark.parametrize('name', KERNELS)
def test_four_bits_agree_with_float64(name, dtype):
  shape, _, _, _, dim, contracted = KERNELS[name]
  kernel = random_kernel(shape)
  spec = quantized_spec(spec_of(name), dtype)
  quantized = jax.jit(lambda kernel: quantize(kernel, spec))(kernel)
  assert spec.shape == quantized.shape == shape
  jax.tree.map(lambda x, y: np.testing.assert_equal((x.shape, x.dtype), (y.shape, y.dtype)), quantized, spec)
  expected = dequantized_reference(kernel, dim, dtype == 'nf4_double', contracted)
  unboxed = np.asarray(jax.jit(lambda x: x.unbox())(quantized))
  np.testing.assert_allclose(unboxed, expected, rtol=1e-6, atol=0)
  assert not np.any(unboxed[..., 0])


def test_quantized_arrays_have_the_kernels_split_dims_and_a_scan_reads_layers():
  spec = quantized_spec(dataclasses.replace(spec_of('odd rows'), tags=('frozen',)), 'nf4_double')
  assert spec.values.split_dims == spec.scales.split_dims == ('layers', 'embed', 'heads', 'head_dim')
  assert (spec.values.shape, spec.scales.shape, spec.largest.shape) == ((2, 34, 3, 4), (2, 2, 3, 4), (2, 1, 3, 4))
  assert spec.largest.split_dims == ('layers', None, 'heads', 'head_dim')
  kernel = dequantized_spec(spec)
  assert (kernel.shape, kernel.dtype, kernel.tags, kernel.stacked) == ((2, 67, 3, 4), jnp.float32, ('frozen',), 1)
  quantized = jax.jit(lambda kernel: quantize(kernel, spec))(random_kernel((2, 67, 3, 4)))

  @jax.jit
  def both(quantized):
    return jax.lax.scan(lambda carry, layer: (carry, layer.unbox()), 0, quantized)[1], quantized.unbox()

  np.testing.assert_array_equal(*both(quantized))


@pytest.mark.parametrize('dtype, bits', [('int8', 8.04), ('nf4', 4.5), ('nf4_double', 4.16)])
def test_bits_per_parameter(dtype, bits):
  """Compares the bytes on the device too: `nbytes` counts a packed byte as one."""
  kernel = jnp.asarray(np.random.default_rng(0).normal(size=(1024, 64)), jnp.float32)
  spec = WeightSpec(shape=kernel.shape, init=None, split_dims=('embed', 'mlp'))
  quantized = jax.jit(lambda kernel: quantize(kernel, quantized_spec(spec, dtype)))(kernel)
  arrays = jax.tree.leaves(quantized)
  assert sum(array.nbytes for array in arrays) * 8 / kernel.size == pytest.approx(bits, abs=0.01)
  assert sum(array.on_device_size_in_bytes() for array in arrays) * 8 <= 1.01 * bits * kernel.size
  unboxed = jax.jit(lambda x: x.unbox())(quantized)
  error = np.sqrt(np.mean(np.square(np.asarray(unboxed) - np.asarray(kernel))))
  assert error < {'int8': 0.012}.get(dtype, 0.1)
