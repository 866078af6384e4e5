"""Describes weights by name, as the numbers that they stand for: a quantized kernel as if it were held in float32."""

from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

from spmd_tasks.runtime.partition import PartitionedModel
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.padding import padded_shape
from spmd_tasks.sharding.quantized import numbers_spec
from spmd_tasks.sharding.weights import is_quantized


def flat_specs(weight_specs: Any) -> dict[str, WeightSpec]:
  """Returns name -> WeightSpec; of a quantized kernel, that of the numbers that it stands for."""
  return {name: numbers_spec(spec) for name, spec in traverse_util.flatten_dict(weight_specs, sep='/').items()}


def padded_numbers(model: PartitionedModel) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns name -> how a weight lies on the mesh as numbers: as `padded_state` has it, or float32 if quantized."""
  flat = traverse_util.flatten_dict(model.padded_state.weights, sep='/')
  true = traverse_util.flatten_dict(model.abstract_state.weights, sep='/')

  def numbers(name: str, leaf: Any) -> Any:
    if not is_quantized(leaf):
      return leaf
    sharding = jax.tree.leaves(leaf)[0].sharding  # the values are split as the kernel
    shape = padded_shape(true[name].shape, sharding.spec, model.mesh.shape)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

  return {name: numbers(name, leaf) for name, leaf in flat.items()}
