"""Encoded text decodes exactly; special tokens have their ids."""

import pickle

import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import (
  BpeTokenizer,
  ByteTokenizer,
  IdTokenizer,
  SentencePieceTokenizer,
  T5ByteTokenizer,
  Tokenizer,
  train_bpe,
)
from spmd_tasks.inputs.tokenizers import bytes_of_tokens, decode_generated, encode_prompt

TEXTS = ['', 'hello', ' two  spaces\n\ttab', 'déjà vu', '漢字 🙂 \x00\x7f', 'a' * 300]


@pytest.fixture(scope='module')
def bpe(tmp_path_factory) -> BpeTokenizer:
  path = tmp_path_factory.mktemp('bpe') / 'tokenizer.json'
  return train_bpe(['the cat sat on the mat', 'the hat'] * 20, str(path), vocab_size=280)


@pytest.mark.parametrize('text', TEXTS)
def test_round_trips(bpe, text):
  for tokenizer in (ByteTokenizer(), bpe):
    assert isinstance(tokenizer, Tokenizer)
    ids = tokenizer.encode(text)
    assert isinstance(ids, list)
    assert tokenizer.decode(ids) == text
    array = tokenizer.encode_array(text)
    assert array.dtype == np.int32
    assert array.tolist() == ids
    assert all(3 <= i < tokenizer.vocab_size for i in ids)


def test_byte_ids():
  tokenizer = ByteTokenizer()
  assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 1, 2, 259)
  assert tokenizer.encode('Aé') == [65 + 3, 0xC3 + 3, 0xA9 + 3]
  assert tokenizer.decode([1, 65 + 3, 2, 0, 0]) == 'A'
  assert tokenizer.decode([0xC3 + 3]) == '\ufffd'
  with pytest.raises(ValueError, match='259'):
    tokenizer.decode([259])


def test_bpe_merges_and_special_tokens(bpe):
  assert (bpe.pad_id, bpe.bos_id, bpe.eos_id) == (0, 1, 2)
  assert 259 < bpe.vocab_size <= 280
  assert len(bpe.encode('the the the')) < len('the the the')
  assert bpe.decode([bpe.bos_id, *bpe.encode('the'), bpe.eos_id, bpe.pad_id]) == 'the'


def test_prompts_begin_with_one_bos_if_there_is_one(bpe):
  assert encode_prompt(ByteTokenizer(), 'A') == (1, 68)
  assert encode_prompt(bpe, 'hat') == encode_prompt(bpe, '<bos>hat') == (1, *bpe.encode('hat'))
  without = BpeTokenizer(path=bpe.path, bos_token=None)
  assert encode_prompt(without, '') == ()
  assert encode_prompt(without, 'hat') == tuple(bpe.encode('hat'))


def test_generated_ids_outside_the_vocabulary_have_no_text(bpe):
  for tokenizer in (ByteTokenizer(), bpe):
    assert decode_generated(tokenizer, [*tokenizer.encode('hat'), tokenizer.vocab_size, 10**6]) == 'hat'


def test_errors_name_the_file_and_the_remedy(bpe, tmp_path):
  with pytest.raises(ValueError, match='train_bpe'):
    BpeTokenizer(path=str(tmp_path / 'none.json')).encode('a')
  with pytest.raises(ValueError, match=r"'</s>'.*eos_token"):
    BpeTokenizer(path=bpe.path, eos_token='</s>').eos_id  # noqa: B018
  damaged = tmp_path / 'damaged.json'
  damaged.write_text('{')
  with pytest.raises(ValueError, match=r'damaged\.json'):
    BpeTokenizer(path=str(damaged)).encode('a')
  with pytest.raises(ValueError, match='at least 256'):
    train_bpe(['a'], str(tmp_path / 'small.json'), vocab_size=200)
  assert BpeTokenizer(path=bpe.path, bos_token=None, pad_token=None).bos_id is None


def test_id_tokenizer_reads_and_writes_numbers():
  tokenizer = IdTokenizer(vocab_size=64, eos_id=63)
  assert tokenizer.encode('5 17\n3') == [5, 17, 3]
  assert tokenizer.decode([5]) + tokenizer.decode([17, 63]) == tokenizer.decode([5, 17]) == ' 5 17'
  for text in ('5 64', '5, 17', '-1', '²', '9' * 5000):
    with pytest.raises(UserError, match=r'is not an id: .* below 64'):
      tokenizer.encode(text)


def test_t5_bytes():
  tokenizer = T5ByteTokenizer(extra_ids=100)
  assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, None, 1, 359)
  assert tokenizer.encode('Aé') == [65 + 3, 0xC3 + 3, 0xA9 + 3]
  assert tokenizer.decode([65 + 3, 358, 2, 1, 0]) == 'A'
  assert encode_prompt(tokenizer, 'A') == (68,)
  assert tokenizer.fingerprint() != T5ByteTokenizer().fingerprint() != ByteTokenizer().fingerprint()


@pytest.fixture(scope='module')
def sentencepiece_model(tmp_path_factory):
  import sentencepiece

  path = tmp_path_factory.mktemp('pieces') / 'sentencepiece.model'
  with path.open('wb') as file:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(['the cat sat on the mat', 'a hat on the cat', 'that is the hat'] * 10),
      model_writer=file,
      vocab_size=18,
      pad_id=0,
      eos_id=1,
      unk_id=2,
      bos_id=-1,
      minloglevel=2,
    )
  return str(path)


def test_sentencepiece_agrees_with_seqio(sentencepiece_model):
  from spmd_tasks.bridges.t5x._seqio import import_seqio, tokenizer_of_vocabulary

  vocabulary = import_seqio().SentencePieceVocabulary(sentencepiece_model, extra_ids=5)
  tokenizer = pickle.loads(pickle.dumps(SentencePieceTokenizer(path=sentencepiece_model, extra_ids=5)))
  assert tokenizer == tokenizer_of_vocabulary(vocabulary)
  assert tokenizer.vocab_size == vocabulary.vocab_size == 23
  assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, None, 1)
  for text in ('the hat', 'that cat sat on <extra_id_0> mat <extra_id_1>', 'zebra'):
    assert tokenizer.encode(text) == vocabulary.encode(text) == tokenizer.encode_array(text).tolist()
  assert tokenizer.encode('<extra_id_0>')[-1] == 22
  assert tokenizer.decode([*tokenizer.encode('the hat'), 1, 0, 0]) == 'the hat'
  pieces = bytes_of_tokens(tokenizer, [*tokenizer.encode('the hat'), 1, 0, 22, 99])
  assert (b''.join(pieces[:-4]), pieces[-4:]) == (b' the hat', [b'', b'', b' <extra_id_0>', b''])
  assert tokenizer.fingerprint() != SentencePieceTokenizer(path=sentencepiece_model).fingerprint()
