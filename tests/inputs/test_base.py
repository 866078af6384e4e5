"""Shards divide the batch, states are compared setting by setting, and no input drags TensorFlow in."""

import numpy as np
import pytest

from spmd_tasks.inputs import ByteTokenizer, StdlibText, SyntheticText, TextInput, base


@pytest.mark.parametrize('shard_count', [1, 2, 3, 6])
def test_shards_cover_the_rows_once(shard_count):
  rows = [row for index in range(shard_count) for row in base.shard_rows(6, index, shard_count)]
  assert rows == list(range(6))


INPUTS = {
  'synthetic': SyntheticText(batch_size=4, seq_len=8),
  'text': TextInput(source=StdlibText(), tokenizer=ByteTokenizer(), batch_size=4, seq_len=8),
}


@pytest.mark.parametrize('name', INPUTS)
def test_batches_match_the_element_spec(name):
  settings = INPUTS[name]
  assert isinstance(settings, base.Input)
  iterator = settings.make_iterator(1, 2)
  assert isinstance(iterator, base.InputIterator)
  batch = next(iterator)
  iterator.close()
  spec = settings.element_spec()
  assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {k: ((2, 8), np.dtype(v.dtype)) for k, v in spec.items()}
  assert all(v.shape == (4, 8) for v in spec.values())
