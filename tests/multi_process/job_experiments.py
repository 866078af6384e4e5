"""Experiments for the binary as several processes, one of them slow: a small one, with dropout, plain data."""

import dataclasses
import itertools
import time

import fiddle as fdl

from spmd_tasks.inputs import Input
from tests.programs.own_experiments import Points, Regression
from tests.programs.plain_experiment import Shapes, batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowShard:
  """Another input, whose shard 1 takes `slow_s` seconds for each batch."""

  rows: Input
  slow_s: float = 0.0

  @property
  def batch_size(self):
    return self.rows.batch_size

  def element_spec(self):
    return self.rows.element_spec()

  def reshard_states(self, states, shard_count):
    return self.rows.reshard_states(states, shard_count)

  def make_iterator(self, shard_index=0, shard_count=1):
    iterator = self.rows.make_iterator(shard_index, shard_count)
    return _SlowIterator(iterator, self.slow_s) if shard_index == 1 and self.slow_s else iterator


class _SlowIterator:
  def __init__(self, iterator, slow_s):
    self._iterator, self._slow_s = iterator, slow_s

  def __next__(self):
    time.sleep(self._slow_s)
    return next(self._iterator)

  def __getattr__(self, name):
    return getattr(self._iterator, name)


class Light(Regression):
  """Two matrices, which are compiled in no time. Limits are short, as tests need them."""

  ici_mesh_shape = (1, 4, 2)
  step_timeout_s = 15.0
  trackers = ()
  log_every_steps = 1
  checkpoint_every = 5

  def train_input(self):
    return fdl.Config(SlowShard, rows=fdl.Config(Points))

  def eval_inputs(self):
    return {}


class Dropout(Light):
  """With dropout, which shows the order of the rows, and an eval set."""

  def task(self):
    cfg = super().task()
    cfg.model.dropout_rate = 0.5
    return cfg

  def eval_inputs(self):
    return {'valid': fdl.Config(Points, num_batches=3)}


class Plain(Shapes):
  """The researcher's file with an eval set whose last batch has seven rows, which no number of processes divides."""

  num_train_steps = 12
  log_every_steps = 1
  trackers = ()
  step_timeout_s = 60.0

  def eval_inputs(self):
    first, second = itertools.islice(batches(1), 2)
    return {'valid': [first, {name: rows[:7] for name, rows in second.items()}]}
