#!/usr/bin/env python
"""Trains a ladder of sizes, predicts the loss of the next size before it runs, and then says how wrong it was.

    .venv/bin/python scripts/ladder.py --job_log_dir runs/ladder [--exp lm.TinyLadder] [--next 7] [--set PATH=VALUE]

The sizes are the jobs of the experiment's `sweep()` over `depth`; --next is the depth to predict. FLOPs are 6 per
active parameter and token. The fit is loss = E + A * FLOPs^-alpha (Kaplan et al., arXiv 2001.08361; Hoffmann et al.,
arXiv 2203.15556) by least squares on the logarithm of the loss. The band is what predictions become without any one of
the sizes.

<job_log_dir>/prediction.json is written before the next size starts, and never again; ladder.json and ladder.svg have
the fit, the losses and the error. A killed ladder continues by the same command. The last line is one JSON object.
"""

import argparse
import datetime
import json
import math
from pathlib import Path
import sys
from typing import Any, NamedTuple

from alternation import print_result
import jax
import numpy as np
from svg import FAINT, Drawing

from spmd_tasks.config import resolve
from spmd_tasks.main import run
from spmd_tasks.programs.recorded_runs import find_runs

HARDWARE = '2 shared cores (Intel Xeon or AMD EPYC)'


class Size(NamedTuple):
  """A size of the ladder; `loss` is the cross entropy of the last evaluation, in nats, None before it ran."""

  depth: int
  num_parameters: int
  flops: float
  loss: float | None


class Fit(NamedTuple):
  """loss = irreducible + scale * flops^-exponent."""

  irreducible: float
  scale: float
  exponent: float

  def __call__(self, flops: Any) -> Any:
    return self.irreducible + self.scale * flops**-self.exponent


def fit(sizes: list[Size]) -> Fit:
  """Fits the three constants, none negative: for each exponent and irreducible loss the scale follows."""
  flops, losses = (np.array([getattr(size, name) for size in sizes], np.float64) for name in ('flops', 'loss'))
  best, smallest = None, math.inf
  for irreducible in np.linspace(0.0, losses.min() * 0.99, 200):
    # A line through log(loss - irreducible) over log(flops).
    slope, intercept = np.polyfit(np.log(flops), np.log(losses - irreducible), 1)
    candidate = Fit(float(irreducible), float(np.exp(intercept)), float(-slope))
    error = float(np.sum(np.square(np.log(candidate(flops)) - np.log(losses))))
    if error < smallest:
      best, smallest = candidate, error
  assert best is not None
  return best


def predict(sizes: list[Size], flops: float) -> dict[str, Any]:
  """Returns the prediction of the loss at `flops`, with the fit and the band."""
  law = fit(sizes)
  others = [fit([*sizes[:i], *sizes[i + 1 :]])(flops) for i in range(len(sizes))] if len(sizes) > 3 else []
  band = [min([*others, law(flops)]), max([*others, law(flops)])]
  return {'loss': law(flops), 'band': band, 'flops': flops, 'fit': law._asdict()}


def size_of(name: str, overrides: list[str], directory: Path) -> Size:
  experiment: Any = resolve(name, overrides).experiment
  num_parameters = experiment.num_active_parameters()
  tokens = experiment.num_train_steps * experiment.batch_size * experiment.seq_len
  loss: Any = None
  if directory.exists():
    [recorded] = find_runs([str(directory)])
    loss = recorded.lines.get(experiment.num_train_steps, {}).get('eval/valid/cross_entropy')
  return Size(experiment.depth, num_parameters, 6.0 * num_parameters * tokens, loss)


def train(name: str, overrides: list[str], directory: Path, *more: str) -> None:
  settings = [flag for override in overrides for flag in ('--set', override)]
  code = run(['--exp', name, '--mode', 'train', '--job_log_dir', str(directory), *settings, *more])
  if code:
    sys.exit(code)


def table(sizes: list[Size], last: Size, prediction: dict[str, Any], error: float) -> dict[str, Any]:
  """Returns the columns and rows of the table: the sizes, and the prediction of the last one."""
  rows = [
    [f'{size.depth}', f'{size.num_parameters:,}', f'{size.flops:.2e}', f'{size.loss:.4f}', '', '']
    for size in [*sizes, last]
  ]
  low, high = prediction['band']
  rows[-1][4:] = [f'{prediction["loss"]:.4f} ({low:.4f} to {high:.4f})', f'{error:+.2%}']
  columns = ['depth', 'parameters', 'FLOPs', 'loss', 'predicted before it ran', 'error']
  return {'columns': columns, 'rows': rows}


