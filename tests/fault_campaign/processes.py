"""Jobs of two processes: one is killed, stopped, raises or is damaged, or another program connects.

Whatever happens, all are out in bounded time, nonzero, none by a signal of ours alone but the one that got it; and the
same commands go on, bit for bit.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import errno
import os
from pathlib import Path
import random
import re
import signal
import socket
import threading
import time

from spmd_tasks import exit_codes
from tests.fault_campaign import damage, judge
from tests.fault_campaign.catalogue import kind
from tests.fault_campaign.experiments import SAVE_INTERVAL
from tests.fault_campaign.injected import Point
from tests.fault_campaign.judge import check
from tests.fault_campaign.kills import CHANGES, PLACES, signal_at_place
from tests.fault_campaign.scene import DEADLINE_S, Ended, Scene, Started
from tests.multi_process.launch import coordinator_flags

LIMITS = ('--heartbeat_timeout_s', 15, '--shutdown_timeout_s', 5)
# From a fault until the last process is gone: the limits above and of `Pair`, and 30 s.
END_LIMIT_S = 60.0
GOOD_ENDS = (exit_codes.FAILED, exit_codes.STUCK, exit_codes.PEER_FAILED, -signal.SIGABRT)


class Pair:
  """Two running processes of the scene's job."""

  def __init__(self, scene: Scene, *flags: object, points: Mapping[int, Sequence[Point]] = {}, mode: str = 'train'):
    """`points` are the faults by rank."""
    self.scene = scene
    self.ranks: list[Started] = []
    for rank, own in enumerate(coordinator_flags(num_processes=2)):
      name = scene.free_name(f'rank_{rank}')
      self.ranks.append(
        scene.start(*scene.command(mode), *LIMITS, *flags, *own, points=points.get(rank, ()), name=name)
      )

  def finish(self, limit_s: float = END_LIMIT_S) -> list[Ended]:
    """Waits for both, which must end within the limit of each other."""
    end = time.monotonic() + DEADLINE_S
    while all(rank.is_running() for rank in self.ranks) and time.monotonic() < end:
      time.sleep(0.01)
    return [self.scene.finish(rank, limit_s) for rank in self.ranks]

  def wait_for_steps(self, number: int) -> bool:
    return self.scene.wait_until(self.ranks[0], lambda: self.scene.num_steps() >= number)


def check_ends(ended: Sequence[Ended], *, signalled: dict[int, int]) -> str:
  """Checks that the processes in `signalled` (rank -> signal) ended by it or properly, and all others properly."""
  for rank, result in enumerate(ended):
    codes = (*GOOD_ENDS, *([-signalled[rank]] if rank in signalled else []))
    check(
      result.returncode in codes, f'process {rank} ended with {result.returncode}: {judge.last_line(result.stderr)}'
    )
  return ', '.join(str(result.returncode) for result in ended)


def go_on(scene: Scene, *flags: object, max_lost: int = SAVE_INTERVAL) -> None:
  """Checks that the same two commands give the numbers of two undisturbed processes."""
  before = scene.steps()
  ended = Pair(scene, *flags).finish(DEADLINE_S)
  codes = [result.returncode for result in ended]
  check(codes == [exit_codes.OK] * 2, f'the restart ended with {codes}: {judge.sentence_of(ended[0])}')
  again = scene.steps()[len(before) :]
  if before and again:
    check(
      0 <= before[-1] - (again[0] - 1) <= max_lost, f'after step {before[-1]} the restart began with step {again[0]}'
    )
  scene.check_as_undisturbed()


def finished(scene: Scene, ended: Sequence[Ended]) -> bool:
  """Returns whether the job ended before the fault."""
  if any(result.returncode for result in ended):
    return False
  scene.check_as_undisturbed()
  return True


@kind('processes/one or both are killed', share=4)
def killed(scene: Scene) -> str:
  scene.job = 'Pair'
  ranks = scene.rng.choice(((0,), (1,), (1,), (0, 1)))
  wanted = scene.rng.randrange(0, 19)
  scene.where = f'processes {ranks} after step {wanted}'
  pair = Pair(scene)
  if not wanted:
    scene.pause(pair.ranks[0], scene.rng.uniform(0, 3))
  elif not pair.wait_for_steps(wanted):
    check(False, f'the job ended before step {wanted}: {judge.last_line(pair.ranks[0].stderr)}')
  for rank in ranks:
    pair.ranks[rank].send(signal.SIGKILL)
  ended = pair.finish()
  if finished(scene, ended):
    return 'the job was faster'
  # The end of process 0 ends the coordination service, which aborts the others.
  codes = check_ends(ended, signalled=dict.fromkeys(ranks, signal.SIGKILL))
  go_on(scene)
  return f'exit codes {codes}; went on, bit for bit'


