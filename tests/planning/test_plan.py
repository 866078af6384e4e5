"""A plan says what the run then does; test_memory_parts.py compares its memory with the compiled step's.

Why a weight is replicated or padded; the ticks of a pipeline: every microbatch passes every stage once each way, and
the rest is the bubble; and --mode plan as a user runs it.
"""

import collections
import dataclasses
import json

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from spmd_tasks import exit_codes
from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.planning import format_plan, make_plan, parse_target, plan_compiled, targets
from spmd_tasks.planning.chips import CHIPS
from spmd_tasks.planning.plan import STEPS, pipeline_report, read_refusal, weight_rows
from spmd_tasks.planning.targets import has_compiler
from spmd_tasks.runtime.parameter_table import bytes_per_device
from tests import binary

XLA = 'task.model.stack.block.attention.implementation=xla'  # compiles faster than a kernel
ONE_DEVICE = 'ici_mesh_shape=1,1,1'


def job_of(name: str, *overrides: str):
  return resolve(name, overrides).build()


@pytest.fixture(scope='module')
def plan():
  return make_plan(job_of('synthetic.Uneven', ONE_DEVICE), parse_target('cpu:1'), steps=STEPS[:4])


def test_every_step_is_planned_on_request(plan):
  assert list(plan['steps']) == list(STEPS)
  assert plan['fits'] is None  # nobody says how much memory a CPU has
  assert plan['steps']['eval']['peak_bytes'] < plan['steps']['train']['peak_bytes']
  text = format_plan(plan)
  assert 'memory per device, decode step:' in text


def test_chips_that_are_not_the_meshs_are_refused():
  message = "target 'v5p:2x2x1' has 4 chips .* needs 8.*--target 'v5p:2x2x2'"
  with pytest.raises(UserError, match=message):
    make_plan(job_of('synthetic.Uneven'), parse_target('v5p:2x2x1'))


@pytest.mark.parametrize(
  'message, needed',
  [
    ('RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 55.80G of 15.75G hbm. Exceeded ...', 55.8),
    (
      'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (68.03G) exceeds '
      'available HBM (15.75G).',
      68.03,
    ),
  ],
)
def test_the_compilers_refusal_is_read(message, needed):
  refused = read_refusal(message)
  assert (refused.needed_bytes, refused.available_bytes) == (round(needed * 2**30), round(15.75 * 2**30))


@pytest.mark.skipif(not has_compiler('tpu'), reason="libtpu is not installed: pip install '.[plan-tpu]'")
def test_a_program_that_does_not_fit_is_an_answer(capfd):
  """A matrix of 8 GB on each of 8 v5e, and Adam's two like it."""
  job = job_of('synthetic.Tiny', 'ici_mesh_shape=1,4,2', 'model_dims=65536', 'vocab_size=131072', 'num_layers=1', XLA)
  plan = make_plan(job, parse_target('v5e:2x4'))
  assert plan['fits'] is False
  assert plan['out_of_memory']['available_bytes'] == CHIPS['v5e'].hbm_bytes
  assert plan['peak_bytes'] > plan['hbm_bytes']
  assert 'DOES NOT FIT' in format_plan(plan)
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
  gathers = [each for each in planned['collectives'] if each['kind'] == 'all_gather']
  assert [each['axes'] for each in gathers] == [('data',)]
  assert planned['argument_bytes'] == 2 * (1024 * 1024 + 1024 * 2048 // 8)


def test_a_program_for_other_devices_is_refused():
  rows = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(jax.make_mesh((8,), ('data',)), P('data')))
  with pytest.raises(UserError, match="compiled for 'cpu', not for v5p:2x2x1"):
    plan_compiled(jax.jit(jnp.sum).lower(rows).compile(), parse_target('v5p:2x2x1'))


def test_without_compiling_a_plan_has_the_same_keys(plan):
  estimated = make_plan(job_of('synthetic.Uneven', ONE_DEVICE), parse_target('cpu:1'), compiles=False)
  assert estimated.keys() == plan.keys()
  assert estimated['steps']['train'].keys() == plan['steps']['train'].keys()
  assert estimated['weights'] == plan['weights']
  for name in ('weights', 'optimizer', 'batch'):
    assert estimated['memory'][name] == plan['memory'][name]
  assert 'Nothing was compiled, as --no_compile asks' in format_plan(estimated)


