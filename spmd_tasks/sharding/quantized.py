"""Kernels quantized to 8 or 4 bits, which Linen dequantizes when a layer reads them.

    spec = stored_spec(name, spec, 'nf4')   # for a kernel, the WeightSpecs of its quantized arrays
    quantized = quantize(kernel, spec)
    quantized.unbox()                       # float32; Linen calls it when a layer reads the kernel

Linen unboxes one layer at a time, also in a scanned stack. There are three formats:

* `int8`: one float32 scale per output channel (LLM.int8, Dettmers et al., 2022, without outliers);
* `nf4`: 16 values that are the quantiles of a normal distribution, with a float32 scale for each block of 64 elements
  along a contracted dim: 4.5 bits per parameter (QLoRA, Dettmers et al., 2023, arXiv 2305.14314);
* `nf4_double`: the same with 8-bit scales and one float32 per output channel (double quantization): about 4.13 bits.

Google's `qwix` has NF4 too, but needs contracted dims that are multiples of the block, and gathers the kernel over the
mesh. Here dims have any size, and each quantized array is sharded and padded like the kernel.
"""

from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from spmd_tasks.sharding.weights import QUANTIZED_DTYPES, Quantized, WeightSpec

# QLoRA, appendix E.
NF4_VALUES = (
  *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
  *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
  *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
  *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BLOCK_SIZE = 64


class Int8(Quantized):
  """A kernel in int8 with its scales.

  Attributes:
    values: int8.
    scales: float32, of size 1 in the contracted dims.
  """

  values: Any
  scales: Any

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(self.values.shape)

  def unbox(self) -> Any:
    return self.values.astype(self.scales.dtype) * jnp.broadcast_to(self.scales, self.values.shape)


class NormalFloat4(Quantized):
  """A kernel in 4 bits, packed and scaled in blocks along one dim of size I.

  Attributes:
    values: uint8, of size ceil(I / 2) in that dim: the codes of two neighbours, the first in the low bits.
    scales: of size ceil(I / 64) in that dim: the largest magnitude of each block, float32; or uint8, in units of
      `largest / 255`.
    largest: the largest scale, float32, of size 1 in the contracted dims; None if scales are float32.
    dim: that dim, counted from the end, so that it is the same for one layer and for a stack.
    size: I.
  """

  values: Any
  scales: Any
  largest: Any
  dim: int = struct.field(pytree_node=False)
  size: int = struct.field(pytree_node=False)

  @property
  def shape(self) -> tuple[int, ...]:
    return _with_size(self.values.shape, self.dim, self.size)

  def unbox(self) -> Any:
    dim = self.values.ndim + self.dim
    codes = jnp.stack([self.values & 15, self.values >> 4], axis=dim + 1)
    codes = _truncate(codes.reshape(_with_size(self.values.shape, self.dim, -1)), dim, self.size)
    scales = self.scales
    if self.largest is not None:
      scales = scales.astype(jnp.float32) * jnp.broadcast_to(self.largest / 255, scales.shape)
    return _nf4_values(codes) * _truncate(jnp.repeat(scales, BLOCK_SIZE, axis=dim), dim, self.size)


def stored_spec(name: str, spec: WeightSpec, dtype: str) -> WeightSpec | Quantized:
  """Returns the spec of a weight if kernels are stored in `dtype`, such as 'bfloat16' or one of QUANTIZED_DTYPES.

  Vectors, biases, routers, low-rank adapters and weights that are not floating point do not change. If kernels are
  quantized, embeddings and output heads are stored in bfloat16: a lookup would dequantize the whole table.
  """
  split_dims = spec.all_split_dims[spec.stacked :]
  is_kernel = len(split_dims) >= 2 and not {'no_decay', 'adapter'}.intersection(spec.tags) and 'router' not in name
  if not is_kernel or not jnp.issubdtype(spec.dtype, jnp.floating):
    return spec
  if dtype not in QUANTIZED_DTYPES:
    return dataclasses.replace(spec, dtype=jnp.dtype(dtype))
  if 'vocab' in split_dims or name.endswith('table'):
    return dataclasses.replace(spec, dtype=jnp.dtype('bfloat16'))
  return quantized_spec(spec, dtype)


def quantized_spec(spec: WeightSpec, dtype: str) -> Quantized:
  """Returns the WeightSpecs of the arrays of a kernel that is quantized to one of QUANTIZED_DTYPES."""
  first = spec.num_separate_dims
  # A kernel [D, ...] contracts its first dim, a kernel [..., D] all dims but the last.
  contracted = range(first, len(spec.shape) - 1) if spec.all_split_dims[-1] == 'embed' else (first,)

  def per_channel(spec: WeightSpec) -> WeightSpec:
    split_dims = spec.split_dims
    if split_dims is not None:
      split_dims = tuple(None if dim in contracted else entry for dim, entry in enumerate(split_dims))
    shape = tuple(1 if dim in contracted else size for dim, size in enumerate(spec.shape))
    return dataclasses.replace(spec, shape=shape, split_dims=split_dims, dtype=jnp.dtype('float32'))

  if dtype == 'int8':
    return Int8(values=dataclasses.replace(spec, dtype=jnp.dtype('int8')), scales=per_channel(spec))
  is_double = dtype == 'nf4_double'
  size, dim = spec.shape[contracted[-1]], contracted[-1] - len(spec.shape)

  def per_group(group_size: int, dtype: str) -> WeightSpec:
    shape = _with_size(spec.shape, dim, -(-size // group_size))
    return dataclasses.replace(spec, shape=shape, dtype=jnp.dtype(dtype))

  return NormalFloat4(
    values=per_group(2, 'uint8'),
    scales=per_group(BLOCK_SIZE, 'uint8' if is_double else 'float32'),
    largest=per_channel(spec) if is_double else None,
    dim=dim,
    size=size,
  )


def quantize(weight: jax.Array, like: Quantized) -> Quantized:
  """Quantizes a kernel to the format, shapes and dtypes of `like`."""
  weight = weight.astype(jnp.float32)
  if isinstance(like, Int8):
    scales = jnp.max(jnp.abs(weight), axis=_singleton_dims(like.scales), keepdims=True)
    scales = jnp.where(scales > 0, scales / 127, 1.0)
    return Int8(values=jnp.round(weight / jnp.broadcast_to(scales, weight.shape)).astype(jnp.int8), scales=scales)
  assert isinstance(like, NormalFloat4)
  dim = weight.ndim + like.dim
  padded_size = like.scales.shape[dim] * BLOCK_SIZE
  weight = jnp.pad(weight, [(0, padded_size - size if i == dim else 0) for i, size in enumerate(weight.shape)])
  blocks = weight.reshape(*weight.shape[:dim], -1, BLOCK_SIZE, *weight.shape[dim + 1 :])
  scales = jnp.max(jnp.abs(blocks), axis=dim + 1, keepdims=True)
  codes = _nf4_codes(blocks / jnp.broadcast_to(jnp.where(scales > 0, scales, 1.0), blocks.shape))
  codes = _truncate(codes.reshape(weight.shape), dim, 2 * like.values.shape[dim])
  pairs = codes.reshape(*codes.shape[:dim], -1, 2, *codes.shape[dim + 1 :])
  low, high = (jax.lax.index_in_dim(pairs, i, dim + 1, keepdims=False) for i in range(2))
  scales, largest = jnp.squeeze(scales, dim + 1), None
  if like.largest is not None:
    largest = jnp.max(scales, axis=_singleton_dims(like.largest), keepdims=True)
    relative = 255 * scales / jnp.broadcast_to(jnp.where(largest > 0, largest, 1.0), scales.shape)
    scales = jnp.maximum(jnp.round(relative), 1).astype(jnp.uint8)
  return like.replace(values=low | (high << 4), scales=scales, largest=largest)


def _nf4_codes(x: jax.Array) -> jax.Array:
  """Returns the indices, uint8, of the NF4 values nearest to x in [-1, 1]."""
  midpoints = [(low + high) / 2 for low, high in itertools.pairwise(NF4_VALUES)]
  return sum((x > midpoint for midpoint in midpoints), start=jnp.zeros(x.shape, jnp.uint8)).astype(jnp.uint8)


def _nf4_values(codes: jax.Array) -> jax.Array:
  """Returns the NF4 values at indices, float32, by fifteen selects: on an accelerator a lookup is slower."""
  values: list[Any] = [jnp.float32(value) for value in NF4_VALUES]
  for bit in range(4):
    is_set = (codes >> bit) & 1 == 1
    values = [jnp.where(is_set, high, low) for low, high in zip(values[::2], values[1::2])]
  return values[0]


def _singleton_dims(array: Any) -> tuple[int, ...]:
  return tuple(dim for dim, size in enumerate(array.shape) if size == 1)


def _with_size(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
  """Returns the shape with `size` in `dim`, which counts from the end."""
  dim += len(shape)
  return (*shape[:dim], size, *shape[dim + 1 :])


def _truncate(array: jax.Array, dim: int, size: int) -> jax.Array:
  return jax.lax.slice_in_dim(array, 0, size, axis=dim)


def dequantized_spec(spec: WeightSpec | Quantized) -> WeightSpec:
  """Returns the WeightSpec of the dequantized kernel, float32; the WeightSpec itself if it is not quantized."""
  if not isinstance(spec, Quantized):
    return spec
  values = jax.tree.leaves(spec)[0]
  return dataclasses.replace(values, shape=spec.shape, dtype=jnp.dtype('float32'))
