"""Lists what a Pax experiment tunes as the jobs of a sweep: class attributes with choices, and sub-experiments.

    class Tuned(MyPaxExperiment):
      LEARNING_RATE = pg.oneof([0.1, 0.01])       # or @automl.parameter_sweep([('LEARNING_RATE', ...), (0.1, ...)])

      def search(self):
        return automl.hyperparameter_tuning(..., max_num_trials=20)

A job has one choice of each attribute. There is no tuning service: of `search()`, only `max_num_trials` counts.
"""

from collections.abc import Callable, Mapping, Sequence
import itertools
from typing import Any

import pyglove as pg

from spmd_tasks.bridges.pax._support import method_errors
from spmd_tasks.errors import UserError

Settings = dict[str, Any]  # values of class attributes

_COMBINATIONS, _NAMES = 'PARAMETER_SWEEP_COMBINATION', 'COMBINED_DECISION_POINT_NAMES'  # of automl.parameter_sweep


def with_first_choices(pax_class: Any) -> tuple[Any, list[Settings]]:
  """Returns the class with the first choice of each tuned attribute, and the choices of each job; [] if it tunes none.

  Raises a UserError: an attribute has no list of choices.
  """
  attributes: Settings = {}
  for base in reversed(pax_class.__mro__):
    attributes = {name: value for name, value in attributes.items() if name not in vars(base)} | {**vars(base)}
  # Paxml makes properties of the tuned attributes, which return the choices outside of a search.
  tuned = [name for name, value in attributes.items() if _module_of(value) == 'paxml.automl_interfaces']
  if not tuned:
    return pax_class, []
  with method_errors(pax_class, '__init__()'):
    experiment = pax_class()
  choices = []
  for name in tuned:
    choice = getattr(experiment, name)
    if not isinstance(choice, pg.hyper.OneOf):
      shown = ' '.join(str(choice).split())[:100]
      raise UserError(f'{pax_class.__name__}.{name} = {shown} is not a list of choices: write pg.oneof([...]).')
    names = getattr(pax_class, _NAMES) if name == _COMBINATIONS else [name]
    rows = choice.candidates if name == _COMBINATIONS else [[value] for value in choice.candidates]
    choices.append([dict(zip(names, row, strict=True)) for row in rows])
  jobs = [{name: value for part in parts for name, value in part.items()} for parts in itertools.product(*choices)]
  own = {name: getattr(pax_class, name) for name in ('__module__', '__qualname__', '__doc__')}
  return type(pax_class.__name__, (pax_class,), jobs[0] | own), jobs


def _module_of(value: Any) -> str | None:
  return value.fget.__module__ if isinstance(value, property) else None


def sweep_of(
  experiment: Any, pax_class: Any, tuned: Sequence[Settings], is_plain: Callable[[Any], bool]
) -> Sequence[Settings] | Mapping[str, Settings]:
  """Returns the jobs of a Pax experiment; [] if it tunes nothing and has no sub-experiments.

  Args:
    experiment: an instance.
    pax_class: its class, as its author wrote it.
    tuned: the choices of each job, from `with_first_choices`.
    is_plain: returns whether a class attribute is a field, which an override can set.

  Raises a UserError: a sub-experiment differs in more than plain class attributes.
  """
  with method_errors(pax_class, 'sub_experiments()'):
    parts = {name: _differences(pax_class, name, part, is_plain) for name, part in experiment.sub_experiments().items()}
  with method_errors(pax_class, 'search()'):
    try:
      num_jobs = experiment.search().max_num_trials
    except NotImplementedError:
      num_jobs = None
  tuned = list(tuned)[:num_jobs]
  if not tuned:
    return [] if list(parts.values()) == [{}] else {name or 'default': part for name, part in parts.items()}
  return [{**part, **settings} for settings in tuned for part in parts.values()]


def _differences(pax_class: Any, name: str, part: Any, is_plain: Callable[[Any], bool]) -> Settings:
  """Returns the plain class attributes in which a sub-experiment differs from the experiment."""
  own = [base for base in reversed(part.__mro__) if base not in pax_class.__mro__]
  settings = {key: value for base in own for key, value in vars(base).items() if not key.startswith('_')}
  others = [key for key, value in settings.items() if not is_plain(value)]
  if others or not issubclass(part, pax_class):
    raise UserError(
      f'sub-experiment {name!r} of {pax_class.__name__} is {part.__module__}.{part.__name__}, which differs in more '
      'than numbers and texts of the class: name it by --exp.'
    )
  return settings
