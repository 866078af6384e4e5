"""Small with a hook that logs an image, a histogram and a table after every third step."""

import dataclasses

import fiddle as fdl
import numpy as np

from spmd_tasks.layers.losses import LanguageModelLoss
from spmd_tasks.programs.hooks import TrainHook
from spmd_tasks.runtime.media import Histogram, Image, Table
from tests.programs.small_jobs import Small

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)


class LogMedia(TrainHook):
  def after_step(self, run, outcome):
    if outcome.step % 3 == 0:
      run.log('pictures/noise', Image(PIXELS))
      run.log('lengths', Histogram([1, 1, 2, np.nan]))
      run.log('answers', Table([{'prompt': 'a|b', 'score': np.float32(0.5), 'right': True}, {'prompt': 'c'}]))


class WithMedia(Small):
  """Small with the hook."""

  def hooks(self):
    return [LogMedia()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PicturingLoss(LanguageModelLoss):
  """Its summary `ids` is a picture of the batch."""

  def __call__(self, predictions, batch):
    return super().__call__(predictions, batch).replace(summaries={'ids': Image(batch['ids'] / 258)})


class WithPictures(WithMedia):
  """The loss logs a picture too, in training and in evals."""

  def task(self):
    task = super().task()
    task.loss = fdl.Config(PicturingLoss)
    return task


class Short(WithMedia):
  """Six steps, of which every second one is logged."""

  num_train_steps = 6
  log_every_steps = 2
  eval_every_steps = 6
  checkpoint_every = 6
