"""The tokenizer over HTTP."""

import pytest

from spmd_tasks.inputs import FolderTokenizer
from tests.model_folders import write_tokenizer
from tests.serving.fake_engine import TOKENIZER
from tests.serving.served import serving


@pytest.fixture(scope='module')
def client():
  with serving() as served, served.client() as client:
    yield client


def test_a_text_there_and_back(client):
  text = 'héllo'
  answer = client.post('/tokenize', json={'prompt': text, 'add_special_tokens': False, 'model': 'fake.Model'}).json()
  assert answer == {'tokens': TOKENIZER.encode(text), 'count': 6, 'max_model_len': 128}
  assert client.post('/detokenize', json={'tokens': answer['tokens']}).json() == {'prompt': text}
  with_bos = client.post('/tokenize', json={'prompt': text}).json()['tokens']
  assert with_bos == [TOKENIZER.bos_id, *TOKENIZER.encode(text)]
  long = client.post('/tokenize', json={'prompt': 'x' * 20_000, 'add_special_tokens': False}).json()
  assert long['count'] == 20_000


def test_special_tokens_have_names(client):
  info = client.get('/tokenizer_info').json()
  assert (info['bos_token'], info['eos_token']) == ('token_id:1', 'token_id:2')
  assert 'assistant' in info['chat_template']
  assert client.post('/tokenize', json={'prompt': info['eos_token']}).json()['tokens'] == [2]
  assert client.post('/tokenize', json={'prompt': '', 'add_special_tokens': False}).json()['tokens'] == []


def test_those_of_a_folder_are_its_texts(tmp_path):
  tokenizer = FolderTokenizer(path=str(write_tokenizer(tmp_path)))
  with serving(tokenizer=tokenizer) as served, served.client() as client:
    info = client.get('/tokenizer_info').json()
    assert (info['bos_token'], info['eos_token'], info['pad_token']) == ('<s>', '</s>', '<pad>')
    for name in ('bos_token', 'eos_token'):
      asked = {'prompt': info[name], 'add_special_tokens': False}
      assert client.post('/tokenize', json=asked).json()['tokens'] == tokenizer.encode(info[name])
    assert client.post('/detokenize', json={'tokens': [1, *tokenizer.encode('the cat')]}).json()['prompt'] == (
      '<s>the cat'
    )


@pytest.mark.parametrize(
  'path, body, sentence',
  [
    ('/tokenize', {}, 'prompt is missing'),
    ('/detokenize', {'tokens': 'x'}, 'tokens must be an array of tokens'),
    ('/detokenize', {'tokens': [259]}, 'tokens has a token outside the vocabulary of 259'),
  ],
)
def test_a_wrong_request_is_a_sentence(client, path, body, sentence):
  answer = client.post(path, json=body)
  assert answer.status_code in (400, 404)
  assert sentence in answer.json()['error']['message']
