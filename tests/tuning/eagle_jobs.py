"""A job that trains an EAGLE-3 head of a small folder on made-up tokens."""

from spmd_tasks.tuning import EagleTuning
from tests.tuning.low_rank_jobs import SmallOfAll


class SmallHead(EagleTuning, SmallOfAll):
  """Three guesses; of the folder's 2 layers both are read."""

  num_guesses = 3
  feature_layers = (1, 1, 2)
  learning_rate = 0.02
