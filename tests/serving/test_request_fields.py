"""Fields of OpenAI's and vLLM's APIs, sent by the real openai client; the fake engine repeats its prompt.

If a token is not allowed, the fake engine generates the next allowed id of the vocabulary.
"""

import dataclasses
from pathlib import Path

import openai
import pytest
import tokenizers
from tokenizers import decoders

from spmd_tasks.inputs import ChatTemplate, FolderTokenizer
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.request_bodies import ChatBody, CompletionBody
from spmd_tasks.serving.requests import chat_request, completion_request
from spmd_tasks.serving.settings import ServerSettings
from tests.model_folders import write_tokenizer
from tests.serving.fake_engine import EOS, TOKENIZER, FakeEngine
from tests.serving.served import HELLO, MODEL, serving

ECHO = '{% for m in messages %}{{ m.content }}{% if not loop.last %}|{% endif %}{% endfor %}'
ECHO += '{{ "" if not add_generation_prompt else ">" }}{# enable_thinking documents tools tool_calls #}'


@pytest.fixture(scope='module')
def server():
  template = ChatTemplate(template=ECHO, stop=())
  with serving(FakeEngine(max_len=256), chat_template=template) as served:
    yield served


@pytest.fixture(scope='module')
def client(server):
  with openai.OpenAI(base_url=f'{server.url}/v1', api_key='none', max_retries=0, timeout=20) as client:
    yield client


def complete(client, prompt, max_tokens=8, **fields):
  known = {name: fields.pop(name) for name in ('n', 'stop', 'logprobs', 'echo', 'best_of', 'seed') if name in fields}
  ids = [TOKENIZER.encode(prompt)] if isinstance(prompt, str) else prompt
  return client.completions.create(model='fake.Model', prompt=ids, max_tokens=max_tokens, **known, extra_body=fields)


def text_of(client, prompt, *args, **fields):
  choice = complete(client, prompt, *args, **fields).choices[0]
  return choice.text, choice.finish_reason


def chat(client, messages, **fields):
  asked = {'model': 'fake.Model', 'max_tokens': 4} | fields
  if isinstance(messages, str):
    messages = [{'role': 'user', 'content': messages}]
  return client.chat.completions.create(messages=messages, **asked)


def refusal_of(call, *args, **fields) -> tuple[str, str]:
  with pytest.raises(openai.BadRequestError) as refused:
    call(*args, **fields)
  assert refused.value.body['message'].count('. ') == 0  # one sentence
  return refused.value.body['param'], refused.value.body['message']


# --- null ---


def test_the_client_s_own_objects_come_back_as_messages(client):
  answer = chat(client, 'hi').choices[0].message
  call = {'id': 'c', 'type': 'function', 'function': {'name': 'f', 'arguments': '{"a": null}'}, 'index': None}
  nulls = {'function_call': None, 'reasoning': None, 'audio': None, 'anything': None}
  for message in (answer, answer.model_dump(), answer.to_dict(), answer.model_dump() | nulls | {'tool_calls': [call]}):
    assert chat(client, [{'role': 'user', 'content': 'hi'}, message, {'role': 'user', 'content': 'x'}]).choices


@pytest.mark.parametrize(
  'fields',
  [
    {'reasoning_effort': None, 'verbosity': None, 'prediction': None, 'min_tokens': None, 'guided_json': None},
    {'stream_options': {'include_usage': None}, 'stream': True},
    {'logit_bias': {'5': None}},
    {'response_format': {'type': 'json_schema', 'json_schema': {'schema': {'const': None}, 'strict': None}}},
    {'structured_outputs': {'json': {'enum': [None]}, 'regex': None, 'unknown': None}},
    {'tools': [{'type': 'function', 'function': {'name': 'f', 'parameters': None, 'strict': None}, 'x': None}]},
    {'chat_template_kwargs': {'unknown': None}, 'documents': None},
  ],
)
def test_null_is_absent_at_any_depth_but_a_value_in_schemas(server, fields):
  with server.client() as client:
    asked = {'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': 'null', 'x': None}], 'name': None}]}
    response = client.post('/v1/chat/completions', json=asked | {'max_tokens': 8} | fields)
    assert response.status_code == 200, response.text
    if 'structured_outputs' in fields or 'response_format' in fields:
      assert response.json()['choices'][0]['message']['content'] == 'null'


