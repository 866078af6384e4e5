"""What holds the memory at the peak adds up to the compiler's figure, by arrays with the names of weights."""

import math

import fiddle as fdl
import jax
import optax
import pytest

from spmd_tasks.config import resolve
from spmd_tasks.experiments.synthetic import Tiny
from spmd_tasks.learning import FromOptax
from spmd_tasks.planning import make_plan, parse_target
from spmd_tasks.planning.memory import read_buffers
from spmd_tasks.planning.targets import has_compiler
from tests.planning.compiled_steps import Dense, Mixture, Pipelined, compiled_step

NO_TPU = pytest.mark.skipif(not has_compiler('tpu'), reason="libtpu is not installed: pip install '.[plan-tpu]'")
XLA = 'task.model.stack.block.attention.implementation=xla'  # compiles faster than a kernel


def shard_bytes(tree) -> int:
  leaves = [leaf for leaf in jax.tree.leaves(tree) if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
  return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


ASSIGNED = """\
BufferAssignment:
allocation 0: size 4096, parameter 1, shape |f32[4,200]| at ShapeIndex {}, maybe-live-out:
 value: <0 x @0> (size=4096,offset=0): f32[4,200]{1,0:T(4,128)}
 value: <1 y @0> (size=512,offset=0): s32[1]{0:T(128)}
allocation 1: size 512, output shape is |(f32[2])|, maybe-live-out:
allocation 2: size 64, constant:
allocation 3: size 99, thread-local:
allocation 4: size 10000, preallocated-temp:
 value: <2 a @0> (size=4000,offset=0): f32[1000]{0}
 value: <3 loop{1} (phi) @0> (size=4000,offset=0): f32[1000]{0}
 value: <4 b @0> (size=3000,offset=4000): f32[750]{0}
 value: <5 c @0> (size=6000,offset=4000): f32[1500]{0}
 value: <6 d @0> (size=500,offset=9500): f32[125]{0}
allocation 5: size 777, color 1, preallocated-temp:
allocation 6: size 888, color 5, preallocated-temp:

Total bytes used: 1
"""
RANGES = """\
HloLiveRange (max 9):
  InstructionSequence:
    0:x
    1:a
    2:loop
  BufferLiveRange:
    a{}:1-2
    loop{1}:2-8
    b{}:1-3
    c{}:4-6
    d{}:5-5
  Live ranges at 5 (peak):
    c{}: 6000 bytes (cumulative: 6000 bytes)
"""


def test_the_buffers_of_the_fullest_time_are_found():
  """At time 5 the loop's state, c and d are live: 10,500 bytes in 10,000, of which c has 5,500 alone."""
  buffers = read_buffers(ASSIGNED, RANGES, 'tpu')
  assert {number: buffer.num_bytes for number, buffer in buffers.arguments.items()} == {1: 4096}
  assert buffers.arguments[1].padding_bytes == 4096 - 4 * 200 * 4
  assert (buffers.results, buffers.temp_bytes) == ({'outputs': 512, 'constants': 64}, 10_000)
  assert [(buffer.name, num_bytes) for buffer, num_bytes in buffers.temporaries] == [('loop', 4000), ('c', 6000)]
  assert (buffers.on_chip_bytes, buffers.host_bytes) == (777, 888)
  assert buffers.hbm_bytes == 4096 + 512 + 64 + 10_000
  of_gpu = read_buffers(ASSIGNED, RANGES, 'gpu')  # 1 is memory for collectives there
  assert (of_gpu.temp_bytes, of_gpu.on_chip_bytes, of_gpu.host_bytes) == (10_777, 0, 888)


@pytest.mark.parametrize(
  'experiment', [Dense, *(pytest.param(other, marks=pytest.mark.exhaustive) for other in (Mixture, Pipelined))]
)
def test_the_parts_add_up_to_what_the_compiler_says(experiment):
  plan = make_plan(resolve(experiment, ()).build(), parse_target('cpu:8'))
  _, model, compiled, _ = compiled_step(experiment)
  analysis = compiled.memory_analysis()
  whole = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes
  assert (plan['argument_bytes'], plan['temp_bytes']) == (analysis.argument_size_in_bytes, analysis.temp_size_in_bytes)
  parts = plan['memory']
  assert plan['peak_bytes'] == pytest.approx(whole, rel=0.02)  # nearly all of the output is the donated state
  assert sum(parts.values()) == plan['peak_bytes']
  assert parts['gaps'] < 0.05 * plan['peak_bytes']
  assert parts['weights'] == shard_bytes(model.padded_state.weights)
  assert parts['optimizer'] == shard_bytes(model.padded_state.learner)
  assert parts['batch'] == shard_bytes(model.input_layout.padded)
  named = sum(each['bytes'] for each in plan['largest'])
  assert named == pytest.approx(plan['peak_bytes'] - parts['gaps'], rel=0.05)  # the others are small
  assert all(a['bytes'] >= b['bytes'] for a, b in zip(plan['largest'], plan['largest'][1:]))
  assert {'embedding/table'} <= {each['name'] for each in plan['largest'] if each['part'] == 'weights'}
  kept = [each for each in plan['largest'] if each['part'] == 'activations']
  assert kept
  assert all('jvp(' in each['op_name'] and each['why'] for each in kept)


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
@pytest.mark.exhaustive
@NO_TPU
def test_what_attention_keeps_lies_in_the_memory_of_the_host():
  step = make_plan(resolve(Offloaded, (XLA,)).build(), parse_target('v5e:2x2'))
  num_tokens, width = 8 * 256 // 4, 128
  # By layer: the input, queries, keys, values and results in bfloat16, two numbers of each softmax in float32.
  kept = 3 * num_tokens * (5 * width * 2 + 2 * 4)
  assert step['memory']['activations'] < kept / 3  # of one layer, at most
  assert step['host_bytes'] == pytest.approx(kept, rel=0.01)
  assert step['on_chip_bytes'] > 0
  assert sum(step['memory'].values()) == step['peak_bytes']
  assert step['memory']['batch'] < step['argument_bytes'] < step['peak_bytes']


@pytest.mark.exhaustive
@NO_TPU
def test_tiles_that_pad_a_weight_are_named():
  plan = make_plan(resolve('synthetic.Uneven', (XLA,)).build(), parse_target('v5e:2x4'))
  assert sum(plan['memory'].values()) == plan['peak_bytes']
  norm = next(each for each in plan['largest'] if each['name'] == 'stack/layers/ffn/up/kernel')
  assert 'pads it to tiles of 2 x 128' in norm['why']
  assert norm['padding_bytes'] > norm['bytes'] / 2
