"""Devices that compute wrongly: CheckDevices with a bit flipped in what one device has, and a run without a loop."""

import contextlib
import dataclasses
import tempfile
import types

from etils import epath
import jax
import numpy as np

from spmd_tasks.config import resolve
from spmd_tasks.experiment import partition_job
from spmd_tasks.replay import CheckDevices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
  """One flipped bit of one device's shard of an array; `numbers` are the runs in which it is flipped."""

  device: int
  stage: str
  leaf: int
  element: int
  bit: int
  numbers: tuple[int, ...] = (0, 1, 2)

  @classmethod
  def drawn(cls, rng, stage: str, numbers=(0, 1, 2)) -> 'Fault':
    device, leaf, element, bit = (int(rng.integers(most)) for most in (8, 1 << 16, 1 << 30, 8))
    return cls(device=device, stage=stage, leaf=leaf, element=element, bit=bit, numbers=numbers)

  def flipped(self, tree):
    leaves, structure = jax.tree.flatten(tree)
    place = self.leaf % len(leaves)
    x = leaves[place]
    shards = [shard.data for shard in x.addressable_shards]
    (own,) = [i for i, shard in enumerate(x.addressable_shards) if shard.device.id == self.device]
    bits = np.array(shards[own])
    data = bits.reshape(-1).view(np.uint8)
    data[self.element % data.size] ^= 1 << self.bit
    shards[own] = jax.device_put(bits, shards[own].devices().pop())
    leaves[place] = jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
    return jax.tree.unflatten(structure, leaves)


class FaultyDevices(CheckDevices):
  """CheckDevices on devices with a fault; `broken` computes wrong products by itself too."""

  fault: Fault | None = None
  broken: int | None = None

  def computed(self, number, stage, arrays):
    fault = self.fault
    if fault is None or stage != fault.stage or number not in fault.numbers:
      return arrays
    return fault.flipped(arrays)

  def compute_alone(self, device):
    products = super().compute_alone(device)
    return [products[0] ^ 1, products[1]] if device.id == self.broken else products


def run_of(experiment: str, *overrides: str):
  """What the hook sees of a job's run before its step 2, and a placed batch."""
  job = resolve(experiment, overrides).build()
  model = partition_job(job)
  messages: list[str] = []
  run = types.SimpleNamespace(
    job=job,
    job_log_dir=epath.Path(tempfile.mkdtemp(prefix='faulty_devices_')),
    experiment=job.experiment,
    model=model,
    state=model.init(0),
    step=1,
    limit_s=60,
    metrics={},
    messages=messages,
    message=messages.append,
    compiling=contextlib.nullcontext,
    watchdog=types.SimpleNamespace(allow=lambda *_: contextlib.nullcontext()),
  )
  batch = next(job.train_input.make_iterator())
  return run, model.train_step.place(batch)
