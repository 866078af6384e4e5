"""Lays out optimizer state over the mesh: each leaf gets the split dims of its weight.

Optax states are nested tuples in which some subtrees have the structure of the weights. These subtrees are found by
structure, not by the name of the optimizer, so any optax transformation works:

* a leaf of its weight's shape takes the weight's split dims;
* a leaf with further dims in front of its weight's shape, such as L-BFGS's history, leaves these dims unsharded;
* Adafactor's `v_row` and `v_col` take the split dims of the dimensions that were not averaged away;
* scalars and placeholders of one element (per layer and expert) are replicated;
* any other leaf of a stack's or experts' weight is split over these dims alone;
* any other leaf is replicated, and a warning names it if it has more than one element.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

from absl import logging
import jax
import numpy as np
import optax

from spmd_tasks.learning.layer_weights import layer_matrix, num_separate_dims
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.weights import replicated_spec

LeafRule = Callable[[str, Any, Any], Any]  # (name, leaf, its weight or None)


def factored_dims(shape: Sequence[int], num_separate: int) -> tuple[int, int] | None:
  """Returns the dims that `optax.scale_by_factored_rms` averages away: (dropped in v_col, dropped in v_row).

  These are the second largest and the largest dim of one layer's weight; `np.argsort` breaks ties, as in optax. The
  `num_separate` leading dims count layers and experts and are never averaged. Returns None if the weight of one layer
  has fewer than 2 dims.
  """
  layer_shape = tuple(shape[num_separate:])
  if len(layer_shape) < 2:
    return None
  order = np.argsort(layer_shape)
  return num_separate + int(order[-2]), num_separate + int(order[-1])


def _weight_split_dims(weight: WeightSpec) -> tuple[Any, ...]:
  return weight.split_dims if weight.split_dims is not None else (None,) * len(weight.shape)


def _joined(weight: WeightSpec) -> WeightSpec:
  """Returns the spec of [S..., I, O]: a dim that joins several is split as the first of them."""
  num_separate, matrix, split_dims = num_separate_dims(weight), layer_matrix(weight), _weight_split_dims(weight)
  firsts = (num_separate, num_separate + (weight.num_input_dims or 0))[: len(matrix)]
  if len(weight.shape) > num_separate + len(matrix):
    split_dims = (*split_dims[:num_separate], *[split_dims[d] for d in firsts])
  return dataclasses.replace(weight, shape=(*weight.shape[:num_separate], *matrix), split_dims=split_dims)


def _plain_rule(name: str, leaf: Any, weight: WeightSpec | None) -> WeightSpec:
  """The rule for all leaves but factored moments: see the module's docstring."""
  shape = tuple(leaf.shape)
  if weight is not None:
    if shape == tuple(weight.shape):
      return dataclasses.replace(weight, init=None, dtype=leaf.dtype, split_dims=_weight_split_dims(weight))
    if shape == (*weight.shape[: num_separate_dims(weight)], 1):
      return dataclasses.replace(replicated_spec(leaf), stacked=weight.stacked, tags=weight.tags)
    if (num_separate := num_separate_dims(weight)) and shape[:num_separate] == tuple(weight.shape[:num_separate]):
      split_dims = (*_weight_split_dims(weight)[:num_separate], *[None] * (len(shape) - num_separate))
      return dataclasses.replace(replicated_spec(leaf), split_dims=split_dims, stacked=weight.stacked, tags=weight.tags)
    num_extra = len(shape) - len(weight.shape)
    if num_extra > 0 and weight.shape and shape[num_extra:] == tuple(weight.shape):
      return dataclasses.replace(replicated_spec(leaf), split_dims=(*[None] * num_extra, *_weight_split_dims(weight)))
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
  return replicated_spec(leaf)


def _moment_rule(is_row: bool) -> LeafRule:
  """Returns the rule for v_row or v_col of `optax.FactoredState`."""

  def rule(name: str, leaf: Any, weight: WeightSpec | None) -> WeightSpec:
    if weight is None:
      return _plain_rule(name, leaf, weight)
    for shown in (weight, _joined(weight)):  # our Adafactor factors [D, H, K], optax's sees D x HK
      dims = factored_dims(shown.shape, num_separate_dims(shown))
      if dims is None:
        continue
      dropped = dims[1] if is_row else dims[0]
      kept = [d for d in range(len(shown.shape)) if d != dropped]
      if tuple(leaf.shape) == tuple(shown.shape[d] for d in kept):
        split_dims = _weight_split_dims(shown)
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
  """Returns a tree like `abstract_state` with one WeightSpec (shape, dtype, split dims) per leaf.

  Args:
    abstract_state: an optimizer state of arrays or `jax.ShapeDtypeStruct`s; any nesting of optax's.
    weight_specs: tree of WeightSpec congruent to the weights.
  """
  return map_state(_plain_rule, abstract_state, weight_specs, (_moment_rule(is_row=True), _moment_rule(is_row=False)))


def map_state(rule: LeafRule, state: Any, weights: Any, moment_rules: tuple[LeafRule, LeafRule] | None = None) -> Any:
  """Maps `rule(name, leaf, weight)` over a state; the weight is a leaf of `weights`, None for what belongs to none.

  Args:
    rule: of all leaves but factored moments.
    state: an optimizer state, abstract or not.
    weights: the tree of weights, or one like it.
    moment_rules: of the factored moments v_row and v_col; None: the same.
  """
  weights_treedef: Any = jax.tree.structure(weights)
  weights_with_paths = jax.tree_util.tree_flatten_with_path(weights)[0]
  row_rule, column_rule = moment_rules or (rule, rule)

  def visit_leaves(prefix: str, node: Any, weight: Any, rule: LeafRule) -> Any:
    return jax.tree_util.tree_map_with_path(
      lambda path, leaf: rule(prefix + jax.tree_util.keystr(path), leaf, weight), node
    )

  def visit(name: str, node: Any, rule: LeafRule) -> Any:
    if isinstance(node, optax.FactoredState):
      return optax.FactoredState(
        count=visit_leaves(f'{name}.count', node.count, None, rule),
        v_row=visit(f'{name}.v_row', node.v_row, row_rule),
        v_col=visit(f'{name}.v_col', node.v_col, column_rule),
        v=visit(f'{name}.v', node.v, rule),
      )
    try:
      nodes = weights_treedef.flatten_up_to(node)
    except ValueError:  # Not congruent to the weights: look for them one level down.
      treedef: Any
      children, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
      if treedef == jax.tree.structure(0):
        return visit_leaves(name, node, None, rule)
      return treedef.unflatten([visit(name + jax.tree_util.keystr(path), child, rule) for path, child in children])
    # The place of a weight may also hold nothing (optax.MaskedNode, None) or a small tree.
    return weights_treedef.unflatten(
      [
        n if _is_masked(n) else visit_leaves(name + jax.tree_util.keystr(path), n, spec, rule)
        for n, (path, spec) in zip(nodes, weights_with_paths)
      ]
    )

  return visit('', state, rule)
