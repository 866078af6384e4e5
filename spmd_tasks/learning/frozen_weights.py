"""Frozen weights: which weights rest, and trees without them.

    specs = mark_frozen(specs, trained=('lora_',), dtype='bfloat16')     # the others get the tag `frozen`
    trained = without_frozen(weights, specs)                             # None in the place of each frozen weight
    weights = fill_in(trained, weights)

A frozen weight has no gradient, optimizer state, average or decay: neither is there memory for them, nor is the
gradient computed. None is a subtree without leaves, so that a tree without frozen weights passes through any code that
maps over weights.
"""

import dataclasses
from typing import Any

from flax.core import meta
import jax
import jax.numpy as jnp

from spmd_tasks.sharding import QUANTIZED_DTYPES, matching_names, quantized_spec

FROZEN_TAG = 'frozen'


def mark_frozen(weight_specs: Any, trained: tuple[str, ...], dtype: str | None = None) -> Any:
  """Returns the specs with the tag `frozen` for all weights but those that the patterns name.

  Args:
    weight_specs: tree of WeightSpec.
    trained: patterns of names; see `matching_names`.
    dtype: in which frozen kernels are held; vectors and routers stay as they are. None: as they are. In one of
      QUANTIZED_DTYPES, a kernel is a Quantized, and weights with the vocabulary are held in bfloat16: a lookup would
      scale the whole table.

  Raises:
    UserError: a pattern names no weight.
  """

  def name_of(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator='/')

  names = [name_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(weight_specs)[0]]
  kept = set(matching_names(trained, names, setting='task.trained'))

  def mark(path: Any, spec: Any) -> Any:
    if (name := name_of(path)) in kept:
      return spec
    is_kernel = len(spec.shape) - spec.stacked >= 2 and 'no_decay' not in spec.tags and 'router' not in name
    if dtype in QUANTIZED_DTYPES and is_kernel:
      dims = (spec.split_dims or ())[spec.stacked :]
      if 'vocab' not in dims and not name.endswith('table'):
        return quantized_spec(dataclasses.replace(spec, tags=(*spec.tags, FROZEN_TAG)), dtype)
      return dataclasses.replace(spec, tags=(*spec.tags, FROZEN_TAG), dtype=jnp.dtype('bfloat16'))
    held = dtype if dtype is not None and is_kernel and jnp.issubdtype(spec.dtype, jnp.floating) else spec.dtype
    return dataclasses.replace(spec, tags=(*spec.tags, FROZEN_TAG), dtype=jnp.dtype(held))

  return jax.tree_util.tree_map_with_path(mark, weight_specs)


def are_frozen(weight_specs: Any) -> bool:
  """Returns whether any weight is frozen."""
  return any(FROZEN_TAG in spec.tags for spec in jax.tree.leaves(weight_specs))


def without_frozen(tree: Any, weight_specs: Any) -> Any:
  """Replaces every frozen weight by None; the tree is congruent to the weights, or lacks them already."""
  return jax.tree.map(lambda spec, leaf: None if FROZEN_TAG in spec.tags else leaf, weight_specs, tree)


def fill_in(tree: Any, other: Any) -> Any:
  """Returns the tree with each None in it replaced by what the other tree has in its place.

  A weight that is held as several arrays (a Linen box) is one leaf.
  """

  def is_leaf(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, meta.AxisMetadata)

  return jax.tree.map(lambda leaf, own: leaf if jax.tree.leaves(leaf) else own, tree, other, is_leaf=is_leaf)
