"""How the processes of a job wait for each other and agree; with one process nothing waits.

Long waits are at the coordination service, where a limit of their own holds, never inside a device collective. Every
process calls these in the same order.
"""

from collections.abc import Callable
import json
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np
import orbax.checkpoint as ocp

_BROADCAST_BYTES = 16384


class PrimaryError(Exception):
  """Process 0 could not decide; the message is that of its error."""


def meet(name: str, *, limit_s: int) -> None:
  """Returns when every process has called it; a JaxRuntimeError where that takes longer than `limit_s`."""
  if jax.process_count() > 1:
    ocp.multihost.get_barrier_sync_fn()(key=f'spmd_tasks_{name}', timeout_ms=limit_s * 1000)


def primary_decides(decide: Callable[[], Any], name: str, *, limit_s: int) -> Any:
  """What `decide` returns on process 0 (JSON), on every process.

  Raises:
    PrimaryError: on every process of several, if it raised on process 0; with one process, what it raised.
  """
  if jax.process_count() == 1:
    return decide()
  outcome: dict[str, Any] = {}
  if jax.process_index() == 0:
    try:
      outcome = {'value': decide()}
    except Exception as error:
      outcome = {'error': str(error)[:2000]}
  meet(name, limit_s=limit_s)
  encoded = json.dumps(outcome).encode().ljust(_BROADCAST_BYTES)
  received = multihost_utils.broadcast_one_to_all(np.frombuffer(encoded, np.uint8))
  outcome = json.loads(np.asarray(received).astype(np.uint8).tobytes())
  if 'error' in outcome:
    raise PrimaryError(outcome['error'])
  return outcome['value']


def all_agree(vote: bool, name: str, *, limit_s: int) -> bool:
  """Whether every process votes True, on every process."""
  if jax.process_count() == 1:
    return vote
  meet(name, limit_s=limit_s)
  return bool(np.all(multihost_utils.process_allgather(np.asarray(vote))))
