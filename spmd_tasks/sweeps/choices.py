"""Lists the settings of a sweep: `Experiment.sweep()` returns such a list.

    product({'learning_rate': (1e-3, 1e-2), 'seed': range(3)})          # 6 jobs: every pair
    zipped({'model_dims': (64, 128), 'learning_rate': (1e-2, 5e-3)})    # 2 jobs: the first of each, the second of each
    drawn({'learning_rate': lambda rng: 10 ** rng.uniform(-4, -2)}, 20, seed=0)   # 20 random jobs

Lists may be joined: `product(...) + zipped(...)`.
"""

from collections.abc import Callable, Mapping, Sequence
import itertools
import random
from typing import Any

from spmd_tasks.errors import UserError

Settings = dict[str, Any]  # of a job: path -> value, as for `--set`


def product(values: Mapping[str, Sequence[Any]]) -> list[Settings]:
  """Returns the settings of every combination of the values of each path; the last path varies fastest."""
  return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


def zipped(values: Mapping[str, Sequence[Any]]) -> list[Settings]:
  """Returns the settings with the i-th value of each path, for each i.

  Raises a UserError: the paths have different numbers of values.
  """
  counts = {path: len(each) for path, each in values.items()}
  if len(set(counts.values())) > 1:
    raise UserError(f'zipped() needs equally many values of each path, not {counts}: add values, or use product().')
  return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


def drawn(
  values: Mapping[str, Sequence[Any] | Callable[[random.Random], Any]], count: int, *, seed: int
) -> list[Settings]:
  """Returns `count` random settings, the same ones for the same seed.

  Args:
    values: by path, a sequence to choose from, or a function that draws a value with a `random.Random`. Floats are
      rounded to four significant digits, so that the name of a job shows the whole value.
    count: how many settings; the first ones stay the same when it grows.
    seed: of the random numbers.
  """
  rng = random.Random(seed)

  def draw(choices: Any) -> Any:
    value = choices(rng) if callable(choices) else rng.choice(choices)
    return float(f'{value:.4g}') if isinstance(value, float) and callable(choices) else value

  return [{path: draw(choices) for path, choices in values.items()} for _ in range(count)]
