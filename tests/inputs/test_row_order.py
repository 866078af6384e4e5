"""No row of a batch copies another, and all text is read equally often, for sources of all kinds and sizes.

In most tests all tokens differ, so that equal tokens are the same text.
"""

import collections
import dataclasses
from fractions import Fraction
import itertools
import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spmd_tasks.inputs import (
  Block,
  ByteTokenizer,
  ChatTemplate,
  IdTokenizer,
  JsonLines,
  Mixture,
  Parquet,
  SpanCorruption,
  T5ByteTokenizer,
  TarShards,
  TextFiles,
  TextInput,
  base,
  row_order,
)
from spmd_tasks.inputs.packing import TokenBlock
from spmd_tasks.inputs.row_order import order_of_epoch
from spmd_tasks.tuning import ConversationInput, Conversations
from tests.inputs.batches import assert_same, check_positions, concatenate_shards, take

NUMBERS = IdTokenizer(vocab_size=1_000_000, eos_id=0)


@dataclasses.dataclass(frozen=True)
class Numbered:
  """Blocks of documents of these lengths, whose tokens count from 1 through all blocks."""

  blocks: tuple[tuple[int, ...], ...]
  tells_sizes: bool = True

  def open(self):
    return self

  def __len__(self):
    return len(self.blocks)

  def __getitem__(self, index):
    first = 1 + sum(map(sum, self.blocks[:index]))
    ends = np.cumsum((0, *self.blocks[index]))
    return Block(self.block_name(index), [(first + np.arange(a, b), True) for a, b in itertools.pairwise(ends)])

  def block_name(self, index):
    return f'block {index}'

  def fingerprint(self):
    return str(self.blocks)

  def sizes(self):
    return np.array([sum(block) for block in self.blocks]) if self.tells_sizes else None


class Bytes(Numbered):
  """Texts of one row each."""

  def __init__(self):
    super().__init__(((8,) * 30,))

  def __getitem__(self, index):
    return Block('', [(f'{i:02}' * 4, True) for i in range(30)])


def numbered(*blocks, **settings):
  return TextInput(source=Numbered(tuple(blocks)), tokenizer=NUMBERS, **settings)


def texts(num, num_rows):
  """Returns texts of `num_rows` rows of 24 tokens; all rows differ."""
  return [''.join(f'{i:02}{chr(48 + j)}.' for j in range(6 * num_rows))[:-1] for i in range(num)]


def write_text_files(path):
  for i, text in enumerate(texts(20, 9)):
    (path / f'{i}.txt').write_text(text[: 24 * (i % 9 + 1) - 1])
  return TextFiles(pattern=str(path / '*.txt'), block_bytes=64)


def write_json_lines(path):
  (path / 'a.jsonl').write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts(64, 2)))
  return JsonLines(pattern=str(path / 'a.jsonl'))


def write_parquet(path):
  pq.write_table(pa.table({'text': texts(50, 3)}), path / 'a.parquet')
  return Parquet(pattern=str(path / 'a.parquet'))


def write_tar(path):
  with tarfile.open(path / 'a.tar', 'w') as tar:
    for i, text in enumerate(texts(40, 3)):
      (path / 'one').write_text(text)
      tar.add(path / 'one', f'{i}.txt')
  return TarShards(pattern=str(path / 'a.tar'))


