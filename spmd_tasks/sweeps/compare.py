"""--mode compare: jobs beside one another, as a table in the terminal and one HTML page.

    spmd-tasks --mode compare runs/lr
    spmd-tasks --mode compare 'runs/*' runs/elsewhere --out comparison.html

Jobs that differ only in `seed` are one row, with the mean and the standard deviation, and one curve with a band. The
page, compare_page.html, holds its data and draws it by itself: it loads nothing. Without --out it is `compare.html` in
the directory that is compared, or in the current one if there are several.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import statistics
from typing import Any

from etils import epath
import jinja2

from spmd_tasks import exit_codes
from spmd_tasks.command import Command
from spmd_tasks.files import absolute_path, make_directory, storage_errors, write_durably
from spmd_tasks.programs.recorded_runs import UNITS, RecordedRun, find_runs, settings_that_differ

_MAX_POINTS = 400  # of a curve on the page
_MAX_METRICS, _MAX_SETTINGS, _MAX_CHARS = 6, 6, 36  # of the table in the terminal
_NOT_RESULTS = ('num_batches', 'loss_weight', 'cross_entropy', 'z_loss', 'perplexity')  # of an eval


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """Runs that differ only in their seeds; most groups have one run."""

  label: str
  settings: Mapping[str, Any]  # those in which groups differ
  runs: Sequence[RecordedRun]

  def last(self, metric: str) -> list[float]:
    """Returns the last value of a metric in each run that has it."""
    points = [_points(run, metric) for run in self.runs]
    return [of_run[-1][1] for of_run in points if of_run]


def _points(run: RecordedRun, metric: str) -> list[tuple[int, float]]:
  """Returns the steps and values of a metric that is one number per step."""
  return [(step, value) for step, line in run.lines.items() if isinstance(value := line.get(metric), float)]


def _metric_names(groups: Sequence[Group]) -> set[str]:
  values: dict[str, Any] = {}
  for group in groups:
    for run in group.runs:
      for line in run.lines.values():
        values |= line
  return {name for name, value in values.items() if isinstance(value, float)}


def run(command: Command) -> int:
  """Runs --mode compare."""
  runs = find_runs(command.flags.words)
  groups = group_runs(runs)
  path = absolute_path(command.flags.out) if command.flags.out else _default_page(command.flags.words)
  print(comparison_table(groups), flush=True)
  with storage_errors(path):
    make_directory(path.parent)
    write_durably(path, comparison_page(groups))
  print(f'page: {path}', flush=True)
  return exit_codes.OK


def _default_page(words: Sequence[str]) -> epath.Path:
  """Returns the page's path: in the directory that is compared, or in the current one if there are several."""
  is_one = len(words) == 1 and absolute_path(words[0]).is_dir()  # and no pattern
  return absolute_path(words[0] if is_one else '.') / 'compare.html'


def group_runs(runs: Sequence[RecordedRun]) -> list[Group]:
  """Returns the groups of runs, the one with the best result first."""
  settings = settings_that_differ(runs)
  seeds = settings.pop('seed', [0] * len(runs))
  members: dict[str, list[int]] = {}
  for index in range(len(runs)):
    key = repr([values[index] for values in settings.values()])
    if any(seeds[other] == seeds[index] for other in members.get(key, ())):
      key = repr((key, index))  # not another seed, but another run with the same settings
    members.setdefault(key, []).append(index)
  groups = []
  for indices in members.values():
    own = {path: values[indices[0]] for path, values in settings.items()}
    name = runs[indices[0]].name if len(indices) == 1 else ', '.join(f'{path}={value}' for path, value in own.items())
    label = name or f'{runs[indices[0]].experiment}, {len(indices)} seeds'
    groups.append(Group(label=label, settings=own, runs=[runs[index] for index in indices]))
  metric = next(iter(result_metrics(groups)), None)
  return sorted(groups, key=lambda group: _rank(group.last(metric) if metric else []))


def _rank(values: Sequence[float]) -> float:
  return statistics.fmean(values) if values and all(map(math.isfinite, values)) else math.inf


def result_metrics(groups: Sequence[Group]) -> list[str]:
  """Returns the metrics of the table: losses of evals, the loss of training, then other metrics of evals."""
  names = sorted(_metric_names(groups))
  evals = [name for name in names if name.startswith('eval/')]
  losses = [name for name in evals if name.endswith('/loss')]
  others = [name for name in evals if name not in losses and name.rpartition('/')[2] not in _NOT_RESULTS]
  return [*losses, *(['loss'] if 'loss' in names else []), *others]


def comparison_table(groups: Sequence[Group]) -> str:
  """Returns the table for the terminal, the best group first."""
  header, rows = _table(groups, _MAX_SETTINGS, _MAX_METRICS)
  cells = [[_shorten(cell) for cell in row] for row in (header, *rows)]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  return '\n'.join(
    '  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
  )


