"""Sessions of the openai client with model folders of three families: tool calls, reasoning, parsed answers.

The engine generates a script that the test sets, as far as the grammar of the request allows it.
"""

import dataclasses
import json

import numpy as np
import openai
from pydantic import BaseModel
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from spmd_tasks.decoding.constraints import Grammars
from spmd_tasks.inputs import ChatTemplate, FolderTokenizer
from tests.inputs.test_as_transformers_does import TEMPLATES
from tests.serving.fake_engine import FakeEngine
from tests.serving.served import MODEL, serving


class ScriptedEngine(FakeEngine):
  """Says `script`, tokens that end with the end of text; the first token that is allowed where that is not."""

  script: tuple[int, ...] = ()

  def _next(self, slot, mask=None):
    state = self.slots[slot]
    if state is None or state.length < len(state.request.ids):
      return None
    token = self.script[min(state.num_tokens, len(self.script) - 1)]
    if mask is not None and not mask[token // 32] >> np.uint32(token % 32) & 1:
      token = int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder='little'))[0])
    state.num_tokens += 1
    is_finished = token in state.request.stop_ids or state.num_tokens >= state.request.max_tokens
    if is_finished:
      self.slots[slot] = None
    return token, is_finished


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  template: str
  special: tuple[str, ...]  # special tokens, the last of which ends a text
  others: tuple[str, ...] = ()
  thought: str = ''  # with which an answer begins
  said: str = '{}'
  call: str
  key: str = 'arguments'
  between: str = ''  # two calls


FAMILIES = {
  'llama': Family(
    template='llama3',
    special=('<|begin_of_text|>', '<|start_header_id|>', '<|end_header_id|>', '<|python_tag|>', '<|eot_id|>'),
    call='{{"name": "{name}", "parameters": {arguments}}}',
    between='; ',
  ),
  'qwen3': Family(
    template='qwen3',
    special=('<|im_start|>', '<|im_end|>'),
    others=('<think>', '</think>', '<tool_call>', '</tool_call>'),
    thought='<think>\nHm.\n</think>\n\n',
    call='<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
    between='\n',
  ),
  'gpt_oss': Family(
    template='harmony',
    special=tuple(f'<|{name}|>' for name in ('start', 'end', 'message', 'channel', 'constrain', 'call', 'return')),
    thought='<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant',
    said='<|channel|>final<|message|>{}',
    call='<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}',
    between='<|call|><|start|>assistant',
  ),
}  # fmt: skip


class City(BaseModel):
  name: str


class Weather(BaseModel):
  """The weather in a city."""

  city: City


class Tree(BaseModel):
  """A tree of numbers."""

  value: int
  children: list['Tree']


BERN = {'city': {'name': 'Bern'}}
TREE = {'value': 1, 'children': [{'value': 2, 'children': []}]}
TOOLS = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Tree)]
ANSWER = {'type': 'object', 'properties': {'n': {'type': 'integer'}}, 'required': ['n'], 'additionalProperties': False}
JSON_ANSWER = {'type': 'json_schema', 'json_schema': {'name': 'answer', 'schema': ANSWER, 'strict': True}}


def write_folder(folder, family):
  """A tokenizer of bytes, the family's marks and its template."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokenizer = tokenizers.Tokenizer(models.BPE(vocab={text: id for id, text in enumerate(alphabet)}, merges=[]))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(list(family.special))
  tokenizer.add_tokens(list(family.others))
  tokenizer.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text(json.dumps({'eos_token': family.special[-1]}))
  (folder / 'chat_template.jinja').write_text((TEMPLATES / f'{family.template}.jinja').read_text())


class Session:
  """A client of a family's folder."""

  def __init__(self, client, engine, tokenizer, family):
    self.client, self.family = client, family
    self._engine, self._tokenizer = engine, tokenizer

  def chat(self, *, says, messages=None, **settings):
    self.says(says)
    messages = messages or [{'role': 'user', 'content': 'Hi'}]
    return self.client.chat.completions.create(model='folder', messages=messages, max_tokens=400, **settings)

  def says(self, text):
    self._engine.script = (*self._tokenizer.encode(text), self._tokenizer.eos_id)

  def call(self, name, arguments):
    return self.family.call.format(name=name, arguments=json.dumps(arguments))

  def said(self, text):
    return self.family.thought + self.family.said.format(text)


