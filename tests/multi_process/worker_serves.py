"""One process of a server whose engine has no model, but runs a collective in each step: for test_attacks.py."""

import argparse
import contextlib
import dataclasses
import functools
import time

import jax
from jax.experimental import multihost_utils
import numpy as np

from spmd_tasks.distributed import DistributedSettings, EmergencyExit, barrier, initialize
from spmd_tasks.serving.links import connect_to_primary
from spmd_tasks.serving.multi_process import follow, lead
from spmd_tasks.serving.server import listen, run_server
from spmd_tasks.serving.settings import ServerSettings
from tests.serving.fake_engine import FakeEngine
from tests.serving.served import MODEL

STEP_S = 0.02
MAX_LEN = 1000


class Engine(FakeEngine):
  """Waits for the other processes in each step, as a model that is spread over them does."""

  def step(self, keep, *args, **named):
    time.sleep(STEP_S)
    multihost_utils.process_allgather(np.asarray(keep))
    return super().step(keep, *args, **named)


def restore(step):
  return 0, step or 7


def run(args: argparse.Namespace, emergency: EmergencyExit) -> int:
  initialize(
    DistributedSettings(
      coordinator_address=args.coordinator_address,
      num_processes=args.num_processes,
      process_id=args.process_id,
      shutdown_timeout_s=2,
    )
  )
  links = connect_to_primary(limit_s=60, silence_limit_s=args.silence_limit_s)
  leave = functools.partial(emergency.leave, has_stacks=False, is_cause=False)
  if jax.process_index() > 0:
    code = follow(Engine(max_len=MAX_LEN), links[0], restore=restore, leave=leave)
  else:
    settings = ServerSettings(port=0, api_key='secret', drain_s=2.0)
    model = dataclasses.replace(MODEL, max_len=MAX_LEN)
    announce = functools.partial(print, flush=True)
    with (
      contextlib.closing(listen(settings)) as sock,
      lead(Engine(max_len=MAX_LEN), links, restore=restore, leave=leave) as leader,
    ):
      code = run_server(leader, model, settings, sock, announce=announce, stop=leader.stop, leave=leader.leave)
      leader.end(code)
  barrier('serve_end', limit_s=30)
  return code


if __name__ == '__main__':
  parser = argparse.ArgumentParser()
  parser.add_argument('--coordinator_address')
  parser.add_argument('--num_processes', type=int)
  parser.add_argument('--process_id', type=int)
  parser.add_argument('--silence_limit_s', type=float, default=20.0)
  emergency = EmergencyExit()
  with emergency.on_failure():
    raise SystemExit(run(parser.parse_args(), emergency))
