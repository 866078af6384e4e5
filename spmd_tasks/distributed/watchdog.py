"""StepWatchdog: ends a process whose loop makes no progress, and reports where it is stuck.

    with StepWatchdog(timeout_s=600, emergency=emergency, records=records) as watchdog:
      watchdog.beat(step, 'input')                      # before each part of each step
      with watchdog.allow('checkpoint', limit_s=1800):  # around what may take longer
        save(state)

Nothing else detects a process that is alive but stuck: its heartbeats continue, and the other processes wait for it in
a collective until their own watchdogs fire. Their reports name the stuck process, whose records are behind.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import threading
import time
from typing import TYPE_CHECKING

from absl import logging
from etils import epath
import jax

from spmd_tasks import exit_codes
from spmd_tasks.distributed.emergency_exit import EmergencyExit, Position
from spmd_tasks.distributed.initialization import finish
from spmd_tasks.distributed.rank_records import open_rank_records
from spmd_tasks.files import is_remote

if TYPE_CHECKING:
  from spmd_tasks.distributed.rank_records import RankRecords  # of several processes only

# A native call that holds the interpreter lock keeps the watchdog's thread from running. So long after the limit, the
# process ends without that thread.
_NATIVE_MARGIN_S = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mark:
  """The last beat of the loop; replaced as a whole, so that the watching threads need no lock."""

  position: Position
  limit_s: float
  begun: float = dataclasses.field(default_factory=time.monotonic)


class StepWatchdog:
  """Ends the process if no beat comes within the limit."""

  def __init__(
    self,
    *,
    timeout_s: float,
    first_step_timeout_s: float = 3600.0,
    emergency: EmergencyExit,
    records: 'RankRecords | None' = None,
    record_period_s: float = 2.0,
  ):
    """Creates a watchdog; enter it as a context manager.

    Args:
      timeout_s: seconds without a beat after which the process ends. Must exceed the longest normal step, including the
        wait for the slowest process.
      first_step_timeout_s: the limit until the second step begins, as the first step compiles.
      emergency: ends the process.
      records: receive this process's progress every `record_period_s` seconds; None for a single process.
    """
    self._timeout_s = timeout_s
    self._first_step_timeout_s = first_step_timeout_s
    self._emergency = emergency
    self._records = records
    self._record_period_s = record_period_s
    self._first_step: int | None = None
    self._done = threading.Event()
    self._threads: list[threading.Thread] = []

  def __enter__(self) -> 'StepWatchdog':
    self._mark = _Mark(position=Position(), limit_s=self._first_step_timeout_s)
    self._emergency.set_position_source(lambda: self._mark.position)
    self._threads = [threading.Thread(target=self._watch, name='step-watchdog', daemon=True)]
    if self._records is not None:
      # In a thread of its own, as the watchdog must fire even if the file system hangs.
      self._threads.append(threading.Thread(target=self._record, name='rank-records', daemon=True))
    for thread in self._threads:
      thread.start()
    return self

  def __exit__(self, *exc_info):
    self._done.set()
    for thread in self._threads:
      thread.join(5.0)
    self._emergency.set_deadline(None)

  def beat(self, step: int, activity: str = 'step'):
    """Begins `activity` of `step`; costs microseconds. Call this in the same order in every process."""
    if self._first_step is None:
      self._first_step = step
    limit_s = self._first_step_timeout_s if step == self._first_step else self._timeout_s
    self._mark = _Mark(position=self._next_position(step, activity), limit_s=limit_s)

  @contextlib.contextmanager
  def allow(self, activity: str, limit_s: float) -> Iterator[None]:
    """Allows `limit_s` seconds for an activity longer than a step; then the step's own limit starts again."""
    before = self._mark
    self._mark = _Mark(position=self._next_position(before.position.step, activity), limit_s=limit_s)
    try:
      yield
    finally:
      after = self._next_position(before.position.step, before.position.activity)
      self._mark = _Mark(position=after, limit_s=before.limit_s)

  def _next_position(self, step: int, activity: str) -> Position:
    last = self._mark.position
    return Position(step=step, beat=last.beat + 1 if step == last.step else 0, activity=activity)

  def _watch(self):
    while True:
      mark = self._mark
      waited_s = time.monotonic() - mark.begun
      if waited_s > mark.limit_s:
        reason = f'no progress for {waited_s:.1f} s in {mark.position} (limit {mark.limit_s:g} s)'
        self._emergency.leave(exit_codes.STUCK, reason)
      self._emergency.set_deadline(mark.limit_s + _NATIVE_MARGIN_S)
      if self._done.wait(min(1.0, mark.limit_s / 10)):
        return

  def _record(self):
    assert self._records is not None
    is_failing = False
    while True:
      mark = self._mark
      try:
        since = time.time() - (time.monotonic() - mark.begun)
        self._records.write_progress(mark.position, since=since)
        is_failing = False
      except Exception as error:  # any error of the file system's library
        if not is_failing:  # one warning per outage: the job can continue without its records
          logging.warning('the progress of this process cannot be recorded: %s', error)
        is_failing = True
      if self._done.wait(self._record_period_s):
        return


@contextlib.contextmanager
def watch_steps(
  directory: epath.Path, emergency: EmergencyExit, *, timeout_s: float, first_step_timeout_s: float
) -> Iterator[StepWatchdog]:
  """Runs a StepWatchdog over a whole job, whose processes record their progress in `directory`/ranks.

  On exit every process waits for the others, at most `timeout_s`, as the first process to end would end them too.
  """
  records = None
  if jax.process_count() > 1:
    records = open_rank_records(directory)
    emergency.attach(records.describe)
  with StepWatchdog(
    timeout_s=timeout_s,
    first_step_timeout_s=first_step_timeout_s,
    emergency=emergency,
    records=records,
    record_period_s=30.0 if is_remote(directory) else 2.0,  # a store counts its writes
  ) as watchdog:
    try:
      yield watchdog
    finally:
      with watchdog.allow('finish', timeout_s):
        finish()
