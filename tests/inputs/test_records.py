"""JSON lines, Parquet and ArrayRecord: all documents, in order, and errors that name the record."""

import json
import os
import pickle
import time

from array_record.python import array_record_module
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spmd_tasks.errors import JobError, UserError
from spmd_tasks.inputs import ArrayRecord, ByteTokenizer, JsonLines, Parquet, TextInput, TextSource
from spmd_tasks.inputs.text import OpenSource
from tests.inputs.batches import assert_same, take

TEXTS = [f'document {i} ' + 'é\n' * (i % 5) for i in range(23)]


def write_jsonl(path, texts, field='text'):
  path.write_text(''.join(json.dumps({'id': i, field: t}) + '\n' for i, t in enumerate(texts)), encoding='utf-8')


def write_parquet(path, texts, field='text'):
  pq.write_table(pa.table({'id': list(range(len(texts))), field: texts}), path, row_group_size=5)


def write_array_record(path, texts):
  writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1')
  for text in texts:
    writer.write(text if isinstance(text, bytes) else text.encode())
  writer.close()


@pytest.fixture
def sources(tmp_path):
  write_jsonl(tmp_path / 'a.jsonl', TEXTS[:10])
  write_jsonl(tmp_path / 'b.jsonl', TEXTS[10:])
  write_parquet(tmp_path / 'a.parquet', TEXTS[:10])
  write_parquet(tmp_path / 'b.parquet', TEXTS[10:])
  write_array_record(tmp_path / 'a.array_record', TEXTS[:10])
  write_array_record(tmp_path / 'b.array_record', TEXTS[10:])
  write_array_record(tmp_path / 'json.arecord', [json.dumps({'body': text}) for text in TEXTS])
  return {
    'jsonl': JsonLines(pattern=f'{tmp_path}/*.jsonl', block_bytes=16),
    'jsonl_blocks': JsonLines(pattern=f'{tmp_path}/*.jsonl', block_bytes=100),
    'parquet': Parquet(pattern=f'{tmp_path}/*.parquet', block_rows=2),
    'array_record': ArrayRecord(pattern=f'{tmp_path}/*.array_record'),
    'array_record_json': ArrayRecord(pattern=f'{tmp_path}/*.arecord', field='body'),
  }


KINDS = ['jsonl', 'jsonl_blocks', 'parquet', 'array_record', 'array_record_json']


@pytest.mark.parametrize('kind', KINDS)
def test_documents_come_once_and_in_order_also_in_workers_and_by_random_access(sources, kind):
  assert isinstance(sources[kind], TextSource)
  source = sources[kind].open()
  assert isinstance(source, OpenSource)
  blocks = [source[i] for i in range(len(source))]
  assert [document for block in blocks for document in block.documents] == [(text, True) for text in TEXTS]
  copy = pickle.loads(pickle.dumps(source))
  for i in reversed(range(len(source))):
    assert copy[i] == blocks[i]
    assert copy.block_name(i) == blocks[i].name
  assert copy.fingerprint() == source.fingerprint() == sources[kind].open().fingerprint()


def test_fingerprints_follow_files_and_settings(sources, tmp_path):
  before = {kind: settings.open().fingerprint() for kind, settings in sources.items()}
  assert len({before[kind] for kind in KINDS}) == len(KINDS)
  write_jsonl(tmp_path / 'b.jsonl', TEXTS)
  write_parquet(tmp_path / 'b.parquet', TEXTS)
  write_array_record(tmp_path / 'b.array_record', TEXTS)
  for kind in ('jsonl', 'parquet', 'array_record'):
    assert sources[kind].open().fingerprint() != before[kind]


@pytest.mark.parametrize(
  'line, message',
  [
    ('{"text": "cut o', r'bad\.jsonl:31: .* not JSON'),
    ('{"text": "\\ud800"}', r'bad\.jsonl:31: .* not JSON in UTF-8: .* surrogates'),
    ('{"text": "\ud800"}', r'bad\.jsonl:31: .* not JSON in UTF-8'),  # three bytes that are not valid UTF-8
    ('[' * 100_000, r'bad\.jsonl:31: .* not JSON'),  # nested too deeply
    ('["text"]', r'bad\.jsonl:31: .* list: it must be a JSON object'),
    ('{"body": "x"}', r"bad\.jsonl:31: .* no field 'text', only \['body'\]: correct"),
    ('{"text": 3}', r"bad\.jsonl:31: .* field 'text' of type int, not text"),
  ],
)
@pytest.mark.parametrize('block_bytes', [64, 1 << 16])
def test_the_error_names_a_damaged_json_line(tmp_path, line, message, block_bytes):
  lines = [json.dumps({'text': 'ä' * i}, ensure_ascii=False) for i in range(40)]
  lines[10], lines[30] = '', line
  lines[20] = r'{"text": "fine", "title": "\ud83d"}'  # half of a character, in a field that is not read
  (tmp_path / 'bad.jsonl').write_text('\n'.join(lines), encoding='utf-8', errors='surrogatepass')
  source = JsonLines(pattern=f'{tmp_path}/bad.jsonl', block_bytes=block_bytes).open()
  with pytest.raises(ValueError, match=message):
    [source[i] for i in range(len(source))]


def test_the_error_names_a_json_line_that_is_not_utf8(tmp_path):
  (tmp_path / 'bad.jsonl').write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
  with pytest.raises(ValueError, match=r'bad\.jsonl:2: '):
    JsonLines(pattern=f'{tmp_path}/bad.jsonl').open()[0]