def test_null_is_absent_on_the_other_routes(server):
  with server.client() as client:
    for path, fields in (
      ('/v1/responses', {'input': [{'role': 'user', 'content': 'hi', 'type': None}], 'reasoning': {'effort': None}}),
      ('/tokenize', {'prompt': 'a', 'return_token_strs': None}),
      ('/detokenize', {'tokens': [70], 'model': None}),
    ):
      assert client.post(path, json=fields).status_code == 200


# --- which tokens may come ---


def test_min_tokens_suppresses_eos_and_stop_strings(client):
  ids = [[*TOKENIZER.encode('ab'), EOS]]
  assert text_of(client, ids) == ('ab', 'stop')
  text, reason = text_of(client, ids, min_tokens=4)
  assert (text.startswith('ab'), len(text), reason) == (True, 5, 'stop')  # another token stands for the first end
  assert text_of(client, 'abc', stop=['b']) == ('a', 'stop')
  assert text_of(client, 'abc', stop=['b'], min_tokens=2) == ('abca', 'stop')  # the second b
  assert text_of(client, 'abc', min_tokens=2, stop_token_ids=TOKENIZER.encode('b'))[0][0] == 'a'
  param, message = refusal_of(text_of, client, 'abc', min_tokens=9)
  assert (param, 'max_tokens' in message) == ('min_tokens', True)


def test_allowed_token_ids_are_the_only_ones(client):
  x, y = TOKENIZER.encode('xy')
  assert text_of(client, 'hello', 4, allowed_token_ids=[x, y]) == ('xxxx', 'length')
  assert text_of(client, 'y', 4, allowed_token_ids=[x, y]) == ('yyyy', 'length')
  for tokens in ([], [10**6], [-1]):
    assert refusal_of(text_of, client, 'a', allowed_token_ids=tokens)[0] == 'allowed_token_ids'
  assert refusal_of(text_of, client, 'a', allowed_token_ids=[EOS], min_tokens=1)[0] == 'allowed_token_ids'


def test_bad_words_appear_in_no_text(client):
  for prompt, words in (('hello', ['l']), ('the cat', ['cat', 'e c']), ('é', ['é'])):
    text, _ = text_of(client, prompt, 16, bad_words=words)
    assert len(text.encode()) >= 14
    assert not any(word in text for word in words)
  assert text_of(client, 'hello', 5, bad_words=['ll'])[0] == 'helmo'
  assert text_of(client, 'hello', 5, bad_words=['x'])[0] == 'hello'
  assert refusal_of(text_of, client, 'a', bad_words=[''])[0] == 'bad_words'


def test_token_limits_combine_with_a_grammar(client):
  form = {'structured_outputs': {'regex': '[a-c]{2,4}'}}
  assert text_of(client, [[*TOKENIZER.encode('ab'), EOS]], **form) == ('ab', 'stop')
  assert len(text_of(client, [[*TOKENIZER.encode('ab'), EOS]], min_tokens=4, **form)[0]) == 4
  assert set(text_of(client, 'abc', bad_words=['b'], **form)[0]) == {'a', 'c'}
  assert refusal_of(text_of, client, 'a', allowed_token_ids=TOKENIZER.encode('x'), **form)[0] == 'allowed_token_ids'


# --- ends ---


def test_include_stop_str_in_output_keeps_the_stop_string(client):
  kept = {'include_stop_str_in_output': True}
  assert text_of(client, 'abc', stop=['b']) == ('a', 'stop')
  assert text_of(client, 'abc', stop=['b'], **kept) == ('ab', 'stop')
  stop_ids = {'stop_token_ids': TOKENIZER.encode('c')}
  assert text_of(client, 'abc', **stop_ids) == ('ab', 'stop')
  assert text_of(client, 'abc', **stop_ids, **kept) == ('abc', 'stop')
  assert text_of(client, [[*TOKENIZER.encode('ab'), EOS]], **kept) == ('ab', 'stop')
  assert text_of(client, [[*TOKENIZER.encode('ab'), EOS]], 5, ignore_eos=True) == ('abab', 'length')


def test_skip_special_tokens_false_shows_special_tokens(tmp_path):
  tokenizer = FolderTokenizer(path=str(write_tokenizer(tmp_path)))
  ids = [[*tokenizer.encode('the'), 3, *tokenizer.encode('cat')]]
  with serving(tokenizer=tokenizer) as served, openai.OpenAI(base_url=f'{served.url}/v1', api_key='x') as client:
    shown = {'skip_special_tokens': False, 'spaces_between_special_tokens': False}
    assert text_of(client, ids, len(ids[0]))[0] == 'thecat'
    assert text_of(client, ids, len(ids[0]), **shown)[0] == 'the<|im_start|>cat'
    choice = complete(client, ids, len(ids[0]), logprobs=0, echo=True, **shown).choices[0]
    assert choice.text == ''.join(choice.logprobs.tokens) == 'the<|im_start|>cat' * 2
    asked = {'include_stop_str_in_output': True, 'stop_token_ids': [3]}
    assert text_of(client, ids, 8, **asked)[0] == 'the'
    assert text_of(client, ids, 8, **asked, **shown)[0] == 'the<|im_start|>'


