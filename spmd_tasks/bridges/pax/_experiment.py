"""PaxExperiment: an unmodified `paxml.base_experiment.BaseExperiment` as an Experiment.

    cls = as_experiment(my_package.MyPaxExperiment)      # a class with the fields of Experiment
    cls(num_train_steps=5).task()                        # Pax's config, as MyPaxExperiment().task() returns it

Steps, intervals, mesh and seed of `task.train` and `task.model` become the defaults of the fields of Experiment. Plain
class attributes of the Pax experiment become fields too, so that `--set NUM_LAYERS=4` does what a subclass would do.
Overrides use the paths of Pax's config, such as `--set task.train.learner.optimizer.learning_rate=0.1`.
"""

from collections.abc import Mapping, Sequence
import functools
import math
import numbers
import re
from typing import Any, ClassVar
import warnings

from flax.core import FrozenDict
import jax.numpy as jnp
from praxis import base_hyperparams

from spmd_tasks.bridges.pax._hooks import DecodeInTraining, PaxEarlyEnd
from spmd_tasks.bridges.pax._input import PaxInput
from spmd_tasks.bridges.pax._origins import LoadingRules, PaxJob, is_pax_job
from spmd_tasks.bridges.pax._support import check_datasets, method_errors, refuse_unsupported
from spmd_tasks.bridges.pax._sweep import Settings, sweep_of, with_first_choices
from spmd_tasks.bridges.pax._task import PaxTask
from spmd_tasks.bridges.pax._variables import partition_spec, remove_split_dims
from spmd_tasks.errors import UserError, own_code_errors
from spmd_tasks.experiment import Experiment
from spmd_tasks.programs.hooks import TrainHook
from spmd_tasks.runtime import Origin
from spmd_tasks.sharding import AxisRules


