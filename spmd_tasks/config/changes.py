"""Checks that a resumed job computes the same numbers as before, and lists the differences between two configs.

A step's numbers depend on the seed, the task and the training input. Mesh, intervals and limits only decide how and how
long a job runs. The experiment's other fields matter through the task and the inputs that they define.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import re
from typing import Any

from etils import epath

from spmd_tasks.config.encoding import one_line, show
from spmd_tasks.config.resolution import PARTS
from spmd_tasks.config.saved_config import checked_config
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import Experiment
from spmd_tasks.extensions import keeps_numbers
from spmd_tasks.files import read_text

_MAX_SHOWN = 120  # characters of a value
_TRAINING = ('seed', 'task', 'train_input')
_EVALUATION = ('task.model', 'task.loss', 'task.eval_with_ema')
# Fields of inputs and learners that do not change numbers. Extensions may declare others.
_WITHOUT_EFFECT = ('read_timeout_s', 'max_consecutive_skips')
# The order in which a pipeline computes. The number of microbatches does change numbers: the noise of dropout.
_PIPELINE = ('task.model.stack.schedule', 'task.model.stack.num_repeats')
_GENERATION = 'task.decode'  # does not affect training
_OFF = (': absent -> None', ': absent -> False', ': None -> absent', ': False -> absent')  # fields of another version


def refuse_changed_config(job_log_dir: epath.Path, config: Mapping[str, Any], *, mode: str) -> None:
  """Compares `config` with the config of the job in a directory.

  Args:
    job_log_dir: a directory in which a job has trained (programs/job_directory.py).
    config: JSON from `to_json`, with JAX's settings that change numbers as 'environment'.
    mode: 'train' compares everything that a step depends on, 'eval' only experiment, model and loss.

  Raises a UserError: the experiment differs, or fields that change numbers; the message lists them.
  """
  path = job_log_dir / 'config.json'
  try:
    previous = checked_config(json.loads(read_text(path)))
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(
      f'{path} is not a valid config ({type(error).__name__}: {error}): put the original back, or remove it and '
      'resume with the settings of this command: --accept_config_changes.'
    ) from error
  if previous['experiment'] != config['experiment']:
    raise UserError(
      f'job_log_dir {str(job_log_dir)!r} belongs to experiment {previous["experiment"]!r}, not to '
      f'{config["experiment"]!r}: choose another job_log_dir.'
    )
  before, now = previous['environment'], config.get('environment', {})
  environment = [
    f"{name} of JAX's settings: {show(before[name])} -> {show(now[name])}"
    for name in before
    if name in now and before[name] != now[name]
  ]
  parts = _TRAINING if mode == 'train' else _EVALUATION
  differences = [(line.partition(': ')[0], line) for line in diff(previous, config) if not line.endswith(_OFF)]
  changes = [line for path, line in differences if _matters(path, parts)]
  if changes:  # probably because of the fields that the experiment's own class declares
    base = {*PARTS, 'experiment', *(field.name for field in dataclasses.fields(Experiment))}
    changes = [line for path, line in differences if path.partition('.')[0] not in base] + changes
  changes += environment
  if changes:
    resizes = any(line.startswith('task.model') and line.rpartition(' -> ')[2].isdigit() for line in changes)
    accept = 'if the weights keep their shapes, accept the new one' if resizes else 'accept the new one'
    raise UserError(
      f'job_log_dir {str(job_log_dir)!r} was begun with another config:\n  ' + '\n  '.join(changes[:20]) + '\n'
      f'Use another job_log_dir or the saved config (--config {path}), or {accept}: --accept_config_changes.'
    )


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Returns `path: old -> new` for every path at which two saved configs differ, sorted; the experiment comes first.

  Of long values, such as optax's functions with what they captured, only what differs is shown.
  """
  lines = []
  if old['experiment'] != new['experiment']:
    lines.append(f'experiment: {one_line(old["experiment"])} -> {new["experiment"]}')
  before, after = old['config'], new['config']
  for path in sorted({*before, *after}, key=lambda path: path.split('.')):
    sides = [show(config[path]) if path in config else 'absent' for config in (before, after)]
    if sides[0] != sides[1]:
      lines.append(f'{one_line(path)}: {" -> ".join(_around_difference(*sides))}')
  return lines


def _around_difference(*texts: str) -> Sequence[str]:
  """Returns two different texts, or if one is long, their words between the first and the last that differ."""
  if max(map(len, texts)) <= _MAX_SHOWN:
    return texts
  before, after = (re.split(r'(?<=[(, /])|(?=[),])', text) for text in texts)
  shortest = min(len(before), len(after))
  start = next((i for i in range(shortest) if before[i] != after[i]), shortest)
  end = next((i for i in range(shortest - start) if before[-1 - i] != after[-1 - i]), shortest - start)
  start = max(start - 1, 0)  # with the function of an argument
  shown = [''.join(words[start : len(words) - end]).strip() for words in (before, after)]
  dots = '...' if start else ''
  return [dots + text[:_MAX_SHOWN] + ('...' if end or len(text) > _MAX_SHOWN else '') for text in shown]


def _matters(path: str, parts: Sequence[str]) -> bool:
  def is_within(part: str) -> bool:
    return path == part or path.startswith(f'{part}.')

  if path.rpartition('.')[2] in _WITHOUT_EFFECT or path in _PIPELINE or is_within(_GENERATION):
    return False
  return any(is_within(part) for part in parts) and not keeps_numbers(path)
