"""RewardWorkers: calls users' reward functions and environments in processes of their own, with a time limit.

    names = ['my_lab.rewards:is_correct']                                   # see references.py
    with RewardWorkers(names, num_workers=2, timeout_s=10.0, code_directories=[Path.cwd()]) as workers:
      rewards = workers.rewards([(prompt, completion, record), ...])      # float64 [N, K]

A function takes (prompt, completion, record): the prompt as the data have it, the generated text, and all fields of the
prompt's record; it returns a number. One that raises, returns no finite number, takes longer than the limit, or whose
process dies twice costs its own result, which is NaN, and never the run: its process is replaced. Steps of an
environment (environments.py) are called in the same way.

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
_START_LIMIT_S = 120.0  # of a process, with the imports of the user's module


def load_reward(name: str, code_directories: Sequence[Path]) -> Any:
  """Returns the function `module:function`. Raises a UserError if it may not be imported (references.py), or cannot."""
  found = _load('reward', name, code_directories)
  if not callable(found) or inspect.isclass(found):
    raise UserError(f'reward {name!r} must name a function as module:function.')
  return found


def load_environment(name: str, code_directories: Sequence[Path]) -> Any:
  """Returns the class `module:Class`. Raises a UserError as `load_reward`, or if it lacks a method."""
  found = _load('environment', name, code_directories)
  lacking = [method for method in ('reset', 'step') if not callable(getattr(found, method, None))]
  if not inspect.isclass(found) or lacking:
    raise UserError(f'environment {name!r} must name a class as module:Class, with the methods reset and step.')
  return found


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
    raise ValueError(f'it returned {value!r}, which is no finite number of float32')
  return float(value)


def _play(environment: Any, record: Mapping[str, Any], completions: Sequence[str], state: Any) -> tuple[Any, ...]:
  """Answers the newest completion of an episode, or without any begins it: (messages, reward, done, state)."""
  made = environment()
  keeps = hasattr(made, 'state') and hasattr(made, 'restore')
  if keeps and completions:
    made.restore(state)
  else:
    messages = made.reset(record)
    for completion in completions[:-1]:
      made.step(completion)
  answer = made.step(completions[-1]) if completions else (messages, 0.0, False)
  if not isinstance(answer, Sequence) or len(answer) != 3:
    raise ValueError(f'its step returned {answer!r}, not (messages, reward, done)')
  messages, reward, done = answer
  if not done or messages:
    is_text = isinstance(messages, str) and messages
    if not is_text and not (isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages)):
      raise ValueError(f'it gave {messages!r} where a text or a list of messages must be')
  return messages or '', _reward(lambda: reward), bool(done), made.state() if keeps else None


def _work(
  functions: Sequence[str], environment: str | None, directories: Sequence[Path], link: connection.Connection
) -> None:
  """Answers calls until the other end is closed: (index of a function, call) -> (value, problem, is it of the code)."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the job, which ends this process
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
    # An OSError is of a service or a file, which may be there again.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
      link.send((None, f'{type(error).__name__}: {error}', not isinstance(error, OSError)))


