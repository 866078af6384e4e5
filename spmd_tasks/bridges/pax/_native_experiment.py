"""translate_experiment: a Pax experiment as the source of an experiment of ours, compared with the original.

    translated = translate_experiment(job)        # of a PaxExperiment
    translated.text                               # a Python file with a class of the same name
    print(translated.comparison)

Model, loss, mesh, steps and the optimizer Adam are translated; the input stays that of the Pax experiment, behind
`pax_dataset`, until one writes another. Whatever cannot be said in our terms is listed, at the top of the file too.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks import exit_codes
from spmd_tasks.bridges.pax._praxis_layers import Report, Settings
from spmd_tasks.bridges.pax._praxis_model import Translation, translate_language_model
from spmd_tasks.command import Command
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment, Job
from spmd_tasks.learning import AdamW, Constant, Learner, LinearWarmupCosine, LinearWarmupExponential
from spmd_tasks.runtime import Task
from spmd_tasks.sharding.weights import unbox_weights

if TYPE_CHECKING:
  from spmd_tasks.bridges.pax._input import PaxInput

_FIELDS = (
  'mesh_axis_names',
  'ici_mesh_shape',
  'dcn_mesh_shape',
  'seed',
  'num_train_steps',
  'log_every_steps',
  'eval_every_steps',
  'checkpoint_every_steps',
  'checkpoint_max_to_keep',
)
_PLAIN_AXES = {'replica', 'data', 'mdl'}  # of DEFAULT_AXIS_RULES, which are Pax's training-optimized layout


_FILE = '''"""{cls}, translated from {name} by `spmd-tasks --mode translate`.

Not translated:
{notes}
"""

import fiddle as fdl

{imports}


class {cls}(Experiment):
  """{doc}"""

{fields}

  def task(self):
    return {body}

  def train_input(self):
    return fdl.Config(pax_dataset, experiment={name!r})
{evals}'''


def run(command: Command) -> int:
  """Runs --mode translate: writes the file, and shows what it lacks and that both compute the same."""
  flags = command.flags
  path = Path(flags.out or f'{flags.exp.rpartition(".")[2].lower()}_native.py')
  if path.exists():
    raise UserError(f'{path} exists: choose another file by --out, or delete it.')
  command.use_fake_devices()
  translated = translate_experiment(command.resolve().build())
  path.write_text(translated.text)
  lists = {
    'Not translated, so the outputs differ': translated.missing,
    'Not translated, so training differs': translated.training_only,
  }
  shown = [line for title, notes in lists.items() if notes for line in (f'{title}:', *(f'  {note}' for note in notes))]
  print('\n'.join([f'wrote {path}', *shown, translated.comparison]), flush=True)
  return exit_codes.OK


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslatedExperiment:
  """The file, what it lacks, and the comparison.

  Attributes:
    text: Python source.
    missing: what changes the model's outputs and could not be translated.
    training_only: what changes training only, and could not be translated.
    comparison: a sentence with the outputs of both models in evaluation, from the same weights and batch, or why there
      are none.
  """

  text: str
  missing: tuple[str, ...]
  training_only: tuple[str, ...]
  comparison: str


def translate_experiment(job: Job) -> TranslatedExperiment:
  """Translates the job of a Pax experiment with a language model.

  Raises:
    UserError: the experiment is not one of Pax, or its model has a layer without a counterpart here.
  """
  from spmd_tasks.bridges.pax._task import PaxTask  # imports Paxml, and that TensorFlow

  if not isinstance(job.task, PaxTask):
    raise UserError(f'{job.name} is not an experiment of Pax: there is nothing to translate.')
  spec = job.task.input_spec
  translation = translate_language_model(job.task.model, spec['ids'].shape if 'ids' in spec else None)
  report = Report()
  learner = _translate_learner(job.task.task.learners[0], report)
  missing = translation.missing
  if unknown := set(job.experiment.mesh_axis_names) - _PLAIN_AXES - {'stage'}:
    report.training.append(f'mesh_axis_names: no axis rules are known for {sorted(unknown)}; set `axis_rules`')
  if job.task.task.early_stopping_fn is not None:
    report.training.append('task.early_stopping_fn: the job makes all its steps; return an EvalTarget from hooks()')
  training_only = (*translation.training_only, *report.training)
  task = Task(model=translation.model, loss=translation.loss, learner=learner, eval_with_ema=job.task.eval_with_ema)
  return TranslatedExperiment(
    text=_source_file(job, task, (*missing, *training_only)),
    missing=missing,
    training_only=training_only,
    comparison=_compare(job, translation),
  )


def pax_dataset(experiment: str, name: str | None = None) -> 'PaxInput':
  """Returns a dataset of a Pax experiment as an input of ours.

  Args:
    experiment: `package.module.Class`.
    name: of an eval dataset; None for the training dataset.
  """
  from spmd_tasks.bridges.pax._input import PaxInput

  module, _, cls = experiment.rpartition('.')
  made = getattr(importlib.import_module(module), cls)()
  if name is None:
    return PaxInput(config=made.train_datasets()[0])
  return PaxInput(config=next(each for each in made.eval_datasets() if each.name == name), is_training=False)


def _translate_learner(learner: Any, report: Report) -> Learner:
  """Translates Paxml's learner; anything but Adam becomes AdamW with the same learning rate, and is reported."""
  optimizer = Settings(learner.optimizer, 'learner.optimizer', report)
  rate = translate_learning_rate(optimizer)
  fields: dict[str, Any] = {'learning_rate': rate}
  if optimizer.class_name == 'Adam':
    fields |= {name: optimizer.read(name) for name in ('beta1', 'beta2', 'epsilon', 'weight_decay')}
    if cap := optimizer.read('clip_threshold'):
      report.training.append(f'{optimizer.path}.clip_threshold={cap}: Adam has no cap of its updates here')
    if fields['weight_decay']:
      report.training.append(
        f'{optimizer.path}.weight_decay: norms and biases do not decay here, in Praxis they do, norms to a scale of 1'
      )
  else:
    report.training.append(f'{optimizer.path}: {optimizer.class_name}; AdamW stands in its place')
  clip, decay = optimizer.read('clip_gradient_norm_to_value'), optimizer.read('ema_decay')
  if decay:
    report.training.append(
      f'{optimizer.path}.ema_decay: the average is of the weights after an update, in Pax before it'
    )
  return Learner(optimizer=AdamW(**fields), clip_global_norm=clip or None, ema_decay=decay or None)


