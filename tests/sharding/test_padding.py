"""Padding rounds dims up to sizes that their axes divide, needs no collective, and is not visible inside a step."""

import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from spmd_tasks.sharding import padding
from spmd_tasks.sharding.specs import num_parts, spec_axes

SIZES = {'replica': 2, 'data': 4, 'mdl': 3}
COLLECTIVE = re.compile(r'all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast')


@pytest.mark.parametrize(
  'shape, spec, expected',
  [
    ((), P(), ()),
    ((30,), P('data'), (32,)),
    ((1,), P('data'), (4,)),
    ((0,), P('data'), (0,)),
    ((9,), P(('replica', 'data')), (16,)),
    ((30, 257), P('data', 'mdl'), (32, 258)),
  ],
)
def test_padded_shape(shape, spec, expected):
  assert padding.padded_shape(shape, spec, SIZES) == expected


def random_tensor(rng):
  """A random shape with a random PartitionSpec in which every axis is used at most once."""
  ndim = rng.integers(1, 5)
  shape = tuple(int(size) for size in rng.integers(1, 25, size=ndim))
  axes_of_dim = [[] for _ in range(ndim)]
  for axis in rng.permutation(list(SIZES)):
    dim = rng.integers(-1, ndim)
    if dim >= 0:
      axes_of_dim[dim].append(str(axis))
  return shape, P(*[tuple(axes) for axes in axes_of_dim])


@pytest.mark.parametrize('dtype', [jnp.bfloat16, np.bool_])
def test_pad_and_unpad_are_inverse_and_the_padding_is_zero(dtype, rng):
  true = {'a': rng.integers(1, 9, size=(3, 5)).astype(dtype), 'b': [np.asarray(7, dtype)]}
  padded_shapes = {'a': jax.ShapeDtypeStruct((4, 8), dtype), 'b': [jax.ShapeDtypeStruct((), dtype)]}
  true_shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), true)

  padded = padding.pad(jax.tree.map(jnp.asarray, true), padded_shapes)
  assert padded['a'].dtype == dtype
  expected = np.zeros((4, 8), dtype)
  expected[:3, :5] = true['a']
  np.testing.assert_array_equal(np.asarray(padded['a']), expected)

  back = padding.unpad(padded, true_shapes)
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), y), back, true)
  assert jax.tree.structure(back) == jax.tree.structure(true)


@pytest.mark.parametrize(
  'shape, spec, expected',
  [
    ((8, 9), P('data', 'mdl'), P('data', 'mdl')),
    # An uneven dim's axes move to the largest dim that they divide together with its own axes.
    ((30, 9, 12), P('data', None, None), P(None, None, 'data')),
    ((30, 24), P('data', 'replica'), P(None, ('replica', 'data'))),
    # With two uneven dims, one may take the axes of the other.
    ((30, 257, 24), P('data', 'mdl', None), P('mdl', None, 'data')),
    # No other dim is divisible: replicated.
    ((30, 257), P('data', None), P(None, None)),
  ],
)
def test_evenly_divided_spec(shape, spec, expected):
  assert padding.evenly_divided_spec(shape, spec, SIZES) == expected


def test_an_evenly_divided_spec_keeps_even_dims_and_moves_or_drops_other_axes(rng):
  moved = replicated = 0
  for _ in range(1000):
    shape, spec = random_tensor(rng)
    before = spec_axes(spec, len(shape))
    after = spec_axes(padding.evenly_divided_spec(shape, spec, SIZES), len(shape))
    case = (shape, spec, after)
    used = [axis for axes in after for axis in axes]
    assert all(dim % num_parts(axes, SIZES) == 0 for dim, axes in zip(shape, after)), case
    assert len(used) == len(set(used)), case
    assert set(used) <= {axis for axes in before for axis in axes}, case
    for dim, old, new in zip(shape, before, after):
      if dim % num_parts(old, SIZES) == 0:
        assert new[: len(old)] == old, case
      elif not set(old) & set(used):
        # Replicated, so no dim could have taken these axes together with its own.
        assert all(d % num_parts((*axes, *old), SIZES) for d, axes in zip(shape, after)), case
        replicated += 1
      else:
        moved += 1
  assert min(moved, replicated) > 100


@pytest.fixture(scope='module')
def mesh():
  return jax.make_mesh((4,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


def compile_step(mesh, stored_cols, true_cols):
  """Compiles a step on [16, stored_cols], split by columns, that computes on [16, true_cols] and pads the result."""
  sharding = NamedSharding(mesh, P(None, 'data'))
  stored, true = (jax.ShapeDtypeStruct((16, cols), jnp.float32) for cols in (stored_cols, true_cols))

  def step(x):
    x = jax.lax.with_sharding_constraint(padding.unpad(x, true), sharding)
    x = jax.lax.with_sharding_constraint(jnp.sin(x) + 1, sharding)
    return padding.pad(x, stored)

  return jax.jit(step, in_shardings=sharding, out_shardings=sharding).lower(stored).compile()


def test_unpadding_and_padding_again_need_no_collective(mesh):
  assert not COLLECTIVE.search(compile_step(mesh, 12, 10).as_text())


def test_a_sharded_round_trip_keeps_the_values_and_zeroes_the_padding(mesh, rng):
  x = rng.normal(size=(16, 12)).astype(np.float32)  # nonzero padding must not matter
  y = compile_step(mesh, 12, 10)(jax.device_put(x, NamedSharding(mesh, P(None, 'data'))))
  # Absolute: near sin(x) = -1 the sum cancels, which leaves the float32 rounding of numbers near 1.
  np.testing.assert_allclose(y[:, :10], np.sin(x[:, :10].astype(np.float64)) + 1, rtol=0, atol=3e-7)
  np.testing.assert_array_equal(y[:, 10:], 0)
