"""A sweep whose settings Optuna chooses, each by the results of the earlier ones.

    def sweep(self):
      return by_optuna({'learning_rate': FloatDistribution(1e-4, 1e-1, log=True)}, 20, metric='eval/valid/loss')

`--sweep all` runs its jobs, `trial_0000` and so on. Optuna's study is `<job_log_dir>/optuna.log`: a sweep that is
killed continues the job that ran, and chooses the others as it would have.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
import dataclasses
import difflib
import math
import os
import sys
from typing import Any, Literal

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require
from spmd_tasks.files import absolute_path, is_remote, make_directory
from spmd_tasks.programs.recorded_runs import find_runs
from spmd_tasks.sweeps.jobs import SweepJob, make_job

_STUDY_FILE, _STUDY_NAME = 'optuna.log', 'sweep'
_METRIC = 'metric'  # the study's user attribute


@dataclasses.dataclass(frozen=True)
class ByOptuna:
  """A sweep whose settings Optuna chooses; see `by_optuna`."""

  distributions: Mapping[str, Any]
  count: int
  metric: str
  direction: Literal['minimize', 'maximize']
  sampler: Callable[..., Any] | None

  def example(self) -> SweepJob:
    """Returns a job with one value of each distribution, by which paths and types are checked."""
    settings = {path: getattr(x, 'choices', None) or (x.low,) for path, x in self.distributions.items()}
    return make_job('trial', {path: values[0] for path, values in settings.items()})

  def check_metric(self, eval_names: Collection[str]) -> None:
    """Raises a UserError if the metric is of an eval that the experiment does not have."""
    kind, _, name = self.metric.partition('/')
    name = name.rpartition('/')[0]
    if kind == 'eval' and name not in eval_names:
      raise UserError(
        f'by_optuna() has the metric {self.metric!r}, but eval_inputs() has {", ".join(sorted(eval_names)) or "none"}: '
        "write eval/SET/METRIC with one of these sets, or the name of a training metric, such as 'loss'."
      )

  def jobs(self, directory: str) -> Iterator[tuple[int, SweepJob]]:
    """Yields the number of each job, from 1, and the job; tells Optuna its result when the next is asked for.

    A job that fails, or whose metric is not finite, is a failed trial. At the end, prints which trial is the best.

    Raises a UserError: Optuna is not installed, the directory is not on a disk or has the study of another sweep, or a
    complete job lacks the metric.
    """
    require('sweep', 'optuna', wants='by_optuna()')
    import optuna
    from optuna.storages.journal import JournalFileBackend

    path = absolute_path(directory)
    if is_remote(path):
      raise UserError(f'--job_log_dir {directory} is in an object store, and the study of by_optuna() needs a disk.')
    make_directory(path)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.JournalStorage(JournalFileBackend(os.fspath(path / _STUDY_FILE)))
    study = optuna.create_study(storage=storage, study_name=_STUDY_NAME, direction=self.direction, load_if_exists=True)
    self._check_study(study, path)
    for number in range(self.count):
      trials = study.get_trials(deepcopy=False)
      if number == len(trials):
        study.sampler = (self.sampler or optuna.samplers.TPESampler)(seed=number)  # the same after a restart
        settings = study.ask(dict(self.distributions)).params
      elif trials[number].state.is_finished():
        continue
      else:  # it ran when the sweep was killed
        settings = trials[number].params
      job = make_job(f'trial_{number:04d}', settings)
      yield number + 1, job
      value = self._result(path / job.name)
      if value is None:
        study.tell(number, state=optuna.trial.TrialState.FAIL)
      else:
        study.tell(number, value)
    if any(trial.value is not None for trial in study.get_trials(deepcopy=False)):
      best = study.best_trial
      chosen = ' '.join(make_job('trial', best.params).overrides)
      print(
        f'spmd-tasks: trial_{best.number:04d} is the best: {self.metric} = {best.value:.4g} with {chosen}',
        file=sys.stderr,
      )

  def _check_study(self, study: Any, path: Any) -> None:
    """Raises a UserError if a study that is continued has another direction, metric or kind of distribution."""
    if _METRIC not in study.user_attrs:
      study.set_user_attr(_METRIC, self.metric)
    own = {'direction': self.direction, 'metric': self.metric, **self.distributions}
    before: dict[str, Any] = {'direction': study.direction.name.lower(), 'metric': study.user_attrs[_METRIC]}
    for trial in study.get_trials(deepcopy=False)[-1:]:
      before |= trial.distributions
    for name in own.keys() & before.keys():
      if _fixed_part(own[name]) != _fixed_part(before[name]):
        raise UserError(
          f'by_optuna() has {name} {own[name]!r}, but the study in {path} has {before[name]!r}, and its results count '
          'only for that: change it back, or give another --job_log_dir.'
        )

  def _result(self, directory: Any) -> float | None:
    """Returns the last value of the metric; None if the job has failed, or the value is not finite."""
    try:
      [run] = find_runs([directory])
    except UserError:  # it failed before it began
      return None
    values = [line[self.metric] for line in run.lines.values() if self.metric in line]
    if run.has_ended and not values:
      names = sorted({name for line in run.lines.values() for name in line})
      near = difflib.get_close_matches(self.metric, names, n=3)
      raise UserError(
        f'by_optuna() has the metric {self.metric!r}, which {directory} does not have: '
        f'{"the nearest are" if near else "it has"} {", ".join(near or names)}.'
      )
    value = values[-1] if run.has_ended else None
    return value if isinstance(value, float) and math.isfinite(value) else None


def _fixed_part(value: Any) -> Any:
  """Returns what a study keeps: of a distribution, its kind; the range of numbers may change."""
  if isinstance(value, str):
    return value
  return type(value), getattr(value, 'choices', None), getattr(value, 'log', None)


def by_optuna(
  distributions: Mapping[str, Any],
  count: int,
  *,
  metric: str,
  direction: Literal['minimize', 'maximize'] = 'minimize',
  sampler: Callable[..., Any] | None = None,
) -> ByOptuna:
  """Returns a sweep whose settings Optuna chooses (`pip install 'spmd-tasks[sweep]'`).

  Args:
    distributions: by path, one of `optuna.distributions`, of values that `--set` takes.
    count: how many jobs; it may grow later.
    metric: whose last value is the result, such as 'eval/valid/loss' or 'loss'.
    direction: 'minimize' or 'maximize'.
    sampler: a function of `seed`, such as `optuna.samplers.RandomSampler`; None: TPESampler.

  Raises a UserError if `direction` is another word.
  """
  if direction not in ('minimize', 'maximize'):
    raise UserError(f"by_optuna() has direction {direction!r}: write 'minimize' or 'maximize'.")
  return ByOptuna(distributions, count, metric, direction, sampler)
