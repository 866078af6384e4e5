"""Supervised hosts over loopback, of which any can be killed.

python -m tests.operations.hosts DIRECTORY --kills 50

As a program it kills hosts of four at random moments: while the job starts, trains, saves, takes in a host, or goes on
after the kill before. The exit code is 0 if each time a step was made within a minute of the last kill, and if every
metric of every step, each time that it was made, is that of an undisturbed run up to rounding: a row that is lost, or
comes twice, changes the loss by a percent.
"""

import argparse
import collections
import contextlib
import json
import os
from pathlib import Path
import random
import re
import signal
import statistics
import subprocess
import sys
import time

from etils import epath

from spmd_tasks.store_files import read_growing
from tests import forked, xla_settings
from tests.binary import run_binary, start_process
from tests.operations.forked_supervisor import PIDS

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0  # from a kill to the next step
METRICS = ('loss', 'loss_weight', 'grad_norm', 'weight_norm')  # not accuracy: rounding decides near ties


class Hosts:
  """Hosts of one job, numbered as they are started; all end with the context."""

  def __init__(
    self, directory: Path, *flags: str, hosts: str = '1:4', experiment: str = 'Job', job: epath.Path | None = None
  ):
    self.directory, self.job = directory, job or epath.Path(directory / 'job')
    self.experiment = f'tests.operations.supervised_experiments.{experiment}'
    own = f'--mode train --num_fake_devices 1 --supervisor_address 127.0.0.1 --supervise {hosts}'.split()
    named = ['--exp', self.experiment, '--job_log_dir', str(self.job)]
    # Supervisors and their processes are forked too, so that none of them imports anything (tests/fork_server.py).
    module = 'tests.operations.forked_supervisor' if forked.is_running() else 'spmd_tasks.main'
    self._command = ['-m', module, *named, *own, *flags]
    self.supervisors: list[subprocess.Popen] = []

  def __enter__(self) -> 'Hosts':
    return self

  def __exit__(self, *exc_info):
    for host in range(len(self.supervisors)):
      self.kill(host)

  def start(self, rank: int | None = None) -> int:
    """Starts a host, by default with its number as its rank; returns its number."""
    host = len(self.supervisors)
    path = os.pathsep.join([str(REPOSITORY), os.environ.get('PYTHONPATH', '')])
    own = {'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu', 'SLURM_PROCID': str(host if rank is None else rank)}
    own[PIDS] = str(self._pids(host))
    env = {**os.environ, **own}
    with (self.directory / f'host{host}.log').open('wb') as log:
      started = start_process(self._command, env=env, stdout=log, stderr=log, start_new_session=True)
    self.supervisors.append(started)
    return host

  def training_process(self, host: int) -> int | None:
    """The pid of a host's training process."""
    for child in self.processes(host):
      with contextlib.suppress(OSError):
        if os.readlink(f'/proc/{child}/fd/0') == '/dev/null':  # the next one waits for a line there
          return child
    return None

  def _pids(self, host: int) -> Path:
    return self.directory / f'host{host}.pids'

  def processes(self, host: int) -> list[int]:
    """The pids of a host's training process and of the next one."""
    if self._pids(host).exists():  # forked ones are the server's children
      pids = map(int, self._pids(host).read_text().split())
      return [pid for pid in pids if Path(f'/proc/{pid}').exists()]
    pid = self.supervisors[host].pid
    with contextlib.suppress(OSError):
      return [int(child) for child in Path(f'/proc/{pid}/task/{pid}/children').read_text().split()]
    return []

  def kill(self, host: int, *, supervisor: bool = True, process: bool = True) -> None:
    """Kills a host's training process, its supervisor, or both, as when the host is lost."""
    pid = self.training_process(host)
    if supervisor:
      self.supervisors[host].kill()
      self.supervisors[host].wait()
    if process and pid is not None:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

  def cpu_seconds(self) -> dict[int, float]:
    """Of each process that trains, or waits to train, since its start."""
    seconds = {}
    for pid in (pid for host in self.alive() for pid in self.processes(host)):
      with contextlib.suppress(OSError):
        ticks = map(int, Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[11:13])
        seconds[pid] = sum(ticks) / os.sysconf('SC_CLK_TCK')
    return seconds

  def alive(self) -> list[int]:
    return [host for host, each in enumerate(self.supervisors) if each.poll() is None]

  def log(self, host: int) -> str:
    return (self.directory / f'host{host}.log').read_text(errors='replace')

  def round(self) -> tuple[int, dict[int, int]]:
    """The newest round that hosts of this test are in, and rank -> host."""
    rounds = collections.defaultdict(dict)
    for host in range(len(self.supervisors)):
      for number, rank in re.findall(r'round (\d+): process (\d+) of', self.log(host)):
        rounds[int(number)][int(rank)] = host
    return max(rounds.items(), default=(0, {}))

  def wait_until(self, is_so, limit_s: float, every_s: float = 0.05) -> float:
    """Waits until `is_so()`; returns the seconds, or raises with the logs."""
    began = time.monotonic()
    while not is_so():
      if time.monotonic() - began > limit_s:
        logs = '\n'.join(f'--- host {host}\n{self.log(host)[-3000:]}' for host in range(len(self.supervisors)))
        raise TimeoutError(f'not within {limit_s} s:\n{logs}')
      time.sleep(every_s)
    return time.monotonic() - began

  def num_lines(self) -> int:
    """How many steps have been logged, those made again included."""
    with contextlib.suppress(FileNotFoundError):
      return read_growing(self.job / 'metrics.jsonl').count(b'\n')
    return 0

  def wait_for_lines(self, count: int, limit_s: float) -> float:
    return self.wait_until(lambda: self.num_lines() >= count, limit_s)


