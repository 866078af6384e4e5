"""Loops over layers whose iterations are independent become maps, and give the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.runtime._loops_as_maps import run_loops_as_maps


def draw_layers(rng):
  """Weights of 3 layers, drawn while an output goes from each layer to the next; and what a loop adds up."""

  def layer(x, rng):
    weight = jax.random.normal(rng, (4, 4))
    return jnp.tanh(x @ weight), {'kernel': weight, 'bias': jnp.zeros(4)}

  first, others = jax.random.split(rng)
  _, weights = jax.jit(lambda keys: jax.lax.scan(layer, jnp.ones((2, 4)), keys))(jax.random.split(others, 3))
  total, _ = jax.lax.scan(lambda total, x: (2 * total + x, None), 0.0, jnp.arange(3.0))
  return {'table': jax.random.uniform(first, (5,)), 'layers': weights, 'total': total}


@pytest.mark.parametrize(('generator', 'num_loops'), [('threefry2x32', 1), ('rbg', 2), ('unsafe_rbg', 2)])
def test_the_numbers_are_those_of_the_loop(generator, num_loops):
  rng = jax.random.key(0, impl=generator)
  traced = jax.jit(draw_layers).trace(rng)
  mapped = jax.jit(lambda rng: run_loops_as_maps(traced, rng))
  jax.tree.map(np.testing.assert_array_equal, mapped(rng), draw_layers(rng))
  assert str(mapped.trace(rng).jaxpr).count('scan[') == num_loops
