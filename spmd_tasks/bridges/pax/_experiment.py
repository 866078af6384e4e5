"""PaxExperiment: a `paxml.base_experiment.BaseExperiment`, unchanged, as an experiment of ours.

    cls = as_experiment(my_package.MyPaxExperiment)      # a class with the fields of Experiment
    cls(num_train_steps=5).task()                        # Pax' own config, as MyPaxExperiment().task() returns it

Steps, intervals, mesh and seed of `task.train` and `task.model` become the defaults of our fields. The plain class
attributes of the Pax experiment become fields too, so that `--set NUM_LAYERS=4` does what a subclass would do. Paths of
its config are paths of ours: `--set task.train.learner.optimizer.learning_rate=0.1`.
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
from spmd_tasks.bridges.pax._support import check_datasets, naming_method, refuse_unsupported
from spmd_tasks.bridges.pax._task import PaxTask
from spmd_tasks.bridges.pax._variables import partition_of, remove_split_dims
from spmd_tasks.errors import UserError, naming_own_code
from spmd_tasks.experiment import Experiment
from spmd_tasks.programs.hooks import TrainHook
from spmd_tasks.runtime import Origin
from spmd_tasks.sharding import AxisRules


class PaxExperiment(Experiment):
  """The base of the classes that `as_experiment` makes."""

  _origin_fields: ClassVar[tuple[str, ...]] = ('init_from', 'continue_from')
  axis_rules: AxisRules = ()
  # Paxml's flags of these names: whether training evaluates every `eval_interval_steps` of task.train, which is then
  # `eval_every_steps`, and decodes every `decode_interval_steps`.
  eval_on_test: bool = False
  decode_during_train: bool = False
  # Evaluate the averaged weights that the optimizer keeps.
  eval_with_ema: bool = False
  # A job of Paxml, whose newest checkpoint (or that of `init_from_step`) a new job goes on from: variables, optimizer
  # state and step. Its input begins anew, as it does where Paxml restarts. `init_from` may name one too, for the
  # variables alone.
  continue_from: str | None = None
  _pax_class: ClassVar[Any] = None
  _pax_settings: ClassVar[tuple[str, ...]] = ()

  def __post_init__(self):
    if self._changed_settings() or self.eval_on_test:  # which may have changed the mesh or the steps
      for name, value in _fields_of(_task_of(self.pax_experiment()), self.eval_on_test).items():
        if name not in self._given:
          object.__setattr__(self, name, value)
    super().__post_init__()

  def pax_experiment(self) -> Any:
    """Returns the Pax experiment, with the attributes that were set from outside."""
    cls, changed = self._pax_class, self._changed_settings()
    if changed:
      cls = type(cls.__name__, (cls,), changed | {'__module__': cls.__module__, '__doc__': cls.__doc__})
    return _make(cls)

  def _changed_settings(self) -> dict[str, Any]:
    defaults = {name: getattr(self._pax_class, name) for name in self._pax_settings}
    values = {name: _thawed(getattr(self, name), default) for name, default in defaults.items()}
    return {name: value for name, value in values.items() if value != defaults[name]}

  def task(self) -> Any:
    """Returns Pax' config of the task, with this experiment's mesh, steps and seed."""
    experiment = self.pax_experiment()
    with naming_method(self._pax_class, 'validate()'):
      experiment.validate()
    task = _task_of(experiment)
    if _is_for_pmap(task.model):  # then Paxml reads no split dims
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
    """Returns Pax' config of the one training dataset.

    Without one, the first dataset to evaluate or to decode stands for it: the model's variables follow from its
    batches, and its iterator, which only training asks for, is refused.
    """
    datasets = self._datasets('train_datasets')
    if len(datasets) > 1:
      has = f'{self._pax_class.__name__} has {len(datasets)} training datasets'
      raise UserError(f'{has}; at most one can be used: mix several in one input.')
    if found := [*datasets, *self._datasets('eval_datasets'), *self.decode_inputs().values()]:
      return found[0]
    raise UserError(f'{self._pax_class.__name__} has no datasets: return some from its datasets().')

  def eval_inputs(self) -> Mapping[str, Any]:
    """Returns Pax' configs of the datasets that are not for training, by name."""
    return _by_name(self._datasets('eval_datasets'))

  def decode_inputs(self) -> Mapping[str, Any]:
    """Returns Pax' configs of the datasets to decode, by name."""
    with warnings.catch_warnings(action='ignore', category=DeprecationWarning):  # by an experiment without any
      return _by_name(self._datasets('decode_datasets'))

  def _datasets(self, method: str) -> Sequence[Any]:
    """Returns what a method of the Pax experiment returns, the configs of inputs. Raises a UserError for others."""
    experiment = self.pax_experiment()
    if method != 'decode_datasets':  # the others pick of what datasets() returns
      with naming_method(self._pax_class, 'datasets()'):
        datasets = experiment.datasets()
      check_datasets(self._pax_class, 'datasets()', datasets)
    with naming_method(self._pax_class, f'{method}()'):
      datasets = getattr(experiment, method)()
    check_datasets(self._pax_class, f'{method}()', datasets)
    return datasets

  def origin(self) -> Origin | None:
    """Returns what a new job starts from, if it is Paxml's: a job, or the loading rules of the task."""
    if self.continue_from is not None and self.init_from is not None:
      raise UserError('continue_from and init_from both say where a new job starts: give one of them.')
    if self.continue_from is not None:
      return PaxJob(directory=self.continue_from, step=self.init_from_step, takes_all=True)
    if self.init_from is not None and is_pax_job(self.init_from):
      return PaxJob(directory=self.init_from, step=self.init_from_step)
    return LoadingRules() if self.init_from is None else super().origin()

  def hooks(self) -> Sequence[TrainHook]:
    """Returns what decodes in training, if that is wanted, and what asks `task.early_stopping_fn`."""
    names = {name: dataset.name or name for name, dataset in self.eval_inputs().items()}
    decodes = DecodeInTraining() if self.decode_during_train else None
    return [*([] if decodes is None else [decodes]), PaxEarlyEnd(input_names=names, decodes=decodes)]


