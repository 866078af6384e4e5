"""The researcher's file with an eval set whose last batch has seven rows, which no number of processes divides."""

import itertools

from tests.programs.plain_experiment import Shapes, batches


class Uneven(Shapes):
  """Twelve steps, of which every one is logged."""

  num_train_steps = 12
  log_every_steps = 1
  tensorboard = False
  step_timeout_s = 60.0

  def eval_inputs(self):
    first, second = itertools.islice(batches(1), 2)
    return {'valid': [first, {name: rows[:7] for name, rows in second.items()}]}
