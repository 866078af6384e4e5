"""The launch files are what Slurm, JobSet and Ray take, and their commands are ours.

tests/data/launch/jobset_schema.json is the part of the published schema that our file uses, of kubernetes-sigs/jobset
08dfbdfd, config/components/crd/bases, without the fields that it does not use.
"""

import json
from pathlib import Path
import re
import shlex
import subprocess
import sys

import jsonschema
import pytest
import yaml

from spmd_tasks.flags import all_modes, make_parser
from spmd_tasks.operations.supervisor import _limits

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / 'scripts' / 'launch'
SCHEMA = json.loads((ROOT / 'tests' / 'data' / 'launch' / 'jobset_schema.json').read_text())
# Of `man sbatch`, with what their values look like; None: no value.
SBATCH = {
  'job-name': r'\w+',
  'nodes': r'\d+(-\d+)?',
  'ntasks-per-node': r'\d+',
  'gpus-per-node': r'(\w+:)?\d+',
  'time': r'(\d+-)?\d+:\d\d:\d\d',
  'requeue': None,
  'no-kill': None,
  'open-mode': r'append|truncate',
  'signal': r'([BR]+:)?\w+(@\d+)?',
}


def check_command(words: list[str]) -> None:
  """The command is one that the binary takes, of a supervised training job."""
  assert words[0].endswith('spmd-tasks')
  args = make_parser(all_modes()).parse_args(words[1:])
  assert args.mode == 'train'
  assert _limits(args.supervise) == (3, 4)


def test_the_batch_script_of_slurm():
  script = LAUNCH / 'slurm.sh'
  subprocess.run(['bash', '-n', script], check=True)
  lines = script.read_text().splitlines()
  directives = [line.partition('#')[0].strip() for line in (each.removeprefix('#SBATCH ') for each in lines)
                if line.startswith('--')]  # fmt: skip
  assert sum(line.startswith('#SBATCH') for line in lines) == len([each for each in directives if each]) > 5
  for directive in directives:
    name, has_value, value = directive.removeprefix('--').partition('=')
    assert name in SBATCH, directive
    pattern = SBATCH[name]
    assert not has_value if pattern is None else re.fullmatch(pattern, value), directive
  # Slurm reads directives up to the first command.
  first_command = next(i for i, line in enumerate(lines) if line and not line.startswith('#'))
  assert not any(line.startswith('#SBATCH') for line in lines[first_command:])
  (command,) = re.findall(r'srun (?:--\S+ )*(.*)$', script.read_text().replace('\\\n', ''), re.MULTILINE)
  check_command(shlex.split(command))


def test_the_manifest_of_jobset():
  manifest = yaml.safe_load((LAUNCH / 'jobset.yaml').read_text())
  jsonschema.validate(manifest, SCHEMA)
  (workers,) = manifest['spec']['replicatedJobs']
  job = workers['template']['spec']
  (container,) = job['template']['spec']['containers']
  check_command(container['command'])
  assert job['completions'] == job['parallelism'] == 4
  assert all(rule['onExitCodes']['containerName'] == container['name'] for rule in job['podFailurePolicy']['rules'])
  assert job['template']['spec']['restartPolicy'] == 'Never'  # podFailurePolicy needs it
  del workers['template']
  with pytest.raises(jsonschema.ValidationError, match="'template' is a required property"):
    jsonschema.validate(manifest, SCHEMA)


def test_the_driver_of_ray_runs_the_command_once_per_host(tmp_path):
  pytest.importorskip('ray')
  program = (
    f'import sys, os, uuid; open(os.path.join({str(tmp_path)!r}, uuid.uuid4().hex), "w").write(" ".join(sys.argv[1:]))'
  )
  done = subprocess.run(
    [sys.executable, LAUNCH / 'on_ray.py', '--hosts', '1:2', '--cpus', '0.5', '--', sys.executable, '-c', program],
    capture_output=True, text=True, timeout=240,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  for path in tmp_path.iterdir():
    assert re.fullmatch(r'--supervise 1:2 --supervisor_address \d+\.\d+\.\d+\.\d+', path.read_text())
  assert len(list(tmp_path.iterdir())) >= 1
