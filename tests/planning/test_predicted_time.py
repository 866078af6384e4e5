"""Predicted times: a schedule by hand, a real TPU program (tests/data), and what is said where nothing is known.

The TPU program is the training step of lm.StdlibTiny for v5e:2x4 (libtpu 0.0.42.1), bfloat16, remat `dots_no_batch`, on
the mesh data 4 x mdl 2, without the tables of source lines.
"""

import dataclasses
import functools
import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.layers.quantized_products import RECIPES, quantized_product
from spmd_tasks.planning.chips import CHIPS, CPU, Chip, rate_of
from spmd_tasks.planning.collectives import collectives
from spmd_tasks.planning.costs import flops_by_type
from spmd_tasks.planning.memory import memory_parts
from spmd_tasks.planning.program import Program, read_program
from spmd_tasks.planning.targets import has_compiler, parse_target
from spmd_tasks.planning.time import predict_time
from spmd_tasks.runtime.flops import count_matmul_flops
from spmd_tasks.runtime.parameter_table import bytes_per_device
from tests.planning.compiled_steps import Mixture, compiled_step, program_flops, program_of

CHIP = Chip(
  name='test', platform='tpu', peak_flops=1e6, hbm_bandwidth=1e6, clock_hz=1000.0, ici_bandwidth=100.0, ici_links=4,
  dcn_bandwidth=10.0, torus_dims=2,
)  # fmt: skip


def tpu_mesh(shape: dict[str, int], torus: tuple[int, ...]) -> Any:
  size = int(np.prod(torus))
  coordinates = [tuple(map(int, np.unravel_index(index, torus))) for index in range(size)]
  devices = [SimpleNamespace(platform='tpu', slice_index=None, coords=coords) for coords in coordinates]
  array = np.array(devices).reshape(list(shape.values()))
  return SimpleNamespace(devices=array, axis_names=tuple(shape), shape=shape, size=size)


PROGRAM = """\
HloModule by_hand, is_scheduled=true, num_partitions=4

%condition (c: (s32[], f32[25])) -> pred[] {
  %c = (s32[], f32[25]{0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%fused (p: f32[25]) -> f32[25] {
  %p = f32[25]{0} parameter(0)
  ROOT %m = f32[25]{0} negate(%p)
}

%body (b: (s32[], f32[25])) -> (s32[], f32[25]) {
  %b = (s32[], f32[25]{0}) parameter(0)
  %j = s32[] get-tuple-element(%b), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one), backend_config={"window_config":{"estimated_cycles":"9223372036854775807"}}
  %x = f32[25]{0} get-tuple-element(%b), index=1
  %start = (f32[25]{0}, f32[50]{0}) all-gather-start(%x), replica_groups={{0,1},{2,3}}, dimensions={0}
  %work = f32[25]{0} fusion(%x), kind=kLoop, calls=%fused, backend_config={"window_config":{"estimated_cycles":"400"}}
  %done = f32[50]{0} all-gather-done(%start)
  %sum = f32[25]{0} all-reduce(%work), replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %out = (s32[], f32[25]{0}) tuple(%next, %sum)
}

ENTRY %main (a: f32[25]) -> f32[25] {
  %a = f32[25]{0} parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], f32[25]{0}) tuple(%zero, %a)
  %loop = (s32[], f32[25]{0}) while(%init), condition=%condition, body=%body
  %result = f32[25]{0} get-tuple-element(%loop), index=1
  %q = f32[2,100,10]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  %kernel = f32[2,100,10]{2,1,0} custom-call(%q, %q, %q), custom_call_target="tpu_custom_call", \
metadata={op_name="jit(f)/splash_mha_fwd"}
  ROOT %copied.remat = f32[25]{0} copy(%result)
}
"""


