"""Frozen weights: makes trees without the weights that are not trained, which have the tag `frozen`.

A frozen weight has no gradient, optimizer state, average or decay. None, in its place in a tree, is a subtree without
leaves, which any code that maps over weights passes by.
"""

from typing import Any

from flax.core import meta
import jax

FROZEN_TAG = 'frozen'


def are_frozen(weight_specs: Any) -> bool:
  """Returns whether any weight is frozen."""
  return any(FROZEN_TAG in spec.tags for spec in jax.tree.leaves(weight_specs))


def without_frozen(tree: Any, weight_specs: Any) -> Any:
  """Replaces every frozen weight by None; the tree is congruent to the weights, or lacks them already."""
  return without_tag(tree, weight_specs, FROZEN_TAG)


def without_tag(tree: Any, weight_specs: Any, tag: str) -> Any:
  """Replaces every weight with a tag by None."""
  return jax.tree.map(lambda spec, leaf: None if tag in spec.tags else leaf, weight_specs, tree)


def fill_in(tree: Any, other: Any) -> Any:
  """Returns the tree with each None in it replaced by what the other tree has in its place.

  A weight that is held as several arrays (a Linen box, or a tuple of layers) is one leaf.
  """

  def is_leaf(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, (tuple, meta.AxisMetadata))

  return jax.tree.map(lambda leaf, own: leaf if jax.tree.leaves(leaf) else own, tree, other, is_leaf=is_leaf)