def metric_lines(job: epath.Path) -> list[dict]:
  """Every line of metrics.jsonl on a disk or in a store, steps that were made twice twice; [] if there is none yet."""
  try:
    lines = read_growing(job / 'metrics.jsonl').splitlines(keepends=True)
  except FileNotFoundError:
    return []
  return [json.loads(line) for line in lines if line.endswith(b'\n')]


def stop_and_compare(hosts: Hosts, *flags: str) -> float:
  """Ends all hosts by SIGTERM; returns the largest relative difference of a metric from the undisturbed job.

  All steps are compared, each time that they were made. Other rows in a step change its loss by a percent and more.
  """
  for host in hosts.alive():
    hosts.supervisors[host].send_signal(signal.SIGTERM)
  hosts.wait_until(lambda: not hosts.alive(), 120)
  lines = metric_lines(hosts.job)
  reference = epath.Path(hosts.directory / 'reference')
  command = ['--exp', hosts.experiment, '--mode', 'train', '--job_log_dir', reference]
  command += ['--set', 'train_input.seconds_per_batch=0', '--set', 'checkpoint_every=None']
  done = run_binary(*command, '--num_train_steps', max(line['step'] for line in lines), *flags, limit_s=600)
  assert done.returncode == 0, done.stderr
  expected = {line['step']: line for line in metric_lines(reference)}
  assert {line['step'] for line in lines} == set(expected), 'a step is missing'
  pairs = [(line[name], expected[line['step']][name]) for line in lines for name in METRICS]
  return max(abs(found - right) / abs(right or 1) for found, right in pairs)