def _shorten(text: str) -> str:
  return text if len(text) <= _MAX_CHARS else f'{text[: _MAX_CHARS - 3]}...'


def _table(groups: Sequence[Group], max_settings: int, max_metrics: int) -> tuple[list[str], list[list[str]]]:
  paths = list(groups[0].settings)[:max_settings]
  told_apart = len({repr([group.settings[path] for path in paths]) for group in groups}) == len(groups)
  by_name = not paths or not told_apart
  has_seeds = any(len(group.runs) > 1 for group in groups)
  metrics = result_metrics(groups)[:max_metrics]
  has_goodput = any(group.last('goodput') for group in groups)
  header = ['run'] * by_name + paths + ['seeds'] * has_seeds + ['step', *metrics] + ['goodput'] * has_goodput
  rows = []
  for group in groups:
    row = [group.label] * by_name + [_text(group.settings[path]) for path in paths]
    row += [str(len(group.runs))] * has_seeds + [_steps(group.runs)]
    row += [_mean(group.last(metric)) for metric in metrics]
    goodput = group.last('goodput')
    rows.append(row + [f'{statistics.fmean(goodput):.1%}' if goodput else ''] * has_goodput)
  return header, rows


def _text(value: Any) -> str:
  return f'{value:.6g}' if isinstance(value, float) else str(value)


def _steps(runs: Sequence[RecordedRun]) -> str:
  """Returns the last step of each run, and of how many if a run is not complete."""
  steps = sorted({max(run.lines, default=0) for run in runs})
  text = f'{steps[0]}-{steps[-1]}' if len(steps) > 1 else str(steps[0])
  of = sorted({run.config['num_train_steps'] for run in runs if 'num_train_steps' in run.config})
  return text if all(run.has_ended for run in runs) or not of else f'{text} of {", ".join(map(str, of))}'


def _mean(values: Sequence[float]) -> str:
  """Returns `mean ± standard deviation` of the values of several seeds; '' without a value."""
  finite = [value for value in values if math.isfinite(value)]
  if len(values) < 2 or not finite:
    return f'{values[0]:.4g}' if values else ''
  text = f'{statistics.fmean(finite):.4g}' + (f' ± {statistics.stdev(finite):.2g}' if len(finite) > 1 else '')
  return text if len(finite) == len(values) else f'{text} ({len(values) - len(finite)} not finite)'


def comparison_page(groups: Sequence[Group]) -> str:
  """Returns the HTML page."""
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader('spmd_tasks.sweeps', ''),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  header, rows = _table(groups, max_settings=100, max_metrics=100)
  knots = [[_knots(run) for run in group.runs] for group in groups]
  known = {axis for of_group in knots for of_run in of_group for axis in of_run}
  return environment.get_template('compare_page.html').render(
    header=header,
    rows=rows,
    groups=groups,
    experiments=sorted({run.experiment for group in groups for run in group.runs if run.experiment}),
    steps=_steps,
    data={
      'labels': [group.label for group in groups],
      'axes': [axis for axis in ('step', *UNITS, 'seconds') if axis in known],
      'knots': knots,
      'charts': [{'name': name, 'curves': _curves(name, groups)} for name in _chart_names(groups)],
      'numResults': len(result_metrics(groups)),
    },
  )


def _knots(run: RecordedRun) -> dict[str, list[Any]]:
  """Returns steps of a run, and how many tokens, FLOPs and seconds it took until each."""
  steps = [0, *_thinned(list(run.lines))]
  totals = {unit: run.totals(unit, steps) for unit in (*UNITS, 'wall_seconds')}
  known = {
    unit.removeprefix('wall_'): [*map(_rounded, values)] for unit, values in totals.items() if values is not None
  }
  return {'step': steps} | known


def _chart_names(groups: Sequence[Group]) -> list[str]:
  """Returns the metrics of the charts: results first, then all others that are one number per step."""
  results = result_metrics(groups)
  return results + sorted(_metric_names(groups) - {*results, 'time', 'wall_seconds'})


def _curves(metric: str, groups: Sequence[Group]) -> list[list[dict[str, list[Any]]]]:
  """Returns the steps and values of a metric, of each run of each group; None for values that are not finite."""
  curves = []
  for group in groups:
    of_group = []
    for run in group.runs:
      points = _thinned(_points(run, metric))
      of_group.append({'steps': [step for step, _ in points], 'values': [_rounded(value) for _, value in points]})
    curves.append(of_group)
  return curves


def _thinned(items: list[Any]) -> list[Any]:
  """Returns at most _MAX_POINTS items, evenly spaced, with the first and the last."""
  if len(items) <= _MAX_POINTS:
    return items
  return [items[round(index * (len(items) - 1) / (_MAX_POINTS - 1))] for index in range(_MAX_POINTS)]


def _rounded(value: float) -> float | None:
  return float(f'{value:.6g}') if math.isfinite(value) else None
