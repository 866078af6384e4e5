"""Finds the smallest changes with which a run fits that does not, by compiling them.

    trials = changes_that_fit(plan_with, resolve, base)     # after a plan that does not fit

`plan_with(overrides)` compiles the experiment with further overrides and returns its plan.json; `resolve(overrides)`
only builds it. Both raise a UserError for a setting that is impossible. Nothing here depends on how a plan is made, so
the tests plan with a formula. Every trial is compiled; estimates only decide what is tried first.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.planning._levers import Lever, levers
from spmd_tasks.planning.page import duration, size

Overrides = tuple[str, ...]
Resolve = Callable[[Sequence[str]], tuple[Job, Mapping[str, Any]]]


PlanJson = Mapping[str, Any]  # as plan.json has it: fits, peak_bytes, hbm_bytes, argument_bytes, predicted_step_s
PlanWith = Callable[[Sequence[str]], PlanJson]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
  """A setting and its plan.

  Attributes:
    setting: `path=value`, beside the user's own overrides.
    fits, peak_bytes, predicted_step_s: of the plan.
    note: what the change costs.
  """

  setting: Overrides
  fits: bool
  peak_bytes: float | None
  predicted_step_s: float | None
  note: str = ''

  @property
  def rank(self) -> tuple[int, float]:
    """Sorts what fits first, the fastest first; of what does not fit, the smallest first."""
    figure = self.predicted_step_s if self.fits else self.peak_bytes
    return 0 if self.fits else 1, math.inf if figure is None else figure

  def to_json(self) -> dict[str, Any]:
    """The row in plan.json's `suggestions`."""
    return {**dataclasses.asdict(self), 'setting': list(self.setting)}


class TrialRunner:
  """Compiles settings, each once, up to a limit, and keeps the trials.

  Args:
    plan_with: compiles.
    limit: how many settings may be compiled.
    progress: gets a line per trial, before and after it.
  """

  def __init__(self, plan_with: PlanWith, limit: int, progress: Callable[[str], None]):
    self._plan_with, self._limit, self._progress = plan_with, limit, progress
    self._tried: dict[frozenset[str], Trial | None] = {}
    self.num_compiled = 0

  @property
  def trials(self) -> list[Trial]:
    """All trials, the best first; among equals the one that was tried first."""
    return sorted((trial for trial in self._tried.values() if trial is not None), key=lambda trial: trial.rank)

  @property
  def num_fitting(self) -> int:
    """How many of the trials fit."""
    return sum(trial.fits for trial in self.trials)

  @property
  def is_spent(self) -> bool:
    """Whether the limit is reached."""
    return self.num_compiled >= self._limit

  def known(self, setting: Overrides) -> Trial | None:
    """Returns the trial of a setting that was compiled."""
    return self._tried.get(frozenset(setting))

  def try_setting(self, setting: Overrides, note: str = '') -> Trial | None:
    """Returns the trial of a setting; None: it is impossible, or the limit is reached."""
    key = frozenset(setting)
    if key in self._tried:
      return self._tried[key]
    if self.is_spent:
      return None
    self.num_compiled += 1
    shown = ' '.join(setting) or 'as it is'
    self._progress(f'trying {self.num_compiled} of at most {self._limit}: {shown}')
    try:
      plan = self._plan_with(setting)
    except UserError as error:
      self.num_compiled -= 1  # refused before anything was compiled
      self._progress(f'  impossible: {error}')
      self._tried[key] = None
      return None
    trial = Trial(
      setting=setting,
      fits=plan['fits'] is not False,
      peak_bytes=plan['peak_bytes'],
      predicted_step_s=plan['predicted_step_s'],
      note=note,
    )
    self._progress(f'  {_outcome(trial)}')
    self._tried[key] = trial
    return trial


