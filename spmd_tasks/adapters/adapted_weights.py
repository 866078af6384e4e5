"""Finds, adds and removes the adapters of a model's weights.

adaptable_weights(model)     # {'stack/layers/attention/query/kernel': (attention layer, 'query'), ...}
add_adapters(model, ('attention/',), LowRankAdapter(rank=8, alpha=16.0))     # to the config of a model
adapters_of(model)           # {'stack/layers/attention/query/kernel': LowRankAdapter(rank=8, alpha=16.0)}
without_adapters(model)      # the base model
"""

from collections.abc import Sequence
import dataclasses
from typing import TYPE_CHECKING, Any, cast

import flax.linen as nn

from spmd_tasks.errors import UserError
from spmd_tasks.layers import WeightAdapter
from spmd_tasks.layers.adapter import map_adapters
from spmd_tasks.layers.linear import adapter_of
from spmd_tasks.sharding.weight_names import matching_names

if TYPE_CHECKING:
  import fiddle as fdl  # imported only by functions, because reading weights does not need it

# Fields with sublayers -> the names of their weights, if different from the field's name.
_CHILDREN = {'block': 'layers', 'blocks': 'block_{}', 'stacks': 'stack_{}'}


class AdapterNames:
  """The names of a kernel, of its adapter's weights A and B, and of DoRA's magnitude."""

  def __init__(self, *, kernel: str):
    parent, slash, name = kernel.rpartition('/')
    prefix = f'{parent}{slash}lora' if name == 'kernel' else f'{parent}{slash}{name}_lora'
    self.kernel, self.a, self.b, self.magnitude = kernel, f'{prefix}_a', f'{prefix}_b', f'{prefix}_magnitude'


def adaptable_weights(model: Any) -> dict[str, tuple[Any, str]]:
  """Returns the weights of a model that can have adapters: name of the weight -> (layer, name of the projection).

  A layer lists its adaptable projections in a static method `adaptable` (layers/adapter.py).

  Args:
    model: an unbound module, or a config of one; the layers are then modules, or configs.
  """
  import fiddle as fdl

  weights: dict[str, tuple[Any, str]] = {}

  def visit(node: Any, path: tuple[str, ...]) -> None:
    cls = fdl.get_callable(node) if isinstance(node, fdl.Buildable) else type(node)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
      return
    if adaptable := getattr(cls, 'adaptable', None):
      weights.update({'/'.join((*path, weight)): (node, name) for name, weight in adaptable(node).items()})
    for field in dataclasses.fields(cls):
      if field.name in ('parent', 'name') or not field.init:
        continue
      value = getattr(node, field.name, None)
      name = _CHILDREN.get(field.name, field.name)
      if isinstance(value, tuple | list):
        for i, item in enumerate(value):
          visit(item, (*path, name.format(i)))
      else:
        visit(value, (*path, name))

  visit(model, ())
  return weights


def adapters_of(model: Any) -> dict[str, Any]:
  """Returns the adapters of a model, or their configs, by the names of their kernels."""
  weights = adaptable_weights(model).items()
  adapters = {name: adapter_of(layer.adapters, projection) for name, (layer, projection) in weights}
  return {name: adapter for name, adapter in adapters.items() if adapter is not None}


def without_adapters(model: nn.Module) -> nn.Module:
  """Returns the base model: an unbound module like `model`, but without adapters."""
  return map_adapters(model, lambda adapter: None)


def add_adapters(
  model: 'fdl.Config', patterns: Sequence[str], adapter: WeightAdapter, *, setting: str = 'patterns'
) -> list[str]:
  """Adds an adapter to each weight whose name matches a pattern; returns the names of the weights.

  Args:
    model: the config of a LanguageModel, which is changed; the adapter replaces an adapter that a weight already has.
    patterns: regular expressions that are searched in names such as 'stack/layers/attention/query/kernel'.
    adapter: the adapter; its `names` are ignored.
    setting: the name of the setting that has the patterns, for errors.

  Raises a UserError, with similar names, if a pattern matches no name; or if no layer of the model can have an adapter.
  """
  import fiddle as fdl

  weights = adaptable_weights(model)
  if not weights:
    name = getattr(fdl.get_callable(model), '__name__', model)
    raise UserError(
      f'{setting} = {tuple(patterns)}: no layer of {name} can have an adapter: build it of Linear, attention and '
      'feed-forward layers of spmd_tasks.layers. An NNX module adds adapters in its constructor, by add_nnx_adapters.'
    )
  names = matching_names(patterns, weights, setting=setting)
  projections_of_layer: dict[int, tuple[Any, list[str]]] = {}
  for name in names:
    layer, projection = weights[name]
    projections_of_layer.setdefault(id(layer), (layer, []))[1].append(projection)
  for layer, projections in projections_of_layer.values():
    others = []
    for other in layer.adapters:
      if remaining := tuple(name for name in other.names if name not in projections):
        other.names = remaining
        others.append(other)
    settings = {field.name: getattr(adapter, field.name) for field in dataclasses.fields(cast(Any, adapter))}
    layer.adapters = (*others, fdl.Config(type(adapter), **settings | {'names': tuple(projections)}))
  return names
