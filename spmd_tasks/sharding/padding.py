"""Pads uneven shapes: a dim that its mesh axes do not divide is zero-padded outside of a step and sliced inside it.

`jit` accepts and returns only arrays that are sharded evenly; inside `jit`, any shape can be constrained. So the stored
state is padded ([30] over 4 devices is stored as [32]), and a step computes on true shapes: it calls `unpad` on entry
and `pad` on exit, which writes zeros again. Pax did the same. No other part of the project sees padding.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd_tasks.sharding.specs import num_parts, spec_axes, spec_entry


def padded_shape(shape: Sequence[int], spec: PartitionSpec, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
  """Rounds every dim of `shape` up to a multiple of the number of parts into which `spec` splits it."""
  parts = [num_parts(axes, axis_sizes) for axes in spec_axes(spec, len(shape))]
  return tuple(dim + (part - dim % part) % part for dim, part in zip(shape, parts))


def pad(tree: Any, shapes: Any) -> Any:
  """Zero-pads every array at the end of its dims to the shape in the congruent tree `shapes` (of ShapeDtypeStructs)."""
  return jax.tree.map(lambda x, target: _pad_to(x, target.shape), tree, shapes)


def pad_evenly(tree: Any, specs: Any, axis_sizes: Mapping[str, int]) -> Any:
  """Zero-pads every array to the `padded_shape` of its PartitionSpec in the congruent tree `specs`."""
  return jax.tree.map(lambda x, spec: _pad_to(x, padded_shape(x.shape, spec, axis_sizes)), tree, specs)


def _pad_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  return x if x.shape == shape else jnp.pad(x, [(0, new - old) for old, new in zip(x.shape, shape)])


def unpad(tree: Any, shapes: Any) -> Any:
  """Slices every array from the start of its dims to the shape in the congruent tree `shapes`."""

  def unpad_leaf(x, target):
    return x if x.shape == target.shape else jax.lax.slice(x, (0,) * x.ndim, target.shape)

  return jax.tree.map(unpad_leaf, tree, shapes)


def evenly_divided_spec(shape: Sequence[int], spec: PartitionSpec, axis_sizes: Mapping[str, int]) -> PartitionSpec:
  """Returns a spec that splits `shape` without padding, for checkpoints.

  A dim that its axes divide keeps them. The axes of an uneven dim move to the largest dim that they divide together
  with its own axes. If there is none, the array is replicated over them. `even_spec` moves no axes.
  """
  all_axes = spec_axes(spec, len(shape))
  is_even = [dim % num_parts(axes, axis_sizes) == 0 for dim, axes in zip(shape, all_axes)]
  even_axes = [axes if even else () for axes, even in zip(all_axes, is_even)]
  for uneven in [axes for axes, even in zip(all_axes, is_even) if not even]:
    for dim in sorted(range(len(shape)), key=lambda d: -shape[d]):
      if shape[dim] % num_parts((*even_axes[dim], *uneven), axis_sizes) == 0:
        even_axes[dim] = (*even_axes[dim], *uneven)
        break
  return PartitionSpec(*map(spec_entry, even_axes))