def test_only_the_train_step_is_estimated():
  with pytest.raises(UserError, match='--no_compile estimates the train step, not eval'):
    make_plan(job_of('synthetic.Uneven'), parse_target('cpu:8'), steps=('eval',), compiles=False)


# --- weights ---


def rows_of(name: str, *overrides: str):
  job = resolve(name, overrides).build()
  model = partition_job(job, job.experiment.mesh_spec().build_abstract())
  return model, {row['name']: row for row in weight_rows(model)}


@pytest.fixture(scope='module')
def uneven():
  return rows_of('lm.UnevenTiny')


def test_bytes_per_device_add_up(uneven):
  model, rows = uneven
  assert sum(row['bytes_per_device'] for row in rows.values()) == bytes_per_device(model.padded_state.weights)
  sizes = [row['bytes_per_device'] for row in rows.values()]
  assert sizes == sorted(sizes, reverse=True)


def test_padding_is_explained(uneven):
  _, rows = uneven
  kernel = rows['stack/layers/ffn/up/kernel']
  assert kernel['shape'] == [3, 30, 90]
  assert 'dim 2 is padded from 90 to 92, the next multiple of 4 (mdl)' in kernel['why']
  assert kernel['replicated_over'] == []


def test_a_norm_is_replicated_because_the_rules_leave_it_whole(uneven):
  _, rows = uneven
  norm = rows['final_norm/scale']
  assert norm['replicated_over'] == ['data', 'mdl']
  assert norm['why'] == 'replicated over data and mdl; dim 0 (norm): left whole by the axis rules'


def test_an_axis_that_another_dim_has_taken():
  """Grouped-query attention with embed, heads and mlp over one axis: the rule that comes first in the list takes it."""
  rules = resolve('synthetic.Uneven', ()).experiment.axis_rules
  changed = tuple((name, 'mdl' if name == 'embed' else axes) for name, axes in rules)
  _, rows = rows_of('synthetic.Uneven', f'axis_rules={changed!r}')
  kernel = rows['stack/layers/ffn/up/kernel']
  assert kernel['replicated_over'] == ['data']
  assert 'dim 1 (embed): a rule asks for mdl, but mdl already splits another dim' in kernel['why']


# --- pipelines ---


def report_of(name: str, *overrides: str):
  job = resolve(name, overrides).build()
  return pipeline_report(job, partition_job(job, job.experiment.mesh_spec().build_abstract()))


@pytest.mark.parametrize(
  'name, stages, num_forward',
  [('pipeline.StdlibTiny', 4, 1), ('pipeline.CircularTiny', 2, 2), ('pipeline.OneForwardOneBackwardTiny', 4, 2)],
)
def test_every_microbatch_passes_every_stage_and_the_rest_is_the_bubble(name, stages, num_forward):
  """1F1B runs forward twice: for the loss, and again shortly before each backward pass. A circular one repeats."""
  report = report_of(name)
  assert (report['stages'], len(report['ticks'])) == (stages, stages)
  for ticks in report['ticks']:
    assert len(ticks) == report['num_ticks']
    work = collections.Counter(half.partition('.')[0] for tick in ticks for half in (tick or '').split())
    num_backward = report['repeats']
    assert work == {
      **{f'F{m}': num_forward for m in range(report['microbatches'])},
      **{f'B{m}': num_backward for m in range(report['microbatches'])},
    }
  ticks = [tick for stage in report['ticks'] for tick in stage]
  assert report['bubble'] == pytest.approx(ticks.count(None) / len(ticks))


def test_a_model_without_stages_has_no_pipeline():
  assert report_of('synthetic.Uneven') is None
  assert report_of('pipeline.StdlibTiny', 'ici_mesh_shape=1,1,4,2') is None


# --- the command ---

KEYS = {
  *('fits', 'hbm_bytes', 'peak_bytes', 'argument_bytes', 'temp_bytes', 'predicted_step_s', 'predicted_mfu'),
  *('collectives', 'weights', 'assumptions', 'experiment', 'target', 'mesh', 'memory', 'pipeline'),
}


