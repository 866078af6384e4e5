"""Runs the binary with one fault at a chosen point of its code.

    python injected.py PLAN.json --exp ... --mode train ...

PLAN.json is a Plan. A point is a file operation below `root` (Python's audit events see every open, rename, mkdir,
remove, ... that Python code makes, Orbax's included) or a call of a named function. At the chosen occurrence of the
point an action happens: a signal to this process, an error in place of the operation, a full disk, a delay.
"""

from collections.abc import Callable
import dataclasses
import functools
import importlib
import json
import os
from pathlib import Path
import re
import runpy
import signal
import sys
import threading
import time
from typing import Any

_OPERATIONS = ('rename', 'remove', 'rmdir', 'mkdir', 'truncate', 'link', 'symlink')
NO_SUCH_POINT = 97  # the exit code where a plan names a function that is no more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
  """Where a fault happens, and what it is.

  Attributes:
    operations: of files: 'read', 'write' (opening for it), 'rename', ...; empty for a call.
    path: a regular expression for the path below the root; of a rename the old path.
    call: 'package.module:Class.method' or 'package.module:function', in place of operations.
    after: of a call: when it has returned rather than before.
    count: which occurrence, the first is 0.
    lasting: all later occurrences too.
    action: 'signal', 'error', 'fill', 'inodes', 'sleep' or 'raise'.
    value: the signal's number, the errno, [mount point, bytes or inodes left free], seconds, or the error's text.
    delay_s: the action happens in a thread so many seconds later.
  """

  operations: tuple[str, ...] = ()
  path: str = ''
  call: str = ''
  after: bool = False
  count: int = 0
  lasting: bool = False
  action: str
  value: Any = None
  delay_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """The faults of one process.

  Attributes:
    root: operations on other paths are not seen.
    points: each acts by itself.
    entered: a file that is made when the binary's code begins, for signals that are timed from there.
    recorded: a file that gets the operations in their order, one JSON list a line; None records nothing.
  """

  root: str
  points: tuple[Point, ...] = ()
  entered: str
  recorded: str | None = None


def read_plan(path: str) -> Plan:
  fields = json.loads(Path(path).read_text())
  points = [Point(**{**point, 'operations': tuple(point['operations'])}) for point in fields.pop('points')]
  return Plan(points=tuple(points), **fields)


class Occurrences:
  """Counts the occurrences of a point, and acts at the chosen one."""

  def __init__(self, point: Point, root: str):
    self._point = point
    self._root = root
    self._pattern = re.compile(point.path)
    self._num_seen = 0

  def see_operation(self, operation: str, path: str) -> None:
    if operation in self._point.operations and self._pattern.search(path):
      self.see(os.path.join(self._root, path))

  def see(self, path: str = '') -> None:
    number, self._num_seen = self._num_seen, self._num_seen + 1
    if number == self._point.count or (self._point.lasting and number > self._point.count):
      if self._point.delay_s:
        threading.Timer(self._point.delay_s, self._act, [path]).start()
      else:
        self._act(path)

  def _act(self, path: str) -> None:
    action, value = self._point.action, self._point.value
    if action == 'signal':
      os.kill(os.getpid(), value)
      if value == signal.SIGKILL:
        time.sleep(60)  # no thread gets further than this
    elif action == 'error':
      raise OSError(value, os.strerror(value), path)
    elif action == 'raise':
      raise RuntimeError(value)
    elif action == 'sleep':
      time.sleep(value)
    elif action in ('fill', 'inodes'):
      fill_disk(*value, inodes=action == 'inodes')
    else:
      raise ValueError(action)


_MOST_BYTES, _MOST_INODES = 1 << 26, 10_000  # of a disk that may be filled


def fill_disk(mount_point: str, left: int, *, inodes: bool) -> None:
  """Writes files until a small file system has only `left` bytes (rounded down to blocks) or inodes."""
  stats = os.statvfs(mount_point)
  if not os.path.ismount(mount_point) or stats.f_blocks * stats.f_frsize > _MOST_BYTES:
    raise RuntimeError(f'fault campaign: {mount_point} is no small file system of its own')
  fillers = Path(mount_point) / 'fillers'
  fillers.mkdir(exist_ok=True)
  if not inodes:
    with open(fillers / 'bytes', 'ab') as file:
      file.write(bytes(max(0, stats.f_bavail * stats.f_frsize - left)))
    return
  if stats.f_files > _MOST_INODES:
    raise RuntimeError(f'fault campaign: {mount_point} has too many inodes to fill')
  for number in range(stats.f_favail - left):
    (fillers / str(number)).touch()


def watch_operations(root: str, see: Callable[[str, str], None]) -> None:
  """Calls `see(operation, path)` before every file operation below `root`, which raises what `see` raises."""
  is_seeing = threading.local()

  def hook(event: str, args: tuple[Any, ...]) -> None:
    if event == 'open':
      path, _, flags = args
      operation = 'write' if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else 'read'
      directory = -1
    elif event.startswith('os.') and event[3:] in _OPERATIONS:
      operation, path = event[3:], args[0]
      directory = next((argument for argument in args[1:] if isinstance(argument, int) and argument > 2), -1)
    else:
      return
    if not isinstance(path, str | bytes | os.PathLike) or getattr(is_seeing, 'now', False):
      return
    is_seeing.now = True  # an action's own operations do not count
    try:
      text = os.fsdecode(path)
      if not text.startswith('/') and directory > 2 and operation in ('remove', 'rmdir'):
        text = os.path.join(os.readlink(f'/proc/self/fd/{directory}'), text)
      if text.startswith(root):
        see(operation, text.removeprefix(root).lstrip('/'))
    finally:
      is_seeing.now = False

  sys.addaudithook(hook)


def wrap(call: str, see: Callable[[], None], *, after: bool) -> None:
  """Calls `see` before or after every call of a function. Exits if there is no such function."""
  module, _, name = call.partition(':')
  *owners, last = name.split('.')
  try:
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    function = getattr(owner, last)
  except (ImportError, AttributeError) as error:
    print(f'fault campaign: there is no {call}: {error}', file=sys.stderr)
    sys.exit(NO_SUCH_POINT)

  @functools.wraps(function)
  def wrapped(*args, **kwargs):
    if not after:
      see()
    result = function(*args, **kwargs)
    if after:
      see()
    return result

  setattr(owner, last, wrapped)


def main(plan_path: str, flags: list[str]) -> None:
  plan = read_plan(plan_path)
  watched = [Occurrences(point, plan.root) for point in plan.points]
  sees = [watch.see_operation for watch in watched]
  if plan.recorded is not None:
    recorded = open(plan.recorded, 'w', buffering=1)  # noqa: SIM115
    sees.append(lambda operation, path: recorded.write(json.dumps([operation, path]) + '\n'))
  for point, watch in zip(plan.points, watched, strict=True):
    if point.call:
      wrap(point.call, watch.see, after=point.after)
  if plan.recorded is not None or any(point.operations for point in plan.points):

    def see_all(operation: str, path: str) -> None:
      for see in sees:
        see(operation, path)

    watch_operations(plan.root, see_all)
  sys.argv = ['spmd-tasks', *flags]
  sys.path[0] = os.getcwd()  # as `python -m` has it
  sys.modules.pop('spmd_tasks.main', None)
  Path(plan.entered).touch()
  runpy.run_module('spmd_tasks.main', run_name='__main__', alter_sys=True)


if __name__ == '__main__':
  main(sys.argv[1], sys.argv[2:])
