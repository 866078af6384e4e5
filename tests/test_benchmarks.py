"""The benchmarks run and print what they promise; figures that no clock enters are checked."""

import json
import math
from pathlib import Path
import subprocess

import pytest

from spmd_tasks.config.resolve import resolve
from spmd_tasks.experiment import partition_job
from tests import binary

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path.name for path in (ROOT / 'scripts').glob('bench_*.py'))


def run_quickly(script):
  process = binary.start_process(
    [ROOT / 'scripts' / script, '--quick'], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
  )
  finished = binary.finish(process, limit_s=840)
  assert finished.returncode == 0, finished.stderr[-4000:]
  return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize('script', SCRIPTS)
def test_last_line_is_one_json_object_with_a_ratio(script):
  result = run_quickly(script)
  assert math.isfinite(result['ratio'])
  assert result['ratio'] > 0
  if script == 'bench_step.py':
    assert result['num_compilations_after_first_step'] == 0
    assert result['peak_memory_mib'] > 100
    assert {'imports', 'trace', 'compile', 'input', 'total'} <= result['seconds_to_first_step'].keys()


def test_the_lowered_train_step_does_not_grow_with_depth():
  def num_lines(num_layers):
    job = resolve('synthetic.Tiny', [f'num_layers={num_layers}', 'ici_mesh_shape=1,4,2']).build()
    return partition_job(job).train_step.lower().as_text().count('\n')

  assert num_lines(4) == num_lines(32) > 500
