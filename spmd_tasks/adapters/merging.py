"""Merges low-rank adapters into the weights that they belong to, on the mesh: one weight at a time.

weights = merge_adapters(model, state.weights)      # those of the model without adapters, padded, float32
"""

import functools
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

from spmd_tasks.adapters.adapted_weights import AdapterNames, adapters_of
from spmd_tasks.adapters.low_rank import column_lengths, merge_low_rank
from spmd_tasks.layers.adapter import ADAPTER_TAG
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.dequantized import dequantized_shapes, dequantized_specs
from spmd_tasks.sharding.padding import pad, unpad
from spmd_tasks.sharding.weights import is_quantized


def merge_adapters(model: PartitionedModel, padded_weights: Any) -> Any:
  """Returns the weights without those of adapters; a kernel that had one computes the same alone, in float32.

  Args:
    model: whose weights these are.
    padded_weights: as they are stored on the mesh. The padding stays zero.
  """
  flat = traverse_util.flatten_dict(padded_weights, sep='/')
  weights = {name: _numbers(model, name, leaf) for name, leaf in flat.items()}
  specs = dequantized_specs(model.weight_specs)
  for name, adapter in adapters_of(model.task.model).items():
    names, kernel = AdapterNames(kernel=name), weights[name]
    merge = functools.partial(merge_low_rank, adapter, num_stacked_dims=specs[name].num_separate_dims)
    parts = (kernel, weights[names.a], weights[names.b], weights.get(names.magnitude))
    weights[name] = jax.jit(merge, out_shardings=kernel.sharding)(*parts)
  kept = {name: weight for name, weight in weights.items() if ADAPTER_TAG not in specs[name].tags}
  return traverse_util.unflatten_dict(kept, sep='/')


def _numbers(model: PartitionedModel, name: str, weight: Any) -> Any:
  """Returns a padded weight as padded numbers."""
  if not is_quantized(weight):
    return weight
  true = traverse_util.flatten_dict(model.abstract_state.weights, sep='/')[name]
  padded = dequantized_shapes(model)[name]
  return jax.jit(lambda held: pad(unpad(held, true).unbox(), padded), out_shardings=padded.sharding)(weight)


def with_magnitudes(model: PartitionedModel, weights: Any, *, only_missing: bool = False) -> Any:
  """Returns true or padded weights in which DoRA's magnitudes are the lengths of their kernels' columns.

  So they are drawn, for kernels that are drawn; here they follow kernels that were read.

  Args:
    model: whose adapters have the magnitudes.
    weights: to begin with.
    only_missing: magnitudes other than 0 stay; a layer for which a folder has no adapter has zeros.
  """
  flat = traverse_util.flatten_dict(weights, sep='/')
  specs = dequantized_specs(model.weight_specs)
  for name, adapter in adapters_of(model.task.model).items():
    if adapter.use_dora:
      magnitude, stacked = AdapterNames(kernel=name).magnitude, specs[name].num_separate_dims
      kernel = flat[name].unbox() if is_quantized(flat[name]) else flat[name]
      lengths = column_lengths(kernel, kernel.ndim - flat[magnitude].ndim, stacked).astype(jnp.float32)
      flat[magnitude] = jnp.where(flat[magnitude] == 0, lengths, flat[magnitude]) if only_missing else lengths
  return traverse_util.unflatten_dict(flat, sep='/')