class PaxExperiment(Experiment):
  """The base class of the classes that `as_experiment` returns."""

  _origin_fields: ClassVar[tuple[str, ...]] = ('init_from', 'continue_from')
  axis_rules: AxisRules = ()
  # As Paxml's flags: whether training evaluates every `task.train.eval_interval_steps`, which then sets
  # `eval_every_steps`, and decodes every `task.train.decode_interval_steps`.
  eval_on_test: bool = False
  decode_during_train: bool = False
  # Whether to evaluate the optimizer's averaged weights.
  eval_with_ema: bool = False
  # A job of Paxml from which a new job continues: variables, optimizer state and step of its newest checkpoint, or the
  # checkpoint of `init_from_step`. The input starts anew, as in a restart of Paxml. To use only its variables, set
  # `init_from` instead.
  continue_from: str | None = None
  _pax_class: ClassVar[Any] = None  # with the first choice of each tuned attribute
  _pax_source: ClassVar[Any] = None  # as its author wrote it
  _pax_choices: ClassVar[Sequence[Settings]] = ()  # of each job of a sweep
  _pax_settings: ClassVar[tuple[str, ...]] = ()

  def __post_init__(self):
    if self._changed_settings() or self.eval_on_test:  # these may change the mesh or the steps
      for name, value in _fields_of(_task_of(self.pax_experiment()), self.eval_on_test).items():
        if self.setter_rank(name) > 0:  # not set in the constructor
          object.__setattr__(self, name, value)
    super().__post_init__()

  def pax_experiment(self) -> Any:
    """Returns the Pax experiment with the overridden class attributes."""
    cls, changed = self._pax_class, self._changed_settings()
    if changed:
      cls = type(cls.__name__, (cls,), changed | {'__module__': cls.__module__, '__doc__': cls.__doc__})
    return _instantiate(cls)

  def _changed_settings(self) -> dict[str, Any]:
    defaults = {name: getattr(self._pax_class, name) for name in self._pax_settings}
    values = {name: _unfreeze(getattr(self, name), default) for name, default in defaults.items()}
    return {name: value for name, value in values.items() if value != defaults[name]}

  def task(self) -> Any:
    """Returns Pax's config of the task, with this experiment's mesh, steps and seed."""
    experiment = self.pax_experiment()
    with method_errors(self._pax_class, 'validate()'):
      experiment.validate()
    task = _task_of(experiment)
    if _is_pmap_model(task.model):  # Paxml then ignores split dims
      task.train.inputs_split_mapping = None
      remove_split_dims(task.model)
    task.model.mesh_axis_names = list(self.mesh_axis_names)
    task.model.ici_mesh_shape = list(self.ici_mesh_shape)
    task.model.dcn_mesh_shape = None if self.dcn_mesh_shape is None else list(self.dcn_mesh_shape)
    task.train.num_train_steps = self.num_train_steps
    task.train.random_seed = self.seed
    object.__setattr__(self, '_fields_of_task', _fields_of(task, self.eval_on_test))
    return task

  def train_input(self) -> Any:
    """Returns Pax's config of the training dataset.

    Without a training dataset, returns the first dataset to evaluate or decode: its batches define the model's
    variables, and PaxInput refuses to train on it.
    """
    datasets = self._datasets('train_datasets')
    if len(datasets) > 1:
      raise UserError(
        f'{self._pax_class.__name__} has {len(datasets)} training datasets, but at most one is supported: mix them in '
        'one input.'
      )
    if all_datasets := [*datasets, *self._datasets('eval_datasets'), *self.decode_inputs().values()]:
      return all_datasets[0]
    raise UserError(f'{self._pax_class.__name__} has no datasets: return some from datasets().')

  def eval_inputs(self) -> Mapping[str, Any]:
    """Returns Pax's configs of the evaluation datasets, by name."""
    return _name_datasets(self._datasets('eval_datasets'))

  def decode_inputs(self) -> Mapping[str, Any]:
    """Returns Pax's configs of the datasets to decode, by name."""
    with warnings.catch_warnings(action='ignore', category=DeprecationWarning):  # of Paxml, if there are none
      return _name_datasets(self._datasets('decode_datasets'))

  def _datasets(self, method: str) -> Sequence[Any]:
    """Returns the configs that a method of the Pax experiment returns. Raises a UserError if it returns others."""
    experiment = self.pax_experiment()
    if method != 'decode_datasets':  # the others filter datasets()
      with method_errors(self._pax_class, 'datasets()'):
        datasets = experiment.datasets()
      check_datasets(self._pax_class, 'datasets()', datasets)
    with method_errors(self._pax_class, f'{method}()'):
      datasets = getattr(experiment, method)()
    check_datasets(self._pax_class, f'{method}()', datasets)
    return datasets

  def sweep(self) -> Sequence[Settings] | Mapping[str, Settings]:
    """Returns the choices of tuned class attributes, and the sub-experiments."""
    return sweep_of(_instantiate(self._pax_class), self._pax_source, self._pax_choices, _is_plain)

  def origin(self) -> Origin | None:
    """Returns what a new job is initialized from, such as a job of Paxml or the loading rules of the task."""
    if self.continue_from is not None and self.init_from is not None:
      raise UserError(f'continue_from = {self.continue_from} and init_from = {self.init_from} are both set: set one.')
    if self.continue_from is not None:
      return PaxJob(directory=self.continue_from, step=self.init_from_step, continues=True)
    if self.init_from is not None and is_pax_job(self.init_from):
      return PaxJob(directory=self.init_from, step=self.init_from_step)
    return LoadingRules() if self.init_from is None else super().origin()

  def hooks(self) -> Sequence[TrainHook]:
    """Returns the hooks that decode in training, if enabled, and that call `task.early_stopping_fn`."""
    names = {name: dataset.name or name for name, dataset in self.eval_inputs().items()}
    decodes = DecodeInTraining() if self.decode_during_train else None
    return [*([] if decodes is None else [decodes]), PaxEarlyEnd(input_names=names, decodes=decodes)]


