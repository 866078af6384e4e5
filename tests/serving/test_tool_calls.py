"""Parsing and forcing tool calls, the harmony format, constrained outputs; the fake engine repeats its prompt."""

import dataclasses
import json
import re

import openai
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from spmd_tasks.inputs import ChatTemplate, FolderTokenizer
from spmd_tasks.serving.answer_format import answer_format
from spmd_tasks.serving.answer_parsers import AnswerParser, ChannelParser
from spmd_tasks.serving.requests import chat_request
from spmd_tasks.serving.settings import ServerSettings
from spmd_tasks.serving.tool_call_formats import TOOL_CALL_FORMATS, typed_json
from tests.serving.served import CHAT, MODEL, TOKENIZER, events, serving

TOOLS = [{'type': 'function', 'function': {'name': name, 'parameters': {}}} for name in ('weather', 'time')]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
BARE = ' {"name": "time", "parameters": {}}'
ZURICH = ('weather', '{"city": "Zürich"}')


# The harmony format of gpt-oss.
ARGUMENTS = ZURICH[1]
HM = '<|channel|>analysis<|message|>Hm <b>.<|end|>'
FINAL = '<|start|>assistant<|channel|>final<|message|>7 °C'
LOOK = '<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>'
HARMONY_CALL = f'<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}'
EARLY = f' to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>'
HARMONY_ECHO = '{% for m in messages %}{{ m.content }}{% endfor %}<|return|>{# <|channel|> tools #}'


WEATHER = {'type': 'object', 'properties': {'city': {'type': 'string'}, 'days': {'type': ['integer', 'null']}}}
SCHEMAS = {'weather': WEATHER, 'time': {'type': 'object'}}


def check_parser(make, text, content, calls, reasoning=''):
  for size in (1, 2, 7, 1000):
    parser = make()
    said, thought, called = '', '', []
    for piece in [text[start : start + size] for start in range(0, len(text), size)] + [None]:
      part = parser.push(piece or '', is_last=piece is None)
      said, thought, called = said + part.content, thought + part.reasoning, called + list(part.calls)
    assert (thought, said, [(call.name, call.arguments) for call in called]) == (reasoning, content, calls), size
    assert parser.num_calls == len(calls)


def read_by(name, **settings):
  return lambda: AnswerParser(TOOL_CALL_FORMATS[name], SCHEMAS, **settings)


def hermes(arguments):
  return f'<tool_call>\n{{"name": "weather"{arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
  'text, content, calls',
  [
    (CALL, '', [ZURICH]),
    (f'so:\n{CALL}\n{CALL}\n', 'so:\n', [ZURICH, ZURICH]),
    (BARE, '', [('time', '{}')]),
    (f'{BARE} more', f'{BARE} more', []),
    ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
    (CALL[:-3], '', [ZURICH]),  # the model ended it
    (CALL[:-16], CALL[:-16], []),  # cut in its arguments
    (CALL.replace('weather', 'rm'), CALL.replace('weather', 'rm'), []),
    (CALL.replace('{"city"', '{city'), CALL.replace('{"city"', '{city'), []),
    ('<tool_call>[]</tool_call>' + CALL, '<tool_call>[]</tool_call>', [ZURICH]),
    (hermes(', "arguments": {"city": "</tool_call>"}'), '', [('weather', '{"city": "</tool_call>"}')]),
    (hermes(', "arguments": {"x": 1e400}'), '', [('weather', '{"x": 1e400}')]),
    (hermes(', "arguments": "{\\"x\\": 1}"'), '', [('weather', '{"x": 1}')]),
    (hermes(', "arguments": null'), '', [('weather', '{}')]),
    (hermes(''), '', [('weather', '{}')]),
    (hermes(', "arguments": {"x": Infinity}'), hermes(', "arguments": {"x": Infinity}'), []),
    (hermes(', "arguments": [1]'), hermes(', "arguments": [1]'), []),
  ],
)
def test_calls_are_parsed_for_any_split_of_the_text(text, content, calls):
  check_parser(read_by('hermes'), text, content, calls)


