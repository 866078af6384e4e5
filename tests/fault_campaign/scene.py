"""Scene: starts the jobs of one fault, waits for events, and checks the promises that all faults share.

    scene.job = 'Text'
    process = scene.start()
    scene.wait_until(process, lambda: scene.num_steps() >= 7)
    process.send(signal.SIGKILL)
    scene.finish(process)
    scene.resume()                       # the same command: 0, and bit for bit the undisturbed run

A scene that is closed has ended what it started.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import json
import os
from pathlib import Path
import random
import re
import shutil
import signal
import subprocess
import time
from typing import Any

from spmd_tasks import exit_codes
from tests import binary
from tests.fault_campaign import experiments, judge
from tests.fault_campaign.experiments import MAX_TO_KEEP, NUM_STEPS, SAVE_INTERVAL
from tests.fault_campaign.injected import NO_SUCH_POINT, Plan, Point
from tests.fault_campaign.judge import Reference, check

# From the start of a job to its end, on a machine that is busy with other things. Longer is a hang.
DEADLINE_S = 90.0
_ORPHAN_GRACE_S = 5.0  # workers look every second whether their job is still there
INJECTED = Path(__file__).with_name('injected.py')


class HangError(Exception):
  """A process did not end, or did not reach an event, within its deadline."""


class SkippedError(Exception):
  """The fault cannot be injected on this machine; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
  """How a process ended: exit code (negative for a signal), streams, seconds, and whether children remained."""

  returncode: int
  stdout: str
  stderr: str
  seconds: float


class Started:
  """A running process of a scene, the leader of a session, with its streams in files."""

  def __init__(self, argv: Sequence[object], directory: Path, name: str, **start: Any):
    self.entered = directory / f'{name}.entered'
    self._paths = [directory / f'{name}.{stream}' for stream in ('out', 'err')]
    self._began = time.monotonic()
    with self._paths[0].open('wb') as out, self._paths[1].open('wb') as err:
      streams = {'stdin': subprocess.DEVNULL, 'stdout': out, 'stderr': err}
      self.process = binary.start_process(argv, start_new_session=True, **streams, **start)
    self.pid = self.process.pid
    self._is_over = False

  @property
  def stdout(self) -> str:
    return self._paths[0].read_text(errors='replace')

  @property
  def stderr(self) -> str:
    return self._paths[1].read_text(errors='replace')

  def is_running(self) -> bool:
    return self.process.poll() is None

  def send(self, signum: int) -> None:
    """Sends a signal, unless the process has ended."""
    if self.is_running():
      with contextlib.suppress(ProcessLookupError):
        os.kill(self.pid, signum)

  def finish(self, limit_s: float) -> Ended:
    """Waits for the end; after the limit, kills the process and raises a HangError."""
    try:
      self.process.wait(limit_s)
    except subprocess.TimeoutExpired:
      tail = judge.last_line(self.stderr)
      self.kill_session()
      raise HangError(f'the process did not end within {limit_s:g} s; its last words: {tail}') from None
    return Ended(
      returncode=self.process.returncode, stdout=self.stdout, stderr=self.stderr, seconds=time.monotonic() - self._began
    )

  def session_is_empty(self) -> bool:
    try:
      os.killpg(self.pid, 0)
    except ProcessLookupError:
      self._is_over = True
    return self._is_over

  def kill_session(self) -> None:
    if not self._is_over:  # then its number may be another session's
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self.pid, signal.SIGKILL)
      self.process.wait()


