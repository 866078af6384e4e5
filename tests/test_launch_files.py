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

ROOT = Path(__file__).parents[1]
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
  'open-mode': r'append|truncate',
  'signal': r'([BR]+:)?\w+(@\d+)?',
}


def check_command(words: list[str]) -> None:
  """The binary accepts the command of a training job."""
  assert words[0].endswith('spmd-tasks')
  args = make_parser(all_modes()).parse_args(words[1:])
  assert args.mode == 'train'
  assert args.num_processes in (None, 4)


def test_the_batch_script_of_slurm():
  script = LAUNCH / 'slurm.sh'
  subprocess.run(['bash', '-n', script], check=True)
  lines = script.read_text().splitlines()
  directives = [line.partition('#')[0].strip() for line in (line.removeprefix('#SBATCH ') for line in lines)
                if line.startswith('--')]  # fmt: skip
  assert (
    sum(line.startswith('#SBATCH') for line in lines) == len([directive for directive in directives if directive]) > 5
  )
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
  check_command([word.replace('$(PROCESS_ID)', '3') for word in container['command']])
  assert job['completions'] == job['parallelism'] == 4
  assert all(rule['onExitCodes']['containerName'] == container['name'] for rule in job['podFailurePolicy']['rules'])
  assert job['template']['spec']['restartPolicy'] == 'Never'  # podFailurePolicy needs it
  del workers['template']
  with pytest.raises(jsonschema.ValidationError, match="'template' is a required property"):
    jsonschema.validate(manifest, SCHEMA)


def test_the_driver_of_ray_runs_the_command_once_per_host(tmp_path):
  pytest.importorskip('ray')
  program = f'import sys, os; open(os.path.join({str(tmp_path)!r}, sys.argv[-1]), "w").write(" ".join(sys.argv[1:]))'
  done = subprocess.run(
    [sys.executable, LAUNCH / 'on_ray.py', '--hosts', '2', '--cpus', '0.5', '--', sys.executable, '-c', program],
    capture_output=True, text=True, timeout=240,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  for rank in range(2):
    flags = r'--coordinator_address \d+\.\d+\.\d+\.\d+:\d+ --num_processes 2 --process_id ' + str(rank)
    assert re.fullmatch(flags, (tmp_path / str(rank)).read_text())
