"""Changes, and finds, the adapters of a whole model.

map_adapters(model, lambda adapter: None)           # the model without its adapters
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import flax.linen as nn

from spmd_tasks.layers.adapter import WeightAdapter


def map_adapters(model: nn.Module, change: Callable[[WeightAdapter], WeightAdapter | None]) -> nn.Module:
  """Returns an unbound module like `model` with every adapter changed, or left out where `change` returns None."""

  def mapped(value: Any) -> Any:
    if isinstance(value, WeightAdapter):
      return change(value)
    if type(value) in (tuple, list):
      items = [mapped(item) for item in value]
      if all(new is old for new, old in zip(items, value)):
        return value
      return type(value)(new for new, old in zip(items, value) if new is not None or old is None)
    if not isinstance(value, nn.Module):
      return value
    fields = [field.name for field in dataclasses.fields(value) if field.init and field.name not in ('parent', 'name')]
    new = {name: mapped(getattr(value, name)) for name in fields}
    new = {name: each for name, each in new.items() if each is not getattr(value, name)}
    return value.clone(**new) if new else value

  return mapped(model)


def adapter_choices(model: nn.Module) -> tuple[str, ...]:
  """Returns the names of the adapters that rows of a batch can choose from, in the order of their numbers from 1 on."""
  found: dict[tuple[str, ...], None] = {}

  def look(adapter: WeightAdapter) -> WeightAdapter:
    found[adapter.choices] = None
    return adapter

  map_adapters(model, look)
  return next((choices for choices in found if choices), ())