TAGGED = (
  'I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</tool_call>\n</parameter>\n'
  '<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n'
  '<tool_call>\n<function=time>\n</function>\n</tool_call>'
)
PAIRS = '<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n<arg_key>days</arg_key>\n<arg_value>7</arg_value>\n'
BLOCK = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "7"}\n```<｜tool▁call▁end｜>'  # noqa: RUF001
SHORT = '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "7"}<｜tool▁call▁end｜>'  # noqa: RUF001
SEVEN = ('weather', '{"city": "7"}')


@pytest.mark.parametrize(
  'form, text, content, calls',
  [
    ('qwen_coder', TAGGED, 'I look.\n', [('weather', '{"city": "Bern\\n</tool_call>", "days": 2}'), ('time', '{}')]),
    ('qwen_coder', TAGGED.removeprefix('I look.\n<tool_call>\n').split('</tool_call>\n<tool_')[0], '',
     [('weather', '{"city": "Bern\\n</tool_call>", "days": 2}')]),
    ('hermes', f'<tool_call>weather\n{PAIRS}</tool_call>', '', [('weather', '{"city": "7", "days": 7}')]),
    ('mistral', '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "7"}, "id": "123456789"}]', '', [SEVEN]),
    ('mistral_named', 'so[TOOL_CALLS]weather[ARGS]{"city": "7"}[TOOL_CALLS]time{}', 'so', [SEVEN, ('time', '{}')]),
    ('mistral', '[TOOL_CALLS]rm[ARGS]{}', '[TOOL_CALLS]rm[ARGS]{}', []),
    ('deepseek_v3', f'Hm.<｜tool▁calls▁begin｜>{BLOCK}\n{BLOCK}<｜tool▁calls▁end｜>', 'Hm.', [SEVEN] * 2),  # noqa: RUF001
    ('deepseek_v31', f'<｜tool▁calls▁begin｜>{SHORT}{SHORT}<｜tool▁calls▁end｜>', '', [SEVEN] * 2),  # noqa: RUF001
    ('phi', '<|tool_call|>[{"name": "weather", "arguments": {"city": "7"}}]<|/tool_call|>', '', [SEVEN]),
    ('functools', 'functools[{"name": "weather", "arguments": {"city": "7"}}]', '', [SEVEN]),
    ('glm4', 'weather\n{"city": "7"}', '', [SEVEN]),
    ('glm4', 'weather is\n{"city": "7"}', 'weather is\n{"city": "7"}', []),
    ('llama', '<|python_tag|>{"name": "weather", "parameters": {"city": "7"}}; {"name": "time"}', '',
     [SEVEN, ('time', '{}')]),
  ],
)  # fmt: skip
def test_each_call_format_is_parsed(form, text, content, calls):
  check_parser(read_by(form), text, content, calls)


@pytest.mark.parametrize(
  'text, schema, value',
  [
    ('7', {'type': 'string'}, '7'), ('7', {'type': 'integer'}, 7), ('7.5', {'type': 'number'}, 7.5), ('7', {}, 7),
    ('null', {'anyOf': [{'type': 'string'}, {'type': 'null'}]}, None), ('True', {'type': 'boolean'}, True),
    ('7', {'enum': ['7']}, '7'), ('x', {'type': 'integer'}, 'x'), ('[1]', {'type': 'array'}, [1]),
    ('{"a": 1}', {'$ref': '#/$defs/A'}, {'a': 1}), ('[1', {'type': 'array'}, '[1'),
  ],
)  # fmt: skip
def test_unquoted_arguments_get_the_type_of_their_schema(text, schema, value):
  assert json.loads(typed_json(text, schema, {'$defs': {'A': {'type': 'object'}}})) == value


@pytest.mark.parametrize(
  'text, settings, reasoning, content, calls',
  [
    ('<think>\nwhy?\n</think>\n\n7 °C', {}, 'why?', '7 °C', []),
    (f'<think>a</thi b</think>{CALL}', {}, 'a</thi b', '', [ZURICH]),
    ('why?\n</think>\n\n7', {'is_thinking': True}, 'why?', '7', []),
    ('<think> cut', {}, 'cut', '', []),
    (' <thinner> 7', {}, '', ' <thinner> 7', []),
    ('7 <think>', {}, '', '7 <think>', []),
    (f'<think>{CALL}</think>7', {}, CALL, '7', []),
  ],
)
def test_reasoning_is_separate_from_content(text, settings, reasoning, content, calls):
  check_parser(read_by('hermes', thinks=True, **settings), text, content, calls, reasoning)


@pytest.mark.parametrize(
  'text, reasoning, content, calls',
  [
    (HM + FINAL, 'Hm <b>.', '7 °C', []),
    (HM + HARMONY_CALL, 'Hm <b>.', '', [ZURICH]),
    (HM + LOOK + HARMONY_CALL + '<|call|>', 'Hm <b>.', 'I look.', [ZURICH]),
    (EARLY, '', '', [ZURICH]),  # the callee in the role
    (LOOK.removeprefix('<|start|>assistant') + FINAL, '', 'I look.\n7 °C', []),
    (HARMONY_CALL.replace(ARGUMENTS, '[7'), '', '[7', []),
    (EARLY.replace('Zürich', '<|end|>'), '', '', [('weather', '{"city": "<|end|>"}')]),
    (EARLY.replace(ARGUMENTS, '{"x": 1e400}'), '', '', [('weather', '{"x": 1e400}')]),
    ('{"a": "<|"}', '', '{"a": "<|"}', []),  # without a header
    (HM + '<|start|>assis', 'Hm <b>.', '', []),
  ],
)
def test_messages_in_channels_are_parsed_for_any_split_of_the_text(text, reasoning, content, calls):
  check_parser(lambda: ChannelParser(SCHEMAS), text, content, calls, reasoning)


def test_content_is_not_buffered():
  parser = ChannelParser(None)
  pieces = [HM, '<|start|>assistant<|channel|>final<|message|>', '7 ', '<', 'b']
  assert [parser.push(piece, is_last=False).content for piece in pieces] == ['', '', '7 ', '', '<b']
  parser = AnswerParser(TOOL_CALL_FORMATS['mistral'], SCHEMAS, thinks=True)
  pieces = ['<th', 'ink>a', ' b', '</think>', '7', ' <', 'x']
  parts = [parser.push(piece, is_last=False) for piece in pieces]
  assert [part.reasoning for part in parts] == ['', 'a', ' b', '', '', '', '']
  assert [part.content for part in parts] == ['', '', '', '', '7', ' ', '<x']


def test_a_plain_object_is_not_buffered():
  parser = read_by('llama')()
  assert [parser.push(piece, is_last=False).content for piece in ('{', '"na', 'ms":', '1')] == ['', '', '{"nams":', '1']


ECHO = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}{# tools tool_calls enable_thinking #}"


@pytest.fixture(scope='module')
def server():
  template = ChatTemplate(template=ECHO, stop=('#',), writes_bos=True)
  with serving(max_len=512, chat_template=template) as served:
    yield served


@pytest.fixture(scope='module')
def client(server):
  with openai.OpenAI(base_url=f'{server.url}/v1', api_key='none', max_retries=0, timeout=20) as client:
    yield client


def ask(client, content, **settings):
  messages = [{'role': 'user', 'content': content}]
  return client.chat.completions.create(**{'model': 'fake.Model', 'messages': messages, 'max_tokens': 200} | settings)


def test_a_client_gets_calls_whole_and_streamed(client):
  (choice,) = ask(client, f'so: {CALL}{CALL}#', tools=TOOLS).choices
  assert (choice.finish_reason, choice.message.content) == ('tool_calls', 'so: ')
  assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [ZURICH] * 2
  assert len({call.id for call in choice.message.tool_calls}) == 2
  chunks = [chunk.choices[0] for chunk in ask(client, f'so: {CALL}{CALL}#', tools=TOOLS, stream=True)]
  assert ''.join(chunk.delta.content or '' for chunk in chunks) == 'so: '
  calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
  assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [(0, *ZURICH), (1, *ZURICH)]
  assert chunks[-1].finish_reason == 'tool_calls'
  assert ask(client, f'{BARE}#', tools=TOOLS).choices[0].message.content is None


def choice_of(name):
  return {'type': 'function', 'function': {'name': name}}


CITY = {
  'type': 'object',
  'properties': {'city': {'enum': ['Bern']}},
  'required': ['city'],
  'additionalProperties': False,
}


@pytest.mark.parametrize('choice, names', [('required', ('weather', 'time')), (choice_of('time'), ('time',))])
def test_a_call_can_be_required(client, choice, names):
  """The fake engine would say something else: the grammar leaves it no choice."""
  tools = [tool | {'function': tool['function'] | {'parameters': CITY}} for tool in TOOLS]
  settings = {'tools': tools, 'tool_choice': choice}
  (answer,) = ask(client, 'no', **settings).choices
  assert (answer.finish_reason, answer.message.content) == ('tool_calls', None)
  (call,) = answer.message.tool_calls
  assert call.function.name in names
  assert json.loads(call.function.arguments) == {'city': 'Bern'}
  chunks = [chunk.choices[0] for chunk in ask(client, 'no', stream=True, **settings)]
  (streamed,) = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
  assert streamed.function == type(streamed.function)(**call.function.model_dump())


def test_without_parallel_calls_the_answer_ends_after_the_first(client):
  (choice,) = ask(client, f'so: {CALL}{CALL}#', tools=TOOLS, parallel_tool_calls=False).choices
  assert (choice.finish_reason, choice.message.content) == ('tool_calls', 'so: ')
  assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [ZURICH]
  (choice,) = ask(client, 'plain#', tools=TOOLS, parallel_tool_calls=False).choices
  assert (choice.finish_reason, choice.message.content) == ('stop', 'plain')


def test_without_tools_calls_are_text(client):
  for settings in ({}, {'tools': TOOLS, 'tool_choice': 'none'}):
    (choice,) = ask(client, f'{CALL}#', **settings).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, 'stop')


def test_earlier_calls_are_rendered_by_the_template():
  template = ChatTemplate(template='{{ tools | length }}{{ messages | tojson }}#{# tool_calls #}', stop=('#',))
  call = {'id': 'call_1', 'type': 'function', 'function': {'name': 'time', 'arguments': '{"zone": "é"}'}}
  turns = [
    {'role': 'developer', 'content': [{'type': 'text', 'text': 'be'}, {'type': 'text', 'text': ' brief'}]},
    {'role': 'assistant', 'content': None, 'tool_calls': [call], 'reasoning_content': 'hm'},
    {'role': 'tool', 'tool_call_id': 'call_1', 'content': '12:00'},
  ]
  with serving(max_len=1024, chat_template=template) as served, served.client() as client:
    asked = {'messages': turns, 'tools': TOOLS, 'max_tokens': 500}
    text = client.post('/v1/chat/completions', json=asked).json()['choices'][0]['message']['content']
  assert json.loads(text[1:]) == [
    {'role': 'system', 'content': 'be brief'},
    {
      'role': 'assistant', 'content': '', 'reasoning_content': 'hm', 'thinking': 'hm',
      'tool_calls': [call | {'function': {'name': 'time', 'arguments': {'zone': 'é'}}}],
    },
    {'role': 'tool', 'content': '12:00', 'tool_call_id': 'call_1'},
  ]  # fmt: skip


def rendered(template, **body):
  """The prompt of a chat, and how its answer is read."""
  model = dataclasses.replace(MODEL, max_len=4096, chat_template=ChatTemplate(template=template, stop=()))
  parsed = chat_request({'messages': [{'role': 'user', 'content': 'Hi'}], 'max_tokens': 99} | body, model, LIMITS)
  return model.decode(parsed.requests[0].ids), parsed


LIMITS = ServerSettings()
ARGUMENTS_OF = '{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}'


@pytest.mark.parametrize(
  'arguments, read',
  [
    ('null', {}), ('', {}), (None, {}), ('{}', {}), ({'a': 1}, {'a': 1}), ('{"a": "\\ud800é"}', {'a': '\ufffdé'}),
    ('{"a": 1e400}', {'a': 1.7976931348623157e308}),
  ],
)  # fmt: skip
def test_arguments_of_earlier_calls_are_parsed_for_the_template(arguments, read):
  function = {'name': 'time', 'arguments': arguments}
  turns = [{'role': 'assistant', 'tool_calls': [{'id': 'c', 'type': 'function', 'function': function}]}]
  assert json.loads(rendered(ARGUMENTS_OF, messages=turns)[0]) == read


def test_a_template_that_joins_arguments_to_text_gets_them_as_text():
  """As DeepSeek's published templates do."""
  source = (
    "{% for m in messages if m.tool_calls %}{{ '<' + m.tool_calls[0]['function']['arguments'] + '>' }}{% endfor %}"
  )
  call = {'id': 'c', 'type': 'function', 'function': {'name': 'time', 'arguments': '{"zone":"é"}'}}
  assert rendered(source, messages=[{'role': 'assistant', 'tool_calls': [call]}])[0] == '<{"zone": "é"}>'


def test_a_template_that_reads_tools_in_the_system_message_gets_them_there():
  """As Phi-4-mini's does."""
  source = "{% for m in messages %}{% set message = m %}{{ m.role }}{{ message['tools'] }};{% endfor %}"
  prompt, _ = rendered(source, tools=TOOLS[:1])
  assert prompt == f'system{json.dumps([TOOLS[0]["function"]])};user;'


THINKING = '{{ messages[0].content }}<think>\n{# </think> tools #}'


def test_a_prompt_may_open_the_reasoning():
  _, parsed = rendered(THINKING)
  assert parsed.parser_settings.parser().push('Hm.\n</think>\n\n7', is_last=True) == ('7', 'Hm.', [])
  for settings, text in (
    ({'response_format': JSON_SCHEMA}, '{"n": 7}'),
    ({'tools': TOOLS[:1], **REQUIRED}, BARE_WEATHER),
  ):
    _, parsed = rendered(THINKING, **settings)
    matcher = parsed.matcher.copy()
    for token in TOKENIZER.encode(f'</think>\n\n{text}'):  # the grammar ends the reasoning first
      assert int(matcher.mask[token // 32]) >> token % 32 & 1
      matcher.take(token)
    part = parsed.parser_settings.parser().push(f'</think>\n\n{text}', is_last=True)
    assert (part.content, len(part.calls)) == (('', 1) if 'tools' in settings else (text, 0))


def test_marks_that_are_special_tokens_are_parsed(tokenizer):
  form = answer_format(ChatTemplate(template='<|call|> </think>'), tokenizer)
  ids = tokenizer.encode('<|start|>a<think>b<|end|>')
  assert form.decoder(None)(ids) == 'a<think>b'  # which is no special token of this tokenizer
  form = dataclasses.replace(form, calls=dataclasses.replace(form.calls, markers=('<|end|>',)))
  assert (form.decoder(None)(ids), form.decoder(SCHEMAS)(ids)) == ('a<think>b', 'a<think>b<|end|>')


REQUIRED = {'tool_choice': 'required'}
BARE_WEATHER = '{"name": "weather", "parameters": {}}'
SCHEMA = {'type': 'object', 'properties': {'n': {'type': 'integer'}}, 'required': ['n'], 'additionalProperties': False}
JSON_SCHEMA = {'type': 'json_schema', 'json_schema': {'name': 'n', 'schema': SCHEMA}}


@pytest.mark.parametrize(
  'content, settings, pattern',
  [
    ('99', {'extra_body': {'structured_outputs': {'regex': '[0-9]{3}'}}}, '999'),
    ('x', {'extra_body': {'structured_outputs': {'choice': ['yes', 'no']}}}, 'yes'),
    ('x', {'extra_body': {'structured_outputs': {'grammar': 'start: "a" "b"'}}}, 'ab'),
    ('{"n":7}', {'response_format': JSON_SCHEMA}, r'\\{"n":7\\}'),
    ('{}', {'response_format': {'type': 'json_object'}}, r'\\{\\}'),
  ],
)
def test_the_output_matches_the_requested_format(client, content, settings, pattern):
  whole = ask(client, content, n=2, **settings)
  for choice in whole.choices:
    assert re.fullmatch(pattern.replace('\\\\', '\\'), choice.message.content), choice
    assert choice.finish_reason == 'stop'
  streamed = [chunk.choices[0].delta.content or '' for chunk in ask(client, content, stream=True, **settings)]
  assert ''.join(streamed) == whole.choices[0].message.content


UNIQUE = {'properties': {'a': {'type': 'array', 'uniqueItems': True}}, 'required': ['a']}


def tool_of(parameters):
  return {'type': 'function', 'function': {'name': 'f', 'parameters': parameters}}


def allowed(mode, *names):
  return {'type': 'allowed_tools', 'allowed_tools': {'mode': mode, 'tools': [choice_of(name) for name in names]}}


@pytest.mark.parametrize(
  'settings, field, message',
  [
    ({'tools': TOOLS, 'tool_choice': 'any'}, 'tool_choice', "must be 'none', 'auto', 'required'"),
    ({'tools': TOOLS, 'tool_choice': choice_of('rm')}, 'tool_choice', 'not in tools'),
    ({'tools': TOOLS, 'tool_choice': allowed('any', 'time')}, 'tool_choice', "mode must be 'auto' or 'required'"),
    ({'tools': TOOLS, 'tool_choice': allowed('auto', 'rm')}, 'tool_choice', 'not in tools'),
    ({'tools': TOOLS, 'tool_choice': allowed('auto')}, 'tool_choice', "must be 'none', 'auto', 'required'"),
    *(
      ({'tools': [tool_of(parameters)]}, 'tools[0].function.parameters', 'must be the JSON schema of an object')
      for parameters in ('x', [], 7, True, {'type': 'string'})
    ),
    ({'tools': [tool_of({}), tool_of({'required': ['a']})]}, 'tools[1]', "two functions named 'f'"),
    ({'tools': [tool_of(UNIQUE)], **REQUIRED}, 'tools[0].function.parameters', 'no uniqueItems: leave it out'),
    ({'tools': [tool_of({'$ref': '#/$defs/x'})], **REQUIRED}, 'tools[0].function.parameters', 'does not exist'),
    (
      {'tools': TOOLS, 'extra_body': {'structured_outputs': {'grammar': 'start: "a"'}}},
      'structured_outputs.grammar',
      'combined with tools',
    ),
    ({'response_format': {'type': 'json_schema'}}, 'response_format.json_schema.schema', 'must be a JSON schema'),
    ({'extra_body': {'structured_outputs': {'regex': '('}}}, 'structured_outputs.regex', 'unclosed group'),
    ({'extra_body': {'structured_outputs': {'structural_tag': 'x'}}}, 'structured_outputs.structural_tag', 'not supp'),
  ],
)
def test_unsupported_tools_and_formats_are_rejected(client, settings, field, message):
  with pytest.raises(openai.BadRequestError, match=re.escape(message)) as refused:
    ask(client, 'x', **settings)
  assert refused.value.param == field


def test_a_template_without_tools_rejects_tools():
  with serving() as served, served.client() as client:
    answer = client.post('/v1/chat/completions', json={'messages': [{'role': 'user', 'content': 'x'}], 'tools': TOOLS})
  assert answer.status_code == 400
  assert answer.json()['error']['message'] == "this model's chat template does not use tools: leave them out."


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  """Bytes, and the special tokens of gpt-oss."""
  folder = tmp_path_factory.mktemp('tokenizer')
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokenizer = tokenizers.Tokenizer(models.BPE(vocab={text: id for id, text in enumerate(alphabet)}, merges=[]))
  tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  markers = ('channel', 'message', 'start', 'end', 'call', 'return', 'constrain')
  tokenizer.add_special_tokens([f'<|{name}|>' for name in markers])
  tokenizer.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text('{"eos_token": "<|return|>"}')
  return FolderTokenizer(path=str(folder))


def test_clients_do_not_see_markers(tokenizer):
  """The fake engine repeats the prompt, up to the end of text."""
  template = ChatTemplate(template=HARMONY_ECHO, writes_bos=True)
  with serving(max_len=512, chat_template=template, tokenizer=tokenizer) as served, served.client() as client:
    asked = {'messages': [{'role': 'user', 'content': HM + LOOK + HARMONY_CALL}], 'max_tokens': 200, 'tools': TOOLS}
    (choice,) = client.post(CHAT, json=asked).json()['choices']
    chunks = [event['choices'][0] for event in events(client.post(CHAT, json=asked | {'stream': True}))]
  message = choice['message']
  assert (message['reasoning_content'], message['content']) == ('Hm <b>.', 'I look.')
  assert choice['finish_reason'] == 'tool_calls'
  assert message['tool_calls'][0]['function'] == {'name': 'weather', 'arguments': ARGUMENTS}
  for field in ('content', 'reasoning_content'):
    assert ''.join(chunk['delta'].get(field) or '' for chunk in chunks) == message[field]
  (call,) = [call for chunk in chunks for call in chunk['delta'].get('tool_calls', ())]
  assert call['function'] == message['tool_calls'][0]['function']