@kind('processes/one is killed at a place of the code', share=2)
def killed_at_a_place(scene: Scene) -> str:
  scene.job = 'Pair'
  rank = scene.rng.choice((0, 0, 1))
  names = sorted(name for name in PLACES if any(word in name for word in ('save', 'manifest', 'pruned')))
  name = scene.rng.choice(names if rank == 0 else ('before a save', 'in mid-save'))
  point = signal_at_place(scene, name, signal.SIGKILL, count=scene.rng.randrange(2))
  scene.where = f'process {rank}: {name}, occurrence {point.count}'
  return _killed_by(scene, rank, point)


def _killed_by(scene: Scene, rank: int, point: Point) -> str:
  ended = Pair(scene, points={rank: [point]}).finish()
  if finished(scene, ended):
    return 'the place was passed too rarely'
  codes = check_ends(ended, signalled={rank: signal.SIGKILL})
  go_on(scene)
  return f'exit codes {codes}; went on, bit for bit'


@kind('processes/one raises', share=3)
def one_raises(scene: Scene) -> str:
  """One process raises, or gets a disk error: the other leaves with the reason."""
  scene.job = 'Pair'
  rank = scene.rng.randrange(2)
  if scene.rng.random() < 0.6:
    calls = ('spmd_tasks.programs.evaluator:Evaluator._evaluate_set', 'spmd_tasks.checkpoints:Checkpointer.save')
    call = scene.rng.choice(calls)
    point = Point(call=call, count=scene.rng.randrange(2), action='raise', value='this rank is cursed')
    scene.where = f'process {rank} in {call.rpartition(":")[2]}'
  else:
    count = scene.rng.randrange(2, 30)
    point = Point(operations=CHANGES, path='^job/checkpoints', count=count, action='error', value=errno.ENOSPC)
    scene.where = f'process {rank}: ENOSPC at operation {count}'
  ended = Pair(scene, points={rank: [point]}).finish()
  if finished(scene, ended):
    return 'the job did not notice'
  for result in ended:
    check(result.returncode in (*GOOD_ENDS, exit_codes.USAGE), f'exit code {result.returncode}')
  check(ended[rank].returncode in (exit_codes.FAILED, exit_codes.USAGE), f'the culprit: {ended[rank].returncode}')
  check('cursed' in ended[rank].stderr or 'No space' in ended[rank].stderr, 'the culprit does not say why')
  go_on(scene)
  return f'exit codes {[result.returncode for result in ended]}; went on, bit for bit'


@kind('processes/one is stopped', share=2)
def one_stopped(scene: Scene) -> str:
  """SIGSTOP: the other process names the stopped one within the watchdog's limit; then the launcher kills it."""
  scene.job = 'Pair'
  rank, wanted = scene.rng.randrange(2), scene.rng.randrange(1, 16)
  scene.where = f'process {rank} after step {wanted}'
  pair = Pair(scene)
  check(pair.wait_for_steps(wanted), f'ended before step {wanted}')
  pair.ranks[rank].send(signal.SIGSTOP)
  other = scene.finish(pair.ranks[1 - rank], END_LIMIT_S)
  continued = scene.rng.random() < 0.5
  pair.ranks[rank].send(signal.SIGCONT if continued else signal.SIGKILL)
  stopped = scene.finish(pair.ranks[rank], END_LIMIT_S)
  if other.returncode == stopped.returncode == exit_codes.OK:
    return 'the job was faster'
  check(other.returncode in GOOD_ENDS, f'the other one ended with {other.returncode}')
  check(stopped.returncode in (*GOOD_ENDS, -signal.SIGKILL), f'the stopped one ended with {stopped.returncode}')
  if other.returncode == exit_codes.STUCK:
    check(f'likely culprit: process {rank}' in other.stderr, 'the log does not name the stopped process')
  go_on(scene)
  return f'exit codes {other.returncode}, {stopped.returncode}; went on, bit for bit'