def changes_that_fit(
  plan_with: PlanWith,
  resolve: Resolve,
  base: PlanJson,
  *,
  can_offload: bool = False,
  limit: int = 8,
  wanted: int = 3,
  progress: Callable[[str], None] = print,
) -> list[Trial]:
  """Finds the smallest changes with which a run fits that does not, by compiling them.

  Each lever alone, the cheapest first: of its values the weakest that fits. Then levers together: the first ones at
  their strongest, the last one as weak as it may be. What changes the numbers of the run (another dtype of optimizer
  state, a smaller batch) is tried only where nothing else suffices.

  Args:
    plan_with: compiles the experiment with further overrides.
    resolve: builds it.
    base: the plan that does not fit.
    can_offload: whether the compiler knows a memory of the host beside the device's: those for TPU and GPU do.
    limit: how many settings are compiled at most.
    wanted: the search ends after so many that fit.
    progress: gets a line per trial.

  Returns:
    every trial, those that fit first, the fastest first.
  """
  job, values = resolve(())
  runner = TrialRunner(plan_with, limit, progress)
  all_levers = levers(job, values, can_offload=can_offload)
  harmless = [lever for lever in all_levers if not lever.changes_numbers]
  _try_alone(runner, harmless, base, wanted, limit - limit // 3)
  _try_together(runner, [lever for lever in harmless if _may_suffice(lever, base)], base, wanted)
  if not runner.num_fitting:
    _try_alone(runner, [lever for lever in all_levers if lever.changes_numbers], base, wanted, limit)
  if not runner.num_fitting:
    _try_together(runner, all_levers, base, wanted)
  return runner.trials


def _try_alone(runner: TrialRunner, choices: Sequence[Lever], base: PlanJson, wanted: int, limit: int) -> None:
  """Tries each lever without others; while nothing fits, only until `limit` compilations."""
  for lever in choices:
    has_room = runner.num_fitting > 0 or runner.num_compiled < limit
    if runner.num_fitting < wanted and has_room and _may_suffice(lever, base):
      _weakest_that_fits(runner, lever, (), base)


def _try_together(runner: TrialRunner, choices: Sequence[Lever], base: PlanJson, wanted: int) -> None:
  """Tries each lever beside the strongest values of those before it, until one fits."""
  others: Overrides = ()
  notes: list[str] = []
  for lever in choices:
    if runner.num_fitting >= wanted or (others and _weakest_that_fits(runner, lever, others, base, notes)):
      break
    others, notes = (*others, *lever.options[-1]), [*notes, lever.note]


def _weakest_that_fits(
  runner: TrialRunner, lever: Lever, others: Overrides, base: PlanJson, notes: Sequence[str] = ()
) -> Trial | None:
  """Compiles values of a lever, beside other changes, until the weakest that fits is known."""
  low, high, found = 0, len(lever.options), None
  known = runner.known(others)
  peak = known.peak_bytes if known else base['peak_bytes']
  at = _first_guess(lever, base, peak)
  while low < high and not runner.is_spent:
    trial = runner.try_setting((*others, *lever.options[at]), '; '.join((*notes, lever.note)))
    if trial is not None and trial.fits:
      found, high = trial, at
    elif trial is not None and not others and trial.peak_bytes and peak and trial.peak_bytes >= peak:
      break  # it makes things worse, and more of it would too
    else:
      low = at + 1
    at = (low + high) // 2
  return found


def _first_guess(lever: Lever, base: PlanJson, peak: float | None) -> int:
  """The index of the value to begin with: that by which activations must be divided, if they alone shrink.

  One that is too weak costs little: compilers refuse in seconds what they compile in minutes.
  """
  if not lever.factors or not peak or not base['hbm_bytes']:
    return 0
  kept = min(base['argument_bytes'] or 0.0, 0.95 * base['hbm_bytes'])
  wanted = (peak - kept) / (base['hbm_bytes'] - kept)
  return next((at for at, factor in enumerate(lever.factors) if factor >= wanted), len(lever.factors) - 1)


def _may_suffice(lever: Lever, base: PlanJson) -> bool:
  """Whether a lever alone could save enough: activations are what the arguments leave, a moment half of itself."""
  if not (base['peak_bytes'] and base['hbm_bytes'] and base['argument_bytes']):
    return True
  over = base['peak_bytes'] - base['hbm_bytes']
  if lever.name == 'optimizer dtype':
    return over < base['argument_bytes'] / 4
  if lever.name == 'mesh':
    return True
  return over < base['peak_bytes'] - base['argument_bytes']


def _outcome(trial: Trial) -> str:
  verdict = 'fits' if trial.fits else 'does not fit'
  return f'{verdict}: peak {size(trial.peak_bytes)}, predicted step {duration(trial.predicted_step_s)}'
