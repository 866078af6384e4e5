"""DecodedFile: outputs of one checkpoint for one set of prompts, one line per prompt in their order.

While it grows it has `.partial` behind its name; a job that is started again keeps the lines that are whole and goes on
behind them.
"""

from collections.abc import Mapping, Sequence
import json
import os
from typing import Any

from etils import epath

from spmd_tasks.checkpoints.durable_files import is_remote, sync_path, write_durably
from spmd_tasks.errors import UserError


class DecodedFile:
  """A JSON lines file of the given requests; process 0 has it, for all processes.

  A remote file (`gs://...`) appears when it is complete: object stores cannot append.
  """

  def __init__(self, path: epath.Path, requests: Sequence[Mapping[str, Any]]):
    self._path = path
    self._partial = path.parent / f'{path.name}.partial'
    self._requests = requests
    self._remote_lines: list[str] = []
    self._file: Any = None

  def num_done(self) -> int:
    """How many of the requests have their line already, the first ones; half a line is cut off.

    Raises:
      UserError: the file is of other prompts or settings.
    """
    if self._path.exists():
      return self._check(self._path, self._path.read_bytes(), is_complete=True)
    if not self._partial.exists():
      return 0
    content = self._partial.read_bytes()
    whole = content[: content.rfind(b'\n') + 1]
    num_done = self._check(self._partial, whole, is_complete=False)
    if whole != content:
      os.truncate(self._partial, len(whole))
    return num_done

  def _check(self, path: epath.Path, content: bytes, *, is_complete: bool) -> int:
    lines = content.splitlines()
    is_same = len(lines) == len(self._requests) if is_complete else len(lines) <= len(self._requests)
    try:
      is_same = is_same and all(
        json.loads(line)['request'] == request for line, request in zip(lines, self._requests, strict=False)
      )
    except (ValueError, KeyError, TypeError):
      is_same = False
    if not is_same:
      raise UserError(
        f'{path} holds outputs of other prompts or settings: move it away, or give the prompts another name (or '
        '--decode_output another file).'
      )
    return len(lines)

  def append(self, record: Mapping[str, Any]) -> None:
    """Writes the next line; a killed process loses none."""
    line = json.dumps(record, ensure_ascii=False) + '\n'
    if is_remote(self._path):
      self._remote_lines.append(line)
      return
    if self._file is None:
      self._partial.parent.mkdir(parents=True, exist_ok=True)
      self._file = self._partial.open('a', encoding='utf-8')
    self._file.write(line)
    self._file.flush()

  def finish(self) -> None:
    """All requests have their line."""
    if is_remote(self._path):
      self._path.parent.mkdir(parents=True, exist_ok=True)
      write_durably(self._path, ''.join(self._remote_lines))
      return
    self.close()
    sync_path(self._partial)
    os.replace(self._partial, self._path)
    sync_path(self._path.parent)

  def close(self) -> None:
    """Idempotent."""
    if self._file is not None:
      self._file.close()
      self._file = None