@functools.cache
def as_experiment(pax_class: type) -> type[PaxExperiment]:
  """Returns the subclass of PaxExperiment for a Pax experiment's class, with the same name, module and docstring.

  Raises a UserError that lists the features that the experiment uses and that are not supported.
  """
  if missing := ', '.join(f'{name}()' for name in sorted(getattr(pax_class, '__abstractmethods__', ()))):
    raise UserError(f'{pax_class.__name__} does not define {missing}: define it, or name a subclass.')
  source = pax_class
  pax_class, choices = with_first_choices(source)
  task = _task_of(_instantiate(pax_class))
  settings = _plain_attributes(pax_class)
  # Overrides of an int may be a float. Other types are inferred from the value.
  annotations = {name: int | float if type(value) is int else Any for name, value in settings.items()}
  namespace = {
    **settings,
    **_fields_of(task, eval_on_test=False),
    '__module__': pax_class.__module__,
    '__qualname__': pax_class.__qualname__,
    '__doc__': pax_class.__doc__ or f'{pax_class.__name__}, an experiment of Pax.',
    '__annotations__': annotations,
    '_pax_class': pax_class,
    '_pax_source': source,
    '_pax_choices': choices,
    '_pax_settings': tuple(settings),
  }
  return type(pax_class.__name__, (PaxExperiment,), namespace)


def _instantiate(pax_class: Any) -> Any:
  with method_errors(pax_class, '__init__()'):
    return pax_class()


def _task_of(experiment: Any) -> Any:
  """Returns the config of a Pax experiment's task. Raises a UserError if it is not supported."""
  with method_errors(type(experiment), 'task()'):
    task = experiment.task()
  refuse_unsupported(experiment, task)
  return task


def build_parts(experiment: PaxExperiment, parts: Mapping[str, Any]) -> dict[str, Any]:
  """Builds the configs of the parts with Praxis, in which parents build their children.

  Raises a UserError if an override of `task` differs from a field of the experiment.
  """
  fields = vars(experiment).get('_fields_of_task') or _fields_of(experiment.task(), experiment.eval_on_test)
  for name, value in _fields_of(parts['task'], experiment.eval_on_test).items():
    if value != fields[name]:
      raise UserError(f'an override of `task` implies {name} = {value}, but it is {fields[name]}: set {name} itself.')
  with own_code_errors('building the task', part=experiment._pax_class):
    config = parts['task'].clone()
    if isinstance(config.model.fprop_dtype, str):  # Paxml accepts strings, but compares with jnp.bfloat16
      config.model.fprop_dtype = jnp.dtype(config.model.fprop_dtype).type
    task = base_hyperparams.instantiate(config)
  train_input = PaxInput(config=_on_this_process(parts['train_input'], experiment.train_input()))
  own_datasets = {'eval_inputs': experiment.eval_inputs(), 'decode_inputs': experiment.decode_inputs()}
  return {
    'task': PaxTask(
      task=task,
      input_spec=train_input.element_spec(),
      eval_with_ema=experiment.eval_with_ema,
    ),
    'train_input': train_input,
    **{
      part: {
        name: PaxInput(config=_on_this_process(config, datasets.get(name)), is_training=False)
        for name, config in parts[part].items()
      }
      for part, datasets in own_datasets.items()
    },
  }


def _is_pmap_model(model: Any) -> bool:
  return model.ici_mesh_shape is None or model.mesh_axis_names is None


def _fields_of(task: Any, eval_on_test: bool) -> dict[str, Any]:
  """Returns the fields of Experiment that follow from Pax's config of the task; a pmap task has one device."""
  train, model = task.train, task.model
  is_pmap_model = _is_pmap_model(model)
  axis_names = ('data',) if is_pmap_model else _read_sequence('task.model.mesh_axis_names', model.mesh_axis_names, str)
  ici, dcn = (
    None if shape is None else _read_sequence(f'task.model.{name}', shape, numbers.Integral)
    for name, shape in (('ici_mesh_shape', model.ici_mesh_shape), ('dcn_mesh_shape', model.dcn_mesh_shape))
  )
  num_train_steps = train.num_train_steps
  if not isinstance(num_train_steps, int | float) or not 1 <= num_train_steps < math.inf:
    raise UserError(f'task.train.num_train_steps = {num_train_steps!r} must be a positive number of steps.')
  profile_start = train.profiler_capture_step
  return {
    'mesh_axis_names': axis_names,
    'ici_mesh_shape': (1,) if is_pmap_model else ici,
    'dcn_mesh_shape': None if dcn is None or set(dcn) == {1} else dcn,
    'inputs_split_mapping': None if is_pmap_model else _read_split_mapping(train.inputs_split_mapping, axis_names),
    'seed': train.random_seed,
    'num_train_steps': int(num_train_steps),
    'log_every_steps': train.log_train_output_interval_steps or train.summary_interval_steps,
    'eval_every_steps': (train.eval_interval_steps or None) if eval_on_test else None,
    'checkpoint_every': train.save_interval_steps,
    'checkpoint_max_to_keep': train.save_max_to_keep,
    'checkpoint_keep_every_hours': _parse_hours(train.save_keep_interval_duration),
    'profile_steps': None if profile_start is None else (profile_start, profile_start + train.profiler_num_steps),
    'eval_with_ema': train.eval_use_ema_states,
  }


