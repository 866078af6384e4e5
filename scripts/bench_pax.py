#!/usr/bin/env python
"""Compares training with Paxml's: the time of a step, the time to the end of the first step, and memory.

    .venv/bin/python scripts/bench_pax.py [--quick] [--paxml_python PAXENV/bin/python] [--num_rounds 2] [--native]

The last line is one JSON object. `spmd-tasks --exp ... --mode train` and `paxml.main` (paxml_run.py) run the same
classes (pax_models.py, and DenseLm of the tests), in fresh processes on 8 fake devices. With `--native`, our side runs
the same models as native experiments (native_models.py). Paxml is by default the one in our environment, without our
shims; `--paxml_python` names another environment.

A round starts both jobs, one after the other, and stops each after its first step (SIGSTOP). Then they run for a few
steps in turn while the other is stopped, so that neighbouring turns have the same load. Both are started once before
the rounds, so that Python has compiled its bytecode.

The figures are ours over Paxml's, for each experiment: `first_step` and `first_step_cpu`, from the start of the process
to the end of step 1, as ratios of medians (goal: at most 0.5, native 0.4); `step` and `step_cpu`, as the median of the
ratios of neighbouring turns (goal: at most 1); `peak_memory`, the largest resident size (native goal: at most 0.6).
`ratio` is the largest `step_cpu`. CPU times include all threads, and depend less on other load. `loss_difference`, if
both run the same class, is the largest relative difference.
"""

import argparse
from collections.abc import Iterator
import contextlib
import json
import os
from pathlib import Path
import signal
from statistics import median
import subprocess
import sys
import tempfile
import time
from typing import Any, Self

from alternation import print_result

ROOT = Path(__file__).resolve().parents[1]
_PAX_NAMES = (
  'pax_models.Dense',
  'pax_models.Moe',
  'pax_models.Pipeline',
  'pax_models.PipelineMoe',
  'pax_lab.dense_lm.DenseLm',
)
# Ours, and Paxml's that it is compared with.
PAX = {name: name for name in _PAX_NAMES}
NATIVE = {
  'native_models.Dense': 'pax_models.Dense',
  'native_models.MoeDropless': 'pax_models.Moe',
  'native_models.MoeCapacity': 'pax_models.Moe',
  'native_models.Pipeline': 'pax_models.Pipeline',
  'native_models.OneForwardOneBackward': 'pax_models.Pipeline',
  'native_models.PipelineMoeDropless': 'pax_models.PipelineMoe',
  'native_models.PipelineMoeCapacity': 'pax_models.PipelineMoe',
}
# Steps per turn; the default is 3. CPU time has a resolution of 10 ms.
STEPS_OF_A_TURN = {'pax_lab.dense_lm.DenseLm': 60}
FOR_EVER = 1_000_000
TICKS = os.sysconf('SC_CLK_TCK')


def environment() -> dict[str, str]:
  """Returns an environment with only our experiments on the path, and without a compilation cache."""
  inherited = {name: value for name, value in os.environ.items() if not name.startswith(('JAX_', 'XLA_', 'PYTHON'))}
  paths = [ROOT / 'scripts', ROOT / 'tests' / 'data']
  return inherited | {'PYTHONPATH': os.pathsep.join(map(str, paths)), 'TF_CPP_MIN_LOG_LEVEL': '3'}


