"""The report of a plan has its figures."""

import pytest

from spmd_tasks.config import resolve
from spmd_tasks.planning import format_plan, make_plan, parse_target

GIB = 2**30
TIMES = {
  'predicted_step_s': 3.91,
  'predicted_step_low_s': 3.2,
  'predicted_step_high_s': 4.9,
  'predicted_mfu': 0.387,
  'tokens_per_s_per_chip': 8380.0,
  'hidden_s': 0.1,
  'roofline': {
    **dict.fromkeys(('dcn_bytes', 'host_bytes', 'dcn_s', 'host_s'), 0.0),
    **{'flops': 2.98e14, 'hbm_bytes': 1.6e12, 'ici_bytes': 4.1e10, 'compute_s': 1.51, 'hbm_s': 1.95, 'ici_s': 0.45},
  },
  'time_by_kind': {'cycles': 3.2, 'kernel': 0.42, 'ici': 0.29},
}
OPERATION = {'name': 'fusion.231', 'op_name': 'jit(f)/stack/softmax', 'seconds': 0.93, 'share': 0.24, 'count': 24}


@pytest.fixture(scope='module')
def plan():
  """A plan for CPUs, with memory and times as if it were for a TPU, which it does not fit."""
  made = make_plan(resolve('pipeline.StdlibTiny', ()).build(), parse_target('cpu:8'), show_progress=False).to_json()
  memory = {'weights': int(0.4 * GIB), 'activations': int(46.1 * GIB), 'temporaries': int(9.3 * GIB)}
  step = made['steps']['train'] | TIMES
  step |= {'fits': False, 'hbm_bytes': int(15.75 * GIB), 'peak_bytes': int(55.8 * GIB), 'memory': memory}
  step['top_operations'] = [OPERATION]
  step['out_of_memory'] = {'needed_bytes': 1, 'available_bytes': 1, 'message': 'RESOURCE_EXHAUSTED: used 55.80G'}
  return made | step | {'steps': {'train': step}, 'notes': ['JAX takes 75%']}


def test_the_report_has_the_figures(plan):
  text = format_plan(plan)
  for words in (
    *('pipeline.StdlibTiny on cpu:8', 'mesh stage 4 x data 2', '55.80 GiB of 15.75 GiB per device'),
    *('40.05 GiB too much', '3.91 s', '3.20 s to 4.90 s', '39%', '8,380', 'activations', '46.10 GiB'),
    *('stack/layers/ffn/gate/kernel', 'all gather'),
    'JAX takes 75%',
    *('hand-written kernels', '298 TFLOP', '1.6 TB', 'stack/softmax', 'bubble', 'replicated over data', 'jax '),
    'No published figures of cpu are used',
  ):
    assert words in text, words
  assert 'DOES NOT FIT: 55.80 GiB' in text


def test_a_plan_that_fits_says_what_is_free_and_one_without_a_limit_nothing(plan):
  fitting = plan | {'fits': True, 'hbm_bytes': 95 * GIB, 'dcn_mesh': {'stage': 4}, 'num_slices': 4}
  report = format_plan(fitting)
  assert '55.80 GiB of 95.00 GiB per device, 59%' in report
  assert '39.20 GiB are free' in report
  assert 'stage 4 (4 over DCN)' in report
  assert '8 devices in 4 slices' in report
  open_plan = plan | {'fits': None, 'hbm_bytes': None}
  assert 'needs 55.80 GiB per device' in format_plan(open_plan)


def test_without_cycles_of_the_compiler_a_step_is_given_at_best(plan):
  without = plan | {'time_by_kind': {'kernel': 0.42}}
  assert 'predicted step' in format_plan(plan)
  assert ('step at best' in format_plan(without), 'predicted MFU' in format_plan(without)) == (True, False)