def translate_learning_rate(optimizer: Settings) -> Any:
  """Returns the schedule of a Praxis optimizer, times its learning rate; a constant, reported, where ours has none."""
  rate, schedule = optimizer.read('learning_rate'), optimizer.child('lr_schedule')
  if schedule is None:
    return rate
  if schedule.class_name in ('LinearRampupExponentialDecay', 'LinearRampupCosineDecay'):
    fields = {name: schedule.read(name) for name in ('warmup_steps', 'decay_start')}
    fields |= {'peak': rate * schedule.read('max'), 'final_fraction': schedule.read('min_ratio')}
    end = schedule.read('decay_end')
    if schedule.class_name == 'LinearRampupCosineDecay':
      return LinearWarmupCosine(total_steps=end, **fields)
    return LinearWarmupExponential(decay_end=end, **fields)
  if schedule.class_name == 'Constant':
    return Constant(value=rate * schedule.read('value'))
  optimizer.report.training.append(f'{schedule.path}: {schedule.class_name}; a constant rate stands in its place')
  return rate


def _compare(job: Job, translation: Translation) -> str:
  """Draws the Pax model's variables, converts them, and lets both models compute the first batch; or says why not."""
  task: Any = job.task
  if task.cannot_run is not None:
    return f'Not compared, because Pax cannot run it: {task.cannot_run}.'
  first = next(iter(job.train_input.make_iterator()))
  batch = {name: jnp.asarray(array) for name, array in first.items()}
  variables = jax.jit(lambda: unbox_weights(task.init_variables(task.make_key(job.experiment.seed), batch)))()
  source = _flat(variables['params'], '.')
  abstract = _flat(unbox_weights(jax.eval_shape(translation.model.init, jax.random.key(0), batch)['params']), '/')
  try:
    translation.table.check(source, abstract)
  except UserError as error:
    if not translation.missing:
      raise
    return f'Not compared, because something with weights is not translated: {error}'
  weights = translation.table.convert(source, abstract)
  theirs = np.asarray(jax.jit(task.predict)(variables, batch).logits, np.float32)
  tree = traverse_util.unflatten_dict(weights, sep='/')
  predictions = jax.jit(translation.model.apply)({'params': tree}, batch)
  ours = np.asarray(predictions['logits'], np.float32)
  is_token = np.asarray(batch['weights']) > 0
  entropies = [
    float(translation.loss({'logits': logits, 'aux': predictions['aux']}, batch).metrics['cross_entropy'][0])
    for logits in (theirs, ours)
  ]
  difference = np.abs(theirs - ours)[is_token].max()
  return (
    f'{sum(array.size for array in source.values()):,} parameters converted. On the first batch, Pax and this '
    f'experiment compute the cross-entropy {entropies[0]:.7f} and {entropies[1]:.7f}; logits, of up to '
    f'{np.abs(theirs)[is_token].max():.2f}, differ by at most {difference:.1e}.'
  )


