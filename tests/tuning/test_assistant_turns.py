"""The assistant's tokens agree with transformers if a template marks them; otherwise they follow the prefix rule."""

import datetime
from pathlib import Path
import re

import numpy as np
import pytest

from spmd_tasks.inputs import ChatTemplate, FolderTokenizer
from spmd_tasks.tuning._assistant_turns import render_turns, tokens_of_spans
from tests.model_folders import PREFIXES, write_tokenizer

PUBLISHED = Path(__file__).parents[1] / 'data' / 'chat_templates'

# Templates for these tests: on one line, with reasoning outside the marks, and with calls and loops inside the marks.
SHAPES = {path.stem: path.read_text() for path in sorted((PUBLISHED / 'marked').glob('*.jinja'))}
SHAPES |= {name: (PUBLISHED / f'{name}.jinja').read_text() for name in ('zephyr', 'harmony')}

CALL = {'id': 'call_1', 'type': 'function', 'function': {'name': 'weather', 'arguments': {'city': 'Zürich'}}}
WEATHER = {
  'type': 'function',
  'function': {'name': 'weather', 'description': 'in °C', 'parameters': {'type': 'object', 'properties': {}}},
}


def user(text):
  return {'role': 'user', 'content': text}


def says(text, **more):
  return {'role': 'assistant', 'content': text, **more}


TALKS = {
  'one turn': ([user('the cat'), says('sat on the mat')], None),
  'turns': (
    [user('é {{ x }}\n'), says('<think>why</think>It is 7 °C.'), user(' 漢字 '), says('🙂 and the hat\n')],
    None,
  ),
  'open end': ([user('a'), says('b'), user('c')], None),
  'empty answer': ([user('a'), says(''), user('b'), says('c')], None),
  'tools': ([user('a'), says('', tool_calls=[CALL]), {'role': 'tool', 'content': '{"c": 7}'}, says('7')], [WEATHER]),
}


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  return {kind: write_tokenizer(tmp_path_factory.mktemp(kind), kind) for kind in PREFIXES}


