"""Activations in the memory of the host: what a plan says of a step that the TPU's compiler made with them there."""

import pytest

from spmd_tasks.config import resolve
from spmd_tasks.experiments.synthetic import Tiny
from spmd_tasks.planning import make_plan, parse_target
from spmd_tasks.planning.chips import CHIPS
from spmd_tasks.planning.networks import host_bytes, host_copies
from spmd_tasks.planning.targets import has_compiler
from tests.planning.compiled_steps import program_of

BY_HAND = """\
HloModule by_hand, is_scheduled=true

%condition (c: (s32[], f32[3,25])) -> pred[] {
  %c = (s32[], f32[3,25]{1,0:S(5)}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%body (b: (s32[], f32[3,25])) -> (s32[], f32[3,25]) {
  %b = (s32[], f32[3,25]{1,0:S(5)}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  %stack = f32[3,25]{1,0:S(5)} get-tuple-element(%b), index=1
  %x = f32[1,25]{1,0} constant({...})
  %kept = f32[3,25]{1,0:S(5)} dynamic-update-slice(%stack, %x, %j, %j)
  ROOT %out = (s32[], f32[3,25]{1,0:S(5)}) tuple(%next, %kept)
}

ENTRY %main (a: s32[]) -> f32[1,25] {
  %a = s32[] parameter(0)
  %room = f32[3,25]{1,0:S(5)} custom-call(), custom_call_target="AllocateBuffer"
  %zero = s32[] constant(0)
  %init = (s32[], f32[3,25]{1,0:S(5)}) tuple(%zero, %room)
  %loop = (s32[], f32[3,25]{1,0:S(5)}) while(%init), condition=%condition, body=%body
  %stack = f32[3,25]{1,0:S(5)} get-tuple-element(%loop), index=1
  %start = (f32[3,25]{1,0}, f32[3,25]{1,0:S(5)}, u32[]) copy-start(%stack)
  %done = f32[3,25]{1,0} copy-done(%start)
  %again = f32[1,25]{1,0} dynamic-slice(%stack, %a, %a), dynamic_slice_sizes={1,25}
  %slice-start = ((f32[3,25]{1,0:S(5)}, s32[], s32[]), f32[2,25]{1,0}, u32[]) dynamic-slice-start(%stack, %a, %a), \
dynamic_slice_sizes={2,25}
  %slice-done = f32[2,25]{1,0} dynamic-slice-done(%slice-start)
  ROOT %on_device = f32[1,25]{1,0} dynamic-slice(%done, %a, %a), dynamic_slice_sizes={1,25}
}
"""


def test_the_bytes_of_copies_updates_and_slices_are_counted_once_per_pass():
  copies = host_copies(program_of(BY_HAND))
  assert [(each.start.name, each.count * each.num_bytes, each.is_write) for each in copies] == [
    ('start', 75 * 4, False),
    ('again', 25 * 4, False),
    ('slice-start', 50 * 4, False),
    ('kept', 3 * 25 * 4, True),
  ]
  assert [each.end.name for each in copies if each.end] == ['done', 'slice-done']
  assert host_bytes(copies) == (75 + 25 + 50) * 4


class Offloaded(Tiny):
  """Two layers of width 128 on rows of 256 tokens, the remat policy `attention_offloaded`, data 4."""

  ici_mesh_shape = (1, 4, 1)
  target = 'v5e:2x2'
  num_layers = 2
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
  kept = 2 * num_tokens * 4 * width * 2  # by layer: the input, queries, keys and values in bfloat16
  assert step['roofline']['host_bytes'] == pytest.approx(kept, rel=0.02)
  assert step['roofline']['host_s'] == step['roofline']['host_bytes'] / CHIPS['v5e'].host_bandwidth
  assert step['memory']['activations'] < kept / 4  # of one layer, at most
  # What lies on the device: the compiler's own peak is that of the host's arrays.
  assert step['peak_bytes'] >= step['argument_bytes'] + step['temp_bytes'] + step['program_bytes']
  assert (
    step['peak_bytes'] <= step['argument_bytes'] + step['temp_bytes'] + step['program_bytes'] + step['output_bytes']
  )
  assert any('memory of the host' in line for line in step['assumptions'])
