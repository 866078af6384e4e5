"""--mode export: writes a checkpoint in a format of an extension (extensions.py)."""

import os
import tempfile
from typing import Any

from etils import epath

from spmd_tasks import exit_codes
from spmd_tasks.distributed import is_primary
from spmd_tasks.errors import UserError
from spmd_tasks.extensions import call, formats
from spmd_tasks.files import absolute_path, is_remote, storage_errors
from spmd_tasks.programs.restored_weights import mesh_of_all_devices
from spmd_tasks.stores import sizes_below, upload


def run(command: Any) -> int:
  """Runs the mode export of a Command (command.py)."""
  flags = command.flags
  with command.open_job() as opened:
    exporters = {fmt.name: fmt.export for fmt in formats() if fmt.export is not None}
    name = flags.format or next(iter(exporters))
    mesh = mesh_of_all_devices(opened.job.experiment, command.overrides)
    target, settings = absolute_path(flags.out), {'step': flags.checkpoint_step, 'mesh': mesh}
    if not is_remote(target):
      return call(exporters[name], opened, target, **settings)

    if sizes_below(target):
      raise UserError(f'{target} exists: name a folder that does not, or move it away.')
    with tempfile.TemporaryDirectory(prefix='spmd_tasks_export_') as local:
      code = call(exporters[name], opened, epath.Path(local) / target.name, **settings)
      if code == exit_codes.OK and is_primary():
        with storage_errors(target):
          upload(os.path.join(local, target.name), target)
        print(f'copied to {target}', flush=True)
    return code
