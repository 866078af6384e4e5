"""Learning from rewards (GRPO and its relatives); docs/rewards.md is the guide.

    spmd-tasks --exp tune.Grpo --set model=models/llama --set data=prompts.jsonl --set reward=my_lab.rewards:score \
      --mode train --job_log_dir runs/grpo

Another method: --set method=dr_grpo (dapo, gspo, rloo, reinforce++).
"""

from spmd_tasks import register
from spmd_tasks.bridges.huggingface import PretrainedLanguageModel
from spmd_tasks.tuning import LowRankTuning, RewardTuning


@register
class Grpo(RewardTuning, PretrainedLanguageModel):
  """All weights of a model, trained by rewards: --set model=FOLDER --set data=FILE --set reward=MODULE:FUNCTION."""


@register
class LoraGrpo(RewardTuning, LowRankTuning):
  """Low-rank adapters, trained by rewards: --set model=FOLDER --set data=FILE --set reward=MODULE:FUNCTION."""

  learning_rate = 1e-5
  reference = 'base'
