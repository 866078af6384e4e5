"""The scoring server with a fake scorer: batches, formats of answers, errors."""

from concurrent.futures import ThreadPoolExecutor
import dataclasses
import threading

import numpy as np
import openai

from spmd_tasks.decoding.text_scorer import TextReading
from spmd_tasks.serving.scoring import ScoringEngine
from tests.serving.fake_engine import TOKENIZER
from tests.serving.served import MODEL, metric, serving, wait_for


class FakeScorer:
  """The vector of a text is its number of tokens, and multiples of it; `gate` holds a batch back, `fails` ends one."""

  buckets = (8, 32)

  def __init__(self, num_values):
    self.num_values = num_values
    self.sizes = []
    self.gate = threading.Event()
    self.gate.set()
    self.fails = False

  def num_rows(self, bucket):
    return 32 // bucket

  def bucket(self, length):
    return next(bucket for bucket in self.buckets if bucket >= length)

  def run(self, weights, texts):
    assert self.gate.wait(20)
    if self.fails:
      raise RuntimeError('no memory')
    assert len({self.bucket(len(text)) for text in texts}) == 1
    self.sizes.append(len(texts))
    return np.array([[weights * len(text) * (i + 1) for i in range(self.num_values)] for text in texts], np.float32)


def scored(reading, **settings):
  """A server of a fake scorer, whose weights are the factor 0.125."""
  scorer = FakeScorer(len(reading.labels) or 3)
  model = dataclasses.replace(MODEL, reading=reading, max_len=32)
  return scorer, serving(ScoringEngine(scorer, 0.125), model=model, **{'max_queued': 64} | settings)


def num_tokens(text):
  return len(TextReading().encode(TOKENIZER, text))


def test_a_real_client_gets_vectors_in_either_encoding_and_shorter_ones():
  _, server = scored(TextReading(normalize=True))
  texts = ['hello', 'a longer text']
  with server as served, openai.OpenAI(base_url=f'{served.url}/v1', api_key='none', max_retries=0) as client:
    answer = client.embeddings.create(model=MODEL.name, input=texts)  # base64, which the client decodes
    plain = client.embeddings.create(model=MODEL.name, input=texts, encoding_format='float')
    short = client.embeddings.create(model=MODEL.name, input=[5, 6, 7], dimensions=2)
  assert [item.embedding for item in answer.data] == [item.embedding for item in plain.data]
  assert answer.data[1].embedding == [0.125 * num_tokens(texts[1]) * (i + 1) for i in range(3)]
  assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(num_tokens, texts))
  np.testing.assert_allclose(short.data[0].embedding, np.array([1, 2]) / 5**0.5, rtol=1e-6)
  assert short.usage.prompt_tokens == 3


def test_texts_that_wait_share_batches_of_their_length():
  scorer, server = scored(TextReading())
  with server as served, ThreadPoolExecutor(8) as pool, served.client() as client:
    num_warm = len(scorer.sizes)
    scorer.gate.clear()

    def ask(text):
      return client.post('/v1/embeddings', json={'input': text}).json()['data'][0]['embedding'][0]

    asked = [pool.submit(ask, text) for text in ['a', 'b', 'c', 'd', 'e', 'x' * 20]]
    wait_for(lambda: metric(client, 'queued_sequences') == 6)  # those in the batch that waits, too
    scorer.gate.set()
    assert [future.result() for future in asked] == [0.125 * num_tokens(text) for text in [*'abcde', 'x' * 20]]
    assert sorted(scorer.sizes[num_warm:]) in ([1, 1, 4], [1, 2, 3], [1, 1, 1, 3], [1, 1, 2, 2])
    assert metric(client, 'prompt_tokens_total') == 5 * num_tokens('a') + num_tokens('x' * 20)
    assert metric(client, 'sequences_total{finish_reason="stop",model="fake.Model"}') == 6


def test_scores_and_the_order_of_documents():
  _, server = scored(TextReading(labels=('LABEL_0',), activation='sigmoid'))
  with server as served, served.client() as client:
    logits = [0.125 * num_tokens('ask' + text) for text in ('b', 'ccc', 'dd')]
    probabilities = (1 / (1 + np.exp(-np.array(logits)))).tolist()
    body = {'text_1': 'ask', 'text_2': ['b', 'ccc', 'dd']}
    answer = client.post('/v1/score', json=body).json()
    assert [item['index'] for item in answer['data']] == [0, 1, 2]
    np.testing.assert_allclose([item['score'] for item in answer['data']], probabilities, rtol=1e-6)
    raw = client.post('/score', json=body | {'use_activation': False}).json()
    assert [item['score'] for item in raw['data']] == logits
    documents = ['b', {'text': 'ccc'}, 'dd']
    ranked = client.post('/v1/rerank', json={'query': 'ask', 'documents': documents, 'top_n': 2}).json()
    assert [(result['index'], result['document']['text']) for result in ranked['results']] == [(1, 'ccc'), (2, 'dd')]
    assert ranked['results'][0]['relevance_score'] == answer['data'][1]['score']
    assert ranked['usage'] == answer['usage']


def test_classes_have_no_score_and_embeddings_are_scored_by_their_cosine():
  _, server = scored(TextReading(labels=('good', 'bad'), activation='softmax'))
  with server as served, served.client() as client:
    assert 'has 2 labels' in client.post('/v1/score', json={'text_1': 'a', 'text_2': 'b'}).text
  _, server = scored(TextReading())
  with server as served, served.client() as client:
    answer = client.post('/v1/score', json={'text_1': ['a', 'bb'], 'text_2': ['ccc', 'd']}).json()
    np.testing.assert_allclose([item['score'] for item in answer['data']], [1, 1])


def test_invalid_texts_are_rejected_and_a_failure_ends_only_its_own_batch():
  scorer, server = scored(TextReading())
  cases = [
    ('/v1/embeddings', {'input': 'x' * 40}, 400, 'input[0] has'),
    ('/v1/embeddings', {'input': [9999]}, 400, 'all below'),
    ('/v1/embeddings', {'input': 'a', 'dimensions': 4}, 400, 'dimensions must be at most 3, not 4'),
    ('/v1/embeddings', {'input': ['a'] * 65}, 400, 'input must have 1 to 64 texts, not 65'),
    ('/v1/embeddings', {'input': 'a', 'encoding_format': 'hex'}, 400, "must be 'float' or 'base64'"),
    ('/v1/embeddings', {'input': 'a', 'model': 'other'}, 404, "'fake.Model' is"),
    ('/v1/score', {'text_1': ['a', 'b'], 'text_2': ['a']}, 400, 'text_1 has 2 texts, but text_2 has 1'),
    ('/v1/rerank', {'query': 'a', 'documents': [5]}, 400, 'must be a string or an array of strings'),
    ('/v1/completions', {'prompt': 'a'}, 404, 'no such path'),
  ]
  with server as served, served.client() as client:
    for path, body, status, message in cases:
      answer = client.post(path, json=body)
      assert (answer.status_code, message in answer.json()['error']['message']) == (status, True), answer.text
    cut = client.post('/v1/embeddings', json={'input': 'x' * 40, 'truncate_prompt_tokens': -1})
    assert cut.json()['usage']['prompt_tokens'] == 32
    scorer.fails = True
    assert client.post('/v1/embeddings', json={'input': 'a'}).status_code == 500
    scorer.fails = False
    assert client.post('/v1/embeddings', json={'input': 'a'}).status_code == 200
