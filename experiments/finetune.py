"""Fine-tunes the model of a Hugging Face folder; docs/fine_tuning.md is the guide.

    spmd-tasks --exp finetune.LoraSft --set model=models/llama --set data=chats.jsonl --mode preview
    spmd-tasks --exp finetune.LoraSft --set model=models/llama --set data=chats.jsonl --mode train --job_log_dir runs/a
    spmd-tasks --exp finetune.FullDpo --set model=models/tuned --set data=pairs.jsonl --mode train --job_log_dir runs/b
    spmd-tasks --mode export --format peft --job_log_dir runs/a --out models/adapter

Training starts from the folder's weights; `--mode export --format hf` writes such a folder again.
"""

from spmd_tasks import register
from spmd_tasks.tuning import DistillationTuning, InstructionTuning, LowRankTuning, PreferenceTuning, ScoreTuning


@register
class FullSft(InstructionTuning):
  """All weights of a model, trained on conversations: --set model=FOLDER --set data=FILE."""


@register
class FullDpo(PreferenceTuning):
  """All weights of a model, trained on pairs of answers: --set model=FOLDER --set data=FILE."""


@register
class FullOrpo(PreferenceTuning):
  """All weights of a model, trained on pairs of answers without a reference: --set model=FOLDER --set data=FILE."""

  preference_loss = 'orpo'


@register
class FullKto(PreferenceTuning):
  """All weights of a model, trained on good and bad answers: --set model=FOLDER --set data=FILE."""

  preference_loss = 'kto'


@register
class FullDistill(DistillationTuning):
  """All weights of a model, distilled from a teacher: --set model=FOLDER --set data=FILE --set teacher=FOLDER."""


@register
class FullReward(ScoreTuning):
  """A reward model, trained on pairs of answers: --set model=FOLDER --set data=FILE."""


@register
class FullClassifier(ScoreTuning):
  """A text classifier: --set model=FOLDER --set data=FILE --set num_labels=3 (or --set score_loss=regression)."""

  score_loss = 'classification'
  num_labels = 2


@register
class FullEmbedding(ScoreTuning):
  """An embedding model, trained on pairs of texts: --set model=FOLDER --set data=FILE."""

  score_loss = 'contrastive'
  num_labels = 0
  pooling = 'mean'
  packing = False


@register
class LoraReward(LowRankTuning, ScoreTuning):
  """Low-rank adapters and the head of a reward model: --set model=FOLDER --set data=FILE."""

  also_trained = ('embedding/score_kernel',)


@register
class LoraSft(LowRankTuning, InstructionTuning):
  """Low-rank adapters of a model, trained on conversations: --set model=FOLDER --set data=FILE."""


@register
class LoraDpo(LowRankTuning, PreferenceTuning):
  """Low-rank adapters of a model, trained on pairs of answers: --set model=FOLDER --set data=FILE."""

  learning_rate = 5e-6


@register
class LoraKto(LoraDpo):
  """Low-rank adapters of a model, trained on good and bad answers: --set model=FOLDER --set data=FILE."""

  preference_loss = 'kto'


@register
class LoraDistill(LowRankTuning, DistillationTuning):
  """Low-rank adapters, distilled from a teacher: --set model=FOLDER --set data=FILE --set teacher=FOLDER."""


@register
class LoraText(LowRankTuning):
  """Low-rank adapters of a model, trained on text: --set model=FOLDER."""
