"""Goodput: the share of a job's wall time spent in steps that counted, over all its restarts, and the losses by cause.

    goodput = Goodput(job_log_dir, begun=process_start_time())
    goodput.resume(first_step)                    # with what the record says of earlier processes of this job
    goodput.switch('steps')
    with goodput.spend('evaluation'):             # and then steps again
      ...
    goodput.step(7, is_skipped=False, seconds_waited=batches.seconds_waited)
    metrics |= goodput.metrics()                  # {'goodput': 0.93, 'badput/data_loading': 0.01, ...}

Every moment has one cause, so the shares add up to 1. Names follow Google's ml-goodput-measurement. The record,
`<job_log_dir>/goodput.json`, is one small file that process 0 replaces at logged steps, for the next process.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import json
import math
import os
import time
from typing import Any

from absl import logging
from etils import epath

from spmd_tasks.files import read_text, write_durably
from spmd_tasks.programs.job_directory import GOODPUT_FILE

FORMAT = 1

CAUSES: Mapping[str, str] = {
  'program_startup': 'a process starts: imports, devices, sharding, a new state',
  'compilation': 'tracing and compiling the steps',
  'checkpoint_restore': 'reading the state that a process resumes from',
  'data_loading': 'no step was running, because the next batch was not there',
  'checkpoint_save': 'the loop waited for a checkpoint',
  'evaluation': 'evaluations and samples, during the training and at its end',
  'skipped_steps': 'steps whose loss or gradient was not finite, or a spike',
  'wasted_progress': 'steps that a restart repeated',
  'program_end': 'closing files and connections, and waiting for other processes',
  'infrastructure_recovery': 'between the last sign of one process and the start of the next',
}
_STEPS = 'steps'
_MAX_MARKS = 200
_COST = 0.01  # the share of the time that writing the record may take

_OFFSET = time.time() - time.monotonic()


def steady_now() -> float:
  """Returns the time in seconds since the epoch, by a clock that nobody sets while the process runs."""
  return since_epoch(time.monotonic())


def since_epoch(monotonic: float) -> float:
  """Returns a `time.monotonic()` in seconds since the epoch."""
  return _OFFSET + monotonic


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Record:
  """The record that a process leaves for the next one. Times are in seconds since the epoch."""

  written: float
  has_ended: bool  # the job was complete: the time until somebody adds steps is not lost
  seconds: dict[str, float]  # by cause, and in steps that counted
  undecided: float  # seconds in steps that were not finished, after the process's first
  step: int  # the last one that counted
  marks: dict[int, float]  # step -> seconds in steps that counted until then

  def productive_until(self, step: int) -> float:
    """Returns the seconds in steps that counted until `step`, interpolated between the marks around it."""
    known = sorted((self.marks | {self.step: self.seconds[_STEPS]}).items())
    before = max((mark for mark in known if mark[0] <= step), default=known[0])
    after = min((mark for mark in known if mark[0] >= step), default=known[-1])
    if before[0] >= after[0]:
      return before[1]
    return before[1] + (after[1] - before[1]) * (step - before[0]) / (after[0] - before[0])


class Goodput:
  """Adds up where the wall time of a job goes; see the module's docstring. `begun`: when its command was started."""

  def __init__(self, directory: epath.Path | None, *, begun: float, now: Callable[[], float] = steady_now):
    """Begins to count for a job's directory; None keeps no record (every process but process 0). `now`: the clock."""
    self._path = directory / GOODPUT_FILE if directory is not None else None
    self._now = now
    self.begun = self._since = begun
    self._cause = 'program_startup'
    self._seconds = dict.fromkeys((_STEPS, *CAUSES), 0.0)
    self._undecided = 0.0
    self._waited = 0.0
    self._step = 0
    self._marks: dict[int, float] = {}
    self._next_write = begun
    self._is_recording = self._has_ended = self._has_stepped = False

  def resume(self, step: int) -> None:
    """Adds the record of earlier processes, and begins to keep it; this process resumes after `step`."""
    last = self._read()
    self._step = step
    if step == 0:  # the state is new: nothing was read
      self._seconds['program_startup'] += self._seconds['checkpoint_restore']
      self._seconds['checkpoint_restore'] = 0.0
    if last is not None:
      productive = min(last.productive_until(step), last.seconds[_STEPS])
      for cause, seconds in last.seconds.items():
        self._seconds[cause] += seconds
      self._seconds['wasted_progress'] += last.seconds[_STEPS] - productive + last.undecided
      self._seconds[_STEPS] = productive
      if not last.has_ended:
        self._seconds['infrastructure_recovery'] += max(0.0, self.begun - last.written)
      self._marks = {mark: seconds for mark, seconds in last.marks.items() if mark < step}
    self._is_recording = True
    self.mark(step)

  def switch(self, cause: str) -> str:
    """Counts the time from now on for `cause`, one of CAUSES or 'steps'; returns the cause until now."""
    now = self._now()
    passed = max(0.0, now - self._since)
    if self._cause == _STEPS:
      self._undecided += passed
    else:
      self._seconds[self._cause] += passed
    before, self._cause, self._since = self._cause, cause, now
    return before

  @contextlib.contextmanager
  def spend(self, cause: str) -> Iterator[None]:
    """Counts the time inside the context for `cause`."""
    outer = self.switch(cause)
    try:
      yield
    finally:
      self.switch(outer)

  def step(self, step: int, *, is_skipped: bool, seconds_waited: float) -> None:
    """Counts the time in steps since the last call as good, or as lost; `step` is the number of those that counted.

    `seconds_waited`: how long there was nothing to do but to wait for a batch, in all.
    """
    self.switch(self._cause)
    waited = max(0.0, min(self._undecided, seconds_waited - self._waited))
    self._seconds['data_loading'] += waited
    self._seconds['skipped_steps' if is_skipped else _STEPS] += self._undecided - waited
    self._undecided, self._waited, self._step = 0.0, self._waited + waited, step
    self._has_stepped = True

  def mark(self, step: int) -> None:
    """Remembers the time until `step`, from which a later process may resume; writes the record."""
    self._marks[step] = self._seconds[_STEPS]
    for old in sorted(self._marks)[1:-_MAX_MARKS]:
      del self._marks[old]
    self._write()

  def metrics(self) -> dict[str, float]:
    """Returns goodput and badput by cause, as shares of `wall_seconds`; writes the record if that costs little."""
    self.switch(self._cause)
    if self._now() >= self._next_write:
      self._write()
    total = sum(self._seconds.values()) + self._undecided
    shares = {f'badput/{cause}': self._seconds[cause] / total for cause in CAUSES}
    return {'goodput': 1.0 - sum(shares.values())} | shares | {'wall_seconds': total}

  def loop_seconds(self) -> tuple[float, float]:
    """Returns the seconds in the loop so far (all steps, and waits for batches), and the seconds of the waits alone."""
    self.switch(self._cause)
    waits = self._seconds['data_loading']
    return self._seconds[_STEPS] + self._seconds['skipped_steps'] + waits + self._undecided, waits

  def end(self) -> str:
    """Records that the job is complete; returns a line for people about its whole time."""
    self._has_ended = True
    metrics = self.metrics()
    losses = {cause: metrics[f'badput/{cause}'] for cause in CAUSES if metrics[f'badput/{cause}'] >= 0.001}
    parts = [f'{cause} {100 * share:.1f}%' for cause, share in sorted(losses.items(), key=lambda loss: -loss[1])]
    return f'goodput {100 * metrics["goodput"]:.1f}% of {metrics["wall_seconds"]:.0f} s; lost: ' + ', '.join(parts)

  def close(self) -> None:
    """Writes the record for the last time."""
    self.switch(self._cause)
    self._write()

  def _write(self) -> None:
    if self._path is None or not self._is_recording:
      return
    # Until its first step is finished, a process has only started: it has no progress to waste.
    started_s = 0.0 if self._has_stepped else self._undecided
    record = _Record(
      written=self._now(),
      has_ended=self._has_ended,
      seconds=self._seconds | {'program_startup': self._seconds['program_startup'] + started_s},
      undecided=self._undecided - started_s,
      step=self._step,
      marks=self._marks,
    )
    started = time.monotonic()
    try:
      write_durably(self._path, json.dumps({'format': FORMAT} | dataclasses.asdict(record)) + '\n')
    except OSError as error:  # the job itself does not need the record
      logging.warning('%s cannot be written: %s', self._path, error)
    self._next_write = self._now() + (time.monotonic() - started) / _COST

  def _read(self) -> _Record | None:
    """Returns the record of earlier processes; None without one. A record that cannot be read is only reported."""
    if self._path is None or not self._path.exists():
      return None
    try:
      return _decode(json.loads(read_text(self._path)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
      logging.warning('goodput counts from now on: %s cannot be read (%s).', self._path, error)
      return None


def _decode(fields: Any) -> _Record:
  if fields.pop('format') != FORMAT:
    raise ValueError(f'it is not of format {FORMAT}')
  seconds = {cause: float(value) for cause, value in fields.pop('seconds').items() if cause in (_STEPS, *CAUSES)}
  marks = {int(step): float(value) for step, value in fields.pop('marks').items()}
  record = _Record(seconds=dict.fromkeys((_STEPS, *CAUSES), 0.0) | seconds, marks=marks, **fields)
  numbers = (record.written, record.undecided, record.step, *record.seconds.values(), *marks.values())
  if not all(isinstance(number, int | float) and math.isfinite(number) and number >= 0 for number in numbers):
    raise ValueError('a number is missing, negative or not finite')
  return record


def process_start_time() -> float:
  """Returns when this process began, in seconds since the epoch; to about 10 ms, on Linux only (elsewhere: now)."""
  try:
    with open('/proc/self/stat', encoding='ascii') as stat, open('/proc/uptime', encoding='ascii') as uptime:
      ticks = float(stat.read().rpartition(')')[2].split()[19])
      return steady_now() - float(uptime.read().split()[0]) + ticks / os.sysconf('SC_CLK_TCK')
  except OSError:
    return steady_now()
