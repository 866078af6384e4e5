"""What one layer's weight is: a stacked weight [S..., I..., O...] is many matrices, and its WeightSpec says which.

Shapes: S separate weights (layers of a stack, then experts; several dims), I inputs, O outputs.
"""

import math
from typing import Any

import jax

from spmd_tasks.errors import UserError
from spmd_tasks.sharding import WeightSpec

_VECTOR_TAG = 'no_decay'  # of norms and biases, whatever their rank


def layer_matrix(weight: WeightSpec) -> tuple[int, ...]:
  """Returns the shape of one layer's weight as optimizers see it.

  (I, O) with joined heads for a kernel, as declared; all elements in one dim for norms and biases; else as it is.
  """
  shape = weight.shape[weight.num_separate_dims :]
  if _VECTOR_TAG in weight.tags:
    return (math.prod(shape),)
  if weight.num_input_dims:
    return math.prod(shape[: weight.num_input_dims]), math.prod(shape[weight.num_input_dims :])
  return shape


def as_layers(x: jax.Array, weight: WeightSpec) -> jax.Array:
  """Reshapes a weight, or an array like it, to its layers' matrices: [S..., I, O]."""
  return x.reshape(*x.shape[: weight.num_separate_dims], *layer_matrix(weight))


def are_matrices(weight_specs: Any, optimizer: str) -> Any:
  """Returns a tree of bools congruent to the weights: which are matrices of hidden layers.

  Raises a UserError, which names the optimizer, if a weight has several dims and does not say which are inputs.
  """

  def is_matrix(path: Any, spec: WeightSpec) -> bool:
    shape = spec.shape[spec.num_separate_dims :]
    if _VECTOR_TAG in spec.tags or len(shape) < 2:
      return False
    if spec.num_input_dims is None or spec.num_input_dims > len(shape):
      raise UserError(
        f'{optimizer} does not know which matrix weight {jax.tree_util.keystr(path, simple=True, separator="/")} of '
        f'shape {shape} a layer is (num_input_dims is {spec.num_input_dims}): pass num_input_dims to declare_weight, 1 '
        'for [inputs, outputs], or 0 for a weight that is no matrix.'
      )
    return 0 < spec.num_input_dims < len(shape)

  return jax.tree_util.tree_map_with_path(is_matrix, weight_specs)
