"""Adapters selected by name, with a fake engine: answers, the list of models, errors and metrics."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from spmd_tasks.decoding import Request
from spmd_tasks.decoding.requests import Chunk
from spmd_tasks.errors import UserError
from spmd_tasks.serving.multi_process import from_message, to_message
from spmd_tasks.serving.requests import check_adapter_names
from tests.serving.fake_engine import TOKENIZER
from tests.serving.served import CHAT, COMPLETIONS, HELLO, metric, serving, wait_for

NAMES = ('fake.Model', 'one', 'two')
TEXTS = {'fake.Model': 'abcabca', 'one': 'bcdbcdb', 'two': 'cdecdec'}  # the fake adds the adapter's number to each byte
BODY = HELLO | {'prompt': [TOKENIZER.encode('abc')]}


@pytest.fixture(scope='module')
def served():
  with serving(adapters=NAMES[1:]) as served:
    yield served


@pytest.fixture
def client(served):
  with served.client() as client:
    yield client


def text_of(client, **fields):
  answer = client.post(COMPLETIONS, json=BODY | fields).json()
  return answer['choices'][0]['text'], answer['model']


def test_requests_for_all_names_run_together_and_use_their_own_adapter(client):
  def counted():
    return [metric(client, f'model_generated_tokens_total{{model="{name}"}}') for name in NAMES]

  before = counted()
  asked = [*NAMES, None] * 4
  with ThreadPoolExecutor(8) as pool:
    answers = list(pool.map(lambda name: text_of(client, model=name), asked))
  assert answers == [(TEXTS[name or 'fake.Model'], name or 'fake.Model') for name in asked]
  wait_for(lambda: np.subtract(counted(), before).tolist() == [2 * 4 * 7, 4 * 7, 4 * 7])
  assert metric(client, 'sequences_total{finish_reason="length",model="two"}') >= 4


def test_models_lists_adapters_with_their_parent(client):
  cards = client.get('/v1/models').json()['data']
  assert [card['id'] for card in cards] == [*NAMES]
  assert [card['parent'] for card in cards] == [None, 'fake.Model', 'fake.Model']
  assert client.get('/v1/models/two').json() == cards[2]


@pytest.mark.parametrize('route', [COMPLETIONS, CHAT, '/tokenize'])
def test_an_unknown_name_is_an_error_that_lists_the_served_names(client, route):
  answer = client.post(route, json=BODY | {'model': 'three'})
  assert answer.status_code == 404
  error = answer.json()['error']
  assert (error['type'], error['param'], error['code']) == ('not_found_error', 'model', 'model_not_found')
  assert error['message'] == "model 'three' is not served here; 'fake.Model', 'one', 'two' are."
  assert client.get('/v1/models/three').status_code == 404


def test_an_adapter_cannot_have_the_name_of_the_model():
  with pytest.raises(UserError, match=r"'fake.Model' has the name of the model itself"):
    check_adapter_names(('folder', 'fake.Model'), ('one', 'fake.Model'))


def test_the_adapter_is_sent_to_other_processes():
  chunk = Chunk(
    request=Request(ids=(1, 2), max_tokens=3, adapter=2, logit_bias=((5, 1.5),)), slot=0, start=0, stop=2, blocks=(3, 1)
  )
  assert from_message(to_message({'chunk': chunk}))['chunk'] == chunk
