"""Log-probabilities of generated tokens and of prompts, and counts of reused tokens, over HTTP and a fake engine."""

import pytest

from tests.serving.fake_engine import TOKENIZER
from tests.serving.served import ASK, CHAT, COMPLETIONS, HELLO, events, metric, serving


@pytest.fixture(scope='module')
def client():
  with serving() as served, served.client() as client:
    yield client


@pytest.mark.parametrize('max_tokens', [0, 2])
def test_echo_with_logprobs_scores_the_prompt_whole_and_streamed(client, max_tokens):
  prompt = 'a prompt of three chunks'
  wanted = HELLO | {'prompt': TOKENIZER.encode(prompt), 'logprobs': 2, 'echo': True, 'max_tokens': max_tokens}
  choice = client.post(COMPLETIONS, json=wanted).json()['choices'][0]
  text = prompt + prompt[:max_tokens]
  assert choice['text'] == text
  logprobs = choice['logprobs']
  assert logprobs['tokens'] == list(text)
  assert logprobs['text_offset'] == list(range(len(text)))
  assert logprobs['token_logprobs'][0] is logprobs['top_logprobs'][0] is None
  assert logprobs['token_logprobs'][1:] == pytest.approx([-token / 100 for token in TOKENIZER.encode(text)[1:]])
  assert [next(iter(top)) for top in logprobs['top_logprobs'][1:]] == list(text[1:])
  with client.stream('POST', COMPLETIONS, json=wanted | {'stream': True}) as response:
    choices = [chunk['choices'][0] for chunk in events(response)]
  assert ''.join(each['text'] for each in choices) == choice['text']
  streamed = [each['logprobs'] for each in choices if each['logprobs']]
  assert {name: [entry for each in streamed for entry in each[name]] for name in logprobs} == logprobs


def test_what_was_read_before_is_counted_and_not_read_again(client):
  asked = HELLO | {'prompt': 'a system prompt that many requests share', 'n': 2}
  before = metric(client, 'reused_prompt_tokens_total')
  cached = [client.post(COMPLETIONS, json=asked).json()['usage']['prompt_tokens_details'] for _ in range(2)]
  assert cached == [{'cached_tokens': 0}, {'cached_tokens': 40}]
  assert metric(client, 'reused_prompt_tokens_total') == before + 3 * 40
  salted = [client.post(COMPLETIONS, json=asked | {'cache_salt': 'one'}).json() for _ in range(2)]
  assert [each['usage']['prompt_tokens_details']['cached_tokens'] for each in salted] == [0, 40]
  assert salted[0]['choices'] == salted[1]['choices']


def test_logprobs_of_chats_in_both_forms(client):
  wanted = ASK | {'logprobs': True, 'top_logprobs': 1}
  content = client.post(CHAT, json=wanted).json()['choices'][0]['logprobs']['content']
  assert [entry['token'] for entry in content] == ['token_id:1', *'use']  # bos is no text
  assert content[1]['bytes'] == [ord('u')]
  assert [len(entry['top_logprobs']) for entry in content] == [1] * 4
  with client.stream('POST', CHAT, json=wanted | {'stream': True}) as response:
    chunks = events(response)
  streamed = [entry for c in chunks if c['choices'][0]['logprobs'] for entry in c['choices'][0]['logprobs']['content']]
  assert streamed == content