class RewardWorkers:
  """The processes that call reward functions, and steps of an environment.

  Attributes:
    num_failed: calls so far without a result.
    last_problem: of the newest of them, in words.
    broken: the problem of a function whose code let all of its calls fail, in words; None without such a one. Of an
      environment its beginnings and its steps are two.
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
    """Starts the processes, which import the functions meanwhile. Raises a UserError if one cannot be imported here.

    Args:
      names: of the functions, `module:function`.
      environment: of a class, `module:Class`; None: there is none.
      num_workers: how many processes.
      timeout_s: what one call may take.
      code_directories: below which the functions and the class lie (references.py).
    """
    for name in names:
      load_reward(name, code_directories)
    self._given = (tuple(names), environment, tuple(code_directories))
    self._names = (*names, *([environment] if environment is not None else []))
    self._num_functions = len(names)
    self._timeout_s = timeout_s
    self._context = multiprocessing.get_context('spawn')
    self._workers: dict[connection.Connection, Any] = {}
    self.num_failed, self.last_problem = 0, ''
    self.broken: str | None = None
    self._answered: set[tuple[int, bool]] = set()  # functions that gave a result, and whether of an environment's step
    self._problems: dict[tuple[int, bool], str] = {}  # the newest of each function's code
    self._is_stopped = False
    for _ in range(num_workers):
      self._start()

  def __enter__(self) -> 'RewardWorkers':
    return self

  def __exit__(self, *exception: Any) -> None:
    for link in list(self._workers):
      self._stop(link)

  def stop(self) -> None:
    """Ends the processes, and soon any call of another thread, whose results are lost."""
    self._is_stopped = True
    for process in list(self._workers.values()):  # another thread may replace one
      process.kill()

  def rewards(self, calls: Sequence[Call]) -> np.ndarray:
    """Returns the results of all functions for all calls, float64 [N, K]; NaN where there is none."""
    found = self._results([(index, call) for call in calls for index in range(self._num_functions)])
    values = [np.nan if each is None else each for each in found]
    return np.array(values, np.float64).reshape(len(calls), self._num_functions)

  def steps(self, calls: Sequence[tuple[Mapping[str, Any], Sequence[str], Any]]) -> list[tuple[Any, ...] | None]:
    """Returns what the environment answers episodes, of each (record, completions so far, state); None if it fails.

    An answer is (messages, reward, done, state), the state None if the environment declares none.
    """
    return self._results([(self._num_functions, call) for call in calls])

  def _results(self, calls: Sequence[tuple[int, Any]]) -> list[Any]:
    """The results of calls, (number of the function, its arguments); None where there is none."""
    results: list[Any] = [None] * len(calls)
    waiting = deque(range(len(calls)))
    died: set[int] = set()  # calls whose process has died once, perhaps for another reason
    running: dict[connection.Connection, tuple[int, float]] = {}  # the call of a process, and when it is given up
    while (waiting or running) and not self._is_stopped:
      for link in [link for link in self._workers if link not in running]:
        if waiting:
          number = waiting.popleft()
          with contextlib.suppress(OSError):  # its process died: reading says so
            link.send(calls[number])
          running[link] = (number, time.monotonic() + self._timeout_s)
      soonest = min(deadline for _, deadline in running.values())
      ready = set(connection.wait(list(running), max(0.0, soonest - time.monotonic())))
      for link in [link for link in running if link in ready]:
        number, _ = running.pop(link)
        try:
          results[number], problem, is_of_code = link.recv()
        except (EOFError, OSError):
          self._replace(link)
          if number not in died:
            died.add(number)
            waiting.appendleft(number)
            continue
          problem, is_of_code = 'its process died', True
        self._note(calls[number], problem, is_of_code=is_of_code)
      for link in [link for link, (_, deadline) in running.items() if deadline <= time.monotonic()]:
        self._note(calls[running.pop(link)[0]], f'it took longer than {self._timeout_s:g} s', is_of_code=True)
        self._replace(link)
    self.broken = next((problem for part, problem in self._problems.items() if part not in self._answered), None)
    return results

  def _note(self, call: tuple[int, Any], problem: str | None, *, is_of_code: bool = False) -> None:
    index, (_, completions, _) = call
    part = index, index == self._num_functions and bool(completions)
    if problem is None:
      self._answered.add(part)
      return
    self.num_failed += 1
    self.last_problem = f'{self._names[index]}: {problem}'
    if is_of_code:
      self._problems[part] = self.last_problem

  def _start(self) -> None:
    ours, theirs = self._context.Pipe()
    process = self._context.Process(target=_work, args=(*self._given, theirs), daemon=True)
    process.start()
    theirs.close()
    self._workers[ours] = process
    if self._is_stopped:  # meanwhile
      process.kill()
    if not ours.poll(_START_LIMIT_S):
      raise UserError(f'a process for the rewards {self._names} did not start within {_START_LIMIT_S:g} s.')
    try:
      ours.recv()
    except EOFError:
      raise UserError(
        f'a process for the rewards {self._names} ended while it imported them: see its error above.'
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
