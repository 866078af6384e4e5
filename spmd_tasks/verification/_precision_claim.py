"""The claim that bfloat16 computes what float32 does, as near as its roundings let expect.

bfloat16 keeps 8 bits of a number, so it rounds by up to 2^-8 of it. What one such rounding of every weight does to the
float32 loss and gradient is measured. The model rounds every weight once, and every value between its layers too, so
several times that distance is expected, and no more than ROUNDED_VALUES times. No distance at all would mean that
nothing was computed in bfloat16.
"""

from collections.abc import Iterator
import functools

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.verification._agreement import nearest
from spmd_tasks.verification._bench import Bench
from spmd_tasks.verification._cases import Case, Verdict, broken, held, not_applicable
from spmd_tasks.verification._noise import Difference, moved
from spmd_tasks.verification._runner import StepResult
from spmd_tasks.verification._settings import Setting

ROUNDING = 2.0**-8
ROUNDED_VALUES = 8.0
_NUM_SAMPLES = 3


def precision_cases(bench: Bench, num_more: int) -> Iterator[Case]:
  """Yields the case that the experiment with every `dtype` of its model set to bfloat16 is near."""
  del num_more
  values = bench.source.values
  own = ['dtype'] if values.get('dtype') == 'float32' else []  # the experiment's field sets those of all parts
  paths = own or [path for path in bench.source.paths_ending('dtype') if values[path] == 'float32']
  if not paths:
    reason = 'no part of the model has a field dtype that is float32'
    yield not_applicable('bfloat16', 'bfloat16', reason)
    return
  setting = Setting(overrides=tuple(f'{path}=bfloat16' for path in paths))
  yield Case(
    claim='bfloat16',
    subject=f'{paths[0]}=bfloat16' + (f' and {len(paths) - 1} more' if len(paths) > 1 else ''),
    settings=(Setting(), setting),
    decide=functools.partial(_compare_precisions, setting=setting),
  )


def _compare_precisions(bench: Bench, setting: Setting) -> Verdict:
  exact, rounded = bench.trajectory(Setting()), bench.runner(setting)
  rng = np.random.default_rng((bench.seed, 50))
  compared: list[Difference] = []
  for step in range(bench.num_steps):
    state, batch, expected = exact.state(step), exact.batches[step], exact.result(step)
    samples = [exact.runner.step(moved(state, ROUNDING, rng), batch) for _ in range(_NUM_SAMPLES)]
    found = _distances(expected, rounded.step(state, batch))
    spreads = [_distances(expected, sample) for sample in samples]
    for leaf, difference in found.items():
      allowed = ROUNDED_VALUES * max(spread[leaf] for spread in spreads)
      compared.append(Difference(step=step + 1, leaf=leaf, difference=difference, allowed=allowed))
  compared += _of_curves(bench, setting)
  if not any(each.difference for each in compared):
    raise UserError('the loss and the gradient are those of float32, bit for bit: nothing is computed in bfloat16.')
  wrong = [each for each in compared if not each.difference <= each.allowed]
  if wrong:
    return broken(bench, 'bfloat16', setting, wrong[0])
  return held(nearest(compared), bench.num_steps)


def _distances(expected: StepResult, other: StepResult) -> dict[str, float]:
  """Returns how far the loss and the gradient, taken as one vector, are from float32's."""
  names = [name for name in expected.forward if name.startswith('gradients/')]
  squares = sum(float(np.sum(np.square(expected.forward[name] - other.forward[name]))) for name in names)
  return {'loss': abs(float(expected.forward['loss'] - other.forward['loss'])), 'gradient': squares**0.5}


def _of_curves(bench: Bench, setting: Setting) -> list[Difference]:
  """Compares the losses of training without a stop, while the weights drift apart."""
  exact = bench.trajectory(Setting())
  rng = np.random.default_rng((bench.seed, 51))
  start, batches = exact.state(0), exact.batches
  samples = [exact.runner.losses(moved(start, ROUNDING, rng), batches) for _ in range(_NUM_SAMPLES)]
  # Each step adds its own roundings to those of the steps before.
  spreads = np.maximum.accumulate(np.max(np.abs(np.array(samples) - exact.losses), axis=0))
  differences = np.abs(bench.runner(setting).losses(start, batches) - exact.losses)
  leaf, allowed = 'loss of training without a stop', ROUNDED_VALUES * spreads
  return [
    Difference(step=step, leaf=leaf, difference=float(d), allowed=float(a))
    for step, (d, a) in enumerate(zip(differences, allowed), 1)
  ]
