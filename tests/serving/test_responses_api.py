"""/v1/responses with the real client and a fake engine that repeats its prompt: items, events, errors."""

import openai
import pytest

from spmd_tasks.inputs import ChatTemplate
from tests.serving.served import serving
from tests.serving.test_tool_calls import CALL, HARMONY_CALL, HARMONY_ECHO, HM, LOOK, ZURICH, tokenizer  # noqa: F401

TOOLS = [{'type': 'function', 'name': 'weather', 'parameters': {}, 'strict': False}]
# The text of each turn with its role and calls, up to the stop string.
SHOW = (
  '{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.reasoning_content }}'
  '{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.id }}]{% endfor %}{{ m.tool_call_id }};{% endfor %}'
  '{# tools tool_calls #}'
)


@pytest.fixture(scope='module')
def client():
  template = ChatTemplate(template=SHOW, stop=('#',), writes_bos=True)
  with (
    serving(max_len=512, chat_template=template) as served,
    openai.OpenAI(base_url=f'{served.url}/v1', api_key='none', max_retries=0, timeout=20) as client,
  ):
    client.engine = served.engine
    yield client


def test_text_whole_and_streamed(client):
  asked = {'model': 'fake.Model', 'input': 'hello#', 'instructions': 'Be kind.', 'max_output_tokens': 200}
  answer = client.responses.create(**asked)
  assert (answer.status, answer.output_text, answer.model) == ('completed', 'system:Be kind.;user:hello', 'fake.Model')
  usage = answer.usage
  assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 20
  events = list(client.responses.create(**asked, stream=True))
  assert [event.sequence_number for event in events] == list(range(len(events)))
  kinds = [event.type.removeprefix('response.') for event in events]
  assert kinds[:4] == ['created', 'in_progress', 'output_item.added', 'content_part.added']
  assert kinds[-4:] == ['output_text.done', 'content_part.done', 'output_item.done', 'completed']
  assert set(kinds[4:-4]) == {'output_text.delta'}
  assert ''.join(event.delta for event in events[4:-4]) == answer.output_text == events[-4].text
  assert events[-1].response.output_text == answer.output_text
  assert events[-1].response.usage.total_tokens == usage.total_tokens
  cut = client.responses.create(
    **asked | {'max_output_tokens': 3}, top_logprobs=1, include=['message.output_text.logprobs']
  )
  assert (cut.status, cut.incomplete_details.reason, cut.output[0].status) == (
    'incomplete',
    'max_output_tokens',
    'incomplete',
  )
  assert [entry.token for entry in cut.output[0].content[0].logprobs] == list('sys')
  held = client.responses.create(**asked | {'instructions': '<tool x'}, tools=TOOLS, top_logprobs=1)
  assert ''.join(entry.token for entry in held.output[0].content[0].logprobs) == held.output_text
  client.engine.fail_next = RuntimeError('secret details')
  *_, failed = client.responses.create(**asked, stream=True)
  assert (failed.type, failed.response.status) == ('response.failed', 'failed')
  assert failed.response.error.code == 'server_error'
  assert 'secret' not in failed.response.error.message
  with client.responses.stream(model='fake.Model', input='hello#', max_output_tokens=50) as stream:  # its own parser
    assert stream.get_final_response().output_text == 'user:hello'


def test_calls_and_the_items_of_a_conversation(client):
  items = [
    {'role': 'user', 'content': [{'type': 'input_text', 'text': 'so: '}]},
    {'type': 'reasoning', 'content': [{'type': 'reasoning_text', 'text': 'Hm'}]},
    {'type': 'function_call', 'call_id': 'c1', 'name': 'weather', 'arguments': '{}'},
    {'type': 'function_call_output', 'call_id': 'c1', 'output': '7'},
    {'type': 'message', 'role': 'assistant', 'content': [{'type': 'output_text', 'text': 'Cold.'}]},
    {'role': 'user', 'content': f'{CALL}#'},
  ]
  asked = {'model': 'fake.Model', 'input': items, 'tools': TOOLS, 'max_output_tokens': 300}
  answer = client.responses.create(**asked)
  assert [item.type for item in answer.output] == ['message', 'function_call']
  assert answer.output_text == 'user:so: ;assistant:Hm[weather c1];tool:7c1;assistant:Cold.;user:'
  call = answer.output[1]
  assert (call.name, call.arguments) == ZURICH
  events = list(client.responses.create(**asked, stream=True))
  (done,) = [event for event in events if event.type == 'response.function_call_arguments.done']
  assert done.arguments == ZURICH[1]
  assert [item.type for item in events[-1].response.output] == ['message', 'function_call']
  added = [event for event in events if event.type == 'response.output_item.added']
  assert [event.output_index for event in added] == [0, 1]


def test_reasoning_is_an_item(tokenizer):  # noqa: F811
  tools = [{'type': 'function', 'name': 'weather', 'parameters': {}}]
  template = ChatTemplate(template=HARMONY_ECHO, writes_bos=True)
  with (
    serving(max_len=512, chat_template=template, tokenizer=tokenizer) as served,
    openai.OpenAI(base_url=f'{served.url}/v1', api_key='none', max_retries=0, timeout=20) as client,
  ):
    asked = {'model': 'fake.Model', 'input': HM + LOOK + HARMONY_CALL, 'tools': tools, 'max_output_tokens': 200}
    answer = client.responses.create(**asked)
    streamed = list(client.responses.create(**asked, stream=True))[-1].response
  for response in (answer, streamed):
    assert [item.type for item in response.output] == ['reasoning', 'message', 'function_call']
    assert (response.output[0].content[0].text, response.output_text) == ('Hm <b>.', 'I look.')
    assert response.output[2].arguments == ZURICH[1]


@pytest.mark.parametrize(
  'change, message',
  [
    ({'previous_response_id': 'resp_1'}, 'previous_response_id is not supported by this server'),
    ({'input': []}, 'input must be a string or an array of objects'),
    ({'input': [{'type': 'item_reference', 'id': 'x'}]}, r"input\[0\] has type 'item_reference'"),
    ({'input': [{'role': 'user', 'content': [{'type': 'input_image', 'image_url': 'x'}]}]}, r'input\[0\] has a part'),
    ({'input': [{'role': 'king', 'content': 'x'}]}, r'input\[0\]\.role must be'),
    ({'tools': [{'type': 'web_search'}]}, r'tools\[0\] must be an object of type function'),
    ({'reasoning': {'effort': 'high'}}, 'chat template does not use reasoning.effort'),
    ({'max_output_tokens': 0}, 'max_output_tokens must be at least 1'),
    ({'text': {'format': {'type': 'json_schema', 'schema': {'type': 7}, 'name': 'x'}}}, r'text\.format\.schema'),
  ],
)
def test_unsupported_fields_are_rejected_by_name(client, change, message):
  with pytest.raises(openai.BadRequestError, match=message):
    client.responses.create(**{'model': 'fake.Model', 'input': 'hello#'} | change)
