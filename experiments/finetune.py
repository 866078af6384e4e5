"""Fine-tuning of models from a folder in Hugging Face's format; docs/fine_tuning.md is the guide.

    spmd-tasks --exp finetune.FullSft --set model=models/llama --set data=chats.jsonl --mode preview
    spmd-tasks --exp finetune.FullSft --set model=models/llama --set data=chats.jsonl --mode train --job_log_dir runs/a
    spmd-tasks --exp finetune.FullDpo --set model=models/tuned --set data=pairs.jsonl --mode train --job_log_dir runs/b

Training starts from the folder's weights; `--mode export --format hf` writes such a folder again.
"""

from spmd_tasks import register
from spmd_tasks.recipes import InstructionTuning, PreferenceTuning


@register
class FullSft(InstructionTuning):
  """All weights of a model, trained on conversations: --set model=FOLDER --set data=FILE."""


@register
class FullDpo(PreferenceTuning):
  """All weights of a model, trained on pairs of answers: --set model=FOLDER --set data=FILE."""
