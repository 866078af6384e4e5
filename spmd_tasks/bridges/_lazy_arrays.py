"""LazyArray: an array in a file, or one made of such arrays, of which any part can be read without the rest.

    kernel = LazyArray((6, 4), np.dtype('float32'), read)     # read(index) reads a part, index = one slice per dim
    heads = kernel.transpose((1, 0)).reshape((4, 3, 2))       # nothing is read
    heads.read((slice(0, 4), slice(1, 2), slice(0, 2)))       # reads two rows of the kernel

The methods and functions are those of numpy that the operations of _operations.py call, so that one table of rules
converts whole arrays as well as parts of them: each device gets its shard of a weight, and no process holds more than
its own shards and the tensor that it reads.
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
  """An array whose values are read on demand; `np.asarray` reads all of it."""

  def __init__(self, shape: Sequence[int], dtype: npt.DTypeLike, read: Callable[[Index], np.ndarray]):
    """Makes an array; `read` returns the part at an index, in any dtype."""
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
    made = np.empty(part.shape, self.dtype)
    copy_into(made, part)
    return made

  def read_into(self, target: np.ndarray, index: Index) -> None:
    """Writes the part of the array at the index into `target`, in the array's dtype or a wider one."""
    copy_into(target, self._read(index) if target.dtype == self.dtype else self.read(index))

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    whole = self.read(tuple(slice(0, size) for size in self.shape))
    return whole if dtype is None else whole.astype(dtype)

  def __getitem__(self, place: tuple[int, ...]) -> 'LazyArray':
    """Returns the array at one place of the leading dims."""
    first = tuple(slice(i, i + 1) for i in place)
    return LazyArray(
      self.shape[len(place) :],
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
    """Returns the array in another shape. A part of it is read as the smallest block that has it."""
    size = math.prod(self.shape)
    if -1 in shape:
      rest = -math.prod(shape)
      shape = [size // rest if dim == -1 else dim for dim in shape]
    if math.prod(shape) != size:
      raise ValueError(f'an array {list(self.shape)} cannot have the shape {list(shape)}')
    groups = list(_same_sized_groups(self.shape, tuple(shape)))

    def read(index: Index) -> np.ndarray:
      source: list[slice] = []
      chosen: list[np.ndarray] = []  # of each group, the entries of the block that are wanted
      sizes: list[int] = []  # of the groups in the block
      rest = index
      for before, after in groups:
        wanted, rest = rest[: len(after)], rest[len(after) :]
        flat = np.zeros(1, np.int64)
        for size, part in zip(after, wanted):
          flat = (flat[:, None] * size + np.arange(part.start, part.stop)).reshape(-1)
        entries = 0 * flat
        for i, size in enumerate(before):
          place = flat // math.prod(before[i + 1 :]) % size
          covered = slice(int(place.min()), int(place.max()) + 1)
          entries = entries * _length(covered) + place - covered.start
          source.append(covered)
        chosen.append(entries)
        sizes.append(math.prod(map(_length, source[len(source) - len(before) :])))
      block = self.read(tuple(source)).reshape(sizes)
      for axis, entries in enumerate(chosen):
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
    wanted = indices[index[axis]]
    if not len(wanted):
      return np.zeros([_length(part) for part in index], array.dtype)
    low, high = int(wanted.min()), int(wanted.max())
    return np.take(array.read((*index[:axis], slice(low, high + 1), *index[axis + 1 :])), wanted - low, axis=axis)

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
    raise ValueError(f'arrays of these shapes cannot be joined: {[list(part.shape) for part in parts]}')
  ends = np.cumsum(sizes).tolist()
  dtype = np.result_type(*{part.dtype for part in parts})

  def read(index: Index) -> np.ndarray:
    wanted = index[axis]
    made = np.empty([_length(part) for part in index], dtype)
    for part, end in zip(parts, ends):
      begin = end - part.shape[axis]
      start, stop = max(wanted.start, begin), min(wanted.stop, end)
      if start < stop:
        place = (slice(None),) * axis + (slice(start - wanted.start, stop - wanted.start),)
        part.read_into(made[place], (*index[:axis], slice(start - begin, stop - begin), *index[axis + 1 :]))
    return made

  return LazyArray((*parts[0].shape[:axis], ends[-1], *parts[0].shape[axis + 1 :]), dtype, read)


def split(array: LazyArray, points: Sequence[int], axis: int) -> list[LazyArray]:
  """Splits an array along a dim, as numpy.split does."""
  ends = [*points, array.shape[axis]]
  if sorted(ends) != ends:
    raise ValueError(f'a dim of {array.shape[axis]} cannot be cut at {list(points)}')
  return [array.cut(axis, start, stop) for start, stop in zip([0, *points], ends)]


def lazy_array(array: Any) -> LazyArray:
  """Returns an array that is there as a LazyArray; a LazyArray as it is."""
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
  """Computes `target[...] = source` a few rows at a time: several times faster where the source is transposed.

  Rows are what lies side by side in memory. A tile of 16 of them fits the cache, and fills lines of the target's.
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
    target[...] = source.astype(target.dtype, copy=False)  # in the source's order, which is faster than while it turns
    return
  step = max(1, most * source.shape[outer] // num_rows)
  for start in range(0, source.shape[outer], step):
    rows = (slice(None),) * outer + (slice(start, start + step),)
    copy_into(target[rows], source[rows])


def contiguous(array: np.ndarray) -> np.ndarray:
  """Returns a contiguous copy, as numpy.ascontiguousarray does, made by `copy_into`."""
  if array.flags.c_contiguous:
    return array
  made = np.empty(array.shape, array.dtype)
  copy_into(made, array)
  return made


def place_on_mesh(array: LazyArray, padded: jax.ShapeDtypeStruct) -> jax.Array:
  """Reads each device's part of an array onto it, padded with zeros to the shape of `padded`."""
  shards: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # devices may hold the same part

  def read(index: Any) -> np.ndarray:
    bounds = tuple(part.indices(size)[:2] for part, size in zip(index, padded.shape))
    if bounds not in shards:
      true = tuple(slice(start, min(stop, size)) for (start, stop), size in zip(bounds, array.shape))
      if bounds == tuple((part.start, part.stop) for part in true):
        shards[bounds] = contiguous(array.read(true))
      else:
        made = np.zeros([stop - start for start, stop in bounds], array.dtype)
        if all(part.start < part.stop for part in true):
          array.read_into(made[tuple(slice(0, part.stop - part.start) for part in true)], true)
        shards[bounds] = made
    return shards[bounds]

  return jax.make_array_from_callback(padded.shape, padded.sharding, read)


def device_array(array: jax.Array) -> LazyArray:
  """Returns a sharded array as a LazyArray.

  Where this process does not hold all of it, or an accelerator does, reading a part of it is a computation in which all
  processes take part.
  """
  is_here = array.is_fully_addressable and all(shard.device.platform == 'cpu' for shard in array.addressable_shards)
  read = _read_from_memory if is_here else _read_by_computation
  return LazyArray(array.shape, array.dtype, functools.partial(read, array))


def _read_from_memory(array: jax.Array, index: Index) -> np.ndarray:
  made = np.empty([_length(part) for part in index], array.dtype)
  for shard in array.addressable_shards:
    if shard.replica_id == 0:
      bounds = [part.indices(size)[:2] for part, size in zip(shard.index, array.shape)]
      common = [(max(start, part.start), min(stop, part.stop)) for (start, stop), part in zip(bounds, index)]
      if all(start < stop for start, stop in common):
        there = tuple(slice(start - part.start, stop - part.start) for (start, stop), part in zip(common, index))
        here = tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(common, bounds))
        made[there] = np.asarray(shard.data)[here]  # no copy before this one
  return made


def _read_by_computation(array: jax.Array, index: Index) -> np.ndarray:
  starts = tuple(np.int32(part.start) for part in index)
  part = _slice_on_all_devices(array.sharding, tuple(map(_length, index)))(array, starts)
  return np.asarray(part.addressable_data(0))


@functools.lru_cache(maxsize=1024)
def _slice_on_all_devices(sharding: Any, sizes: Shape) -> Callable[..., jax.Array]:
  replicated = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
  return jax.jit(lambda array, starts: jax.lax.dynamic_slice(array, starts, sizes), out_shardings=replicated)
