"""Writes metrics: a JSONL file at full precision, which metric_files.py reads, and TensorBoard events.

`<directory>/metrics.jsonl` holds one JSON object per logged step: `{"step": 10, "time": seconds since the epoch,
"loss": 2.345..., "expert_load": [0.12..., ...]}`. An eval of weights that no checkpoint of the job holds adds
`weights_from`, their place. A resumed job appends to the file. Steps that it executes again appear again, and the last
line of a step counts. Readers skip a line that is no such record, and the next writer moves it to
`metrics.jsonl.bad_lines`. In a store the file is kept in parts (append_objects.py).

Event files are written with TensorBoard's own record writer: clu's needs TensorFlow, which takes GPU memory from JAX.
"""

from collections.abc import Mapping, Sequence
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
from spmd_tasks.files import append, is_remote, make_directory, open_descriptor, storage_errors, sync_path
from spmd_tasks.runtime.metric_files import mend
from spmd_tasks.store_files import GrowingFile

METRICS_FILE = 'metrics.jsonl'
PLACE_KEY = 'weights_from'

# A number, or one number per expert.
Metric = float | list[float]
Metrics = Mapping[str, Metric]


def finish_metrics(means: Mapping[str, np.typing.ArrayLike], sources: Sequence[str] = ()) -> dict[str, Metric]:
  """Turns means (scalars or [E]) into numbers and lists, exact in float64, and adds perplexity to cross entropy.

  Those by source get the names of the sources, `loss/<source>`; a source without a token in this batch has no loss.
  """
  metrics: dict[str, Any] = {name: np.asarray(mean, np.float64).tolist() for name, mean in means.items()}
  for part in ('loss', 'loss_weight'):
    values = zip(sources, metrics.pop(f'{part}_by_source', ()), strict=False)
    metrics |= {f'{part}/{source}': value for source, value in values}
  for source in sources:
    if metrics.get(f'loss_weight/{source}') == 0:
      del metrics[f'loss/{source}']
  cross_entropy = scalars(metrics).get('cross_entropy')
  if cross_entropy is not None:
    metrics['perplexity'] = math.inf if cross_entropy >= 700 else math.exp(cross_entropy)
  return metrics


def split_summaries(outputs: Sequence[Any]) -> tuple[dict[str, Metric], dict[str, np.ndarray]]:
  """Returns the summaries of the StepOutputs of batches: (means of the scalars, all values of the others)."""
  names = outputs[0].summaries if outputs else ()
  values = {name: [np.asarray(each.summaries[name], np.float64) for each in outputs] for name in names}
  means: dict[str, Metric] = {name: float(np.mean(each)) for name, each in values.items() if not each[0].ndim}
  return means, {name: np.concatenate([x.ravel() for x in each]) for name, each in values.items() if each[0].ndim}


def scalars(metrics: Metrics) -> dict[str, float]:
  """Returns the metrics that are one number."""
  return {name: value for name, value in metrics.items() if not isinstance(value, list)}


class JsonlWriter:
  """Appends lines to `<directory>/metrics.jsonl`, each by one write, so that a job that is killed loses none of a disk.

  The file is opened for every line: another job may have moved bad lines out of it in the meantime.
  """

  def __init__(self, directory: epath.Path):
    """Creates the file, or makes an existing one whole.

    Raises a StorageError: the file cannot be written; as `write` and `close`.
    """
    self._path = directory / METRICS_FILE
    if not is_remote(directory):
      with storage_errors(self._path):
        make_directory(directory)
        append(self._path, b'')
        if os.path.getsize(self._path):
          mend(self._path)

  def write(self, step: int, metrics: Metrics, place: str | None = None) -> None:
    """Appends the metrics of a step; `place`: where the weights come from, if from no checkpoint of the job."""
    record: dict[str, Any] = {'step': step, 'time': round(time.time(), 3)}
    record |= {} if place is None else {PLACE_KEY: place}
    record |= {
      name: [_json_number(x) for x in value] if isinstance(value, list) else _json_number(value)
      for name, value in metrics.items()
    }
    with storage_errors(self._path):
      append(self._path, json.dumps(record).encode() + b'\n')

  def close(self) -> None:
    with storage_errors(self._path):
      sync_path(self._path)


def _json_number(value: float) -> float | str:
  """Turns NaN and infinities, which JSON lacks, into the strings 'nan', 'inf' and '-inf'."""
  value = float(value)
  return value if math.isfinite(value) else str(value)


class TensorBoardWriter:
  """Writes an event file in `directory`, which the first write creates.

  A metric with one value per expert becomes one scalar per expert, `expert_load/003`, and a histogram `expert_load`
  over the experts. TensorBoard's view "Distributions" shows how far the least and the most loaded expert are apart.
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
    # A histogram has no place for what is not finite.
    parts = [histogram_pb(name, vector) for name, vector in vectors.items() if all(map(math.isfinite, vector))]
    values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
    self._write(step, [*parts, Summary(value=values)])

  def write_histograms(self, step: int, values: Mapping[str, np.ndarray]) -> None:
    """Writes the distributions of the finite values of arrays by their tags."""
    from tensorboard.plugins.histogram.summary_v2 import histogram_pb

    self._write(step, [histogram_pb(tag, array[np.isfinite(array)]) for tag, array in values.items()])

  def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
    """Writes texts in Markdown by their tags."""
    from tensorboard.plugins.text.summary_v2 import text_pb

    self._write(step, [text_pb(tag, text) for tag, text in texts.items()])

  def _write(self, step: int, parts: Sequence[Any]) -> None:
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
    summary = summary_pb2.Summary()
    for part in parts:
      summary.MergeFrom(part)
    self._write_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

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
    """Writes arrays to the writers of event files; metrics.jsonl has none."""
    for writer in self._writers:
      if values and isinstance(writer, TensorBoardWriter):
        writer.write_histograms(step, values)

  def close(self) -> None:
    for writer in self._writers:
      writer.close()


def can_write_events() -> bool:
  """Whether TensorBoard is installed, which writes event files; if not, a log line says so, once."""
  try:
    require('tensorboard', 'tensorboard', wants='writing them')
  except UserError as error:
    logging.log_first_n(logging.WARNING, 'No event files for TensorBoard beside metrics.jsonl: %s', 1, error)
    return False
  return True


def make_writer(directory: epath.Path, *, trackers: Sequence[str], primary: bool) -> MultiWriter:
  """Makes the writers of a directory: of metrics.jsonl, and of event files if 'tensorboard' is one of the trackers.

  Only the primary process (index 0) writes.
  """
  if not primary:
    return MultiWriter([])
  writers: list[JsonlWriter | TensorBoardWriter] = [JsonlWriter(directory)]
  if 'tensorboard' in trackers and can_write_events():
    writers.append(TensorBoardWriter(directory))
  return MultiWriter(writers)
