"""Reads what jobs have recorded in their directories: configs, metrics and evals by step. Changes nothing there.

    read_metrics('runs/*')                  # a pandas.DataFrame: a row per run and logged step
    for run in find_runs(['runs/lr']):      # the jobs below a directory
      run.totals('tokens', [100])           # tokens until step 100

A job may be running, or have been killed at any moment: what cannot be read is left out.
"""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import dataclasses
import glob
import itertools
import json
import math
import os
from typing import TYPE_CHECKING, Any

from etils import epath
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require
from spmd_tasks.files import absolute_path, glob_below, read_text
from spmd_tasks.programs.job_directory import CONFIG_FILE, NEWEST_CHECKPOINT_FILE
from spmd_tasks.runtime.metrics import Metric, read_jsonl

if TYPE_CHECKING:
  import pandas

UNITS = ('tokens', 'examples', 'flops')  # that metrics count per second


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRun:
  """A job as its directory records it.

  Attributes:
    name: its path below the directory that all runs share.
    directory: its job_log_dir.
    config: the fields of its config by path, as JSON; {} if it is not written yet.
    overrides: the user's overrides by path, as JSON.
    experiment: the name of its experiment, or ''.
    lines: the metrics of each logged step; those of evals are named `eval/SET/METRIC`.
    has_ended: whether the job is complete.
  """

  name: str
  directory: epath.Path
  config: Mapping[str, Any]
  overrides: Mapping[str, Any]
  experiment: str
  lines: Mapping[int, Mapping[str, Metric]]
  has_ended: bool

  def totals(self, unit: str, steps: Sequence[int]) -> list[float] | None:
    """Returns how many of a unit the run has used until each step, or None if it does not count them.

    `unit` is one of UNITS, or 'wall_seconds'. Between logged steps, totals are interpolated.
    """
    known, totals = self._measured(unit)
    if not known:
      return None
    rate = (totals[-1] - totals[-2]) / (known[-1] - known[-2])
    beyond = [max(0, step - known[-1]) * rate for step in steps]
    return [float(total) for total in np.interp(steps, known, totals) + beyond]

  def _measured(self, unit: str) -> tuple[list[int], list[float]]:
    """Returns steps, from 0 on, and the totals until them."""
    if unit == 'wall_seconds':
      points = [(step, value) for step, line in self.lines.items() if isinstance(value := line.get(unit), float)]
      return ([0, *(step for step, _ in points)], [0.0, *(value for _, value in points)]) if points else ([], [])
    known, totals = [0], [0.0]
    for step, line in self.lines.items():
      rate, steps_per_second = line.get(f'{unit}_per_second'), line.get('steps_per_second')
      if not isinstance(rate, float) or not isinstance(steps_per_second, float):
        continue
      if math.isfinite(rate) and 0 < steps_per_second < math.inf:
        known.append(step)
        totals.append(totals[-1] + round(rate / steps_per_second) * (step - known[-2]))
    return (known, totals) if len(known) > 1 else ([], [])


def find_runs(places: Iterable[epath.PathLike]) -> list[RecordedRun]:
  """Returns the runs in directories of jobs, and up to two levels below other directories. A place may be a pattern.

  Raises a UserError: a place matches nothing, or has no job.
  """
  found: dict[str, epath.Path] = {}
  for place in places:
    matches = _matches(place)
    jobs = [job for match in matches for job in (_jobs(match, ['']) or _jobs(match, ['*/', '*/*/']))]
    if not jobs:
      problem = f'has no {CONFIG_FILE} of a job, nor have the directories below it' if matches else 'is no directory'
      raise UserError(f'{os.fspath(place)} {problem}: name directories of jobs, or a directory of them.')
    found |= {os.fspath(job): job for job in jobs}
  parts = [path.split('/') for path in found]
  shared = len([*itertools.takewhile(lambda names: len({*names}) == 1, zip(*(path[:-1] for path in parts)))])
  return [_read('/'.join(path[shared:]), directory) for path, directory in zip(parts, found.values(), strict=True)]


def _matches(place: epath.PathLike) -> list[epath.Path]:
  """Returns the directories of a place."""
  path = absolute_path(place)
  parts = os.fspath(path).split('/')
  first = next((index for index, part in enumerate(parts) if glob.has_magic(part)), None)
  paths = [path]
  if first is not None and not path.exists():
    paths = glob_below(epath.Path('/'.join(parts[:first]) or '/'), '/'.join(parts[first:]))
  return [match for match in paths if match.is_dir()]


