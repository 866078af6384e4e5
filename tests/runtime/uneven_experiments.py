"""synthetic.Uneven with averaged weights and three optimizers, for tests that compare meshes."""

import fiddle as fdl

from spmd_tasks import learning
from spmd_tasks.experiments.synthetic import Uneven


class AdamW(Uneven):
  """AdamW with averaged weights."""

  def task(self):
    cfg = super().task()
    cfg.learner.ema_decay = 0.9
    return cfg


class Adafactor(AdamW):
  """Adafactor that factors dims of 8 or more, so that it factors these tiny weights."""

  learning_rate = 0.1  # relative to each weight's scale

  def task(self):
    cfg = super().task()
    learning_rate = cfg.learner.optimizer.learning_rate
    cfg.learner.optimizer = fdl.Config(learning.Adafactor, learning_rate=learning_rate, min_dim_size_to_factor=8)
    return cfg


class Muon(AdamW):
  """Muon on matrices of 3 layers, which are not divisible by 4 or 8 devices."""

  def task(self):
    cfg = super().task()
    cfg.learner.optimizer = fdl.Config(learning.Muon, learning_rate=cfg.learner.optimizer.learning_rate)
    return cfg