def run_plan(*flags: object) -> int:
  return binary.run_in_process('--exp', 'synthetic.Uneven', '--mode', 'plan', *flags)


def test_the_command_prints_a_plan_writes_it_and_fails_where_it_does_not_fit(tmp_path, monkeypatch, capsys):
  """Devices whose memory does not hold the step of synthetic.Uneven."""
  monkeypatch.setattr(targets, 'CPU', dataclasses.replace(targets.CPU, hbm_bytes=60_000))
  code = run_plan('--target', 'cpu', '--no_compile', '--plan_out', tmp_path / 'plan')
  printed = capsys.readouterr().out
  assert code == exit_codes.FAILED
  assert 'DOES NOT FIT' in printed
  assert printed.startswith('synthetic.Uneven on cpu:8: 8 devices, mesh data 2 x mdl 4')
  written = json.loads((tmp_path / 'plan' / 'plan.json').read_text())
  assert written.keys() >= KEYS
  assert written['fits'] is False
  assert printed == format_plan(written) + '\n'
  page = (tmp_path / 'plan' / 'plan.html').read_text()
  assert 'synthetic.Uneven on cpu:8' in page


def test_a_pod_is_planned_without_its_compiler(monkeypatch, capsys):
  """512 chips in seconds: --no_compile, and the default if the compiler is not installed."""
  for module in ('mode', 'plan'):
    monkeypatch.setattr(f'spmd_tasks.planning.{module}.has_compiler', lambda platform: False)
  monkeypatch.setattr(targets, '_devices', None)  # a call would raise
  assert binary.run_in_process('--exp', 'lm.Llama70B', '--mode', 'plan') == exit_codes.OK
  printed = capsys.readouterr().out
  assert printed.startswith('lm.Llama70B on v5p:8x8x8: 512 devices')
  assert 'products limit it' in printed
  assert 'estimated in' in printed
  assert 'Nothing was compiled, because the compiler for v5p:8x8x8 is not installed (pip install' in printed


def test_bubbles_are_a_term_of_their_own():
  """A stage wastes P - 1 ticks. With twice as many microbatches each tick has half of the work."""
  wasted, others = [], []
  for num_microbatches in (4, 8):
    job = resolve('pipeline.StdlibTiny', (f'num_microbatches={num_microbatches}',)).build()
    work = {term['name']: term['work'] for term in make_plan(job, parse_target('v5e:2x4'), compiles=False)['terms']}
    wasted.append(work['bubbles'])
    others.append(work['products'])
  assert wasted[0] == pytest.approx(2 * wasted[1])
  assert others[0] == pytest.approx(others[1])


@pytest.mark.parametrize(
  'flags, parts',
  [
    ((), ['no target is named', '--target']),
    (('--target', 'cpu', '--plan_steps', 'train,serve'), ["'serve', which is no step"]),
  ],
)
def test_what_cannot_be_planned_is_one_sentence(flags, parts, capsys):
  assert run_plan(*flags) == exit_codes.USAGE
  message = capsys.readouterr().err
  for part in parts:
    assert part in message
  assert message.count('\n') == 1


def test_flags_of_plan_in_another_mode_are_refused(tmp_path, capsys):
  flags = ('--exp', 'synthetic.Uneven', '--mode', 'train', '--job_log_dir', tmp_path / 'job', '--target', 'cpu')
  assert binary.run_in_process(*flags) == exit_codes.USAGE
  assert '--target is for --mode plan' in capsys.readouterr().err
  assert not (tmp_path / 'job').exists()


@pytest.mark.slow
def test_plans_need_no_tensorflow():
  flags = ['--exp', 'synthetic.Tiny', '--mode', 'plan', '--target', 'cpu', '--no_compile']
  block = "import sys; sys.modules['tensorflow'] = None; from spmd_tasks import main"
  done = binary.run_python(f'{block}; sys.exit(main.run({flags}))')
  assert done.returncode == exit_codes.OK, done.stderr
  assert 'memory per device:' in done.stdout
