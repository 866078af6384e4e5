#!/usr/bin/env python
"""Measures how many tokens per second the host reads, tokenizes and packs, and how many the train step consumes.

    .venv/bin/python scripts/bench_input.py [--quick]

The input is lm.StdlibTiny's: bytes of the standard library's source, packed, read by one process without workers. The
last line is one JSON object. `ratio` is input tokens over step tokens per second, measured in turn, as the median over
rounds; the goal is more than 1. `host_wait_fraction` is the fraction of time that a training loop with prefetching
waits for its input. The step runs on 8 fake CPU devices; compare an accelerator's rate with `input_tokens_per_second`.
"""

import argparse
import math
from statistics import median
import time
from typing import Any

from alternation import print_result
import jax

from spmd_tasks.config import resolve
from spmd_tasks.distributed import use_fake_devices
from spmd_tasks.experiment import partition_job
from spmd_tasks.inputs import Prefetcher


class Training:
  """The train step with its state, fed by a prefetcher as in a job."""

  def __init__(self, job: Any):
    model = partition_job(job)
    self._step, self._state = model.train_step, model.init(job.experiment.seed)
    self._step.compile()
    self.batches = Prefetcher(job.train_input.make_iterator(), self._step.place, depth=job.experiment.prefetch_batches)

  def run(self, num_steps: int) -> tuple[float, float]:
    """Returns the seconds of the steps, and the seconds that they waited for batches."""
    start, waited = time.perf_counter(), self.batches.seconds_waited
    for _ in range(num_steps):
      batch, _ = next(self.batches)
      self._state, metrics = self._step(self._state, batch)
    jax.block_until_ready(metrics)
    return time.perf_counter() - start, self.batches.seconds_waited - waited


def read(iterator: Any, num_batches: int) -> tuple[float, float]:
  """Returns the seconds for `num_batches`, and the fraction of their tokens that is not padding."""
  start = time.perf_counter()
  batches = [next(iterator) for _ in range(num_batches)]
  return time.perf_counter() - start, sum(batch['weights'].mean() for batch in batches) / num_batches


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--quick', action='store_true', help='two short rounds, to see that it works')
  parser.add_argument('--num_rounds', type=int, default=20)
  args = parser.parse_args()
  num_rounds, num_batches, num_steps = (2, 20, 2) if args.quick else (args.num_rounds, 300, 10)
  use_fake_devices(8)
  job = resolve('lm.StdlibTiny', ['num_layers=1', 'batch_size=8'] if args.quick else []).build()
  batch_tokens = math.prod(job.train_input.element_spec()['ids'].shape)
  training, iterator = Training(job), job.train_input.make_iterator()
  training.run(2)
  read(iterator, 2)
  input_rates, step_rates, wait_fractions, filled = [], [], [], []
  for _ in range(num_rounds):
    seconds, full = read(iterator, num_batches)
    input_rates.append(num_batches * batch_tokens / seconds)
    filled.append(full)
    seconds, waited = training.run(num_steps)
    step_rates.append(num_steps * batch_tokens / seconds)
    wait_fractions.append(waited / seconds)
  training.batches.close()
  iterator.close()
  print_result(
    ratio=median(a / b for a, b in zip(input_rates, step_rates)),
    input_tokens_per_second=median(input_rates),
    step_tokens_per_second=median(step_rates),
    host_wait_fraction=median(wait_fractions),
    filled_fraction=float(median(filled)),
    num_rounds=num_rounds,
  )


if __name__ == '__main__':
  main()
