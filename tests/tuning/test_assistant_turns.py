"""Which tokens are the assistant's: as transformers says by a template's marks, and by the prefix rule without them."""

import datetime
from pathlib import Path

import numpy as np
import pytest

from spmd_tasks.inputs import ChatTemplate, FolderTokenizer
from spmd_tasks.tuning._assistant_turns import render_turns, tokens_of_spans
from tests.model_folders import PREFIXES, write_tokenizer

PUBLISHED = Path(__file__).parents[1] / 'data' / 'chat_templates'

# Written for these tests: in one line, with reasoning that is not learnt, with calls and loops within the marks.
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
def test_marked_tokens_are_those_of_transformers(folders, kind):
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
        with pytest.raises(ValueError, match='marks nothing of this conversation'):
          render_turns(template, messages, tools, {}, now)
        continue
      text, spans = render_turns(template, messages, tools, {}, now)
      ids, offsets = ours.encode_with_offsets(text)
      assert ids.tolist() == expected['input_ids'], (shape, talk)
      found, wanted = tokens_of_spans(offsets, spans), np.array(expected['assistant_masks'], bool)
      for token in np.flatnonzero(found != wanted):  # the one difference: further tokens of a span's last character
        assert kind == 'metaspace', (shape, talk)
        assert found[token], (shape, talk)
        assert found[token - 1], (shape, talk)
        assert (offsets[token] == offsets[token - 1]).all(), (shape, talk)
        assert offsets[token, 1] in [end for _, end in spans], (shape, talk)
      num_compared += 1
  assert num_compared >= 20


def test_a_last_character_of_several_tokens_is_learnt_as_a_whole(folders):
  """Transformers leaves out all its tokens but the first, if the span ends with it."""
  tokenizer = FolderTokenizer(path=str(folders['byte_level']))
  template = ChatTemplate(template='{% generation %}{{ messages[0].content }}{% endgeneration %}.', stop=())
  text, spans = render_turns(template, [says('a☃')], None, {}, None)
  ids, offsets = tokenizer.encode_with_offsets(text)
  learnt = ids[tokens_of_spans(offsets, spans)]
  assert tokenizer.decode(learnt.tolist()) == 'a☃'
  assert len(learnt) == 4  # the snowman's three bytes


def unmarked(source):
  import re

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
def test_without_marks_a_turn_is_what_it_adds(source, expected):
  template = ChatTemplate(template=source, bos_token='<s>', eos_token='</s>')
  text, spans = render_turns(template, [user('a'), says('b'), user('c'), says('d')], None, {}, None)
  assert [text[start:end] for start, end in spans] == expected


DROPS = "{% for m in messages %}{{ m.content if loop.last else m.content.split('|')[-1] }}{% endfor %}"


@pytest.mark.parametrize(
  'source, messages, message',
  [
    (DROPS, [user('a'), says('why|b'), user('c')], r"message 1 otherwise once .* 'bc' instead of 'why\|b'.*mark what"),
    (SHAPES['chatml'].replace("== 'assistant'", "== 'bot'"), [user('a'), says('b')], 'marks nothing of this'),
    (
      '{% set x %}{% generation %}{{ messages[0].content }}{% endgeneration %}{% endset %}>>{{ x }}',
      [says('b')],
      r'generation %} block in a macro',
    ),
  ],
  ids=['drops reasoning', 'no marks', 'in a variable'],
)
def test_what_the_assistant_said_is_not_known(source, messages, message):
  template = ChatTemplate(template=source)
  with pytest.raises(ValueError, match=message) as refused:
    render_turns(template, messages, None, {}, None)
  assert '\n' not in str(refused.value)


def test_a_template_gets_the_date_that_it_is_given():
  template = ChatTemplate(template="{{ strftime_now('%Y') }}{% generation %}x{% endgeneration %}")
  assert render_turns(template, [says('b')], None, {}, datetime.datetime(1999, 1, 1)) == ('1999x', [(4, 5)])
  assert template.render([says('b')]).startswith('2')
  assert np.array_equal(tokens_of_spans(np.array([[0, 2], [2, 4], [4, 4], [4, 5]]), [(3, 4)]), [0, 1, 1, 0])


def test_a_conversation_of_very_many_turns_needs_marks():
  """Rendering it up to each turn takes a time that grows with the square."""
  messages = [user('a'), says('b')] * 10_000
  with pytest.raises(
    ValueError, match=r'has 20,000 messages; .* renders 200,010,000, more than 4,000,000: divide it, or'
  ):
    render_turns(ChatTemplate(), messages, None, {}, None)
  _, spans = render_turns(ChatTemplate(template=SHAPES['chatml'], stop=()), messages, None, {}, None)
  assert len(spans) == 10_000
