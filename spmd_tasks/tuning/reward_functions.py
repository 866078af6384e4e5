"""RewardWorkers: calls users' reward functions in processes of their own, with a time limit.

    with RewardWorkers({'my_lab.rewards:is_correct': 1.0}, num_workers=2, timeout_s=10.0) as workers:
      rewards = workers.rewards([(prompt, completion, record), ...])      # float64 [N, K]

A function takes (prompt, completion, record): the prompt as the data have it, the generated text, and all fields of the
prompt's record; it returns a number. One that raises, returns no finite number, takes longer than the limit, or whose
process dies costs its own result, which is NaN, and never the run: its process is replaced.

Shapes: N calls, K functions.
"""

from collections import deque
from collections.abc import Mapping, Sequence
import contextlib
import importlib
import math
import multiprocessing
from multiprocessing import connection
import numbers
import signal
import time
from typing import Any, NamedTuple

import numpy as np

from spmd_tasks.errors import UserError

Call = tuple[Any, str, Mapping[str, Any]]  # prompt, completion, record
_START_LIMIT_S = 120.0  # of a process, with the imports of the user's module


def load_reward(name: str) -> Any:
  """Returns the function `module:name`. Raises a UserError if it cannot be imported."""
  module, colon, function = name.partition(':')
  try:
    found = getattr(importlib.import_module(module), function) if colon else None
  except (ImportError, AttributeError, ValueError) as error:
    raise UserError(f'reward {name!r} cannot be imported: {error}.') from error
  if not callable(found):
    raise UserError(f'reward {name!r} must name a function as module:function, found from the current directory.')
  return found


def _work(names: Sequence[str], link: connection.Connection) -> None:
  """Answers calls until the other end is closed: (number, call, index of a function) -> (number, value, problem)."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the job, which ends this process
  functions = [load_reward(name) for name in names]
  link.send(None)
  while True:
    try:
      call, index = link.recv()
    except (EOFError, OSError):
      return
    try:
      value = functions[index](*call)
      if not isinstance(value, numbers.Real | np.bool_) or not math.isfinite(value):
        raise ValueError(f'it returned {value!r}, which is no finite number')
      link.send((float(value), None))
    except Exception as error:
      link.send((math.nan, f'{type(error).__name__}: {error}'))


class _Running(NamedTuple):
  """A call that a worker is at: its place in the results, and when it is given up."""

  place: tuple[int, int]
  deadline: float


class RewardWorkers:
  """The processes that call reward functions.

  Attributes:
    names: of the functions, `module:function`.
    num_failed: calls so far without a result.
    last_problem: of the newest of them, in words.
  """

  def __init__(self, names: Sequence[str], *, num_workers: int, timeout_s: float):
    """Starts the processes, which import the functions meanwhile. Raises a UserError if one cannot be imported here."""
    for name in names:
      load_reward(name)
    self.names = tuple(names)
    self._timeout_s = timeout_s
    self._context = multiprocessing.get_context('spawn')
    self._workers: dict[connection.Connection, Any] = {}
    self.num_failed, self.last_problem = 0, ''
    for _ in range(num_workers):
      self._start()

  def __enter__(self) -> 'RewardWorkers':
    return self

  def __exit__(self, *exception: Any) -> None:
    for link in list(self._workers):
      self._stop(link)

  def rewards(self, calls: Sequence[Call]) -> np.ndarray:
    """Returns the results of all functions for all calls, float64 [N, K]; NaN where there is none."""
    results = np.full((len(calls), len(self.names)), np.nan)
    waiting = deque((row, column) for row in range(len(calls)) for column in range(len(self.names)))
    running: dict[connection.Connection, _Running] = {}
    while waiting or running:
      for link in [link for link in self._workers if link not in running]:
        if waiting:
          place = waiting.popleft()
          self._send(link, (calls[place[0]], place[1]))
          running[link] = _Running(place, time.monotonic() + self._timeout_s)
      soonest = min(each.deadline for each in running.values())
      ready = set(connection.wait(list(running), max(0.0, soonest - time.monotonic())))
      for link in [link for link in running if link in ready]:
        place = running.pop(link).place
        try:
          results[place], problem = link.recv()
        except (EOFError, OSError):
          problem = 'its process died'
          self._replace(link)
        self._note(place, problem)
      for link in [link for link, each in running.items() if each.deadline <= time.monotonic()]:
        self._note(running.pop(link).place, f'it took longer than {self._timeout_s:g} s')
        self._replace(link)
    return results

  def _note(self, place: tuple[int, int], problem: str | None) -> None:
    if problem is not None:
      self.num_failed += 1
      self.last_problem = f'{self.names[place[1]]}: {problem}'

  def _send(self, link: connection.Connection, call: Any) -> None:
    with contextlib.suppress(OSError):  # its process died: reading says so
      link.send(call)

  def _start(self) -> None:
    ours, theirs = self._context.Pipe()
    process = self._context.Process(target=_work, args=(self.names, theirs), daemon=True)
    process.start()
    theirs.close()
    self._workers[ours] = process
    if not ours.poll(_START_LIMIT_S):
      raise UserError(f'a process for the rewards {self.names} did not start within {_START_LIMIT_S:g} s.')
    try:
      ours.recv()
    except EOFError:
      raise UserError(
        f'a process for the rewards {self.names} ended while it imported them: see its error above.'
      ) from None

  def _replace(self, link: connection.Connection) -> None:
    self._stop(link)
    self._start()

  def _stop(self, link: connection.Connection) -> None:
    process = self._workers.pop(link)
    link.close()
    process.kill()
    process.join()