def test_the_error_names_a_damaged_parquet_file(tmp_path):
  path = tmp_path / 'bad.parquet'
  path.write_bytes(b'PAR1 nothing of the kind')
  with pytest.raises(ValueError, match=r'bad\.parquet is not a readable Parquet file'):
    Parquet(pattern=str(path)).open()
  write_parquet(path, TEXTS)
  with pytest.raises(ValueError, match=r"one column 'body', but has \['id', 'text'\]: correct"):
    Parquet(pattern=str(path), field='body').open()
  pq.write_table(pa.Table.from_arrays([pa.array(['a'])] * 2, ['text'] * 2), path)
  with pytest.raises(ValueError, match=r"one column 'text', but has \['text', 'text'\]"):
    Parquet(pattern=str(path)).open()
  write_parquet(path, ['a'] * 7 + [None])
  source = Parquet(pattern=str(path), block_rows=2).open()
  with pytest.raises(ValueError, match=r'row group 1 row 2: .* NoneType'):
    [source[i] for i in range(len(source))]
  pq.write_table(pa.table({'text': pa.array([b'\xff'], pa.binary()).view(pa.string())}), path)
  with pytest.raises(ValueError, match=r"row group 0 rows 0-1: column 'text' is not UTF-8: .* Convert"):
    Parquet(pattern=str(path)).open()[0]
  with pytest.raises(ValueError, match='block_rows 0'):
    Parquet(pattern=str(path), block_rows=0).open()


def test_the_error_names_a_damaged_array_record(tmp_path):
  path = tmp_path / 'bad.arecord'
  write_array_record(path, [b'fine', b'\xff\xfe'])
  source = ArrayRecord(pattern=str(path)).open()
  assert source[0].documents == [('fine', True)]
  with pytest.raises(ValueError, match=r'record 1 of .*bad\.arecord is not UTF-8'):
    source[1]
  with pytest.raises(ValueError, match=r'record 0 of .*bad\.arecord is not JSON'):
    ArrayRecord(pattern=str(path), field='text').open()[0]


LAST_FILES = {'jsonl': 'b.jsonl', 'parquet': 'b.parquet', 'array_record': 'b.array_record'}


@pytest.mark.parametrize('is_pickled', [False, True], ids=['here', 'in a worker'])
@pytest.mark.parametrize('share', [0, 0.98])
@pytest.mark.parametrize('kind', LAST_FILES)
def test_the_error_names_a_file_that_is_truncated_while_it_is_read(sources, tmp_path, kind, share, is_pickled):
  source, path = sources[kind].open(), tmp_path / LAST_FILES[kind]
  last, size = len(source) - 1, path.stat().st_size
  source[last], source[0]
  if is_pickled:
    source = pickle.loads(pickle.dumps(source))
  os.truncate(path, int(size * share))
  with pytest.raises(JobError, match=rf'{path} .*{int(size * share)}.*had {size} bytes.*same file back'):
    source[last]


def test_the_error_names_a_parquet_file_that_is_replaced_while_it_is_read(tmp_path):
  path = tmp_path / 'a.parquet'
  write_parquet(path, TEXTS)
  source = Parquet(pattern=str(path)).open()
  write_parquet(path, TEXTS[1:])  # the row groups 0 to 3 are as large as before
  with pytest.raises(JobError, match=rf'{path} has'):
    source[0]


def test_a_long_line_is_read_once(tmp_path):
  path = tmp_path / 'long.jsonl'
  path.write_text('{"text": "' + 'x' * 30_000_000 + '"}\n{"text": "short"}\n')
  source = JsonLines(pattern=str(path), block_bytes=1 << 12).open()
  started = time.monotonic()
  lengths = [len(text) for i in range(len(source)) for text, _ in source[i].documents]
  assert lengths == [30_000_000, 5]
  assert time.monotonic() - started < 5  # reading to the end of the line for each of 7,300 blocks takes a minute


@pytest.mark.parametrize(
  'long, short, batch_size, shuffle',
  [([8], 0, 4, True), ([8], 0, 8, False), ([8] * 3, 0, 8, True), ([64], 100, 4, True), ([8], 0, 1, False)],
)
def test_records_far_longer_than_a_block_are_read_epoch_after_epoch(tmp_path, long, short, batch_size, shuffle):
  """A long record leaves the blocks after its first one empty, but no row of a batch is empty."""
  texts = ['x' * (16 * blocks) for blocks in long] + [f'text {number}' for number in range(short)]
  (tmp_path / 'a.jsonl').write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
  source = JsonLines(pattern=str(tmp_path / 'a.jsonl'), block_bytes=16)
  settings = TextInput(
    source=source, tokenizer=ByteTokenizer(), batch_size=batch_size, seq_len=32, seed=3, shuffle=shuffle
  )
  batches, _ = take(settings, 12)
  assert all(batch['weights'].any(axis=1).all() for batch in batches)
  first, state = take(settings, 5)
  assert_same(first + take(settings, 7, state)[0], batches)


def test_a_source_without_text_is_refused_instead_of_searched_forever(tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"text": ""}\n' * 9)
  source = JsonLines(pattern=str(tmp_path / 'a.jsonl'), block_bytes=16)
  with pytest.raises(UserError, match='the 8 blocks of the source have no text'):
    take(TextInput(source=source, tokenizer=ByteTokenizer(), batch_size=2, seq_len=4), 1)