# --- what is reported ---


def test_token_ids_of_prompts_and_choices(client):
  answer = complete(client, 'abc', 5, n=2, return_token_ids=True)
  for choice in answer.choices:
    assert choice.prompt_token_ids == TOKENIZER.encode('abc')
    assert choice.token_ids == TOKENIZER.encode('abcab')
  ended = complete(client, [[*TOKENIZER.encode('ab'), EOS]], return_token_ids=True).choices[0]
  assert ended.token_ids == [*TOKENIZER.encode('ab'), EOS]
  whole = chat(client, 'éa', max_tokens=5, extra_body={'return_token_ids': True})
  stream = chat(client, 'éa', max_tokens=5, stream=True, extra_body={'return_token_ids': True})
  chunks = list(stream)
  assert whole.prompt_token_ids == chunks[0].prompt_token_ids == [TOKENIZER.bos_id, *TOKENIZER.encode('éa>')]
  streamed = [token for chunk in chunks for token in getattr(chunk.choices[0], 'token_ids', None) or ()]
  assert whole.choices[0].token_ids == streamed
  assert len(streamed) == 5


def test_prompt_logprobs_are_separate_from_logprobs(client):
  prompt = TOKENIZER.encode('abc')
  choice = complete(client, 'abc', 2, prompt_logprobs=1, logprobs=1).choices[0]
  assert [logprob and list(logprob) for logprob in choice.prompt_logprobs] == [None, *([str(t)] for t in prompt[1:])]
  first = choice.prompt_logprobs[1][str(prompt[1])]
  assert (first['rank'], first['decoded_token']) == (1, 'b')
  assert choice.logprobs.tokens == ['a', 'b']
  assert choice.text == 'ab'
  both = complete(client, 'abc', 2, prompt_logprobs=0, logprobs=1, echo=True).choices[0]
  assert len(both.prompt_logprobs) == 3
  assert both.logprobs.tokens == ['a', 'b', 'c', 'a', 'b']
  answer = chat(client, 'ab', extra_body={'prompt_logprobs': 2})
  assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
  assert answer.choices[0].logprobs is None
  assert refusal_of(complete, client, 'a', prompt_logprobs=9)[0] == 'prompt_logprobs'
  assert refusal_of(chat, client, 'a', stream=True, extra_body={'prompt_logprobs': 1})[0] == 'prompt_logprobs'


@pytest.fixture(scope='module', params=['byte_level', 'metaspace'])
def of_folder(request, tmp_path_factory):
  """(a client, the tokenizer)."""
  tokenizer = FolderTokenizer(path=str(write_tokenizer(tmp_path_factory.mktemp('folder'), request.param)))
  template = ChatTemplate(template='{{ messages[0].content }}', stop=(), writes_bos=True)
  with (
    serving(FakeEngine(num_top=2, max_len=256), tokenizer=tokenizer, chat_template=template) as served,
    openai.OpenAI(base_url=f'{served.url}/v1', api_key='none', max_retries=0) as client,
  ):
    yield client, tokenizer


TEXT = 'the cat é 漢字 🙂 sat'


def test_token_names_and_bytes_concatenate_to_the_text(of_folder):
  """Whole and streamed, in chats and completions; each token and each likely one has an entry of its own."""
  client, tokenizer = of_folder
  ids = [tokenizer.encode(TEXT)]
  size = len(ids[0])
  for echo in (False, True):
    asked = {'model': 'fake.Model', 'prompt': ids, 'max_tokens': size, 'logprobs': 2, 'echo': echo}
    choice = client.completions.create(**asked).choices[0]
    assert ''.join(choice.logprobs.tokens) == choice.text
    offsets = choice.logprobs.text_offset
    places = zip(offsets, [*offsets[1:], len(choice.text)], choice.logprobs.tokens, strict=True)
    assert all(choice.text[start:end] == token for start, end, token in places)
    for token, top in list(zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True))[echo:]:
      assert len(top) == 2
      assert max(top, key=top.get) == token  # the fake's token is the likeliest
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    streamed = [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens]
    assert streamed == choice.logprobs.tokens
  asked = {'max_tokens': size, 'logprobs': True, 'top_logprobs': 2}
  choice = chat(client, TEXT, **asked).choices[0]
  entries = choice.logprobs.content
  assert ''.join(entry.token for entry in entries) == choice.message.content
  assert b''.join(bytes(entry.bytes) for entry in entries) == choice.message.content.encode()
  assert any(entry.token == '' and len(entry.bytes) == 1 for entry in entries)  # a part of a character
  assert all(len({other.token for other in entry.top_logprobs}) == 2 for entry in entries)
  chunks = [chunk.choices[0] for chunk in chat(client, TEXT, stream=True, **asked)]
  assert [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content] == entries


