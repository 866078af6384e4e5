"""Shards optimizer state: each leaf gets the split dims of its weight.

Optax states are nested tuples in which some subtrees have the structure of the weights. `state_weight_specs` finds them
by structure, not by the name of the optimizer, so any optax transformation works:

* a leaf with the shape of its weight takes the weight's split dims;
* a leaf with additional leading dims, such as L-BFGS's history, is unsharded in these dims;
* Adafactor's factored moments `v_row` and `v_col` take the split dims of the dims that are not averaged away;
* scalars and placeholders of one element (per layer and expert) are replicated;
* any other leaf of a stacked or expert weight is split on the layer and expert dims only;
* any other leaf is replicated, with a warning if it has more than one element.

Shapes: S separate weights (layers of a stack, then experts; several dims), I inputs, O outputs.
"""

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

from absl import logging
import jax
import numpy as np
import optax

from spmd_tasks.learning.layer_weights import layer_matrix
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.weights import replicated_spec


def state_weight_specs(abstract_state: Any, weight_specs: Any) -> Any:
  """Returns a tree with one WeightSpec (shape, dtype, split dims) per leaf of an optimizer state, abstract or not."""
  return _map_state(_leaf_spec, abstract_state, weight_specs)


def weight_indices(abstract_state: Any, weight_specs: Any) -> Any:
  """Returns a tree with the index of each leaf's weight among all weights; -1 for a leaf that belongs to no weight."""
  weights, treedef = jax.tree.flatten(weight_specs)

  def weight_index(name: str, leaf: Any, weight: int | None, **kind: Any) -> int:
    return -1 if weight is None else weight

  return _map_state(weight_index, abstract_state, jax.tree.unflatten(treedef, range(len(weights))))


def _map_state(function: Callable[..., Any], state: Any, weights: Any) -> Any:
  """Maps function(name, leaf, weight) over an optimizer state; the weight is None for a leaf that belongs to none.

  For Adafactor's factored moments the function also gets `is_row`: whether it is `v_row` or `v_col`.
  """
  weights_treedef: Any = jax.tree.structure(weights)
  weights_with_paths = jax.tree_util.tree_flatten_with_path(weights)[0]

  def visit_leaves(prefix: str, node: Any, weight: Any, function: Callable[..., Any]) -> Any:
    return jax.tree_util.tree_map_with_path(
      lambda path, leaf: function(prefix + jax.tree_util.keystr(path), leaf, weight), node
    )

  def visit(name: str, node: Any, function: Callable[..., Any]) -> Any:
    if isinstance(node, optax.FactoredState):
      return optax.FactoredState(
        count=visit_leaves(f'{name}.count', node.count, None, function),
        v_row=visit(f'{name}.v_row', node.v_row, functools.partial(function, is_row=True)),
        v_col=visit(f'{name}.v_col', node.v_col, functools.partial(function, is_row=False)),
        v=visit(f'{name}.v', node.v, function),
      )
    try:
      nodes = weights_treedef.flatten_up_to(node)
    except ValueError:  # Not congruent to the weights: look one level down.
      treedef: Any
      children, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
      if treedef == jax.tree.structure(0):
        return visit_leaves(name, node, None, function)
      return treedef.unflatten([visit(name + jax.tree_util.keystr(path), child, function) for path, child in children])
    # In place of a weight there may also be nothing (optax.MaskedNode, None) or a small tree.
    return weights_treedef.unflatten(
      [
        n if isinstance(n, optax.MaskedNode) else visit_leaves(name + jax.tree_util.keystr(path), n, weight, function)
        for n, (path, weight) in zip(nodes, weights_with_paths)
      ]
    )

  return visit('', state, function)


def _leaf_spec(name: str, leaf: Any, weight: WeightSpec | None, *, is_row: bool | None = None) -> WeightSpec:
  """Returns the spec of a leaf; see `_map_state` for the arguments."""
  shape = tuple(leaf.shape)
  if weight is not None and is_row is not None and (factored := _factored_spec(leaf, weight, is_row)) is not None:
    return factored
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
    owner = 'belongs to no weight' if weight is None else f'does not have the shape of its weight, {weight.shape}'
    logging.warning('Optimizer state %s of shape %s %s: it is replicated on every device.', name, shape, owner)
  return replicated_spec(leaf)


def _factored_spec(leaf: Any, weight: WeightSpec, is_row: bool) -> WeightSpec | None:
  """Returns the spec of a leaf of `v_row` or `v_col` of an `optax.FactoredState`; None for a placeholder."""
  if len(weight.shape) - weight.num_separate_dims < 2:
    return None
  for spec in (weight, _matrix_spec(weight)):  # Adafactor factors [D, H, K] or [D, HK]
    dims = factored_dims(spec.shape, spec.num_separate_dims)
    if dims is None:
      continue
    dropped = dims[1] if is_row else dims[0]
    remaining = [dim for dim in range(len(spec.shape)) if dim != dropped]
    if tuple(leaf.shape) == tuple(spec.shape[dim] for dim in remaining):
      return dataclasses.replace(
        spec,
        shape=tuple(leaf.shape),
        init=None,
        dtype=leaf.dtype,
        split_dims=tuple(spec.all_split_dims[dim] for dim in remaining),
        stacked=sum(dim < spec.stacked for dim in remaining),
      )
  return None


def factored_dims(shape: Sequence[int], num_separate: int) -> tuple[int, int] | None:
  """Returns the dims that `optax.scale_by_factored_rms` averages away: (dropped in v_col, dropped in v_row).

  These are the second largest and the largest dim of one layer's weight; `np.argsort` breaks ties, as in optax. The
  `num_separate` leading dims count layers and experts. Returns None if one layer's weight has fewer than 2 dims.
  """
  layer_shape = tuple(shape[num_separate:])
  if len(layer_shape) < 2:
    return None
  order = np.argsort(layer_shape)
  return num_separate + int(order[-2]), num_separate + int(order[-1])


def _matrix_spec(weight: WeightSpec) -> WeightSpec:
  """Returns the spec of the weight as matrices [S..., I, O]; merged dims are split like the first of them."""
  num_separate, matrix, split_dims = weight.num_separate_dims, layer_matrix(weight), weight.all_split_dims
  firsts = (num_separate, num_separate + (weight.num_input_dims or 0))[: len(matrix)]
  if len(weight.shape) > num_separate + len(matrix):
    split_dims = (*split_dims[:num_separate], *[split_dims[dim] for dim in firsts])
  return dataclasses.replace(weight, shape=(*weight.shape[:num_separate], *matrix), split_dims=split_dims)
