"""scripts/gpu_check, which waits for a machine with a GPU, runs in its small form on the CPU, and says what fails."""

import json
import os
from pathlib import Path
import subprocess
import sys
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / 'scripts'))

import gpu_check  # noqa: E402


@pytest.mark.slow
@pytest.mark.exhaustive  # more than a minute of CPU; as those of most benchmarks, before a release or a run on a GPU
@pytest.mark.timeout(900)
def test_every_section_runs_small_on_the_cpu(tmp_path):
  env = {name: value for name, value in os.environ.items() if name != 'JAX_NUM_CPU_DEVICES'}
  command = [ROOT / 'scripts/gpu_check', '--tiny', '--out', tmp_path, '--budget', '850']
  done = subprocess.run(command, env=env | {'PYTHON': sys.executable}, capture_output=True, text=True)
  summary = json.loads(done.stdout.splitlines()[-1])
  assert (summary['ok'], summary['wrong'], done.returncode) == (True, {}, 0), (tmp_path / 'log.txt').read_text()[-4000:]
  sections = json.loads((tmp_path / 'gpu_check.json').read_text())['sections']
  assert list(sections) == list(gpu_check.LIMITS)
  page = (tmp_path / 'gpu_check.md').read_text()
  assert all(f'| {name} | {row["what"]} |' in page for name in sections for row in sections[name]['rows'])
  for name in ('dense', 'moe', 'train', 'serve', 'decode'):
    assert all(row['ms'] > 0 for row in sections[name]['rows'])
  compared = [row for name in ('kernels', 'dense', 'decode') for row in sections[name]['rows'] if 'limit' in row]
  assert len(compared) >= 8


@pytest.mark.parametrize(
  'status, rows, wrong',
  [
    ('', [{'what': 'a', 'error': 0.01, 'limit': 0.02}], ''),
    ('', [{'what': 'a', 'error': 0.03, 'limit': 0.02}], 'a: error 0.03, at most 0.02 wanted'),
    ('', [{'what': 'a', 'error': float('nan'), 'limit': 0.02}], 'a: error nan, at most 0.02 wanted'),
    ('', [{'what': 'a', 'ms': 1.0}, {'what': 'b', 'failure': 'OSError: no'}], 'b: OSError: no'),
    ('stopped after 9 s', [{'what': 'a', 'ms': 1.0}], 'stopped after 9 s'),
  ],
)
def test_what_fails_is_said(status, rows, wrong):
  assert gpu_check.judge(status, rows) == wrong


def test_a_section_is_stopped_at_its_limit(tmp_path):
  args = SimpleNamespace(target='cpu', tiny=True, env=dict(os.environ))
  with open(tmp_path / 'log.txt', 'w', encoding='utf-8') as log:
    assert gpu_check.run_section('env', args, tmp_path, 0.2, log) == ('stopped after 0 s', [])
