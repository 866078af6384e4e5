"""Reads metrics.jsonl (metrics.py), and makes one whole that a kill or an editor has damaged."""

import json

from absl import logging
from etils import epath

from spmd_tasks.files import append, read_bytes, sync_path, write_durably
from spmd_tasks.store_files import read_growing

_FILE = 'metrics.jsonl'  # METRICS_FILE of metrics.py, which imports this file where a file is to be mended
_Metric = float | list[float]


def read_jsonl(directory: epath.Path) -> dict[int, dict[str, _Metric]]:
  """Reads `<directory>/metrics.jsonl`: step -> metrics, the last ones of a step that was written twice.

  Skips an unfinished last line, which another job may be writing, and lines that are no records. Raises OSError.
  """
  lines = read_growing(directory / _FILE).split(b'\n')[:-1]
  return dict(record for line in lines if (record := _parse(line)) is not None)


def mend(path: epath.Path) -> None:
  """Drops an unfinished last line, which a kill has left, and moves lines that are no records to another file."""
  content = read_bytes(path)
  *lines, last = content.split(b'\n')
  bad = [line for line in lines if line and _parse(line) is None]
  if bad:
    aside = path.with_name(f'{path.name}.bad_lines')
    logging.error('%s: %d lines are no records; they are moved to %s.', path, len(bad), aside.name)
    append(aside, b''.join(line + b'\n' for line in bad))
    sync_path(aside)
  mended = b''.join(line + b'\n' for line in [*lines, last] if _parse(line) is not None)
  if mended != content:
    write_durably(path, mended)


def _parse(line: bytes) -> tuple[int, dict[str, _Metric]] | None:
  """Returns step and metrics of a line; None if it is no record."""
  try:
    record = json.loads(line.decode())
    step = record.pop('step')
    if type(step) is not int:
      return None
    return step, {
      name: [float(x) for x in value] if isinstance(value, list) else float(value) for name, value in record.items()
    }
  except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
    return None
