"""Shards divide the batch, states are compared setting by setting, and no input drags TensorFlow in."""

import subprocess
import sys

import numpy as np
import pytest

from spmd_tasks.inputs import ByteTokenizer, StdlibText, SyntheticText, TextInput, base


@pytest.mark.parametrize('shard_count', [1, 2, 3, 6])
def test_shards_cover_the_rows_once(shard_count):
  rows = [row for index in range(shard_count) for row in base.shard_rows(6, index, shard_count)]
  assert rows == list(range(6))


@pytest.mark.parametrize(
  'args, message',
  [
    ((6, 0, 4), 'batch_size 6 does not divide by shard_count 4.*such as 4 or 8'),
    ((2, 0, 4), 'such as 4$|such as 4[^ ]'),
    ((6, 2, 2), 'shard_index 2 is not in'),
    ((6, -1, 2), 'shard_index -1'),
    ((6, 0, 0), 'shard_count 0'),
  ],
)
def test_bad_shards_are_refused_with_the_remedy(args, message):
  with pytest.raises(ValueError, match=message):
    base.shard_rows(*args)


def test_check_state_names_both_sides():
  with pytest.raises(ValueError, match=r'seq_len = 8, but this input has seq_len = 16.*Restore with seq_len = 8'):
    base.check_state({'kind': 'text', 'seq_len': 8}, {'kind': 'text', 'seq_len': 16})
  with pytest.raises(ValueError, match="no 'seq_len'"):
    base.check_state({'kind': 'text'}, {'kind': 'text', 'seq_len': 16})


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


def test_importing_inputs_imports_neither_tensorflow_nor_grain():
  code = (
    'import sys, spmd_tasks.inputs.text_input, spmd_tasks.inputs.batches, spmd_tasks.inputs.records\n'
    'import spmd_tasks.inputs.prefetch, spmd_tasks.inputs.synthetic\n'
    "late = {'tensorflow', 'grain', 'pyarrow', 'array_record', 'tokenizers'} & set(sys.modules)\n"
    'assert not late, late'
  )
  subprocess.run([sys.executable, '-c', code], check=True, timeout=120)


def test_reading_text_does_not_import_tensorflow():
  code = (
    'import sys\n'
    'from spmd_tasks.inputs.text_input import TextInput\n'
    'from spmd_tasks.inputs.text import StdlibText\n'
    'from spmd_tasks.inputs.tokenizers import ByteTokenizer\n'
    'next(TextInput(source=StdlibText(), tokenizer=ByteTokenizer(), batch_size=2, seq_len=8).make_iterator())\n'
    "assert 'tensorflow' not in sys.modules"
  )
  subprocess.run([sys.executable, '-c', code], check=True, timeout=120)
