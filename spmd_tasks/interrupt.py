"""Ends the binary on Ctrl-C with one line and the exit code INTERRUPTED, from the first moment.

    leave_on_sigint()      # before any other import

Imports only modules that Python itself has loaded, so the handler is set within a millisecond. sigterm.py replaces it
later. Before that, while Python starts, Ctrl-C gives a traceback, or ends the process by the signal.
"""

import _signal  # `signal` itself takes 5 ms to import
import os

TYPE_CHECKING = False  # as in typing, which takes longer to import than everything else here
if TYPE_CHECKING:
  from types import FrameType

CODE = 130  # INTERRUPTED of exit_codes.py, which may be half imported when the signal arrives
SENTENCE = b'spmd-tasks: interrupted with nothing to save; run the same command again.\n'


def leave_on_sigint() -> None:
  """Makes Ctrl-C end the process at once until another handler is set, unless it is ignored (`&` in a script)."""
  if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
    _signal.signal(_signal.SIGINT, _leave)


def _leave(signum: int, frame: 'FrameType | None') -> None:
  del signum, frame
  try:  # noqa: SIM105
    os.write(2, SENTENCE)
  except OSError:  # stderr is closed
    pass
  os._exit(CODE)
