"""With which settings a job_log_dir may be used again: those that give the same numbers.

A step's numbers follow from the seed, the task and the training input. Mesh, intervals and limits only decide how and
how long a job runs; an experiment's other fields matter through the task and the inputs that are made from them.
"""

from collections.abc import Mapping, Sequence
import json
from typing import Any

from etils import epath

from spmd_tasks.config.printing import diff
from spmd_tasks.config.saved_config import check_saved_config
from spmd_tasks.errors import UserError

_TRAINING = ('seed', 'task', 'train_input')
_EVALUATION = ('task.model', 'task.loss', 'task.eval_with_ema')
_HOW_IT_RUNS = ('num_workers', 'worker_buffer_size', 'read_timeout_s', 'max_consecutive_skips')
# How a pipeline takes its turns; its number of microbatches is part of dropout and of a capacity's groups.
_PIPELINE = ('task.model.stack.schedule', 'task.model.stack.num_repeats')
_GENERATION = 'task.decode'  # how text is generated teaches the model nothing


def refuse_changed_config(job_log_dir: epath.Path, config: Mapping[str, Any], *, mode: str) -> None:
  """Compares `config` with the one that the directory's job was begun with.

  Args:
    job_log_dir: a job's directory, or a new one.
    config: JSON, as `resolve.to_json` gives it.
    mode: 'train', where everything that a step depends on must be the same, or 'eval': model, loss and experiment.

  Raises:
    UserError: another experiment, or settings that give other numbers; the message lists them.
  """
  path = job_log_dir / 'config.json'
  if not path.exists() or not any((job_log_dir / 'checkpoints').glob('checkpoint_*')):
    return  # nothing has been trained here
  try:
    previous = json.loads(path.read_text())
    check_saved_config(previous)
  except (ValueError, RecursionError) as error:
    raise UserError(
      f'{path} is not the config of the job that began there ({type(error).__name__}: {error}): put it back, or go on '
      'without comparing: --accept_config_changes.'
    ) from error
  if previous['experiment'] != config['experiment']:
    raise UserError(
      f'job_log_dir {str(job_log_dir)!r} belongs to experiment {previous["experiment"]!r}, not to '
      f'{config["experiment"]!r}: choose another job_log_dir.'
    )
  lines = diff(previous, config)
  changes = [line for line in lines if _matters(line.partition(': ')[0], _TRAINING if mode == 'train' else _EVALUATION)]
  if changes:
    raise UserError(
      f'job_log_dir {str(job_log_dir)!r} was begun with other settings:\n  ' + '\n  '.join(changes[:20]) + '\n'
      f'Start a new job_log_dir, go back to the saved settings (--config {path}), or go on with the new ones: '
      '--accept_config_changes.'
    )


def _matters(path: str, parts: Sequence[str]) -> bool:
  def is_within(part: str) -> bool:
    return path == part or path.startswith(f'{part}.')

  is_numbers = path.rpartition('.')[2] not in _HOW_IT_RUNS and path not in _PIPELINE and not is_within(_GENERATION)
  return is_numbers and any(is_within(part) for part in parts)
