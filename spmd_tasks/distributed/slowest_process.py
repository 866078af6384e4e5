"""SlowestProcess: finds the process that all others wait for in every step, and what keeps it.

    slowest = SlowestProcess(on_change=print, limit_s=600)   # every process makes one, and calls it at the same steps
    metrics |= slowest.update(step, loop_seconds=80.0, seconds_waited=1.0, seconds_blocked=70.0)

The processes of a job run in lockstep: each step ends for all when the last one has joined its collectives. So the time
of a step is the same everywhere, and only the slowest process does not spend a part of it blocked, waiting for the
step's result. What it does instead, its own time, is waiting for a batch, or the host's work.

Each process sends its times at logged steps, by an all-gather that the device runs behind the step in flight. Nobody
waits for its result, which is read at the next logged step; there is no cost per step.

A device that computes more slowly than its peers is not found here: its host waits for it like all others.
"""

from collections.abc import Callable
import socket
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from spmd_tasks.distributed.agreement import gather

# The others wait for the slowest process for this share of the time, at least, if it is named.
_NAMED_SHARE = 0.1


class Slowest(NamedTuple):
  """The process with the longest time of its own, without that in which it was blocked.

  Attributes:
    process_index: which one.
    own: its time, in seconds per step.
    median: the same, of the other processes.
    wait_share: the share of a step that the median process waits for it.
    cause: what most of the difference is.
  """

  process_index: int
  own: float
  median: float
  wait_share: float
  cause: str


def find_slowest(times: np.ndarray) -> Slowest:
  """Compares at least two processes.

  Args:
    times: float [N, 3]: seconds per step of each process in the loop, waiting for a batch, and blocked.
  """
  total, waited, blocked = times.T
  own = np.maximum(0.0, total - blocked)
  index = int(np.argmax(own))
  median, waited_median = (float(np.median(np.delete(each, index))) for each in (own, waited))
  difference = float(own[index]) - median
  # Where the slowest host has to wait for its device, too, it had begun early enough.
  share = max(0.0, difference - float(blocked[index])) / float(total[index]) if total[index] else 0.0
  is_input = waited[index] - waited_median >= difference / 2
  cause = 'it waits for its input' if is_input else "its host's work takes long"
  return Slowest(index, float(own[index]), median, min(1.0, share), cause)


class SlowestProcess:
  """Exchanges the times of a job's processes, of which there are several, at logged steps.

  Attributes:
    seconds_waited_elsewhere: how much longer than this one another process waited for its batches, in all.
  """

  def __init__(self, *, on_change: Callable[[str], None], limit_s: int):
    """Compiles the exchange; a collective call.

    Args:
      on_change: gets a sentence when another process is the slowest at two logged steps in a row, or none is any more.
      limit_s: how many seconds the processes wait for the slowest one to make this object.
    """
    self.seconds_waited_elsewhere = 0.0
    self._on_change = on_change
    self._num_steps = 0
    self._last: tuple[int, float, float, float] | None = None
    self._sent: jax.Array | None = None
    self._found: tuple[int, str] | None = None
    self._named: tuple[int, str] | None = None
    devices = jax.devices()
    mesh = Mesh(np.array(devices), ('device',))
    self._rows = [
      next(row for row, device in enumerate(devices) if device.process_index == process)
      for process in range(jax.process_count())
    ]
    self._sharding = NamedSharding(mesh, PartitionSpec('device'))
    shape = jax.ShapeDtypeStruct((len(devices), 3), np.float32, sharding=self._sharding)
    self._gather = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec())).lower(shape).compile()
    self._hosts = gather(socket.gethostname(), 'slowest_process_hosts', limit_s=limit_s)

  def update(
    self, step: int, *, loop_seconds: float, seconds_waited: float, seconds_blocked: float
  ) -> dict[str, float]:
    """Sends this process's times since the last call, and returns metrics of those that were sent then.

    Args:
      step: of the call; the same in all processes.
      loop_seconds: in the loop so far.
      seconds_waited: for batches so far, while no step was running.
      seconds_blocked: for the results of steps so far.
    """
    metrics = self._compare(self._sent) if self._sent is not None else {}
    now = (step, loop_seconds, seconds_waited, seconds_blocked)
    if self._last is not None:
      self._num_steps = step - self._last[0]
      times = np.array([after - before for after, before in zip(now[1:], self._last[1:], strict=True)], np.float32)
      rows = np.tile(times / self._num_steps, (jax.local_device_count(), 1))
      self._sent = self._gather(jax.make_array_from_process_local_data(self._sharding, rows))
    self._last = now
    return metrics

  def _compare(self, gathered: jax.Array) -> dict[str, float]:
    times = np.asarray(gathered.addressable_data(0))[self._rows]
    self.seconds_waited_elsewhere += float(times[:, 1].max() - times[jax.process_index(), 1]) * self._num_steps
    slowest = find_slowest(times)
    metrics = {'process_wait_fraction': slowest.wait_share}
    named = None
    if slowest.wait_share >= _NAMED_SHARE:
      named = slowest.process_index, slowest.cause
      metrics |= {
        'slowest_process': float(slowest.process_index),
        'slowest_process_seconds': slowest.own,
        'median_process_seconds': slowest.median,
      }
    if named != self._named and named == self._found:  # twice in a row: once may be chance
      self._on_change(
        f'steps wait for process {slowest.process_index} (host {self._hosts[slowest.process_index]}), for '
        f'{100 * slowest.wait_share:.0f}% of the time: {slowest.cause}. Of {times[slowest.process_index, 0]:.3f} s per '
        f'step it takes {slowest.own:.3f} s by itself, the median of the others is {slowest.median:.3f} s.'
        if named
        else 'steps no longer wait for one process'
      )
      self._named = named
    self._found = named
    return metrics
