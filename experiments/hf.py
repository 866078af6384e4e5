"""Trains and serves the model of a Hugging Face folder: config.json, safetensors, tokenizer.json.

    spmd-tasks --exp hf.Model --set model=models/llama --mode train --job_log_dir runs/tuned
    spmd-tasks --exp hf.Model --set model=models/llama --mode serve --job_log_dir runs/served

    spmd-tasks --exp hf.Scorer --set model=models/embedding --mode serve --job_log_dir runs/served

    spmd-tasks --exp hf.Model --set model=models/flan-t5 --set pairs=pairs.jsonl --mode train --job_log_dir runs/t5

Training starts from the folder's weights; eval, decode and serve use them until the job has a checkpoint.
"""

from spmd_tasks import register
from spmd_tasks.bridges.huggingface import PipelinedPretrainedModel
from spmd_tasks.tuning import FolderScorer, PairTuning


@register
class Model(PairTuning):
  """A model from a Hugging Face folder: --set model=FOLDER."""

  num_nextn_predict_layers = None


@register
class Scorer(FolderScorer):
  """A model that scores or embeds texts, to serve unchanged: --set model=FOLDER."""


@register
class PipelinedModel(PipelinedPretrainedModel):
  """hf.Model, pipelined over stages: --set model=FOLDER --ici_mesh_shape 1,2,1,4."""
