"""Names the jobs of a sweep, and writes their settings as overrides."""

import collections
from collections.abc import Mapping, Sequence
import dataclasses
import enum
import re
from typing import Any

import numpy as np

from spmd_tasks.config.values import is_dtype
from spmd_tasks.errors import UserError, own_code_errors
from spmd_tasks.experiment import Experiment

_NAME = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_.=,+-]{0,199}')  # of a directory, on every file system and object store


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepJob:
  """A job of a sweep: its name, which is its directory's, and its overrides, as `path=value`."""

  name: str
  overrides: tuple[str, ...]


def make_job(name: str, settings: Mapping[str, Any]) -> SweepJob:
  """Returns a job with these settings."""
  return SweepJob(name=name, overrides=tuple(f'{path}={_text(path, value)}' for path, value in settings.items()))


def sweep_of(experiment: Experiment) -> Any:
  """Returns what the experiment's `sweep()` returns. Raises a UserError if that fails."""
  with own_code_errors(f'sweep() of {type(experiment).__name__}', part=experiment):
    return experiment.sweep()


def jobs_of(experiment: Experiment) -> list[SweepJob]:
  """Returns the jobs of an experiment's sweep.

  Raises a UserError: there is no sweep, or its names or values cannot be used.
  """
  cls, sweep = type(experiment).__name__, sweep_of(experiment)
  settings = list(sweep.values()) if isinstance(sweep, Mapping) else sweep
  if not isinstance(settings, list | tuple) or not all(isinstance(each, Mapping) for each in settings):
    raise UserError(
      f"sweep() of {cls} returns {str(sweep)[:200]}: return a list of overrides, such as [{{'seed': 0}}, {{'seed': 1}}]"
      ', or a dict of them by name.'
    )
  if not settings:
    raise UserError(f'{cls} has no sweep: define sweep(), which returns the overrides of each job.')
  names = list(sweep) if isinstance(sweep, Mapping) else _names(settings)
  for name in names:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
      raise UserError(
        f'sweep() of {cls} has the name {str(name)[:300]!r}, which is also a directory: use at most 200 letters, digits'
        ' and _.=,+-, beginning with one of the first three. To choose names, return a dict of overrides by name.'
      )
  if twice := [name for name, count in collections.Counter(names).items() if count > 1]:
    raise UserError(
      f'sweep() of {cls} has several jobs of the name {twice[0]!r}: remove all but one, or return a dict of overrides '
      'by name.'
    )
  return [make_job(name, each) for name, each in zip(names, settings, strict=True)]


def _text(path: str, value: Any) -> str:
  """Returns the text that `--set` parses as the value."""
  if isinstance(value, str):
    return value
  if isinstance(value, enum.Enum):
    return value.name
  if is_dtype(value):
    return np.dtype(value).name
  if isinstance(value, np.generic):
    value = value.item()
  if value is None or isinstance(value, bool | int | float | tuple | list | dict):
    return repr(value)
  raise UserError(
    f'sweep() has the value {str(value)[:100]} of type {type(value).__name__} for {path}: use what --set takes, such '
    'as a number, a text or a tuple.'
  )


def _names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns a name for each job, such as `learning_rate=0.01,seed=1`, of the settings that differ between jobs."""
  texts = [{path: _text(path, value) for path, value in each.items()} for each in settings]
  paths = list(dict.fromkeys(path for each in texts for path in each))
  if len(texts) > 1:
    paths = [path for path in paths if len({each.get(path) for each in texts}) > 1]
  last = {path: path.rpartition('.')[2] for path in paths}
  counts = collections.Counter(last.values())
  labels = {path: name if counts[name] == 1 else path for path, name in last.items()}

  def word(text: str) -> str:
    return re.sub(r'[^A-Za-z0-9_.+-]+', '_', text).strip('_')

  named = [[f'{word(labels[path])}={word(each[path])}' for path in paths if path in each] for each in texts]
  return [','.join(words) or 'default' for words in named]
