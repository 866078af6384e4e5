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

_LeafSpec = Callable[[str, Any, WeightSpec | None], WeightSpec]  # (name, leaf, its weight or None)


def state_weight_specs(abstract_state: Any, weight_specs: Any) -> Any:
  """Returns a tree with one WeightSpec (shape, dtype, split dims) per leaf of an optimizer state, abstract or not."""
  weights_treedef: Any = jax.tree.structure(weight_specs)
  weights_with_paths = jax.tree_util.tree_flatten_with_path(weight_specs)[0]

  def visit_leaves(prefix: str, node: Any, weight: Any, leaf_spec: _LeafSpec) -> Any:
    return jax.tree_util.tree_map_with_path(
      lambda path, leaf: leaf_spec(prefix + jax.tree_util.keystr(path), leaf, weight), node
    )

  def visit(name: str, node: Any, leaf_spec: _LeafSpec) -> Any:
    if isinstance(node, optax.FactoredState):
      return optax.FactoredState(
        count=visit_leaves(f'{name}.count', node.count, None, _leaf_spec),
        v_row=visit(f'{name}.v_row', node.v_row, functools.partial(_factored_spec, is_row=True)),
        v_col=visit(f'{name}.v_col', node.v_col, functools.partial(_factored_spec, is_row=False)),
        v=visit(f'{name}.v', node.v, _leaf_spec),
      )
    try:
      nodes = weights_treedef.flatten_up_to(node)
    except ValueError:  # Not congruent to the weights: look one level down.
      treedef: Any
      children, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
      if treedef == jax.tree.structure(0):
        return visit_leaves(name, node, None, leaf_spec)
      return treedef.unflatten([visit(name + jax.tree_util.keystr(path), child, leaf_spec) for path, child in children])
    # In place of a weight there may also be nothing (optax.MaskedNode, None) or a small tree.
    return weights_treedef.unflatten(
      [
        n if isinstance(n, optax.MaskedNode) else visit_leaves(name + jax.tree_util.keystr(path), n, spec, leaf_spec)
        for n, (path, spec) in zip(nodes, weights_with_paths)
      ]
    )

  return visit('', abstract_state, _leaf_spec)


def _leaf_spec(name: str, leaf: Any, weight: WeightSpec | None) -> WeightSpec:
  """Returns the spec of a leaf that is not a factored moment."""
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
    owner = 'belongs to no weight' if weight is None else f'does not have the shape of its weight, {weight.shape}'
    logging.warning('Optimizer state %s of shape %s %s: it is replicated on every device.', name, shape, owner)
  return replicated_spec(leaf)


def _factored_spec(name: str, leaf: Any, weight: WeightSpec | None, *, is_row: bool) -> WeightSpec:
  """Returns the spec of a leaf of `v_row` or `v_col` of an `optax.FactoredState`."""
  for spec in () if weight is None else (weight, _matrix_spec(weight)):  # Adafactor factors [D, H, K] or [D, HK]
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
  return _leaf_spec(name, leaf, weight)


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
