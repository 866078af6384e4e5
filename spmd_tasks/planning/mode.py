"""--mode=plan: what a run will need and cost on named accelerators, without having them.

The experiment's own steps are compiled for the target. The report goes to stdout, and with `--plan_out` as plan.json
and plan.html into a directory. If a step does not fit, changes of the settings are compiled until some do. With
`--plan_search` the mesh, microbatches and remat policies are searched instead, and the best one is reported.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import json
import sys
from typing import Any

from etils import epath

from spmd_tasks import exit_codes
from spmd_tasks.activity import set_activity
from spmd_tasks.command import Command
from spmd_tasks.config import to_json
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment, Job
from spmd_tasks.files import absolute_path, storage_errors, write_durably
from spmd_tasks.planning import (
  Plan,
  Target,
  changes_that_fit,
  format_plan,
  format_search,
  format_suggestions,
  make_plan,
  mesh_devices,
  parse_target,
  plan_page,
  search_plans,
)

PLAN_FILE, PAGE_FILE = 'plan.json', 'plan.html'
DEFAULT_TRIALS, DEFAULT_SEARCH_TRIALS = 8, 12

_print = functools.partial(print, flush=True)  # at once, also into a pipe

Resolve = Callable[[Sequence[str], Callable[[Experiment], None]], tuple[Job, Mapping[str, Any]]]


def _note(line: str) -> None:
  """Says on stderr what is being done, beside the report on stdout."""
  print(line, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSettings:
  """The flags of --mode plan.

  Attributes:
    target: as `--target` gives it; None takes the experiment's own.
    steps: the steps to compile.
    directory: gets plan.json and plan.html; None: nothing is written.
    search: whether to search for the best settings.
    num_trials: how many settings may be compiled, beside the experiment's own; None: 8, or 12 of a search.
  """

  target: str | None = None
  steps: Sequence[str] = ('train',)
  directory: epath.Path | None = None
  search: bool = False
  num_trials: int | None = None


def run(command: Command) -> int:
  """Runs --mode plan, which builds the experiment for devices that are not there; returns an exit code."""
  set_activity('planning')
  flags = command.flags

  def resolve(after: Sequence[str], prepare: Callable[[Experiment], None]) -> tuple[Job, Mapping[str, Any]]:
    resolved = command.resolve(after=after, prepare=prepare)
    return resolved.build(), to_json(resolved)['config']

  settings = PlanSettings(
    target=flags.target,
    steps=tuple((flags.plan_steps or 'train').split(',')),
    directory=absolute_path(flags.plan_out) if flags.plan_out else None,
    search=flags.plan_search,
    num_trials=flags.plan_trials,
  )
  return plan(resolve, settings)


def plan(resolve: Resolve, settings: PlanSettings) -> int:
  """Plans an experiment; returns the exit code: OK, or FAILED if it does not fit.

  Args:
    resolve: (overrides after the user's, called with the experiment before its parts are made) -> the built job, and
      every field's value by path.
    settings: the flags.

  Raises:
    UserError: the experiment cannot be built, or not be planned for the target.
  """
  planner = _Planner(resolve, settings)
  if settings.search:
    return _search(planner, settings)
  made = planner.plan(())
  _report(made, settings.directory)
  num_trials = DEFAULT_TRIALS if settings.num_trials is None else settings.num_trials
  if made.fits is False and num_trials:
    _note(f'plan: looking for changes that fit, by compiling at most {num_trials}; --plan_trials 0 leaves this out')
    trials = changes_that_fit(
      planner.plan_train,
      planner.resolve,
      made.to_json(),
      can_offload=planner.start().compiler != 'cpu',
      limit=num_trials,
      progress=_note,
    )
    made = dataclasses.replace(made, suggestions=tuple(trial.to_json() for trial in trials))
    _print(format_suggestions(made.to_json()))
    _write(made, settings.directory)
  return exit_codes.FAILED if made.fits is False else exit_codes.OK


def _search(planner: '_Planner', settings: PlanSettings) -> int:
  """Ranks settings, then reports the best of them."""
  target = planner.start()
  found = search_plans(
    planner.plan_train,
    planner.resolve,
    num_devices=target.num_devices,
    num_slices=target.num_slices if target.chip.platform == 'tpu' else 1,
    hbm_bytes=target.chip.hbm_bytes,
    can_offload=target.compiler != 'cpu',
    limit=settings.num_trials or DEFAULT_SEARCH_TRIALS,
    progress=_note,
  )
  _print(f'the best settings for {target.name}:\n{format_search(found)}\n')
  made = planner.plan(found.trials[0].setting)
  suggestions = tuple(trial.to_json() for trial in found.trials)
  _report(dataclasses.replace(made, suggestions=suggestions), settings.directory)
  return exit_codes.FAILED if made.fits is False else exit_codes.OK


class _Planner:
  """Plans the experiment with overrides, each set of them once, always for the target of the experiment as it is."""

  def __init__(self, resolve: Resolve, settings: PlanSettings):
    self._resolve, self._settings = resolve, settings
    self._target: Target | None = None
    self._plans: dict[tuple[tuple[str, ...], tuple[str, ...]], Plan] = {}

  def start(self) -> Target:
    """Returns the target, for which JAX has started."""
    if self._target is None:
      self.resolve(())
    assert self._target is not None
    return self._target

  def _start_devices(self, experiment: Experiment) -> None:
    # The experiment's inputs may ask JAX for its devices, so it starts before they are made: with those of the plan.
    if self._target is None:
      self._target = target_of_experiment(self._settings.target, experiment)
    self._target.devices()

  def resolve(self, overrides: Sequence[str]) -> tuple[Job, Mapping[str, Any]]:
    """Builds the experiment with further overrides."""
    return self._resolve(overrides, self._start_devices)

  def plan(self, overrides: Sequence[str]) -> Plan:
    """Plans all steps that the flags name."""
    return self._plan(overrides, self._settings.steps)

  def plan_train(self, overrides: Sequence[str]) -> dict[str, Any]:
    """Plans the training step alone; returns plan.json."""
    return self._plan(overrides, ('train',)).to_json()

  def _plan(self, overrides: Sequence[str], steps: Sequence[str]) -> Plan:
    key = (tuple(overrides), tuple(steps))
    if key not in self._plans:
      job, _ = self.resolve(overrides)
      self._plans[key] = make_plan(job, self.start(), steps=steps)
    return self._plans[key]


def target_of_experiment(text: str | None, experiment: Experiment) -> Target:
  """Returns the target of the flag, or else of the experiment.

  Raises:
    UserError: neither names one, or it is not known.
  """
  text = text or experiment.target
  if text is None:
    raise UserError(
      'no target is named and the experiment has none of its own: give --target, such as v5p:4x4x2, v5e:8x4, h200:8 or '
      'cpu for fake devices.'
    )
  return parse_target(text, num_cpu_devices=mesh_devices(experiment))


def _report(made: Plan, directory: epath.Path | None) -> None:
  _write(made, directory)  # first: a reader of stdout may want only its beginning
  _print(format_plan(made.to_json()))


def _write(made: Plan, directory: epath.Path | None) -> None:
  if directory is None:
    return
  report = made.to_json()
  with storage_errors(directory):
    directory.mkdir(parents=True, exist_ok=True)
    write_durably(directory / PLAN_FILE, json.dumps(report, indent=1) + '\n')
    write_durably(directory / PAGE_FILE, plan_page(report))
