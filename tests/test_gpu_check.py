"""scripts/gpu_check --tiny runs on a CPU and reports failures."""

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / 'scripts'))

import gpu_check  # noqa: E402


@pytest.mark.slow
@pytest.mark.exhaustive  # more than a minute of CPU; as those of most benchmarks, before a release or a run on a GPU
@pytest.mark.timeout(900)
def test_every_section_runs_on_a_cpu(tmp_path):
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
