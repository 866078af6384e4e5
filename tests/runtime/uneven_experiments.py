"""synthetic.Uneven with averaged weights and each of three optimizers, for the tests that compare meshes."""

import fiddle as fdl

from spmd_tasks import learning
from spmd_tasks.experiments.synthetic import Uneven


class AdamW(Uneven):
  """With averaged weights, so that they are compared too."""

  def task(self):
    cfg = super().task()
    cfg.learner.ema_decay = 0.9
    return cfg


class Adafactor(AdamW):
  """Factored from dims of 8 on, so that these tiny weights are."""

  learning_rate = 0.1  # relative to each weight's scale

  def task(self):
    cfg = super().task()
    learning_rate = cfg.learner.optimizer.learning_rate
    cfg.learner.optimizer = fdl.Config(learning.Adafactor, learning_rate=learning_rate, min_dim_size_to_factor=8)
    return cfg


class Muon(AdamW):
  """Matrices of 3 layers, which neither 4 nor 8 devices divide."""

  def task(self):
    cfg = super().task()
    cfg.learner.optimizer = fdl.Config(learning.Muon, learning_rate=cfg.learner.optimizer.learning_rate)
    return cfg
