"""--mode=plan: what a run will need and cost on named accelerators, without having them.

The experiment's own steps are compiled for the target. The report goes to stdout, and with `--plan_out` as plan.json
and plan.html into a directory. If a step does not fit, other settings are compiled until some do. With `--plan_search`
the best mesh, microbatches and remat policies are searched instead, and the best plan is reported.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import json
import math
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
from spmd_tasks.planning import format_plan, make_plan, parse_target, plan_page
from spmd_tasks.planning.plan import Plan, mesh_devices
from spmd_tasks.planning.report import format_suggestions
from spmd_tasks.planning.search import Trial, search_plans
from spmd_tasks.planning.targets import Target

PLAN_FILE, PAGE_FILE = 'plan.json', 'plan.html'
DEFAULT_TRIALS, DEFAULT_SEARCH_TRIALS = 8, 12

_print = functools.partial(print, flush=True)  # at once, also into a pipe


def _note(line: str) -> None:
  """Says on stderr what is being done, beside the report on stdout."""
  print(line, file=sys.stderr, flush=True)


def run(command: Command) -> int:
  """Runs --mode plan, which builds the experiment for devices that are not there.

  Returns:
    the exit code: OK, or FAILED if it does not fit.

  Raises:
    UserError: the experiment cannot be built, or not be planned for the target.
  """
  set_activity('planning')
  flags, planner = command.flags, _Planner(command)
  directory = absolute_path(flags.plan_out) if flags.plan_out else None
  if flags.plan_search:
    trials, left_out = planner.search(flags.plan_trials or DEFAULT_SEARCH_TRIALS)
    _print(f'the best settings for {planner.start().name}: {left_out}\n')
    made = _with_suggestions(planner.plan(trials[0].setting), trials)
  else:
    made = planner.plan(())
  _write(made, directory)  # first: a reader of stdout may want only its beginning
  _print(format_plan(made.report))
  num_trials = DEFAULT_TRIALS if flags.plan_trials is None else flags.plan_trials
  if made.fits is False and num_trials and not flags.plan_search:
    _note(f'plan: looking for changes that fit, by compiling at most {num_trials}; --plan_trials 0 leaves this out')
    made = _with_suggestions(made, planner.search(num_trials, wanted=3)[0])
    _print(format_suggestions(made.report))
    _write(made, directory)
  return exit_codes.FAILED if made.fits is False else exit_codes.OK


def _with_suggestions(made: Plan, trials: Sequence[Trial]) -> Plan:
  suggestions = [dataclasses.asdict(trial) for trial in trials]
  return dataclasses.replace(made, report=made.report | {'suggestions': suggestions})


class _Planner:
  """Plans the experiment with overrides, each set of them once, always for the target of the experiment as it is."""

  def __init__(self, command: Command):
    self._command = command
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
      text = self._command.flags.target or experiment.target
      if text is None:
        raise UserError(
          'no target is named and the experiment has none of its own: give --target, such as v5p:4x4x2, v5e:8x4, '
          'h200:8 or cpu for fake devices.'
        )
      self._target = parse_target(text, num_cpu_devices=mesh_devices(experiment))
    self._target.devices()

  def resolve(self, overrides: Sequence[str]) -> tuple[Job, Mapping[str, Any]]:
    """Builds the experiment with further overrides; returns it and every field's value by path."""
    resolved = self._command.resolve(after=overrides, prepare=self._start_devices)
    return resolved.build(), to_json(resolved)['config']

  def plan(self, overrides: Sequence[str], steps: Sequence[str] | None = None) -> Plan:
    """Plans these steps, or all that the flags name."""
    steps = steps or (self._command.flags.plan_steps or 'train').split(',')
    key = tuple(overrides), tuple(steps)
    if key not in self._plans:
      job, _ = self.resolve(overrides)
      self._plans[key] = make_plan(job, self.start(), steps=steps)
    return self._plans[key]

  def search(self, limit: int, wanted: float = math.inf) -> tuple[list[Trial], str]:
    """Searches settings of the training step for the target."""
    target = self.start()
    return search_plans(
      lambda overrides: self.plan(overrides, ['train']).report,
      self.resolve,
      num_devices=target.num_devices,
      num_slices=target.num_slices if target.chip.platform == 'tpu' else 1,
      hbm_bytes=target.chip.hbm_bytes,
      can_offload=target.chip.platform != 'cpu',
      limit=limit,
      wanted=wanted,
      progress=_note,
    )


def _write(made: Plan, directory: epath.Path | None) -> None:
  if directory is None:
    return
  report = made.report
  with storage_errors(directory):
    directory.mkdir(parents=True, exist_ok=True)
    write_durably(directory / PLAN_FILE, json.dumps(report, indent=1) + '\n')
    write_durably(directory / PAGE_FILE, plan_page(report))
