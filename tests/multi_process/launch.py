"""Starts the processes of one job on this machine and ends them all with it.

Usage:

    argvs = [[sys.executable, 'worker.py', *flags] for flags in coordinator_flags(num_processes=2)]
    with Job(argvs, log_dir=tmp_path, num_devices=2) as job:
      job.wait_for_text(1, 'step 3', limit_s=60)
      job.send(1, signal.SIGKILL)
      ranks = job.wait(deadline_s=30)
    assert [rank.returncode for rank in ranks] == [1, -9]
"""

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import time

from tests import binary

REPOSITORY = Path(__file__).resolve().parents[2]

_POLL_S = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankResult:
  """How one process ended.

  Attributes:
    returncode: as subprocess gives it: -9 for SIGKILL.
    seconds: from the start of the job to this process's end.
    log: its stdout and stderr, as they came.
    was_killed: the launcher had to, at the deadline.
    left_orphans: it ended by itself, but processes that it had started had not.
  """

  returncode: int
  seconds: float
  log: str
  was_killed: bool
  left_orphans: bool


def free_port() -> int:
  """A loopback port that was free a moment ago."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


def coordinator_flags(*, num_processes: int) -> list[list[str]]:
  """Per rank, the flags by which the processes find each other."""
  address = f'127.0.0.1:{free_port()}'
  return [
    [f'--coordinator_address={address}', f'--num_processes={num_processes}', f'--process_id={rank}']
    for rank in range(num_processes)
  ]


class Job:
  """Processes, one per argv, each in a session of its own with its log in `log_dir/rank<i>.log`."""

  def __init__(
    self,
    argvs: Sequence[Sequence[str]],
    *,
    log_dir: Path,
    num_devices: int,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
    server: str | None = None,
  ):
    """Prepares, but does not start.

    Args:
      argvs: one command of `sys.executable` per rank.
      log_dir: where the logs go.
      num_devices: fake CPU devices per process.
      env: variables on top of this process's.
      fresh: starts a new interpreter for rank 0. Its `hash` of a string differs from the forked ranks'.
      server: the socket of the fork server; None takes the one that all processes use.
    """
    assert all(argv[0] == sys.executable for argv in argvs)
    self.argvs = argvs
    self._fresh, self._server = fresh, {} if server is None else {'server': server}
    self._log_paths = [log_dir / f'rank{rank}.log' for rank in range(len(argvs))]
    self._env = {
      **os.environ,
      'JAX_PLATFORMS': 'cpu',
      'JAX_NUM_CPU_DEVICES': str(num_devices),
      'PYTHONPATH': str(REPOSITORY),
      'PYTHONUNBUFFERED': '1',
      **(env or {}),
    }
    self._processes: list[subprocess.Popen[bytes]] = []
    self._end_times: dict[int, float] = {}
    self._start_time = 0.0

  def __enter__(self) -> 'Job':
    self._start_time = time.monotonic()
    try:
      for rank, (argv, log_path) in enumerate(zip(self.argvs, self._log_paths, strict=True)):
        with log_path.open('wb') as log:
          self._processes.append(
            binary.start_process(
              argv[1:],
              fresh=self._fresh and rank == 0,
              **self._server,
              env=self._env,
              stdin=subprocess.DEVNULL,
              stdout=log,
              stderr=subprocess.STDOUT,
              start_new_session=True,
            )
          )
    except BaseException:
      self._kill_all()
      raise
    return self

  def __exit__(self, *exc_info):
    self._kill_all()

  def log(self, rank: int) -> str:
    """What rank `rank` has written so far."""
    return self._log_paths[rank].read_text(errors='replace')

  def wait_for_text(self, rank: int, text: str, *, limit_s: float):
    """Returns once rank `rank` has written `text`; raises TimeoutError with its log if it ends, or takes too long."""
    limit = time.monotonic() + limit_s
    while text not in self.log(rank):
      has_ended = self._processes[rank].poll() is not None
      if time.monotonic() > limit or (has_ended and text not in self.log(rank)):
        raise TimeoutError(f'rank {rank} did not write {text!r} in {limit_s} s, but:\n{self.log(rank)}')
      time.sleep(_POLL_S)

  def send(self, rank: int, signum: signal.Signals):
    """Sends a signal to rank `rank` alone."""
    self._processes[rank].send_signal(signum)

  def wait(self, *, deadline_s: float) -> list[RankResult]:
    """Waits for all ranks and kills those that are still there at the deadline, counted from now."""
    limit = time.monotonic() + deadline_s
    while time.monotonic() < limit and self._poll():
      time.sleep(_POLL_S)
    stragglers = self._poll()
    orphans = [rank for rank in self._end_times if self._group_exists(rank)]
    self._kill_all()
    return [
      RankResult(
        returncode=process.returncode,
        seconds=self._end_times[rank],
        log=self.log(rank),
        was_killed=rank in stragglers,
        left_orphans=rank in orphans,
      )
      for rank, process in enumerate(self._processes)
    ]

  def _poll(self) -> list[int]:
    """The ranks that still run; notes when the others ended."""
    running = []
    for rank, process in enumerate(self._processes):
      if process.poll() is None:
        running.append(rank)
      else:
        self._end_times.setdefault(rank, time.monotonic() - self._start_time)
    return running

  def _group_exists(self, rank: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._processes[rank].pid, 0)
      return True
    return False

  def _kill_all(self):
    """Each rank's whole session, also where the rank itself has ended."""
    for process in self._processes:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for process in self._processes:
      process.wait()
    self._poll()


def run_ranks(
  command: Sequence[str],
  *,
  num_processes: int,
  num_devices: int,
  log_dir: Path,
  deadline_s: float,
  env: Mapping[str, str] | None = None,
) -> list[RankResult]:
  """Runs `python <command> --coordinator_address=... --num_processes=... --process_id=...` once per rank."""
  argvs = [[sys.executable, *command, *flags] for flags in coordinator_flags(num_processes=num_processes)]
  with Job(argvs, log_dir=log_dir, num_devices=num_devices, env=env) as job:
    return job.wait(deadline_s=deadline_s)
