"""Supervised hosts over loopback, of which any can be killed; as a program, many kills at random moments.

python -m tests.operations.hosts DIRECTORY --kills 50
"""

import argparse
import contextlib
import json
import os
from pathlib import Path
import random
import signal
import subprocess
import sys
import time

from etils import epath

from spmd_tasks.store_files import read_growing
from tests import xla_settings
from tests.binary import run_binary

REPOSITORY = Path(__file__).resolve().parents[2]
METRICS = ('loss', 'accuracy', 'grad_norm', 'weight_norm')


class Hosts:
  """Hosts of one job, numbered as they are started; all end with the context."""

  def __init__(
    self, directory: Path, *flags: str, hosts: str = '1:4', experiment: str = 'Job', job: epath.Path | None = None
  ):
    self.directory, self.job = directory, job or epath.Path(directory / 'job')
    self.experiment = f'tests.operations.supervised_experiments.{experiment}'
    own = f'--mode train --num_fake_devices 1 --supervisor_address 127.0.0.1 --supervise {hosts}'.split()
    named = ['--exp', self.experiment, '--job_log_dir', str(self.job)]
    self._command = [sys.executable, '-m', 'spmd_tasks.main', *named, *own, *flags]
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
    env = {**os.environ, **own}
    with (self.directory / f'host{host}.log').open('wb') as log:
      self.supervisors.append(subprocess.Popen(self._command, env=env, stdout=log, stderr=log, start_new_session=True))
    return host

  def training_process(self, host: int) -> int | None:
    """The pid of a host's training process."""
    for child in self.processes(host):
      with contextlib.suppress(OSError):
        if os.readlink(f'/proc/{child}/fd/0') == '/dev/null':  # the next one waits for a line there
          return child
    return None

  def processes(self, host: int) -> list[int]:
    """The pids of a host's training process and of the next one."""
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

  def wait_until(self, is_so, limit_s: float) -> float:
    """Waits until `is_so()`; returns the seconds, or raises with the logs."""
    began = time.monotonic()
    while not is_so():
      if time.monotonic() - began > limit_s:
        logs = '\n'.join(f'--- host {host}\n{self.log(host)[-3000:]}' for host in range(len(self.supervisors)))
        raise TimeoutError(f'not within {limit_s} s:\n{logs}')
      time.sleep(0.05)
    return time.monotonic() - began

  def num_lines(self) -> int:
    """How many steps have been logged, those made again included."""
    return len(metric_lines(self.job))

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
  command += ['--set', 'train_input.slow_s=0', '--set', 'checkpoint_every_steps=None']
  done = run_binary(*command, '--num_train_steps', max(line['step'] for line in lines), *flags, limit_s=600)
  assert done.returncode == 0, done.stderr
  expected = {line['step']: line for line in metric_lines(reference)}
  assert {line['step'] for line in lines} == set(expected), 'a step is missing'
  pairs = [(line[name], expected[line['step']][name]) for line in lines for name in METRICS]
  return max(abs(found - right) / abs(right or 1) for found, right in pairs)


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('directory', type=Path)
  parser.add_argument('--kills', type=int, default=50)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()
  args.directory.mkdir(parents=True)
  rng, times, cpu, mesh = random.Random(args.seed), [], [], '--ici_mesh_shape=1,4,1'
  os.environ.update({**xla_settings.ENVIRONMENT, **os.environ})
  with Hosts(args.directory, '--num_train_steps', '100000', mesh) as hosts:
    for _ in range(4):
      hosts.start()
    hosts.wait_for_lines(6, 300)
    for kill in range(1, args.kills + 1):
      time.sleep(rng.uniform(0, 20))
      before, host = hosts.num_lines(), rng.choice(hosts.alive())
      what = rng.choice(['host', 'host', 'process', 'supervisor'])
      is_spare = hosts.training_process(host) is None
      spent = hosts.cpu_seconds()
      hosts.kill(host, supervisor=what != 'process', process=what != 'supervisor')
      seconds = hosts.wait_until(lambda before=before: hosts.num_lines() > before, 300)
      used = sum(now - spent.get(pid, 0) for pid, now in hosts.cpu_seconds().items())
      if not is_spare:
        times.append(seconds)
        cpu.append(used)
      told = f'{kill}: {what} {host}{", a spare" * is_spare}; on after {seconds:.1f} s with {hosts.alive()}'
      print(f'{told}, {used:.1f} CPU s, load {os.getloadavg()[0]:.0f}', flush=True)
      while len(hosts.alive()) < rng.choice([3, 4]):
        hosts.start()
    difference = stop_and_compare(hosts, '--num_fake_devices', '4', mesh)
  mean, cpu_mean = sum(times) / len(times), sum(cpu) / len(cpu)
  print(f'{len(times)} kills of hosts that trained: on after {mean:.1f} s, at most {max(times):.1f} s', end='; ')
  print(f'all processes took {cpu_mean:.1f} CPU s, at most {max(cpu):.1f} s; {difference=:.1e}')


if __name__ == '__main__':
  main()
