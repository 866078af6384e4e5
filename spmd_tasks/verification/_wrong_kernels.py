"""Records the wrong kernels that `--mode verify --claims kernels` finds in a job's directory, and refuses to use them.

spmd-tasks --job_log_dir runs/mine --mode verify --claims kernels     # BROKEN: writes runs/mine/wrong_kernels.json
spmd-tasks --job_log_dir runs/mine --mode train                       # refused, with the settings that avoid it
"""

from collections.abc import Sequence
import json
import re
from typing import Any

from etils import epath
import jax

from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Job
from spmd_tasks.files import is_missing, read_text, stay_inside, write_durably

WRONG_KERNELS_FILE = 'wrong_kernels.json'
_PLATFORMS = {'splash': 'tpu', 'megablox': 'tpu', 'cudnn': 'gpu', 'triton': 'gpu'}  # on which a kernel runs
_MODES = ('train', 'eval')  # that run the kernels of the train step


def record_wrong_kernels(directory: epath.Path, failures: Sequence[dict[str, Any]]) -> None:
  """Writes the failures of the claim `kernels`; without failures, an earlier record is replaced by an empty one."""
  path = directory / WRONG_KERNELS_FILE
  if failures or not is_missing(path):
    stay_inside(directory)
    directory.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps(list(failures), indent=2).encode())


def refuse_wrong_kernels(job: Job, mode: str, directory: epath.Path | None) -> Job:
  """Returns the job; raises a UserError if it would use a kernel that is recorded as wrong in its directory."""
  if mode not in _MODES or directory is None or is_missing(path := directory / WRONG_KERNELS_FILE):
    return job
  try:
    failures = [
      (str(failure['kernel']), str(failure['leaf']), [str(setting) for setting in failure['settings']])
      for failure in json.loads(read_text(path))
    ]
  except (ValueError, TypeError, KeyError) as error:
    raise UserError(f'{path} cannot be read ({error!r}): verify the kernels again, or delete it.') from error
  for kernel, leaf, settings in failures:
    missing = [setting for setting in settings if not _is_set(job, setting)]
    if _PLATFORMS.get(kernel) == jax.default_backend() and (missing or not settings):
      flags = ' '.join(f'--set {setting}' for setting in missing) or f'in the layer that calls {kernel}'
      raise UserError(
        f'--mode verify has found the kernel {kernel} wrong ({leaf}; {path}): take the plain computation, {flags}, or '
        'run --mode verify --claims kernels again.'
      )
  return job


def _is_set(job: Job, setting: str) -> bool:
  """Returns whether a field of the built job, such as task.model.stack.block.backend=loop, has a value."""
  path, _, value = setting.partition('=')
  part: Any = job
  for name in re.findall(r'[^.\[\]]+', path):
    try:
      part = part[int(name)] if name.isdecimal() else part[name] if isinstance(part, dict) else getattr(part, name)
    except (AttributeError, LookupError, TypeError):
      return False
  return str(part) == value
