"""RewardWorkers: calls users' reward functions and environments in separate processes, with a timeout.

    names = ['my_lab.rewards:is_correct']                                   # see spmd_tasks/references.py
    with RewardWorkers(names, num_workers=2, timeout_s=10.0, code_directories=[Path.cwd()]) as workers:
      rewards = workers.rewards([(prompt, completion, record), ...])      # float64 [N, K]

A function takes (prompt, completion, record): the prompt from the data, the generated text, and all fields of the
prompt's record. It returns a number. A call fails if it raises, returns no finite number, exceeds the timeout, or its
process dies twice: its result is NaN, the process is replaced, and the job continues. Steps of an environment
(environments.py) are called in the same way.

Shapes: N calls, K functions.
"""

from collections import deque
from collections.abc import Mapping, Sequence
import contextlib
import functools
import inspect
import multiprocessing
from multiprocessing import connection
import numbers
from pathlib import Path
import signal
import time
from typing import Any

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.references import load_reference

Call = tuple[Any, str, Mapping[str, Any]]  # prompt, completion, record
_START_LIMIT_S = 120.0  # for a process to start and import the user's module


def load_reward(name: str, code_directories: Sequence[Path]) -> Any:
  """Returns the function `module:function`. Raises a UserError if importing it fails or is not allowed."""
  function = _load('reward', name, code_directories)
  if not callable(function) or inspect.isclass(function):
    raise UserError(f'reward {name!r} must be a function, written module:function.')
  return function


def load_environment(name: str, code_directories: Sequence[Path]) -> Any:
  """Returns the class `module:Class`. Raises a UserError like `load_reward`, or if it lacks a method."""
  environment = _load('environment', name, code_directories)
  has_methods = all(callable(getattr(environment, method, None)) for method in ('reset', 'step'))
  if not inspect.isclass(environment) or not has_methods:
    raise UserError(f'environment {name!r} must be a class with the methods reset and step, written module:Class.')
  return environment


def _load(what: str, name: str, code_directories: Sequence[Path]) -> Any:
  try:
    return load_reference(name, code_directories) if ':' in name else None
  except UserError as error:
    raise UserError(f'{what} {name!r} cannot be imported: {error}') from error
  except (Exception, SystemExit) as error:
    raise UserError(f'{what} {name!r} cannot be imported: {type(error).__name__}: {error}.') from error


def _reward(function: Any, *call: Any) -> float:
  value = function(*call)
  if not isinstance(value, numbers.Real | np.bool_) or not abs(float(value)) < 1e38:
    raise ValueError(f'it returned {value!r}, which is not a finite float32')
  return float(value)


def _play(environment: Any, record: Mapping[str, Any], completions: Sequence[str], state: Any) -> tuple[Any, ...]:
  """Resets an environment, or steps it with the newest completion; returns (messages, reward, done, state)."""
  instance = environment()
  has_state = hasattr(instance, 'state') and hasattr(instance, 'restore')
  if has_state and completions:
    instance.restore(state)
  else:
    messages = instance.reset(record)
    for completion in completions[:-1]:
      instance.step(completion)
  answer = instance.step(completions[-1]) if completions else (messages, 0.0, False)
  if not isinstance(answer, Sequence) or len(answer) != 3:
    raise ValueError(f'its step returned {answer!r}, not (messages, reward, done)')
  messages, reward, done = answer
  if not done or messages:
    is_text = isinstance(messages, str) and messages
    if not is_text and not (isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)):
      raise ValueError(f'it returned {messages!r} instead of a text or a list of messages')
  return messages or '', _reward(lambda: reward), bool(done), instance.state() if has_state else None


