"""--mode=plan: what a run will need and cost on named accelerators, without having them.

The experiment's own steps are compiled for the target. The report goes to stdout, and with `--plan_out` as plan.json
into a directory.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
from typing import Any

from etils import epath

from spmd_tasks import exit_codes
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment, Job
from spmd_tasks.files import storage_errors, write_durably
from spmd_tasks.planning import Target, format_plan, make_plan, mesh_devices, parse_target

PLAN_FILE = 'plan.json'

Resolve = Callable[[Sequence[str], Callable[[Experiment], None]], Job]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSettings:
  """The flags of --mode plan.

  Attributes:
    target: as `--target` gives it; None takes the experiment's own.
    steps: the steps to compile.
    directory: gets plan.json; None: nothing is written.
  """

  target: str | None = None
  steps: Sequence[str] = ('train',)
  directory: epath.Path | None = None


def plan(resolve: Resolve, settings: PlanSettings) -> int:
  """Plans an experiment; returns the exit code: OK, or FAILED if it does not fit.

  Args:
    resolve: (overrides after the user's, called with the experiment before its parts are made) -> the built job.
    settings: the flags.

  Raises:
    UserError: the experiment cannot be built, or not be planned for the target.
  """
  targets: list[Target] = []

  def start_devices(experiment: Experiment) -> None:
    # The experiment's inputs may ask JAX for its devices, so it starts before they are made: with those of the plan.
    targets.append(target_of_experiment(settings.target, experiment))
    targets[-1].devices()

  job = resolve((), start_devices)
  made = make_plan(job, targets[-1], steps=settings.steps)
  report = made.to_json()
  if settings.directory is not None:
    write_plan(settings.directory, report)
  print(format_plan(report), flush=True)
  return exit_codes.FAILED if made.fits is False else exit_codes.OK


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


def write_plan(directory: epath.Path, report: dict[str, Any]) -> None:
  """Writes plan.json."""
  with storage_errors(directory):
    directory.mkdir(parents=True, exist_ok=True)
    write_durably(directory / PLAN_FILE, json.dumps(report, indent=1) + '\n')
