"""synthetic.Uneven with an input that fails, or is slow, on one process; and plain data of uneven batches."""

import dataclasses
import itertools
import time

import fiddle as fdl

from spmd_tasks.experiments.synthetic import Uneven
from spmd_tasks.inputs import SyntheticText
from tests.programs.plain_experiment import Shapes, batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailingText:
  """SyntheticText that, where `fails`, raises on shard 1 instead of giving its batch `at_batch`.

  `slow_s`: how long each batch of shard 1 takes.
  """

  text: SyntheticText
  fails: bool = False
  at_batch: int = 8
  slow_s: float = 0.0

  @property
  def batch_size(self):
    return self.text.batch_size

  def element_spec(self):
    return self.text.element_spec()

  def reshard_states(self, states, shard_count):
    return self.text.reshard_states(states, shard_count)

  def make_iterator(self, shard_index=0, shard_count=1):
    iterator = self.text.make_iterator(shard_index, shard_count)
    return _FailingIterator(iterator, self) if shard_index == 1 and (self.fails or self.slow_s) else iterator


class _FailingIterator:
  def __init__(self, iterator, settings):
    self._iterator, self._settings, self._count = iterator, settings, 0

  def __next__(self):
    self._count += 1
    if self._settings.fails and self._count == self._settings.at_batch:
      raise OSError('shard 1 is unreadable')
    time.sleep(self._settings.slow_s or 0.05)  # the other process is to be well into the run
    return next(self._iterator)

  def __getattr__(self, name):
    return getattr(self._iterator, name)


class Job(Uneven):
  """20 steps of which any prefix is the same: a constant learning rate. Limits are short, as tests need them."""

  step_timeout_s = 15.0
  heartbeat_timeout_s = 10
  shutdown_timeout_s = 5
  tensorboard = False
  checkpoint_every_steps = 5

  def task(self):
    cfg = super().task()
    cfg.learner.optimizer.learning_rate = 3e-3
    return cfg

  def train_input(self):
    return fdl.Config(FailingText, text=super().train_input())

  def eval_inputs(self):
    return {'valid': fdl.Config(SyntheticText, batch_size=8, seq_len=16, vocab_size=257, stream=1, num_batches=3)}


class Plain(Shapes):
  """The researcher's file with an eval set whose last batch has seven rows, which no number of processes divides."""

  num_train_steps = 12
  log_every_steps = 1
  tensorboard = False
  step_timeout_s = 60.0

  def eval_inputs(self):
    first, second = itertools.islice(batches(1), 2)
    return {'valid': [first, {name: rows[:7] for name, rows in second.items()}]}