def _read_sequence(path: str, value: Any, kind: type) -> tuple[Any, ...]:
  if isinstance(value, str) or not hasattr(value, '__len__') or not all(isinstance(item, kind) for item in value):
    kinds = 'names' if kind is str else 'integers'
    raise UserError(f'{path} = {value!r} must be a list of {kinds}, one per mesh axis.')
  return tuple(value) if kind is str else tuple(map(int, value))


def _parse_hours(duration: str | None) -> float | None:
  """Returns the hours of a duration of Paxml, such as '12h' or '90m'; a number without a unit is in seconds."""
  if not duration:
    return None
  match = re.fullmatch(r'(\d+)([smhd]?)', str(duration))
  if match is None:
    raise UserError(f"task.train.save_keep_interval_duration = {duration!r} must be a duration such as '12h' or '90m'.")
  return int(match[1]) * {'': 1 / 3600, 's': 1 / 3600, 'm': 1 / 60, 'h': 1, 'd': 24}[match[2]] or None


def _read_split_mapping(mapping: Any, axis_names: Sequence[str]) -> Any:
  def split_dims(name: str, dims: Any) -> Any:
    setting = f'task.train.inputs_split_mapping.{name}'
    return None if dims is None else tuple(partition_spec(dims, axis_names, setting))

  if mapping is not None and not hasattr(mapping, 'items'):
    raise UserError(
      f'task.train.inputs_split_mapping = {mapping!r} must be a NestedMap, such as NestedMap(map_1d=(axes,)).'
    )
  return None if mapping is None else FrozenDict({name: split_dims(name, dims) for name, dims in mapping.items()})


def _plain_attributes(cls: type) -> dict[str, Any]:
  """Returns the class attributes that can become fields: numbers, strings, None and sequences of these."""
  attributes = {}
  for base in reversed(cls.__mro__):
    for name, value in vars(base).items():
      if not name.startswith('_') and not hasattr(PaxExperiment, name) and _is_plain(value):
        attributes[name] = value
      else:
        attributes.pop(name, None)
  return attributes


def _is_plain(value: Any) -> bool:
  if type(value) in (list, tuple):
    return all(map(_is_plain, value))
  return value is None or type(value) in (bool, int, float, str)


def _unfreeze(value: Any, like: Any) -> Any:
  """Converts frozen sequences back to the lists and tuples in `like`."""
  if not isinstance(value, tuple) or not isinstance(like, list | tuple):
    return value
  items = [_unfreeze(item, like[i] if i < len(like) else None) for i, item in enumerate(value)]
  return items if isinstance(like, list) else tuple(items)


def _on_this_process(dataset: Any, own: Any) -> Any:
  """Returns a dataset's config with the infeed host of this process, copied from the experiment's dataset `own`.

  A saved config has the infeed host of the process that saved it.
  """
  if own is not None:
    dataset = dataset.clone()
    dataset.num_infeed_hosts, dataset.infeed_host_index = own.num_infeed_hosts, own.infeed_host_index
  return dataset


def _name_datasets(datasets: Sequence[Any]) -> dict[str, Any]:
  by_name: dict[str, Any] = {}
  for dataset in datasets:
    name = re.sub(r'[^A-Za-z0-9_-]', '_', getattr(dataset, 'name', None) or 'input')
    if name in by_name:
      raise UserError(f'two datasets have the name {name!r}: give each a name of its own.')
    by_name[name] = dataset
  return by_name
