"""Reads the batches of one source of a mixture and keeps those of which rows are still to be used."""

from collections import deque
from collections.abc import Iterator
import contextlib

from spmd_tasks.errors import JobError, UserError
from spmd_tasks.inputs import base


class SourceReader:
  """The batches of one source, by number; forgets those behind the oldest one in use.

  Its state is the position before that batch, so that a restore reads the few batches behind it again.

  Attributes:
    name: of the source, for messages.
    num_read: how many batches have been read, from the source's beginning.
  """

  def __init__(self, name: str, source: base.Input, shard_index: int, shard_count: int):
    self.name = name
    self.num_read = 0
    self._kept: deque[tuple[base.State, base.Batch]] = deque()  # each with the position before it
    with naming(name):
      self._iterator = source.make_iterator(shard_index, shard_count)

  def read_until(self, num_batches: int) -> bool:
    """Reads until so many batches have been read; returns False if the source ends before."""
    with naming(self.name):
      while self.num_read < num_batches:
        before = self._iterator.get_state()
        try:
          batch = next(self._iterator)
        except StopIteration:
          return False
        self._kept.append((before, batch))
        self.num_read += 1
    return True

  def batch(self, number: int) -> base.Batch:
    """Returns batch `number`, counted from 0, which has been read and not been forgotten."""
    return self._kept[number - self.num_read][1]

  def forget_until(self, number: int) -> None:
    """Forgets the batches before `number`."""
    while self._kept and self.num_read - len(self._kept) < number:
      self._kept.popleft()

  def get_state(self) -> base.State:
    """The position before the oldest batch that is kept, and that batch's number."""
    with naming(self.name):
      position = self._kept[0][0] if self._kept else self._iterator.get_state()
    return {'first_batch': self.num_read - len(self._kept), 'position': position}

  def set_state(self, state: base.State) -> None:
    with naming(self.name):
      self._iterator.set_state(state['position'])
    self._kept.clear()
    self.num_read = int(state['first_batch'])

  def close(self) -> None:
    self._iterator.close()


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
  """Puts the source's name in front of the sentence of an error."""
  try:
    yield
  except (UserError, JobError) as error:
    kind = JobError if isinstance(error, JobError) else UserError
    raise kind(f'source {name!r} of the mixture: {error}') from error
