"""RolloutTask replays the sampler's routing; LanguageModelWithValues has the value head of PPO.

The experts that the sampler chose for a token are flat, int32 [..., n]: the choices of all layers in order.

Shapes: B batch, T sequence, D model, n choices of experts of a token in all layers.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

from flax import traverse_util
import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.layers import LanguageModel, declare_weight
from spmd_tasks.layers.adapter import ADAPTER_TAG
from spmd_tasks.layers.base import REPLAYED
from spmd_tasks.runtime import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutTask(Task):
  """A Task whose routers can replay the experts that were chosen in sampling.

  Fields, in addition to Task's:
    records_routing: whether routers replay the `expert_ids` of batches that have them.
  """

  records_routing: bool = False

  def constants(self, variables: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    if not self.records_routing or 'expert_ids' not in batch:
      return {}
    routers = {path: leaf for path, leaf in traverse_util.flatten_dict(variables['params']).items() if 'router' in path}
    stacked = {path[:-1]: leaf.shape[:-2] for path, leaf in sorted(routers.items()) if path[-1] == 'kernel'}
    ids, start, replayed = batch['expert_ids'], 0, {}
    num_selected = ids.shape[-1] // sum(map(math.prod, stacked.values()))
    for path, layers in stacked.items():
      end = start + math.prod(layers) * num_selected
      of_router = ids[..., start:end].reshape(*ids.shape[:-1], *layers, num_selected)
      replayed[(*path, 'expert_ids')] = jnp.moveaxis(of_router, (0, 1), (-3, -2))
      start = end
    return {REPLAYED: traverse_util.unflatten_dict(replayed)}


def num_choices(part: Any) -> int:
  """Returns n of a model, or of a module in it."""
  if isinstance(part, tuple):
    return sum(map(num_choices, part))
  if not isinstance(part, nn.Module):
    return 0
  fields = [getattr(part, field.name) for field in dataclasses.fields(part) if field.name not in ('parent', 'name')]
  own = getattr(part, 'num_selected', 0)
  return (own + sum(map(num_choices, fields))) * getattr(part, 'num_layers', 1)


class _ValueHead(nn.Module):
  """The weight `kernel` [D], initially zeros. Like an adapter, it is neither read from model folders nor exported."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    zeros, tags = jax.nn.initializers.zeros, (ADAPTER_TAG,)
    kernel = declare_weight(self, 'kernel', shape=x.shape[-1:], init=zeros, split_dims=('embed',), tags=tags)
    return jnp.einsum('BTD,D->BT', x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


class LanguageModelWithValues(LanguageModel, kw_only=True):
  """A LanguageModel whose predictions also have `values`, float32 [B, T]: the expected reward after each token.

  It adds the weight `value_head/kernel` to the LanguageModel's weights.
  """

  @nn.nowrap
  def _other_predictions(self, x: jax.Array) -> dict[str, jax.Array]:
    return {'values': _ValueHead(name='value_head')(x)}
