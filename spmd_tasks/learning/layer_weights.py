"""Views a stacked weight [S..., I..., O...] as the matrices of single layers, as its WeightSpec declares them.

Shapes: S separate weights (layers of a stack, then experts; several dims), I inputs, O outputs.
"""

import math
from typing import Any

import jax

from spmd_tasks.errors import UserError
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.weights import leaf_name

_VECTOR_TAG = 'no_decay'  # norms and biases, whatever their rank


def layer_matrix(weight: WeightSpec) -> tuple[int, ...]:
  """Returns the shape of one layer's weight as optimizers see it.

  A kernel is (I, O) with merged heads, norms and biases have one dim, and other weights keep their shape.
  """
  shape = weight.shape[weight.num_separate_dims :]
  if _VECTOR_TAG in weight.tags:
    return (math.prod(shape),)
  if weight.num_input_dims:
    return math.prod(shape[: weight.num_input_dims]), math.prod(shape[weight.num_input_dims :])
  return shape


def layer_inputs(weight: WeightSpec) -> int:
  """Returns the number of inputs (fan-in) of one layer's kernel, without padding; 0 for other weights.

  A weight [D] that declares one input dim is a kernel with one output.
  """
  if not weight.num_input_dims or _VECTOR_TAG in weight.tags:
    return 0
  return math.prod(weight.shape[weight.num_separate_dims :][: weight.num_input_dims])


def as_matrices(x: jax.Array, weight: WeightSpec) -> jax.Array:
  """Reshapes a weight, or an array of its shape, to matrices [S..., I, O]."""
  return x.reshape(*x.shape[: weight.num_separate_dims], *layer_matrix(weight))


def are_matrices(weight_specs: Any, optimizer: str) -> Any:
  """Returns a tree of bools congruent to the weights: whether each weight is a matrix of a hidden layer.

  Raises a UserError, which names the optimizer, if a weight has several dims and does not declare its input dims.
  """

  def is_matrix(path: Any, spec: WeightSpec) -> bool:
    shape = spec.shape[spec.num_separate_dims :]
    if _VECTOR_TAG in spec.tags or len(shape) < 2:
      return False
    if spec.num_input_dims is None or spec.num_input_dims > len(shape):
      raise UserError(
        f'{optimizer} needs to know the input dims of weight {leaf_name(path)} of shape {shape} (num_input_dims is '
        f'{spec.num_input_dims}): pass num_input_dims to declare_weight, such as 1 for [inputs, outputs], or 0 for a '
        "weight that is not a matrix; in place of Flax's Dense, use Linear of spmd_tasks.layers, which does so."
      )
    return 0 < spec.num_input_dims < len(shape)

  return jax.tree_util.tree_map_with_path(is_matrix, weight_specs)
