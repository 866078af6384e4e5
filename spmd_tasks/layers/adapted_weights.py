"""Finds the weights of a model that can have low-rank adapters, and the adapters that they have.

    adaptable_weights(model)     # {'stack/layers/attention/query/kernel': (attention layer, 'query'), ...}
    adapters_of(model)           # {'stack/layers/attention/query/kernel': LowRankAdapter(rank=8, alpha=16.0)}
    without_adapters(model)      # the base that they belong to

A layer that can have adapters has a field `adapters` and a static method `adaptable`, which says for its projections
what their weights are called.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn

from spmd_tasks.layers.adapters import LowRankAdapter, adapter_of

# A field that holds templates of sublayers -> the names of their weights' directories, where they have others.
_CHILDREN = {'block': 'layers', 'blocks': 'block_{}', 'stacks': 'stack_{}'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterNames:
  """The names of an adapter's weights: of the kernel, of A, of B, and of DoRA's magnitude."""

  kernel: str

  @property
  def prefix(self) -> str:
    parent, _, name = self.kernel.rpartition('/')
    return (f'{parent}/' if parent else '') + ('' if name == 'kernel' else f'{name}_')

  @property
  def a(self) -> str:
    return f'{self.prefix}lora_a'

  @property
  def b(self) -> str:
    return f'{self.prefix}lora_b'

  @property
  def magnitude(self) -> str:
    return f'{self.prefix}lora_magnitude'

  @property
  def scale(self) -> str:
    return f'{self.prefix}lora_scale'


@runtime_checkable
class Adaptable(Protocol):
  """A layer with a field `adapters`, whose projections can have adapters."""

  @staticmethod
  def adaptable(layer: Any) -> Mapping[str, str]:
    """Returns projection -> the name of its weight, of a layer or of a config of one."""
    ...


@runtime_checkable
class JoinsKernels(Protocol):
  """A layer that adds adapters to kernels (`LowRankWeights.product`), where others add them to a kernel's outputs."""

  @staticmethod
  def joined(layer: Any) -> Collection[str]:
    """Returns the projections of which it does; all rows of a batch then have the same adapter."""
    ...


def is_joined(layer: Any, projection: str, class_of: Callable[[Any], Any] = type) -> bool:
  """Returns whether an adapter of a projection is added to its kernel. Arguments as in `adaptable_weights`."""
  cls = class_of(layer)
  return issubclass(cls, JoinsKernels) and projection in cls.joined(layer)


def adaptable_weights(model: Any, class_of: Callable[[Any], Any] = type) -> dict[str, tuple[Any, str]]:
  """Finds the weights of a model that can have adapters: weight name -> (layer, name of its projection).

  Args:
    model: an unbound module; or a config of one.
    class_of: returns the class of a layer, given its module or config; fields of a config are read by name.
  """
  found: dict[str, tuple[Any, str]] = {}

  def visit(node: Any, path: tuple[str, ...]) -> None:
    cls = class_of(node)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
      return
    if issubclass(cls, Adaptable):
      found.update({'/'.join((*path, weight)): (node, name) for name, weight in cls.adaptable(node).items()})
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


def adapters_of(model: Any) -> dict[str, LowRankAdapter]:
  """Returns the adapters of a model, an unbound module, by the names of the weights that they belong to."""
  found = {name: adapter_of(layer.adapters, own) for name, (layer, own) in adaptable_weights(model).items()}
  return {name: adapter for name, adapter in found.items() if adapter is not None}


def adapter_choices(model: Any) -> tuple[str, ...]:
  """Returns the names of the adapters that rows of a batch can choose from, in the order of their numbers from 1 on."""
  return next((adapter.choices for adapter in adapters_of(model).values()), ())


def without_adapters(model: nn.Module) -> nn.Module:
  """Returns an unbound module like `model` in which no layer has an adapter: the base that its adapters belong to."""

  def stripped(value: Any) -> Any:
    if isinstance(value, LowRankAdapter):
      return None
    if type(value) in (tuple, list):
      items = [stripped(item) for item in value if not isinstance(item, LowRankAdapter)]
      is_same = len(items) == len(value) and all(new is old for new, old in zip(items, value))
      return value if is_same else type(value)(items)
    if not isinstance(value, nn.Module):
      return value
    fields = [field.name for field in dataclasses.fields(value) if field.init and field.name not in ('parent', 'name')]
    new = {name: stripped(getattr(value, name)) for name in fields}
    new = {name: each for name, each in new.items() if each is not getattr(value, name)}
    return value.clone(**new) if new else value

  return stripped(model)


def kernels(*names: str) -> Mapping[str, str]:
  """Returns what `adaptable` of a layer of Linears says: projection -> the name of its weight."""
  return {name: f'{name}/kernel' for name in names}
