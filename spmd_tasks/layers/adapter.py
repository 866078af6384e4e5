"""Adapters: products with weights of their own beside a kernel, as adapters/low_rank.py (LoRA) has them.

    Linear(output_dims=64, product=LowRankAdapter(rank=8, alpha=16.0))

A layer with several projections has a field `adapters`, and a static method `adaptable` that returns the names of their
weights. A layer without a Linear calls `adapter.adapt` with the kernel that it declares, and then either `outputs`,
which changes x . kernel, or `kernel`, if its products need a whole kernel.
"""

import abc
from collections.abc import Callable
import dataclasses
from typing import Any

import flax.linen as nn
import jax

from spmd_tasks.layers.products import DeclaredKernel, Product, plain_product

# The tag of adapters' weights, which belong to no base.
ADAPTER_TAG = 'adapter'


class AdaptedKernel(abc.ABC):
  """A kernel with the weights of its adapter."""

  @abc.abstractmethod
  def outputs(self, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns what takes the place of y = x . kernel, [B, T..., O...], in its dtype; x is [B, T..., I...]."""

  @abc.abstractmethod
  def kernel(self) -> jax.Array:
    """Returns what takes the place of the kernel, in the dtype of the computation."""


class WeightAdapter(abc.ABC):
  """Settings of an adapter, a frozen dataclass. A Product, which adapts another.

  Attributes:
    names: the projections that have it, where a layer has several.
    choices: names by which rows of a batch choose one of several adapters when text is generated, numbered from 1 on.
  """

  names: tuple[str, ...]
  choices: tuple[str, ...] = ()

  @abc.abstractmethod
  def adapt(self, kernel: DeclaredKernel) -> AdaptedKernel:
    """Declares the adapter's weights beside a kernel."""

  def __call__(self, x: jax.Array, kernel: DeclaredKernel, product: Product = plain_product) -> jax.Array:
    """Returns what takes the place of y = product(x, kernel)."""
    y = product(x, kernel)
    return self.adapt(kernel).outputs(x, y)

  def of_rows(self, numbers: jax.Array) -> 'WeightAdapter':
    """Returns this adapter for a batch of which row b chooses number numbers[b], int32 [B]; 0 chooses none."""
    del numbers
    return self


def map_adapters(model: nn.Module, change: Callable[[WeightAdapter], WeightAdapter | None]) -> nn.Module:
  """Returns an unbound module like `model` with every adapter changed, or left out where `change` returns None."""
  return map_parts(model, WeightAdapter, change)


def map_parts(model: nn.Module, kinds: type | tuple[type, ...], change: Callable[[Any], Any]) -> nn.Module:
  """Returns an unbound module like `model` with all that is of these classes changed, or left out of lists (None)."""

  def mapped(value: Any) -> Any:
    if isinstance(value, kinds):
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
