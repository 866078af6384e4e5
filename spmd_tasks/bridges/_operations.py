"""Operations of the rules that convert weights: each maps arrays to arrays and has an inverse.

They work on numpy arrays, on jax.Arrays, and on LazyArrays, of which parts are read later (_lazy_arrays.py). Dims are
counted from the last one, so that an operation also converts a stack of weights at once. None changes values.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.bridges import _lazy_arrays
from spmd_tasks.bridges._lazy_arrays import LazyArray

Arrays = tuple[Any, ...]  # numpy arrays, jax.Arrays, LazyArrays or tracers
Shape = tuple[int, ...]


class Operation(Protocol):
  """Maps several arrays to several arrays. Operations with one array in and out apply to each array by itself."""

  def __call__(self, arrays: Arrays) -> Arrays: ...

  def inverse(self) -> 'Operation':
    """Returns the operation that undoes this one."""
    ...


@dataclasses.dataclass(frozen=True)
class Transpose:
  """Permutes the last `len(order)` dims: dim i of the result is dim `order[i]` of the input, counted among these."""

  order: tuple[int, ...]

  def __call__(self, arrays: Arrays) -> Arrays:
    return tuple(self._transpose(array) for array in arrays)

  def _transpose(self, array: Any) -> Any:
    first = array.ndim - len(self.order)
    return array.transpose((*range(first), *(first + i for i in self.order)))

  def inverse(self) -> 'Transpose':
    return Transpose(tuple(np.argsort(self.order).tolist()))


@dataclasses.dataclass(frozen=True)
class Reshape:
  """Replaces the last dims `before` by `after`, in row-major order."""

  before: Shape
  after: Shape

  def __call__(self, arrays: Arrays) -> Arrays:
    return tuple(self._reshape(array) for array in arrays)

  def _reshape(self, array: Any) -> Any:
    first = array.ndim - len(self.before)
    if array.shape[max(first, 0) :] != self.before:
      raise ValueError(f'an array {list(array.shape)} does not end in the dims {list(self.before)}')
    return array.reshape((*array.shape[:first], *self.after))

  def inverse(self) -> 'Reshape':
    return Reshape(self.after, self.before)


@dataclasses.dataclass(frozen=True)
class SplitHeads:
  """Splits the last dim [H * K] into [H, K], for any H."""

  head_dim: int

  def __call__(self, arrays: Arrays) -> Arrays:
    return tuple(self._split(array) for array in arrays)

  def _split(self, array: Any) -> Any:
    if array.shape[-1] % self.head_dim:
      raise ValueError(f'the last dim of an array {list(array.shape)} does not consist of heads of {self.head_dim}')
    return array.reshape((*array.shape[:-1], array.shape[-1] // self.head_dim, self.head_dim))

  def inverse(self) -> 'MergeHeads':
    return MergeHeads(self.head_dim)


@dataclasses.dataclass(frozen=True)
class MergeHeads:
  """The inverse of SplitHeads."""

  head_dim: int

  def __call__(self, arrays: Arrays) -> Arrays:
    return tuple(self._merge(array) for array in arrays)

  def _merge(self, array: Any) -> Any:
    if array.ndim < 2 or array.shape[-1] != self.head_dim:
      raise ValueError(f'an array {list(array.shape)} does not end in heads of {self.head_dim}')
    return array.reshape((*array.shape[:-2], array.shape[-2] * self.head_dim))

  def inverse(self) -> SplitHeads:
    return SplitHeads(self.head_dim)


@dataclasses.dataclass(frozen=True)
class Take:
  """Reorders dim `dim` (negative): entry i of the result is entry `indices[i]` of the input, a permutation."""

  dim: int
  indices: tuple[int, ...]

  def __call__(self, arrays: Arrays) -> Arrays:
    return tuple(_numpy_of(arrays).take(array, np.array(self.indices), axis=self.dim) for array in arrays)

  def inverse(self) -> 'Take':
    return Take(self.dim, tuple(np.argsort(self.indices).tolist()))


@dataclasses.dataclass(frozen=True)
class Stack:
  """Makes one array of several equal ones, with a new dim `dim` (negative, counted in the result); `num` of them."""

  dim: int
  num: int

  def __call__(self, arrays: Arrays) -> Arrays:
    return (_numpy_of(arrays).stack(arrays, axis=self.dim),)

  def inverse(self) -> 'Unstack':
    return Unstack(self.dim, self.num)


@dataclasses.dataclass(frozen=True)
class Unstack:
  """The inverse of Stack."""

  dim: int
  num: int

  def __call__(self, arrays: Arrays) -> Arrays:
    (array,) = arrays
    return tuple(_numpy_of(arrays).take(array, i, axis=self.dim) for i in range(self.num))

  def inverse(self) -> Stack:
    return Stack(self.dim, self.num)


@dataclasses.dataclass(frozen=True)
class Concatenate:
  """Joins arrays along dim `dim` (negative), where they have these sizes."""

  dim: int
  sizes: tuple[int, ...]

  def __call__(self, arrays: Arrays) -> Arrays:
    return (_numpy_of(arrays).concatenate(arrays, axis=self.dim),)

  def inverse(self) -> 'Split':
    return Split(self.dim, self.sizes)


@dataclasses.dataclass(frozen=True)
class Split:
  """The inverse of Concatenate."""

  dim: int
  sizes: tuple[int, ...]

  def __call__(self, arrays: Arrays) -> Arrays:
    (array,) = arrays
    return tuple(_numpy_of(arrays).split(array, np.cumsum(self.sizes)[:-1].tolist(), axis=self.dim))

  def inverse(self) -> Concatenate:
    return Concatenate(self.dim, self.sizes)


def _numpy_of(arrays: Arrays) -> Any:
  if any(isinstance(array, LazyArray) for array in arrays):
    return _lazy_arrays
  return jnp if any(isinstance(array, jax.Array) for array in arrays) else np