def draw(sizes: list[Size], last: Size, prediction: dict[str, Any]) -> str:
  """Returns a picture of the losses over FLOPs, both logarithmic, with the fit and the prediction's band."""
  width, height, left, top = 640, 420, 70, 40
  law, [low, high] = Fit(**prediction['fit']), prediction['band']
  all_sizes = [*sizes, last]
  x_range = [math.log(size.flops) for size in (all_sizes[0], last)]
  losses = [loss for size in all_sizes if (loss := size.loss) is not None] + [low, high]
  y_range = math.log(max(losses) * 1.02), math.log(min(losses) / 1.02)
  picture = Drawing(width, height, 'Loss over compute')

  def place(flops: float, loss: float) -> tuple[float, float]:
    x = (math.log(flops) - x_range[0]) / (x_range[1] - x_range[0])
    y = (math.log(loss) - y_range[0]) / (y_range[1] - y_range[0])
    return left + 20 + x * (width - left - 60), top + y * (height - top - 70)

  picture.line([(left, top), (left, height - 50), (width - 20, height - 50)], color=FAINT)
  picture.text(left, 24, 'Cross entropy in nats over training FLOPs, both logarithmic', 15, bold=True)
  picture.line([place(flops, law(flops)) for flops in np.geomspace(all_sizes[0].flops, last.flops, 60)])
  picture.line([place(last.flops, low), place(last.flops, high)], color='#d97706', width=6)
  for size in all_sizes:
    x, _ = place(size.flops, 1.0)
    picture.text(x, height - 30, f'{size.flops:.0e}', 11, FAINT, 'middle')
    if size.loss is not None:
      _, y = place(size.flops, size.loss)
      picture.rect(x - 4, y - 4, 8, 8, '#2563eb')
      picture.text(x, y - 10, f'{size.loss:.3f}', 11, anchor='middle')
  picture.text(width - 20, height - 8, 'orange: what was predicted before the last size ran', 11, FAINT, 'end')
  return picture.svg()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--exp', default='lm.TinyLadder')
  parser.add_argument('--job_log_dir', type=Path, required=True)
  parser.add_argument('--next', type=int, default=7, help='the depth to predict')
  parser.add_argument('--to', type=Path, help='a result of docs/benchmarks to write')
  parser.add_argument('--set', action='append', default=[], metavar='PATH=VALUE')
  flags = parser.parse_args()
  root, overrides = flags.job_log_dir, flags.set
  rungs: Any = resolve(flags.exp, overrides).experiment.sweep()
  depths = [rung['depth'] for rung in rungs]
  if flags.next <= max(depths, default=flags.next):
    parser.error(f'--next {flags.next} must be larger than the depths of the sweep, {depths}')

  def size_at(depth: int) -> Size:
    return size_of(flags.exp, [*overrides, f'depth={depth}'], root / f'depth={depth}')

  train(flags.exp, overrides, root, '--sweep', 'all')
  sizes = [size_at(depth) for depth in depths]
  path = root / 'prediction.json'
  if not path.exists():
    prediction: Any = predict(sizes, size_at(flags.next).flops) | {'depth': flags.next}
    prediction['written'] = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    path.write_text(json.dumps(prediction, indent=1) + '\n', encoding='utf-8')
  prediction = json.loads(path.read_text(encoding='utf-8'))
  print(f'predicted for depth {prediction["depth"]}: {prediction["loss"]:.4f}, {prediction["band"]}', flush=True)
  train(flags.exp, [*overrides, f'depth={prediction["depth"]}'], root / f'depth={prediction["depth"]}')
  last = size_at(prediction['depth'])
  error = prediction['loss'] / last.loss - 1
  result = {'sizes': [size._asdict() for size in [*sizes, last]], 'prediction': prediction, 'error': error}
  (root / 'ladder.json').write_text(json.dumps(result, indent=1) + '\n', encoding='utf-8')
  (root / 'ladder.svg').write_text(draw(sizes, last, prediction), encoding='utf-8')
  if flags.to is not None:
    about = {'date': str(datetime.date.today()), 'hardware': HARDWARE, 'versions': f'jax {jax.__version__}'}
    about['command'] = 'scripts/ladder.py --job_log_dir runs/ladder'
    text = json.dumps(about | table(sizes, last, prediction, error), indent=1)
    flags.to.write_text(text + '\n', encoding='utf-8')
  print_result(**result, ratio=prediction['loss'] / last.loss)


if __name__ == '__main__':
  main()
