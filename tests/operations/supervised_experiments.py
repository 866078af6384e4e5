"""A job of three hosts of one device, whose batches take a while and divide by 1, 2 and 3."""

import dataclasses
import os
import time

import fiddle as fdl
import jax

from spmd_tasks.experiments.synthetic import Tiny
from spmd_tasks.inputs import SyntheticText
from tests.replay.faulty_devices import Fault, FaultyDevices


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowText(SyntheticText):
  """SyntheticText that takes `slow_s` seconds for a batch."""

  slow_s: float = 0.2

  def make_iterator(self, shard_index=0, shard_count=1):
    return _SlowIterator(super().make_iterator(shard_index, shard_count), self.slow_s)


class _SlowIterator:
  def __init__(self, iterator, slow_s):
    self._iterator, self._slow_s = iterator, slow_s

  def __next__(self):
    time.sleep(self._slow_s)
    return next(self._iterator)

  def __getattr__(self, name):
    return getattr(self._iterator, name)


class Job(Tiny):
  """Of which any prefix is the same: a constant learning rate."""

  ici_mesh_shape = (1, 3, 1)
  batch_size = 24
  num_train_steps = 60
  checkpoint_every_steps = 5
  eval_every_steps = None
  heartbeat_timeout_s = 10
  prefetch_batches = 1
  tensorboard = False

  def task(self):
    cfg = super().task()
    cfg.learner.optimizer.learning_rate = 3e-3
    return cfg

  def train_input(self):
    return fdl.Config(SlowText, batch_size=self.batch_size, seq_len=16, vocab_size=64)

  def eval_inputs(self):
    return {}


class BrokenDevice(FaultyDevices):
  """From the second check on, a device of the host of rank 1 computes wrongly."""

  def computed(self, number, stage, arrays):
    if os.environ.get('SLURM_PROCID') == '1' and self.num_checks > 1 and stage == 'gradients':
      return Fault(device=jax.local_devices()[0].id, stage=stage, leaf=3, element=5, bit=2).flipped(arrays)
    return arrays


class Watched(Job):
  """Of two devices a host."""

  ici_mesh_shape = (1, 4, 1)

  def hooks(self):
    return [BrokenDevice(every_steps=4)]
