"""Regular expressions with which learners select variables."""

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import jax.numpy as jnp
from paxml import learners
from praxis import base_layer, optimizers, pax_fiddle, schedules
from spmd_tasks.bridges.pax._support import check_trained_variables
from spmd_tasks.errors import UserError

weight = base_layer.WeightHParams(shape=[2], dtype=jnp.float32)
hparams = {'params': {'lm': {'softmax': {'w': weight}, 'ff': {'w': weight}}}}
adam = pax_fiddle.Config(optimizers.Adam, lr_schedule=pax_fiddle.Config(schedules.Constant))
auxiliary = dict(cls=learners.MultiOptimizerLearner, auxiliary_optimizers=[adam.clone()], auxiliary_names=['a'])
two = auxiliary | dict(auxiliary_optimizers=[adam.clone(), adam.clone()], auxiliary_names=['a', 'b'])
for words, settings in (
  (None, {}),
  (None, dict(bprop_variable_exclusion='.*softmax.*')),
  ("no variable is trained with task.train.learner.bprop_variable_exclusion = '.*'",
   dict(bprop_variable_exclusion='.*')),
  ("bprop_variable_inclusion = ['softmax'], which must match whole names such as 'params/lm/",
   dict(bprop_variable_inclusion=['softmax'])),
  ('set only one', dict(bprop_variable_exclusion='a', bprop_variable_inclusion='b')),
  (None, auxiliary | dict(auxiliary_regex=['.*softmax'])),
  (None, auxiliary | dict(auxiliary_regex=['.*'])),
  ("['.*softmax', '.*lm/s'], which all match 'params/lm/softmax/w'",
   two | dict(auxiliary_regex=['.*softmax', '.*lm/s'])),
):
  fields = dict(cls=learners.Learner, name='l', loss_name='loss', optimizer=adam.clone()) | settings
  config = pax_fiddle.Config(fields.pop('cls'), **fields)
  try:
    check_trained_variables(pax_fiddle.build(config), hparams)
    assert words is None, words
  except UserError as error:
    assert words is not None and words in str(error), (words, error)
"""


def test_learners_must_train_variables_once(run_pax):
  finished = run_pax(command=('-c', PROGRAM))
  assert finished.returncode == 0, finished.stderr