def _jobs(directory: epath.Path, prefixes: Sequence[str]) -> list[epath.Path]:
  files = [path for prefix in prefixes for path in glob_below(directory, f'{prefix}{CONFIG_FILE}')]
  return [path.parent for path in files if 'experiment' in _read_json(path)]


def _read_json(path: epath.Path) -> dict[str, Any]:
  """Returns an object in a JSON file; {} if there is none."""
  with contextlib.suppress(OSError, ValueError, RecursionError):
    content = json.loads(read_text(path))
    return content if isinstance(content, dict) else {}
  return {}


def _read(name: str, directory: epath.Path) -> RecordedRun:
  saved = _read_json(directory / CONFIG_FILE)
  lines: dict[int, dict[str, Metric]] = {}
  for place in [directory, *glob_below(directory, 'eval/*')]:
    prefix = '' if place == directory else f'eval/{place.name}/'
    with contextlib.suppress(OSError):  # a job that has not logged yet
      for step, metrics in read_jsonl(place).items():
        line = lines.setdefault(step, {'time': metrics['time']} if 'time' in metrics else {})
        line |= {f'{prefix}{key}': value for key, value in metrics.items() if not prefix or key != 'time'}
  config, overrides = (saved[key] if isinstance(saved.get(key), dict) else {} for key in ('config', 'overrides'))
  last_step = _read_json(directory / NEWEST_CHECKPOINT_FILE)
  num_steps = config.get('num_train_steps')
  return RecordedRun(
    name=name,
    directory=directory,
    config=config,
    overrides=overrides,
    experiment=str(saved.get('experiment', '')),
    lines={step: lines[step] for step in sorted(lines)},
    has_ended=last_step.get('is_last') is True or (num_steps is not None and last_step.get('step') == num_steps),
  )


def settings_that_differ(runs: Sequence[RecordedRun]) -> dict[str, list[Any]]:
  """Returns the values of the settings in which runs differ, by path: those that were overridden, then others.

  A setting is a field of the experiment, or a path that a command has overridden; what follows from it is left out. A
  value is a number, a text, True, False or None; another one is its text. A run without the setting has ''.
  """
  overridden = [path for run in runs for path in run.overrides]
  fields = [path for run in runs for path in run.config if '.' not in path]
  settings: dict[str, list[Any]] = {'experiment': [run.experiment for run in runs]}
  for path in dict.fromkeys([*overridden, *fields]):
    settings[path] = [_plain(run.config[path]) if path in run.config else '' for run in runs]
  return {path: values for path, values in settings.items() if any(value != values[0] for value in values)}


def _plain(value: Any) -> Any:
  return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def read_metrics(places: epath.PathLike | Iterable[epath.PathLike]) -> 'pandas.DataFrame':
  """Reads the metrics of jobs: a row for each run and logged step.

  Columns: `run` (the path below the directory that all runs share), `step`, `tokens`, `examples` and `flops` until the
  step if they are known, `time`, metrics, metrics of evals as `eval/SET/METRIC`, and settings in which runs differ as
  `config.PATH`.

  Args:
    places: directories of jobs, directories of such directories, or glob patterns, such as 'runs/*'.

  Raises a UserError: there is no job, or pandas is not installed.
  """
  require('pandas', 'pandas', wants='read_metrics()')
  import pandas  # takes 0.5 s

  runs = find_runs([places] if isinstance(places, str | os.PathLike) else places)
  settings = settings_that_differ(runs)
  frames = [pandas.DataFrame(columns=['run', 'step'])]
  for index, run in enumerate(runs):
    steps, lines = list(run.lines), run.lines.values()
    columns: dict[str, Any] = {'run': [run.name] * len(steps), 'step': steps}
    columns |= {unit: totals for unit in UNITS if (totals := run.totals(unit, steps)) is not None}
    columns |= {
      name: [line.get(name) for line in lines] for name in dict.fromkeys(name for line in lines for name in line)
    }
    columns |= {f'config.{path}': [values[index]] * len(steps) for path, values in settings.items()}
    frames.append(pandas.DataFrame(columns))
  frame = pandas.concat([frame for frame in frames if len(frame)] or frames, ignore_index=True)
  first = [name for name in ('run', 'step', *UNITS, 'time') if name in frame]
  frame = frame[first + sorted(name for name in frame if name not in first)]
  return frame.assign(time=pandas.to_datetime(frame['time'], unit='s', utc=True)) if 'time' in frame else frame
