"""Arrays that are read on demand, part by part: from a file, or computed from other lazy arrays.

    kernel = LazyArray((6, 4), np.dtype('float32'), read)     # read(index) reads a part, index = one slice per dim
    heads = kernel.transpose((1, 0)).reshape((4, 3, 2))       # reads nothing
    heads.read((slice(0, 4), slice(1, 2), slice(0, 2)))       # reads two rows of the kernel

The methods and functions have numpy's names, so the operations of _operations.py convert lazy arrays and numpy arrays
alike. Each device reads only its shard of a weight, and a process never needs memory for more than its shards and the
tensor that it is reading.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import math
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

Index = tuple[slice, ...]  # one slice per dim, with numbers as start and stop, and no step
Shape = tuple[int, ...]

_TILE_ROWS, _TILE_SIZE = 16, 4096


class LazyArray:
  """An array that is read on demand; `np.asarray` reads all of it."""

  def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike, read: Callable[[Index], np.ndarray]):
    """Initializes the array; `read(index)` returns a part of it in any dtype, which is cast to `dtype`."""
    self.shape: Shape = tuple(shape)
    self.dtype = np.dtype(dtype)
    self._read = read

  @property
  def ndim(self) -> int:
    return len(self.shape)

  def read(self, index: Index) -> np.ndarray:
    """Returns the part of the array at the index, in the array's dtype."""
    part = np.asarray(self._read(index))
    if part.dtype == self.dtype:
      return part
    result = np.empty(part.shape, self.dtype)
    copy_into(result, part)
    return result

  def read_into(self, target: np.ndarray, index: Index) -> None:
    """Writes the part of the array at the index into `target`, which has the array's dtype or a wider one."""
    copy_into(target, self._read(index) if target.dtype == self.dtype else self.read(index))

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    whole = self.read(tuple(slice(0, size) for size in self.shape))
    return whole if dtype is None else whole.astype(dtype)

  def __getitem__(self, leading: tuple[int, ...]) -> 'LazyArray':
    """Returns the array at an index into the leading dims."""
    first = tuple(slice(i, i + 1) for i in leading)
    return LazyArray(
      self.shape[len(leading) :],
      self.dtype,
      lambda index: self.read((*first, *index)).reshape([_length(part) for part in index]),
    )

  def astype(self, dtype: npt.DTypeLike) -> 'LazyArray':
    return self if self.dtype == dtype else LazyArray(self.shape, dtype, self.read)

  def __mul__(self, number: float) -> 'LazyArray':
    return LazyArray(self.shape, self.dtype, lambda index: self.read(index) * np.asarray(number, self.dtype))

  def transpose(self, order: Sequence[int]) -> 'LazyArray':
    back = np.argsort(order)
    shape = [self.shape[dim] for dim in order]
    return LazyArray(
      shape, self.dtype, lambda index: self.read(tuple(index[dim] for dim in back)).transpose(tuple(order))
    )

  def reshape(self, shape: Sequence[int]) -> 'LazyArray':
    """Returns the array in another shape. Reading a part of it reads the smallest enclosing block of the source."""
    size = math.prod(self.shape)
    if -1 in shape:
      rest = -math.prod(shape)
      shape = [size // rest if dim == -1 else dim for dim in shape]
    if math.prod(shape) != size:
      raise ValueError(f'cannot reshape an array {list(self.shape)} to {list(shape)}')
    groups = list(_same_sized_groups(self.shape, tuple(shape)))

    def read(index: Index) -> np.ndarray:
      source: list[slice] = []
      selections: list[np.ndarray] = []  # per group, the requested entries of the block
      sizes: list[int] = []  # per group, its size in the block
      rest = index
      for before, after in groups:
        requested, rest = rest[: len(after)], rest[len(after) :]
        flat = np.zeros(1, np.int64)
        for size, part in zip(after, requested):
          flat = (flat[:, None] * size + np.arange(part.start, part.stop)).reshape(-1)
        entries = 0 * flat
        for i, size in enumerate(before):
          coordinate = flat // math.prod(before[i + 1 :]) % size
          covered = slice(int(coordinate.min()), int(coordinate.max()) + 1)
          entries = entries * _length(covered) + coordinate - covered.start
          source.append(covered)
        selections.append(entries)
        sizes.append(math.prod(map(_length, source[len(source) - len(before) :])))
      block = self.read(tuple(source)).reshape(sizes)
      for axis, entries in enumerate(selections):
        if len(entries) < sizes[axis]:
          block = block.take(entries, axis)
      return block.reshape([_length(part) for part in index])

    return LazyArray(shape, self.dtype, read)

  def cut(self, dim: int, start: int, stop: int) -> 'LazyArray':
    """Returns entries [start, stop) of a dim."""
    dim %= self.ndim

    def read(index: Index) -> np.ndarray:
      moved = slice(index[dim].start + start, index[dim].stop + start)
      return self.read((*index[:dim], moved, *index[dim + 1 :]))

    return LazyArray((*self.shape[:dim], stop - start, *self.shape[dim + 1 :]), self.dtype, read)


def take(array: LazyArray, indices: np.ndarray, axis: int) -> LazyArray:
  """Reorders a dim, as numpy.take does."""
  axis %= array.ndim

  def read(index: Index) -> np.ndarray:
    requested = indices[index[axis]]
    if not len(requested):
      return np.zeros([_length(part) for part in index], array.dtype)
    low, high = int(requested.min()), int(requested.max())
    return np.take(array.read((*index[:axis], slice(low, high + 1), *index[axis + 1 :])), requested - low, axis=axis)

  return LazyArray((*array.shape[:axis], len(indices), *array.shape[axis + 1 :]), array.dtype, read)


def stack(arrays: Sequence[Any], axis: int) -> LazyArray:
  """Stacks arrays along a new dim, as numpy.stack does."""
  axis %= arrays[0].ndim + 1
  widened = [lazy_array(array).reshape((*array.shape[:axis], 1, *array.shape[axis:])) for array in arrays]
  return concatenate(widened, axis)


def concatenate(arrays: Sequence[Any], axis: int) -> LazyArray:
  """Joins arrays along a dim, as numpy.concatenate does."""
  parts = [lazy_array(array) for array in arrays]
  axis %= parts[0].ndim
  sizes = [part.shape[axis] for part in parts]
  if len({(*part.shape[:axis], *part.shape[axis + 1 :]) for part in parts}) > 1:
    raise ValueError(f'cannot concatenate arrays of shapes {[list(part.shape) for part in parts]}')
  ends = np.cumsum(sizes).tolist()
  dtype = np.result_type(*{part.dtype for part in parts})

  def read(index: Index) -> np.ndarray:
    requested = index[axis]
    result = np.empty([_length(part) for part in index], dtype)
    for part, end in zip(parts, ends):
      begin = end - part.shape[axis]
      start, stop = max(requested.start, begin), min(requested.stop, end)
      if start < stop:
        target = (slice(None),) * axis + (slice(start - requested.start, stop - requested.start),)
        part.read_into(result[target], (*index[:axis], slice(start - begin, stop - begin), *index[axis + 1 :]))
    return result

  return LazyArray((*parts[0].shape[:axis], ends[-1], *parts[0].shape[axis + 1 :]), dtype, read)


def split(array: LazyArray, points: Sequence[int], axis: int) -> list[LazyArray]:
  """Splits an array along a dim, as numpy.split does."""
  ends = [*points, array.shape[axis]]
  if sorted(ends) != ends:
    raise ValueError(f'cannot split a dim of {array.shape[axis]} at {list(points)}')
  return [array.cut(axis, start, stop) for start, stop in zip([0, *points], ends)]


def lazy_array(array: Any) -> LazyArray:
  """Wraps an array as a LazyArray; returns a LazyArray unchanged."""
  if isinstance(array, LazyArray):
    return array
  return LazyArray(array.shape, array.dtype, lambda index: np.asarray(array[index]))


def _length(part: slice) -> int:
  return part.stop - part.start


def _same_sized_groups(before: Shape, after: Shape) -> Iterator[tuple[Shape, Shape]]:
  """Pairs the shortest runs of dims with the same product: [6, 4] and [2, 3, 4] give ([6], [2, 3]) and ([4], [4])."""
  i = j = 0
  while i < len(before) or j < len(after):
    first_i, first_j = i, j
    left = right = 1
    if i < len(before):
      left, i = before[i], i + 1
    if j < len(after):
      right, j = after[j], j + 1
    while left != right:
      if left < right:
        left, i = left * before[i], i + 1
      else:
        right, j = right * after[j], j + 1
    yield before[first_i:i], after[first_j:j]


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
  """Computes `target[...] = source` in tiles, which is several times faster if the source is transposed.

  A tile has rows that are contiguous in the source; 16 of them fit the cache and fill the target's cache lines.
  """
  source = np.asarray(source)
  dims = [dim for dim, size in enumerate(source.shape) if size > 1]
  strides = [source.strides[dim] for dim in dims]
  if strides == sorted(strides, reverse=True):
    target[...] = source
    return
  outer, dim = dims[int(np.argmax(strides))], dims[int(np.argmin(strides))]
  row = source.shape[dim]
  while dim > 0 and source.strides[dim - 1] == row * source.itemsize:
    dim -= 1
    row *= source.shape[dim]
  num_rows, most = source.size // row, max(_TILE_ROWS, _TILE_SIZE // row)
  if num_rows <= most:
    # Cast in the source's order first, which is faster than casting while transposing.
    target[...] = source.astype(target.dtype, copy=False)
    return
  step = max(1, most * source.shape[outer] // num_rows)
  for start in range(0, source.shape[outer], step):
    rows = (slice(None),) * outer + (slice(start, start + step),)
    copy_into(target[rows], source[rows])


def contiguous(array: np.ndarray) -> np.ndarray:
  """Returns a contiguous array like numpy.ascontiguousarray, but copies with `copy_into`."""
  if array.flags.c_contiguous:
    return array
  result = np.empty(array.shape, array.dtype)
  copy_into(result, array)
  return result


def place_on_mesh(array: LazyArray, padded: jax.ShapeDtypeStruct) -> jax.Array:
  """Reads each device's shard of an array onto the device, padded with zeros to the shape of `padded`."""
  shards: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # replicas share a shard

  def read(index: Any) -> np.ndarray:
    bounds = tuple(part.indices(size)[:2] for part, size in zip(index, padded.shape))
    if bounds not in shards:
      true = tuple(slice(start, min(stop, size)) for (start, stop), size in zip(bounds, array.shape))
      if bounds == tuple((part.start, part.stop) for part in true):
        shards[bounds] = contiguous(array.read(true))
      else:
        shard = np.zeros([stop - start for start, stop in bounds], array.dtype)
        if all(part.start < part.stop for part in true):
          array.read_into(shard[tuple(slice(0, part.stop - part.start) for part in true)], true)
        shards[bounds] = shard
    return shards[bounds]

  return jax.make_array_from_callback(padded.shape, padded.sharding, read)


def device_array(array: jax.Array) -> LazyArray:
  """Wraps a sharded jax.Array as a LazyArray.

  If the array is not fully addressable or is on an accelerator, reading a part of it runs a computation that all
  processes must join.
  """
  is_here = array.is_fully_addressable and all(shard.device.platform == 'cpu' for shard in array.addressable_shards)
  read = _read_from_memory if is_here else _read_by_computation
  return LazyArray(array.shape, array.dtype, functools.partial(read, array))


def _read_from_memory(array: jax.Array, index: Index) -> np.ndarray:
  result = np.empty([_length(part) for part in index], array.dtype)
  for shard in array.addressable_shards:
    if shard.replica_id == 0:
      bounds = [part.indices(size)[:2] for part, size in zip(shard.index, array.shape)]
      common = [(max(start, part.start), min(stop, part.stop)) for (start, stop), part in zip(bounds, index)]
      if all(start < stop for start, stop in common):
        target = tuple(slice(start - part.start, stop - part.start) for (start, stop), part in zip(common, index))
        source = tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(common, bounds))
        result[target] = np.asarray(shard.data)[source]  # the only copy
  return result


def _read_by_computation(array: jax.Array, index: Index) -> np.ndarray:
  starts = tuple(np.int32(part.start) for part in index)
  part = _slice_on_all_devices(array.sharding, tuple(map(_length, index)))(array, starts)
  return np.asarray(part.addressable_data(0))


@functools.lru_cache(maxsize=1024)
def _slice_on_all_devices(sharding: Any, sizes: Shape) -> Callable[..., jax.Array]:
  replicated = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
  return jax.jit(lambda array, starts: jax.lax.dynamic_slice(array, starts, sizes), out_shardings=replicated)