def _work(
  functions: Sequence[str], environment: str | None, directories: Sequence[Path], link: connection.Connection
) -> None:
  """Answers calls until the connection closes: (index of the function, call) -> (value, problem, is a code error)."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the job ends this process
  callables: list[Any] = [functools.partial(_reward, load_reward(name, directories)) for name in functions]
  if environment is not None:
    callables.append(functools.partial(_play, load_environment(environment, directories)))
  link.send(None)
  while True:
    try:
      index, call = link.recv()
    except (EOFError, OSError):
      return
    try:
      link.send((callables[index](*call), None, False))
    # An OSError comes from a service or a file, which may work again later.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
      link.send((None, f'{type(error).__name__}: {error}', not isinstance(error, OSError)))


class RewardWorkers:
  """A pool of processes that call reward functions and an environment.

  Attributes:
    num_failed: how many calls have failed.
    last_problem: why the last of them failed.
    broken: why the code of a function has failed in all its calls; None if there is no such function. The reset and the
      step of an environment count as two functions.
  """

  def __init__(
    self,
    names: Sequence[str],
    *,
    environment: str | None = None,
    num_workers: int,
    timeout_s: float,
    code_directories: Sequence[Path],
  ):
    """Starts the processes. Raises a UserError if a function or the environment cannot be imported.

    Args:
      names: the functions, `module:function`.
      environment: the class of the environment, `module:Class`, or None.
      num_workers: how many processes to start.
      timeout_s: how many seconds a call may take.
      code_directories: the directories from which code may be imported (spmd_tasks/references.py).
    """
    for name in names:
      load_reward(name, code_directories)
    self._process_args = (tuple(names), environment, tuple(code_directories))
    self._names = (*names, *([environment] if environment is not None else []))
    self._num_functions = len(names)
    self._timeout_s = timeout_s
    self._context = multiprocessing.get_context('spawn')
    self._workers: dict[connection.Connection, Any] = {}
    self.num_failed, self.last_problem = 0, ''
    self.broken: str | None = None
    self._answered: set[tuple[int, bool]] = set()  # (function, is an environment's step) that have returned a result
    self._problems: dict[tuple[int, bool], str] = {}  # the last error in the code of each
    self._is_stopped = False
    for _ in range(num_workers):
      self._start()

  def __enter__(self) -> 'RewardWorkers':
    return self

  def __exit__(self, *exception: Any) -> None:
    for link in list(self._workers):
      self._stop(link)

  def stop(self) -> None:
    """Kills the processes; a call in another thread then returns without results."""
    self._is_stopped = True
    for process in list(self._workers.values()):  # a copy, because another thread may replace a process
      process.kill()

  def rewards(self, calls: Sequence[Call]) -> np.ndarray:
    """Returns the results of all functions for all calls, float64 [N, K]; NaN if a call fails."""
    results = self._results([(index, call) for call in calls for index in range(self._num_functions)])
    values = [np.nan if result is None else result for result in results]
    return np.array(values, np.float64).reshape(len(calls), self._num_functions)

  def steps(self, calls: Sequence[tuple[Mapping[str, Any], Sequence[str], Any]]) -> list[tuple[Any, ...] | None]:
    """Steps the environment for each (record, completions so far, state); resets it if there are no completions.

    Returns (messages, reward, done, state) for each call, or None if it fails. The state is None if the environment
    has none.
    """
    return self._results([(self._num_functions, call) for call in calls])

  def _results(self, calls: Sequence[tuple[int, Any]]) -> list[Any]:
    """Returns the results of (index of the function, arguments) calls; None if a call fails."""
    results: list[Any] = [None] * len(calls)
    waiting = deque(range(len(calls)))
    died: set[int] = set()  # calls whose process has died once, perhaps for another reason
    running: dict[connection.Connection, tuple[int, float]] = {}  # the call of each process, and its deadline
    while (waiting or running) and not self._is_stopped:
      for link in [link for link in self._workers if link not in running]:
        if waiting:
          number = waiting.popleft()
          with contextlib.suppress(OSError):  # if the process died, `recv` raises
            link.send(calls[number])
          running[link] = (number, time.monotonic() + self._timeout_s)
      next_deadline = min(deadline for _, deadline in running.values())
      ready = set(connection.wait(list(running), max(0.0, next_deadline - time.monotonic())))
      for link in [link for link in running if link in ready]:
        number, _ = running.pop(link)
        try:
          results[number], problem, is_code_error = link.recv()
        except (EOFError, OSError):
          self._replace(link)
          if number not in died:
            died.add(number)
            waiting.appendleft(number)
            continue
          problem, is_code_error = 'its process died', True
        self._record(calls[number], problem, is_code_error=is_code_error)
      for link in [link for link, (_, deadline) in running.items() if deadline <= time.monotonic()]:
        self._record(calls[running.pop(link)[0]], f'it took longer than {self._timeout_s:g} s', is_code_error=True)
        self._replace(link)
    self.broken = next((problem for key, problem in self._problems.items() if key not in self._answered), None)
    return results

  def _record(self, call: tuple[int, Any], problem: str | None, *, is_code_error: bool = False) -> None:
    """Counts a call that returned, or failed because of a problem."""
    index, (_, completions, _) = call
    key = index, index == self._num_functions and bool(completions)
    if problem is None:
      self._answered.add(key)
      return
    self.num_failed += 1
    self.last_problem = f'{self._names[index]}: {problem}'
    if is_code_error:
      self._problems[key] = self.last_problem

  def _start(self) -> None:
    ours, theirs = self._context.Pipe()
    process = self._context.Process(target=_work, args=(*self._process_args, theirs), daemon=True)
    process.start()
    theirs.close()
    self._workers[ours] = process
    if self._is_stopped:  # by another thread, which did not see this process
      process.kill()
    if not ours.poll(_START_LIMIT_S):
      raise UserError(
        f'a process for the rewards {self._names} did not import them within {_START_LIMIT_S:g} s: make their modules '
        'faster to import.'
      )
    try:
      ours.recv()
    except EOFError:
      raise UserError(
        f'a process for the rewards {self._names} failed to import them: correct the error above.'
      ) from None

  def _replace(self, link: connection.Connection) -> None:
    self._stop(link)
    if not self._is_stopped:
      self._start()

  def _stop(self, link: connection.Connection) -> None:
    process = self._workers.pop(link)
    link.close()
    process.kill()
    process.join()
