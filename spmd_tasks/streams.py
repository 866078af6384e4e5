r"""The standard streams of a command: what cannot be written is lost, and what would steer a terminal is escaped.

lose_output()            # from here on, text that cannot be written is lost, and nothing else happens
lost_output()            # the error of the first loss on stdout, for a command whose output is its purpose
with escaped_output():   # names, paths and texts of files may come from anyone: they neither colour nor overwrite lines
  print('\x1b[2J')       # prints \x1b[2J
"""

from collections.abc import Iterable, Iterator
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


# Control characters but tab and newline, line separators, and the marks that reverse the direction of what follows.
_STEERING = [*range(0x00, 0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F, 0x2028, 0x2029]
_STEERING += [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_ESCAPES = {code: chr(code).encode('unicode_escape').decode() for code in _STEERING}


def escape(text: str) -> str:
  """Replaces the characters that steer a terminal by their escapes (in Python's form); tabs and newlines stay."""
  return text.translate(_ESCAPES)


class _EscapedStream:
  """A text stream that escapes what is written, apart from a progress bar's moves to the beginning of its line."""

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
  """Returns the stream behind one that escapes, for colours of our own."""
  return stream.stream if isinstance(stream, _EscapedStream) else stream


@contextlib.contextmanager
def escaped_output() -> Iterator[None]:
  """Context in which stdout and stderr escape what is written to them."""
  before = sys.stdout, sys.stderr
  sys.stdout, sys.stderr = (_EscapedStream(unescaped(stream)) for stream in before)
  try:
    yield
  finally:
    sys.stdout, sys.stderr = before
