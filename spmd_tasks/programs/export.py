"""--mode export: writes a checkpoint in a format of a wing (wings.py)."""

from typing import Any

from spmd_tasks.experiment import mesh_of_all_devices
from spmd_tasks.files import absolute_path
from spmd_tasks.wings import call, formats


def run(command: Any) -> int:
  """Runs the mode export of a Command (command.py)."""
  flags = command.flags
  with command.open_job() as opened:
    exporters = {each.name: each.export for each in formats() if each.export is not None}
    name = flags.format or next(iter(exporters))
    mesh = mesh_of_all_devices(opened.job.experiment, command.overrides)
    return call(exporters[name], opened, absolute_path(flags.out), step=flags.checkpoint_step, mesh=mesh)
