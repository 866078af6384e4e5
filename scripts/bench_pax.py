#!/usr/bin/env python
"""Pax experiments here against the real Paxml: time of a step, and time to the end of the first one.

    .venv/bin/python scripts/bench_pax.py [--quick] [--paxml_python PAXENV/bin/python] [--num_rounds 2]

The last line is one JSON object. The same classes (pax_models.py, and DenseLm of the tests) are run by `spmd-tasks
--exp ... --mode train` and by `paxml.main` (paxml_run.py), in fresh processes on 8 fake devices that take turns. By
default Paxml is that of our environment, without our shims; `--paxml_python` names another.

For each experiment, ours over Paxml's, of the medians: `first_step` and `first_step_cpu`, from the start of the process
to the end of step 1, at most 0.5 wanted; `step` and `step_cpu`, at most 1 wanted. `ratio` is the largest `step_cpu`.
CPU times are those of all threads, and hardly mind a busy machine. `loss_difference` is the largest relative one.
"""

import argparse
from collections.abc import Sequence
import itertools
import json
import os
from pathlib import Path
import re
from statistics import median
import subprocess
import sys
import tempfile
import time
from typing import Any

from alternation import print_result

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = ('pax_models.Dense', 'pax_models.Moe', 'pax_lab.dense_lm.DenseLm')
Mark = dict[str, float]  # step, time and CPU time since the start of the process, loss
TICKS = os.sysconf('SC_CLK_TCK')


def environment() -> dict[str, str]:
  """Nothing of ours but the experiments on the path, and no cache of compiled programs."""
  kept = {name: value for name, value in os.environ.items() if not name.startswith(('JAX_', 'XLA_', 'PYTHONPATH'))}
  paths = [ROOT / 'scripts', ROOT / 'tests' / 'data']
  return kept | {'PYTHONPATH': os.pathsep.join(map(str, paths)), 'TF_CPP_MIN_LOG_LEVEL': '3'}


def run_paxml(python: str, experiment: str, num_steps: int, every: int) -> list[Mark]:
  """Returns Paxml's marks."""
  began = time.time()
  command = [python, '-W', 'ignore', str(ROOT / 'scripts' / 'paxml_run.py'), experiment, str(num_steps), str(every)]
  finished = subprocess.run(command, env=environment(), capture_output=True, text=True)
  if finished.returncode:
    raise RuntimeError(f'Paxml failed with {experiment}:\n{finished.stderr[-3000:]}')
  marks = json.loads(finished.stdout.splitlines()[-1])['marks']
  return [mark | {'time': mark['time'] - began} for mark in marks]


def run_ours(experiment: str, num_steps: int, every: int) -> list[Mark]:
  """Returns the marks of our binary: its CPU time is looked up when a line appears in metrics.jsonl."""
  settings = f'num_train_steps={num_steps}', f'log_every_steps={every}', 'eval_every_steps=None'
  sets = [flag for setting in (*settings, 'checkpoint_every_steps=None') for flag in ('--set', setting)]
  env = environment()
  env['PYTHONPATH'] = f'{ROOT}{os.pathsep}{env["PYTHONPATH"]}'
  with tempfile.TemporaryDirectory() as job:
    flags = ['--exp', experiment, '--mode', 'train', '--num_fake_devices', '8', '--job_log_dir', job, *sets]
    startup, metrics = Path(job) / 'startup.json', Path(job) / 'metrics.jsonl'
    first: Mark = {}
    marks: list[Mark] = []
    with tempfile.TemporaryFile('w+') as output:
      began = time.time()
      command = [sys.executable, '-W', 'ignore', '-m', 'spmd_tasks.main', *flags]
      process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
      while process.poll() is None:
        time.sleep(0.005)
        cpu = cpu_seconds(process.pid)
        if not first and startup.exists():  # written at the end of the first step
          first = {'step': 1, 'time': time.time() - began, 'cpu': cpu}
        lines = metrics.read_text().rpartition('\n')[0].splitlines() if metrics.exists() else []
        for line in map(json.loads, lines[len(marks) :]):
          marks.append({'step': line['step'], 'time': line['time'] - began, 'cpu': cpu, 'loss': line['loss']})
      if process.returncode:
        output.seek(0)
        raise RuntimeError(f'{" ".join(command)} failed:\n{output.read()[-3000:]}')
    return [marks[0] | first, *marks[1:]]


def cpu_seconds(pid: int) -> float:
  """The CPU time that a process has used on all its threads; 0 if it has ended."""
  try:
    fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
  except OSError:
    return 0.0
  return (int(fields[11]) + int(fields[12])) / TICKS


def figures(runs: Sequence[list[Mark]], every: int) -> dict[str, float]:
  """Returns medians over runs: seconds to the end of the first step, and milliseconds of a step."""
  found: dict[str, float] = {}
  for clock, suffix in (('time', ''), ('cpu', '_cpu')):
    found[f'first_step_s{suffix}'] = median(run[0][clock] for run in runs)
    steps = []
    for run in runs:
      at = [mark for mark in run if mark['step'] % every == 0]
      steps += [(b[clock] - a[clock]) / every for a, b in itertools.pairwise(at)]
    found[f'step_ms{suffix}'] = 1000 * median(steps)
  return found


def loss_difference(ours: list[Mark], paxml: list[Mark]) -> float:
  """Returns the largest relative difference of losses after the same steps."""
  expected = {mark['step']: mark['loss'] for mark in paxml}
  pairs = [(mark['loss'], expected[mark['step']]) for mark in ours if mark['step'] in expected]
  return max(abs(a - b) / abs(b) for a, b in pairs)


def compare(experiment: str, paxml_python: str, num_rounds: int, num_steps: int, every: int) -> dict[str, Any]:
  """Runs both in turn and returns their figures and ratios."""
  run = {
    'paxml': lambda: run_paxml(paxml_python, experiment, num_steps, every),
    'ours': lambda: run_ours(experiment, num_steps, every),
  }
  runs: dict[str, list[list[Mark]]] = {name: [] for name in run}
  for i in range(num_rounds):
    for name in list(run)[:: -1 if i % 2 else 1]:
      runs[name].append(run[name]())
  found: dict[str, Any] = {name: figures(each, every) for name, each in runs.items()}
  ratios = {re.sub('_m?s(?=_cpu|$)', '', name): found['ours'][name] / found['paxml'][name] for name in found['ours']}
  return ratios | found | {'loss_difference': loss_difference(runs['ours'][0], runs['paxml'][0])}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--quick', action='store_true', help='the smallest experiment, once: does it run?')
  parser.add_argument('--paxml_python', default=sys.executable, help='of the environment with Paxml')
  parser.add_argument('--num_rounds', type=int, default=2, help='per experiment')
  parser.add_argument('--experiment', action='append', help=f'one or several of {", ".join(EXPERIMENTS)}')
  args = parser.parse_args()
  experiments = args.experiment or (EXPERIMENTS[-1:] if args.quick else EXPERIMENTS)
  found = {}
  for experiment in experiments:
    found[experiment] = compare(
      experiment, args.paxml_python, 1 if args.quick else args.num_rounds, *((4, 2) if args.quick else (16, 5))
    )
    print_result(experiment=experiment, **found[experiment])  # already worth reading while the rest is measured
  print_result(ratio=max(each['step_cpu'] for each in found.values()), num_rounds=args.num_rounds, **found)


if __name__ == '__main__':
  main()