def write_chats(path):
  chats = [[('user', f'{i}?'), ('assistant', str(i) * (i % 5 + 1))] for i in range(60)]
  lines = [{'messages': [{'role': role, 'content': content} for role, content in chat]} for chat in chats]
  (path / 'a.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  return Conversations(pattern=str(path / 'a.jsonl'))


def keys(batch):
  """Returns the bytes of each row over all arrays."""
  return [b''.join(batch[name][row].tobytes() for name in sorted(batch)) for row in range(len(batch['ids']))]


@pytest.mark.parametrize('packing', [True, False])
@pytest.mark.parametrize('shuffle', [True, False])
@pytest.mark.parametrize('write', [write_text_files, write_json_lines, write_parquet, write_tar, write_chats])
def test_rows_of_a_batch_differ_and_come_once_per_epoch(tmp_path, write, shuffle, packing):
  source = write(tmp_path)
  settings = {'source': source, 'tokenizer': ByteTokenizer(), 'seq_len': 24, 'shuffle': shuffle, 'packing': packing}
  if isinstance(source, Conversations):
    template = ChatTemplate.from_turns('<{role}>{content}', reply='<assistant>')
    make = lambda **sizes: ConversationInput(**settings, **sizes, template=template, too_long='truncate')
  else:
    make = lambda **sizes: TextInput(**settings, **sizes)
  one_pass = dataclasses.replace(make(batch_size=1), num_epochs=1, shuffle=False)
  rows = [keys(batch)[0] for batch in take(one_pass)[0]]
  assert len({*rows}) == len(rows) > 32
  for batch_size in (8, 16, 32):
    batches, _ = take(make(batch_size=batch_size), 3 * len(rows) // batch_size)
    read = [keys(batch) for batch in batches]
    assert all(len({*batch}) == batch_size for batch in read)
    in_order = [*itertools.chain(*read)]
    for epoch in range(2):
      rows_of_epoch = in_order[epoch * len(rows) : (epoch + 1) * len(rows)]
      assert len({*rows_of_epoch}) == len(rows)
      assert (packing and shuffle) or {*rows_of_epoch} == {*rows}  # with both, blocks are shuffled before packing
    if not shuffle:
      assert in_order[: len(rows)] == in_order[len(rows) : 2 * len(rows)] == rows
    check_positions(make(batch_size=batch_size))


@pytest.mark.parametrize('batch_size', [1, 5, 16])
@pytest.mark.parametrize('num_rows', [1, 2, 5, 16, 23, 47, 48, 49, 200])
def test_consecutive_rows_of_all_epochs_differ(num_rows, batch_size):
  orders = [order_of_epoch(num_rows, batch_size, 7, epoch) for epoch in range(20)]
  assert all(sorted(order) == list(range(num_rows)) for order in orders)
  sequence = np.concatenate(orders)
  last = {}
  for position, row in enumerate(sequence.tolist()):
    assert position - last.get(row, -num_rows) >= min(num_rows, batch_size)
    last[row] = position
  if num_rows > max(2, batch_size):
    assert any((orders[0] != order).any() for order in orders[1:])


def test_a_megabyte_of_text_fills_batches_with_distinct_rows(tmp_path):
  rng = np.random.default_rng(0)
  (tmp_path / 'a.txt').write_bytes(rng.integers(97, 123, 1_115_394).astype(np.uint8).tobytes())  # as tiny Shakespeare
  for batch_size in (64, 128):
    settings = TextInput(
      source=TextFiles(pattern=str(tmp_path / 'a.txt')), tokenizer=ByteTokenizer(), batch_size=batch_size, seq_len=256
    )
    assert [len({*keys(batch)}) for batch in take(settings, 75)[0]] == [batch_size] * 75


def test_an_epoch_of_fewer_rows_than_a_batch_is_logged_once(caplog):
  settings = numbered((5, 30), (12,), batch_size=8, seq_len=10)
  batches, _ = take(settings, 10)
  (warning,) = [record.getMessage() for record in caplog.records]
  assert 'An epoch has 5 rows, but a batch takes 8' in warning
  counts = collections.Counter(itertools.chain(*map(keys, batches)))
  assert sorted(counts.values()) == [16] * 5  # 80 rows


def test_rows_longer_than_all_text_contain_it_once():
  (batch,), _ = take(numbered((5, 30), (12,), batch_size=2, seq_len=100), 1)
  for labels, weights in zip(batch['labels'], batch['weights']):
    assert sorted(labels[weights > 0]) == [0, 0, 0, *({*range(1, 48)} - {1, 6, 36})]


@pytest.mark.parametrize('num_epochs', [2, 3])
def test_each_row_comes_once_in_each_of_several_epochs(num_epochs):
  settings = numbered((70,), (25, 31), batch_size=8, seq_len=6, num_epochs=num_epochs, packing=False)
  batches, _ = take(settings)
  rows = [batch['ids'][row].tobytes() for batch in batches for row in range(8) if batch['weights'][row].any()]
  counts = collections.Counter(rows)
  assert {*counts.values()} == {num_epochs}
  assert len(batches) == -(-len(rows) // 8)
  assert all(len({*keys(batch)}) == 8 for batch in batches[:-1])


@pytest.fixture
def large(monkeypatch):
  """Treats every source as a larger one."""
  monkeypatch.setattr('spmd_tasks.inputs.text_input.small_source_tokens', lambda *sizes: -1)


# By default sources tell sizes if, and only if, they are shuffled.
ORDERS = [(True, True), (False, False)]
ORDERS += [pytest.param(shuffle, not shuffle, marks=pytest.mark.exhaustive) for shuffle in (True, False)]


@pytest.mark.parametrize('shuffle, tells_sizes', ORDERS)
@pytest.mark.parametrize('packing', [True, False])
@pytest.mark.parametrize('batch_size', [1, 3, 8, 40])
def test_rows_of_a_large_source_read_equal_shares(large, batch_size, packing, shuffle, tells_sizes):
  """With fewer and with more blocks than rows, and documents that are longer and shorter than rows."""
  blocks = tuple((40 + i % 7, 25, 90 - i % 5) for i in range(30))
  source = Numbered(blocks, tells_sizes)
  settings = TextInput(
    source=source, tokenizer=NUMBERS, batch_size=batch_size, seq_len=10, shuffle=shuffle, packing=packing
  )
  total = sum(map(sum, blocks))
  num_batches = 6 * total // (10 * batch_size)
  batches, _ = take(settings, num_batches)
  owners = collections.defaultdict(set)  # token -> the rows that read it
  counts = np.zeros(total + 1, int)
  for batch in batches:
    for row, (ids, weights) in enumerate(zip(batch['ids'], batch['weights'])):
      counts[ids[weights > 0]] += 1
      for token in ids[weights > 0].tolist():
        owners[token].add(row)
  assert {len(rows) for rows in owners.values()} == {1}
  assert len(owners) == total
  least, most = counts[1:].min(), counts[1:].max()
  assert most <= least + 2 + (least // 3 if not packing and batch_size > 8 else 1)
  if batch_size == 8:
    check_positions(settings)


def test_shares_of_a_large_source_are_reshuffled_in_each_epoch(large):
  settings = numbered(*[(10,)] * 64, batch_size=2, seq_len=10)
  batches, _ = take(settings, 96)
  epochs = np.array([batch['ids'][:, 0] for batch in batches]).reshape(3, 32, 2)
  for row in range(2):
    orders = epochs[:, :, row].tolist()
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2] != orders[0] != sorted(orders[0])


def test_records_of_a_large_source_stay_whole(large, tmp_path):
  template = ChatTemplate.from_turns('<{role}>{content}', reply='<assistant>')
  settings = ConversationInput(
    source=write_chats(tmp_path), tokenizer=ByteTokenizer(), template=template, batch_size=8, seq_len=40, packing=False
  )
  rows = [keys(batch) for batch in take(settings, 60)[0]]
  assert all(len({*batch}) == 8 for batch in rows)
  counts = collections.Counter(itertools.chain(*rows))
  assert len(counts) == 60
  assert max(counts.values()) - min(counts.values()) <= 2  # 7 or 8 records for each row of the batch
  check_positions(settings)


@pytest.mark.parametrize('num_documents', [20, 40, pytest.param(64, marks=pytest.mark.exhaustive), 300])
def test_epochs_of_a_large_source_have_no_copies_at_their_boundaries(large, num_documents):
  """Of many documents, every third is empty."""
  is_many = num_documents > 64
  documents = [(0 if i % 3 == 2 and is_many else 10,) for i in range(num_documents)]
  num_epochs = 12 if is_many else 40
  settings = numbered(*documents, batch_size=16, seq_len=10, packing=False, num_epochs=num_epochs)
  batches, _ = take(settings)
  rows = [keys(batch) for batch in batches[:-1]]
  assert all(len({*batch}) == 16 for batch in rows)
  counts = collections.Counter(itertools.chain(*map(keys, batches)))
  del counts[keys(base.empty_batch(1, 10))[0]]
  assert {*counts.values()} == {num_epochs}
  check_positions(settings)


@pytest.mark.parametrize('keeps_whole, packing', [(False, True), (False, False), (True, True)])
def test_slices_concatenate_to_the_block(keeps_whole, packing):
  ids = np.arange(53, dtype=np.int32)
  block = TokenBlock(ids, ids + 1, (7, 40, 53), {'weights': np.ones(53)}, num_truncated=1)
  boundaries = [Fraction(0), Fraction(2, 7), Fraction(1, 2), Fraction(2, 3), Fraction(9, 10), Fraction(1)]
  parts = [row_order.slice_block(block, a, b, 8, packing, keeps_whole) for a, b in itertools.pairwise(boundaries)]
  np.testing.assert_array_equal(np.concatenate([part.ids for part in parts]), ids)
  np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), ids + 1)
  assert sum(part.num_truncated for part in parts) == 1
  assert sum(part.ids.size > 0 for part in parts) == (1 if keeps_whole else 5)
  begins = {0, 7, 15, 23, 31, 39, 40, 48}
  assert packing or all(int(part.ids[0]) in begins for part in parts if part.ids.size)


FEW, MANY = (numbered(*blocks, batch_size=12, seq_len=10) for blocks in ([(49, 50)], [(50,)] * 40))
PLAIN = [{'ids': np.arange(12)}, {'ids': np.arange(12, 15)}]


@pytest.mark.parametrize(
  'sources, num_few', [({'few': FEW, 'many': MANY}, 10), ({'few': PLAIN, 'many': [{'ids': np.arange(100, 112)}]}, 15)]
)
def test_rows_of_a_mixture_differ(sources, num_few):
  """With a source that has as many rows as a batch takes, or hardly more."""
  mixture = Mixture(sources=sources, weights={'few': 0.8, 'many': 0.2})
  counts = collections.Counter()
  for batch in take(mixture, 60)[0]:
    few = [rows.tobytes() for rows in batch['ids'][batch['row_sources'][:, 0]]]
    assert len({*few}) == len(few) >= 9
    counts.update(few)
  assert len(counts) == num_few
  assert max(counts.values()) - min(counts.values()) <= 1
  check_positions(mixture)


def test_rows_of_a_mixture_within_a_mixture_differ():
  """Its weights change after 5 of its batches, which are 6 2/3 batches of the outer mixture."""
  inner = Mixture(
    sources={'few': PLAIN, 'many': [{'ids': np.arange(100, 112)}]},
    weights={'few': 0.8, 'many': 0.2},
    weight_changes=((5, {'few': 0.25, 'many': 0.75}),),
  )
  rest = [{'ids': np.arange(200, 212)}]
  mixture = Mixture(sources={'inner': inner, 'rest': rest}, weights={'inner': 0.75, 'rest': 0.25})
  batches, position = take(mixture, 60)
  few = np.array([np.sum(batch['ids'] < 15) for batch in batches])
  assert [few[:7].sum(), few[7:].sum()] == pytest.approx([7 * 12 * 0.6, 53 * 12 * 0.1875], abs=1)
  for batch in batches:
    assert len({*batch['ids'].tolist()}) == 12
    np.testing.assert_array_equal(batch['row_sources'][:, 1], batch['ids'] >= 200)
  progress = mixture.progress(position)
  assert progress['rows/inner'] == progress['rows/inner.few'] + progress['rows/inner.many'] == 60 * 12 * 0.75
  check_positions(mixture)


def test_a_mixture_reads_corrupted_rows_in_order():
  text = TextInput(source=Bytes(), tokenizer=T5ByteTokenizer(extra_ids=9), batch_size=4, seq_len=9)
  spans = SpanCorruption(text=text, inputs_length=16, seed=3)
  mixture = Mixture(sources={'a': spans, 'b': dataclasses.replace(spans, seed=4)}, weights={'a': 3, 'b': 1})
  rows = [
    row for batch in take(mixture, 20)[0] for row, is_a in zip(batch['encoder_ids'], batch['row_sources'][:, 0]) if is_a
  ]
  alone = np.concatenate([batch['encoder_ids'] for batch in take(spans, 15)[0]])
  np.testing.assert_array_equal(rows, alone)
  check_positions(mixture)


@pytest.mark.parametrize('is_large', [False, True])
@pytest.mark.parametrize('num_hosts', [1, 2])
def test_a_position_of_an_earlier_version_continues_after_as_many_batches(request, caplog, is_large, num_hosts):
  if is_large:
    request.getfixturevalue('large')
  settings = numbered(*[(10,)] * 64, batch_size=4, seq_len=10)
  hosts = [settings.make_iterator(i, num_hosts) for i in range(num_hosts)]
  for host in hosts:
    next(host)
    state = host.get_state()
    for name in ('num_rows', 'num_rows_of_epoch', 'digest', 'num_parts'):
      state.pop(name, None)
    # Each of four lanes has read 24 blocks of one endless order: together, an epoch and a half.
    host.set_state(state | {'num_batches': 24, 'lanes': [[24, 0, 0]] * (4 // num_hosts)})
  (batch,) = concatenate_shards([[next(host)] for host in hosts])
  assert 'was saved by an earlier version' in caplog.text
  state = settings.reshard_states([host.get_state() for host in hosts], 1)[0]
  assert settings.epochs(state) == pytest.approx(1.5, abs=0.1)
  whole, _ = take(settings, 25)
  assert_same([batch], whole[24:])
