"""Raises errors for features of Pax experiments that are not supported, with the reason and the remedy."""

from collections.abc import Iterator
import contextlib
import inspect
import re
from typing import Any

from absl import logging
import jax
from paxml import base_experiment, learners, tasks_lib
from praxis import base_input, layers, optimizers, pax_fiddle, py_utils

from spmd_tasks.errors import UserError, own_code_errors

# Methods with which an experiment replaces a part of Paxml's loop.
_LOOP_METHODS = ('partitioner', 'executor', 'train_programs', 'eval_programs', 'decode_programs')
# Unsupported fields of task.train -> the remedy.
_TRAIN_FIELDS = {
  'external_checkpoint_path': 'set init_from to the job instead',
  'external_checkpoint_handler': 'unset it, because Paxml does not read the checkpoints',
  'restore_transformations': 'unset it, because Paxml does not read the checkpoints',
}


def method_errors(cls: type, method: str) -> contextlib.AbstractContextManager[None]:
  """Returns a context in which errors of a method of a Pax experiment, such as 'task()', become UserErrors."""
  return own_code_errors(f'{method} of {cls.__module__}.{cls.__qualname__}', part=cls)


def refuse_unsupported(experiment: Any, task: Any) -> None:
  """Checks a Pax experiment and the config of its task.

  Raises a UserError that lists all features that are not supported.
  """
  problems = list(_problems(experiment, task))
  if problems:
    raise UserError(f'{type(experiment).__name__} cannot run here: {"; ".join(problems)}.')


def check_datasets(cls: type, method: str, datasets: Any) -> None:
  """Raises a UserError if a method of a Pax experiment did not return a list of input configs."""
  if not isinstance(datasets, list | tuple):
    result = _describe_config(datasets)
  elif others := [dataset for dataset in datasets if not _is_config_of(dataset, base_input.BaseInput)]:
    result = f'a list with {_describe_config(others[0])}'
  else:
    return
  raise UserError(
    f'{method} of {cls.__module__}.{cls.__qualname__} returns {result}: return a list of pax_fiddle.Config of '
    'base_input.BaseInput.'
  )


def _problems(experiment: Any, task: Any) -> Iterator[str]:
  if not _is_config_of(task, tasks_lib.SingleTask):
    if isinstance(task, tasks_lib.SingleTask):
      yield f'task() returns {_describe_type(task)} that is built: return its pax_fiddle.Config'
    else:
      yield f'task() returns {_describe_config(task)}: return a pax_fiddle.Config of a tasks_lib.SingleTask'
    return
  if not _is_config_of(task.train, tasks_lib.SingleTask.Train):
    yield f'task.train is {_describe_type(task.train)}: set it to the config of a SingleTask.Train, its default'
    return
  if not isinstance(task.model, pax_fiddle.Config):
    yield f'task.model is {_describe_type(task.model)}: set it to the config of a base_model.BaseModel'
    return
  for name in _LOOP_METHODS:
    if getattr(type(experiment), name) is not getattr(base_experiment.BaseExperiment, name):
      yield f"it defines {name}(): remove it, because Paxml's loop does not run here"
  if isinstance(task.train.learner, list | tuple):
    yield f'task.train.learner is a list of {len(task.train.learner)} learners: use one, as Paxml itself requires'
  else:
    yield from _learner_problems(task)
  for name, remedy in _TRAIN_FIELDS.items():
    if value := getattr(task.train, name):
      yield f'task.train.{name} = {str(value)[:60]}: {remedy}'
  yield from _shampoo_problems(task.train.learner)
  yield from _pipeline_problems(task.model)


def _learner_problems(task: Any) -> Iterator[str]:
  learner = task.train.learner
  if not isinstance(learner, pax_fiddle.Config):
    yield f'task.train.learner is {_describe_type(learner)}: set it to the config of a learners.Learner'
    return
  optimizer = getattr(learner, 'optimizer', None)  # has no default
  if not isinstance(optimizer, pax_fiddle.Config):
    yield f'task.train.learner.optimizer is {_describe_type(optimizer)}: set it to a config, such as of optimizers.Adam'
  elif getattr(optimizer, 'lr_schedule', '') is None:
    yield 'task.train.learner.optimizer.lr_schedule is None: set it to a config, such as of schedules.Constant'
  if learner.loss_name is None and task.loss_aggregator is None:
    yield "task.train.learner.loss_name is None: set it to a weighted scalar of compute_loss, such as 'total_loss'"


