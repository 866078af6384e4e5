"""Bodies, requests, settings and metrics without a server: sentences about wrong fields, costs of hostile bodies."""

import contextlib
import json
import time

import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.serving.bodies import ChatBody, CompletionBody, parse_json, validate
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.settings import ServerSettings

GOOD = {'model': 'm', 'prompt': 'a'}
CHAT = {'model': 'm', 'messages': [{'role': 'user', 'content': 'hi'}]}


def error_of(body_class, fields) -> RequestError:
  with pytest.raises(RequestError) as raised:
    validate(body_class, fields)
  return raised.value


@pytest.mark.parametrize(
  'body_class, fields, message, param, code',
  [
    (CompletionBody, GOOD | {'n': 0}, 'n must be at least 1, not 0.', 'n', None),
    (
      CompletionBody,
      GOOD | {'max_tokens': 10**400},
      'max_tokens must be at most 2147483647, not a number so large.',
      'max_tokens',
      None,
    ),
    (
      CompletionBody,
      GOOD | {'max_token': 3},
      "'max_token' is not a field that this server knows; nearest: 'max_tokens'.",
      'max_token',
      'unknown_parameter',
    ),
    *(
      (CompletionBody, GOOD | {'logit_bias': value}, f'logit_bias must {sentence}', 'logit_bias', None)
      for value, sentence in [
        *((tokens, 'be an object whose names are tokens, such as {"5": -100}.') for tokens in (3, {'a': 1}, {'05': 1})),
        ({'9' * 5000: 1}, 'be an object whose names are tokens, such as {"5": -100}.'),
        *(({'5': bias}, 'have numbers from -100 to 100.') for bias in (101, True, None, '1', 10**400)),
        ({str(token): 1 for token in range(301)}, 'have at most 300 tokens.'),
      ]
    ),
    (
      ChatBody,
      CHAT | {'stream_options': {'include': True}},
      "'stream_options.include' is not a field that this server knows; nearest: 'include_usage'.",
      'stream_options.include',
      'unknown_parameter',
    ),
    (
      ChatBody,
      CHAT | {'messages': [{'role': 'user', 'content': 'a', 'names': 1}]},
      "'messages[0].names' is not a field that this server knows; nearest: 'name'.",
      'messages[0].names',
      'unknown_parameter',
    ),
  ],
  ids=lambda value: str(value)[:30],
)
def test_an_error_is_one_sentence_and_names_the_field(body_class, fields, message, param, code):
  error = error_of(body_class, fields)
  assert error.body['error'] == {'message': message, 'type': 'invalid_request_error', 'param': param, 'code': code}


def test_null_counts_as_absent_and_neutral_values_are_taken():
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
def test_a_body_with_many_mistakes_is_refused_at_the_first(fields):
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
def test_what_is_no_json_object_is_refused_in_one_sentence(data, reason):
  with pytest.raises(RequestError, match=reason) as raised:
    parse_json(data)
  assert raised.value.code == 'invalid_json'


@pytest.mark.parametrize('field', sorted({*CompletionBody.model_fields, *ChatBody.model_fields}))
def test_what_is_nested_deep_or_large_in_a_field_is_taken_or_named(field):
  """To the depth that JSON is parsed to, and numbers of as many digits as are read."""
  for value in ('[' * 190 + ']' * 190, '{"a":' * 190 + '1' + '}' * 190, '9' * 4000, '1e999', '-1e-4000'):
    for body_class, fields in ((CompletionBody, GOOD), (ChatBody, CHAT)):
      data = json.dumps({name: value for name, value in fields.items() if name != field})
      parsed = parse_json(f'{data[:-1]}, "{field}": {value}}}'.encode())
      with contextlib.suppress(RequestError):
        validate(body_class, parsed)


@pytest.mark.parametrize('name, value', [('port', 65536), ('api_key', 'two\nlines'), ('drain_s', -1)])
def test_settings_out_of_range_are_named(name, value):
  with pytest.raises(UserError, match='API key' if name == 'api_key' else name):
    ServerSettings(**{name: value})
