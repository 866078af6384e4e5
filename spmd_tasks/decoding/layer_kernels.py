"""Kernels of a loop over layers as one array per layer, which a CPU multiplies with where they are.

    with find_kernels(found):                    # the model's forward is traced within
      ...
    variables = with_layer_kernels(variables, found)

A loop over layers slices each layer's part out of a stack. To a CPU that is a copy, which takes as long as a product
with a few tokens. So the kernels of `Linear` move from `params` to a collection of their own, which the loop leaves
whole, and `Linear` has a branch for each layer. The bits are the same. The arrays are views of the stacks where a
layer begins at an address that JAX takes as it is, and copies elsewhere. While views live, the stacks keep their memory
and cannot be donated.
"""

from collections.abc import Iterator, Set
import contextlib
import math
from typing import Any

from flax import traverse_util
import flax.linen as nn
import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from spmd_tasks.layers import Linear
from spmd_tasks.layers.base import LAYER_KERNELS, current_layer_scope
from spmd_tasks.runtime.task import Variables
from spmd_tasks.sharding.weights import is_quantized

_LEAST = 1 << 16  # numbers of a layer's kernel: copies of smaller ones stay in the CPU's cache


@contextlib.contextmanager
def find_kernels(found: set[tuple[str, ...]]) -> Iterator[None]:
  """Context in which a model is traced: adds the paths below `params` of kernels that can be one array per layer."""

  def note(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
    module = context.module
    if type(module) is Linear and module.adapter is None and len(current_layer_scope().layers) == 1:
      kernel = module.variables.get('params', {}).get('kernel')
      if kernel is not None and not is_quantized(kernel) and math.prod(kernel.shape) >= _LEAST:
        found.add((*module.path, 'kernel'))
    return call(*args, **kwargs)

  with nn.intercept_methods(note):
    yield


def with_layer_kernels(variables: Variables, found: Set[tuple[str, ...]]) -> Variables:
  """Moves kernels, arrays or abstract values on one device of the host, out of their stacks; once, if called again."""
  if not found or LAYER_KERNELS in variables:
    return variables
  params = traverse_util.flatten_dict(variables['params'], is_leaf=lambda _, leaf: is_quantized(leaf))
  kernels = {path: _split(params.pop(path)) for path in sorted(found)}
  moved = {'params': params, LAYER_KERNELS: kernels}
  return variables | {name: traverse_util.unflatten_dict(each) for name, each in moved.items()}


def _split(stack: Any) -> tuple[Any, ...]:
  """Returns the arrays of a stack [L, ...]."""
  sharding = NamedSharding(stack.sharding.mesh, PartitionSpec())
  if not isinstance(stack, jax.Array):
    return (jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype, sharding=sharding),) * stack.shape[0]
  # Of the device's part, since an array keeps its numpy view as long as it lives.
  return tuple(jax.device_put(each, sharding) for each in np.asarray(stack.addressable_data(0)))
