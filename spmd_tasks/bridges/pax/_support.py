"""Refuses what a Pax experiment asks for and a run here does not do, by name and with the reason."""

from collections.abc import Iterator
from typing import Any

from paxml import base_experiment

from spmd_tasks.errors import UserError

# Methods of an experiment that replace a part of Paxml's own loop, and what to do instead.
_REPLACED_PARTS = {
  'partitioner': 'meshes, padding and compiled steps are ours',
  'executor': 'the training loop is ours',
  'train_programs': "the training step is Paxml's, but the loop around it is ours",
  'eval_programs': "the eval step is Paxml's, but the loop around it is ours",
  'decode_programs': "the decode step is Paxml's, but the loop around it is ours",
}
# Fields of task.train: value that means "off", and the reason.
_TRAIN_FIELDS = {
  'external_checkpoint_path': 'name the job in init_from instead',
  'external_checkpoint_handler': 'checkpoints are read by our own reader',
  'restore_transformations': 'checkpoints are read by our own reader',
}


def refuse_unsupported(experiment: Any, task: Any) -> None:
  """Checks a Pax experiment and the config of its task.

  Raises:
    UserError: it uses something that is not supported; the message lists all of it.
  """
  reasons = list(_reasons(experiment, task))
  if reasons:
    raise UserError(f'{type(experiment).__name__} cannot run here: {"; ".join(reasons)}.')


def _reasons(experiment: Any, task: Any) -> Iterator[str]:
  for name, reason in _REPLACED_PARTS.items():
    if getattr(type(experiment), name) is not getattr(base_experiment.BaseExperiment, name):
      yield f'it defines {name}(), but {reason}'
  if isinstance(task.train.learner, list | tuple):
    yield f'task.train.learner is a list of {len(task.train.learner)} learners; Paxml itself updates with one'
  if task.early_stopping_fn is not None:
    yield 'task.early_stopping_fn is set: end the run by num_train_steps'
  for name, reason in _TRAIN_FIELDS.items():
    if value := getattr(task.train, name):
      yield f'task.train.{name} = {str(value)[:60]}: {reason}'