def test_tokens_with_and_without_leading_space_have_separate_entries(tmp_path):
  """As evaluation harnesses compare them; the decoder drops the space of a text's first token."""
  pieces = ['<unk>', '<s>', '</s>', '▁cat', 'cat', '▁', 'c', 'a', 't', 'ca']
  merges = [('c', 'a'), ('ca', 't'), ('▁', 'cat')]
  vocab = {piece: number for number, piece in enumerate(pieces)}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges, unk_token='<unk>'))
  replace, strip = decoders.Replace('▁', ' '), decoders.Strip(' ', 1, 0)
  tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
  tokenizer.save(str(tmp_path / 'tokenizer.json'))
  (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "</s>"}')
  tokenizer, (spaced, plain) = FolderTokenizer(path=str(tmp_path)), (3, 4)
  template = ChatTemplate(template='{{ messages[0].content }}', stop=(), writes_bos=True)
  with (
    serving(FakeEngine(num_top=2), tokenizer=tokenizer, chat_template=template) as served,
    openai.OpenAI(base_url=f'{served.url}/v1', api_key='none') as client,
  ):
    logprobs = complete(client, [[spaced]], 2, logprobs=2, echo=True).choices[0].logprobs
    assert logprobs.tokens == ['cat', ' cat', ' cat']
    assert [list(top) for top in logprobs.top_logprobs[1:]] == [[' cat', 'cat']] * 2
    assert complete(client, [[plain]], 1, logprobs=1).choices[0].logprobs.top_logprobs == [{'cat': 0}]
    (entry,) = chat(client, '▁cat', max_tokens=1, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [(other.token, bytes(other.bytes)) for other in entry.top_logprobs] == [(' cat', b' cat'), ('cat', b'cat')]


def test_tokens_named_by_id(client):
  choice = complete(client, 'ab', 2, logprobs=1, return_tokens_as_token_ids=True).choices[0]
  assert choice.logprobs.tokens == [f'token_id:{token}' for token in TOKENIZER.encode('ab')]
  assert [list(top) for top in choice.logprobs.top_logprobs] == [[token] for token in choice.logprobs.tokens]


def test_a_stop_string_cuts_the_last_token_s_name(of_folder):
  client, tokenizer = of_folder
  choice = client.completions.create(
    model='fake.Model', prompt=[tokenizer.encode(TEXT)], max_tokens=20, logprobs=1, stop=['at']
  ).choices[0]
  assert ''.join(choice.logprobs.tokens) == choice.text


# --- numbers and prompts ---


def test_top_k_is_off_at_0_and_below(server):
  with server.client() as client:
    for top_k, status in ((-1, 200), (0, 200), (5, 200), (-2, 400)):
      assert client.post('/v1/completions', json=HELLO | {'top_k': top_k}).status_code == status


@pytest.fixture(scope='module')
def model():
  settings = dataclasses.replace(MODEL.settings, top_k=5, temperature=1.0)
  return dataclasses.replace(MODEL, settings=settings, chat_template=ChatTemplate(template=ECHO, stop=()))


def test_fields_become_request_settings(model):
  limits = ServerSettings()
  parsed = completion_request({'prompt': ['a', 'a', 'b'], 'n': 2, 'seed': 7, 'top_k': -1}, model, limits)
  seeds = [request.seed for request in parsed.requests]
  assert seeds[0] == seeds[1] == 7
  assert len(set(seeds)) == 3  # each prompt draws from its own noise
  assert [request.sample for request in parsed.requests] == [0, 1] * 3
  assert {request.sampling.top_k for request in parsed.requests} == {0}

  def prompt_of(**fields):
    fields = {'messages': [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'so '}]} | fields
    return TOKENIZER.decode(chat_request(fields, model, limits).requests[0].ids)

  assert prompt_of() == 'hi|so >'
  assert prompt_of(add_generation_prompt=False) == prompt_of(continue_final_message=True) == 'hi|so '
  assert prompt_of(truncate_prompt_tokens=3) == 'o >'
  predicted = {'prediction': {'type': 'content', 'content': [{'type': 'text', 'text': 'like this'}]}}
  request = chat_request({'messages': [{'role': 'user', 'content': 'a'}]} | predicted, model, limits).requests[0]
  assert request.prediction == tuple(TOKENIZER.encode('like this'))
  plain = completion_request({'prompt': 'ab', 'add_special_tokens': False}, model, limits).requests[0]
  assert plain.ids == tuple(TOKENIZER.encode('ab'))


