"""Says on stderr what this process is doing, while it does something that takes long and prints nothing itself.

    set_activity('importing', say_now=True)
    with doing('compiling the train step'):     # `12:00:05 compiling the train step ... 5 s`, again after 5 s more
      ...
    set_activity(None)                          # what follows prints its own progress

The environment variable SPMD_TASKS_QUIET turns it off, as processes other than the first do.
"""

from collections.abc import Iterator
import contextlib
import os
import sys
import threading
import time

_FIRST_S, _PERIOD_S, _POLL_S = 1.5, 4.0, 0.25

_activities: dict[object, tuple[str, float]] = {}  # what is being done and since when, the innermost last
_BASE = 'base'  # the key of that of set_activity
_last_s: float | None = None  # when something was said
_thread: threading.Thread | None = None


def silence() -> None:
  """Says nothing from now on."""
  os.environ['SPMD_TASKS_QUIET'] = '1'


def set_activity(what: str | None, *, say_now: bool = False) -> None:
  """Sets what the process is doing wherever it is not within a `doing`; None: nothing to speak of."""
  _activities.pop(_BASE, None)
  if what is not None:
    _begin(_BASE, what)
    if say_now and not _is_silent():
      _say(what)


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
  """Context in which the process is doing `what`."""
  key = object()
  _begin(key, what)
  try:
    yield
  finally:
    del _activities[key]


def _begin(key: object, what: str) -> None:
  global _thread
  _activities[key] = what, time.monotonic()
  if not _is_silent() and (_thread is None or not _thread.is_alive()):  # threads do not outlive a fork
    _thread = threading.Thread(target=_tell, name='activity', daemon=True)
    _thread.start()


def _is_silent() -> bool:
  return bool(os.environ.get('SPMD_TASKS_QUIET'))


def _tell() -> None:
  busy_since = time.monotonic()
  while not _is_silent():
    now, current = time.monotonic(), _current()
    busy_since = busy_since if current else now
    for what, begun in current:
      if now - max(busy_since, _last_s or 0.0) >= (_FIRST_S if _last_s is None else _PERIOD_S):
        _say(f'{what} ... {now - begun:.0f} s')
    time.sleep(_POLL_S)


def _current() -> list[tuple[str, float]]:
  activities = list(_activities.items())
  return [each for key, each in activities if key != _BASE][-1:] or [each for _, each in activities]


def _say(text: str) -> None:
  global _last_s
  _last_s = time.monotonic()
  line, tqdm = f'{time.strftime("%H:%M:%S")} {text}', sys.modules.get('tqdm')
  with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream that is full, closed or missing
    tqdm.tqdm.write(line, file=sys.stderr) if tqdm else print(line, file=sys.stderr)  # above a bar, if there is one
    sys.stderr.flush()
