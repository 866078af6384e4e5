"""Rounds: the sets of hosts that train together, one after another, agreed on by conditional writes.

    <job_log_dir>/supervisors/round_000003.json    the hosts of round 3, in the order of their process ids

A file appears whole and is never replaced, so of several supervisors that propose a round one succeeds, and supervisors
that do not reach one another cannot both train.
"""

from collections.abc import Collection, Mapping, Sequence
import json
import os
import re
import secrets
from typing import Any

from etils import epath

from spmd_tasks.files import glob_below, is_remote, read_text


def newest_round(directory: epath.Path) -> int:
  """The number of the newest round; 0 if there is none."""
  numbers = [re.fullmatch(r'round_(\d+)\.json', path.name) for path in glob_below(directory, 'round_*.json')]
  return max((int(number[1]) for number in numbers if number), default=0)


def read_round(directory: epath.Path, number: int) -> dict[str, Any] | None:
  """The hosts and the coordinator of a round; None if it has not been agreed on."""
  try:
    return json.loads(read_text(directory / f'round_{number:06}.json'))
  except FileNotFoundError:
    return None


def propose_round(directory: epath.Path, number: int, hosts: Sequence[str], coordinator: str) -> None:
  """Makes a round of these hosts, unless another one has been agreed on."""
  token = secrets.token_hex(8)
  data = json.dumps({'hosts': list(hosts), 'coordinator': coordinator, 'token': token}).encode()
  path = directory / f'round_{number:06}.json'
  if is_remote(path):
    from spmd_tasks.stores import create

    create(path, data)
    return
  partial = directory / f'.{token}.partial'
  partial.write_bytes(data)
  try:
    os.link(partial, path)  # fails if the path is there
  except FileExistsError:
    pass
  finally:
    partial.unlink()


def choose_hosts(
  ready: Mapping[str, Sequence[Any]], previous: Sequence[str], sizes: Collection[int], limits: tuple[int, int]
) -> list[str]:
  """Returns the hosts of the next round in the order of their process ids; [] if too few are ready.

  Hosts of the previous round keep their order, so that copies in memory stay where they are looked for.

  Args:
    ready: the hosts that can train, with a sort key for those that are new.
    previous: the hosts of the previous round.
    sizes: the numbers of hosts that the job fits; empty: not known yet, all do.
    limits: the smallest and the largest number of hosts.
  """
  stayed = [host for host in previous if host in ready]
  order = stayed + sorted(set(ready) - set(stayed), key=lambda host: (*ready[host], host))
  fitting = [size for size in range(limits[0], min(limits[1], len(order)) + 1) if not sizes or size in sizes]
  return order[: max(fitting)] if fitting else []
