"""Answers parsed with a tokenizer's response_template match transformers, for any split of the text."""

import json
import time

import pytest

from spmd_tasks.inputs import ChatTemplate
from spmd_tasks.serving.answer_format import answer_format
from spmd_tasks.serving.response_templates import ResponseTemplate, ResponseTemplateParser
from tests.model_folders import write_tokenizer

SCHEMAS = {
  'weather': {'type': 'object', 'properties': {'city': {'type': 'string'}, 'days': {'type': 'integer'}}},
  'time': {'type': 'object'},
}
TOOLS = [{'type': 'function', 'function': {'name': name, 'parameters': schema}} for name, schema in SCHEMAS.items()]
CALL = {'type': 'function', 'function': {'name': '{name}', 'arguments': '{content}'}}
THOUGHT = {'open': '<think>', 'close': '</think>'}
JSON_CALLS = {
  'start_anchor': '<|assistant|>',
  'fields': {
    'thinking': THOUGHT,
    'tool_calls': {
      'open_pattern': r'\s*<call>',
      'close': '</call>',
      'content': 'json',
      'repeats': True,
      'transform': {'type': 'function', 'function': '{content}'},
    },
    'content': {'close': ['<|end|>', '<|end|>x']},
  },
}
TAGGED_CALLS = {
  'start_anchor_pattern': r'<\|assistant(-\d)?\|>',
  'fields': {
    'reasoning_content': THOUGHT,
    'tool_calls': {
      'open_pattern': r'<call name=(?P<name>\w+)>',
      'close': '</call>',
      'content': 'xml-inline',
      'content_args': {'tag_pattern': r'<(?P<key>\w+)>(?P<value>.*?)</\w+>'},
      'repeats': True,
      'transform': CALL,
    },
    'content': {},
  },
}
LAX_CALLS = {
  'start_anchor': ['<|assistant|>', '<|model|>'],
  'fields': {
    'tool_calls': {
      'open_pattern': r'<call:(?P<name>\w+)',
      'close': '<end>',
      'content': 'json',
      'content_args': {'unquoted_keys': True, 'string_delims': [['<q>', '<q>']]},
      'repeats': True,
      'transform': CALL,
    },
    'content': {},
  },
}
LIST_OF_CALLS = {
  'start_anchor': '<|assistant|>',
  'fields': {
    'tool_calls': {
      'open': '<calls>',
      'close': '</calls>',
      'content': 'json',
      'transform_each': True,
      'transform': {'type': 'function', 'function': {'name': '{tool}', 'arguments': '{with}'}},
    },
    'content': {},
  },
}
ONE = '<call>{"name": "weather", "arguments": {"city": "</b>", "days": 2}}</call>'
PROMPT = '<|user|>Hi<|assistant|>'