@pytest.mark.parametrize('kind', PREFIXES)
def test_marked_tokens_agree_with_transformers(folders, kind):
  from transformers import PreTrainedTokenizerFast

  theirs = PreTrainedTokenizerFast.from_pretrained(str(folders[kind]))
  ours = FolderTokenizer(path=str(folders[kind]))
  now, num_compared = datetime.datetime.now(), 0
  for shape, source in SHAPES.items():
    template = ChatTemplate(template=source, stop=(), bos_token='<s>', eos_token='</s>', writes_bos=True)
    for talk, (messages, tools) in TALKS.items():
      try:
        expected = theirs.apply_chat_template(
          messages, chat_template=source, tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
      except Exception:  # the template refuses such messages
        continue
      if not any(expected['assistant_masks']):
        with pytest.raises(ValueError, match='are empty for this conversation'):
          render_turns(template, messages, tools, {}, now)
        continue
      text, spans = render_turns(template, messages, tools, {}, now)
      ids, offsets = ours.encode_with_offsets(text)
      assert ids.tolist() == expected['input_ids'], (shape, talk)
      mask, expected_mask = tokens_of_spans(offsets, spans), np.array(expected['assistant_masks'], bool)
      for token in np.flatnonzero(mask != expected_mask):  # only further tokens of a span's last character may differ
        assert kind == 'metaspace', (shape, talk)
        assert mask[token], (shape, talk)
        assert mask[token - 1], (shape, talk)
        assert (offsets[token] == offsets[token - 1]).all(), (shape, talk)
        assert offsets[token, 1] in [end for _, end in spans], (shape, talk)
      num_compared += 1
  assert num_compared >= 20


def test_all_tokens_of_a_span_s_last_character_are_learned(folders):
  """In transformers only the first of them is."""
  tokenizer = FolderTokenizer(path=str(folders['byte_level']))
  template = ChatTemplate(template='{% generation %}{{ messages[0].content }}{% endgeneration %}.', stop=())
  text, spans = render_turns(template, [says('a☃')], None, {}, None)
  ids, offsets = tokenizer.encode_with_offsets(text)
  learned = ids[tokens_of_spans(offsets, spans)]
  assert tokenizer.decode(learned.tolist()) == 'a☃'
  assert len(learned) == 4  # the snowman has three bytes


def unmarked(source):
  return re.sub(r'\{%-? *(end)?generation *-?%\}', '', source)


@pytest.mark.parametrize(
  'source, expected',
  [
    (unmarked(SHAPES['chatml']), ['b<|im_end|>\n', 'd<|im_end|>\n']),
    (unmarked(SHAPES['brackets']), [' b</s>', ' d</s>']),
    (ChatTemplate().template, ['b\n', 'd\n']),
    ((PUBLISHED / 'llama3.jinja').read_text(), ['b<|eot_id|>', 'd<|eot_id|>']),
    ((PUBLISHED / 'gemma.jinja').read_text(), ['b<end_of_turn>\n', 'd<end_of_turn>\n']),
    ((PUBLISHED / 'mistral.jinja').read_text(), [' b</s>', ' d</s>']),
  ],
  ids=['chatml', 'brackets', 'transcript', 'llama3', 'gemma', 'mistral'],
)
def test_without_marks_a_turn_is_what_rendering_it_adds(source, expected):
  template = ChatTemplate(template=source, bos_token='<s>', eos_token='</s>')
  text, spans = render_turns(template, [user('a'), says('b'), user('c'), says('d')], None, {}, None)
  assert [text[start:end] for start, end in spans] == expected


DROPS = "{% for m in messages %}{{ m.content if loop.last else m.content.split('|')[-1] }}{% endfor %}"
WITHOUT_PROMPT = '{% for m in messages %}{{ m.content }}!{% endfor %}{% if add_generation_prompt %}> {% endif %}'


@pytest.mark.parametrize(
  'source, messages, message',
  [
    (DROPS, [user('a'), says('why|b'), user('c')], r"message 1 differently once .* 'bc' instead of 'why\|b'.*: mark"),
    (WITHOUT_PROMPT, [user('a'), says('b')], "message 1 differently after .* 'b!' instead of '> '.*: mark"),
    (SHAPES['chatml'].replace("== 'assistant'", "== 'bot'"), [user('a'), says('b')], 'are empty for this'),
    (
      '{% set x %}{% generation %}{{ messages[0].content }}{% endgeneration %}{% endset %}>>{{ x }}',
      [says('b')],
      r'generation %} block in a macro',
    ),
  ],
  ids=['drops reasoning', 'another prompt', 'no marks', 'in a variable'],
)
def test_templates_that_do_not_tell_the_assistant_s_text_are_refused(source, messages, message):
  template = ChatTemplate(template=source)
  with pytest.raises(ValueError, match=message) as refused:
    render_turns(template, messages, None, {}, None)
  assert '\n' not in str(refused.value)


def test_templates_read_the_date_of_the_settings():
  template = ChatTemplate(template="{{ strftime_now('%Y') }}{% generation %}x{% endgeneration %}")
  assert render_turns(template, [says('b')], None, {}, datetime.datetime(1999, 1, 1)) == ('1999x', [(4, 5)])
  assert template.render([says('b')]).startswith('2')
  assert np.array_equal(tokens_of_spans(np.array([[0, 2], [2, 4], [4, 4], [4, 5]]), [(3, 4)]), [0, 1, 1, 0])


def test_a_conversation_of_very_many_turns_needs_marks():
  """Rendering it up to each turn takes quadratic time."""
  messages = [user('a'), says('b')] * 10_000
  with pytest.raises(ValueError, match=r'has 20,000 messages; .* more than 4,000,000: split it, or mark'):
    render_turns(ChatTemplate(), messages, None, {}, None)
  _, spans = render_turns(ChatTemplate(template=SHAPES['chatml'], stop=()), messages, None, {}, None)
  assert len(spans) == 10_000
