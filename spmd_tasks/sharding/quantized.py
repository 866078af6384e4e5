"""Quantized: a kernel in int8 with one float32 scale per output channel, which layers read as what it stands for.

LLM.int8 (Dettmers et al., 2022), without outliers. Linen unboxes the pair where a layer reads the kernel, one layer at
a time, also in a scanned stack.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from flax import struct
from flax.core import meta
import jax
import jax.numpy as jnp

from spmd_tasks.sharding.weights import WeightSpec


class Quantized(struct.PyTreeNode, meta.AxisMetadata):
  """A kernel in int8 and its scales; Linen unboxes it where a layer reads the kernel.

  Attributes:
    values: int8.
    scales: float32, of size 1 in the dims that are contracted.
  """

  values: Any
  scales: Any

  def unbox(self) -> Any:
    return self.values.astype(self.scales.dtype) * jnp.broadcast_to(self.scales, self.values.shape)

  def replace_boxed(self, val: Any) -> Any:
    return val

  def add_axis(self, index: int, params: dict[Any, Any]) -> 'Quantized':
    return self

  def remove_axis(self, index: int, params: dict[Any, Any]) -> 'Quantized':
    return self


def is_quantized(leaf: Any) -> bool:
  """Whether a leaf of a tree of weights is held in int8."""
  return isinstance(leaf, Quantized)


def contracted_dims(spec: WeightSpec) -> Sequence[int]:
  """Returns the dims of a kernel that its product contracts: [..., D] -> ... has one; ... -> [D] all but the last."""
  first = spec.stacked + ('expert' in spec.tags)
  split_dims = spec.split_dims or (None,) * len(spec.shape)
  return range(first, len(spec.shape) - 1) if split_dims[-1] == 'embed' else (first,)


def quantized_spec(spec: WeightSpec) -> Quantized:
  """Returns the WeightSpecs of a kernel that is held in int8."""
  dims = contracted_dims(spec)
  split_dims = None
  if spec.split_dims is not None:
    split_dims = tuple(None if dim in dims else entry for dim, entry in enumerate(spec.split_dims))
  shape = tuple(1 if dim in dims else size for dim, size in enumerate(spec.shape))
  return Quantized(
    values=dataclasses.replace(spec, dtype=jnp.dtype('int8')),
    scales=dataclasses.replace(spec, shape=shape, split_dims=split_dims, dtype=jnp.dtype('float32')),
  )


def quantize(weight: jax.Array, dims: Sequence[int]) -> Quantized:
  """Returns the kernel in int8, with a scale for each place of the dims that are not among `dims`."""
  largest = jnp.max(jnp.abs(weight), axis=tuple(dims), keepdims=True)
  scales = jnp.where(largest > 0, largest / 127, 1.0).astype(jnp.float32)
  values = jnp.round(weight / jnp.broadcast_to(scales, weight.shape)).astype(jnp.int8)
  return Quantized(values=values, scales=scales)