def read(template, text, prompt, size, tools=SCHEMAS):
  parser = ResponseTemplateParser(ResponseTemplate.from_json(json.dumps(template)), tools, prompt=prompt)
  content, reasoning, calls = '', '', []
  for piece in [text[start : start + size] for start in range(0, len(text), size)] + [None]:
    part = parser.push(piece or '', is_last=piece is None)
    content, reasoning, calls = content + part.content, reasoning + part.reasoning, calls + list(part.calls)
  return content, reasoning, [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize(
  'template, text, prompt',
  [
    (JSON_CALLS, '<think>\nwhy\n</think>\n\nIt is 7.<|end|>', PROMPT),
    (JSON_CALLS, f'<think>why</think>\n{ONE}\n{ONE}<|end|>', PROMPT),
    (JSON_CALLS, f'I look. {ONE}', PROMPT),
    (JSON_CALLS, 'why</think>7', PROMPT + '<think>\n'),
    (JSON_CALLS, '7 <call', PROMPT),
    (JSON_CALLS, '7 <th', '<|assistant|><think>old</think>7<|user|>And?<|assistant|>'),
    (TAGGED_CALLS, '<call name=weather><city>7</city><days>7</days></call><call name=time></call>', '<|assistant-2|>'),
    (TAGGED_CALLS, 'hm</think>so<call name=time><x>y</x></call>', '<|assistant|><think>'),
    (LAX_CALLS, '<call:weather{city:<q>"B", {a:1}<q>,days:3}<end><call:time{}<end>', '<|model|>'),
    (LIST_OF_CALLS, '<calls>[{"tool": "time", "with": {}}, {"tool": "weather", "with": {"days": 1}}]</calls>', PROMPT),
  ],
)
def test_answers_are_parsed_like_transformers(template, text, prompt):
  from transformers.utils.chat_parsing import parse_response

  message = parse_response(text, template, prefix=prompt, tools=TOOLS)
  reasoning = message.get('reasoning_content', message.get('thinking', ''))
  calls = [(call['function']['name'], call['function']['arguments']) for call in message.get('tool_calls', ())]
  for size in (1, 3, 1000):
    assert read(template, text, prompt, size) == (message.get('content', ''), reasoning, calls), size


@pytest.mark.parametrize('text', [ONE.replace('{"name', '{name'), ONE.replace('weather', 'rm'), ONE.replace('}}', '}')])
def test_invalid_calls_are_content(text):
  for size in (1, 1000):
    assert read(JSON_CALLS, text, PROMPT, size) == (text, '', [])
  assert read(JSON_CALLS, ONE, PROMPT, 7, tools=None) == (ONE, '', [])


def test_text_streams_up_to_a_possible_mark():
  template = {'start_anchor': '<|assistant|>', 'fields': {'thinking': THOUGHT, 'content': {}}}
  parser = ResponseTemplateParser(ResponseTemplate.from_json(json.dumps(template)), None)
  parts = [parser.push(piece, is_last=False) for piece in ('<think>a', ' b</th', 'ink>7', ' <x', '>')]
  assert [part.reasoning for part in parts] == ['a', ' b', '', '', '']
  assert [part.content for part in parts] == ['', '', '7', ' <x', '>']


def changed(**field):
  return {**JSON_CALLS, 'fields': {**JSON_CALLS['fields'], 'tool_calls': {'close': '</call>', **field}}}


@pytest.mark.parametrize(
  'template, message',
  [
    ({}, 'must have 1 to 16 fields'),
    ({'fields': {'content': {}}}, 'neither start_anchor nor'),
    ({**JSON_CALLS, 'version': 2}, 'of version 1'),
    ({**JSON_CALLS, 'run': 'x'}, "'run' is not supported"),
    (changed(open_pattern='(?=<)a'), 'RE2 cannot compile'),
    (changed(open_pattern='a' * 1001), 'at most 1000 characters'),
    (changed(open='<a>', open_pattern='a'), 'both open and open_pattern'),
    (changed(), 'may have no opening'),
    (changed(open='<a>', content='python'), 'must have a content from'),
    (changed(open='<a>', content='xml-inline'), 'not a text'),
    (changed(open=''), 'texts of 1 to 128 characters'),
  ],
)
def test_invalid_templates_are_rejected(template, message):
  with pytest.raises(ValueError, match=message):
    ResponseTemplate.from_json(json.dumps(template))


def test_untrusted_patterns_run_in_linear_time():
  text = 'a' * 30_000
  began = time.monotonic()
  assert read(changed(open_pattern='(a+)+b'), text, PROMPT, 1000)[0] == text
  assert time.monotonic() - began < 5


def test_a_response_template_overrides_the_format_of_the_chat_template(tmp_path):
  write_tokenizer(tmp_path, chat_template='<tool_call> tools', response_template=JSON_CALLS)
  template = ChatTemplate.from_folder(str(tmp_path))
  form = answer_format(template, None)
  assert form.parser(SCHEMAS, prompt=PROMPT, is_constrained=False).push(ONE, is_last=True).calls[0].name == 'weather'
  assert (
    form.parser(SCHEMAS, prompt=PROMPT, is_constrained=True).push(ONE, is_last=True).calls == []
  )  # a grammar has the other
