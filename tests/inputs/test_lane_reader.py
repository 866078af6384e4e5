"""Reading errors, of content, of files and of time, name the block."""

import threading
import time

import pytest

from spmd_tasks.errors import JobError
from spmd_tasks.inputs import Block, ByteTokenizer
from spmd_tasks.inputs.packing import TextEncoder
from spmd_tasks.inputs.text_input import BlockReader


class FaultySource:
  """Three blocks, of which block 1 does what it is told."""

  def __init__(self, fault):
    self.fault = fault

  def __len__(self):
    return 3

  def block_name(self, index):
    return f'file.txt block {index}'

  def __getitem__(self, index):
    if index == 1:
      self.fault()
    return Block(self.block_name(index), [(str(index), True)])


def fail(error):
  raise error


@pytest.mark.parametrize(
  'error, expected, message',
  [
    (ValueError('bad line 7'), ValueError, 'unusable input in file.txt block 1: bad line 7'),
    (JobError('a.txt ends at byte 3'), RuntimeError, '^a.txt ends at byte 3$'),
    (FileNotFoundError('gone'), RuntimeError, 'reading file.txt block 1 failed: FileNotFoundError: gone'),
  ],
)
def test_errors_name_the_block_and_the_others_can_still_be_read(error, expected, message):
  reader = BlockReader(FaultySource(lambda: fail(error)), TextEncoder(ByteTokenizer()), timeout_s=30)
  with pytest.raises(expected, match=message):
    reader[1]
  assert reader[2].ids.tolist() == [1, ord('2') + 3]
  reader.close()


def test_a_read_that_hangs_is_an_error_in_bounded_time():
  released = threading.Event()
  reader = BlockReader(FaultySource(lambda: released.wait(60)), TextEncoder(ByteTokenizer()), timeout_s=0.3)
  start = time.monotonic()
  with pytest.raises(RuntimeError, match=r'reading file.txt block 1 has not ended within 0.3 s.*read_timeout_s'):
    reader[1]
  assert time.monotonic() - start < 5
  assert reader[0].labels.tolist() == [ord('0') + 3, 2]
  released.set()
  reader.close()
  while any(thread.name == 'input-block-reader' for thread in threading.enumerate()):
    assert time.monotonic() - start < 10, 'a reading thread has not ended, although its read has'
    time.sleep(0.01)
