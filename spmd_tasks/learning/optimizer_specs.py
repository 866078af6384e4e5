"""How each leaf of an optimizer's state is laid out: like the weight that it belongs to.

Optax states are nested tuples in which some subtrees have the structure of the weights. Those subtrees are found by
structure, not by the name of the optimizer, so that any optax transformation works:

* a leaf of its weight's shape takes the weight's split dims;
* Adafactor's `v_row` and `v_col` take the split dims of the dimensions that were not averaged away;
* scalars and placeholders of one element (per layer and expert) are replicated;
* anything else in a weight's place is replicated too, and a warning names it.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

from absl import logging
import jax
import numpy as np
import optax

from spmd_tasks.learning.adafactor import num_separate_dims
from spmd_tasks.sharding import WeightSpec

LeafRule = Callable[[str, Any, WeightSpec | None], WeightSpec]


def factored_dims(shape: Sequence[int], num_separate: int) -> tuple[int, int] | None:
  """Which dims of a weight `optax.scale_by_factored_rms` averages away: (dropped in v_col, dropped in v_row).

  These are the second largest and the largest dim of one layer's weight, ties as `np.argsort` breaks them, which is
  optax's own rule; the `num_separate` leading dims count layers and experts and are never averaged. None if the weight
  of one has fewer than 2 dims.
  """
  layer_shape = tuple(shape[num_separate:])
  if len(layer_shape) < 2:
    return None
  order = np.argsort(layer_shape)
  return num_separate + int(order[-2]), num_separate + int(order[-1])


def _weight_split_dims(weight: WeightSpec) -> tuple[Any, ...]:
  return weight.split_dims if weight.split_dims is not None else (None,) * len(weight.shape)


def _replicated(leaf: Any) -> WeightSpec:
  return WeightSpec(shape=tuple(leaf.shape), init=None, split_dims=(None,) * len(leaf.shape), dtype=leaf.dtype)


def _plain_rule(name: str, leaf: Any, weight: WeightSpec | None) -> WeightSpec:
  """Same shape: the weight's split dims; else replicated."""
  shape = tuple(leaf.shape)
  if weight is not None:
    if shape == tuple(weight.shape):
      return dataclasses.replace(weight, init=None, dtype=leaf.dtype, split_dims=_weight_split_dims(weight))
    if shape == (*weight.shape[: num_separate_dims(weight)], 1):
      return dataclasses.replace(_replicated(leaf), stacked=weight.stacked, tags=weight.tags)
  if math.prod(shape) != 1:
    if weight is not None:
      logging.warning(
        'Optimizer state %s has shape %s, but its weight has shape %s: it is replicated on every device.',
        name,
        shape,
        tuple(weight.shape),
      )
    else:
      logging.warning(
        'Optimizer state %s of shape %s belongs to no weight: it is replicated on every device.', name, shape
      )
  return _replicated(leaf)


def _moment_rule(is_row: bool) -> LeafRule:
  """The rule for v_row or v_col of `optax.FactoredState`."""

  def rule(name: str, leaf: Any, weight: WeightSpec | None) -> WeightSpec:
    if weight is None:
      return _plain_rule(name, leaf, weight)
    # 0 is for an optimizer that, unlike our Adafactor, takes a stack of layers or experts for one weight.
    for num_separate in dict.fromkeys((num_separate_dims(weight), 0)):
      dims = factored_dims(weight.shape, num_separate)
      if dims is None:
        continue
      dropped = dims[1] if is_row else dims[0]
      kept = [d for d in range(len(weight.shape)) if d != dropped]
      if tuple(leaf.shape) == tuple(weight.shape[d] for d in kept):
        split_dims = _weight_split_dims(weight)
        return dataclasses.replace(
          weight,
          shape=tuple(leaf.shape),
          init=None,
          dtype=leaf.dtype,
          split_dims=tuple(split_dims[d] for d in kept),
          stacked=sum(d < weight.stacked for d in kept),
        )
    return _plain_rule(name, leaf, weight)

  return rule


def _is_masked(node: Any) -> bool:
  return isinstance(node, optax.MaskedNode)


def state_weight_specs(abstract_state: Any, weight_specs: Any) -> Any:
  """A tree like `abstract_state` with one WeightSpec (shape, dtype, split dims) per leaf.

  Args:
    abstract_state: an optimizer state of arrays or `jax.ShapeDtypeStruct`s; any nesting of optax's.
    weight_specs: tree of WeightSpec congruent to the weights.
  """
  weights_treedef: Any = jax.tree.structure(weight_specs)
  weights_with_paths = jax.tree_util.tree_flatten_with_path(weight_specs)[0]

  def visit_leaves(prefix: str, node: Any, weight: WeightSpec | None, rule: LeafRule) -> Any:
    return jax.tree_util.tree_map_with_path(
      lambda path, leaf: rule(prefix + jax.tree_util.keystr(path), leaf, weight), node
    )

  def visit(name: str, node: Any, rule: LeafRule) -> Any:
    if isinstance(node, optax.FactoredState):
      return optax.FactoredState(
        count=visit_leaves(f'{name}.count', node.count, None, _plain_rule),
        v_row=visit(f'{name}.v_row', node.v_row, _moment_rule(is_row=True)),
        v_col=visit(f'{name}.v_col', node.v_col, _moment_rule(is_row=False)),
        v=visit(f'{name}.v', node.v, _plain_rule),
      )
    try:
      nodes = weights_treedef.flatten_up_to(node)
    except ValueError:  # Not congruent to the weights: look for them one level down.
      treedef: Any
      children, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
      if treedef == jax.tree.structure(0):
        return visit_leaves(name, node, None, rule)
      return treedef.unflatten([visit(name + jax.tree_util.keystr(path), child, rule) for path, child in children])
    # In a weight's place there may also be nothing (optax.MaskedNode, None), or a small tree of its own.
    return weights_treedef.unflatten(
      [
        n if _is_masked(n) else visit_leaves(name + jax.tree_util.keystr(path), n, spec, rule)
        for n, (path, spec) in zip(nodes, weights_with_paths)
      ]
    )

  return visit('', abstract_state, _plain_rule)