def _flat(tree: Any, separator: str) -> dict[str, Any]:
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator=separator): leaf for path, leaf in leaves}


def _source_file(job: Job, task: Task, notes: tuple[str, ...]) -> str:
  """Returns the Python source of the experiment."""
  cls, experiment = type(job.experiment), job.experiment
  name = f'{cls.__module__}.{cls.__qualname__}'
  defaults = {field.name: field.default for field in dataclasses.fields(Experiment)}
  fields = [
    f'{field} = {getattr(experiment, field)!r}' for field in _FIELDS if getattr(experiment, field) != defaults[field]
  ]
  imports = {'spmd_tasks': {'Experiment'}, 'spmd_tasks.bridges.pax': {'pax_dataset'}}
  if 'stage' in experiment.mesh_axis_names:
    fields.append('axis_rules = stage_axis_rules(DEFAULT_AXIS_RULES)')
    imports['spmd_tasks.sharding'] = {'DEFAULT_AXIS_RULES', 'stage_axis_rules'}
  body = _config_source(task, 2, imports)
  evals = ''.join(
    f'      {each!r}: fdl.Config(pax_dataset, experiment={name!r}, name={each!r}),\n' for each in job.eval_inputs
  )
  return _FILE.format(
    cls=cls.__qualname__,
    name=name,
    notes='\n'.join(f'* {note}' for note in notes or ('nothing',)),
    imports='\n'.join(
      f'from {package} import {", ".join(sorted(imports[package], key=str.lower))}' for package in sorted(imports)
    ),
    doc=(cls.__doc__ or cls.__qualname__).splitlines()[0],
    fields='\n'.join(f'  {line}' for line in fields),
    body=body,
    evals=f'\n  def eval_inputs(self):\n    return {{\n{evals}    }}\n' if evals else '',
  )


def _config_source(value: Any, depth: int, imports: dict[str, set[str]]) -> str:
  """Returns the source of a Fiddle config of a built object: its class and the fields that have other values."""
  if isinstance(value, tuple) and any(dataclasses.is_dataclass(item) for item in value):
    return '(' + ', '.join(_config_source(item, depth, imports) for item in value) + ',)'
  if not dataclasses.is_dataclass(value):
    return repr(dict(value) if isinstance(value, Mapping) else value)
  cls = type(value)
  imports.setdefault(_face_of(cls), set()).add(cls.__name__)
  indent = '  ' * (depth + 1)
  arguments = [f'{indent}{name}={_config_source(each, depth + 1, imports)},' for name, each in _changed_fields(value)]
  if not arguments:
    return f'fdl.Config({cls.__name__})'
  return '\n'.join(['fdl.Config(', f'{indent}{cls.__name__},', *arguments, '  ' * depth + ')'])


def _changed_fields(value: Any) -> Iterator[tuple[str, Any]]:
  for field in dataclasses.fields(value):
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
      default = field.default_factory()
    each = getattr(value, field.name)
    if field.init and field.name not in ('parent', 'name') and (default is dataclasses.MISSING or each != default):
      yield field.name, each


def _face_of(cls: type) -> str:
  """Returns the package from which the public name of a class is imported."""
  package = cls.__module__
  while package:
    module = importlib.import_module(package)
    if cls.__name__ in getattr(module, '__all__', ()):
      return package
    package = package.rpartition('.')[0]
  return cls.__module__
