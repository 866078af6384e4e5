"""Prints to stderr what this process is doing during long work without progress of its own.

    set_activity('importing', say_now=True)
    with doing('compiling the train step'):     # `12:00:05 compiling the train step ... 5 s`, again every 4 s
      ...
    set_activity(None)                          # what follows prints its own progress

The environment variable SPMD_TASKS_QUIET turns it off. Only the first process of a job prints.
"""

from collections.abc import Callable, Iterator
import contextlib
import os
import sys
import threading
import time

_FIRST_S, _PERIOD_S, _POLL_S = 1.5, 4.0, 0.25

_Activity = str | Callable[[], str]
_activities: dict[object, tuple[_Activity, float]] = {}  # (activity, start time), the innermost last
_BASE = 'base'  # the key of the activity from set_activity
_last_s: float | None = None  # when the last line was printed
_thread: threading.Thread | None = None


def silence() -> None:
  """Stops the printing."""
  os.environ['SPMD_TASKS_QUIET'] = '1'


def is_silent() -> bool:
  """Returns whether nothing is printed."""
  return bool(os.environ.get('SPMD_TASKS_QUIET'))


def set_activity(activity: str | None, *, say_now: bool = False) -> None:
  """Sets what the process is doing outside of any `doing`; None prints nothing."""
  _activities.pop(_BASE, None)
  if activity is not None:
    _begin(_BASE, activity)
    if say_now:
      say(activity)


@contextlib.contextmanager
def doing(activity: _Activity) -> Iterator[None]:
  """Context manager or decorator around an activity; another thread calls a function for how far it is."""
  key = object()
  _begin(key, activity)
  try:
    yield
  finally:
    del _activities[key]


def _begin(key: object, activity: _Activity) -> None:
  global _thread
  _activities[key] = activity, time.monotonic()
  if not is_silent() and (_thread is None or not _thread.is_alive()):  # a fork ends threads
    _thread = threading.Thread(target=_say_periodically, name='activity', daemon=True)
    _thread.start()


def _say_periodically() -> None:
  busy_since = time.monotonic()
  while not is_silent():
    now, current = time.monotonic(), _current()
    if current is None:
      busy_since = now
    elif now - max(busy_since, _last_s or 0.0) >= (_FIRST_S if _last_s is None else _PERIOD_S):
      activity, begun = current
      say(f'{activity() if callable(activity) else activity} ... {now - begun:.0f} s')
    time.sleep(_POLL_S)


def _current() -> tuple[_Activity, float] | None:
  """Returns the innermost `doing`, or else the activity from set_activity."""
  activities = dict(_activities)  # a copy: another thread may change it
  base = activities.pop(_BASE, None)
  return next(reversed(activities.values()), base)


def say(text: str) -> None:
  """Prints one line, unless SPMD_TASKS_QUIET is set."""
  global _last_s
  if is_silent():
    return
  _last_s = time.monotonic()
  print_line(text)


def print_line(text: str) -> None:
  """Prints one line to stderr with the time of day, above a progress bar if there is one."""
  line, tqdm = f'{time.strftime("%H:%M:%S")} {text}', sys.modules.get('tqdm')
  with contextlib.suppress(OSError, ValueError, AttributeError):  # the stream is full, closed or missing
    tqdm.tqdm.write(line, file=sys.stderr) if tqdm else print(line, file=sys.stderr)  # above a progress bar
    sys.stderr.flush()
