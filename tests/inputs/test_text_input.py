"""TextInput reads one global batch on any number of hosts, resumes exactly or refuses; read errors name the block."""

import dataclasses
import itertools
import json
import threading
import time

import numpy as np
import pytest

from spmd_tasks.errors import JobError
from spmd_tasks.inputs import Block, ByteTokenizer, JsonLines, TextInput, base, train_bpe
from spmd_tasks.inputs.packing import TextEncoder
from spmd_tasks.inputs.text_input import BlockReader
from tests.inputs.batches import assert_same, take

TEXTS = [f'<{i}>' + 'abcdefghij' * (i % 7) for i in range(40)]


@pytest.fixture
def jsonl(tmp_path):
  path = tmp_path / 'texts.jsonl'
  path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in TEXTS))
  return path


@pytest.fixture
def training(jsonl) -> TextInput:
  source = JsonLines(pattern=str(jsonl), block_bytes=150)
  return TextInput(source=source, tokenizer=ByteTokenizer(), batch_size=4, seq_len=16, seed=1)


@pytest.fixture
def evaluation(training) -> TextInput:
  return dataclasses.replace(training, num_epochs=1, shuffle=False)


def test_batches_of_each_host_match_the_element_spec(training):
  assert isinstance(training, base.Input)
  [batch], _ = take(training, 1, shard=(1, 2))
  spec = {name: ((2, 16), np.dtype(entry.dtype)) for name, entry in training.element_spec().items()}
  assert {name: (rows.shape, rows.dtype) for name, rows in batch.items()} == spec


@pytest.mark.parametrize('kind', ['training', 'evaluation'])
@pytest.mark.parametrize('packing', [True, False])
def test_resumes_exactly(request, kind, packing):
  settings = dataclasses.replace(request.getfixturevalue(kind), packing=packing)
  whole, _ = take(settings, 30)
  for position in (0, 1, 2, 7, len(whole) - 1, len(whole)):
    _, state = take(settings, position)
    rest, _ = take(settings, len(whole) - position, state)
    assert_same(rest, whole[position:])


def test_another_number_of_hosts_is_refused_without_resharding(training):
  _, state = take(training, 3)
  with pytest.raises(ValueError, match=r'shard_count = 1, but this input has shard_count = 2.*reshard_states'):
    training.make_iterator(0, 2).set_state(state)
  _, state = take(training, 3, shard=(0, 2))
  with pytest.raises(ValueError, match=r'shard_index = 0, but this input has shard_index = 1'):
    training.make_iterator(1, 2).set_state(state)


@pytest.mark.parametrize(
  'change', [{'batch_size': 8}, {'seq_len': 8}, {'seed': 2}, {'shuffle': False}, {'packing': False}, {'num_epochs': 1}]
)
def test_states_of_other_settings_are_refused(training, change):
  _, state = take(training, 3)
  (name, value), *_ = change.items()
  with pytest.raises(ValueError, match=f'has {name} = .*, but this input has {name} = {value}.*Restore with'):
    dataclasses.replace(training, **change).make_iterator().set_state(state)


def test_states_of_another_text_or_tokenizer_are_refused(training, jsonl, tmp_path):
  _, state = take(training, 3)
  bpe = train_bpe(TEXTS, str(tmp_path / 'bpe.json'), vocab_size=300)
  with pytest.raises(ValueError, match='tokenizer = '):
    dataclasses.replace(training, tokenizer=bpe).make_iterator().set_state(state)
  text = jsonl.read_text()
  jsonl.write_text(text.replace('abc', 'abd'))  # the same size: only reading reveals the change
  iterator = training.make_iterator()
  iterator.set_state(state)
  with pytest.raises(ValueError, match=r'has changed .*restore them, or start a new job from the weights'):
    next(iterator)
  jsonl.write_text(text + '\n')
  with pytest.raises(ValueError, match=f'taken from other data than now match {str(jsonl)!r}'):
    training.make_iterator().set_state(state)


