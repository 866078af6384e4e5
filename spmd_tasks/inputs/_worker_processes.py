"""Runs a LaneReader in a worker process, by Grain's process prefetch; imports Grain, so import it only where used."""

import multiprocessing
import os
import re
import threading
import time
from typing import Any

from absl import flags, logging
import grain
import numpy as np

from spmd_tasks.errors import JobError
from spmd_tasks.inputs import base
from spmd_tasks.inputs._lane_reader import LaneReader

_POSITIONS = 'positions'
_WORKER = 'worker'  # the worker's process id

_CLOSE_LIMIT_S = 2.0  # for a worker to end by itself, and then for Grain to see that it was killed
_PARENT_PERIOD_S = 1.0  # between two looks at whether the job's process is still there


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
    return {**batch, _POSITIONS: self._positions, _WORKER: np.array(os.getpid())}

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
    self._names = tuple(reader.encoder.dtypes)
    dataset = LaneDataset(reader, positions).mp_prefetch(options, worker_init_fn=_leave_with_parent)
    self._iterator = iter(dataset)
    self._iterator.start_prefetch()
    self._worker: int | None = None  # its process id, once it has answered

  def __next__(self) -> tuple[base.Batch, np.ndarray]:
    try:
      element = next(self._iterator)
    except RuntimeError as error:
      ended = re.search(r'terminated unexpectedly with exit code (-?\d+)', str(error))
      if ended is None:
        raise
      raise JobError(
        f'a worker process of the input was terminated unexpectedly, with exit code {ended[1]} (-9: killed, as by the '
        "kernel when memory runs out). See the lines above and the kernel's log; a smaller num_workers or "
        'worker_buffer_size takes less memory. The same command goes on from the newest checkpoint.'
      ) from error
    self._worker = int(element[_WORKER])
    return {name: element[name] for name in self._names}, np.array(element[_POSITIONS])

  def close(self) -> None:
    """Ends the worker, in bounded time also if it is stopped (SIGSTOP) or stuck, for which Grain would wait 25 s."""

    def close_iterator() -> None:
      try:
        self._iterator.close()
      except (
        Exception
      ) as error:  # such as of its pipes, when a signal came while they were used; the worker ends anyway
        logging.info('Grain could not close the input: %s: %s', type(error).__name__, error)

    closing = threading.Thread(target=close_iterator, name='close-worker', daemon=True)
    closing.start()
    closing.join(_CLOSE_LIMIT_S)
    for child in multiprocessing.active_children():
      if child.pid == self._worker:
        child.kill()
    closing.join(_CLOSE_LIMIT_S)


def _leave_with_parent(worker_index: int, num_workers: int) -> None:
  """Runs first in a worker process: makes it end soon after its parent, however that ends, kill -9 and abort included.

  Linux can signal a parent's end (PR_SET_PDEATHSIG), but means by it the end of the thread that started the worker.
  """
  del worker_index, num_workers
  parent = multiprocessing.parent_process()
  assert parent is not None

  def watch() -> None:
    while os.getppid() == parent.pid:
      time.sleep(_PARENT_PERIOD_S)
    os._exit(1)  # Python's own exit would wait for somebody to read the batches that are ready.

  threading.Thread(target=watch, name='parent-watch', daemon=True).start()
