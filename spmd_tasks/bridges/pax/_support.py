"""Refuses what a Pax experiment asks for and a run here does not do, by name and with the reason."""

from collections.abc import Iterator
import contextlib
import inspect
import re
from typing import Any

from absl import logging
import jax
from paxml import base_experiment, learners, tasks_lib
from praxis import base_input, layers, optimizers, pax_fiddle, py_utils

from spmd_tasks.errors import UserError, naming_own_code

# Methods of an experiment that replace a part of Paxml's own loop, and what to do instead.
_REPLACED_PARTS = {
  'partitioner': 'meshes, padding and compiled steps are ours',
  'executor': 'the training loop is ours',
  **{f'{kind}_programs': "the step is Paxml's, but the loop around it is ours" for kind in ('train', 'eval', 'decode')},
}
# Fields of task.train that must be off, and the reason.
_TRAIN_FIELDS = {
  'external_checkpoint_path': 'name the job in init_from instead',
  'external_checkpoint_handler': 'checkpoints are read by our own reader',
  'restore_transformations': 'checkpoints are read by our own reader',
}


def naming_method(cls: type, method: str) -> contextlib.AbstractContextManager[None]:
  """Context of a call of a method, such as 'task()', of the class of a Pax experiment: its errors become UserErrors."""
  return naming_own_code(f'{method} of {cls.__module__}.{cls.__qualname__}', part=cls)


def refuse_unsupported(experiment: Any, task: Any) -> None:
  """Checks a Pax experiment and the config of its task.

  Raises a UserError if it uses something that is not supported; the message lists all of it.
  """
  reasons = list(_reasons(experiment, task))
  if reasons:
    raise UserError(f'{type(experiment).__name__} cannot run here: {"; ".join(reasons)}.')


def check_datasets(cls: type, method: str, datasets: Any) -> None:
  """Raises a UserError if what a method of a Pax experiment's class returned is no list of configs of inputs."""
  wrong = [] if isinstance(datasets, list | tuple) else [datasets]
  wrong = wrong or [dataset for dataset in datasets if not _is_config_of(dataset, base_input.BaseInput)]
  if wrong:
    shown = f'a config of {getattr(wrong[0].cls, "__name__", "")}' if hasattr(wrong[0], 'cls') else _kind(wrong[0])
    shown = shown if wrong[0] is datasets else f'a list with {shown}'
    raise UserError(
      f'{method} of {cls.__module__}.{cls.__qualname__} returns {shown}: return a list of pax_fiddle.Config of a '
      'base_input.BaseInput.'
    )


def _reasons(experiment: Any, task: Any) -> Iterator[str]:
  if not _is_config_of(task, tasks_lib.SingleTask):
    if isinstance(task, tasks_lib.SingleTask):
      yield f'task() returns {_kind(task)} that is built: return its pax_fiddle.Config'
    else:
      kind = f'a {getattr(task.cls, "__name__", task.cls)}' if isinstance(task, pax_fiddle.Config) else _kind(task)
      yield f'task() returns {kind}, which is no tasks_lib.SingleTask, whose steps run here: derive it'
    return
  if not _is_config_of(task.train, tasks_lib.SingleTask.Train):
    yield f'task.train is {_kind(task.train)}: give it the config of a SingleTask.Train, as task.train is by default'
    return
  if not isinstance(task.model, pax_fiddle.Config):
    yield f'task.model is {_kind(task.model)}: give it the config of a base_model.BaseModel'
    return
  for name, reason in _REPLACED_PARTS.items():
    if getattr(type(experiment), name) is not getattr(base_experiment.BaseExperiment, name):
      yield f'it defines {name}(), but {reason}'
  if isinstance(task.train.learner, list | tuple):
    yield f'task.train.learner is a list of {len(task.train.learner)} learners; Paxml itself updates with one'
  else:
    yield from _learner_reasons(task)
  for name, reason in _TRAIN_FIELDS.items():
    if value := getattr(task.train, name):
      yield f'task.train.{name} = {str(value)[:60]}: {reason}'
  yield from _shampoo_reasons(task.train.learner)
  yield from _pipeline_reasons(task.model)


