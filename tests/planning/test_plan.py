"""A plan says what the run then does: on CPUs its memory and FLOPs are those of the compiled training step."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.planning import format_plan, make_plan, parse_target, plan_compiled
from spmd_tasks.planning.compiling import STEPS, read_refusal
from spmd_tasks.planning.costs import program_flops
from spmd_tasks.planning.program import read_program
from spmd_tasks.planning.targets import has_compiler
from spmd_tasks.runtime.parameter_table import bytes_per_device

XLA = 'task.model.stack.block.attention.implementation=xla'  # compiles faster than a kernel


def job_of(name: str, *overrides: str):
  return resolve(name, overrides).build()


@pytest.fixture(scope='module')
def plan():
  return make_plan(job_of('synthetic.Uneven'), parse_target('cpu:8'), steps=STEPS, show_progress=False)


def agrees_with_the_run(plan, job) -> None:
  program = partition_job(job).train_step.compile()  # as programs/train.py does
  memory, step = program.memory_analysis(), plan.report
  assert (step['argument_bytes'], step['temp_bytes']) == (memory.argument_size_in_bytes, memory.temp_size_in_bytes)
  assert step['output_bytes'] - step['alias_bytes'] == memory.output_size_in_bytes - memory.alias_size_in_bytes
  assert step['compiler_flops'] == program.cost_analysis()['flops']
  assert step['roofline']['flops'] == program_flops(read_program(program))
  assert step['temp_bytes'] > 0
  assert plan.fits is None  # nobody says how much memory a CPU has


def test_plan_and_run_agree_on_memory_and_flops(plan):
  agrees_with_the_run(plan, job_of('synthetic.Uneven'))


def test_the_parts_of_the_state_are_those_of_the_model(plan):
  model = partition_job(job_of('synthetic.Uneven'))
  memory = plan.report['memory']
  assert memory['weights'] == bytes_per_device(model.padded_state.weights)
  assert memory['optimizer'] == bytes_per_device(model.padded_state.learner)
  assert sum(memory.values()) == pytest.approx(plan.peak_bytes, rel=0.05)


def test_every_step_is_planned_on_request(plan):
  assert list(plan.to_json()['steps']) == list(STEPS)
  assert plan.report['steps']['eval']['peak_bytes'] < plan.report['steps']['train']['peak_bytes']
  text = format_plan(plan.to_json())
  assert 'memory per device, decode step:' in text


@pytest.mark.parametrize(
  'target, overrides, parts', [('v5p:2x2x1', (), ["target 'v5p:2x2x1' has 4 chips", 'needs 8', "--target 'v5p:2x2x2'"])]
)
def test_chips_that_are_not_the_meshs_are_refused(target, overrides, parts):
  with pytest.raises(UserError) as raised:
    make_plan(job_of('synthetic.Uneven', *overrides), parse_target(target), show_progress=False)
  for part in parts:
    assert part in str(raised.value)


@pytest.mark.parametrize(
  'message, needed, is_temporaries',
  [
    ('RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 55.80G of 15.75G hbm. Exceeded ...', 55.8, False),
    (
      'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (68.03G) exceeds '
      'available HBM (15.75G).',
      68.03,
      True,
    ),
  ],
)
def test_the_compilers_refusal_is_read(message, needed, is_temporaries):
  refused = read_refusal(message)
  assert (refused.needed_bytes, refused.available_bytes) == (round(needed * 2**30), round(15.75 * 2**30))
  assert refused.is_temporaries == is_temporaries


@pytest.mark.skipif(not has_compiler('tpu'), reason="libtpu is not installed: pip install '.[plan-tpu]'")
def test_a_program_that_does_not_fit_is_an_answer(capfd):
  """A matrix of 8 GB on each of 8 v5e, and Adam's two like it."""
  job = job_of('synthetic.Tiny', 'ici_mesh_shape=1,4,2', 'model_dims=65536', 'vocab_size=131072', 'num_layers=1', XLA)
  plan = make_plan(job, parse_target('v5e:2x4'))
  assert plan.fits is False
  assert plan.report['out_of_memory']['available_bytes'] == plan.target.chip.hbm_bytes
  assert plan.peak_bytes > plan.report['hbm_bytes']
  assert 'DOES NOT FIT' in format_plan(plan.to_json())
  captured = capfd.readouterr()
  assert 'plan: compiling the train step for v5e:2x4 needs more memory than there is' in captured.err
  assert len(captured.err.splitlines()) < 5, 'the compiler is kept quiet'


@pytest.mark.parametrize(
  'target, mesh_shape',
  [
    ('cpu:8', (8,)),
    pytest.param(
      'tpu7x:2x2x1', (8,), marks=pytest.mark.skipif(not has_compiler('tpu'), reason='needs libtpu: the extra plan-tpu')
    ),
  ],
)
def test_any_compiled_program_is_planned(target, mesh_shape):
  target = parse_target(target)
  mesh = jax.sharding.Mesh(np.array(target.devices()).reshape(mesh_shape), ('data',))
  rows = jax.ShapeDtypeStruct((8 * 1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P('data')))
  weight = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16, sharding=NamedSharding(mesh, P('data')))
  planned = plan_compiled(jax.jit(lambda x, w: jnp.sum(x @ w, axis=0)).lower(rows, weight).compile(), target)
  assert planned['roofline']['flops'] == 2 * 1024 * 1024 * 2048
  gathers = [each for each in planned['collectives'] if each['kind'] == 'all_gather']
  assert [each['axes'] for each in gathers] == [('data',)]
  assert planned['argument_bytes'] == 2 * (1024 * 1024 + 1024 * 2048 // 8)
  if target.chip.peak_flops:
    assert planned['predicted_step_s'] >= planned['roofline']['flops'] / 1153.5e12
