"""A job that trains an EAGLE-3 head of a small folder on made-up tokens."""

from pathlib import Path

from spmd_tasks.tuning import EagleTuning
from tests.tuning.low_rank_jobs import SmallOfAll


class SmallHead(EagleTuning, SmallOfAll):
  """Three guesses; of the folder's 2 layers both are read."""

  num_guesses = 3
  feature_layers = (1, 1, 2)
  learning_rate = 0.02


class OfConfig(SmallHead):
  """Beside the model of a config.json in the repository; its weights are drawn."""

  model = str(Path(__file__).parents[1] / 'data/huggingface/llama')
  dtype = base_dtype = 'float32'
  num_train_steps = 12
