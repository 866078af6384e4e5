"""Merges low-rank adapters into their kernels on the mesh, one kernel at a time.

weights = merge_adapters(model, state.weights)      # the weights of the base model, padded, float32
"""

import functools
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp

from spmd_tasks.adapters.adapted_weights import AdapterNames, adapters_of
from spmd_tasks.adapters.low_rank import column_norms, merge_low_rank
from spmd_tasks.layers.adapter import ADAPTER_TAG
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.dequantized import dequantized_shapes, dequantized_specs
from spmd_tasks.sharding.padding import pad, unpad
from spmd_tasks.sharding.weights import is_quantized


def merge_adapters(model: PartitionedModel, padded_weights: Any) -> Any:
  """Returns the weights of the base model, in float32, with the adapters merged into their kernels.

  Args:
    model: the model with adapters.
    padded_weights: its weights on the mesh, whose padding stays zero.
  """
  flat = traverse_util.flatten_dict(padded_weights, sep='/')
  weights = {name: _dequantize(model, name, leaf) for name, leaf in flat.items()}
  specs = dequantized_specs(model.weight_specs)
  for name, adapter in adapters_of(model.task.model).items():
    names, kernel = AdapterNames(kernel=name), weights[name]
    merge = functools.partial(merge_low_rank, adapter, num_stacked_dims=specs[name].num_separate_dims)
    parts = (kernel, weights[names.a], weights[names.b], weights.get(names.magnitude))
    weights[name] = jax.jit(merge, out_shardings=kernel.sharding)(*parts)
  base = {name: weight for name, weight in weights.items() if ADAPTER_TAG not in specs[name].tags}
  return traverse_util.unflatten_dict(base, sep='/')


def _dequantize(model: PartitionedModel, name: str, weight: Any) -> Any:
  """Returns a padded weight dequantized, with the padding of an unquantized weight."""
  if not is_quantized(weight):
    return weight
  unpadded = traverse_util.flatten_dict(model.abstract_state.weights, sep='/')[name]
  padded = dequantized_shapes(model)[name]
  return jax.jit(lambda x: pad(unpad(x, unpadded).unbox(), padded), out_shardings=padded.sharding)(weight)


def with_magnitudes(model: PartitionedModel, weights: Any, *, only_missing: bool = False) -> Any:
  """Sets DoRA's magnitudes to the norms of their kernels' columns, as for new weights, after kernels were read.

  Args:
    model: the model with adapters.
    weights: its weights, padded or unpadded.
    only_missing: whether to set only magnitudes of 0, which layers have if a folder has no adapter for them.
  """
  flat = traverse_util.flatten_dict(weights, sep='/')
  specs = dequantized_specs(model.weight_specs)
  for name, adapter in adapters_of(model.task.model).items():
    if adapter.use_dora:
      magnitude, stacked = AdapterNames(kernel=name).magnitude, specs[name].num_separate_dims
      kernel = flat[name].unbox() if is_quantized(flat[name]) else flat[name]
      norms = column_norms(kernel, kernel.ndim - flat[magnitude].ndim, stacked).astype(jnp.float32)
      flat[magnitude] = jnp.where(flat[magnitude] == 0, norms, flat[magnitude]) if only_missing else norms
  return traverse_util.unflatten_dict(flat, sep='/')
