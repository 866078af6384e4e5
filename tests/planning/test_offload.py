"""Activations in the memory of the host: what a plan says of a step that the TPU's compiler made with them there."""

import pytest

from spmd_tasks.config import resolve
from spmd_tasks.experiments.synthetic import Tiny
from spmd_tasks.planning import make_plan, parse_target
from spmd_tasks.planning.chips import CHIPS
from spmd_tasks.planning.targets import has_compiler


class Offloaded(Tiny):
  """Four layers of width 128 on rows of 256 tokens, the remat policy `attention_offloaded`, data 4."""

  ici_mesh_shape = (1, 4, 1)
  target = 'v5e:2x2'
  num_layers = 4  # libtpu unrolls loops of two, and 0.0.50 then writes a layer twice
  model_dims = 128
  hidden_dims = 128
  num_heads = 1
  seq_len = 256
  vocab_size = 256
  dtype = 'bfloat16'
  remat_policy = 'attention_offloaded'


@pytest.mark.skipif(not has_compiler('tpu'), reason="libtpu is not installed: pip install '.[plan-tpu]'")
def test_what_attention_keeps_lies_in_the_memory_of_the_host():
  job = resolve(Offloaded, ('task.model.stack.block.attention.implementation=xla',)).build()
  plan = make_plan(job, parse_target('v5e:2x2'), show_progress=False)
  step = plan.report
  num_tokens, width = 8 * 256 // 4, 128
  kept = 4 * num_tokens * 4 * width * 2  # by layer: the input, queries, keys and values in bfloat16
  assert step['roofline']['host_bytes'] == pytest.approx(kept, rel=0.02)
  assert step['roofline']['host_s'] == step['roofline']['host_bytes'] / CHIPS['v5e'].host_bandwidth
  assert step['memory']['activations'] < kept / 4  # of one layer, at most
  # What lies on the device: the compiler's own peak is that of the host's arrays.
  assert step['peak_bytes'] >= step['argument_bytes'] + step['temp_bytes'] + step['program_bytes']
  assert (
    step['peak_bytes'] <= step['argument_bytes'] + step['temp_bytes'] + step['program_bytes'] + step['output_bytes']
  )
  assert any('memory of the host' in line for line in step['assumptions'])
