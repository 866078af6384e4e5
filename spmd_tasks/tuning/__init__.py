"""Tuning: trains a pretrained model further on conversations, on pairs of answers, or with low-rank adapters alone.

    class Notes(LowRankTuning, InstructionTuning): ...     # see experiments/finetune.py

Read `conversations.py` (which tokens the loss is on), `preferences.py` and `preference_loss.py` (pairs of answers),
`references.py` (the reference model's log-probabilities), `low_rank.py` and `adapter_configs.py` (adapters of a model),
`base_digest.py` (a checkpoint of adapters belongs to one base), then `served_adapters.py` and `adapter_stacks.py`
(several adapters beside one model). The names below are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from spmd_tasks.tuning.adapter_configs import add_adapters
  from spmd_tasks.tuning.conversations import ConversationInput, Conversations
  from spmd_tasks.tuning.instruction_tuning import InstructionTuning, PreferenceTuning
  from spmd_tasks.tuning.low_rank import LowRankTuning
  from spmd_tasks.tuning.preference_loss import PreferenceLoss
  from spmd_tasks.tuning.preferences import PreferenceInput, Preferences

__all__ = [
  'ConversationInput',
  'Conversations',
  'InstructionTuning',
  'LowRankTuning',
  'PreferenceInput',
  'PreferenceLoss',
  'PreferenceTuning',
  'Preferences',
  'add_adapters',
]

_MODULES = {
  'ConversationInput': 'conversations',
  'Conversations': 'conversations',
  'InstructionTuning': 'instruction_tuning',
  'LowRankTuning': 'low_rank',
  'PreferenceInput': 'preferences',
  'PreferenceLoss': 'preference_loss',
  'PreferenceTuning': 'instruction_tuning',
  'Preferences': 'preferences',
  'add_adapters': 'adapter_configs',
}


def __getattr__(name: str) -> Any:
  if name in _MODULES:
    return getattr(importlib.import_module(f'{__name__}.{_MODULES[name]}'), name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
