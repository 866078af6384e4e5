"""Runs a training job on a Ray cluster, one process per node, and restarts it if a node or a process is lost.

    ray job submit --working-dir . -- python scripts/launch/on_ray.py --hosts 4 --gpus 8 -- \
      spmd-tasks --exp lm.Dense1B --mode train --job_log_dir gs://bucket/runs/dense

Exits with 0 when the job is done, and with the job's exit code if it is 2 (a wrong flag) or the restarts are used up.
"""

import argparse
import socket
import subprocess
import sys

import ray
from ray.exceptions import RayError

OK, FAILED, USAGE = 0, 1, 2


class Host:
  """One process of the job, on a node of its own."""

  def coordinator_address(self) -> str:
    with socket.socket() as free:
      free.bind(('', 0))
      return f'{ray.util.get_node_ip_address()}:{free.getsockname()[1]}'

  def run(self, command: list[str]) -> int:
    return subprocess.call(command)


def run_once(args: argparse.Namespace) -> int:
  """Runs all processes to their end; returns the largest exit code, FAILED if a node was lost."""
  options = {'num_gpus': args.gpus, 'num_cpus': args.cpus, 'scheduling_strategy': 'SPREAD'}
  hosts = [ray.remote(Host).options(**options).remote() for _ in range(args.hosts)]
  try:
    address = ray.get(hosts[0].coordinator_address.remote())
    flags = ['--coordinator_address', address, '--num_processes', str(args.hosts)]
    running = [host.run.remote([*args.command, *flags, '--process_id', str(i)]) for i, host in enumerate(hosts)]
    return max(code if code >= 0 else FAILED for code in ray.get(running))
  except RayError as error:
    print(f'lost a node: {error}', file=sys.stderr)
    return FAILED
  finally:
    for host in hosts:
      ray.kill(host)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--hosts', type=int, required=True, help='how many processes')
  parser.add_argument('--gpus', type=float, default=0, help='of each node')
  parser.add_argument('--cpus', type=float, default=1, help='that a process takes of each node')
  parser.add_argument('--max_restarts', type=int, default=40)
  parser.add_argument('command', nargs='+')
  args = parser.parse_args()
  ray.init()
  code = FAILED
  for _ in range(1 + args.max_restarts):
    if (code := run_once(args)) in (OK, USAGE):
      break
  return code


if __name__ == '__main__':
  sys.exit(main())
