"""SpanCorruption has T5's layout and numbers of spans, and resumes exactly."""

import collections

import numpy as np
import pytest

from spmd_tasks.inputs import SpanCorruption, T5ByteTokenizer, TextFiles, TextInput
from spmd_tasks.inputs.span_corruption import noise_mask, replace_spans, span_corruption_lengths
from tests.inputs.batches import check_positions


def text_input(tmp_path, **settings):
  for i in range(6):
    (tmp_path / f'{i}.txt').write_text(f'text {i} of some words. ' * 30)
  source = TextFiles(pattern=str(tmp_path / '*.txt'), block_bytes=256)
  return TextInput(
    source=source, tokenizer=T5ByteTokenizer(extra_ids=20), **({'batch_size': 4, 'seq_len': 34} | settings)
  )


@pytest.mark.parametrize(
  'settings, lengths',
  [
    ((512,), (568, 114)),  # T5's own pre-training
    ((512, 0.5, 3.0), (766, 512)),  # the targets made as long as the inputs
    ((128, 0.15, 20.0), (148, 24)),
  ],
)
def test_lengths_are_those_of_t5(settings, lengths):
  assert span_corruption_lengths(*settings) == lengths


@pytest.mark.parametrize('length', [1, 2, 7, 100, 568])
def test_masks_have_as_many_tokens_and_spans_as_t5(length):
  mask = noise_mask(length, np.random.default_rng(0))
  num_noise = min(max(round(length * 0.15), 1), max(length, 2) - 1)
  assert mask.shape == (length,)
  if length > 1:
    assert mask.sum() == num_noise
    assert (np.diff(mask.astype(int), prepend=0) == 1).sum() == max(round(num_noise / 3), 1)
    assert not mask[0]


def test_all_masks_are_equally_likely():
  rng = np.random.default_rng(0)
  counts = collections.Counter(tuple(noise_mask(8, rng, 0.5, 2.0)) for _ in range(9000))
  assert len(counts) == 9  # 4 tokens of noise and 4 of text, both in 2 spans: 3 * 3 masks
  assert max(counts.values()) < 1150
  assert min(counts.values()) > 850


def test_sentinels_replace_the_spans():
  tokens, mask = np.arange(10, 18), np.array([0, 0, 1, 1, 0, 0, 1, 0], bool)
  assert replace_spans(tokens, mask, 99).tolist() == [10, 11, 99, 14, 15, 98, 17]
  assert replace_spans(tokens, ~mask, 99).tolist() == [99, 12, 13, 98, 16, 97]


def test_inputs_and_targets_together_are_the_text(tmp_path):
  settings = SpanCorruption(text=text_input(tmp_path), inputs_length=32)
  text = next(settings.text.make_iterator())
  batch = next(settings.make_iterator())
  spec = settings.element_spec()
  assert {name: (rows.shape, rows.dtype) for name, rows in batch.items()} == {
    name: (entry.shape, entry.dtype) for name, entry in spec.items()
  }
  sentinel = settings.tokenizer.vocab_size - 1
  for row in range(4):
    targets = batch['labels'][row][batch['segment_ids'][row] > 0]
    inputs = batch['encoder_ids'][row][batch['encoder_segment_ids'][row] > 0]
    assert targets[-1] == inputs[-1] == 1
    assert batch['ids'][row, 0] == 0
    assert (batch['ids'][row, 1 : targets.size] == targets[:-1]).all()
    assert batch['weights'][row].sum() == targets.size
    spans = dict(_spans(targets[:-1], sentinel))
    restored = [token for name, tokens in _spans(inputs[:-1], sentinel) for token in (*spans.get(name, ()), *tokens)]
    assert restored == text['ids'][row].tolist()


def test_targets_whose_length_t5_rounds_in_two_ways_are_truncated(tmp_path):
  """28.5 of 190 tokens are noise: T5's lengths round to 28, its masks to 29."""
  settings = SpanCorruption(text=text_input(tmp_path, seq_len=190), inputs_length=172)
  labels = next(settings.make_iterator())['labels']
  assert labels.shape == (4, 38)
  assert (labels[:, -1] == 1).all()


def test_more_spans_than_sentinels_are_logged(tmp_path, monkeypatch):
  lines = []
  monkeypatch.setattr('absl.logging.warning', lambda line, *values: lines.append(line % values))
  SpanCorruption(text=text_input(tmp_path, seq_len=568), inputs_length=512)
  assert '568 tokens have 28 spans, but the tokenizer only extra_ids = 20' in lines[0]


def _spans(tokens, sentinel):
  """Yields (sentinel, the tokens after it); the sentinel is None for the tokens before the first one."""
  name, span = None, []
  for token in tokens.tolist():
    if sentinel - 20 < token <= sentinel:
      yield name, span
      name, span = token, []
    else:
      span.append(token)
  yield name, span


def test_it_resumes_exactly_on_any_number_of_processes(tmp_path):
  settings = SpanCorruption(text=text_input(tmp_path), inputs_length=32, seed=3)
  following = check_positions(settings)
  assert (next(settings.make_iterator())['labels'] != following['labels']).any()
