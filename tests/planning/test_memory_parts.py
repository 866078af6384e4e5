"""What holds the memory at the peak adds up to the compiler's figure, and the state's parts are the model's own."""

import math

import jax
import pytest

from spmd_tasks.planning.memory import memory_parts
from tests.planning.compiled_steps import Mixture, Pipelined, compiled_step


def shard_bytes(tree) -> int:
  leaves = [leaf for leaf in jax.tree.leaves(tree) if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
  return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


@pytest.mark.parametrize('experiment', [Mixture, Pipelined])
def test_the_parts_add_up_to_what_the_compiler_says(experiment):
  _, model, compiled, program = compiled_step(experiment)
  parts = memory_parts(compiled.memory_analysis(), program, model)
  analysis = compiled.memory_analysis()
  whole = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
  assert parts['peak_bytes'] == pytest.approx(whole, rel=0.01)  # nearly all of the output is the donated state
  assert sum(parts['memory'].values()) == pytest.approx(parts['peak_bytes'], rel=0.05)
  assert parts['memory']['weights'] == shard_bytes(model.padded_state.weights)
  assert parts['memory']['optimizer'] == shard_bytes(model.padded_state.learner)
  assert parts['memory']['batch'] == shard_bytes(model.input_layout.padded)
  assert all(a['bytes'] >= b['bytes'] for a, b in zip(parts['largest'], parts['largest'][1:]))