@functools.cache
def as_experiment(pax_class: type) -> type[PaxExperiment]:
  """Makes the class of ours for a Pax experiment's class. It has the same name, module and docstring.

  Raises a UserError if the experiment uses what is not supported; the message names it.
  """
  if missing := ', '.join(f'{name}()' for name in sorted(getattr(pax_class, '__abstractmethods__', ()))):
    raise UserError(f'{pax_class.__name__} does not define {missing}: define it, or name a subclass.')
  task = _task_of(_make(pax_class))
  settings = _plain_attributes(pax_class)
  # An int may become a float. Other types are read off the value.
  annotations = {name: int | float if type(value) is int else Any for name, value in settings.items()}
  namespace = {
    **settings,
    **_fields_of(task, eval_on_test=False),
    '__module__': pax_class.__module__,
    '__qualname__': pax_class.__qualname__,
    '__doc__': pax_class.__doc__ or f'{pax_class.__name__}, an experiment of Pax.',
    '__annotations__': annotations,
    '_pax_class': pax_class,
    '_pax_settings': tuple(settings),
  }
  return type(pax_class.__name__, (PaxExperiment,), namespace)


def _make(pax_class: Any) -> Any:
  with naming_method(pax_class, '__init__()'):
    return pax_class()


def _task_of(experiment: Any) -> Any:
  """Returns the config of a Pax experiment's task. Raises a UserError for one that cannot run here."""
  with naming_method(type(experiment), 'task()'):
    task = experiment.task()
  refuse_unsupported(experiment, task)
  return task


def build_parts(experiment: PaxExperiment, parts: Mapping[str, Any]) -> dict[str, Any]:
  """Builds the configs of the parts: Praxis' own way, in which children are built by their owners.

  Raises a UserError if an override of `task` changed what a field of the experiment decides.
  """
  before = vars(experiment).get('_fields_of_task') or _fields_of(experiment.task(), experiment.eval_on_test)
  now = _fields_of(parts['task'], experiment.eval_on_test)
  for name, value in now.items():
    if value != before[name]:
      raise UserError(f'the override of `task` asks for {name} = {value}: set {name} itself, it is {before[name]}.')
  with naming_own_code('building the task', part=experiment._pax_class):
    config = parts['task'].clone()
    if isinstance(config.model.fprop_dtype, str):  # which Paxml takes too, and compares with jnp.bfloat16
      config.model.fprop_dtype = jnp.dtype(config.model.fprop_dtype).type
    task = base_hyperparams.instantiate(config)
  train_input = PaxInput(config=_on_this_host(parts['train_input'], experiment.train_input()))
  own = {'eval_inputs': experiment.eval_inputs(), 'decode_inputs': experiment.decode_inputs()}
  return {
    'task': PaxTask(
      task=task,
      input_spec=train_input.element_spec(),
      eval_with_ema=experiment.eval_with_ema,
    ),
    'train_input': train_input,
    **{
      part: {
        name: PaxInput(config=_on_this_host(each, datasets.get(name)), is_training=False)
        for name, each in parts[part].items()
      }
      for part, datasets in own.items()
    },
  }


def _is_for_pmap(model: Any) -> bool:
  return model.ici_mesh_shape is None or model.mesh_axis_names is None