@pytest.fixture(scope='module', params=FAMILIES)
def session(request, tmp_path_factory):
  family, folder = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
  write_folder(folder, family)
  tokenizer, template = FolderTokenizer(path=str(folder)), ChatTemplate.from_folder(str(folder))
  size = tokenizer.vocab_size
  grammars = Grammars(tokenizer, vocab_size=size, end_ids=(tokenizer.eos_id,))
  engine = ScriptedEngine(max_len=8192, prefill_chunk=1024)
  model = dataclasses.replace(
    MODEL, name='folder', tokenizer=tokenizer, chat_template=template, vocab_size=size, grammars=grammars, max_len=8192
  )
  with (
    serving(engine, model=model) as served,
    openai.OpenAI(base_url=f'{served.url}/v1', api_key='none', max_retries=0, timeout=20) as client,
  ):
    yield Session(client, engine, tokenizer, family)


def calls_of(message):
  return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_a_conversation_with_calls_and_its_own_messages_back(session):
  two = session.call('Weather', BERN) + session.family.between + session.call('Tree', TREE)
  (choice,) = session.chat(says=session.family.thought + two, tools=TOOLS).choices
  assert (choice.finish_reason, choice.message.content) == ('tool_calls', None)
  assert calls_of(choice.message) == [('Weather', BERN), ('Tree', TREE)]
  reasoning = 'Hm.' if session.family.thought else None
  for name in ('reasoning_content', 'reasoning'):
    assert getattr(choice.message, name, None) == reasoning
  (choice,) = session.chat(says=session.family.thought + two, tools=TOOLS, parallel_tool_calls=False).choices
  assert calls_of(choice.message) == [('Weather', BERN)]
  for own in (choice.message, choice.message.model_dump(), choice.message.model_dump(exclude_none=True)):
    told = {'role': 'tool', 'tool_call_id': choice.message.tool_calls[0].id, 'content': '7'}
    turns = [{'role': 'user', 'content': 'Hi'}, own, told]
    answer = session.chat(says=session.said('7 °C'), messages=turns, tools=TOOLS)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ('7 °C', 'stop')
    session.chat(
      says='x', messages=[*turns, answer.choices[0].message, {'role': 'user', 'content': 'And?'}], tools=TOOLS
    )


