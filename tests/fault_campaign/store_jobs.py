"""Runs jobs in one process: for each line of stdin, [flags, file for stderr], prints the exit code.

Most of a short job's time is the start of its process and its compilation, which these jobs share.
"""

import json
import os
import sys
import traceback

import fiddle as fdl
import optax

from spmd_tasks.learning import FromOptax
from spmd_tasks.programs import job_lock
from tests import binary
from tests.fault_campaign import experiments

DEAD_AFTER_S = 3.0  # in place of a minute
job_lock.HEARTBEAT_PERIOD_S, job_lock.HEARTBEAT_TIMEOUT_S = DEAD_AFTER_S / 8, DEAD_AFTER_S


class Plain(experiments.Plain):
  """A fast job with few arrays."""

  seconds_per_batch = 0.0

  def task(self):
    task = super().task()
    task.learner.ema_decay = None
    task.learner.optimizer = fdl.Config(FromOptax, factory=optax.sgd, learning_rate=0.01)
    return task


def main() -> None:
  out = os.fdopen(os.dup(1), 'w')
  for line in sys.stdin:
    flags, path = json.loads(line)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
      os.dup2(file, descriptor)
    os.close(file)
    try:
      code = binary.run_in_process(*flags)
    except BaseException:
      traceback.print_exc()
      code = 1
    sys.stderr.flush()
    print(code, file=out, flush=True)


if __name__ == '__main__':
  main()