class Kills:
  """Kills hosts of a running job at drawn moments, one after the other, and sees how it goes on."""

  def __init__(self, hosts: Hosts, rng: random.Random):
    self.hosts, self.rng = hosts, rng
    self.lines: list[dict] = []
    self._is_on = True  # whether a step was made since the last kill

  def moment(self) -> str:
    """Draws when the next kill is, and waits for it."""
    if not self.lines:
      supervisors = self.hosts.directory / 'job/supervisors'
      self.hosts.wait_until(lambda: len([*supervisors.glob('host_*.json')]) == 4, 60)
      self._sleep(10)
      return 'start'
    if not self._is_on:
      self._sleep(8)
      return 'restart'
    moment = self.rng.choice(['any', 'any', 'save', 'new round'])
    if moment == 'any':
      self._sleep(20)
    elif moment == 'save':
      checkpoints = self.hosts.directory / 'job/checkpoints'
      self.hosts.wait_for_lines(self.hosts.num_lines() + self.rng.choice([0, 8, 16]), 200)
      self.hosts.wait_until(lambda: [*checkpoints.glob('*.partial')], 60, every_s=0.002)
      self._sleep(0.1)
    else:  # a host joins, unless all are there
      number, _ = self.hosts.round()
      with contextlib.suppress(TimeoutError):
        self.hosts.wait_until(lambda: self.hosts.round()[0] > number, 40)
      self._sleep(6)
    return moment

  def _sleep(self, at_most_s: float) -> None:
    time.sleep(self.rng.uniform(0, at_most_s))

  def kill(self) -> dict:
    """Kills one host, its process or its supervisor alone; waits, with one exception of three, for the next step."""
    hosts, rng, moment = self.hosts, self.rng, self.moment()
    number, ranks = hosts.round()
    alive = hosts.alive()
    host = ranks[0] if ranks.get(0) in alive and rng.random() < 0.3 else rng.choice(alive)
    what = rng.choice(['host', 'host', 'process', 'supervisor'])
    # A job whose processes die again and again without a checkpoint ends, as it should; and there may be none just now.
    again = bool(self.lines) and self.lines[-1]['what'] == 'process'
    if what == 'process' and (again or hosts.training_process(host) is None):
      what = 'host'
    rank = {number: rank for rank, number in ranks.items()}.get(host)
    before = hosts.cpu_seconds()
    hosts.kill(host, supervisor=what != 'process', process=what != 'supervisor')
    line = {'kill': len(self.lines) + 1, 'moment': moment, 'what': what, 'host': host, 'process': rank}
    self.lines.append(line)
    self._is_on = rng.random() > 0.3 or len(hosts.alive()) < 3
    if self._is_on:
      if rank is not None:  # no spare; a step that was on its way does not count
        seconds = hosts.wait_until(lambda: hosts.round()[0] > number, 300, every_s=0.1)
        steps = hosts.num_lines()
        line['seconds'] = round(seconds + hosts.wait_until(lambda: hosts.num_lines() > steps, 300), 1)
      line['cpu_seconds'] = round(sum(now - before.get(pid, 0) for pid, now in hosts.cpu_seconds().items()), 1)
      while len(hosts.alive()) < rng.choice([3, 4, 4, 4]):
        hosts.start()
    return line | {'load': round(os.getloadavg()[0], 1), 'alive': hosts.alive()}


def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument('directory', type=Path)
  parser.add_argument('--kills', type=int, default=50)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()
  args.directory.mkdir(parents=True)
  os.environ.update({**xla_settings.ENVIRONMENT, **os.environ})
  with Hosts(args.directory, '--num_train_steps', '100000', experiment='Text') as hosts:
    for _ in range(4):
      hosts.start()
    kills = Kills(hosts, random.Random(args.seed))
    while len(kills.lines) < args.kills:
      print(json.dumps(kills.kill()), flush=True)
    hosts.wait_for_lines(hosts.num_lines() + 2, 100)
    difference = stop_and_compare(hosts, '--num_fake_devices', '4')
    num_steps, num_made = len({line['step'] for line in metric_lines(hosts.job)}), hosts.num_lines()
  on = [line for line in kills.lines if 'seconds' in line]
  total = {'kills': len(kills.lines), 'of_process_0': sum(line['process'] == 0 for line in kills.lines)}
  total |= {'moments': collections.Counter(line['moment'] for line in kills.lines)}
  for name in ('seconds', 'cpu_seconds'):
    total |= {name: {'median': statistics.median(line[name] for line in on), 'worst': max(line[name] for line in on)}}
  total |= {'steps': num_steps, 'made_again': num_made - num_steps, 'difference': difference}
  print(json.dumps(total))
  return 0 if total['seconds']['worst'] < LIMIT_S and difference < 2e-4 else 1


if __name__ == '__main__':
  sys.exit(main())
