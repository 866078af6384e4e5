"""How a layer declares a weight."""

from typing import cast

import flax.linen as nn
import jax

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.specs import SplitDims
from spmd_tasks.sharding.weights import Initializer, WeightSpec


def declare_weight(
  module: nn.Module,
  name: str,
  *,
  shape: tuple[int, ...],
  init: Initializer,
  split_dims: SplitDims,
  tags: tuple[str, ...] = (),
) -> jax.Array:
  """Declares `module`'s weight `name`, float32 of `shape`, and returns it.

  Args:
    module: the Linen module; it must be bound, as within `setup` and `@nn.compact` methods.
    name: under the module's name in the weights' tree.
    shape: one entry per dim.
    init: draws it: init(rng, shape, dtype).
    split_dims: one entry per dim, or None for wholly unsharded.
    tags: see WeightSpec.

  Raises:
    UserError: split_dims does not have one entry per dim.
  """
  split_dims = None if split_dims is None else tuple(split_dims)
  if split_dims is not None and len(split_dims) != len(shape):
    path = '/'.join((*module.path, name))
    raise UserError(f'weight {path} of shape {shape} has split dims {split_dims}: give one entry per dim.')
  spec = WeightSpec(shape=shape, init=init, split_dims=split_dims, tags=tags)
  # Linen unboxes what the initializer returns, which its types do not say.
  return cast(jax.Array, module.param(name, spec))
