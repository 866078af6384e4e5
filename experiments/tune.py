"""Trains on rewards (GRPO and its relatives), or distills a teacher on own samples; docs/rewards.md is the guide.

    spmd-tasks --exp tune.Grpo --set model=models/llama --set data=prompts.jsonl --set reward=my_lab.rewards:score \
      --mode train --job_log_dir runs/grpo

Another method: --set method=dr_grpo (dapo, gspo, rloo, ppo, reinforce++).
"""

from spmd_tasks import register
from spmd_tasks.bridges.huggingface import PretrainedLanguageModel
from spmd_tasks.tuning import LowRankTuning, RewardTuning, SampledDistillation


@register
class Grpo(RewardTuning, PretrainedLanguageModel):
  """All weights of a model, trained by rewards: --set model=FOLDER --set data=FILE --set reward=MODULE:FUNCTION."""


@register
class LoraGrpo(RewardTuning, LowRankTuning):
  """Low-rank adapters, trained by rewards: --set model=FOLDER --set data=FILE --set reward=MODULE:FUNCTION."""

  learning_rate = 1e-5
  reference = 'base'


@register
class Distill(SampledDistillation, PretrainedLanguageModel):
  """All weights, distilled on own samples: --set model=FOLDER --set data=FILE --set teacher=FOLDER."""


@register
class LoraDistill(SampledDistillation, LowRankTuning):
  """Low-rank adapters, distilled on own samples: --set model=FOLDER --set data=FILE --set teacher=FOLDER."""

  learning_rate = 1e-5
