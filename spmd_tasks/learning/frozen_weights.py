"""Frozen weights: marks the weights that are not trained, and makes trees without them.

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

from spmd_tasks.sharding.weight_names import matching_names

FROZEN_TAG = 'frozen'


def mark_frozen(weight_specs: Any, trained: tuple[str, ...], dtype: str | None = None) -> Any:
  """Returns the specs with the tag `frozen` for all weights but those that the patterns name.

  Args:
    weight_specs: tree of WeightSpec.
    trained: patterns of names; see `matching_names`.
    dtype: in which frozen kernels are held, as `stored_spec` says (sharding/quantized.py); None: as they are.

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
    frozen = dataclasses.replace(spec, tags=(*spec.tags, FROZEN_TAG))
    if dtype is None:
      return frozen
    from spmd_tasks.sharding.quantized import stored_spec

    return stored_spec(name, frozen, dtype)

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
