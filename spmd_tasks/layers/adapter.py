"""The seam by which an object changes what layers compute with their kernels, as adapters/low_rank.py (LoRA) does.

    Linear(output_dims=64, adapter=LowRankAdapter(rank=8, alpha=16.0))

A layer with several projections has a field `adapters`, and a static method `adaptable` that says what the weights of
its projections are called. It calls `adapter.adapt` where it declares a kernel, and then either `outputs`, which
changes x . kernel, or `kernel`, where every product needs a whole kernel.
"""

import abc
from collections.abc import Callable
import dataclasses
from typing import Any

import flax.linen as nn
import jax

from spmd_tasks.sharding import SplitDims

# The tag of adapters' weights, which belong to no base.
ADAPTER_TAG = 'adapter'


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeclaredKernel:
  """A kernel that a layer has declared.

  Attributes:
    module: the layer.
    value: [E?, I..., O...]: E counts experts, I is contracted with an input.
    prefix: of the names of weights beside it, for a kernel that is not called `kernel`.
    num_input_dims, num_stacked_dims: how many dims I has, and how many count separate kernels, as E does.
    split_dims, tags: of the kernel.
    dtype: of the computation.
    token_split_dims: of the dims of inputs that count tokens, such as ('batch', 'seq'); None: not known.
  """

  module: nn.Module
  value: jax.Array
  prefix: str = ''
  num_input_dims: int = 1
  num_stacked_dims: int = 0
  split_dims: SplitDims
  tags: tuple[str, ...] = ()
  dtype: Any
  token_split_dims: SplitDims = None


class AdaptedKernel(abc.ABC):
  """A kernel with the weights of its adapter."""

  @abc.abstractmethod
  def outputs(self, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns what takes the place of y = x . kernel, [B, T..., O...], in its dtype; x is [B, T..., I...]."""

  @abc.abstractmethod
  def kernel(self) -> jax.Array:
    """Returns what takes the place of the kernel, in the dtype of the computation."""


class WeightAdapter(abc.ABC):
  """Settings of an adapter, a frozen dataclass.

  Attributes:
    names: the projections that have it, where a layer has several.
    choices: names by which rows of a batch choose one of several adapters when text is generated, numbered from 1 on.
  """

  names: tuple[str, ...]
  choices: tuple[str, ...] = ()

  @abc.abstractmethod
  def adapt(self, kernel: DeclaredKernel) -> AdaptedKernel:
    """Declares the adapter's weights beside a kernel."""

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
