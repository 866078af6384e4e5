"""Data written by Megatron-LM, WebDataset and Hugging Face's datasets are read completely and resumed exactly.

tests/data/megatron was written by IndexedDatasetBuilder of megatron-core 0.16.1: document d has the tokens
`tokens(d)`, in one sequence, or in two if d is odd.
"""

import dataclasses
import io
import json
from pathlib import Path
import struct
import tarfile

import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ByteTokenizer, IdTokenizer, MegatronTokens, TarShards, TextInput, as_input
from tests.inputs.batches import assert_same, documents, take

MEGATRON = Path(__file__).parents[1] / 'data' / 'megatron'
EOD, NUM_DOCUMENTS = 1, 60


def tokens(document: int) -> list[int]:
  return [(31 * document + 7 * i) % 1000 + 2 for i in range(document * 7 % 40 + 1)] + [EOD]


def assert_resumes(settings, num_batches: int) -> None:
  """Asserts that one and two shards can resume after any batch."""
  batches, _ = take(settings, num_batches)
  for at in (1, num_batches // 2 + 1):
    for shards in (1, 2):
      resumed = settings.reshard_states([take(settings, at)[1]], shards)
      for index in range(shards):
        rest, _ = take(settings, num_batches - at, resumed[index], (index, shards))
        expected = [{key: np.split(rows, shards)[index] for key, rows in batch.items()} for batch in batches[at:]]
        assert_same(rest, expected)


@pytest.mark.parametrize('dtype', ['uint16', 'int32'])
@pytest.mark.parametrize('block_tokens', [7, 16384])
def test_documents_that_megatron_wrote(dtype, block_tokens):
  source = MegatronTokens(prefix=str(MEGATRON / dtype), block_tokens=block_tokens)
  assert documents(source.open()) == [tokens(document) for document in range(NUM_DOCUMENTS)]
  parts = [dataclasses.replace(source, part=part) for part in ((0.0, 0.9), (0.9, 1.0))]
  assert [document for part in parts for document in documents(part.open())] == documents(source.open())
  assert len(documents(parts[1].open())) == 6
  with pytest.raises(UserError, match='matches 4 files: use one prefix'):
    MegatronTokens(prefix=str(MEGATRON / '*')).open()


def text_input(source, tokenizer, **fields) -> TextInput:
  return TextInput(source=source, tokenizer=tokenizer, batch_size=4, seq_len=16, **fields)


def test_ids_of_megatron_are_packed_without_a_second_eos_and_resumed():
  source = MegatronTokens(prefix=str(MEGATRON / 'uint16'), block_tokens=64)
  tokenizer = IdTokenizer(vocab_size=1002, eos_id=EOD)
  whole = text_input(source, tokenizer, num_epochs=1, shuffle=False).make_iterator()
  labels = [label for batch in whole for label, weight in zip(batch['labels'].flat, batch['weights'].flat) if weight]
  assert labels.count(EOD) == NUM_DOCUMENTS
  assert_resumes(text_input(source, tokenizer), 6)
  with pytest.raises(UserError, match='outside the vocabulary of 900 entries'):
    list(text_input(source, IdTokenizer(vocab_size=900, eos_id=EOD), num_epochs=1).make_iterator())


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda index, data: (b'MMIDIDY' + index[7:], data), 'is not a Megatron-LM index'),
    (lambda index, data: (b'', data), 'is not a Megatron-LM index'),
    (lambda index, data: (index[:-8], data), 'has 1594 bytes, but needs 1602'),
    (lambda index, data: (index, data[:-2]), 'but needs .* according to its index'),
    (lambda index, data: (index[:-16] + struct.pack('<2q', 10**6, 10**6), data), 'is damaged'),
    (lambda index, data: (index[:-8] + struct.pack('<q', -1), data), 'is damaged'),
    (lambda index, data: (index[:34] + struct.pack('<i', -1) + index[38:], data), 'is damaged'),
    (lambda index, data: (index[:18] + struct.pack('<Q', 2**62) + index[26:], data), 'but needs 5534'),
  ],
)
def test_damaged_megatron_files_are_refused(tmp_path, change, message):
  index, data = change(*((MEGATRON / f'uint16.{kind}').read_bytes() for kind in ('idx', 'bin')))
  (tmp_path / 'x.idx').write_bytes(index)
  (tmp_path / 'x.bin').write_bytes(data)
  with pytest.raises(UserError, match=message):
    MegatronTokens(prefix=str(tmp_path / 'x')).open()


