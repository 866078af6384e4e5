"""Barriers and exchanges of values between the processes of a job; with one process, every call returns at once.

Long waits happen in a barrier of the coordination service, which has a time limit, never inside a device collective.
Every process must call these functions in the same order.
"""

from collections.abc import Callable
import json
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from spmd_tasks.distributed.initialization import coordination

_MIN_BROADCAST_BYTES = 16384  # shorter values share one compiled broadcast
_MIN_GATHER_BYTES = 1024  # per process


class PrimaryError(Exception):
  """Process 0 raised in `primary_decides`; has the message of its error."""


def is_primary() -> bool:
  """Returns whether this is process 0, the only process that writes and prints."""
  return jax.process_index() == 0


def barrier(name: str, *, limit_s: int) -> None:
  """Waits until every process has called this. Raises a JaxRuntimeError after `limit_s` seconds."""
  if jax.process_count() > 1:
    coordination().client.wait_at_barrier(f'spmd_tasks_{name}', limit_s * 1000)


def gather(value: Any, name: str, *, limit_s: int) -> list[Any]:
  """Returns the `value` (JSON, of any length) of every process, in order of their indices, on every process."""
  data = json.dumps(value).encode()
  if jax.process_count() == 1:
    return [json.loads(data)]
  barrier(name, limit_s=limit_s)
  longest = int(np.max(multihost_utils.process_allgather(np.asarray(len(data), np.int32))))
  buffer = np.zeros(max(_MIN_GATHER_BYTES, 1 << (longest - 1).bit_length()), np.uint8)
  buffer[: len(data)] = np.frombuffer(data, np.uint8)
  rows = np.asarray(multihost_utils.process_allgather(buffer)).astype(np.uint8)
  return [json.loads(row.tobytes().rstrip(b'\0')) for row in rows]


def _broadcast(data: bytes) -> bytes:
  """Returns the bytes of process 0 on every process.

  Sends the length first, as the buffer of a collective must have one shape on all processes.
  """
  length = int(multihost_utils.broadcast_one_to_all(np.asarray(len(data), np.int32)))
  buffer = np.zeros(max(_MIN_BROADCAST_BYTES, 1 << (length - 1).bit_length()), np.uint8)
  if jax.process_index() == 0:
    buffer[:length] = np.frombuffer(data, np.uint8)
  received = multihost_utils.broadcast_one_to_all(buffer)
  return np.asarray(received).astype(np.uint8).tobytes()[:length]


def primary_decides(decide: Callable[[], Any], name: str, *, limit_s: int) -> Any:
  """Calls `decide` on process 0 and returns its value (JSON, of any length) on every process.

  Raises a PrimaryError on every process if `decide` raises on process 0; a single process just calls `decide`.
  """
  if jax.process_count() == 1:
    return decide()
  outcome: dict[str, Any] = {}
  if jax.process_index() == 0:
    try:
      outcome = {'value': decide()}
    except Exception as error:
      outcome = {'error': str(error)[:2000]}
  barrier(name, limit_s=limit_s)
  outcome = json.loads(_broadcast(json.dumps(outcome).encode()))
  if 'error' in outcome:
    raise PrimaryError(outcome['error'])
  return outcome['value']
