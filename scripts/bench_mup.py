#!/usr/bin/env python
"""Finds the best learning rate at several widths, with muP and without it.

    .venv/bin/python scripts/bench_mup.py [--quick] [--widths 128,256,512,1024] [--to FILE]

Two layers read the standard library's source, 512 bytes per step, for 64 steps; the loss of a run is the mean of its
last 8 steps. From the best rate of the width before, the search doubles and halves the rate until both neighbors are
worse. The last line is one JSON object: the losses by parametrization, width and rate, and the best rates. `--to` also
writes the table of docs/benchmarks.
"""

import argparse
from collections.abc import Callable
import contextlib
import datetime
import functools
import json
import math
from pathlib import Path
from typing import Any

from alternation import print_result
import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.experiment import Job, partition_job
from spmd_tasks.learning import LinearWarmupCosine, Schedule
from spmd_tasks.recipes import DenseLanguageModel

KINDS = ('muP', 'standard')  # the base width of muP is the first width
RATES = tuple(2.0**exponent for exponent in range(-12, 0))
FIRST = RATES.index(2.0**-5)
HARDWARE = '2 shared cores (Intel Xeon or AMD EPYC)'
STRIDE = 10_000  # one program trains with all rates: the steps of rate i begin at i * STRIDE


def one_of_rates(num_steps: int) -> Schedule:
  """Returns the schedule that warms up to rate i for 2 steps and falls to a tenth of it, from step i * STRIDE on."""
  shape = LinearWarmupCosine(peak=1.0, warmup_steps=2, total_steps=num_steps, final_fraction=0.1)

  def rate_at(step: jax.typing.ArrayLike) -> jax.Array:
    step = jnp.asarray(step)
    return jnp.asarray(RATES)[step // STRIDE] * shape(step % STRIDE + 1)

  return rate_at


class Model(DenseLanguageModel):
  """Heads of 32 features, more of them in wider models."""

  num_layers = 2
  seq_len = 64
  batch_size = 8
  num_train_steps = 64
  weight_decay = 0.0

  def optimizer(self) -> fdl.Config:
    adam: Any = super().optimizer()
    adam.learning_rate = one_of_rates(self.num_train_steps)  # type: ignore[operator]
    return adam


def compile_training(width: int, base_width: int | None, num_steps: int) -> Callable[[int], float]:
  """Returns the function from the number of a rate to the mean loss of the last eighth of the steps."""
  sizes: Any = {'model_dims': width, 'num_heads': max(width // 32, 1), 'hidden_dims': 3 * width}
  experiment = Model(**sizes, mup_base_width=base_width, num_train_steps=num_steps)
  task, train_input = fdl.build((experiment.task(), experiment.train_input()))
  model = partition_job(Job(name='bench_mup', experiment=experiment, task=task, train_input=train_input))
  with contextlib.closing(train_input.make_iterator()) as iterator:
    batches = [next(iterator) for _ in range(num_steps)]

  def train(number: int) -> float:
    state, losses = model.init(0), []
    state = state.replace(step=jnp.full_like(state.step, number * STRIDE))
    for batch in batches:
      state, metrics = model.train_step(state, model.train_step.place(batch))
      losses.append(metrics['loss'])
    loss = float(np.mean(jax.device_get(losses)[-max(num_steps // 8, 1) :]))
    return loss if math.isfinite(loss) else math.inf

  return train


def search(kind: str, widths: list[int], num_steps: int) -> dict[int, dict[float, float]]:
  """Returns the losses by width and rate."""
  losses, best = {}, FIRST
  for width in widths:
    base_width = widths[0] if kind == 'muP' else None
    train = functools.cache(compile_training(width, base_width, num_steps))
    tried: set[int] = set()
    while (better := min((best - 1, best, best + 1), key=train)) != best or not tried:
      tried |= {best - 1, best, best + 1}
      best = better
    losses[width] = {RATES[number]: train(number) for number in sorted({*tried, best - 1, best, best + 1})}
    print(f'{kind}, width {width}: {losses[width]}', flush=True)
  return losses


def table(losses: dict[str, dict[int, dict[float, float]]]) -> dict[str, list]:
  """Returns the columns and rows of the table: a loss per rate, and the best rate."""
  rates = sorted({rate for by_width in losses.values() for by_rate in by_width.values() for rate in by_rate})
  rows = []
  for kind, by_width in losses.items():
    for width, by_rate in by_width.items():
      best = min(by_rate, key=by_rate.__getitem__)
      rows.append([kind, width, f'{best:.4f}', *[f'{by_rate[rate]:.3f}' if rate in by_rate else '' for rate in rates]])
  return {'columns': ['', 'width', 'best rate', *[f'{rate:.4f}' for rate in rates]], 'rows': rows}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--quick', action='store_true', help='width 32 for 4 steps, to see that it works')
  parser.add_argument('--widths', default='128,256,512,1024')
  parser.add_argument('--to', type=Path, help='a result of docs/benchmarks to write')
  flags = parser.parse_args()
  widths, num_steps = ([32], 4) if flags.quick else ([int(width) for width in flags.widths.split(',')], 64)
  losses = {kind: search(kind, widths, num_steps) for kind in KINDS}
  best = {
    kind: {width: min(by_rate, key=by_rate.__getitem__) for width, by_rate in by_width.items()}
    for kind, by_width in losses.items()
  }
  if flags.to is not None:
    result: dict[str, Any] = {
      'date': str(datetime.date.today()),
      'hardware': HARDWARE,
      'versions': f'jax {jax.__version__}',
    }
    result |= {'command': f'scripts/bench_mup.py --widths {",".join(map(str, widths))}'} | table(losses)
    flags.to.write_text(json.dumps(result, indent=1) + '\n', encoding='utf-8')
  ratio = best['muP'][widths[-1]] / best['muP'][widths[0]]
  print_result(losses=losses, best=best, ratio=ratio)


if __name__ == '__main__':
  main()
