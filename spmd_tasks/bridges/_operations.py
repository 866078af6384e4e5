"""Invertible operations on arrays, of which the rules that convert weights are composed.

They work on numpy arrays, jax.Arrays and LazyArrays (_lazy_arrays.py). Dims are counted from the last, so an operation
also converts a stack of weights at once. No operation changes values.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.bridges import _lazy_arrays
from spmd_tasks.bridges._lazy_arrays import LazyArray

Arrays = tuple[Any, ...]  # numpy arrays, jax.Arrays, LazyArrays or tracers
Shape = tuple[int, ...]


class Operation:
  """Maps arrays to arrays: one at a time (`apply`), or all together (`__call__`)."""

  def __call__(self, arrays: Arrays) -> Arrays:
    return tuple(self.apply(array) for array in arrays)

  def apply(self, array: Any) -> Any:
    raise NotImplementedError

  def inverse(self) -> 'Operation':
    """Returns the operation that undoes this one."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Transpose(Operation):
  """Permutes the last `len(order)` dims: among these, dim i of the result is dim `order[i]` of the input."""

  order: tuple[int, ...]

  def apply(self, array: Any) -> Any:
    first = array.ndim - len(self.order)
    return array.transpose((*range(first), *(first + i for i in self.order)))

  def inverse(self) -> 'Transpose':
    return Transpose(tuple(np.argsort(self.order).tolist()))


@dataclasses.dataclass(frozen=True)
class Reshape(Operation):
  """Reshapes the last dims from `before` to `after`, in row-major order; one dim of each may be -1 (inferred)."""

  before: Shape
  after: Shape

  def apply(self, array: Any) -> Any:
    first = array.ndim - len(self.before)
    last = tuple(array.shape[max(first, 0) :])
    if len(last) != len(self.before) or any(size not in (-1, own) for size, own in zip(self.before, last)):
      raise ValueError(f'an array {list(array.shape)} does not end in the dims {list(self.before)}')
    return array.reshape((*array.shape[:first], *self.after))

  def inverse(self) -> 'Reshape':
    return Reshape(self.after, self.before)


@dataclasses.dataclass(frozen=True)
class Each(Operation):
  """Applies an operation to each of several arrays."""

  operations: tuple[Operation, ...]

  def __call__(self, arrays: Arrays) -> Arrays:
    return tuple(operation.apply(array) for operation, array in zip(self.operations, arrays, strict=True))

  def inverse(self) -> 'Each':
    return Each(tuple(operation.inverse() for operation in self.operations))


def split_heads(head_dim: int) -> Reshape:
  """Returns the operation that splits the last dim [H * K] into [H, K], for any H."""
  return Reshape((-1,), (-1, head_dim))


@dataclasses.dataclass(frozen=True)
class Take(Operation):
  """Reorders dim `dim` (negative): entry i of the result is entry `indices[i]` of the input, a permutation."""

  dim: int
  indices: tuple[int, ...]

  def apply(self, array: Any) -> Any:
    return _numpy_of(array).take(array, np.array(self.indices), axis=self.dim)

  def inverse(self) -> 'Take':
    return Take(self.dim, tuple(np.argsort(self.indices).tolist()))


@dataclasses.dataclass(frozen=True)
class Split(Operation):
  """Splits one array along dim `dim` (negative) into arrays of these sizes; with `joins`, concatenates them instead."""

  dim: int
  sizes: tuple[int, ...]
  joins: bool = False

  def __call__(self, arrays: Arrays) -> Arrays:
    if self.joins:
      return (_numpy_of(*arrays).concatenate(arrays, axis=self.dim),)
    (array,) = arrays
    return tuple(_numpy_of(array).split(array, np.cumsum(self.sizes)[:-1].tolist(), axis=self.dim))

  def inverse(self) -> 'Split':
    return Split(self.dim, self.sizes, not self.joins)


def _numpy_of(*arrays: Any) -> Any:
  if any(isinstance(array, LazyArray) for array in arrays):
    return _lazy_arrays
  return jnp if any(isinstance(array, jax.Array) for array in arrays) else np
