"""Defines Experiment, which users subclass, and Job, the built experiment that the programs run.

    @register
    class StdlibTiny(Experiment):
      '''A 1M-parameter byte language model on the standard library's source.'''

      num_train_steps = 300        # a new default for a field of the base
      ici_mesh_shape = (1, 4, 2)
      num_layers: int = 2          # a new, typed hyperparameter: settable as --set num_layers=4

      def task(self):
        return fdl.Config(Task, model=fdl.Config(LanguageModel, num_layers=self.num_layers), ...)

      def train_input(self):
        return fdl.Config(TextInput, batch_size=32)

Subclass again and override to vary. Experiments are frozen: fields hold what varies and are never assigned later.
"""

import abc
from collections.abc import Mapping, Sequence
import dataclasses
import inspect
from pathlib import Path
import re
import types
from typing import TYPE_CHECKING, Any, ClassVar

from flax.core import FrozenDict
import jax
from jax.sharding import AbstractMesh, Mesh

from spmd_tasks.errors import UserError, own_code_errors
from spmd_tasks.frozen_fields import FrozenFields, freeze
from spmd_tasks.inputs import Input, InputIterator, Tokenizer
from spmd_tasks.inputs.base import batch_sizes
from spmd_tasks.inputs.tokenizers import tokenizer_of
from spmd_tasks.runtime import BaseTask, Origin, PartitionedModel, partition_spmd_model
from spmd_tasks.runtime.origin import origin_named
from spmd_tasks.runtime.parameter_table import check_batch_fits
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, AxisRules, MeshLayout, MeshSpec, SplitDims
from spmd_tasks.sharding.specs import check_axis_rules

if TYPE_CHECKING:
  from spmd_tasks.decoding.prompts import PromptSource
  from spmd_tasks.inputs import ChatTemplate

_MAX_TIMEOUT_S = 31_536_000
MESH_FIELDS = ('mesh_axis_names', 'ici_mesh_shape', 'dcn_mesh_shape', 'axis_rules')  # filled from a mesh layout

DEFAULT_INPUTS_SPLIT_MAPPING: Mapping[str, SplitDims] = FrozenDict(
  {f'map_{ndim}d': ('batch', *[None] * (ndim - 1)) for ndim in range(1, 6)}
)


