"""Worker processes: Grain's process prefetch around a LaneReader. In its own file, as it imports Grain."""

from typing import Any

from absl import flags
import grain
import numpy as np

from spmd_tasks.inputs import base
from spmd_tasks.inputs.grain_input import LaneReader

_POSITIONS = 'positions'


class LaneDataset(grain.IterDataset):
  """The batches of a LaneReader from given positions on, each with the positions behind it."""

  def __init__(self, reader: LaneReader, positions: np.ndarray):
    super().__init__()
    self._reader = reader
    self._first_positions = positions

  def __iter__(self) -> 'LaneDatasetIterator':
    return LaneDatasetIterator(self._reader, self._first_positions)


class LaneDatasetIterator(grain.DatasetIterator):
  """Runs in the worker process."""

  def __init__(self, reader: LaneReader, positions: np.ndarray):
    super().__init__()
    self._reader = reader
    self._positions = positions
    self._batches = reader.batches(positions)

  def __next__(self) -> dict[str, np.ndarray]:
    batch, self._positions = next(self._batches)
    return {**batch, _POSITIONS: self._positions}

  def get_state(self) -> dict[str, Any]:
    return {_POSITIONS: self._positions.tolist()}

  def set_state(self, state: dict[str, Any]) -> None:
    self._positions = np.array(state[_POSITIONS], np.int64)
    self._batches = self._reader.batches(self._positions)


class WorkerStream:
  """One worker process reading the lanes of one LaneReader; as an iterator like `LaneReader.batches`."""

  def __init__(self, reader: LaneReader, positions: np.ndarray, buffer_size: int):
    if not flags.FLAGS.is_parsed():
      flags.FLAGS.mark_as_parsed()  # Grain reads absl flags, which only a program run by absl.app has parsed
    options = grain.MultiprocessingOptions(num_workers=1, per_worker_buffer_size=buffer_size)
    self._iterator = iter(LaneDataset(reader, positions).mp_prefetch(options))
    self._iterator.start_prefetch()

  def __next__(self) -> tuple[base.Batch, np.ndarray]:
    element = next(self._iterator)
    return {name: element[name] for name in base.BATCH_DTYPES}, np.array(element[_POSITIONS])

  def close(self) -> None:
    self._iterator.close()
