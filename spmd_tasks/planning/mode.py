"""--mode=plan: what a run will need and cost on named accelerators, without having them.

The experiment's own steps are compiled for the target; with `--no_compile`, and if the target's compiler is not
installed, the train step is only traced. The report goes to stdout, and with `--plan_out` as plan.json
and plan.html into a directory, with `--search` also the config with the fastest settings that fit.
"""

import json

from spmd_tasks import exit_codes
from spmd_tasks.activity import set_activity
from spmd_tasks.command import Command
from spmd_tasks.config import to_json
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment
from spmd_tasks.files import absolute_path, storage_errors, write_durably
from spmd_tasks.planning import format_plan, make_plan, parse_target, plan_page
from spmd_tasks.planning.plan import mesh_devices
from spmd_tasks.planning.search import search
from spmd_tasks.planning.targets import Target, has_compiler
from spmd_tasks.signatures import signed

_FASTEST_FILE = 'fastest.json'  # a job's own config, in the same directory or another, is config.json


def run(command: Command) -> int:
  """Runs --mode plan, which builds the experiment for devices that are not there.

  Returns:
    the exit code: OK, or FAILED if it does not fit.

  Raises:
    UserError: the experiment cannot be built, or not be planned for the target.
  """
  set_activity('planning')
  flags = command.flags
  target: Target | None = None
  compiles = True

  def start_devices(experiment: Experiment) -> None:
    # The experiment's inputs may ask JAX for its devices, so it starts before they are made: with those of the plan.
    nonlocal target, compiles
    text = flags.target or getattr(experiment, 'target', None)
    if text is None:
      raise UserError(
        'no target is named and the experiment has no field `target`: give --target, such as v5p:4x4x2, v5e:8x4, '
        'h200:8 or cpu for fake devices.'
      )
    target = parse_target(text, num_cpu_devices=mesh_devices(experiment))
    if compiles := not flags.no_compile and has_compiler(target.chip.platform):
      target.devices()

  job = command.resolve(prepare=start_devices).build()
  assert target is not None
  made = make_plan(job, target, steps=(flags.plan_steps or 'train').split(','), compiles=compiles)
  fastest = None
  if flags.search:
    made['search'] = search(lambda overrides: command.resolve(after=overrides), target)
    fastest = next(iter(made['search']['best']), None)
  if flags.plan_out:  # before it is printed: a reader may want only the beginning
    directory = absolute_path(flags.plan_out)
    with storage_errors(directory):
      directory.mkdir(parents=True, exist_ok=True)
      write_durably(directory / 'plan.json', json.dumps(made, indent=1) + '\n')
      write_durably(directory / 'plan.html', plan_page(made))
      if fastest:
        config = signed(to_json(command.resolve(after=fastest['overrides'])), directory)
        write_durably(directory / _FASTEST_FILE, json.dumps(config, indent=1) + '\n')
  print(format_plan(made), flush=True)
  if fastest and flags.plan_out:
    path = f'{flags.plan_out}/{_FASTEST_FILE}'
    print(f'the fastest settings that fit: spmd-tasks --config {path} --mode train --job_log_dir DIR', flush=True)
  return exit_codes.FAILED if made['fits'] is False else exit_codes.OK