@kind('processes/SIGTERM or SIGINT', share=3)
def signals(scene: Scene) -> str:
  scene.job = 'Pair'
  signum = scene.rng.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGINT))
  ranks = scene.rng.choice(((0,), (1,), (0, 1)))
  wanted = scene.rng.randrange(1, 18)
  scene.where = f'{signum.name} to {ranks} after step {wanted}'
  pair = Pair(scene)
  check(pair.wait_for_steps(wanted), f'ended before step {wanted}')
  for rank in ranks:
    pair.ranks[rank].send(signum)
  ended = pair.finish()
  if finished(scene, ended):
    return 'the job was faster'
  codes = [result.returncode for result in ended]
  own = exit_codes.PREEMPTED if signum == signal.SIGTERM else exit_codes.INTERRUPTED
  wanted_codes = [own if rank in ranks else exit_codes.PREEMPTED for rank in range(2)]
  check(codes == wanted_codes, f'exit codes {codes} after {signum.name} to {ranks}')
  saved, seen = judge.complete_steps(scene.job_log_dir), scene.steps()
  check(saved and saved[-1] == seen[-1], f'exit codes {codes} after step {seen[-1]}, but the checkpoints are {saved}')
  for result in ended:  # a save that the other process's end broke off is named as that
    blamed = 'could not be saved' in result.stderr and 'another process has left' not in result.stderr
    check(not blamed, 'a save is blamed for the signal')
  go_on(scene)
  return f'exit codes {codes}; went on, bit for bit'


@kind('processes/a damaged checkpoint', share=2)
def damaged(scene: Scene) -> str:
  scene.job = 'Pair'
  step = scene.rng.choice((10, 15))
  scene.begun(step, step + 2)
  path = scene.rng.choice(damage.files_of(scene, step))
  name = scene.rng.choice(sorted(damage.DAMAGES))
  is_damaged = damage.changed(path, lambda: damage.DAMAGES[name](path, scene.rng))
  scene.where = f'{name}: {path.relative_to(scene.checkpoints)}'
  ended = Pair(scene).finish(DEADLINE_S)
  codes = [result.returncode for result in ended]
  check(codes == [exit_codes.OK] * 2, f'exit codes {codes}: {judge.sentence_of(ended[0])}')
  aside = [path.name for path in scene.checkpoints.iterdir() if '.damaged-' in path.name]
  check(bool(aside) == is_damaged, f'set aside: {aside}')
  scene.check_as_undisturbed()
  return f'{aside or "nothing"} set aside; went on, bit for bit'


def attack(port: int, rng: random.Random, stop: threading.Event) -> None:
  """Connects to a port repeatedly, and sends garbage, half a message, or nothing."""
  messages = (
    b'',
    b'GET / HTTP/1.1\r\n\r\n',
    b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n',
    b'{"secret": "x", "process": 1}\n',
    b'[' * 5000,
  )
  with contextlib.ExitStack() as stack:
    for _ in range(60):
      if stop.wait(0.05):
        return
      with contextlib.suppress(OSError):
        sock = stack.enter_context(socket.create_connection(('127.0.0.1', port), timeout=1))
        sock.sendall(rng.choice((*messages, rng.randbytes(rng.randrange(1, 3000)))))


@contextlib.contextmanager
def attacked(find_ports: Callable[[], set[int]], rng: random.Random):
  """Attacks every port that opens while the body runs."""
  stop, threads, known = threading.Event(), [], set()

  def look() -> None:
    for _ in range(1500):
      for port in find_ports() - known:
        known.add(port)
        threads.append(threading.Thread(target=attack, args=(port, rng, stop)))
        threads[-1].start()
      if stop.wait(0.02):
        return

  looking = threading.Thread(target=look)
  looking.start()
  try:
    yield known
  finally:
    stop.set()
    looking.join()
    for thread in threads:
      thread.join()


def listening_ports(pid: int) -> set[int]:
  """Returns the loopback TCP ports on which a process listens."""
  inodes, ports = set(), set()
  with contextlib.suppress(OSError):
    for fd in os.listdir(f'/proc/{pid}/fd'):
      with contextlib.suppress(OSError):
        match = re.fullmatch(r'socket:\[(\d+)\]', os.readlink(f'/proc/{pid}/fd/{fd}'))
        inodes |= {match[1]} if match else set()
    for table in ('tcp', 'tcp6'):
      for line in Path(f'/proc/{pid}/net/{table}').read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == '0A' and fields[9] in inodes:
          ports.add(int(fields[1].rpartition(':')[2], 16))
  return ports


@kind("processes/strangers at the job's ports", share=2)
def strangers(scene: Scene) -> str:
  """Garbage on all ports of the job, the coordinator's included: the job continues bit for bit, or refuses."""
  scene.job = 'Pair'
  pair = Pair(scene)
  pids = [rank.pid for rank in pair.ranks]
  with attacked(lambda: set().union(*map(listening_ports, pids)), random.Random(scene.rng.random())) as ports:
    ended = pair.finish(DEADLINE_S)
  scene.where = f'{len(ports)} ports'
  check(ports, 'no port was found')
  if finished(scene, ended):
    return 'not disturbed, bit for bit'
  codes = check_ends(ended, signalled={})
  judge.check_digests(scene.job_log_dir, scene.reference)
  go_on(scene)
  return f'exit codes {codes}; without strangers it went on, bit for bit'
