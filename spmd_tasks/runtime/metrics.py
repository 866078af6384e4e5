"""Writes metrics: a JSONL file at full precision, and TensorBoard events.

    writer = make_writer(directory, tensorboard=True, primary=True)
    writer.write(10, {'loss': 2.345, 'expert_load': [0.12, 0.88]})
    read_jsonl(directory)[10]['loss']

`<directory>/metrics.jsonl` holds one JSON object per logged step: `{"step": 10, "time": seconds since the epoch,
"loss": 2.345..., "expert_load": [0.12..., ...]}`. A resumed job appends to the file. Steps that it executes again
appear again, and the last line of a step counts.

Event files are written with TensorBoard's own record writer. clu's writer needs TensorFlow, which slows the first steps
by its import, prints lines that cannot be turned off, and takes GPU memory from JAX.
"""

from collections.abc import Mapping, Sequence
import json
import math
import os
import socket
import time
from typing import Any, Protocol

from etils import epath
import numpy as np

# A number, or one number per expert.
Metric = float | list[float]
Metrics = Mapping[str, Metric]


def finish_metrics(means: Mapping[str, np.typing.ArrayLike]) -> dict[str, Metric]:
  """Turns means (scalars or [E]) into numbers and lists, exact in float64, and adds perplexity to cross entropy."""
  metrics: dict[str, Metric] = {name: np.asarray(mean, np.float64).tolist() for name, mean in means.items()}
  cross_entropy = scalars(metrics).get('cross_entropy')
  if cross_entropy is not None:
    metrics['perplexity'] = math.exp(cross_entropy) if cross_entropy < 700 else math.inf
  return metrics


def scalars(metrics: Metrics) -> dict[str, float]:
  """Returns the metrics that are one number."""
  return {name: value for name, value in metrics.items() if not isinstance(value, list)}


def vectors(metrics: Metrics) -> dict[str, list[float]]:
  """Returns the metrics that have one number per expert."""
  return {name: value for name, value in metrics.items() if isinstance(value, list)}


class MetricsWriter(Protocol):
  """Writes metrics by step; `close` returns when everything is on disk."""

  def write(self, step: int, metrics: Metrics) -> None: ...

  def close(self) -> None: ...


class JsonlWriter:
  """Appends lines to `<directory>/metrics.jsonl` and flushes each, so that a killed job loses none."""

  def __init__(self, directory: epath.Path):
    directory.mkdir(parents=True, exist_ok=True)
    self._path = directory / 'metrics.jsonl'
    self._drop_unfinished_line()
    self._file = self._path.open('a', encoding='utf-8')

  def _drop_unfinished_line(self) -> None:
    if not self._path.exists():
      return
    content = self._path.read_bytes()
    if not content.endswith(b'\n'):  # else another process may be appending to it
      os.truncate(self._path, content.rfind(b'\n') + 1)

  def write(self, step: int, metrics: Metrics) -> None:
    record = {'step': step, 'time': round(time.time(), 3)} | {
      name: [_json_number(x) for x in value] if isinstance(value, list) else _json_number(value)
      for name, value in metrics.items()
    }
    self._file.write(json.dumps(record) + '\n')
    self._file.flush()

  def close(self) -> None:
    self._file.flush()
    os.fsync(self._file.fileno())
    self._file.close()


def _json_number(value: float) -> float | str:
  """Turns NaN and infinities, which JSON lacks, into the strings 'nan', 'inf' and '-inf'."""
  value = float(value)
  return value if math.isfinite(value) else str(value)


def read_jsonl(directory: epath.Path) -> dict[int, dict[str, Metric]]:
  """Reads `<directory>/metrics.jsonl`: step -> metrics, the last ones of a step that was written twice."""
  records = {}
  for line in (directory / 'metrics.jsonl').read_text(encoding='utf-8').splitlines():
    record = json.loads(line)
    step = record.pop('step')
    records[step] = {
      name: [float(x) for x in value] if isinstance(value, list) else float(value) for name, value in record.items()
    }
  return records


class TensorBoardWriter:
  """Writes an event file in `directory`, which the first write creates.

  A metric with one value per expert becomes one scalar per expert, `expert_load/003`, and a histogram `expert_load`
  over the experts. TensorBoard's view "Distributions" shows how far the least and the most loaded expert are apart.
  """

  def __init__(self, directory: epath.Path):
    self._directory = directory
    self._records: Any = None

  def write(self, step: int, metrics: Metrics) -> None:
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.plugins.histogram.summary_v2 import histogram_pb

    if self._records is None:
      from tensorboard.summary.writer.record_writer import RecordWriter

      name = f'events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}'
      self._records = RecordWriter((self._directory / name).open('wb'))
      self._write(event_pb2.Event(wall_time=time.time(), file_version='brain.Event:2'))
    numbers, summary = scalars(metrics), summary_pb2.Summary()
    for name, vector in vectors(metrics).items():
      numbers |= {f'{name}/{i:03d}': value for i, value in enumerate(vector)}
      if all(map(math.isfinite, vector)):  # a histogram has no place for the others
        summary.MergeFrom(histogram_pb(name, vector))
    summary.value.extend(summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in numbers.items())
    self._write(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))

  def _write(self, event: Any) -> None:
    self._records.write(event.SerializeToString())
    self._records.flush()

  def close(self) -> None:
    if self._records is not None:
      self._records.close()


class MultiWriter:
  """Writes to several writers, in order."""

  def __init__(self, writers: Sequence[MetricsWriter]):
    self._writers = writers

  def write(self, step: int, metrics: Metrics) -> None:
    for writer in self._writers:
      writer.write(step, metrics)

  def close(self) -> None:
    for writer in self._writers:
      writer.close()


def make_writer(directory: epath.Path, *, tensorboard: bool, primary: bool) -> MultiWriter:
  """Makes the writers of one metrics directory; only the primary process (index 0) writes.

  A remote directory (`gs://...`) gets events only: object stores cannot append to a file.
  """
  if not primary:
    return MultiWriter([])
  from spmd_tasks.checkpoints import is_remote  # late, for the checkpoints' Orbax takes two seconds to import

  writers: list[MetricsWriter] = [] if is_remote(directory) else [JsonlWriter(directory)]
  if tensorboard:
    writers.append(TensorBoardWriter(directory))
  return MultiWriter(writers)