@pytest.mark.parametrize(
  'choice',
  [
    'required',
    {'type': 'function', 'function': {'name': 'Tree'}},
    {
      'type': 'allowed_tools',
      'allowed_tools': {'mode': 'required', 'tools': [{'type': 'function', 'function': {'name': 'Tree'}}]},
    },
  ],
)
def test_a_forced_call_whole_and_streamed(session, choice):
  settings = {'says': session.call('Tree', TREE), 'tools': TOOLS, 'tool_choice': choice}
  (whole,) = session.chat(**settings).choices
  assert (whole.finish_reason, whole.message.content) == ('tool_calls', None)
  assert calls_of(whole.message) == [('Tree', TREE)]
  chunks = [chunk.choices[0] for chunk in session.chat(stream=True, **settings)]
  (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
  assert (call.function.name, json.loads(call.function.arguments)) == ('Tree', TREE)
  assert not ''.join(chunk.delta.content or '' for chunk in chunks)


def test_forced_calls_match_the_schema_of_their_tool(session):
  """One tool's `$defs` hold for no other tool, although their names are the same."""
  other = {'name': 'other', 'description': '', 'parameters': json.loads(json.dumps(TOOLS[0]['function']['parameters']))}
  other['parameters']['$defs']['City']['properties'] = {'zip': {'enum': [3000]}}
  other['parameters']['$defs']['City']['required'] = ['zip']
  tools = [*TOOLS, {'type': 'function', 'function': other}]
  for name, arguments in (('other', {'city': {'zip': 3000}}), ('Weather', BERN)):
    (choice,) = session.chat(says=session.call(name, arguments), tools=tools, tool_choice='required').choices
    assert calls_of(choice.message) == [(name, arguments)]
  named = {'type': 'function', 'function': {'name': 'other'}}
  (choice,) = session.chat(says=session.call('other', BERN), tools=tools, tool_choice=named).choices
  assert calls_of(choice.message) == [('other', {'city': {'zip': 3000}})]


def test_a_response_format_or_a_call(session):
  settings = {'tools': TOOLS, 'response_format': JSON_ANSWER}
  (choice,) = session.chat(says='{"n": 7}', **settings).choices
  assert (choice.message.content, choice.finish_reason) == ('{"n": 7}', 'stop')
  (choice,) = session.chat(says=session.call('Weather', BERN), **settings).choices
  assert (calls_of(choice.message), choice.finish_reason) == ([('Weather', BERN)], 'tool_calls')
  (choice,) = session.chat(says=session.call('Weather', BERN), tool_choice='required', **settings).choices
  assert calls_of(choice.message) == [('Weather', BERN)]


def test_tools_that_are_not_allowed_are_not_called(session):
  allowed = {'mode': 'auto', 'tools': [{'type': 'function', 'function': {'name': 'Tree'}}]}
  settings = {'tools': TOOLS, 'tool_choice': {'type': 'allowed_tools', 'allowed_tools': allowed}}
  assert calls_of(session.chat(says=session.call('Tree', TREE), **settings).choices[0].message) == [('Tree', TREE)]
  assert calls_of(session.chat(says=session.call('Weather', BERN), **settings).choices[0].message) == []


def test_the_client_s_own_parsers(session):
  session.says(session.call('Weather', BERN))
  ask = {'model': 'folder', 'messages': [{'role': 'user', 'content': 'Hi'}], 'tools': TOOLS, 'max_tokens': 400}
  parsed = session.client.chat.completions.parse(**ask).choices[0].message.tool_calls[0]
  assert parsed.function.parsed_arguments == Weather(city=City(name='Bern'))
  with session.client.chat.completions.stream(**ask) as stream:
    (call,) = stream.get_final_completion().choices[0].message.tool_calls
  assert call.function.parsed_arguments == Weather(city=City(name='Bern'))


def test_responses(session):
  flat = [{'type': 'function', **tool['function']} for tool in TOOLS]
  ask = {'model': 'folder', 'input': 'Hi', 'tools': flat, 'max_output_tokens': 400}
  session.says(session.family.thought + session.call('Weather', BERN))
  answer = session.client.responses.create(**ask)
  kinds = ['reasoning', 'function_call'] if session.family.thought else ['function_call']
  assert [item.type for item in answer.output] == kinds
  assert json.loads(answer.output[-1].arguments) == BERN
  *_, last = session.client.responses.create(**ask, stream=True)
  assert [item.type for item in last.response.output] == kinds
  told = {'type': 'function_call_output', 'call_id': answer.output[-1].call_id, 'output': '7'}
  session.says(session.said('7 °C'))
  for own in (answer.output, [item.model_dump() for item in answer.output]):
    again = session.client.responses.create(**ask | {'input': [{'role': 'user', 'content': 'Hi'}, *own, told]})
    assert again.output_text == '7 °C'
  session.says(session.call('Tree', TREE))
  choices = ('required', {'type': 'function', 'name': 'Tree'})
  allowed = {'type': 'allowed_tools', 'mode': 'required', 'tools': [{'type': 'function', 'name': 'Tree'}]}
  for choice in (*choices, allowed):
    (call,) = session.client.responses.create(**ask, tool_choice=choice).output
    assert (call.name, json.loads(call.arguments)) == ('Tree', TREE)
