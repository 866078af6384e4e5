"""Writes metrics to a JSONL file at full precision and to TensorBoard event files, and reads the JSONL file.

`<directory>/metrics.jsonl` has one JSON object per logged step: `{"step": 10, "time": seconds since the epoch,
"loss": 2.345..., "expert_load": [0.12..., ...]}`. An eval of weights that are not from a checkpoint of the job adds
their place, `weights_from`; `media_files` names the images, histograms and tables (media.py) since the last line. A
resumed job appends to the file; if it executes a step again, the last line of the step counts. Readers skip invalid
lines, and the next writer moves them to `metrics.jsonl.bad_lines`. In an object store the file consists of parts
(append_objects.py).

Event files are written by TensorBoard's own record writer: clu's needs TensorFlow, which takes GPU memory from JAX.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
import os
import socket
import time
from typing import Any

from absl import logging
from etils import epath
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.extensions import require
from spmd_tasks.files import (
  append,
  is_remote,
  make_directory,
  open_descriptor,
  read_bytes,
  storage_errors,
  sync_path,
  write_durably,
)
from spmd_tasks.runtime.media import Image, Media, Table
from spmd_tasks.store_files import GrowingFile, read_appended

METRICS_FILE = 'metrics.jsonl'
PLACE_KEY = 'weights_from'
MEDIA_DIRECTORY = 'media'
_MEDIA_KEY = 'media_files'

# A number, or one number per expert.
Metric = float | list[float]
Metrics = Mapping[str, Metric]


def finish_metrics(means: Mapping[str, np.typing.ArrayLike], sources: Sequence[str] = ()) -> dict[str, Metric]:
  """Converts means (scalars or [E]) to float64 numbers and lists, and adds the perplexity of `cross_entropy`.

  Losses by source are named after their sources, `loss/<source>`; a source without tokens in this batch has no loss.
  """
  metrics: dict[str, Any] = {name: np.asarray(mean, np.float64).tolist() for name, mean in means.items()}
  for name in ('loss', 'loss_weight'):
    values = zip(sources, metrics.pop(f'{name}_by_source', ()), strict=False)
    metrics |= {f'{name}/{source}': value for source, value in values}
  for source in sources:
    if metrics.get(f'loss_weight/{source}') == 0:
      del metrics[f'loss/{source}']
  cross_entropy = scalars(metrics).get('cross_entropy')
  if cross_entropy is not None:
    metrics['perplexity'] = math.inf if cross_entropy >= 700 else math.exp(cross_entropy)
  return metrics


def split_summaries(outputs: Sequence[Any]) -> tuple[dict[str, Metric], dict[str, np.ndarray], dict[str, Media]]:
  """Combines the summaries of the StepOutputs of batches, on the host.

  Returns (means of scalars, all values of other arrays, the images, histograms and tables of the first batch).
  """
  first = outputs[0].summaries if outputs else {}
  media = {name: dataclasses.replace(x) for name, x in first.items() if isinstance(x, Media)}
  names = [name for name in first if name not in media]
  values = {name: [np.asarray(output.summaries[name], np.float64) for output in outputs] for name in names}
  means: dict[str, Metric] = {name: float(np.mean(arrays)) for name, arrays in values.items() if not arrays[0].ndim}
  histograms = {name: np.concatenate([x.ravel() for x in arrays]) for name, arrays in values.items() if arrays[0].ndim}
  return means, histograms, media


def scalars(metrics: Metrics) -> dict[str, float]:
  """Returns the metrics that are scalars."""
  return {name: value for name, value in metrics.items() if not isinstance(value, list)}


class JsonlWriter:
  """Appends lines to `<directory>/metrics.jsonl`, with one write per line, so that a killed job loses none on a disk.

  Opens the file for every line, because another job may have moved invalid lines out of it in the meantime.
  """

  def __init__(self, directory: epath.Path):
    """Creates the file, or repairs an existing one.

    Raises a StorageError if the file cannot be written, as do `write` and `close`.
    """
    self._directory, self._path = directory, directory / METRICS_FILE
    self._last: dict[str, Any] = {}
    self._media: list[str] = []  # files that no line names yet
    if not is_remote(directory):
      with storage_errors(self._path):
        make_directory(directory)
        append(self._path, b'')
        if os.path.getsize(self._path):
          _repair(self._path)

  def write(self, step: int, metrics: Metrics, place: str | None = None) -> None:
    """Appends the metrics of a step. `place` is the place of weights that are not from a checkpoint of the job."""
    record: dict[str, Any] = {'step': step, 'time': round(time.time(), 3)}
    record |= {} if place is None else {PLACE_KEY: place}
    record |= {
      name: [_json_number(x) for x in value] if isinstance(value, list) else _json_number(value)
      for name, value in metrics.items()
    }
    self._append(record)

  def _append(self, record: dict[str, Any]) -> None:
    self._last = record
    record |= {_MEDIA_KEY: self._media} if self._media else {}
    self._media = []
    with storage_errors(self._path):
      append(self._path, json.dumps(record).encode() + b'\n')

  def write_media(self, step: int, name: str, media: Media) -> None:
    """Writes a file, which the next line names."""
    path = f'{MEDIA_DIRECTORY}/{name}/step_{step:08d}.{media.suffix}'
    with storage_errors(self._directory / path):
      make_directory((self._directory / path).parent)
      write_durably(self._directory / path, media.encode())
    self._media.append(path)

  def close(self) -> None:
    if self._media and self._last:
      self._append(self._last)  # the last line of a step counts
    with storage_errors(self._path):
      sync_path(self._path)


def _json_number(value: float) -> float | str:
  """Converts NaN and infinities, which JSON lacks, to the strings 'nan', 'inf' and '-inf'."""
  value = float(value)
  return value if math.isfinite(value) else str(value)


def read_jsonl(directory: epath.Path) -> dict[int, dict[str, Metric]]:
  """Reads `<directory>/metrics.jsonl`: step -> metrics of the job's own weights, from the last line of each step.

  Skips an unfinished last line, which another job may be writing, and invalid lines. Raises OSError.
  """
  return {step: metrics for step, metrics, place in _read_records(directory) if place is None}


def read_places(directory: epath.Path) -> set[tuple[int, str | None]]:
  """Returns (step, place) of all lines; the place is None for weights of the job itself. Raises OSError."""
  return {(step, place) for step, _, place in _read_records(directory)}


_Record = tuple[int, dict[str, Metric], str | None]  # step, metrics, place


def _read_records(directory: epath.Path) -> list[_Record]:
  lines = read_appended(directory / METRICS_FILE).split(b'\n')[:-1]
  return list(filter(None, map(_parse, lines)))


def _repair(path: epath.Path) -> None:
  """Drops an unfinished last line of a killed job, and moves invalid lines to another file."""
  content = read_bytes(path)
  *lines, last = content.split(b'\n')
  bad_lines = [line for line in lines if line and _parse(line) is None]
  if bad_lines:
    bad_path = path.with_name(f'{path.name}.bad_lines')
    logging.error('%s: %d lines are invalid; they are moved to %s.', path, len(bad_lines), bad_path.name)
    append(bad_path, b''.join(line + b'\n' for line in bad_lines))
    sync_path(bad_path)
  repaired = b''.join(line + b'\n' for line in [*lines, last] if _parse(line) is not None)
  if repaired != content:
    write_durably(path, repaired)


def _parse(line: bytes) -> _Record | None:
  """Returns the record of a line; None if it is invalid."""
  try:
    record = json.loads(line.decode())
    step, place = record.pop('step'), record.pop(PLACE_KEY, None)
    record.pop(_MEDIA_KEY, None)
    if type(step) is not int or not isinstance(place, str | None):
      return None
    metrics = {
      name: [float(x) for x in value] if isinstance(value, list) else float(value) for name, value in record.items()
    }
    return step, metrics, place
  except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
    return None


class TensorBoardWriter:
  """Writes an event file in `directory`; the first write creates it.

  A metric with one value per expert is written as one scalar per expert, `expert_load/003`, and as a histogram
  `expert_load` over the experts. TensorBoard's "Distributions" shows the least and the most loaded expert.
  """

  def __init__(self, directory: epath.Path):
    self._directory = directory
    self._records: Any = None

  def write(self, step: int, metrics: Metrics, place: str | None = None) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.histogram.summary_v2 import histogram_pb

    numbers = scalars(metrics)
    vectors = {name: value for name, value in metrics.items() if isinstance(value, list)}
    for name, vector in vectors.items():
      numbers |= {f'{name}/{i:03d}': value for i, value in enumerate(vector)}
    # A histogram cannot have non-finite values.
    histograms = [histogram_pb(name, vector) for name, vector in vectors.items() if all(map(math.isfinite, vector))]
    values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
    self._write(step, [*histograms, Summary(value=values)])

  def write_histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
    """Writes histograms of the finite values of arrays, by tag."""
    from tensorboard.plugins.histogram.summary_v2 import histogram_pb

    self._write(step, [histogram_pb(tag, array[np.isfinite(array)]) for tag, array in values.items()])

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Writes Markdown texts, by tag."""
    from tensorboard.plugins.text.summary_v2 import text_pb

    self._write(step, [text_pb(tag, text) for tag, text in texts.items()])

  def write_media(self, step: int, name: str, media: Media) -> None:
    """Writes an image, a histogram or a table."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    if isinstance(media, Image):
      height, width, channels = media.pixels.shape
      image = Summary.Image(height=height, width=width, colorspace=channels, encoded_image_string=media.encode())
      self._write(step, [Summary(value=[Summary.Value(tag=name, image=image)])])
    elif isinstance(media, Table):
      self.write_texts(step, {name: media.markdown()})
    else:
      self.write_histograms(step, {name: media.values})

  def write_settings(self, settings: Mapping[str, Any]) -> None:
    """Writes settings for TensorBoard's "HParams", which compares the runs of a directory by them."""
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    values = {
      path: value if isinstance(value, bool | int | float | str) else str(value) for path, value in settings.items()
    }
    self._write(0, [hparams_pb(values)])

  def _write(self, step: int, summaries: Sequence[Any]) -> None:
    from tensorboard.compat.proto import event_pb2, summary_pb2

    if self._records is None:
      from tensorboard.summary.writer.record_writer import RecordWriter

      path = self._directory / f'events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}'
      with storage_errors(path):
        make_directory(self._directory)
        if is_remote(path):
          self._records = RecordWriter(GrowingFile(path))
        else:
          descriptor = open_descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
          self._records = RecordWriter(os.fdopen(descriptor, 'wb'))
      self._write_event(event_pb2.Event(wall_time=time.time(), file_version='brain.Event:2'))
    merged = summary_pb2.Summary()
    for summary in summaries:
      merged.MergeFrom(summary)
    self._write_event(event_pb2.Event(wall_time=time.time(), step=step, summary=merged))

  def _write_event(self, event: Any) -> None:
    with storage_errors(self._directory):
      self._records.write(event.SerializeToString())
      self._records.flush()

  def close(self) -> None:
    if self._records is not None:
      with storage_errors(self._directory):
        self._records.close()


