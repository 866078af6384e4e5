"""Compiled programs: shapes, loops, and how often things run."""

import jax
import jax.numpy as jnp
import pytest

from spmd_tasks.layers.moe import FURTHER_PASSES_NAME
from spmd_tasks.planning.program import read_program
from tests.planning.compiled_steps import program_of


@pytest.mark.parametrize(
  'text, num_bytes',
  [
    ('f32[3,200]{1,0:T(8,128)}', 2400),
    ('bf16[200,3]{0,1:T(8,128)(2,1)}', 1200),  # dim 0 is minor
    ('f32[4,1000]{1,0:T(1024)S(1)}', 16000),
    ('s4[7]{0:E(4)}', 4),
    ('(f32[2]{0}, /*index=1*/(s32[], pred[3]), token[])', 8 + 4 + 3),
  ],
)
def test_shapes(text, num_bytes):
  shape = program_of(f'HloModule m\n\nENTRY %main {{\n  ROOT %p = {text} parameter(0)\n}}').module.entry.root.shape
  assert shape.num_bytes == num_bytes


PROGRAM = """\
HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, num_partitions=4

%condition (arg: (s32[], f32[8,8])) -> pred[] {
  %arg = (s32[], f32[8,8]{1,0}) parameter(0)
  %bound = s32[] constant(10)
  %counter = s32[] get-tuple-element(%arg), index=0
  ROOT %less = pred[] compare(%counter, %bound), direction=LT
}

%fused (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %dot = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (arg.1: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %arg.1 = (s32[], f32[8,8]{1,0}) parameter(0)
  %counter.1 = s32[] get-tuple-element(%arg.1), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%counter.1, %two)
  %x = f32[8,8]{1,0} get-tuple-element(%arg.1), index=1
  %f = f32[8,8]{1,0} fusion(%x), kind=kOutput, calls=%fused, metadata={op_name="jit(f)/while/dot \\"x\\""}, \
backend_config={"window_config":{"estimated_cycles":"1234"}}
  ROOT %out = (s32[], f32[8,8]{1,0}) tuple(%next, %f)
}

ENTRY %main (a: f32[8,8]) -> (f32[8,8]) {
  %a = f32[8,8]{1,0} parameter(0), sharding={devices=[4,1]<=[4]}
  %scalar = f32[] parameter(1)
  %one = s32[] constant(1)
  %init = (s32[], f32[8,8]{1,0}) tuple(%one, %a)
  %loop = (s32[], f32[8,8]{1,0}) while(%init), condition=%condition, body=%body
  %result = f32[8,8]{1,0} get-tuple-element(%loop), index=1
  %kernel = f32[8,8]{1,0} custom-call(f32[8,8]{1,0} %result), custom_call_target="tpu_custom_call", \
frontend_attributes={settings={
"block":"{\\"q\\": 1}"
}}, metadata={op_name="kernel"}
  ROOT %tuple = (f32[8,8]{1,0}) tuple(%kernel)
}
"""


def test_a_program_with_a_loop():
  program = program_of(PROGRAM)
  module = program.module
  assert module.entry.name == 'main'
  assert {loop.name: trips for loop, trips in program.trip_counts.items()} == {'loop': 5}  # 1, 3, 5, 7, 9
  assert {each.name: times for each, times in program.executions.items()} == {'main': 1, 'body': 5, 'condition': 6}
  by_name = {each.name: each for each in module.home}
  fusion, kernel = by_name['f'], by_name['kernel']
  assert fusion.op_name == 'jit(f)/while/dot "x"'
  assert (kernel.attribute('custom_call_target'), [each.name for each in kernel.operands], kernel.op_name) == (
    'tpu_custom_call',
    ['result'],
    'kernel',
  )


@pytest.mark.parametrize(
  'change, trips',
  [
    (('direction=LT', 'direction=LE'), 5),
    (('compare(%counter,', 'compare(%arg#0,'), 5),  # as jax 0.12 writes it
    (('compare(%counter, %bound), direction=LT', 'compare(%bound, %counter), direction=GT'), 5),
    (('body=%body\n', 'body=%body, backend_config={"known_trip_count":{"n":"3"}}\n'), 3),
    (('s32[] add(%counter.1, %two)', 's32[] multiply(%counter.1, %two)'), 4),  # 1, 2, 4, 8
    (('%one = s32[] constant(1)', '%one = s32[] convert(%scalar)'), None),  # decided by an argument
  ],
)
def test_trip_counts(change, trips):
  program = program_of(PROGRAM.replace(*change))
  assert list(program.trip_counts.values()) == [trips]


def test_loops_for_what_did_not_fit_experts_buffers_count_none():
  """Their length follows from the routing; under balanced routing it is none."""
  of_unknown_length = PROGRAM.replace('%one = s32[] constant(1)', '%one = s32[] convert(%scalar)')
  named = f'body=%body, metadata={{op_name="jit(f)/{FURTHER_PASSES_NAME}/while"}}\n'
  program = program_of(of_unknown_length.replace('body=%body\n', named))
  assert {each.name: times for each, times in program.executions.items()} == {'main': 1, 'body': 0, 'condition': 1}


def layers(x, stack, is_odd):
  """A scan over [L, ...] of a scan of 3, in which a branch is taken."""

  def layer(x, kernel):
    x = jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ kernel), x)
    return jax.lax.cond(is_odd, lambda x: x @ kernel @ kernel, lambda x: x, x), None

  return jax.lax.scan(layer, x, stack)[0].sum()


def test_trip_counts_of_what_xla_compiled():
  arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((16, 8), 'f4'), ((5, 8, 8), 'f4'), ((), '?'))]
  program = read_program(jax.jit(layers).lower(*arguments).compile())
  assert {5, 3} <= set(program.trip_counts.values())
