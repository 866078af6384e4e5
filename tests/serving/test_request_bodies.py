"""Bodies, requests and settings without a server: errors of invalid fields, defaults, the cost of hostile bodies."""

import contextlib
import dataclasses
import json
import time

import pytest

from spmd_tasks.decoding import SamplingParams
from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ChatTemplate
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.request_bodies import ChatBody, CompletionBody, parse_json, validate
from spmd_tasks.serving.requests import chat_request, completion_request
from spmd_tasks.serving.settings import ServerSettings
from tests.serving.served import ASK, HELLO, MODEL

SETTINGS = ServerSettings()
GOOD = {'model': 'm', 'prompt': 'a'}
CHAT = {'model': 'm', 'messages': [{'role': 'user', 'content': 'hi'}]}


def error_of(body_class, fields) -> RequestError:
  with pytest.raises(RequestError) as raised:
    validate(body_class, fields)
  return raised.value


UNKNOWN = "'{}' is not a known field; nearest: '{}'."
BIASES = [
  *((tokens, 'be an object with token ids as keys, such as {"5": -100}.') for tokens in (3, {'a': 1}, {'9' * 5000: 1})),
  *(({'5': bias}, 'have numbers from -100 to 100.') for bias in (101, True, '1', 10**400)),
  ({str(token): 1 for token in range(301)}, 'have at most 300 tokens.'),
]


@pytest.mark.parametrize(
  'body_class, fields, message, param',
  [
    (CompletionBody, {'n': 0}, 'n must be at least 1, not 0.', 'n'),
    (CompletionBody, {'n': 2.0}, 'n must be an integer, not 2.0.', 'n'),
    (CompletionBody, {'n': 10**400}, 'n must be at most 2147483647, not a much larger number.', 'n'),
    (CompletionBody, {'max_token': 3}, UNKNOWN.format('max_token', 'max_tokens'), 'max_token'),
    *((CompletionBody, {'logit_bias': value}, f'logit_bias must {says}', 'logit_bias') for value, says in BIASES),
    *(
      (ChatBody, fields, UNKNOWN.format(name, nearest), name)
      for fields, name, nearest in (
        ({'stream_options': {'include': True}}, 'stream_options.include', 'include_usage'),
        ({'messages': [{'role': 'user', 'content': 'a', 'names': 1}]}, 'messages[0].names', 'name'),
      )
    ),
  ],
  ids=lambda value: str(value)[:30],
)
def test_an_error_is_one_sentence_and_names_the_field(body_class, fields, message, param):
  error = error_of(body_class, (GOOD if body_class is CompletionBody else CHAT) | fields)
  code = 'unknown_parameter' if 'nearest' in message else None
  assert error.body['error'] == {'message': message, 'type': 'invalid_request_error', 'param': param, 'code': code}


def test_null_counts_as_absent_and_neutral_values_are_accepted():
  body = validate(CompletionBody, dict.fromkeys(CompletionBody.model_fields) | GOOD)
  assert (body.n, body.stop, body.stream, body.temperature) == (1, [], False, None)
  neutral = {'tools': [], 'tool_choice': 'auto', 'response_format': {'type': 'text'}, 'presence_penalty': 0.0}
  assert validate(ChatBody, CHAT | neutral | {'user': {'any': 'thing'}}).messages[0].text == 'hi'


@pytest.mark.parametrize(
  'fields',
  [
    {str(number): 0 for number in range(150_000)},
    {'stream_options': {str(number): 0 for number in range(150_000)}},
    {'messages': [{'role': 'user', 'content': [1] * 400_000}]},
  ],
  ids=lambda fields: f'{next(iter(fields))}, {len(fields)} fields',
)
def test_only_the_first_of_many_mistakes_is_reported(fields):
  """An error for each would hold the interpreter for seconds, and the streams with it."""
  began = time.thread_time()
  error_of(ChatBody, CHAT | fields)
  assert time.thread_time() - began < 2


@pytest.mark.parametrize(
  'data, reason',
  [
    (b'[1]', 'must be a JSON object, not an array'),
    (b'{"prompt": "\\ud800"}', 'hex escape'),
    (b'{"a": ' + b'9' * 5000 + b'}', 'out of range'),
    (b'{"a":' * 100_000, 'recursion limit'),
  ],
  ids=lambda value: value[:20],
)
def test_bodies_that_are_not_json_objects_are_rejected(data, reason):
  with pytest.raises(RequestError, match=reason) as raised:
    parse_json(data)
  assert raised.value.code == 'invalid_json'


@pytest.mark.parametrize('field', sorted({*CompletionBody.model_fields, *ChatBody.model_fields}))
def test_deeply_nested_or_large_values_are_accepted_or_rejected_by_name(field):
  """Up to the depth and the number of digits that the JSON parser accepts."""
  for value in ('[' * 190 + ']' * 190, '{"a":' * 190 + '1' + '}' * 190, '9' * 4000, '1e999', '-1e-4000'):
    for body_class, fields in ((CompletionBody, GOOD), (ChatBody, CHAT)):
      data = json.dumps({name: value for name, value in fields.items() if name != field})
      fields = parse_json(f'{data[:-1]}, "{field}": {value}}}'.encode())
      with contextlib.suppress(RequestError):
        validate(body_class, fields)


@pytest.mark.parametrize('name, value', [('port', 65536), ('api_key', 'two\nlines'), ('drain_s', -1)])
def test_settings_out_of_range_are_rejected(name, value):
  with pytest.raises(UserError, match='API key' if name == 'api_key' else name):
    ServerSettings(**{name: value})


@pytest.mark.parametrize('left_out', [{}, {'model': None}])
def test_only_the_prompt_or_messages_are_required(left_out):
  assert completion_request({'prompt': 'abc'} | left_out, MODEL, SETTINGS).requests[0].ids
  messages = [{'role': 'user', 'content': 'hi'}, {'role': 'assistant'}, {'role': 'user', 'content': None}]
  assert chat_request({'messages': messages, 'top_logprobs': 0} | left_out, MODEL, SETTINGS).requests[0].ids


def test_messages_that_the_template_rejects_are_a_client_error():
  template = ChatTemplate(template="{{ raise_exception('the first message must be of the system') }}")
  with pytest.raises(RequestError, match='refuses the messages: the first message must be') as caught:
    chat_request(ASK, dataclasses.replace(MODEL, chat_template=template), SETTINGS)
  assert (caught.value.status, caught.value.param) == (400, 'messages')


def test_missing_fields_get_the_experiments_defaults():
  settings = dataclasses.replace(MODEL.settings, temperature=0.7, top_k=5, max_tokens=9)
  model = dataclasses.replace(MODEL, settings=settings)
  parsed = completion_request({'model': MODEL.name, 'prompt': ['a', 'b'], 'n': 2, 'top_k': 3}, model, SETTINGS)
  assert [request.sampling for request in parsed.requests] == [SamplingParams(temperature=0.7, top_k=3)] * 4
  assert [request.max_tokens for request in parsed.requests] == [9] * 4
  assert [request.sample for request in parsed.requests] == [0, 1, 0, 1]
  assert len({request.seed for request in parsed.requests}) == 4
  assert {request.seed for request in completion_request(HELLO | {'seed': -1}, model, SETTINGS).requests} == {2**32 - 1}
  chat = chat_request({name: value for name, value in ASK.items() if name != 'max_tokens'}, model, SETTINGS)
  assert chat.requests[0].max_tokens == 9
  assert chat.requests[0].stop == MODEL.chat_template.stop
