"""Bodies of requests against the served model, without a server."""

import dataclasses

import pytest

from spmd_tasks.decoding import ChatTemplate, DecodeSettings, SamplingParams
from spmd_tasks.serving import RequestError, ServerSettings
from spmd_tasks.serving.requests import chat_request
from tests.serving.fake_engine import TOKENIZER
from tests.serving.served import ASK, MODEL

SETTINGS = ServerSettings()


def test_the_template_sees_the_messages_and_the_tokenizer_puts_bos_before_its_text():
  template = ChatTemplate(template='{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}', stop=('[',))
  parts = [{'type': 'text', 'text': 'hi'}]
  messages = [{'role': 'developer', 'content': 'be brief'}, {'role': 'user', 'content': parts}]
  (request,) = chat_request(
    ASK | {'messages': messages}, dataclasses.replace(MODEL, chat_template=template), SETTINGS
  ).requests
  assert request.ids == (TOKENIZER.bos_id, *TOKENIZER.encode('[system]be brief[user]hi'))
  assert request.stop == ('[',)


def test_messages_that_the_template_refuses_are_the_clients_error():
  template = ChatTemplate(template="{{ raise_exception('the first message must be of the system') }}")
  with pytest.raises(RequestError, match='refuses the messages: the first message must be') as caught:
    chat_request(ASK, dataclasses.replace(MODEL, chat_template=template), SETTINGS)
  assert (caught.value.status, caught.value.param) == (400, 'messages')


def test_sampling_parameters_come_from_the_body_and_then_from_the_settings():
  model = dataclasses.replace(MODEL, settings=DecodeSettings(temperature=0.5, top_k=3, num_top_logprobs=2))
  (request,) = chat_request(ASK | {'top_k': 0, 'min_p': 0.25, 'seed': 1}, model, SETTINGS).requests
  assert request.sampling == SamplingParams(temperature=0.5, min_p=0.25)
