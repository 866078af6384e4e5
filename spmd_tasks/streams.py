"""Keeps a command running where its output is lost: a closed stream, a full disk, a terminal or a reader that is gone.

lose_output()     # from here on, text that cannot be written is lost, and nothing else happens
lost_output()     # the error of the first loss on stdout, for the exit code of a command whose output is its purpose
"""

import contextlib
import io
import os
import sys
from typing import Any


class _LossyFile(io.FileIO):
  """A descriptor whose failed writes are lost; `error` is that of the first."""

  error: OSError | None = None

  def write(self, data: Any) -> int:
    try:
      written = super().write(data)
      return len(data) if written is None else written  # None: it would block
    except OSError as error:
      self.error = self.error or error
      return len(data)


_files: dict[str, _LossyFile] = {}


def lose_output() -> None:
  """Makes stdout and stderr lose what cannot be written; /dev/null takes the place of closed standard streams.

  The next files would get their numbers, and what libraries write to descriptor 2 would go into a checkpoint.
  """
  for descriptor in range(3):
    try:
      os.fstat(descriptor)
    except OSError:
      os.open(os.devnull, os.O_RDWR)
  for descriptor, name in ((1, 'stdout'), (2, 'stderr')):
    stream = getattr(sys, name)  # None where it was closed
    with contextlib.suppress(OSError, ValueError, AttributeError):
      stream.flush()
    _files[name] = _LossyFile(descriptor, 'w', closefd=False)
    buffer, encoding = io.BufferedWriter(_files[name]), getattr(stream, 'encoding', 'utf-8')
    setattr(sys, name, io.TextIOWrapper(buffer, encoding=encoding, errors='backslashreplace', line_buffering=True))


def lost_output() -> OSError | None:
  """The error of the first text that stdout lost; None too where a reader has left, such as `head`."""
  error = _files['stdout'].error if _files else None
  return None if isinstance(error, BrokenPipeError) else error
