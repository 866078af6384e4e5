"""Experiments that are not supported or have a mistake."""

from paxml import base_task
from praxis import pax_fiddle, py_utils

from pax_cases import transformers


class OwnTask(base_task.BaseTask):
  """A task that is not a SingleTask."""


class WithOwnTask(transformers.SmallLm):
  """An experiment with a task of the user's own kind."""

  def task(self):
    return pax_fiddle.Config(OwnTask, name='own')


class UnknownAxis(transformers.SmallLm):
  """Shards inputs over an axis that the mesh does not have."""

  def change(self, task, lm):
    task.train.inputs_split_mapping = py_utils.NestedMap(map_1d=(('replica', 'dat'),))


class UnknownLoss(transformers.SmallLm):
  """The learner names a loss that the model does not return."""

  def change(self, task, lm):
    task.train.learner.loss_name = 'nll'
