"""Makes a large experiment tiny, by the fields that it has: the settings that decide numbers stay, the sizes shrink.

Only fields of known names and meaning change, those of the recipes. What is tiny already stays as it is, so does every
experiment without such fields, and an override of the user wins.
"""

from collections.abc import Mapping
import math
from typing import Any

from spmd_tasks.experiment import Job
from spmd_tasks.inputs.mixture import sources_of
from spmd_tasks.tuning import ConversationInput, RolloutInput

# Sizes up to which a field stays. A larger one becomes the cap, or a little less where it was odd.
_CAPS = {
  'num_layers': 4,
  'seq_len': 16,
  'batch_size': 8,
  'eval_batches': 2,
  'num_heads': 4,
  'model_dims': 32,
  'hidden_dims': 64,
  'shared_hidden_dims': 32,
  'num_experts': 8,
  'num_selected_experts': 2,
  'num_microbatches': 8,
  'num_train_steps': 40,
}
_TINY = {'model_dims': 64, 'hidden_dims': 128, 'num_layers': 6, 'vocab_size': 512}


def shrink(job: Job, values: Mapping[str, Any], mesh: Mapping[str, int]) -> dict[str, Any]:
  """Returns the new values of the fields that are too large, by their paths.

  Args:
    job: the built experiment.
    values: the value of every field by its path.
    mesh: the axis sizes on which it will be verified.
  """
  own: dict[str, Any] = {name: value for name, value in values.items() if '.' not in name}
  new: dict[str, Any] = {}

  def at(name: str, default: int = 1) -> int:
    return new.get(name, own.get(name, default))

  for name, cap in _CAPS.items():
    if name == 'seq_len' and _reads_whole_records(job):
      continue
    if isinstance(own.get(name), int) and own[name] > _TINY.get(name, cap):
      new[name] = cap
  stages = max(mesh.get('stage', 1), 1)
  if 'num_microbatches' in own:
    new['num_microbatches'] = max(stages, at('num_microbatches') // stages * stages)
  if 'num_layers' in new:
    groups = stages * at('num_repeats')
    uneven = own['num_layers'] % groups != 0
    new['num_layers'] = max(groups, 4 if groups in (1, 2, 4) else groups) + (at('num_repeats') if uneven else 0)
  if 'batch_size' in own:
    parts = math.lcm(max(at('num_microbatches'), _learner_microbatches(values)), own.get('group_size', 1))
    new['batch_size'] = max(at('batch_size') // parts, 1) * parts
  if 'num_heads' in own and ('num_heads' in new or 'model_dims' in new):
    heads = at('num_heads')
    new['model_dims'] = max(at('model_dims') // heads, 8) // 2 * 2 * heads
    if own.get('num_kv_heads'):
      new['num_kv_heads'] = max(heads * own['num_kv_heads'] // own['num_heads'], 1)
  if isinstance(own.get('vocab_size'), int) and own['vocab_size'] > _TINY['vocab_size']:
    new['vocab_size'] = max(job.tokenizer.vocab_size if job.tokenizer else 0, 64)
  if own.get('dtype', 'float32') != 'float32':
    new['dtype'] = 'float32'
  return {name: value for name, value in new.items() if value != own[name]}


def _reads_whole_records(job: Job) -> bool:
  """Whether rows hold whole conversations, pairs or completed prompts, which would not fit in shorter ones."""
  return any(isinstance(each, ConversationInput | RolloutInput) for each in sources_of(job.train_input))


def _learner_microbatches(values: Mapping[str, Any]) -> int:
  count = values.get('task.learner.num_microbatches', 1)
  return count if isinstance(count, int) else 1