class Training:
  """A training job that can be stopped and continued.

  Attributes:
    first_step: seconds from the start of the process to the end of step 1, on the clock and of CPU.
    turns: seconds of a step in each turn, on the clock and of CPU.
    losses: by step.
  """

  def __init__(self, command: list[str], env: dict[str, str], output: Path, marks: Path, first_mark: Path):
    """Starts a job and stops it after its first step.

    Args:
      command: of the process.
      env: of the process.
      output: gets both streams.
      marks: the file in which a line of JSON with `step` and `loss` appears after the first and every n-th step.
      first_mark: a file that is there, and not empty, once the first step has ended.
    """
    self._output, self._marks, self._num_marks = output, marks, 0
    self.turns: list[tuple[float, float]] = []
    self.losses: dict[int, float] = {}
    began = time.monotonic()
    with output.open('w') as file:
      self._process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
    self._wait_until(lambda: first_mark.exists() and first_mark.stat().st_size)
    self.first_step = time.monotonic() - began, self._cpu_seconds()
    self._read_marks(1)
    self._process.send_signal(signal.SIGSTOP)

  @classmethod
  def of_paxml(cls, python: str, experiment: str, every: int, directory: Path) -> Self:
    """Starts Paxml's own main."""
    marks = directory / 'marks.jsonl'
    command = [python, '-W', 'ignore', str(ROOT / 'scripts' / 'paxml_run.py'), experiment, str(every), str(marks)]
    env = environment() | {'TMPDIR': str(directory)}  # for its job's directory
    return cls(command, env, directory / 'output', marks, marks)

  @classmethod
  def of_ours(cls, experiment: str, every: int, directory: Path) -> Self:
    """Starts our binary."""
    settings: dict[str, int | None] = {
      'num_train_steps': FOR_EVER,
      'log_every_steps': every,
      'step_timeout_s': FOR_EVER,
    }
    settings |= {'input_timeout_s': FOR_EVER, 'eval_every_steps': None, 'checkpoint_every': None}
    flags = ['--exp', experiment, '--mode', 'train', '--num_fake_devices', '8', '--job_log_dir', str(directory)]
    flags += [flag for name, value in settings.items() for flag in ('--set', f'{name}={value}')]
    env = environment()
    env['PYTHONPATH'] = f'{ROOT}{os.pathsep}{env["PYTHONPATH"]}'
    command = [sys.executable, '-W', 'ignore', '-m', 'spmd_tasks.main', *flags]
    return cls(command, env, directory / 'output', directory / 'metrics.jsonl', directory / 'startup.json')

  def turn(self, every: int, *, is_counted: bool) -> None:
    """Runs until the next mark, `every` steps after the last one."""
    began, cpu = time.monotonic(), self._cpu_seconds()
    self._process.send_signal(signal.SIGCONT)
    self._read_marks(1)
    self._process.send_signal(signal.SIGSTOP)
    if is_counted:
      self.turns.append(((time.monotonic() - began) / every, (self._cpu_seconds() - cpu) / every))

  @property
  def peak_memory_mb(self) -> float:
    """The largest resident size of the process so far."""
    status = Path(f'/proc/{self._process.pid}/status').read_text()
    return int(status.partition('VmHWM:')[2].split()[0]) / 1024

  def kill(self) -> None:
    """Ends the job."""
    self._process.kill()
    self._process.wait()

  def _read_marks(self, num_new: int) -> None:
    wanted = self._num_marks + num_new
    self._wait_until(lambda: self._marks.exists() and self._marks.read_bytes().count(b'\n') >= wanted)
    for line in map(json.loads, self._marks.read_text().splitlines()[self._num_marks : wanted]):
      self.losses[line['step']] = line['loss']
    self._num_marks = wanted

  def _wait_until(self, is_done: Any) -> None:
    while not is_done():
      if self._process.poll() is not None:
        raise RuntimeError(f'{self._process.args!r} failed:\n{self._output.read_text()[-3000:]}')
      time.sleep(0.005)

  def _cpu_seconds(self) -> float:
    """Returns the CPU time of all threads of the process so far."""
    fields = Path(f'/proc/{self._process.pid}/stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


@contextlib.contextmanager
def both_started(
  experiment: str, paxml_experiment: str, paxml_python: str, every: int, *, ours_first: bool
) -> Iterator[dict[str, Training]]:
  """Starts both jobs, up to their first steps; kills them on exit."""
  with contextlib.ExitStack() as stack:
    started: dict[str, Training] = {}
    for name in ('ours', 'paxml') if ours_first else ('paxml', 'ours'):
      directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='bench_pax_')))
      if name == 'ours':
        started[name] = Training.of_ours(experiment, every, directory)
      else:
        started[name] = Training.of_paxml(paxml_python, paxml_experiment, every, directory)
      stack.callback(started[name].kill)
    yield started


