"""Reads metrics.jsonl (metrics.py), and makes one whole that a kill or an editor has damaged."""

import json

from absl import logging
from etils import epath

from spmd_tasks.files import append, read_bytes, sync_path, write_durably
from spmd_tasks.store_files import read_appended

# METRICS_FILE and PLACE_KEY of metrics.py, which imports this file if a file is to be mended.
_FILE, _PLACE_KEY = 'metrics.jsonl', 'weights_from'
_Metric = float | list[float]


def read_jsonl(directory: epath.Path) -> dict[int, dict[str, _Metric]]:
  """Reads `<directory>/metrics.jsonl`: step -> metrics, the last ones of a step that was written twice.

  Skips an unfinished last line, which another job may be writing, and lines that are no records. Raises OSError.
  """
  lines = read_appended(directory / _FILE).split(b'\n')[:-1]
  return {step: metrics for step, metrics, _ in filter(None, map(_parse, lines))}


def read_places(directory: epath.Path) -> set[tuple[int, str | None]]:
  """Returns step and place of all lines; the place is None for weights of the job itself. Raises OSError."""
  lines = read_appended(directory / _FILE).split(b'\n')[:-1]
  return {(step, place) for step, _, place in filter(None, map(_parse, lines))}


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


def _parse(line: bytes) -> tuple[int, dict[str, _Metric], str | None] | None:
  """Returns step, metrics and place of a line; None if it is no record."""
  try:
    record = json.loads(line.decode())
    step, place = record.pop('step'), record.pop(_PLACE_KEY, None)
    if type(step) is not int or not isinstance(place, str | None):
      return None
    metrics = {
      name: [float(x) for x in value] if isinstance(value, list) else float(value) for name, value in record.items()
    }
    return step, metrics, place
  except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
    return None
