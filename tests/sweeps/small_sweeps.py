"""Experiments with a sweep, of the smallest model that trains."""

from collections.abc import Mapping, Sequence
import time
from typing import Any

import flax.linen as nn
import numpy as np
import optax

from spmd_tasks import Experiment, Task
from spmd_tasks.sweeps import product

SHAPES = 'tests.sweeps.small_sweeps.Shapes'  # for --exp


class Classifier(nn.Module):
  @nn.compact
  def __call__(self, image):
    return nn.Dense(4)(image)


def cross_entropy(logits, batch):
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch['label']).mean(), {}


def batches(seed: int, seconds: float = 0):
  for labels in np.random.default_rng(seed).integers(0, 4, (4, 8)):
    time.sleep(seconds)
    yield {'image': np.eye(4)[labels], 'label': labels}


class Shapes(Experiment):
  """Four jobs: two learning rates, two seeds."""

  num_train_steps = 6
  checkpoint_every = 1
  log_every_steps = 1
  trackers = ()
  learning_rate: float = 0.1
  dims: tuple[int, ...] = (1,)
  note: str = ''
  seconds_per_batch: float = 0

  def task(self):
    return Task(model=Classifier(), loss=cross_entropy, learner=optax.adam(self.learning_rate))

  def train_input(self):
    return batches(self.seed, self.seconds_per_batch)

  def eval_inputs(self):
    return {'valid': batches(7)}

  def sweep(self) -> Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]]:
    return product({'learning_rate': (0.1, 0.5), 'seed': range(2)})


class Wrong(Shapes):
  """One of three jobs has a wrong value."""

  def sweep(self):
    return [{'seed': 0}, {'learning_rate': 'fast'}, {'seed': 1}]
