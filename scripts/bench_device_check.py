"""Measures CheckDevices: planted bit flips found and located, alarms without a fault, and what a check costs.

    PYTHONPATH=. .venv/bin/python scripts/bench_device_check.py --faults 200 --undisturbed 500
    PYTHONPATH=. .venv/bin/python scripts/bench_device_check.py --cost pipeline.MoeTiny

Every layout gets its part of both: data and model axes, experts, stages of a pipeline. The last line is JSON:
`found` and `located` of `faults`, and `alarms` of `undisturbed` checks; or with --cost `cost_at_100`, the seconds of a
check in relation to those of a hundred steps.
"""

import argparse
import json
import time

import jax
import numpy as np

from spmd_tasks.distributed import use_fake_devices
from spmd_tasks.replay import CorruptionError
from spmd_tasks.verification.mode import compile_quickly
from tests.replay.faulty_devices import Fault, FaultyDevices, run_of

SMALL = (
  ('synthetic.Uneven', ()),  # data 2 x mdl 4, padded
  ('tests.replay.replayed_jobs.PipelinedExperts', ()),  # stage 2 x data 2 x expert 2
  ('tests.replay.replayed_jobs.PipelinedExperts', ('mesh.num_partitions=2',)),  # stage 2 x expert 2 x mdl 2
)


def prepared(experiment: str, overrides: tuple[str, ...]):
  """A hook that checks before every step, and its run."""
  run, batch = run_of(experiment, *overrides)
  hook = FaultyDevices(every_steps=1)
  hook.prepare(run)
  return hook, run, batch


def faults(num_faults: int, num_undisturbed: int, rng: np.random.Generator) -> dict[str, int]:
  """Checks each of SMALL with and without faults."""
  counts = dict.fromkeys(('faults', 'found', 'located', 'undisturbed', 'alarms'), 0)
  for number, (experiment, overrides) in enumerate(SMALL):
    hook, run, batch = prepared(experiment, overrides)
    for _ in range(len(range(number, num_undisturbed, len(SMALL)))):
      run.step += 1
      counts['undisturbed'] += 1
      try:
        hook.before_step(run, batch)
      except CorruptionError as error:
        counts['alarms'] += 1
        print('ALARM', experiment, error, flush=True)
    for _ in range(len(range(number, num_faults, len(SMALL)))):
      numbers = ((0, 1, 2), (0,), (1,))[rng.integers(3)]
      hook.fault = Fault.drawn(rng, ('inputs', 'gradients')[rng.integers(2)], numbers)
      counts['faults'] += 1
      try:
        hook.before_step(run, batch)
        print('MISSED', experiment, hook.fault, flush=True)
      except CorruptionError as error:
        counts['found'] += 1
        is_located = f'device {hook.fault.device} of' in str(error) and str(error).count('device ') == 2
        counts['located'] += is_located
        if not is_located:
          print('NOT LOCATED', experiment, hook.fault, error, flush=True)
    print(experiment, counts, flush=True)
  return counts


def cost(experiment: str) -> dict[str, float]:
  """The seconds of a step and of a check, medians, and a check's part of a hundred steps."""
  hook, run, batch = prepared(experiment, ())
  seconds: dict[str, list[float]] = {'step': [], 'check': []}
  for _ in range(6):
    start = time.perf_counter()
    hook.before_step(run, batch)
    seconds['check'].append(time.perf_counter() - start)
    for _ in range(2):
      start = time.perf_counter()
      run.state, _ = jax.block_until_ready(run.model.train_step(run.state, batch))
      seconds['step'].append(time.perf_counter() - start)
  step, check = (float(np.median(values[len(values) // 6 :])) for values in seconds.values())  # without compiling
  return {'step_seconds': step, 'check_seconds': check, 'cost_at_100': check / (100 * step)}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--faults', type=int, default=200)
  parser.add_argument('--undisturbed', type=int, default=500)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--cost', metavar='EXPERIMENT', help='measure what a check of it costs, and nothing else')
  args = parser.parse_args()
  use_fake_devices(8)
  if args.cost:
    result = cost(args.cost)
  else:
    compile_quickly()
    result = faults(args.faults, args.undisturbed, np.random.default_rng(args.seed))
  print(json.dumps(result))


if __name__ == '__main__':
  main()
