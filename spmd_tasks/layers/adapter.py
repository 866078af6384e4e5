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
    """Returns the adapted output for y = x . kernel, [B, T..., O...], in its dtype; x is [B, T..., I...]."""

  @abc.abstractmethod
  def kernel(self) -> jax.Array:
    """Returns the adapted kernel, in the dtype of the computation."""


class WeightAdapter(abc.ABC):
  """Settings of an adapter, a frozen dataclass. A Product, which adapts another.

  Attributes:
    names: the projections that it adapts, for a layer with several.
    choices: names of adapters that rows of a batch choose from in generation, numbered from 1.
  """

  names: tuple[str, ...]
  choices: tuple[str, ...] = ()

  @abc.abstractmethod
  def adapt(self, kernel: DeclaredKernel) -> AdaptedKernel:
    """Declares the adapter's weights beside a kernel."""

  def __call__(self, x: jax.Array, kernel: DeclaredKernel, product: Product = plain_product) -> jax.Array:
    """Returns the adapted product(x, kernel)."""
    y = product(x, kernel)
    return self.adapt(kernel).outputs(x, y)

  def of_rows(self, numbers: jax.Array) -> 'WeightAdapter':
    """Returns this adapter for a batch whose row b chooses adapter numbers[b], int32 [B]; 0 chooses none."""
    del numbers
    return self


def map_adapters(model: nn.Module, change: Callable[[WeightAdapter], WeightAdapter | None]) -> nn.Module:
  """Returns an unbound copy of `model` with change(adapter) for every adapter; None removes an adapter."""
  return map_parts(model, WeightAdapter, change)


def map_parts(model: nn.Module, kinds: type | tuple[type, ...], change: Callable[[Any], Any]) -> nn.Module:
  """Returns an unbound copy of `model` with change(part) for every part of these classes; lists omit a None."""

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
    new = {name: field for name, field in new.items() if field is not getattr(value, name)}
    return value.clone(**new) if new else value

  return mapped(model)


def adapter_choices(model: nn.Module) -> tuple[str, ...]:
  """Returns the names of the adapters that rows of a batch can choose from, in the order of their numbers from 1."""
  choices: list[tuple[str, ...]] = []

  def collect(adapter: WeightAdapter) -> WeightAdapter:
    choices.append(adapter.choices)
    return adapter

  map_adapters(model, collect)
  return next(filter(None, choices), ())
