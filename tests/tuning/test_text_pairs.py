"""PairInput makes the rows of an encoder-decoder, on any number of hosts and from any position."""

import json

import numpy as np
import pytest

from spmd_tasks.config import resolve
from spmd_tasks.inputs import T5ByteTokenizer
from spmd_tasks.tuning import PairInput, TextPairs
from tests.inputs.batches import check_positions

S, T = 6, 4
PAIRS = [('ab', 'c'), ('hello', 'you'), ('x', ''), ('yes', 'no'), ('d', 'ef')]


def pair_input(tmp_path, pairs=PAIRS, **settings):
  path = tmp_path / 'pairs.jsonl'
  path.write_text(''.join(json.dumps({'inputs': a, 'targets': b, 'id': 3}) + '\n' for a, b in pairs))
  sizes = {'batch_size': 4, 'inputs_length': S, 'seq_len': S + T}
  return PairInput(source=TextPairs(pattern=str(path)), tokenizer=T5ByteTokenizer(), **sizes | settings)


def row(pair):
  """Returns the arrays of a pair: byte b is id b + 3, and eos is 1."""
  inputs, labels = ([3 + byte for byte in text.encode()] + [1] for text in pair)
  arrays = {'ids': [0, *labels[:-1]], 'labels': labels, 'weights': [1] * len(labels), 'encoder_ids': inputs}
  for name, tokens in (('', labels), ('encoder_', inputs)):
    arrays |= {f'{name}segment_ids': [1] * len(tokens), f'{name}segment_pos': range(len(tokens))}
  return {name: np.pad(list(x), (0, (S if 'encoder' in name else T) - len(x))) for name, x in arrays.items()}


def test_each_row_is_a_pair(tmp_path):
  settings = pair_input(tmp_path, num_epochs=1, shuffle=False)
  batches = list(settings.make_iterator())
  assert len(batches) == 2
  for i, pair in enumerate(PAIRS):
    for name, expected in row(pair).items():
      np.testing.assert_array_equal(batches[i // 4][name][i % 4], expected, err_msg=name)
  assert not any(array[1:].any() for array in batches[1].values())
  assert {name: (x.shape, x.dtype) for name, x in batches[0].items()} == {
    name: (spec.shape, spec.dtype) for name, spec in settings.element_spec().items()
  }


def test_two_hosts_read_the_rows_of_one_and_resume_exactly(tmp_path):
  check_positions(pair_input(tmp_path))


def test_pairs_that_are_too_long(tmp_path):
  pairs = [('abcdefgh', 'c'), ('ab', 'cdefg'), ('d', 'e')]
  settings = {'num_epochs': 1, 'shuffle': False}
  with pytest.raises(ValueError, match=r"'inputs' has 9 tokens .* row of 6: raise encoder_len"):
    next(pair_input(tmp_path, pairs, **settings).make_iterator())
  truncated = next(pair_input(tmp_path, pairs, too_long='truncate', **settings).make_iterator())
  for i, pair in enumerate((('abcde', 'c'), ('ab', 'cde'), ('d', 'e'))):
    np.testing.assert_array_equal(truncated['labels'][i], row(pair)['labels'])
    np.testing.assert_array_equal(truncated['encoder_ids'][i], row(pair)['encoder_ids'])
  batch = next(pair_input(tmp_path, pairs, too_long='skip', **settings).make_iterator())
  assert batch['weights'].any(axis=1).tolist() == [True, False, False, False]
  with pytest.raises(ValueError, match='below seq_len'):
    pair_input(tmp_path, inputs_length=S + T)


def test_a_model_without_an_encoder_is_refused(request):
  folder = request.config.rootpath / 'tests/data/huggingface/llama'
  with pytest.raises(ValueError, match=r'pairs = .a\.jsonl. need an encoder-decoder'):
    resolve('hf.Model', [f'model={folder}', 'pairs=a.jsonl'])
