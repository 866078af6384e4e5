"""Ends the binary by one line and INTERRUPTED when Ctrl-C comes, from its first line on.

    leave_on_sigint()      # before any other import

Only what Python has loaded itself is imported, so the line is reached within a millisecond. sigterm.py takes the signal
over. Before the first line, while Python starts, Ctrl-C is Python's: a traceback, or an end by the signal.
"""

import _signal  # `signal` itself takes 5 ms to import
import os

TYPE_CHECKING = False  # that of typing, which takes longer to import than all else here
if TYPE_CHECKING:
  from types import FrameType

CODE = 130  # INTERRUPTED of exit_codes.py, which the signal may find half imported
SENTENCE = b'spmd-tasks: interrupted with nothing to save; run the same command again.\n'


def leave_on_sigint() -> None:
  """Makes Ctrl-C end the process at once until another handler is set, unless it is ignored (`&` in a script)."""
  if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
    _signal.signal(_signal.SIGINT, _leave)


def _leave(signum: int, frame: 'FrameType | None') -> None:
  del signum, frame
  try:  # noqa: SIM105
    os.write(2, SENTENCE)
  except OSError:  # nobody reads it
    pass
  os._exit(CODE)