def test_a_schedule_by_hand():
  """Each pass: 0.4 s of work hides 0.4 of the 1 s that 100 bytes take; the sum of 100 bytes over two takes 1 s."""
  program = program_of(PROGRAM)
  mesh = tpu_mesh({'data': 2, 'mdl': 2}, (2, 2))
  found = collectives(program, mesh)
  prediction = predict_time(program, found, CHIP, mesh, model_flops=1e6, num_tokens=80)
  seconds = prediction['predicted_step_s']
  products = 2 * 2 * (2 * 100 * 10) * 100 / 2  # scores and values, of which the causal mask leaves half
  kernel = products / (0.6 * CHIP.peak_flops)
  small = (2 * 100 + 4 * 9) / 1e6  # bytes over bandwidth: the copy, and the condition, which runs 4 times
  assert prediction['time_by_kind'] == pytest.approx(
    {'cycles': 1.2, 'ici': 3 * (0.6 + 1), 'kernel': kernel, 'roofline': small}, 0.02
  )
  assert seconds == pytest.approx(sum(prediction['time_by_kind'].values()))
  assert prediction['hidden_s'] == pytest.approx(3 * 0.4)
  assert prediction['roofline']['ici_s'] == prediction['roofline']['seconds'] == pytest.approx(6)
  assert prediction['predicted_step_low_s'] == pytest.approx(seconds - 1.2 / 4)  # more than its roofline
  assert prediction['predicted_step_high_s'] == pytest.approx(seconds + prediction['hidden_s'] + 1.2 / 4 + kernel)
  assert [(each['name'], each['count']) for each in prediction['top_operations'][:3]] == [
    ('sum', 3),
    ('start', 3),
    ('work', 3),
  ]
  assert prediction['predicted_mfu'] == pytest.approx(1e6 / (seconds * 4 * CHIP.peak_flops))
  assert prediction['tokens_per_s_per_chip'] == pytest.approx(80 / seconds / 4)
  text = ' '.join(prediction['assumptions'])
  for words in ('cycles at 1e-06 GHz', '60% (assumed) of peak', 'without latency', 'count at most their bytes: next'):
    assert words in text


DOT = """\
HloModule dot, is_scheduled=true

ENTRY %main (a: f32[100,50], b: f32[50,100]) -> f32[100,100] {
  %a = f32[100,50]{1,0} parameter(0)
  %b = f32[50,100]{1,0} parameter(1)
  ROOT %dot = f32[100,100]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
backend_config={"window_config":{"estimated_cycles":"400"}}
}
"""


ROWS = """\
HloModule rows, is_scheduled=true

%fused (table: f32[10,50], ids: s32[40]) -> f32[40,50] {
  %table = f32[10,50]{1,0} parameter(0)
  %ids = s32[40]{0} parameter(1)
  ROOT %rows = f32[40,50]{1,0} gather(%table, %ids), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, \
index_vector_dim=1, slice_sizes={1,50}
}

ENTRY %main (table: f32[10,50], ids: s32[40]) -> f32[40,50] {
  %table = f32[10,50]{1,0} parameter(0)
  %ids = s32[40]{0} parameter(1)
  ROOT %gather = f32[40,50]{1,0} fusion(%table, %ids), kind=kCustom, calls=%fused, \
backend_config={"window_config":{"estimated_cycles":"9223372036854775807"}}
}
"""


def test_rows_that_sparse_cores_gather_take_their_bytes():
  """Each row is read and written, also one that is read several times."""
  prediction = predict_time(program_of(ROWS), (), CHIP, tpu_mesh({'data': 1}, (1,)))
  assert prediction['time_by_kind'] == pytest.approx({'kernel': 2 * 40 * 50 * 4 / (0.6 * CHIP.hbm_bandwidth)})
  assert 'gather and copy rows at 60% (assumed)' in ' '.join(prediction['assumptions'])


def test_a_lookup_reads_rows_of_the_dtype_that_is_stored():
  """Also where the fusion converts the table first, of which XLA computes the rows that are taken."""
  text = ROWS.replace('table: f32[10,50]', 'table: bf16[1000,50]').replace('f32[10,50]{1,0} p', 'bf16[1000,50]{1,0} p')
  text = text.replace('  ROOT %rows', '  %wide = f32[1000,50]{1,0} convert(%table)\n  ROOT %rows')
  text = text.replace('gather(%table', 'gather(%wide').replace('9223372036854775807', '400')
  prediction = predict_time(program_of(text), (), CHIP, tpu_mesh({'data': 1}, (1,)))
  assert prediction['roofline']['hbm_bytes'] == 40 * 50 * (2 + 4) + 40 * 4


@pytest.mark.parametrize('dtypes, peak', [('f32 f32', 1e6), ('s8 s8', 2e6), ('f8e4m3fn f8e5m2', 4e6), ('s8 bf16', 1e6)])
def test_a_product_runs_at_peak_at_best_whatever_the_compiler_estimates(dtypes, peak):
  """At that of the wider of its operands' types."""
  chip, (a, b) = dataclasses.replace(CHIP, int8_flops=2e6, fp8_flops=4e6), dtypes.split()
  text = DOT.replace('f32[100,50]', f'{a}[100,50]').replace('f32[50,100]', f'{b}[50,100]')
  prediction = predict_time(program_of(text), (), chip, tpu_mesh({'data': 1}, (1,)))
  seconds = 2 * 100 * 50 * 100 / peak
  assert prediction['time_by_kind'] == pytest.approx({'cycles': max(seconds, 400 / CHIP.clock_hz)})
  assert prediction['roofline']['compute_s'] == pytest.approx(seconds)


