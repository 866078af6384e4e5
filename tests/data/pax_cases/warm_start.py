"""Experiments that load parts of checkpoints with init_from_checkpoint_rules."""

import os

from pax_lab import dense_lm
from paxml import tasks_lib

OTHER = os.environ.get('OTHER_JOB', '/jobs/other')


class SomeWeights(dense_lm.DenseLmEma):
  """Loads averages of the softmax, and the layers' weights except biases; the learning rate is 0."""

  LEARNING_RATE = 0.0
  RULES = dict(
    load_rules=[('params/lm/softmax/(.*)', 'ema/params/lm/softmax/{}'), ('(.*)/(transformer)/(.*)', '{}/{}/{}')],
    ignore_rules=['.*/b$'],
    safe_load=True,
  )

  def task(self):
    task = super().task()
    task.train.init_from_checkpoint_rules = {
      OTHER: tasks_lib.CheckpointLoadingRules(task_p=super().task(), **self.RULES)
    }
    return task


class Everything(SomeWeights):
  """Loads all variables, the optimizer state and the step."""

  RULES = dict(load_rules=[tasks_lib.LOAD_ALL], load_opt_states=True, load_step=True)


class Misspelled(SomeWeights):
  """A pattern that no variable matches."""

  RULES = dict(load_rules=[('params/lm/sofmax/(.*)', 'params/lm/softmax/{}')], safe_load=True)


class Missing(SomeWeights):
  """A source that the checkpoint does not have."""

  RULES = dict(load_rules=[('params/lm/softmax/(.*)', 'params/encoder/{}')])