class Scene:
  """One fault's directory, random numbers and processes.

  Attributes:
    rng: the fault's own, a function of the seed and the fault's number.
    job: the class of experiments.py that runs; set it before the first start.
    where: what was drawn, for the report.
    codes: the exit codes of all processes, in their order.
  """

  def __init__(self, path: Path, rng: random.Random, campaign: Any, *, only_plain: bool = False):
    self.path = path
    self._only_plain = only_plain
    self.rng = rng
    self.job = 'Plain'
    self.where = ''
    self.codes: list[int] = []
    self.flags: list[str] = []  # of every start
    self._campaign = campaign
    self._started: list[Started] = []
    self._closers = contextlib.ExitStack()
    self.job_log_dir = path / 'job'
    self.disk = path / 'disk'  # for a file system of the scene's own
    path.mkdir(parents=True)

  @property
  def checkpoints(self) -> Path:
    return self.job_log_dir / 'checkpoints'

  @property
  def reference(self) -> Reference:
    return self._campaign.reference(self.job)

  def choose_job(self, jobs: Sequence[str]) -> None:
    """Draws the job; also in a campaign of only plain jobs, so that other random numbers are equal."""
    drawn = self.rng.choice(jobs)
    self.job = 'Plain' if self._only_plain and 'Plain' in jobs else drawn

  # Processes.

  def start(self, *flags: object, points: Sequence[Point] = (), name: str | None = None, **start: Any) -> Started:
    """Starts the scene's job with the faults `points`; `start` is passed to binary.start_process."""
    own = list(flags) or self.command()
    if not any(str(flag) == '--job_log_dir' for flag in own):
      own += ['--job_log_dir', self.job_log_dir]
    return self.start_injected([*own, *self.data_flags(), *self.flags], points, name=name, **start)

  def command(self, mode: str = 'train') -> list[str]:
    """Returns the flags that start the scene's job, without its directories."""
    return experiments.flags_of(self.job, mode)

  def free_name(self, name: str) -> str:
    """Returns a new name for a process of the scene."""
    number = sum(1 for path in self.path.glob(f'{name}*.plan.json'))
    return f'{name}_{number}' if number else name

  def start_injected(
    self,
    flags: Sequence[object],
    points: Sequence[Point] = (),
    *,
    name: str | None = None,
    recorded: str | None = None,
    **start: Any,
  ) -> Started:
    """Starts the binary with exactly these flags; `recorded` is a file for its file operations."""
    name = name or f'run_{len(self._started)}'
    entered = str(self.path / f'{name}.entered')
    plan = Plan(root=str(self.path), points=tuple(points), entered=entered, recorded=recorded)
    plan_path = self.path / f'{name}.plan.json'
    plan_path.write_text(json.dumps(dataclasses.asdict(plan)))
    environment = child_environment() | dict(start.pop('env', {}))
    start = {'cwd': binary.REPOSITORY, 'env': environment} | start
    self._started.append(Started([INJECTED, plan_path, *flags], self.path, name, **start))
    return self._started[-1]

  def finish(self, process: Started, limit_s: float = DEADLINE_S) -> Ended:
    """Waits for the process's end; all its children must end soon after."""
    ended = process.finish(limit_s)
    self.codes.append(ended.returncode)
    end = time.monotonic() + _ORPHAN_GRACE_S
    while not process.session_is_empty() and time.monotonic() < end:
      time.sleep(0.02)
    check(process.session_is_empty(), 'processes that the job had started are still there')
    check(ended.returncode != NO_SUCH_POINT, judge.last_line(ended.stderr))
    return ended

  def run(self, *flags: object, points: Sequence[Point] = (), limit_s: float = DEADLINE_S, **start: Any) -> Ended:
    return self.finish(self.start(*flags, points=points, **start), limit_s)

  def wait_until(self, process: Started, condition: Callable[[], Any], limit_s: float = DEADLINE_S) -> bool:
    """Waits; returns False if the process has ended instead."""
    end = time.monotonic() + limit_s
    while not condition():
      if not process.is_running():
        return bool(condition())
      if time.monotonic() > end:
        tail = judge.last_line(process.stderr)
        process.kill_session()
        raise HangError(f'the process did not get there within {limit_s:g} s; its last words: {tail}')
      time.sleep(0.005)
    return True

  def send_after(self, process: Started, signum: int, delay_s: float) -> None:
    """Sends a signal so many seconds after the binary's first line, unless the process has ended."""
    self.wait_until(process, process.entered.exists)
    self.pause(process, delay_s)
    process.send(signum)

  def send_at_random_instant(self, process: Started, signum: int) -> None:
    self.wait_for_random_instant(process)
    process.send(signum)

  def wait_for_random_instant(self, process: Started) -> None:
    """Waits for a random instant between the binary's first line and its end, or soon after a random step."""
    delay, jitter = self.rng.uniform(0, 1.05 * self.reference.seconds), self.rng.uniform(0, 0.05)
    step, by_clock = self.rng.randrange(1, NUM_STEPS + 1), self.rng.random() < 0.5
    num_before = self.num_steps()
    self.where += f'{delay:.3f} s; ' if by_clock else f'{jitter:.3f} s after {step} steps; '
    self.wait_until(process, process.entered.exists)
    if not by_clock:
      self.wait_until(process, lambda: self.num_steps() >= num_before + step)
    self.pause(process, delay if by_clock else jitter)

  def pause(self, process: Started, seconds: float) -> None:
    """Waits so many seconds, at most until the process ends."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.is_running():
      time.sleep(0.002)

  # What a job left, and what it must leave.

  def steps(self) -> list[int]:
    """Returns the steps of metrics.jsonl in the order of its lines."""
    return [line['step'] for line in judge.metric_lines(self.job_log_dir / 'metrics.jsonl')]

  def num_steps(self) -> int:
    """Returns the number of lines of metrics.jsonl, which is cheaper than `steps`."""
    path = self.job_log_dir / 'metrics.jsonl'
    return path.read_bytes().count(b'\n') if path.is_file() else 0

  def resume(self, *, max_lost: int = SAVE_INTERVAL, check_left: bool = True) -> Ended:
    """Checks that the same command ends bit for bit as the undisturbed run, repeating at most `max_lost` steps."""
    before = self.steps()
    ended = self.run()
    check(ended.returncode == exit_codes.OK, f'the restart ended with {ended.returncode}: {judge.sentence_of(ended)}')
    judge.check_no_traceback(ended.stderr)
    again = self.steps()[len(before) :]
    if before and again:
      lost = before[-1] - (again[0] - 1)
      check(lost <= max_lost, f'{lost} steps were lost; the interval is {SAVE_INTERVAL}')
      check(lost >= 0, f'the restart left out {-lost} steps')
    # Where nothing was left to train, nothing was saved, and only a save deletes old checkpoints.
    self.check_as_undisturbed(check_left=check_left, max_kept=MAX_TO_KEEP + (not again))
    return ended

  def check_as_undisturbed(
    self, *, may_lack: Path | None = None, check_left: bool = True, max_kept: int = MAX_TO_KEEP
  ) -> None:
    judge.compare_with_reference(self.job_log_dir, self.reference, may_lack=may_lack)
    if check_left:
      judge.check_nothing_is_left(self.job_log_dir)
    steps = judge.complete_steps(self.job_log_dir)
    check(len(steps) <= max_kept, f'{len(steps)} checkpoints are kept: {steps}')

  def accept(
    self, ended: Ended, repair: Callable[[], Any] = lambda: None, *, codes: tuple[int, ...] = judge.REFUSED
  ) -> str:
    """Checks that the job is as undisturbed, or refuses with one of `codes` and resumes once it is repaired.

    Returns:
      A sentence that says which.
    """
    if ended.returncode == exit_codes.OK:
      self.check_as_undisturbed()
      return 'went on, bit for bit'
    judge.check_refusal(ended, codes)
    judge.check_digests(self.job_log_dir, self.reference)
    repair()
    self.resume()
    return f'refused with {ended.returncode} ({judge.sentence_of(ended)}); then went on, bit for bit'

  def begun(self, last_saved: int, last_seen: int) -> None:
    """Prepares job_log_dir as of a job killed after `last_seen`, with its newest checkpoint at `last_saved`."""
    assert last_saved % SAVE_INTERVAL == 0
    assert last_saved <= last_seen <= NUM_STEPS
    shutil.copytree(self.reference.directory, self.job_log_dir)
    kept = range(last_saved, 0, -SAVE_INTERVAL)[:MAX_TO_KEEP]
    for path in self.checkpoints.iterdir():
      if path.name not in {f'checkpoint_{step:08d}' for step in kept}:
        shutil.rmtree(path)
    config = self.job_log_dir / 'config.json'  # it names the files that the job reads
    config.write_text(config.read_text().replace(str(self.reference.directory.parent), str(self.path)))
    for path in (self.job_log_dir / 'metrics.jsonl', *self.job_log_dir.glob('eval/*/metrics.jsonl')):
      last = last_seen if path.parent == self.job_log_dir else last_saved
      lines = path.read_text().splitlines(keepends=True)
      path.write_text(''.join(line for line in lines if json.loads(line)['step'] <= last))
      if not path.read_text() and path.parent != self.job_log_dir:
        path.unlink()

  def write_data(self) -> Path:
    """Writes the files that the job reads, if it reads any, and returns their directory."""
    directory = self.path / 'data'
    if self.job in experiments.SUFFIXES and not directory.exists():
      experiments.write_data(self.job, directory)
    return directory

  def backup(self, path: Path) -> Callable[[], None]:
    """Copies a directory; returns a function that restores the copy."""
    copy = self.path / f'backup_of_{path.name}'
    shutil.copytree(path, copy)

    def restore() -> None:
      if path.is_symlink():
        path.unlink()
      shutil.rmtree(path, ignore_errors=True)
      shutil.copytree(copy, path)

    return restore

  def data_flags(self) -> list[str]:
    return ['--set', f'data={self.write_data()}'] if self.job in experiments.SUFFIXES else []

  def campaign_server(self, make: Callable[['Scene'], Any]) -> contextlib.AbstractContextManager[Any]:
    """Yields the server that faults of clients share, created by `make` in another scene."""
    return self._campaign.server(make)

  def at_end(self, action: Callable[..., Any], *arguments: Any) -> None:
    """Calls `action` when the scene is closed, in reverse order."""
    self._closers.callback(action, *arguments)

  def close(self) -> None:
    """Ends all running processes."""
    for process in self._started:
      process.kill_session()
    self._closers.close()


def child_environment() -> Mapping[str, str]:
  """Returns the environment of all processes, with one thread for numpy."""
  left_out = ('JAX_NUM_CPU_DEVICES', 'PYTHONPATH')
  own = {name: value for name, value in os.environ.items() if name not in left_out}
  return own | {
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': str(binary.REPOSITORY),
    'PYTHONUNBUFFERED': '1',
  }


def matching(operations: Sequence[tuple[str, str]], kinds: Sequence[str], pattern: str) -> int:
  """Returns how many of the recorded operations match a Point with these settings."""
  return sum(kind in kinds and bool(re.search(pattern, path)) for kind, path in operations)
