"""Kernels held in 8 or 4 bits, which layers read as the numbers that they stand for.

    spec = stored_spec(name, spec, 'nf4')   # how a weight is held; of a kernel, the WeightSpecs of its parts
    held = quantize(kernel, spec)
    held.unbox()                            # float32; Linen calls it where a layer reads the kernel

Linen unboxes one layer at a time, also in a scanned stack. Three forms:

* `int8`: one float32 scale per output channel (LLM.int8, Dettmers et al., 2022, without outliers);
* `nf4`: 16 values that are the quantiles of a normal distribution, with a float32 scale for each 64 numbers in a row of
  a contracted dim: 4.5 bits a parameter (QLoRA, Dettmers et al., 2023, arXiv 2305.14314);
* `nf4_double`: the same with scales in 8 bits and a float32 per output channel (double quantisation): about 4.13 bits.

Google's `qwix` has NF4 too, and is not used: its array needs contracted dims that are multiples of the block, and
gathers the kernel over the mesh. Here rows are of any length, and every part is split and padded like the kernel.
"""

from collections.abc import Sequence
import dataclasses
import itertools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp

from spmd_tasks.sharding.weights import QUANTIZED_DTYPES, Quantized, WeightSpec

# Appendix E of the paper.
NF4_VALUES = (
  *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
  *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
  *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
  *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
BLOCK_SIZE = 64


class Int8(Quantized):
  """A kernel in int8 and its scales.

  Attributes:
    values: int8.
    scales: float32, of size 1 in the dims that are contracted.
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
    values: uint8, of size ceil(I / 2) in that dim: the codes of neighbours, the first in the low bits.
    scales: of size ceil(I / 64) in that dim: the largest number of each block, float32; or uint8, in parts of 255 of
      the largest scale.
    largest: float32, of size 1 in the dims that are contracted; None where scales are float32.
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
    codes = _cut(codes.reshape(_with_size(self.values.shape, self.dim, -1)), dim, self.size)
    scales = self.scales
    if self.largest is not None:
      scales = scales.astype(jnp.float32) * jnp.broadcast_to(self.largest / 255, scales.shape)
    return _nf4_numbers(codes) * _cut(jnp.repeat(scales, BLOCK_SIZE, axis=dim), dim, self.size)


def stored_spec(name: str, spec: WeightSpec, dtype: str) -> WeightSpec | Quantized:
  """Returns how a weight is held where kernels are held in `dtype`, such as 'bfloat16' or one of QUANTIZED_DTYPES.

  Vectors, biases, routers, low-rank adapters and weights that are no floats stay as they are. Where kernels are
  quantized, weights with the vocabulary are held in bfloat16: a lookup would scale the whole table.
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
  """Returns the WeightSpecs of a kernel that is held in one of QUANTIZED_DTYPES."""
  first = spec.num_separate_dims
  # Those that its product contracts: [..., D] -> ... has one; ... -> [D] all but the last.
  dims = range(first, len(spec.shape) - 1) if spec.all_split_dims[-1] == 'embed' else (first,)

  def per_channel(spec: WeightSpec) -> WeightSpec:
    split_dims = spec.split_dims
    if split_dims is not None:
      split_dims = tuple(None if dim in dims else entry for dim, entry in enumerate(split_dims))
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(spec.shape))
    return dataclasses.replace(spec, shape=shape, split_dims=split_dims, dtype=jnp.dtype('float32'))

  if dtype == 'int8':
    return Int8(values=dataclasses.replace(spec, dtype=jnp.dtype('int8')), scales=per_channel(spec))
  is_double = dtype == 'nf4_double'
  size, dim = spec.shape[dims[-1]], dims[-1] - len(spec.shape)

  def part(num_per_entry: int, dtype: str) -> WeightSpec:
    shape = _with_size(spec.shape, dim, -(-size // num_per_entry))
    return dataclasses.replace(spec, shape=shape, dtype=jnp.dtype(dtype))

  return NormalFloat4(
    values=part(2, 'uint8'),
    scales=part(BLOCK_SIZE, 'uint8' if is_double else 'float32'),
    largest=per_channel(spec) if is_double else None,
    dim=dim,
    size=size,
  )


def quantize(weight: jax.Array, like: Quantized) -> Quantized:
  """Returns a kernel held in the form of `like`, whose parts have the shapes that they are to have."""
  weight = weight.astype(jnp.float32)
  if isinstance(like, Int8):
    scales = jnp.max(jnp.abs(weight), axis=_dims_of_one(like.scales), keepdims=True)
    scales = jnp.where(scales > 0, scales / 127, 1.0)
    return Int8(values=jnp.round(weight / jnp.broadcast_to(scales, weight.shape)).astype(jnp.int8), scales=scales)
  assert isinstance(like, NormalFloat4)
  dim = weight.ndim + like.dim
  filled = like.scales.shape[dim] * BLOCK_SIZE
  weight = jnp.pad(weight, [(0, filled - size if each == dim else 0) for each, size in enumerate(weight.shape)])
  blocks = weight.reshape(*weight.shape[:dim], -1, BLOCK_SIZE, *weight.shape[dim + 1 :])
  scales = jnp.max(jnp.abs(blocks), axis=dim + 1, keepdims=True)
  codes = _nf4_codes(blocks / jnp.broadcast_to(jnp.where(scales > 0, scales, 1.0), blocks.shape))
  codes = _cut(codes.reshape(weight.shape), dim, 2 * like.values.shape[dim])
  pairs = codes.reshape(*codes.shape[:dim], -1, 2, *codes.shape[dim + 1 :])
  low, high = (jax.lax.index_in_dim(pairs, each, dim + 1, keepdims=False) for each in range(2))
  scales, largest = jnp.squeeze(scales, dim + 1), None
  if like.largest is not None:
    largest = jnp.max(scales, axis=_dims_of_one(like.largest), keepdims=True)
    parts = 255 * scales / jnp.broadcast_to(jnp.where(largest > 0, largest, 1.0), scales.shape)
    scales = jnp.maximum(jnp.round(parts), 1).astype(jnp.uint8)
  return like.replace(values=low | (high << 4), scales=scales, largest=largest)


def _nf4_codes(numbers: jax.Array) -> jax.Array:
  """Returns the numbers, uint8, of the values nearest to numbers in [-1, 1]."""
  middles = [(low + high) / 2 for low, high in itertools.pairwise(NF4_VALUES)]
  return sum((numbers > middle for middle in middles), start=jnp.zeros(numbers.shape, jnp.uint8)).astype(jnp.uint8)


def _nf4_numbers(codes: jax.Array) -> jax.Array:
  """Returns the values of codes, float32. Fifteen selections: on an accelerator a lookup takes longer."""
  found: list[Any] = [jnp.float32(value) for value in NF4_VALUES]
  for bit in range(4):
    is_set = (codes >> bit) & 1 == 1
    found = [jnp.where(is_set, high, low) for low, high in zip(found[::2], found[1::2])]
  return found[0]


def _dims_of_one(part: Any) -> tuple[int, ...]:
  return tuple(dim for dim, size in enumerate(part.shape) if size == 1)


def _with_size(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
  """Returns the shape with another size in a dim that is counted from the end."""
  dim += len(shape)
  return (*shape[:dim], size, *shape[dim + 1 :])


def _cut(array: jax.Array, dim: int, size: int) -> jax.Array:
  return jax.lax.slice_in_dim(array, 0, size, axis=dim)


def dequantized_spec(spec: WeightSpec | Quantized) -> WeightSpec:
  """Returns the WeightSpec of the dequantized kernel, float32; the WeightSpec itself if it is not quantized."""
  if not isinstance(spec, Quantized):
    return spec
  values = jax.tree.leaves(spec)[0]
  return dataclasses.replace(values, shape=spec.shape, dtype=jnp.dtype('float32'))