class Experiment(FrozenFields, abc.ABC):
  """Everything that defines a job: mesh, axis rules, task, inputs, intervals. Frozen; subclass to vary.

  Intervals are in train steps (checkpoints may have a time), and None means never. A checkpoint is always saved at the
  end. Times are in seconds.

  Raises (on construction):
    UserError: a field has an invalid value; the message names it.
  """

  # `init_from_step` is a step of the job that one of these fields names.
  _origin_fields: ClassVar[tuple[str, ...]] = ('init_from',)
  _renamed: ClassVar[Mapping[str, str]] = types.MappingProxyType({'checkpoint_every_steps': 'checkpoint_every'})
  _removed: ClassVar[Mapping[str, str]] = types.MappingProxyType(
    {
      'target': "give --target to --mode plan, or declare the field in the class: target: str = 'v5p:4x4x2'",
      'tpu_options': 'define the method tpu_options(), or set the environment variable LIBTPU_INIT_ARGS',
      'heartbeat_timeout_s': 'give the flag --heartbeat_timeout_s',
      'shutdown_timeout_s': 'give the flag --shutdown_timeout_s',
      'tensorboard': "set trackers, which is ('tensorboard',) by default; () writes only metrics.jsonl",
    }
  )

  # Mesh axes, outermost first, and their sizes within a slice (ICI) and across slices (DCN; None: one slice).
  mesh_axis_names: tuple[str, ...] = ('replica', 'data', 'mdl')
  ici_mesh_shape: tuple[int, ...] = (1, 1, 1)
  dcn_mesh_shape: tuple[int, ...] | None = None
  # Ordered (logical name, mesh axes) pairs, see sharding/specs.py.
  axis_rules: AxisRules = DEFAULT_AXIS_RULES
  # A mesh layout, such as DataExpertModelMesh(num_devices=8, num_expert_partitions=4), sets the four fields above. A
  # field wins over the layout if the same class, a subclass or --set sets it. To change the layout of an experiment,
  # write a subclass: dataclasses.replace passes all fields to the constructor, so the four old values would win.
  mesh: MeshLayout | None = None
  # The split dims of inputs by rank, under the keys map_1d, map_2d, ...; None: inputs are sharded on the batch only.
  inputs_split_mapping: Mapping[str, SplitDims] | None = DEFAULT_INPUTS_SPLIT_MAPPING

  # Kernels without `split_dims`, such as in Linen's own layers, are sharded on their largest dim over this logical name
  # or mesh axis. None: they are replicated.
  default_split_dim: str | None = 'embed'

  seed: int = 0
  # The weights that a new job starts from: the job_log_dir of another job (its newest checkpoint, or `init_from_step`),
  # or hf:FOLDER, a Hugging Face model folder. The other job must have the same model, or a dense one, whose
  # feed-forward networks become experts (programs/upcycling.py). A job with a checkpoint ignores this and continues.
  init_from: str | None = None
  init_from_step: int | None = None
  num_train_steps: int = 1000
  log_every_steps: int = 10
  eval_every_steps: int | None = None
  # The maximum number of batches of an evaluation; a longer or endless eval set warns.
  eval_limit_batches: int = 10_000
  # At this interval the job generates text from the sample prompts, with the settings in task.decode, and writes it to
  # <job_log_dir>/samples. With `sample_as_chat`, a prompt is the first message of a conversation (`chat_template()`).
  sample_every_steps: int | None = None
  sample_prompts: tuple[str, ...] = ()
  sample_max_tokens: int = 64
  sample_as_chat: bool = False
  # How often a checkpoint is saved: a number of steps, or a time ('90s', '10m', '2h', '1d') after which the next step
  # is saved. With a time, multiples of `checkpoint_keep_every_steps` are saved as well.
  checkpoint_every: int | str | None = '10m'
  # How many of the newest checkpoints are kept. Multiples of `checkpoint_keep_every_steps` are kept forever, and so is
  # one checkpoint every `checkpoint_keep_every_hours`, beginning with the first.
  checkpoint_max_to_keep: int = 3
  checkpoint_keep_every_steps: int | None = None
  checkpoint_keep_every_hours: float | None = None
  # The steps [first, last) that JAX's profiler captures.
  profile_steps: tuple[int, int] | None = None
  # Where metrics go in addition to metrics.jsonl: 'tensorboard' (event files), 'wandb' (Weights & Biases), 'mlflow';
  # see docs/operations.md.
  trackers: tuple[str, ...] = ('tensorboard',)

  # The number of batches that are read ahead onto the devices, and how long a batch may take before the job fails.
  prefetch_batches: int = 2
  input_timeout_s: float = 600.0

  # How long a process may make no progress before the job ends. The first step includes compilation.
  step_timeout_s: float = 600.0
  first_step_timeout_s: float = 3600.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      object.__setattr__(self, field.name, freeze(getattr(self, field.name)))
    self._set_mesh_fields()
    self._check_counts()
    self._check_origin_and_samples()
    self._check_times()

  def _set_mesh_fields(self) -> None:
    """Fills the mesh fields from the layout, drops default rules that mesh axes replace, and checks both."""
    if self.mesh is not None:
      axes = self.mesh.axes()
      for name in MESH_FIELDS:
        if self.setter_rank('mesh') < self.setter_rank(name):  # a subclass of the field's class sets the layout
          object.__setattr__(self, name, getattr(axes, name))
    self.mesh_spec()  # raises a UserError for axes or sizes that do not fit together
    if isinstance(self.axis_rules, Mapping):
      object.__setattr__(self, 'axis_rules', tuple(self.axis_rules.items()))
    if self.axis_rules == DEFAULT_AXIS_RULES:
      # A mesh axis replaces the default rule of its name: axis `expert` shards the dim `expert`.
      rules = tuple((name, axes) for name, axes in DEFAULT_AXIS_RULES if name not in self.mesh_axis_names)
      object.__setattr__(self, 'axis_rules', rules)
    check_axis_rules(self.axis_rules, self.mesh_axis_names)
    # The default `embed` has no effect if the user's own rules do not have it.
    names = {*self.mesh_axis_names, *(name for name, _ in self.axis_rules), None, 'embed'}
    if self.default_split_dim not in names:
      raise UserError(
        f'default_split_dim = {self.default_split_dim!r} is neither a mesh axis {self.mesh_axis_names} nor a name in '
        'axis_rules: correct it, or set None to replicate kernels without split dims.'
      )

  def _check_counts(self) -> None:
    intervals = [field.name for field in dataclasses.fields(Experiment) if field.name.endswith('_every_steps')]
    counts = (
      'num_train_steps',
      'eval_limit_batches',
      'checkpoint_max_to_keep',
      'prefetch_batches',
      'sample_max_tokens',
    )
    for name in (*counts, *intervals):
      value, may_be_never = getattr(self, name), name in intervals and name != 'log_every_steps'
      if not _is_positive(value) and not (may_be_never and value is None):
        kind = 'number of steps, or None for never' if may_be_never else 'integer'
        raise UserError(f'{name} = {value!r} must be a positive {kind}.')
    steps = self.profile_steps
    if steps is not None and (len(steps) != 2 or not 0 <= steps[0] < steps[1]):
      raise UserError(f'profile_steps = {steps} must be (first, last) with 0 <= first < last.')

  def _check_origin_and_samples(self) -> None:
    origin = next((getattr(self, name) for name in self._origin_fields if getattr(self, name) is not None), None)
    if self.init_from_step is not None and (origin is None or not _is_positive(self.init_from_step)):
      raise UserError(
        f'init_from_step = {self.init_from_step!r} with init_from = {origin!r} must be the step of a checkpoint of '
        'that job, or None for its newest.'
      )
    prompts = self.sample_prompts
    if not isinstance(prompts, tuple) or not all(isinstance(text, str) and text for text in prompts):
      raise UserError(f'sample_prompts = {prompts!r} must be a tuple of nonempty texts.')
    if self.sample_every_steps is not None and not prompts:
      raise UserError(f'sample_every_steps = {self.sample_every_steps} needs prompts: set sample_prompts.')

  def _check_times(self) -> None:
    if isinstance(self.checkpoint_every, str):
      duration_s(self.checkpoint_every, 'checkpoint_every')
    elif self.checkpoint_every is not None and not _is_positive(self.checkpoint_every):
      raise UserError(
        f"checkpoint_every = {self.checkpoint_every!r} must be a positive number of steps, a time such as '10m', or "
        'None for a checkpoint only at the end.'
      )
    hours = self.checkpoint_keep_every_hours
    if hours is not None and not hours > 0:
      raise UserError(f'checkpoint_keep_every_hours = {hours!r} must be a positive number of hours, or None.')
    for name in (field.name for field in dataclasses.fields(self) if field.name.endswith('_timeout_s')):
      if not 0 < getattr(self, name) <= _MAX_TIMEOUT_S:
        raise UserError(
          f'{name} = {getattr(self, name)!r} must be a positive number of seconds, at most {_MAX_TIMEOUT_S:,} (a year).'
        )

  def mesh_spec(self) -> MeshSpec:
    """Returns the mesh's axes and sizes."""
    return MeshSpec(
      axis_names=self.mesh_axis_names, ici_mesh_shape=self.ici_mesh_shape, dcn_mesh_shape=self.dcn_mesh_shape
    )

  @classmethod
  def current_fields(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns saved values by the current names of their fields, without removed fields."""
    values = super().current_fields(saved)
    if 'tensorboard' in saved:
      values['trackers'] = [*['tensorboard'] * bool(saved['tensorboard']), *saved.get('trackers', ())]
    return values

  @abc.abstractmethod
  def task(self) -> Any:
    """Returns the task (model, loss, learner) or its `fdl.Config`."""

  @abc.abstractmethod
  def train_input(self) -> Any:
    """Returns the training input or its `fdl.Config`: an Input, or batches as inputs/batches.py accepts them."""

  def eval_inputs(self) -> Mapping[str, Any]:
    """Returns eval sets or their `fdl.Config`s by name, which is also the directory of their metrics."""
    return {}

  def decode_inputs(self) -> Mapping[str, Any]:
    """Returns prompts, such as a PromptFile, or their `fdl.Config`s by name, which is also the outputs' directory."""
    return {}

  def prompts_of_file(self, path: str, tokenizer: Tokenizer | None) -> 'PromptSource':
    """Returns the prompts in the file of --decode_input; `tokenizer` is the inputs' tokenizer."""
    from spmd_tasks.decoding import PromptFile

    return PromptFile(path=path)

  def origin(self) -> Origin | None:
    """Returns where a new job's weights come from; None initializes them. See runtime/origin.py."""
    return origin_named(self.init_from, self.init_from_step)

  def hooks(self) -> Sequence[Any]:
    """Returns TrainHooks (programs/hooks.py), which run after the hooks of every job."""
    return ()

  def sweep(self) -> Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]]:
    """Returns the overrides of each job of a sweep, such as {'learning_rate': 0.01}, in a list or by name.

    Keys and values are those of `--set`. In a list, jobs are named after the settings that differ.
    """
    return ()

  def tpu_options(self) -> Mapping[str, str]:
    """Returns options of the TPU compiler for the train step, such as {'xla_tpu_scoped_vmem_limit_kib': '65536'}.

    They override the options in runtime/tpu_options.py; LIBTPU_INIT_ARGS overrides both. Other devices ignore them.
    """
    return {}

  def chat_template(self) -> 'ChatTemplate':
    """Returns the template that turns a conversation with the served model into text."""
    from spmd_tasks.inputs import ChatTemplate

    return ChatTemplate()


