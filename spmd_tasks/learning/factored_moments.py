"""Lays out Adafactor's factored moments: `v_row` and `v_col` take the split dims that were not averaged away."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import numpy as np

from spmd_tasks.learning.layer_weights import layer_matrix
from spmd_tasks.sharding import WeightSpec

LeafRule = Callable[[str, Any, Any], Any]  # see optimizer_specs.py


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


def _joined(weight: WeightSpec) -> WeightSpec:
  """Returns the spec of [S..., I, O]: a dim that joins several is split as the first of them."""
  num_separate, matrix, split_dims = weight.num_separate_dims, layer_matrix(weight), weight.all_split_dims
  firsts = (num_separate, num_separate + (weight.num_input_dims or 0))[: len(matrix)]
  if len(weight.shape) > num_separate + len(matrix):
    split_dims = (*split_dims[:num_separate], *[split_dims[d] for d in firsts])
  return dataclasses.replace(weight, shape=(*weight.shape[:num_separate], *matrix), split_dims=split_dims)


def moment_rule(otherwise: LeafRule, *, is_row: bool) -> LeafRule:
  """Returns the rule for v_row or v_col of `optax.FactoredState`; `otherwise` is that of leaves of another shape."""

  def rule(name: str, leaf: Any, weight: WeightSpec | None) -> WeightSpec:
    if weight is None:
      return otherwise(name, leaf, weight)
    for shown in (weight, _joined(weight)):  # our Adafactor factors [D, H, K], optax's sees D x HK
      dims = factored_dims(shown.shape, shown.num_separate_dims)
      if dims is None:
        continue
      dropped = dims[1] if is_row else dims[0]
      kept = [d for d in range(len(shown.shape)) if d != dropped]
      if tuple(leaf.shape) == tuple(shown.shape[d] for d in kept):
        split_dims = shown.all_split_dims
        return dataclasses.replace(
          weight,
          shape=tuple(leaf.shape),
          init=None,
          dtype=leaf.dtype,
          split_dims=tuple(split_dims[d] for d in kept),
          stacked=sum(d < weight.stacked for d in kept),
        )
    return otherwise(name, leaf, weight)

  return rule
