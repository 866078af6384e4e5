"""What holds the memory at the peak adds up to the compiler's figure, and the state's parts are the model's own.

Also of a step that the TPU's compiler made with activations in the memory of the host.
"""

import math

import fiddle as fdl
import jax
import optax
import pytest

from spmd_tasks.config import resolve
from spmd_tasks.experiments.synthetic import Tiny
from spmd_tasks.learning import FromOptax
from spmd_tasks.planning import make_plan, parse_target
from spmd_tasks.planning.memory import memory_parts
from spmd_tasks.planning.targets import has_compiler
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


class Offloaded(Tiny):
  """Three layers of width 128 on rows of 256 tokens, the remat policy `attention_offloaded`, data 4."""

  ici_mesh_shape = (1, 4, 1)
  num_layers = 3  # libtpu unrolls loops of two, and 0.0.50 then writes a layer twice
  model_dims = 128
  hidden_dims = 128
  num_heads = 1
  seq_len = 256
  vocab_size = 256
  dtype = 'bfloat16'
  remat_policy = 'attention_offloaded'

  def optimizer(self):
    return fdl.Config(FromOptax, factory=optax.sgd, learning_rate=0.1)  # compiles sooner


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler('tpu'), reason="libtpu is not installed: pip install '.[plan-tpu]'")
def test_what_attention_keeps_lies_in_the_memory_of_the_host():
  job = resolve(Offloaded, ('task.model.stack.block.attention.implementation=xla',)).build()
  step = make_plan(job, parse_target('v5e:2x2'))
  num_tokens, width = 8 * 256 // 4, 128
  kept = 3 * num_tokens * 4 * width * 2  # by layer: the input, queries, keys and values in bfloat16
  assert step['memory']['activations'] < kept / 3  # of one layer, at most
  # What lies on the device: the compiler's own peak is that of the host's arrays.
  least = step['argument_bytes'] + step['temp_bytes'] + step['program_bytes']
  assert least <= step['peak_bytes'] <= least + step['output_bytes']
