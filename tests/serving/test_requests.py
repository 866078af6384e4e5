"""Bodies of requests against the served model, without a server."""

import dataclasses

import pytest

from spmd_tasks.decoding import SamplingParams
from spmd_tasks.inputs import ChatTemplate
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.requests import chat_request, completion_request
from spmd_tasks.serving.settings import ServerSettings
from tests.serving.served import ASK, HELLO, MODEL

SETTINGS = ServerSettings()


@pytest.mark.parametrize('left_out', [{}, {'model': None}])
def test_a_request_may_leave_out_all_but_its_prompt_or_messages(left_out):
  assert completion_request({'prompt': 'abc'} | left_out, MODEL, SETTINGS).requests[0].ids
  messages = [{'role': 'user', 'content': 'hi'}, {'role': 'assistant'}, {'role': 'user', 'content': None}]
  assert chat_request({'messages': messages, 'top_logprobs': 0} | left_out, MODEL, SETTINGS).requests[0].ids


def test_messages_that_the_template_refuses_are_the_clients_error():
  template = ChatTemplate(template="{{ raise_exception('the first message must be of the system') }}")
  with pytest.raises(RequestError, match='refuses the messages: the first message must be') as caught:
    chat_request(ASK, dataclasses.replace(MODEL, chat_template=template), SETTINGS)
  assert (caught.value.status, caught.value.param) == (400, 'messages')


def test_what_a_request_leaves_out_is_the_experiments_default():
  settings = dataclasses.replace(MODEL.settings, temperature=0.7, top_k=5, max_tokens=9)
  model = dataclasses.replace(MODEL, settings=settings)
  wanted = completion_request({'model': MODEL.name, 'prompt': ['a', 'b'], 'n': 2, 'top_k': 3}, model, SETTINGS)
  assert [request.sampling for request in wanted.requests] == [SamplingParams(temperature=0.7, top_k=3)] * 4
  assert [request.max_tokens for request in wanted.requests] == [9] * 4
  assert [request.sample for request in wanted.requests] == [0, 1, 0, 1]
  assert len({request.seed for request in wanted.requests}) == 4
  assert {request.seed for request in completion_request(HELLO | {'seed': -1}, model, SETTINGS).requests} == {2**32 - 1}
  chat = chat_request({name: value for name, value in ASK.items() if name != 'max_tokens'}, model, SETTINGS)
  assert chat.requests[0].max_tokens == 9
  assert chat.requests[0].stop == MODEL.chat_template.stop
