"""Answers in the harmony format of gpt-oss, whole and streamed: reasoning, content and calls, and no marker in them."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from spmd_tasks.inputs import ChatTemplate, FolderTokenizer
from spmd_tasks.serving.tool_calls import ChannelParser
from tests.serving.served import CHAT, events, serving

ARGUMENTS = '{"city": "Zürich"}'
HM = '<|channel|>analysis<|message|>Hm <b>.<|end|>'
FINAL = '<|start|>assistant<|channel|>final<|message|>7 °C'
LOOK = '<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>'
CALL = f'<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}'
EARLY = f' to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>'
WEATHER = ('weather', ARGUMENTS)
CASES = {
  'reasoning and an answer': (HM + FINAL, 'Hm <b>.', '7 °C', []),
  'a call': (HM + CALL, 'Hm <b>.', '', [WEATHER]),
  'words before a call': (HM + LOOK + CALL + '<|call|>', 'Hm <b>.', 'I look.', [WEATHER]),
  'the callee in the role': (EARLY, '', '', [WEATHER]),
  'two messages': (LOOK.removeprefix('<|start|>assistant') + FINAL, '', 'I look.\n7 °C', []),
  'arguments that are no object': (CALL.replace(ARGUMENTS, '[7'), '', '[7', []),
  'without a header': ('{"a": "<|"}', '', '{"a": "<|"}', []),
  'an unfinished header': (HM + '<|start|>assis', 'Hm <b>.', '', []),
}


@pytest.mark.parametrize('name', CASES)
def test_messages_are_found_however_the_text_is_cut(name):
  text, reasoning, content, calls = CASES[name]
  for size in (1, 3, 11, 1000):
    parser = ChannelParser({'weather'})
    thought, said, made = '', '', []
    for piece in [text[start : start + size] for start in range(0, len(text), size)] + [None]:
      found, new = parser.push(piece or '', is_last=piece is None)
      said, made, thought = said + found, made + new, thought + parser.take_reasoning()
    assert (thought, said, [(call.name, call.arguments) for call in made]) == (reasoning, content, calls), size
    assert parser.num_calls == len(calls)


def test_content_is_not_held_back():
  parser = ChannelParser(())
  pieces = [HM, '<|start|>assistant<|channel|>final<|message|>', '7 ', '<', 'b']
  assert [parser.push(piece, is_last=False)[0] for piece in pieces] == ['', '', '7 ', '', '<b']


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  """Bytes, and the special tokens of gpt-oss."""
  folder = tmp_path_factory.mktemp('tokenizer')
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  made = tokenizers.Tokenizer(models.BPE(vocab={text: id for id, text in enumerate(alphabet)}, merges=[]))
  made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  markers = ('channel', 'message', 'start', 'end', 'call', 'return', 'constrain')
  made.add_special_tokens([f'<|{name}|>' for name in markers])
  made.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text('{"eos_token": "<|return|>"}')
  return FolderTokenizer(path=str(folder))


ECHO = '{% for m in messages %}{{ m.content }}{% endfor %}<|return|>{# <|channel|> tools #}'


def test_a_client_gets_no_markers(tokenizer):
  """The fake engine repeats the prompt, up to the end of text."""
  tools = [{'type': 'function', 'function': {'name': 'weather'}}]
  with (
    serving(max_len=512, chat_template=ChatTemplate(template=ECHO, writes_bos=True), tokenizer=tokenizer) as served,
    served.client() as client,
  ):
    asked = {'messages': [{'role': 'user', 'content': HM + LOOK + CALL}], 'max_tokens': 200, 'tools': tools}
    (choice,) = client.post(CHAT, json=asked).json()['choices']
    chunks = [event['choices'][0] for event in events(client.post(CHAT, json=asked | {'stream': True}))]
  message = choice['message']
  assert (message['reasoning_content'], message['content'], choice['finish_reason']) == (
    'Hm <b>.',
    'I look.',
    'tool_calls',
  )
  assert message['tool_calls'][0]['function'] == {'name': 'weather', 'arguments': ARGUMENTS}
  for field in ('content', 'reasoning_content'):
    assert ''.join(chunk['delta'].get(field) or '' for chunk in chunks) == message[field]
  (call,) = [call for chunk in chunks for call in chunk['delta'].get('tool_calls', ())]
  assert call['function'] == message['tool_calls'][0]['function']
