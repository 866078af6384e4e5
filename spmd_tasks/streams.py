r"""Makes stdout and stderr tolerate write errors, and escapes the control characters that are printed.

tolerate_write_errors()  # text that cannot be written is dropped from here on
stdout_error()           # the first error on stdout, for commands whose output is their result
with escaped_output():   # names, paths and texts of files may come from anyone: they must not control the terminal
  print('\x1b[2J')       # prints \x1b[2J
"""

from collections.abc import Iterable, Iterator
import contextlib
import io
import os
import sys
from typing import Any


class _LossyFile(io.FileIO):
  """A file that drops failed writes; `error` is the first write's error."""

  error: OSError | None = None

  def write(self, data: Any) -> int:
    try:
      written = super().write(data)
      return len(data) if written is None else written  # None: it would block
    except OSError as error:
      self.error = self.error or error
      return len(data)


_files: dict[str, _LossyFile] = {}


def tolerate_write_errors() -> None:
  """Makes stdout and stderr drop text that cannot be written, and replaces closed standard streams by /dev/null.

  Otherwise the next opened file, such as a checkpoint's, could get descriptor 2, to which libraries write.
  """
  for descriptor in range(3):
    try:
      os.fstat(descriptor)
    except OSError:
      os.open(os.devnull, os.O_RDWR)
  for descriptor, name in ((1, 'stdout'), (2, 'stderr')):
    stream = getattr(sys, name)  # None if it was closed
    with contextlib.suppress(OSError, ValueError, AttributeError):
      stream.flush()
    _files[name] = _LossyFile(descriptor, 'w', closefd=False)
    buffer, encoding = io.BufferedWriter(_files[name]), getattr(stream, 'encoding', 'utf-8')
    setattr(sys, name, io.TextIOWrapper(buffer, encoding=encoding, errors='backslashreplace', line_buffering=True))


def stdout_error() -> OSError | None:
  """Returns the first error of a write to stdout; None if the reader has just closed the pipe, as `head` does."""
  error = _files['stdout'].error if _files else None
  return None if isinstance(error, BrokenPipeError) else error


# Control characters except tab and newline, line separators, and marks that reverse the direction of text.
_CONTROL = [*range(0x00, 0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, 0x2028, 0x2029]
_CONTROL += [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_ESCAPES = {code: chr(code).encode('unicode_escape').decode() for code in _CONTROL}


def escape(text: str) -> str:
  """Replaces control characters by Python's escapes, except tabs and newlines."""
  return text.translate(_ESCAPES)


class _EscapedStream:
  """A text stream that escapes control characters, except the cursor moves of tqdm's progress bars."""

  def __init__(self, stream: Any):
    self.stream = stream

  def write(self, text: str) -> int:
    moves = ''
    if text[:1] in ('\r', '\n', '\x1b') and sys._getframe(1).f_globals.get('__name__', '').startswith('tqdm.'):
      moves = text if not text.replace('\x1b[A', '').strip('\n') else '\r' * text.startswith('\r')
    self.stream.write(moves + escape(text[len(moves) :]))
    return len(text)

  def writelines(self, lines: Iterable[str]) -> None:
    for line in lines:
      self.write(line)

  def __getattr__(self, name: str) -> Any:
    return getattr(self.stream, name)


def unescaped(stream: Any) -> Any:
  """Returns the underlying stream, for our own colors."""
  return stream.stream if isinstance(stream, _EscapedStream) else stream


@contextlib.contextmanager
def escaped_output() -> Iterator[None]:
  """Context manager in which stdout and stderr escape control characters."""
  before = sys.stdout, sys.stderr
  sys.stdout, sys.stderr = (_EscapedStream(unescaped(stream)) for stream in before)
  try:
    yield
  finally:
    sys.stdout, sys.stderr = before