@pytest.mark.parametrize('kind', ['training', 'evaluation'])
def test_one_epoch_has_every_token_once_and_ends_padded(request, kind):
  settings = dataclasses.replace(request.getfixturevalue(kind), num_epochs=1)
  batches, _ = take(settings)
  labels = np.concatenate([batch['labels'][batch['weights'] > 0] for batch in batches])
  expected = [b + 3 for text in TEXTS for b in text.encode()] + [2] * len(TEXTS)
  assert sorted(labels.tolist()) == sorted(expected)
  assert all((batch['weights'] == 1).all() for batch in batches[:-1])
  last = batches[-1]
  assert (last['weights'] == 0).any()
  padding = last['weights'] == 0
  for name in ('ids', 'labels', 'segment_ids', 'segment_pos'):
    assert (last[name][padding] == 0).all()


def test_without_shuffling_the_text_is_in_order(evaluation):
  batches, _ = take(evaluation)
  ids = np.concatenate([batch['ids'][batch['weights'] > 0] for batch in batches])
  assert ByteTokenizer().decode(ids) == ''.join(TEXTS)


def test_shuffling_differs_by_seed_and_by_epoch(training):
  shuffled = dataclasses.replace(training, num_epochs=2, batch_size=1)
  ids = np.concatenate([batch['ids'][batch['weights'] > 0] for batch in take(shuffled)[0]])
  text = ByteTokenizer().decode(ids)
  first, second = text[: len(text) // 2], text[len(text) // 2 :]
  assert sorted(first) == sorted(second) == sorted(''.join(TEXTS))
  assert first != second != ''.join(TEXTS)
  other = dataclasses.replace(training, seed=2)
  assert (take(training, 1)[0][0]['ids'] != take(other, 1)[0][0]['ids']).any()


def test_max_batches_ends_either_kind(training, evaluation):
  for settings in (training, evaluation):
    limited = dataclasses.replace(settings, max_batches=3)
    batches, state = take(limited)
    assert_same(batches, take(settings, 3)[0])
    assert take(limited, None, state)[0] == []


def test_a_damaged_record_is_named_and_nothing_is_lost_after_its_repair(training, jsonl):
  whole, _ = take(training, 20)
  lines = jsonl.read_text().splitlines()
  good = lines[20]
  lines[20] = 'x' * len(good)
  jsonl.write_text('\n'.join(lines) + '\n')
  iterator = training.make_iterator()
  batches = []
  with pytest.raises(ValueError, match=r'texts\.jsonl:21: .* not JSON'):
    batches.extend(iterator)  # extend keeps the batches before the error
  lines[20] = good
  jsonl.write_text('\n'.join(lines) + '\n')
  batches += itertools.islice(iterator, 20 - len(batches))
  assert_same(batches, whole)


class FaultySource:
  """Three blocks; reading block 1 calls `fault`."""

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
def test_errors_name_the_block_and_other_blocks_can_still_be_read(error, expected, message):
  reader = BlockReader(FaultySource(lambda: fail(error)), TextEncoder(ByteTokenizer()), timeout_s=30)
  with pytest.raises(expected, match=message):
    reader[1]
  assert reader[2].ids.tolist() == [1, ord('2') + 3]
  reader.close()


def test_a_read_that_hangs_raises_an_error_after_the_timeout():
  others, released = set(threading.enumerate()), threading.Event()
  reader = BlockReader(FaultySource(lambda: released.wait(60)), TextEncoder(ByteTokenizer()), timeout_s=0.3)
  start = time.monotonic()
  with pytest.raises(RuntimeError, match=r'reading file.txt block 1 took longer than 0.3 s.*read_timeout_s'):
    reader[1]
  assert time.monotonic() - start < 5
  assert reader[0].labels.tolist() == [ord('0') + 3, 2]
  released.set()
  reader.close()
  while {*threading.enumerate()} - others:
    assert time.monotonic() - start < 10, 'a reading thread did not end after its read'
    time.sleep(0.01)