def compare(
  experiment: str, paxml_experiment: str, paxml_python: str, num_rounds: int, num_turns: int, every: int
) -> dict[str, Any]:
  """Runs both and returns their figures and ratios."""
  rounds, memory = [], []
  for i in range(num_rounds):
    with both_started(experiment, paxml_experiment, paxml_python, every, ours_first=i % 2 == 1) as jobs:
      for turn in range(num_turns + 1):
        for name in ('ours', 'paxml') if turn % 2 else ('paxml', 'ours'):
          jobs[name].turn(every, is_counted=turn > 0)  # the first one also has the second step of all
      rounds.append(jobs)
      memory.append({name: job.peak_memory_mb for name, job in jobs.items()})
  result: dict[str, Any] = {'ours': {}, 'paxml': {}}
  for clock, suffix in enumerate(('', '_cpu')):
    for name in ('ours', 'paxml'):
      result[name][f'first_step_s{suffix}'] = median(jobs[name].first_step[clock] for jobs in rounds)
      result[name][f'step_ms{suffix}'] = 1000 * median(turn[clock] for jobs in rounds for turn in jobs[name].turns)
    result[f'first_step{suffix}'] = result['ours'][f'first_step_s{suffix}'] / result['paxml'][f'first_step_s{suffix}']
    result[f'step{suffix}'] = median(
      ours[clock] / paxml[clock]
      for jobs in rounds
      for ours, paxml in zip(jobs['ours'].turns, jobs['paxml'].turns, strict=True)
    )
  for name in ('ours', 'paxml'):
    result[name]['peak_memory_mb'] = median(sizes[name] for sizes in memory)
  result['peak_memory'] = result['ours']['peak_memory_mb'] / result['paxml']['peak_memory_mb']
  if experiment != paxml_experiment:
    return result  # their initializers differ
  ours, paxml = rounds[0]['ours'].losses, rounds[0]['paxml'].losses
  return result | {'loss_difference': max(abs(ours[step] - paxml[step]) / abs(paxml[step]) for step in ours)}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--quick', action='store_true', help='the smallest experiment, once: does it run?')
  parser.add_argument('--paxml_python', default=sys.executable, help='of the environment with Paxml')
  parser.add_argument('--num_rounds', type=int, default=2, help='per experiment')
  parser.add_argument('--num_turns', type=int, default=5, help='of each job in a round')
  parser.add_argument('--native', action='store_true', help="native experiments against Paxml's")
  choices = list(PAX | NATIVE)
  parser.add_argument('--experiment', action='append', choices=choices, help='one of ours; can be given again')
  args = parser.parse_args()
  experiments = args.experiment or list(NATIVE if args.native else PAX)
  if args.quick and not args.experiment:
    experiments = experiments[:1] if args.native else experiments[-1:]
  if not args.quick:  # compiles Python's bytecode
    with both_started(experiments[0], (PAX | NATIVE)[experiments[0]], args.paxml_python, 1, ours_first=True):
      pass
  results = {}
  for experiment in experiments:
    every = STEPS_OF_A_TURN.get(experiment, 3)
    sizes = (1, 1, 2) if args.quick else (args.num_rounds, args.num_turns, every)
    results[experiment] = compare(experiment, (PAX | NATIVE)[experiment], args.paxml_python, *sizes)
    print_result(experiment=experiment, **results[experiment])  # while the rest is measured
  print_result(ratio=max(result['step_cpu'] for result in results.values()), num_rounds=args.num_rounds, **results)


if __name__ == '__main__':
  main()