def _shampoo_problems(learner: Any) -> Iterator[str]:
  if 'average_grad' in inspect.signature(optimizers.distributed_shampoo_optimizer).parameters:
    return
  for config, path in _configs(learner, optimizers.DistributedShampoo):
    yield (
      f'task.train.learner{path} is {config.cls.__name__}, for which Praxis passes arguments, such as average_grad, '
      'that the installed optax-shampoo does not have: use another optimizer'
    )


def check_trained_variables(learner: learners.Learner, weight_hparams: Any) -> None:
  """Checks the regular expressions with which a built learner selects the variables to train.

  Args:
    learner: the learner.
    weight_hparams: the model's WeightHParams by collection.

  Raises a UserError if a regular expression is invalid, no variable is trained, or the expressions are ambiguous.
  """
  for name in ('bprop_variable_inclusion', 'bprop_variable_exclusion', 'auxiliary_regex'):
    regexes = getattr(learner, name, None) or ()
    for regex in [regexes] if isinstance(regexes, str) else regexes:
      try:
        re.compile(regex)
      except re.error as error:
        raise UserError(f'task.train.learner.{name} has {regex!r}, an invalid regular expression: {error}.') from error
  inclusion, exclusion = learner.bprop_variable_inclusion, learner.bprop_variable_exclusion
  if inclusion and exclusion:
    raise UserError(
      f'task.train.learner has bprop_variable_inclusion = {inclusion!r} and bprop_variable_exclusion = {exclusion!r}: '
      'set only one.'
    )
  names = py_utils.extract_prefixed_keys_from_nested_map(weight_hparams)
  is_excluded = tasks_lib.get_excluded_var_mask_for_grad(weight_hparams, learner)
  trained = [name for name, excluded in zip(*map(jax.tree.leaves, (names, is_excluded)), strict=True) if not excluded]
  if not trained:
    raise UserError(
      f'no variable is trained with task.train.learner.bprop_variable_{"inclusion" if inclusion else "exclusion"} = '
      f'{inclusion or exclusion!r}, which must match whole names such as {jax.tree.leaves(names)[0]!r}: change it to '
      'leave at least one.'
    )
  if not isinstance(learner, learners.MultiOptimizerLearner):
    return
  matching = [[regex for regex in learner.auxiliary_regex if re.match(regex, name)] for name in trained]
  for name, regexes in zip(trained, matching, strict=True):
    if len(regexes) > 1:
      raise UserError(
        f'task.train.learner.auxiliary_regex has {regexes}, which all match {name!r}: let only one match it.'
      )
  for regex in learner.auxiliary_regex:
    if [regex] not in matching:
      logging.warning('task.train.learner.auxiliary_regex %r matches none of the variables %s.', regex, trained)


def _pipeline_problems(model: Any) -> Iterator[str]:
  for config, path in _configs(model, layers.PipelinedTransformer):
    if config.circular_repeat > 1:
      yield (
        f'task.model{path} has circular_repeat = {config.circular_repeat}, but JAX since 0.4.30 does not support the '
        'nested vmaps of circular pipelines in Praxis: set it to 1'
      )
    if _is_config_of(config.pipeline_stage, layers.StackedTransformerRepeated):
      yield (
        f'task.model{path} has a StackedTransformerRepeated as pipeline_stage, but Praxis fails on summaries of '
        'repeated layers in a pipeline: use a StackedTransformer of that many layers'
      )


def _configs(root: Any, cls: type) -> Iterator[tuple[Any, str]]:
  """Yields the configs of a class or its subclasses in `root`, with their paths, such as `.lm_tpl`."""
  for value, path in pax_fiddle.daglish.iterate(root):
    if _is_config_of(value, cls):
      yield value, pax_fiddle.daglish.path_str(path)


def _describe_type(value: Any) -> str:
  return 'None' if value is None else f'a {type(value).__name__}'


def _describe_config(value: Any) -> str:
  """Describes a value that may be a config: 'a config of Adam', 'a dict'."""
  return f'a config of {getattr(value.cls, "__name__", value.cls)}' if hasattr(value, 'cls') else _describe_type(value)


def _is_config_of(value: Any, cls: type) -> bool:
  return isinstance(value, pax_fiddle.Config) and isinstance(value.cls, type) and issubclass(value.cls, cls)
