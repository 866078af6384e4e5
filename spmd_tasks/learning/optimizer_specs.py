"""Lays out optimizer state over the mesh: each leaf gets the split dims of its weight.

Optax states are nested tuples in which some subtrees have the structure of the weights. These subtrees are found by
structure, not by the name of the optimizer, so any optax transformation works:

* a leaf of its weight's shape takes the weight's split dims;
* a leaf with further dims in front of its weight's shape, such as L-BFGS's history, leaves these dims unsharded;
* Adafactor's `v_row` and `v_col` have a rule of their own (adafactor.py);
* scalars and placeholders of one element (per layer and expert) are replicated;
* any other leaf of a stack's or experts' weight is split over these dims alone;
* any other leaf is replicated, and a warning names it if it has more than one element.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

from absl import logging
import jax
import optax

from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.weights import replicated_spec

LeafRule = Callable[[str, Any, Any], Any]  # (name, leaf, its weight or None)


def _plain_rule(name: str, leaf: Any, weight: WeightSpec | None) -> WeightSpec:
  """The rule for all leaves but factored moments: see the module's docstring."""
  shape = tuple(leaf.shape)
  if weight is not None:
    if shape == tuple(weight.shape):
      return dataclasses.replace(weight, init=None, dtype=leaf.dtype, split_dims=weight.all_split_dims)
    if shape == (*weight.shape[: weight.num_separate_dims], 1):
      return dataclasses.replace(replicated_spec(leaf), stacked=weight.stacked, tags=weight.tags)
    if (num_separate := weight.num_separate_dims) and shape[:num_separate] == tuple(weight.shape[:num_separate]):
      split_dims = (*weight.all_split_dims[:num_separate], *[None] * (len(shape) - num_separate))
      return dataclasses.replace(replicated_spec(leaf), split_dims=split_dims, stacked=weight.stacked, tags=weight.tags)
    num_extra = len(shape) - len(weight.shape)
    if num_extra > 0 and weight.shape and shape[num_extra:] == tuple(weight.shape):
      return dataclasses.replace(replicated_spec(leaf), split_dims=(*[None] * num_extra, *weight.all_split_dims))
  if math.prod(shape) != 1:
    owner = 'belongs to no weight' if weight is None else f'has another shape than its weight, {tuple(weight.shape)}'
    logging.warning('Optimizer state %s of shape %s %s: it is replicated on every device.', name, shape, owner)
  return replicated_spec(leaf)


def state_weight_specs(abstract_state: Any, weight_specs: Any) -> Any:
  """Returns a tree with one WeightSpec (shape, dtype, split dims) per leaf of an optimizer state, abstract or not."""

  def of_moment(*, is_row: bool) -> LeafRule:
    from spmd_tasks.learning.adafactor import moment_rule

    return moment_rule(_plain_rule, is_row=is_row)

  return map_state(_plain_rule, abstract_state, weight_specs, of_moment)


def map_state(rule: LeafRule, state: Any, weights: Any, moment_rule: Callable[..., LeafRule] | None = None) -> Any:
  """Maps `rule(name, leaf, weight)` over a state; the weight is a leaf of `weights`, None for what belongs to none.

  `moment_rule(is_row=...)` is that of Adafactor's factored moments v_row and v_col; None: the same.
  """
  weights_treedef: Any = jax.tree.structure(weights)
  weights_with_paths = jax.tree_util.tree_flatten_with_path(weights)[0]

  def visit_leaves(prefix: str, node: Any, weight: Any, rule: LeafRule) -> Any:
    return jax.tree_util.tree_map_with_path(
      lambda path, leaf: rule(prefix + jax.tree_util.keystr(path), leaf, weight), node
    )

  def visit(name: str, node: Any, rule: LeafRule) -> Any:
    if isinstance(node, optax.FactoredState):
      rules = [moment_rule(is_row=is_row) if moment_rule else rule for is_row in (True, False)]
      return optax.FactoredState(
        count=visit_leaves(f'{name}.count', node.count, None, rule),
        v_row=visit(f'{name}.v_row', node.v_row, rules[0]),
        v_col=visit(f'{name}.v_col', node.v_col, rules[1]),
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
        n if isinstance(n, optax.MaskedNode) else visit_leaves(name + jax.tree_util.keystr(path), n, spec, rule)
        for n, (path, spec) in zip(nodes, weights_with_paths)
      ]
    )

  return visit('', state, rule)
