"""The benchmarks print their figures, those without clocks meet their goals, and pages show the results."""

import ast
import json
import math
import os
from pathlib import Path
import subprocess
import sys

import pytest

from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from tests import binary

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / 'scripts'))

import render_benchmarks  # noqa: E402

SCRIPTS = sorted({path.name for path in (ROOT / 'scripts').glob('bench_*.py')} - {'bench_rl.py'})  # which takes minutes


def run_quickly(script):
  process = binary.start_process(
    [ROOT / 'scripts' / script, '--quick'], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
  )
  finished = binary.finish(process, limit_s=840)
  assert finished.returncode == 0, finished.stderr[-4000:]
  return json.loads(finished.stdout.splitlines()[-1])


def check_adapters(result):
  assert result['ratios']['0'] == 1
  of_one, of_four = (result['adapter_mib'][number] for number in ('1', '4'))  # and that of number 0
  assert of_four == pytest.approx(of_one * 5 / 2)


def check_low_rank(result):
  full, low_rank = (result['kinds'][name] for name in ('all weights', 'rank 16'))
  for figures in (full, low_rank):  # but for norms, which are held in float32, and counts
    assert sum(figures['parts'].get(part, 0) for part in ('weights', 'optimizer')) == pytest.approx(
      figures['state_bytes_by_arithmetic'], rel=0.02
    )
  assert result['ratio'] < 0.8


def check_huggingface(result):
  assert result.keys() > {'load, ours', 'load, transformers', 'export, ours', 'export, transformers'}
  assert result['export, ours']['peak_gb'] < result['load, ours']['peak_gb'] + 0.2  # a tensor at a time


def check_pax(result):
  figures = result['pax_lab.dense_lm.DenseLm']
  assert figures['loss_difference'] < 1e-6
  assert figures['ours'].keys() == figures['paxml'].keys() >= {'first_step_s', 'step_ms_cpu'}


def check_pipeline(result):
  # Executed FLOPs are the ideal ones, in the steady state and in the bubbles.
  assert result['ratio'] == pytest.approx(1, abs=0.05)


def check_decode(result):
  assert result['same_tokens'] == 1
  assert result['prefix_prefill_share'] < 0.2


def check_serve(result):
  assert result['same_tokens']
  assert result['ratio'] < 1  # continuous batching takes fewer decode steps than static batching
  assert result['decode_steps']['continuous'] < result['decode_steps']['static']


CHECKS = {
  'bench_adapters.py': check_adapters,
  'bench_decode.py': check_decode,
  'bench_huggingface.py': check_huggingface,
  'bench_low_rank.py': check_low_rank,
  'bench_pax.py': check_pax,
  'bench_pipeline.py': check_pipeline,
  'bench_serve.py': check_serve,
}


# Others hold what these claim without a clock: one program for any depth (below), no compilation in the loop
# (tests/multi_process/test_lost_process.py), fewer steps by continuous batching (tests/decoding/test_scheduler.py).
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize('script', SCRIPTS)
def test_last_line_is_one_json_object_that_holds_the_claims_without_a_clock(script):
  result = run_quickly(script)
  assert math.isfinite(result['ratio'])
  if script in CHECKS:
    CHECKS[script](result)


def names_in(path):
  """Returns the names that a module binds: definitions, assignments and imports, including lazy ones."""
  nodes = [*ast.walk(ast.parse(path.read_text()))]
  bound = {getattr(node, 'name', None) or getattr(node, 'id', None) for node in nodes}
  return bound | {alias.asname for alias in nodes if isinstance(alias, ast.alias)}


@pytest.mark.parametrize('path', sorted((ROOT / 'scripts').glob('*.py')), ids=lambda path: path.name)
def test_the_imports_of_a_script_exist(path):
  """Without --all, no other test of the benchmarks runs."""
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom) and (node.module or '').startswith('spmd_tasks'):
      place = ROOT / node.module.replace('.', '/')
      file = place / '__init__.py' if place.is_dir() else place.with_suffix('.py')
      missing = {alias.name for alias in node.names} - names_in(file) - {path.stem for path in place.glob('*')}
      assert not missing, f'{node.module} has no {missing}'


def test_the_lowered_train_step_does_not_grow_with_depth():
  def num_lines(num_layers):
    job = resolve('synthetic.Tiny', [f'num_layers={num_layers}', 'ici_mesh_shape=1,4,2']).build()
    return partition_job(job).train_step.lower().as_text().count('\n')

  assert num_lines(4) == num_lines(32) > 500


@pytest.mark.parametrize('path', sorted(render_benchmarks.PAGES.glob('*.md')), ids=lambda path: path.stem)
def test_pages_show_their_results(path):
  page = path.read_text(encoding='utf-8')
  wanted = render_benchmarks.rendered(page)
  if os.environ.get('UPDATE_GOLDEN') == '1':
    path.write_text(wanted, encoding='utf-8')
  else:
    assert page == wanted, 'scripts/render_benchmarks.py writes the tables anew'


def test_every_result_is_on_a_page():
  pages = ''.join(path.read_text(encoding='utf-8') for path in render_benchmarks.PAGES.glob('*.md'))
  results = [path.stem for path in (render_benchmarks.PAGES / 'results').glob('*.json')]
  assert [name for name in results if f'<!-- results: {name} -->' not in pages] == []