THINKS = '{% if enable_thinking is defined %}thinking={{ enable_thinking }};{% endif %}'
EFFORT = '{% if reasoning_effort is defined %}effort={{ reasoning_effort }};{% endif %}'


@pytest.mark.parametrize(
  'source, fields, text',
  [
    (THINKS, {'enable_thinking': False}, 'thinking=False;'),
    (THINKS, {'chat_template_kwargs': {'enable_thinking': True}}, 'thinking=True;'),
    (THINKS, {'reasoning_effort': 'none'}, 'thinking=False;'),
    (THINKS, {'reasoning_effort': 'high'}, 'thinking=True;'),
    (THINKS + EFFORT, {'reasoning_effort': 'high', 'enable_thinking': False}, 'thinking=False;effort=high;'),
    (EFFORT, {'reasoning_effort': 'low'}, 'effort=low;'),
    ('', {'reasoning_effort': 'none', 'enable_thinking': False, 'verbosity': 'medium'}, ''),
    ('', {'reasoning_effort': 'low'}, None),
    ('', {'enable_thinking': True}, None),
    ('', {'verbosity': 'low'}, None),
    (EFFORT, {'reasoning_effort': 'low', 'chat_template_kwargs': {'reasoning_effort': 'high'}}, None),
  ],
)
def test_reasoning_fields_set_template_variables_or_are_rejected(model, source, fields, text):
  model = dataclasses.replace(model, chat_template=ChatTemplate(template=source + '.', stop=()))
  asked = {'messages': [{'role': 'user', 'content': 'hi'}]} | fields
  if text is None:
    with pytest.raises(RequestError, match='leave'):
      chat_request(asked, model, ServerSettings())
  else:
    assert TOKENIZER.decode(chat_request(asked, model, ServerSettings()).requests[0].ids) == text + '.'


@pytest.mark.parametrize(
  'fields, remedy',
  [
    ({'chat_template': 'x'}, r'chat_template\(\)'),
    ({'guided_json': {}}, r'structured_outputs\.json'),
    ({'best_of': 3}, 'must equal n=1'),
    ({'use_beam_search': True}, 'leave it out'),
    ({'logits_processors': ['os:system']}, 'leave it out'),
    ({'messages': [{'role': 'assistant', 'function_call': {'name': 'f', 'arguments': '{}'}}]}, 'tool_calls'),
    ({'continue_final_message': True, 'add_generation_prompt': True}, 'set one to false'),
  ],
)
def test_unsupported_requests_name_the_remedy(model, fields, remedy):
  with pytest.raises(RequestError, match=remedy) as refused:
    chat_request({'messages': [{'role': 'user', 'content': 'hi'}]} | fields, model, ServerSettings())
  assert refused.value.param.rpartition('.')[2] in (*fields, 'function_call')


def test_values_without_effect_are_accepted(model):
  neutral = {'best_of': 1, 'use_beam_search': False, 'length_penalty': 1.0, 'logits_processors': [], 'user': 'u'}
  neutral |= {'service_tier': 'auto', 'store': False, 'metadata': {}, 'modalities': ['text'], 'function_call': 'none'}
  assert chat_request({'messages': [{'role': 'user', 'content': 'hi'}]} | neutral, model, ServerSettings()).requests


@pytest.mark.parametrize('body', [CompletionBody, ChatBody])
def test_the_documentation_lists_all_fields(body):
  page = (Path(__file__).parents[2] / 'docs' / 'serving.md').read_text()
  table = page[page.index('## Fields of a request') :].partition('\n## ')[0]
  names = {name for name in body.model_fields if name not in ('model', 'messages', 'prompt')}
  assert names == {name for name in names if f'`{name}`' in table}
