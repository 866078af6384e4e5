"""Lets the processes of a job agree on values (collectives.py); with one process, every call returns at once."""

from collections.abc import Callable
import json
from typing import Any

import jax


class PrimaryError(Exception):
  """Process 0 raised while it decided; the message is that of its error."""


def is_primary() -> bool:
  """Returns whether this is process 0, the only one that writes and prints."""
  return jax.process_index() == 0


def primary_decides(decide: Callable[[], Any], name: str, *, limit_s: int) -> Any:
  """Calls `decide` on process 0 and returns its value (JSON, of any length) on every process.

  Raises PrimaryError on every process of several, if `decide` raised on process 0; with one, what `decide` raised.
  """
  if jax.process_count() == 1:
    return decide()
  from spmd_tasks.distributed.collectives import barrier, broadcast

  outcome: dict[str, Any] = {}
  if jax.process_index() == 0:
    try:
      outcome = {'value': decide()}
    except Exception as error:
      outcome = {'error': str(error)[:2000]}
  barrier(name, limit_s=limit_s)
  outcome = json.loads(broadcast(json.dumps(outcome).encode()))
  if 'error' in outcome:
    raise PrimaryError(outcome['error'])
  return outcome['value']


def all_agree(vote: bool, name: str, *, limit_s: int) -> bool:
  """Returns on every process whether all processes vote True."""
  if jax.process_count() == 1:
    return vote
  from spmd_tasks.distributed.collectives import all_true

  return all_true(vote, name, limit_s=limit_s)