@pytest.mark.parametrize(
  'call, flops',
  [
    ('custom-call(%q, %k), custom_call_target="__cudnn$fmhaScaleBiasSoftmax"', 2 * 2 * 2 * 100 * 6 * 10 * 100 / 2),
    ('custom-call(%q, %k), custom_call_target="__cudnn$fmhaSoftmaxBackward"', 5 * 2 * 2 * 100 * 6 * 10 * 100 / 2),
    (
      'custom-call(%rows, %matrices), custom_call_target="__gpu$xla.gpu.triton", '
      'metadata={op_name="jit(f)/jvp(grouped_matmul)/pallas_call"}',
      2 * 64 * 10 * 20,
    ),
    (
      'custom-call(%rows, %wide), custom_call_target="__gpu$xla.gpu.triton", '
      'metadata={op_name="jit(f)/transpose(jvp(grouped_matmul_of_weights))/pallas_call"}',
      2 * 64 * 10 * 20,
    ),
    (
      'custom-call(%starts, %layer, %tables, %queries, %pages), custom_call_target="__gpu$xla.gpu.triton", '
      'metadata={op_name="jit(f)/paged_attention/pallas_call"}',
      2 * 2 * (2 * 2 * 6 * 10) * (3 * 4),
    ),
  ],
)
def test_kernels_of_a_gpu_count_their_products(call, flops):
  """Queries and keys of cuDNN are [B, T, H, K]; rows [64, 10] times 4 matrices [10, 20], or rows [64, 20].

  Of 2 rows, each has 3 of the 8 blocks of 4 entries in its table.
  """
  result = 'f32[4,10,20]{2,1,0}' if 'of_weights' in call else 'f32[64,20]{1,0}'
  if 'paged' in call:
    result = '(f32[2,2,1,6]{3,2,1,0}, f32[2,2,1,6]{3,2,1,0}, f32[2,2,1,6,10]{4,3,2,1,0})'
  text = f"""\
HloModule kernels, is_scheduled=true

ENTRY %main (q: f32[2,100,6,10], k: f32[2,100,2,10], rows: f32[64,10], matrices: f32[4,10,20]) -> f32[64,20] {{
  %q = f32[2,100,6,10]{{3,2,1,0}} parameter(0)
  %k = f32[2,100,2,10]{{3,2,1,0}} parameter(1)
  %rows = f32[64,10]{{1,0}} parameter(2)
  %matrices = f32[4,10,20]{{2,1,0}} parameter(3)
  %wide = f32[64,20]{{1,0}} parameter(4)
  %starts = s32[2]{{0}} parameter(5)
  %layer = s32[1]{{0}} parameter(6)
  %tables = s32[2,3]{{1,0}} parameter(7)
  %queries = f32[2,2,6,10]{{3,2,1,0}} parameter(8)
  %pages = f32[3,8,2,4,10]{{4,3,2,1,0}} parameter(9)
  ROOT %kernel = {result} {call}
}}
"""
  chip = dataclasses.replace(CHIPS['h200'], hbm_bandwidth=1e18)
  prediction = predict_time(program_of(text), (), chip, tpu_mesh({'data': 1}, (1,)))
  rate = rate_of(chip, 'attention' if 'cudnn' in call else 'grouped').value
  assert prediction['time_by_kind'] == pytest.approx({'kernel': flops / (rate * chip.peak_flops)})


@functools.cache
def tpu_step() -> tuple[Program, Any]:
  text = gzip.decompress((Path(__file__).parents[1] / 'data/tpu_train_step.hlo.gz').read_bytes()).decode()
  settings = ['ici_mesh_shape=1,4,2', 'dtype=bfloat16', 'remat_policy=dots_no_batch']
  return program_of(text), partition_job(resolve('lm.StdlibTiny', settings).build())


