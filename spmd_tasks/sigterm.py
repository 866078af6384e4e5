"""Ends a command that is told to end (SIGTERM, Ctrl-C) while it has nothing to save: as it starts, and as it ends.

    leave_on_signals()                # the binary's first line
    ...                               # imports, restoring, compilation: either signal ends the process at once
    with PreemptionGuard() as guard:  # its handlers take the place of ours, and give it back afterwards

A launcher that starts preempted jobs again then does so, too, where the signal came a second after the start. Only the
standard library is imported, so that little time passes before the first line; interrupt.py answers Ctrl-C before it.

A handler of Python runs when the main thread comes back from native code, which may be minutes later in a compilation.
So a thread waits for the byte that Python's own signal handler writes at once (`signal.set_wakeup_fd`).

A process that is connected to others does not leave alone: JAX takes SIGTERM, and Ctrl-C raises KeyboardInterrupt, of
which emergency_exit.py tells the others.
"""

import contextlib
import os
import select
import signal
import sys
import threading
import types

from spmd_tasks import exit_codes, interrupt

_SENTENCE = b'spmd-tasks: preempted by SIGTERM with nothing to save; run the same command again.\n'

_WAITS = b'\nspmd-tasks: Ctrl-C: ending as soon as what runs now returns; again: leaving at once.\n'
_TWICE = b'\nspmd-tasks: interrupted twice: left at once.\n'
_PATIENCE_S = 1.0  # within which the main thread has answered Ctrl-C, unless it is in native code

_first_to_leave = threading.Lock()
_write_end: int | None = None  # of the pipe to the thread
_is_interrupted = False  # whether the main thread has answered Ctrl-C
_process: int | None = None  # the process that the handlers are for, rather than a child that was forked from it


def leave_on_signals() -> None:
  """Makes SIGTERM and Ctrl-C end the process at once until other handlers are set; call it on the main thread.

  SIGTERM ends it with PREEMPTED, Ctrl-C, unless that is ignored, with INTERRUPTED.
  """
  global _process, _write_end
  _process = os.getpid()
  signal.signal(signal.SIGTERM, _on_sigterm)
  if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, _on_sigint)
  if _write_end is not None:
    return
  read_end, _write_end = os.pipe()
  os.set_blocking(_write_end, False)
  signal.set_wakeup_fd(_write_end, warn_on_full_buffer=False)
  os.register_at_fork(
    before=lambda: _wake(False), after_in_parent=lambda: _wake(True), after_in_child=lambda: _wake(False)
  )
  threading.Thread(target=_watch, args=(read_end,), name='sigterm', daemon=True).start()


def ending_signals() -> list[signal.Signals]:
  """What asks a server to end in order: also SIGHUP, of a terminal that closes, unless it is ignored (nohup)."""
  is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
  return [signal.SIGTERM, signal.SIGINT, *([] if is_ignored else [signal.SIGHUP])]


def _watch(read_end: int) -> None:
  num_interrupts = 0
  while numbers := os.read(read_end, 64):
    if signal.SIGTERM in numbers and _is_ours(signal.SIGTERM):
      _leave(_SENTENCE, exit_codes.PREEMPTED)
    if signal.SIGINT in numbers and _is_ours(signal.SIGINT):
      if not _has_peers():
        _leave(interrupt.SENTENCE, exit_codes.INTERRUPTED)
      num_interrupts += numbers.count(signal.SIGINT)
      if num_interrupts > 1:
        _leave(_TWICE, exit_codes.INTERRUPTED)
      if not select.select([read_end], [], [], _PATIENCE_S)[0] and not _is_interrupted:
        say(_WAITS)


def _is_ours(signum: signal.Signals) -> bool:
  """Whether nobody has set another handler, who then answers the signal."""
  return signal.getsignal(signum) in (_on_sigterm, _on_sigint)


def _has_peers() -> bool:
  """Whether this process is connected to others; does not import JAX, and JAX may be half imported."""
  distributed = getattr(sys.modules.get('jax'), 'distributed', None)
  return distributed is not None and distributed.is_initialized()


def _on_sigterm(signum: int, frame: types.FrameType | None) -> None:
  del frame
  if os.getpid() == _process:
    _leave(_SENTENCE, exit_codes.PREEMPTED)
  else:
    _end_child(signum)


def _on_sigint(signum: int, frame: types.FrameType | None) -> None:
  global _is_interrupted
  del frame
  if os.getpid() != _process:
    _end_child(signum)
  elif not _has_peers():
    _leave(interrupt.SENTENCE, exit_codes.INTERRUPTED)
  elif _is_interrupted:
    _leave(_TWICE, exit_codes.INTERRUPTED)
  else:
    _is_interrupted = True
    raise KeyboardInterrupt


def _end_child(signum: int) -> None:
  """Ends a forked child as any process ends."""
  signal.signal(signum, signal.SIG_DFL)
  os.kill(os.getpid(), signum)


def _leave(sentence: bytes, code: int) -> None:
  """Ends the process, or returns if another thread is just doing that."""
  if _first_to_leave.acquire(blocking=False):
    say(sentence)
    os._exit(code)


def say(sentence: bytes) -> None:
  """Writes to stderr from a signal handler, or does nothing where that would block or fail."""
  with contextlib.suppress(OSError):
    if select.select([], [2], [], 0)[1]:  # nobody may be reading, and a full pipe would block
      os.write(2, sentence)  # the descriptor, as the signal may have come while sys.stderr was in use


def _wake(is_on: bool) -> None:
  """Switches the thread's waking off around a fork, because a signal to the child would wake the parent's thread."""
  if _is_ours(signal.SIGTERM) and threading.current_thread() is threading.main_thread():
    signal.set_wakeup_fd(_write_end if is_on and _write_end is not None else -1, warn_on_full_buffer=False)
