"""Programs for fake devices have no constraints that leave everything to the compiler; others stay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.distributed import _open_shardings

MESH_AXES = ('stage', 'data')


def lower(function, platform=None):
  """The text of a program whose `stage` is manual, as in a pipeline."""
  mesh = jax.make_mesh((2, 2), MESH_AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
  spec = jax.P('stage')
  mapped = jax.jit(jax.shard_map(function, mesh=mesh, axis_names={'stage'}, in_specs=spec, out_specs=spec))
  traced = mapped.trace(jnp.ones((4, 4)))
  return traced.lower() if platform is None else traced.lower(lowering_platforms=(platform,))


def num_constraints(function, platform=None):
  return lower(function, platform).as_text().count('sdy.sharding_constraint')


def compute(x):
  return jnp.sin(x) * 2


def constrain(x):
  return jax.lax.with_sharding_constraint(compute(x), jax.P('data'))


def test_open_constraints_are_left_out():
  assert num_constraints(compute) == 0


def test_constraints_that_name_an_axis_stay():
  assert num_constraints(constrain) == 1


def test_programs_for_other_platforms_are_those_of_jax():
  assert num_constraints(compute, 'tpu') >= 2


def test_the_numbers_are_the_same():
  x = np.arange(16, dtype=np.float32).reshape(4, 4)
  np.testing.assert_array_equal(lower(constrain).compile()(x), jax.jit(compute)(x))


@pytest.mark.filterwarnings('error')
def test_a_jax_without_the_function_stays_as_it_is(monkeypatch):
  monkeypatch.setattr(_open_shardings, '_LOWER', 'lower_by_another_name')
  _open_shardings.leave_out_open_shardings()
