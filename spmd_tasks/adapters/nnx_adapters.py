"""Adds low-rank adapters to the nnx.Linear layers of an NNX module, by path.

    class Tuned(Classifier):
      def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        add_nnx_adapters(self, ('hidden/',), LowRankAdapter(rank=8, alpha=16.0), rngs=rngs)

Train with `Task(model=Tuned, trained=('lora_',), ...)`. Weights have the names and initial values of low_rank.py:
`hidden/lora_a` [I, R] and `hidden/lora_b` [R, O] beside `hidden/kernel` [I, O]. All others keep theirs, so
`init_from` takes them from a job of `Classifier`.
"""

from collections.abc import Sequence
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from spmd_tasks.adapters.low_rank import LowRankAdapter
from spmd_tasks.errors import UserError
from spmd_tasks.sharding.weight_names import matching_names


def add_nnx_adapters(
  module: nnx.Module, patterns: Sequence[str], adapter: LowRankAdapter, *, rngs: nnx.Rngs
) -> list[str]:
  """Adds an adapter to each nnx.Linear whose kernel's name matches a pattern; returns these names.

  Args:
    module: the module, which is changed; a layer with several names has one adapter.
    patterns: regular expressions that are searched in names such as 'layers/0/kernel'.
    adapter: the adapter; its `names` are ignored.
    rngs: initializes A, and draws the masks of dropout.

  Raises:
    UserError: a pattern matches no kernel of an nnx.Linear, or the adapter is a DoRA.
  """
  if adapter.use_dora:
    raise UserError('use_dora of an adapter needs a Linear of spmd_tasks.layers: leave it out for NNX layers.')
  layers = {
    '/'.join((*map(str, path), 'kernel')): layer
    for path, layer in nnx.iter_modules(module)
    if type(layer) is nnx.Linear
  }
  names = matching_names(patterns, layers, setting='patterns')
  for name in names:
    layer: Any = layers[name]
    layer.__class__ = LowRankLinear  # the same object, which other modules may share
    layer.adapter = adapter
    layer.dropout = nnx.Dropout(adapter.dropout_rate, rngs=rngs) if adapter.dropout_rate else None
    bound = 1 / math.sqrt(layer.in_features)
    a = jax.random.uniform(rngs.params(), (layer.in_features, adapter.rank), layer.param_dtype, -bound, bound)
    split_dims = layer.kernel.get_metadata().get('out_sharding')
    of_a: dict[str, Any] = {} if split_dims is None else {'out_sharding': (split_dims[0], None)}
    of_b: dict[str, Any] = {} if split_dims is None else {'out_sharding': (None, split_dims[1])}
    layer.lora_a = nnx.Param(a, **of_a)
    layer.lora_b = nnx.Param(jnp.zeros((adapter.rank, layer.out_features), layer.param_dtype), **of_b)
  return names


class LowRankLinear(nnx.Linear):
  """An nnx.Linear with an adapter: x . W + bias + scale * (x . A) . B."""

  adapter: LowRankAdapter
  dropout: nnx.Dropout | None
  lora_a: nnx.Param[jax.Array]
  lora_b: nnx.Param[jax.Array]

  def __call__(self, inputs: jax.Array, *arguments: Any, **named: Any) -> jax.Array:
    y = super().__call__(inputs, *arguments, **named)
    x = inputs if self.dropout is None else self.dropout(inputs)
    x, a, b = self.promote_dtype((x, self.lora_a[...], self.lora_b[...]), dtype=self.dtype)
    return y + (((x @ a) * self.adapter.scale) @ b).astype(y.dtype)
