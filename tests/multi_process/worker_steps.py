"""One process of a job that averages over a mesh, step by step, and fails when told to: for test_faults.py."""

import argparse
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from spmd_tasks import exit_codes
from spmd_tasks.distributed import DistributedSettings, EmergencyExit, initialize
from spmd_tasks.distributed.initialization import finish
from spmd_tasks.distributed.preemption import PreemptionGuard
from spmd_tasks.distributed.rank_records import open_rank_records
from spmd_tasks.distributed.watchdog import StepWatchdog

HOUR_S = 3600.0
ALL = -1  # For --fault_rank.


def commit(fault: str):
  """Does to this process what the test asks for."""
  match fault:
    case 'raise':
      raise ArithmeticError('this step is cursed')
    case 'hang':
      time.sleep(HOUR_S)
    case 'stop':
      os.kill(os.getpid(), signal.SIGSTOP)
    case 'kill':
      os.kill(os.getpid(), signal.SIGKILL)
    case 'sigterm':
      os.kill(os.getpid(), signal.SIGTERM)
    case _:
      raise ValueError(f'unknown fault {fault!r}')


def run(args: argparse.Namespace, emergency: EmergencyExit):
  settings = DistributedSettings(
    coordinator_address=args.coordinator_address,
    num_processes=args.num_processes,
    process_id=args.process_id,
    heartbeat_timeout_s=args.heartbeat_timeout_s,
    shutdown_timeout_s=2,
    collective_timeout_s=int(HOUR_S),
  )
  initialize(settings)
  records = open_rank_records(args.job_log_dir) if jax.process_count() > 1 else None
  if records is not None:
    emergency.attach(records.describe)

  mesh = jax.make_mesh((jax.device_count(),), ('data',), axis_types=(AxisType.Auto,))
  sharding = NamedSharding(mesh, P('data'))
  step_fn = jax.jit(lambda x, step: jnp.mean(x) * (step + 1), out_shardings=NamedSharding(mesh, P()))
  x = jax.make_array_from_callback((mesh.size,), sharding, lambda index: np.arange(mesh.size, dtype=np.float32)[index])

  watchdog = StepWatchdog(
    timeout_s=args.watchdog_timeout_s,
    first_step_timeout_s=60,
    emergency=emergency,
    records=records,
    record_period_s=0.5,
  )
  with watchdog, PreemptionGuard() as guard:
    for step in range(args.num_steps):
      watchdog.beat(step, 'input')
      time.sleep(args.step_s)
      if args.fault and step == args.fault_step and args.fault_rank in (jax.process_index(), ALL):
        commit(args.fault)
      watchdog.beat(step)
      loss = float(step_fn(x, step))
      print(f'step {step} loss {loss}', flush=True)
      if guard.should_stop():
        with watchdog.allow('checkpoint', limit_s=20):
          if args.fault_rank in (jax.process_index(), ALL):
            os.kill(os.getpid(), signal.SIGTERM)  # An impatient scheduler, in the middle of the save.
          time.sleep(1.5)
          print(f'saved at {step}', flush=True)
          finish()
        sys.exit(exit_codes.PREEMPTED)
    with watchdog.allow('finish', limit_s=60):
      if jax.process_index() == args.fault_rank:
        time.sleep(args.late_s)
      finish()
  if jax.process_index() == args.fault_rank:
    time.sleep(args.late_s)
  print('done', flush=True)


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('--coordinator_address')
  parser.add_argument('--num_processes', type=int)
  parser.add_argument('--process_id', type=int)
  parser.add_argument('--job_log_dir', required=True)
  parser.add_argument('--num_steps', type=int, default=8)
  parser.add_argument('--step_s', type=float, default=0.0)
  parser.add_argument('--fault', default='')
  parser.add_argument('--fault_rank', type=int, default=1)
  parser.add_argument('--fault_step', type=int, default=4)
  parser.add_argument('--watchdog_timeout_s', type=float, default=HOUR_S)
  parser.add_argument('--heartbeat_timeout_s', type=int, default=int(HOUR_S))
  parser.add_argument(
    '--late_s', type=float, default=0.0, help='work that one process does after the last step, and again at its end'
  )
  args = parser.parse_args()
  emergency = EmergencyExit()
  with emergency.on_failure():
    run(args, emergency)


if __name__ == '__main__':
  main()