def _fields_of(task: Any, eval_on_test: bool) -> dict[str, Any]:
  """Returns the fields of Experiment that Pax' config of the task decides. A task for pmap has one axis, of size 1."""
  train, model = task.train, task.model
  is_for_pmap = _is_for_pmap(model)
  axis_names = ('data',) if is_for_pmap else _sequence('task.model.mesh_axis_names', model.mesh_axis_names, str)
  ici, dcn = (
    None if shape is None else _sequence(f'task.model.{name}', shape, numbers.Integral)
    for name, shape in (('ici_mesh_shape', model.ici_mesh_shape), ('dcn_mesh_shape', model.dcn_mesh_shape))
  )
  num_train_steps = train.num_train_steps
  if not isinstance(num_train_steps, int | float) or not 1 <= num_train_steps < math.inf:
    raise UserError(f'task.train.num_train_steps = {num_train_steps!r} must be a positive number of steps.')
  first = train.profiler_capture_step
  return {
    'mesh_axis_names': axis_names,
    'ici_mesh_shape': (1,) if is_for_pmap else ici,
    'dcn_mesh_shape': None if dcn is None or set(dcn) == {1} else dcn,
    'inputs_split_mapping': None if is_for_pmap else _split_mapping(train.inputs_split_mapping, axis_names),
    'seed': train.random_seed,
    'num_train_steps': int(num_train_steps),
    'log_every_steps': train.log_train_output_interval_steps or train.summary_interval_steps,
    'eval_every_steps': (train.eval_interval_steps or None) if eval_on_test else None,
    'checkpoint_every': train.save_interval_steps,
    'checkpoint_max_to_keep': train.save_max_to_keep,
    'checkpoint_keep_every_hours': _hours(train.save_keep_interval_duration),
    'profile_steps': None if first is None else (first, first + train.profiler_num_steps),
    'eval_with_ema': train.eval_use_ema_states,
  }


def _sequence(path: str, value: Any, kind: type) -> tuple[Any, ...]:
  if isinstance(value, str) or not hasattr(value, '__len__') or not all(isinstance(item, kind) for item in value):
    kinds = 'names' if kind is str else 'integers'
    raise UserError(f'{path} = {value!r} must be a list of {kinds}, one per mesh axis.')
  return tuple(value) if kind is str else tuple(map(int, value))


def _hours(duration: str | None) -> float | None:
  """Returns the hours of a duration of Paxml, such as '12h' or '90m'; without a unit it has seconds."""
  if not duration:
    return None
  found = re.fullmatch(r'(\d+)([smhd]?)', str(duration))
  if found is None:
    raise UserError(f"task.train.save_keep_interval_duration = {duration!r} must be a duration such as '12h' or '90m'.")
  return int(found[1]) * {'': 1 / 3600, 's': 1 / 3600, 'm': 1 / 60, 'h': 1, 'd': 24}[found[2]] or None


def _split_mapping(mapping: Any, axis_names: Sequence[str]) -> Any:
  def split_dims(name: str, dims: Any) -> Any:
    where = f'the split dims of task.train.inputs_split_mapping.{name}'
    return None if dims is None else tuple(partition_of(dims, axis_names, where))

  if mapping is not None and not hasattr(mapping, 'items'):
    raise UserError(
      f'task.train.inputs_split_mapping = {mapping!r} must be a NestedMap, such as NestedMap(map_1d=(axes,)).'
    )
  return None if mapping is None else FrozenDict({name: split_dims(name, dims) for name, dims in mapping.items()})


def _plain_attributes(cls: type) -> dict[str, Any]:
  """Returns the class attributes that are numbers, texts, None or sequences of these, and no fields of Experiment."""
  found = {}
  for base in reversed(cls.__mro__):
    for name, value in vars(base).items():
      if not name.startswith('_') and not hasattr(PaxExperiment, name) and _is_plain(value):
        found[name] = value
      else:
        found.pop(name, None)
  return found


def _is_plain(value: Any) -> bool:
  if type(value) in (list, tuple):
    return all(map(_is_plain, value))
  return value is None or type(value) in (bool, int, float, str)


def _thawed(value: Any, like: Any) -> Any:
  """Returns frozen sequences as the lists and tuples that they were."""
  if not isinstance(value, tuple) or not isinstance(like, list | tuple):
    return value
  items = [_thawed(item, like[i] if i < len(like) else None) for i, item in enumerate(value)]
  return items if isinstance(like, list) else tuple(items)


def _on_this_host(dataset: Any, own: Any) -> Any:
  """Returns a dataset's config with the host of this process, as `own`, the experiment's own dataset, has it.

  A config that was saved has the host of the process that saved it, where the experiment asks JAX for its number.
  """
  if own is not None:
    dataset = dataset.clone()
    dataset.num_infeed_hosts, dataset.infeed_host_index = own.num_infeed_hosts, own.infeed_host_index
  return dataset


def _by_name(datasets: Sequence[Any]) -> dict[str, Any]:
  named: dict[str, Any] = {}
  for dataset in datasets:
    name = re.sub(r'[^A-Za-z0-9_-]', '_', getattr(dataset, 'name', None) or 'input')
    if name in named:
      raise UserError(f'two datasets have the name {name!r}: give each its own, as Pax asks as well.')
    named[name] = dataset
  return named
