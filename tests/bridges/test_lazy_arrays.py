"""LazyArrays read only the requested parts of transposed, reshaped, joined and cut arrays."""

import jax
import numpy as np
import pytest

from spmd_tasks.bridges import _lazy_arrays as lazy_arrays
from spmd_tasks.bridges._lazy_arrays import LazyArray


class Source:
  """An array that counts how many numbers are read."""

  def __init__(self, *shape):
    self.values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    self.num_read = 0
    self.lazy = LazyArray(shape, 'float32', self._read)

  def _read(self, index):
    assert all(0 <= part.start < part.stop <= size for part, size in zip(index, self.values.shape))
    self.num_read += self.values[index].size
    return self.values[index]


def assert_parts_are_equal(lazy, whole, rng):
  assert lazy.shape == whole.shape
  np.testing.assert_array_equal(np.asarray(lazy), whole)
  for _ in range(30):
    index = tuple(slice(*sorted(rng.choice(size + 1, 2, replace=False).tolist())) for size in whole.shape)
    np.testing.assert_array_equal(lazy.read(index), whole[index])


@pytest.mark.parametrize(
  'before, after',
  [((6, 4), (6, 2, 2)), ((24,), (2, 3, 4)), ((2, 3, 4), (24,)), ((1, 6, 1, 4), (6, 4)), ((2, 2, 3), (4, 3, 1))],
)
def test_parts_of_a_reshaped_array(before, after, rng):
  source = Source(*before)
  assert_parts_are_equal(source.lazy.reshape(after), source.values.reshape(after), rng)


@pytest.mark.parametrize(
  'lazy, whole',
  [
    (lambda a, b: a.transpose((2, 0, 1)), lambda a, b: a.transpose((2, 0, 1))),
    (lambda a, b: a[1, 2], lambda a, b: a[1, 2]),
    (lambda a, b: lazy_arrays.take(a, np.array([3, 1, 0, 2, 4]), -1), lambda a, b: a[:, :, [3, 1, 0, 2, 4]]),
    (lambda a, b: lazy_arrays.stack([a, b], -2), lambda a, b: np.stack([a, b], -2)),
    (lambda a, b: lazy_arrays.concatenate([a, b], 0), lambda a, b: np.concatenate([a, b])),
    (lambda a, b: lazy_arrays.split(a, (1, 3), 2)[1], lambda a, b: a[:, :, 1:3]),
    (lambda a, b: a.astype('float16') * 2.0, lambda a, b: a.astype('float16') * np.float16(2)),
  ],
)
def test_parts_of_operations(lazy, whole, rng):
  a, b = Source(3, 4, 5), Source(3, 4, 5)
  assert_parts_are_equal(lazy(a.lazy, b.lazy), whole(a.values, b.values), rng)


@pytest.mark.parametrize('order', [(0, 1, 2), (1, 0, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
@pytest.mark.parametrize('dtypes', [('float32', 'float32'), ('bfloat16', 'float32'), ('float32', 'bfloat16')])
def test_transposed_arrays_are_copied_in_tiles(order, dtypes, rng):
  for shape in ((40, 70, 30), (3, 300, 33), (500, 1, 40), (1, 1, 7), (0, 5, 7), (300, 300, 1)):
    source = rng.normal(size=shape).astype(dtypes[0]).transpose(order)
    target = np.full((*source.shape[:2], source.shape[2] + 3), 7, dtypes[1])
    lazy_arrays.copy_into(target[..., :-3], source)
    np.testing.assert_array_equal(target[..., :-3], source.astype(dtypes[1]))
    assert (target[..., -3:] == 7).all()
    np.testing.assert_array_equal(lazy_arrays.contiguous(source), source)


def test_sharded_arrays_are_read_from_memory_and_by_computation(rng):
  mesh = jax.make_mesh((2, 4), ('data', 'mdl'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
  whole = rng.normal(size=(4, 8, 3)).astype(np.float32)
  for spec in ((None, 'mdl'), ('data', 'mdl', None), (None, ('data', 'mdl')), ()):
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    array = jax.device_put(whole, sharding)
    for index in (np.s_[0:4, 0:8, 0:3], np.s_[1:3, 1:7, 2:3]):
      np.testing.assert_array_equal(lazy_arrays.device_array(array).read(index), whole[index])
      np.testing.assert_array_equal(lazy_arrays._read_by_computation(array, index), whole[index])


def test_only_the_requested_part_is_read():
  kernels = [Source(6, 8) for _ in range(4)]  # [H * K, D] of four layers
  heads = lazy_arrays.stack([kernel.lazy.transpose((1, 0)).reshape((8, 3, 2)) for kernel in kernels], 0)
  heads.read((slice(2, 4), slice(0, 4), slice(1, 2), slice(0, 2)))  # two layers, half of D, one of three heads
  assert [kernel.num_read for kernel in kernels] == [0, 0, 8, 8]
