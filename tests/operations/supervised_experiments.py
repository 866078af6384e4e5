"""Jobs of three or four hosts, whose batches take a while and divide by 1, 2 and 3."""

import os

import fiddle as fdl
import jax

from spmd_tasks.experiments.synthetic import Tiny
from spmd_tasks.inputs import ByteTokenizer, StdlibText, TextInput
from tests.fault_campaign.experiments import SlowInput
from tests.programs.own_experiments import Points, Regression
from tests.replay.faulty_devices import Fault, FaultyDevices


class Job(Regression):
  """Of which any prefix is the same: a constant learning rate. Two matrices, so that it is compiled in no time."""

  ici_mesh_shape = (1, 3, 1)
  log_every_steps = 1
  checkpoint_every = 5
  eval_every_steps = None
  heartbeat_timeout_s = 10
  prefetch_batches = 1
  tensorboard = False

  def train_input(self):
    return fdl.Config(SlowInput, input=fdl.Config(Points, batch_size=24), seconds_per_batch=0.2)

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


class Text(Tiny):
  """On four hosts, of text: each row of the batch has its own position, which moves between hosts with the row."""

  ici_mesh_shape = (1, 4, 1)
  vocab_size = ByteTokenizer().vocab_size
  batch_size = 24
  checkpoint_every = 5
  eval_every_steps = None
  heartbeat_timeout_s = 10
  prefetch_batches = 1
  tensorboard = False

  def task(self):
    cfg = super().task()
    cfg.learner.optimizer.learning_rate = 3e-3
    return cfg

  def train_input(self):
    source = fdl.Config(StdlibText, block_bytes=256)  # a row goes on to another block every 16 steps
    tokenizer = fdl.Config(ByteTokenizer)
    rows = fdl.Config(TextInput, source=source, tokenizer=tokenizer, batch_size=self.batch_size, seq_len=16)
    return fdl.Config(SlowInput, input=rows, seconds_per_batch=0.2)

  def eval_inputs(self):
    return {}
