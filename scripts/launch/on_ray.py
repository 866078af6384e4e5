"""Runs a supervised job on a Ray cluster: the same command once per node.

    ray job submit --working-dir . -- python scripts/launch/on_ray.py --hosts 3:4 --gpus 8 -- \
      spmd-tasks --exp lm.Dense1B --mode train --job_log_dir gs://bucket/runs/dense

Each node runs a task that takes all its GPUs. Ray starts the task of a node that dies on another node, once there is
one, and the job goes on with the others meanwhile. Ends with 0 once the job is done, else with the last exit code.
"""

import argparse
import subprocess
import sys

import ray


def run(command: list[str], hosts: str) -> int:
  """One node's supervisor."""
  own = ['--supervise', hosts, '--supervisor_address', ray.util.get_node_ip_address()]
  return subprocess.call([*command, *own])


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--hosts', metavar='MIN:MAX', required=True)
  parser.add_argument('--gpus', type=float, default=0, help='of each node')
  parser.add_argument('--cpus', type=float, default=1, help='that a task takes of each node; all of them without GPUs')
  parser.add_argument('command', nargs='+')
  args = parser.parse_args()
  ray.init()
  task = ray.remote(run).options(num_gpus=args.gpus, num_cpus=args.cpus, scheduling_strategy='SPREAD', max_retries=-1)
  waiting = [task.remote(args.command, args.hosts) for _ in range(int(args.hosts.partition(':')[2]))]
  code = 1
  while waiting:  # those for which there is no node wait until the job is done
    done, waiting = ray.wait(waiting)
    if (code := ray.get(done[0])) == 0:
      break
  return code


if __name__ == '__main__':
  sys.exit(main())
