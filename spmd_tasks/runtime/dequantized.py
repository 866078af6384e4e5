"""Describes weights by name as if they were not quantized: a quantized kernel counts as float32."""

from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

from spmd_tasks.runtime.partition import PartitionedModel
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.padding import padded_shape
from spmd_tasks.sharding.quantized import dequantized_spec
from spmd_tasks.sharding.weights import is_quantized


def dequantized_specs(weight_specs: Any) -> dict[str, WeightSpec]:
  """Returns name -> WeightSpec of the dequantized weight."""
  return {name: dequantized_spec(spec) for name, spec in traverse_util.flatten_dict(weight_specs, sep='/').items()}


def dequantized_shapes(model: PartitionedModel) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns name -> padded shape and sharding of the dequantized weight."""
  flat = traverse_util.flatten_dict(model.padded_state.weights, sep='/')
  true = traverse_util.flatten_dict(model.abstract_state.weights, sep='/')

  def dequantized_shape(name: str, leaf: Any) -> Any:
    if not is_quantized(leaf):
      return leaf
    sharding = jax.tree.leaves(leaf)[0].sharding  # the quantized values are sharded like the kernel
    shape = padded_shape(true[name].shape, sharding.spec, model.mesh.shape)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

  return {name: dequantized_shape(name, leaf) for name, leaf in flat.items()}
