"""Tuning: trains a pretrained model on conversations, pairs of answers or rewards, all its weights or only adapters.

    class Notes(LowRankTuning, InstructionTuning): ...     # see experiments/finetune.py

Start with `conversations.py` (which tokens have a loss), then read by topic: `preferences.py`, `preference_loss.py` and
`references.py` (pairs of answers and the reference model); `distillation.py` (a teacher); `scored_texts.py` and
`score_loss.py` (reward models, classifiers, embeddings); `rollout_input.py`, `rollout_sampler.py`, `environments.py`,
`rollout_rewards.py`, `rollout_packing.py`, `rollouts.py` and `policy_loss.py` (learning from rewards); `low_rank.py`
(adapters, which the package `adapters` implements); `text_pairs.py` (encoder-decoders). Each module loads on first use.
"""

from collections.abc import Mapping
from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import Extension, load
from spmd_tasks.lazy_exports import lazy_exports

with lazy_exports(globals()):
  from spmd_tasks.adapters import LowRankAdapter, add_adapters
  from spmd_tasks.tuning.conversations import ConversationInput, Conversations
  from spmd_tasks.tuning.distillation import (
    DistillationLoss,
    DistillationTuning,
    SampledDistillation,
    TaughtInput,
    TaughtRollouts,
  )
  from spmd_tasks.tuning.instruction_tuning import FolderScorer, InstructionTuning, PreferenceTuning, ScoreTuning
  from spmd_tasks.tuning.low_rank import LowRankTuning
  from spmd_tasks.tuning.policy_loss import PolicyLoss
  from spmd_tasks.tuning.preference_loss import PreferenceLoss
  from spmd_tasks.tuning.preferences import JudgedAnswers, PreferenceInput, Preferences
  from spmd_tasks.tuning.reward_tuning import RewardTuning
  from spmd_tasks.tuning.rollout_input import RewardPrompts, RolloutInput
  from spmd_tasks.tuning.rollout_task import LanguageModelWithValues, RolloutTask
  from spmd_tasks.tuning.score_loss import ScoreLoss
  from spmd_tasks.tuning.scored_texts import LabeledTexts, RewardPairs, ScoredInput, SimilarTexts
  from spmd_tasks.tuning.text_pairs import PairInput, PairTuning, TextPairs

# The hook for each kind of input.
_HOOKS = {
  'rollouts': 'rollouts:MakeRollouts',
  'taught rollouts': 'distillation:MakeTaughtRollouts',
  'taught conversations': 'distillation:AskTeacher',
  'preferences': 'references:ComputeReferences',
}


def _prepare_job(job: Any, mode: str, directory: Any) -> Any:
  """Refuses modes that the inputs do not support, and sets the reference files of pairs of answers."""
  adapters = getattr(job.experiment, 'adapters', None)
  if adapters and mode in ('train', 'eval', 'export'):
    raise UserError(
      f'adapters = {sorted(adapters)} are for --mode serve, decode and decode_once, not for --mode {mode}: remove '
      'them. To train one, see finetune.LoraSft.'
    )
  kinds = _kinds(job)
  if mode == 'preview' and {'rollouts', 'taught rollouts'} & kinds:
    raise UserError('--mode preview shows data, but this experiment samples its examples: use --mode train.')
  if mode in ('decode', 'decode_once') and 'scored texts' in kinds:
    raise UserError(f'this model scores texts and cannot generate them in --mode {mode}: serve or export it.')
  if 'preferences' not in kinds:
    return job
  from spmd_tasks.tuning.references import name_references  # slow to import, and few commands have pairs

  return name_references(job, directory if mode in ('train', 'eval') else None)


def _train_hooks(job: Any) -> tuple[Any, ...]:
  """Returns the hooks that the kinds of the job's inputs need."""
  kinds = _kinds(job)
  return tuple(load(f'spmd_tasks.tuning.{hook}')() for kind, hook in _HOOKS.items() if kind in kinds)


def _kinds(job: Any) -> set[str]:
  """Returns the kinds of the job's inputs, including the sources of mixtures."""
  inputs = [job.train_input, *job.eval_inputs.values()]
  mixtures = [sources for x in inputs if isinstance(sources := getattr(x, 'sources', None), Mapping)]
  inputs += [source for sources in mixtures for source in sources.values()]
  return {getattr(x, 'kind', '') for x in inputs}


EXTENSION = Extension(
  name='tuning',
  prepare_job=_prepare_job,
  train_hooks=_train_hooks,
  fields_of_modules=('reward', 'rewards', 'environment'),
)
