"""The pages of the benchmarks show the results; test_scripts.py runs the benchmarks."""

import os
from pathlib import Path
import sys

import pytest

from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / 'scripts'))

import render_benchmarks  # noqa: E402


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