class MultiWriter:
  """Writes to several writers, in order."""

  def __init__(self, writers: Sequence[JsonlWriter | TensorBoardWriter]):
    self._writers = writers

  def write(self, step: int, metrics: Metrics, place: str | None = None) -> None:
    for writer in self._writers:
      writer.write(step, metrics, place)

  def write_histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
    """Writes histograms to event files only; metrics.jsonl has none."""
    for writer in self._writers:
      if values and isinstance(writer, TensorBoardWriter):
        writer.write_histograms(step, values)

  def write_media(self, step: int, name: str, media: Media) -> None:
    """Writes an image, a histogram or a table."""
    for writer in self._writers:
      writer.write_media(step, name, media)

  def write_settings(self, settings: Mapping[str, Any]) -> None:
    """Writes settings to event files only; config.json has them."""
    for writer in self._writers:
      if settings and isinstance(writer, TensorBoardWriter):
        writer.write_settings(settings)

  def close(self) -> None:
    for writer in self._writers:
      writer.close()


def can_write_events() -> bool:
  """Returns whether TensorBoard is installed, which event files need; warns once if not."""
  try:
    require('tensorboard', 'tensorboard', wants='writing them')
  except UserError as error:
    logging.log_first_n(logging.WARNING, 'Writing metrics.jsonl but no event files for TensorBoard: %s', 1, error)
    return False
  return True


def make_writer(directory: epath.Path, *, trackers: Sequence[str], primary: bool) -> MultiWriter:
  """Returns a writer of metrics.jsonl, and of event files if 'tensorboard' is one of the trackers.

  Only the primary process (index 0) writes.
  """
  if not primary:
    return MultiWriter([])
  writers: list[JsonlWriter | TensorBoardWriter] = [JsonlWriter(directory)]
  if 'tensorboard' in trackers and can_write_events():
    writers.append(TensorBoardWriter(directory))
  return MultiWriter(writers)
