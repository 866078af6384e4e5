"""Tuning: trains a pretrained model further on conversations, on pairs of answers, or with low-rank adapters alone.

    class Notes(LowRankTuning, InstructionTuning): ...     # see experiments/finetune.py

Read `conversations.py` (which tokens the loss is on), `preferences.py` and `preference_loss.py` (pairs of answers),
`references.py` (the reference model's log-probabilities), `low_rank.py` and `adapted_weights.py` (adapters of a model),
`base_digest.py` (a checkpoint of adapters belongs to one base), then `served_adapters.py` and `adapter_stacks.py`
(several adapters beside one model). The names below are imported when they are first used.
"""

from etils import epy

with epy.lazy_api_imports(globals()):
  from spmd_tasks.tuning.adapted_weights import add_adapters
  from spmd_tasks.tuning.adapters import LowRankAdapter
  from spmd_tasks.tuning.conversations import ConversationInput, Conversations
  from spmd_tasks.tuning.instruction_tuning import InstructionTuning, PreferenceTuning
  from spmd_tasks.tuning.low_rank import LowRankTuning
  from spmd_tasks.tuning.preference_loss import PreferenceLoss
  from spmd_tasks.tuning.preferences import PreferenceInput, Preferences

__all__ = [
  'ConversationInput',
  'Conversations',
  'InstructionTuning',
  'LowRankAdapter',
  'LowRankTuning',
  'PreferenceInput',
  'PreferenceLoss',
  'PreferenceTuning',
  'Preferences',
  'add_adapters',
]