def _check_methods(name: str, value: Any, methods: Sequence[str], remedy: str = 'see docs/inputs.md') -> None:
  """Raises a UserError if a part of a job is a class, or lacks a method."""
  missing = [method for method in methods if not callable(getattr(value, method, None))]
  kind = f'the class {value.__name__} itself' if inspect.isclass(value) else f'of type {type(value).__name__}'
  if missing or inspect.isclass(value):
    raise UserError(f'{name} is {kind}{" without " * bool(missing)}{", ".join(missing)}: {remedy}.')


def duration_s(duration: str, name: str) -> int:
  """Returns the seconds of a duration such as '90s', '10m', '2h' or '1d'. Raises a UserError with the field's name."""
  match = re.fullmatch(r'(\d{1,9})([smhd])', duration)
  seconds = 0 if match is None else int(match[1]) * {'s': 1, 'm': 60, 'h': 3600, 'd': 86_400}[match[2]]
  if not seconds:
    raise UserError(f"{name} = {duration!r} must be a number with its unit: '90s', '10m', '2h' or '1d'.")
  return seconds


def _is_positive(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value > 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
  """A built experiment, the root object of every program."""

  name: str  # the experiment's
  experiment: Experiment
  task: BaseTask
  train_input: Input
  eval_inputs: Mapping[str, Input] = dataclasses.field(default_factory=dict)
  decode_inputs: 'Mapping[str, PromptSource]' = dataclasses.field(default_factory=dict)
  code_directories: tuple[Path, ...] = ()  # of the code whose functions the config may name (references.py)

  def __post_init__(self):
    for field in ('eval_inputs', 'decode_inputs'):
      inputs = getattr(self, field)
      for name in inputs:
        if not isinstance(name, str) or not re.fullmatch(r'[A-Za-z0-9_-]{1,100}', name):
          raise UserError(
            f'{field} has the name {name!r}, which is also the name of a directory: use at most 100 letters, digits, _ '
            'and -.'
          )
      object.__setattr__(self, field, types.MappingProxyType(dict(inputs)))

  def check_parts(self) -> None:
    """Raises a UserError if the task or an input lacks a method."""
    _check_methods('task', self.task, ('train_step', 'init_variables'), 'return a Task, or the fdl.Config of one')
    for path, source in self.inputs().items():
      if isinstance(source, Mapping):
        raise UserError(f'{path} is a {type(source).__name__}, a single batch: return a list of batches, [batch].')
      _check_methods(path, source, ('element_spec', 'make_iterator', 'reshard_states'))

  def inputs(self) -> dict[str, Input]:
    """Returns the training input and the eval sets by their config paths."""
    evals = {f'eval_inputs.{name}': eval_set for name, eval_set in self.eval_inputs.items()}
    return {'train_input': self.train_input} | evals

  @property
  def tokenizer(self) -> Tokenizer | None:
    """The tokenizer of the training input, else of an eval set, else of the task; None if there is none."""
    sources = (self.train_input, *self.eval_inputs.values(), self.task)
    tokenizers = map(tokenizer_of, sources)
    return next((tokenizer for tokenizer in tokenizers if tokenizer is not None), None)


def make_training_iterator(job: Job) -> InputIterator:
  """Returns the iterator of this process's rows of the training input. Raises a UserError if it lacks a method."""
  with own_code_errors('train_input.make_iterator()', part=job.train_input):
    iterator = job.train_input.make_iterator(shard_index=jax.process_index(), shard_count=jax.process_count())
  _check_methods('the iterator of train_input', iterator, ('__next__', 'get_state', 'set_state', 'close'))
  return iterator


def check_vocabulary(job: Job) -> None:
  """Raises a UserError if a tokenizer of the inputs has more ids than the model's embedding has rows.

  An id without a row would make the loss NaN.
  """
  vocab_size = getattr(getattr(job.task.model, 'embedding', None), 'vocab_size', None)
  if vocab_size is None:  # another kind of model
    return
  for path, source in job.inputs().items():
    tokenizer = tokenizer_of(source)
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
      raise UserError(
        f'{path}.tokenizer has {tokenizer.vocab_size} ids, more than the model with vocab_size={vocab_size}: set '
        f'vocab_size to {tokenizer.vocab_size} or more, or choose the tokenizer of this vocabulary.'
      )


def partition_job(job: Job, mesh: Mesh | AbstractMesh | None = None) -> PartitionedModel:
  """Partitions the job's task over a mesh, with the experiment's axis rules and the training input's element spec.

  Args:
    job: the built experiment.
    mesh: default: the experiment's mesh, of all devices. With `experiment.mesh_spec().build_abstract()` the model can
      be inspected and planned on any machine.

  Raises a UserError: the mesh does not fit the devices, or the task or its input does not fit the mesh.
  """
  experiment = job.experiment
  mesh = experiment.mesh_spec().build() if mesh is None else mesh
  job.check_parts()
  with own_code_errors('train_input.element_spec()', part=job.train_input):
    batch = job.train_input.element_spec()
  specs = [*batch.values()] if isinstance(batch, Mapping) else []
  if not specs or not all(hasattr(spec, 'shape') and hasattr(spec, 'dtype') for spec in specs):
    raise UserError(
      'train_input.element_spec() must return a dict of jax.ShapeDtypeStruct(shape, dtype) by name, with the whole '
      f'batch as the first dim; it returns {batch!r}.'
    )
  if isinstance(mesh, Mesh) and mesh.devices.flat[0] in jax.devices():  # not for a plan of another machine
    check_batch_fits(batch)
  with own_code_errors('the model', keys=batch):
    model = partition_spmd_model(
      job.task,
      mesh,
      batch,
      axis_rules=experiment.axis_rules,
      inputs_split_mapping=experiment.inputs_split_mapping,
      default_split_dim=experiment.default_split_dim,
    )
  further: dict[str, Any] = {}
  if options := experiment.tpu_options():
    further['tpu_options'] = options
  if sizes := tuple(size for size in batch_sizes(job.train_input) if size != job.train_input.batch_size):
    further['batch_sizes'] = sizes
  return dataclasses.replace(model, **further) if further else model
