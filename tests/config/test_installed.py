"""The package as `pip install .` puts it: registered experiments lie inside of it and are found from any directory."""

import os
from pathlib import Path
import shutil
import subprocess
import sys
import tomllib

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope='module')
def installed(tmp_path_factory):
  """What hatchling puts into the wheel, by the settings of pyproject.toml; the build itself needs the network."""
  target = tmp_path_factory.mktemp('site')
  settings = tomllib.loads((ROOT / 'pyproject.toml').read_text())['tool']['hatch']['build']['targets']['wheel']
  placed = {name: name for name in settings['packages']} | settings['force-include']
  for source, place in placed.items():
    shutil.copytree(ROOT / source, target / place)  # with byte code, where there is some
  return target


PROGRAM = """
import spmd_tasks.experiments
from spmd_tasks import main

print(spmd_tasks.experiments.DIRECTORY)
assert main.run(['--list']) == 0
for name in ('lm.StdlibTiny', 'experiments.lm.Mine'):
  assert main.run(['--exp', name, '--print_config']) == 0
"""
OWN = """
from spmd_tasks.experiments.lm import StdlibTiny

class Mine(StdlibTiny):
  seed = 5
"""


def test_registered_experiments_are_found_from_another_directory(installed, tmp_path):
  """Where a package called experiments neither shadows ours nor is shadowed."""
  (tmp_path / 'experiments').mkdir()
  (tmp_path / 'experiments' / 'lm.py').write_text(OWN)
  environment = os.environ | {'PYTHONPATH': str(installed)}
  ended = subprocess.run(
    [sys.executable, '-c', PROGRAM], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
  )
  assert ended.returncode == 0, ended.stderr
  lines = ended.stdout.splitlines()
  assert Path(lines[0]) == installed / 'spmd_tasks' / '_experiments'
  assert any(line.startswith('lm.StdlibTiny  ') for line in lines)
  assert [line for line in lines if line.startswith(('experiment = ', 'seed = '))] == [
    'experiment = lm.StdlibTiny',
    'seed = 0',
    'experiment = experiments.lm.Mine',
    'seed = 5',
  ]