@pytest.fixture
def shards(tmp_path) -> Path:
  for shard in range(3):
    with tarfile.open(tmp_path / f'web-{shard}.tar', 'w') as tar:
      for sample in range(30):
        text = f'{shard}/{sample} ä {"word " * (sample % 5)}'
        contents = {'txt': text.encode(), 'json': json.dumps({'text': text}).encode(), 'cls': b'1'}
        for kind, data in contents.items():
          info = tarfile.TarInfo(f'some.dir/{shard:03}{sample:04}.{kind.upper() if sample == 7 else kind}')
          info.size = len(data)
          tar.addfile(info, io.BytesIO(data))
  return tmp_path


@pytest.mark.filterwarnings('default')  # webdataset leaves files open
@pytest.mark.parametrize('field, key', [('txt', None), ('json', 'text')])
def test_samples_of_tar_shards_as_webdataset_reads_them(shards, field, key):
  texts = documents(TarShards(pattern=f'{shards}/*.tar', field=field, key=key, block_samples=7).open())
  assert texts == [f'{shard}/{sample} ä {"word " * (sample % 5)}' for shard in range(3) for sample in range(30)]
  webdataset = pytest.importorskip('webdataset')
  paths = sorted(map(str, shards.glob('*.tar')))
  assert texts == [sample['txt'] for sample in webdataset.WebDataset(paths, shardshuffle=False).decode()]


def test_tar_shards_are_resumed_and_damaged_shards_refused(shards):
  source = TarShards(pattern=f'{shards}/*.tar', block_samples=4)
  assert_resumes(text_input(source, ByteTokenizer()), 6)
  with pytest.raises(UserError, match=r'have no file \.png'):
    dataclasses.replace(source, field='png').open()
  (shards / 'web-3.tar').write_bytes(b'\x1f\x8b' + bytes(2000))
  with pytest.raises(UserError, match=r'web-3\.tar is not an uncompressed tar file'):
    source.open()


@pytest.mark.parametrize('shuffles', [False, True])
@pytest.mark.filterwarnings('default')  # the library's own
def test_a_stream_of_hugging_face_datasets_is_resumed(shuffles, caplog):
  datasets = pytest.importorskip('datasets')
  stream = datasets.Dataset.from_dict({'x': list(range(100)), 'y': [[i, -i] for i in range(100)]})
  stream = stream.to_iterable_dataset(num_shards=5)
  stream = (stream.shuffle(seed=3, buffer_size=16) if shuffles else stream).batch(8, drop_last_batch=True)
  data = as_input('train_input', stream, repeats=True)
  assert data.element_spec()['y'].shape == (8, 2)
  assert_resumes(data, 16)  # an epoch has 12 batches
  # The library's state does not include the shuffle buffer, so the batches are read again.
  assert ('to reach the saved position' in caplog.text) == shuffles


class TorchLike:
  """Batches whose state is not JSON: torch's loaders, for example, save the bytes of a random generator."""

  def __init__(self):
    self._next = 0

  def __iter__(self):
    while self._next < 12:
      self._next += 1
      yield {'x': np.arange(8) + 8 * self._next}
    self._next = 0

  def state_dict(self):
    return {'rng': bytes([self._next])}

  def load_state_dict(self, state):
    self._next = state['rng'][0]


class Counting(TorchLike):
  """The same batches, with a number as the state."""

  state_dict = None

  def state(self):
    return self._next

  def restore(self, state):
    self._next = state


def test_an_iterable_with_state_and_restore_is_resumed(caplog):
  assert_resumes(as_input('train_input', Counting(), repeats=True), 16)
  assert 'to reach the saved position' not in caplog.text


def test_data_whose_state_is_not_json_are_read_again():
  assert_resumes(as_input('train_input', TorchLike(), repeats=True), 16)
