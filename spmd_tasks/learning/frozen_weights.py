"""Frozen weights: marks weights that are not trained with the tag `frozen`, and removes them from trees.

    specs = mark_frozen(specs, trained=('lora_',), dtype='bfloat16')     # all other weights get the tag `frozen`

A frozen weight has no gradient, optimizer state, average or decay. Trees have None in its place, which is a subtree
without leaves, so `jax.tree.map` skips it.
"""

import dataclasses
from typing import Any

from flax.core import meta
import jax

from spmd_tasks.sharding.quantized import stored_spec
from spmd_tasks.sharding.weight_names import matching_names
from spmd_tasks.sharding.weights import leaf_name, leaves_by_name

FROZEN_TAG = 'frozen'


def mark_frozen(weight_specs: Any, trained: tuple[str, ...], dtype: str | None = None) -> Any:
  """Returns the specs, with the tag `frozen` on all weights that no pattern in `trained` matches (`matching_names`).

  `dtype` is the dtype of frozen kernels (`stored_spec` in sharding/quantized.py); None keeps theirs. Raises a UserError
  if a pattern matches no weight.
  """
  trained_names = set(matching_names(trained, [*leaves_by_name(weight_specs)], setting='task.trained'))

  def mark(path: Any, spec: Any) -> Any:
    if (name := leaf_name(path)) in trained_names:
      return spec
    frozen = dataclasses.replace(spec, tags=(*spec.tags, FROZEN_TAG))
    return frozen if dtype is None else stored_spec(name, frozen, dtype)

  return jax.tree_util.tree_map_with_path(mark, weight_specs)


def are_frozen(weight_specs: Any) -> bool:
  """Returns whether any weight is frozen."""
  return any(FROZEN_TAG in spec.tags for spec in jax.tree.leaves(weight_specs))


def without_frozen(tree: Any, weight_specs: Any) -> Any:
  """Replaces every frozen weight of a tree by None; does not change a tree in which they are None already."""
  return without_tag(tree, weight_specs, FROZEN_TAG)


def without_tag(tree: Any, weight_specs: Any, tag: str) -> Any:
  """Replaces every weight with a tag by None."""
  return jax.tree.map(lambda spec, leaf: None if tag in spec.tags else leaf, weight_specs, tree)


def fill_in(tree: Any, other: Any) -> Any:
  """Replaces each None in the tree by the other tree's leaf.

  A weight that consists of several arrays (a Linen box, or a tuple of layers) counts as one leaf.
  """

  def is_leaf(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (tuple, meta.AxisMetadata))

  return jax.tree.map(lambda leaf, default: leaf if jax.tree.leaves(leaf) else default, tree, other, is_leaf=is_leaf)
