"""Ends a command on SIGTERM or Ctrl-C while it has nothing to save: during its start and its end.

    leave_on_signals()                # the binary's first line
    ...                               # imports, restore, compilation: either signal ends the process at once
    with PreemptionGuard() as guard:  # replaces these handlers, and restores them afterwards

So a launcher that restarts preempted jobs also restarts a job that is preempted a second after its start. Only the
standard library is imported, so that the handlers are set early; before that, interrupt.py handles Ctrl-C.

Python runs a handler only when the main thread returns from native code, which may take minutes during a compilation.
So a thread waits for the byte that Python's C signal handler writes at once (`signal.set_wakeup_fd`).

A process that is connected to others does not leave alone: JAX handles SIGTERM, and Ctrl-C raises a KeyboardInterrupt,
which emergency_exit.py reports to the others.
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

_WAITS = b'\nspmd-tasks: Ctrl-C: ending after the current native call. Press again to leave at once.\n'
_TWICE = b'\nspmd-tasks: interrupted twice: left at once.\n'
_MAIN_THREAD_LIMIT_S = 1.0  # for the main thread to handle Ctrl-C; if it is in native code, it takes longer

_first_to_leave = threading.Lock()
_write_end: int | None = None  # of the pipe to the thread
_is_interrupted = False  # whether the main thread has handled Ctrl-C
_process: int | None = None  # the process that set the handlers, not a forked child


def leave_on_signals() -> None:
  """Makes SIGTERM and Ctrl-C end the process at once until other handlers are set; call this on the main thread.

  The exit codes are PREEMPTED and INTERRUPTED. Ctrl-C stays ignored if it was.
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
  """Returns the signals that make a server finish its requests and end; SIGHUP only if it is not ignored (nohup)."""
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
      if not select.select([read_end], [], [], _MAIN_THREAD_LIMIT_S)[0] and not _is_interrupted:
        say(_WAITS)


def _is_ours(signum: signal.Signals) -> bool:
  """Returns whether the signal still has the handler of this module."""
  return signal.getsignal(signum) in (_on_sigterm, _on_sigint)


def _has_peers() -> bool:
  """Returns whether this process is connected to others. JAX may not be imported yet, or only half."""
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
  """Ends a forked child by the signal's default action."""
  signal.signal(signum, signal.SIG_DFL)
  os.kill(os.getpid(), signum)


def _leave(sentence: bytes, code: int) -> None:
  """Ends the process; returns if another thread is already doing so."""
  if _first_to_leave.acquire(blocking=False):
    say(sentence)
    os._exit(code)


def say(sentence: bytes) -> None:
  """Writes to stderr from a signal handler; does nothing if that would block or fail."""
  with contextlib.suppress(OSError):
    if select.select([], [2], [], 0)[1]:  # a full pipe that nobody reads would block
      os.write(2, sentence)  # to the descriptor, as the signal may have interrupted a write to sys.stderr


def _wake(is_on: bool) -> None:
  """Turns the wakeup of the thread on or off around a fork, as a signal to the child would wake the parent's thread."""
  if _is_ours(signal.SIGTERM) and threading.current_thread() is threading.main_thread():
    signal.set_wakeup_fd(_write_end if is_on and _write_end is not None else -1, warn_on_full_buffer=False)