def _learner_reasons(task: Any) -> Iterator[str]:
  learner = task.train.learner
  if not isinstance(learner, pax_fiddle.Config):
    yield f'task.train.learner is {_kind(learner)}: give it the config of a learners.Learner'
    return
  optimizer = getattr(learner, 'optimizer', None)  # which has no default
  if not isinstance(optimizer, pax_fiddle.Config):
    yield f'task.train.learner.optimizer is {_kind(optimizer)}: give it the config of one, as of optimizers.Adam'
  elif getattr(optimizer, 'lr_schedule', '') is None:
    yield 'task.train.learner.optimizer.lr_schedule is None: give it the config of one, as of schedules.Constant'
  if learner.loss_name is None and task.loss_aggregator is None:
    yield "task.train.learner.loss_name is None: name an entry of what compute_loss returns first, such as 'total_loss'"


def _shampoo_reasons(learner: Any) -> Iterator[str]:
  known = inspect.signature(optimizers.distributed_shampoo_optimizer).parameters
  if 'average_grad' in known:
    return
  for config, path in _configs(learner, optimizers.DistributedShampoo):
    yield (
      f'task.train.learner{path} is {config.cls.__name__}, to which Praxis gives arguments, such as average_grad, that '
      'the installed optax-shampoo does not take: take another optimizer'
    )


def check_trained_variables(learner: learners.Learner, weight_hparams: Any) -> None:
  """Checks which of the model's variables (WeightHParams by collection) the optimizers of a built learner have.

  Raises a UserError if regular expressions of the learner are none, leave nothing to train, or contradict one another.
  """
  for name in ('bprop_variable_inclusion', 'bprop_variable_exclusion', 'auxiliary_regex'):
    regexes = getattr(learner, name, None) or ()
    for regex in [regexes] if isinstance(regexes, str) else regexes:
      try:
        re.compile(regex)
      except re.error as error:
        raise UserError(f'task.train.learner.{name} has {regex!r}, which is no regular expression: {error}.') from error
  inclusion, exclusion = learner.bprop_variable_inclusion, learner.bprop_variable_exclusion
  if inclusion and exclusion:
    raise UserError(
      f'task.train.learner has bprop_variable_inclusion = {inclusion!r} and bprop_variable_exclusion = {exclusion!r}: '
      'give one of them.'
    )
  names = py_utils.extract_prefixed_keys_from_nested_map(weight_hparams)
  is_excluded = tasks_lib.get_excluded_var_mask_for_grad(weight_hparams, learner)
  trained = [name for name, out in zip(*map(jax.tree.leaves, (names, is_excluded)), strict=True) if not out]
  if not trained:
    raise UserError(
      f'no variable is trained with task.train.learner.bprop_variable_{"inclusion" if inclusion else "exclusion"} = '
      f'{inclusion or exclusion!r}, which is compared with whole names such as {jax.tree.leaves(names)[0]!r}: '
      'let it leave at least one.'
    )
  if not isinstance(learner, learners.MultiOptimizerLearner):
    return
  matching = [[regex for regex in learner.auxiliary_regex if re.match(regex, name)] for name in trained]
  for name, regexes in zip(trained, matching, strict=True):
    if len(regexes) > 1:
      raise UserError(f'task.train.learner.auxiliary_regex {regexes} match {name!r} all: let one of them match it.')
  for regex in learner.auxiliary_regex:
    if [regex] not in matching:
      logging.warning('task.train.learner.auxiliary_regex %r matches none of the variables %s.', regex, trained)


def _pipeline_reasons(model: Any) -> Iterator[str]:
  for config, path in _configs(model, layers.PipelinedTransformer):
    if config.circular_repeat > 1:
      yield (
        f'task.model{path} has circular_repeat = {config.circular_repeat}, but JAX since 0.4.30 refuses the nested '
        'vmaps of circular pipelines in Praxis: set it to 1'
      )
    if _is_config_of(config.pipeline_stage, layers.StackedTransformerRepeated):
      yield (
        f'task.model{path} has a StackedTransformerRepeated as pipeline_stage, and Praxis fails on the summaries of '
        'repeated layers in a pipeline: put a StackedTransformer of that many layers there'
      )


def _configs(root: Any, cls: type) -> Iterator[tuple[Any, str]]:
  """Yields the configs of a class and its subclasses below `root`, itself included, with their paths: `.lm_tpl`."""
  for value, path in pax_fiddle.daglish.iterate(root):
    if _is_config_of(value, cls):
      yield value, pax_fiddle.daglish.path_str(path)


def _kind(value: Any) -> str:
  return 'None' if value is None else f'a {type(value).__name__}'


def _is_config_of(value: Any, cls: type) -> bool:
  return isinstance(value, pax_fiddle.Config) and isinstance(value.cls, type) and issubclass(value.cls, cls)