def test_a_real_tpu_program():
  program, _ = tpu_step()
  mesh = tpu_mesh({'replica': 1, 'data': 4, 'mdl': 2}, (2, 4))
  found = collectives(program, mesh)
  assert (program.unknown_loops, list(program.trip_counts.values())) == ((), [4, 4])
  # Every layer gathers 7 matrices of 128 x 64 (attention, x4) or 128 x 192 (ffn, x3), halves along mdl, twice.
  matrices = 4 * 128 * 128 / 2 + 3 * 128 * 384 / 2
  gathered = sum(
    each.bytes_per_step for each in found if each.kind == 'all_gather' and each.axes == ('data',) and each.count == 4
  )
  assert gathered == 2 * 4 * 3 / 4 * matrices * 2
  scattered = sum(each.bytes_per_step for each in found if each.kind == 'reduce_scatter')
  table = 260 * 128 / 2  # float32, of the lookup and of the logits; without `out`, which is summed whole
  assert scattered == 3 / 4 * (4 * (matrices - 128 * 128 / 2) * 2 + 2 * table * 4)
  assert {each.network for each in found} == {'ici'}
  assert sum(each.is_asynchronous for each in found) == 9
  prediction = predict_time(program, found, CHIPS['v5e'], mesh)
  low, high = prediction['predicted_step_low_s'], prediction['predicted_step_high_s']
  assert 0 < low <= (prediction['predicted_step_s'] or 0) <= high
  cycles = sum(count * (each.estimated_cycles or 0) for each, count in program.steps())
  assert prediction['time_by_kind']['cycles'] == pytest.approx(cycles / CHIPS['v5e'].clock_hz)


def test_flops_of_a_tpu_program_are_those_of_the_step():
  program, model = tpu_step()
  assert program_flops(program) * 8 == pytest.approx(step_flops(model), rel=0.03)


def step_flops(model: Any) -> int:
  batch = {name: spec for name, spec in model.input_layout.padded.items()}
  return count_matmul_flops(
    lambda state, batch: model.task.train_step(model.weight_specs, state, batch), model.abstract_state, batch
  )


def test_memory_of_a_tpu_program():
  """The figures are those of memory_analysis() when the program was compiled."""
  program, model = tpu_step()
  analysis = SimpleNamespace(
    generated_code_size_in_bytes=4_005_376, peak_memory_in_bytes=10_774_528, serialized_buffer_assignment_proto=b''
  )
  parts = memory_parts(analysis, program, model)
  assert parts['peak_bytes'] == 10_774_528 + 4_005_376
  assert sum(parts['memory'].values()) == pytest.approx(parts['peak_bytes'], rel=0.05)
  state = sum(parts['memory'][name] for name in ('weights', 'optimizer', 'other_state'))
  assert parts['padding_bytes'] == pytest.approx(
    state - bytes_per_device(model.padded_state), rel=1e-3
  )  # tiles of 8 x 128


def test_on_cpus_nothing_is_predicted_and_that_is_said():
  step = compiled_step(Mixture)
  found = collectives(step.program, step.model.mesh)
  prediction = predict_time(step.program, found, CPU, step.model.mesh, model_flops=1e9)
  assert (prediction['predicted_step_s'], prediction['predicted_mfu'], prediction['predicted_step_low_s']) == (
    None,
    None,
    None,
  )
  assert prediction['roofline']['flops'] > 0
  assert prediction['assumptions'][0] == 'No published figures of cpu are used, so no time is predicted.'
  assert any('loop(s) whose length the program decides as it runs' in line for line in prediction['assumptions'])


@pytest.mark.skipif(not has_compiler('tpu'), reason="libtpu is not installed: pip install '.[plan-tpu]'")
@pytest.mark.parametrize(
  'target, recipe, types', [('v6e:2x2', 'int8', {'s8'}), ('tpu7x:2x2x1', 'fp8_full', {'f8e4m3fn', 'f8e5m2'})]
)
def test_a_tpu_multiplies_quantized_numbers(target, recipe, types):
  """All three products of a Linear, and not numbers that were converted back."""
  product = functools.partial(quantized_product, RECIPES[recipe], 1)
  gradients = jax.grad(lambda x, kernel: jnp.sum(jnp.square(product(x, kernel))), argnums=(0, 1))
  sharding = jax.sharding.SingleDeviceSharding(parse_target(target).devices()[0])
  like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
  program = read_program(jax.jit(gradients).lower(like(4, 64, 256), like(256, 512)).compile())
  found = [(dtype, count * n) for each, count in program.steps() for dtype, n in flops_by_type(each).items()]
  assert {dtype for dtype, _ in found} == types
  assert sum(n for _, n in found) == 3 * 2 * 256 * 256 * 512
