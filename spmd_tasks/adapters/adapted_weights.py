"""Finds the weights of a model that can have low-rank adapters, and the adapters that they have; adds and removes some.

adaptable_weights(model)     # {'stack/layers/attention/query/kernel': (attention layer, 'query'), ...}
add_adapters(model, ('attention/',), LowRankAdapter(rank=8, alpha=16.0))     # to the config of a model
adapters_of(model)           # {'stack/layers/attention/query/kernel': LowRankAdapter(rank=8, alpha=16.0)}
without_adapters(model)      # the base that they belong to
"""

from collections.abc import Sequence
import dataclasses
from typing import TYPE_CHECKING, Any, cast

import flax.linen as nn

from spmd_tasks.layers import WeightAdapter
from spmd_tasks.layers.adapter import map_adapters
from spmd_tasks.layers.linear import adapter_of
from spmd_tasks.sharding.weight_names import matching_names

if TYPE_CHECKING:
  import fiddle as fdl  # which those who read weights do without

# A field that holds templates of sublayers -> the names of their weights' directories, where they have others.
_CHILDREN = {'block': 'layers', 'blocks': 'block_{}', 'stacks': 'stack_{}'}


class AdapterNames:
  """The names of an adapter's weights: of the kernel, of A, of B, and of DoRA's magnitude."""

  def __init__(self, *, kernel: str):
    parent, slash, name = kernel.rpartition('/')
    prefix = f'{parent}{slash}lora' if name == 'kernel' else f'{parent}{slash}{name}_lora'
    self.kernel, self.a, self.b, self.magnitude = kernel, f'{prefix}_a', f'{prefix}_b', f'{prefix}_magnitude'


def adaptable_weights(model: Any) -> dict[str, tuple[Any, str]]:
  """Finds the weights of a model that can have adapters: weight name -> (layer, name of its projection).

  Args:
    model: an unbound module, or a config of one; the layers found are modules or configs likewise. A layer says by a
      static method `adaptable` which of its projections they are (layers/adapter.py).
  """
  import fiddle as fdl

  found: dict[str, tuple[Any, str]] = {}

  def visit(node: Any, path: tuple[str, ...]) -> None:
    cls = fdl.get_callable(node) if isinstance(node, fdl.Buildable) else type(node)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
      return
    if adaptable := getattr(cls, 'adaptable', None):
      found.update({'/'.join((*path, weight)): (node, name) for name, weight in adaptable(node).items()})
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
  return found


def adapters_of(model: Any) -> dict[str, Any]:
  """Returns the adapters of a model, or their configs, by the names of the weights that they belong to."""
  found = {name: adapter_of(layer.adapters, own) for name, (layer, own) in adaptable_weights(model).items()}
  return {name: adapter for name, adapter in found.items() if adapter is not None}


def without_adapters(model: nn.Module) -> nn.Module:
  """Returns an unbound module like `model` in which no layer has an adapter: the base that its adapters belong to."""
  return map_adapters(model, lambda adapter: None)


def add_adapters(
  model: 'fdl.Config', patterns: Sequence[str], adapter: WeightAdapter, *, setting: str = 'patterns'
) -> list[str]:
  """Gives an adapter to each weight whose name a pattern is found in; returns the names.

  Args:
    model: the config of a LanguageModel, which is changed. A weight that has an adapter gets this one instead.
    patterns: regular expressions that are searched in names such as 'stack/layers/attention/query/kernel'.
    adapter: its settings; `names` is not read.
    setting: where the patterns are from, for errors.

  Raises:
    UserError: a pattern is in no name; the message names near ones.
  """
  import fiddle as fdl

  places = adaptable_weights(model)
  names = matching_names(patterns, places, setting=setting)
  chosen: dict[int, tuple[Any, list[str]]] = {}
  for name in names:
    layer, projection = places[name]
    chosen.setdefault(id(layer), (layer, []))[1].append(projection)
  for layer, projections in chosen.values():
    kept = []
    for other in layer.adapters:
      others = tuple(name for name in other.names if name not in projections)
      if others:
        other.names = others
        kept.append(other)
    settings = {field.name: getattr(adapter, field.name) for field in dataclasses.fields(cast(Any, adapter))}
    layer.adapters = (*kept, fdl.Config(type(adapter), **settings | {'names': tuple(projections)}))
  return names
