"""ConversationInput packs whole conversations, with the loss on the assistant's tokens, and resumes exactly."""

import dataclasses
import json

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from spmd_tasks.inputs import ByteTokenizer, ChatTemplate, IdTokenizer
from spmd_tasks.serving.request_bodies import Message
from spmd_tasks.serving.requests import _turn
from spmd_tasks.tuning import ConversationInput, Conversations
from spmd_tasks.tuning.conversations import messages_of
from spmd_tasks.tuning.preferences import encode_answer
from spmd_tasks.tuning.scored_texts import ScoredEncoder, ScoredInput
from tests.inputs.batches import assert_same, take

TEMPLATE = ChatTemplate(
  template="{% for m in messages %}<{{ m.role[0] }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
  '{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}',
  writes_bos=True,
)
TALKS = [
  [{'role': 'user', 'content': 'q' * (i % 5)}, {'role': 'assistant', 'content': f'{i}' + 'a' * (i % 11)}]
  for i in range(37)
]


def rendered(talk):
  return ''.join(f'<{m["role"][0]}>{m["content"]}' + ';' * (m['role'] == 'assistant') for m in talk)


def write_jsonl(path, talks=TALKS):
  path.write_text('\n\n'.join(json.dumps({'messages': talk}) for talk in talks) + '\n')
  return path


@pytest.fixture
def training(tmp_path):
  source = Conversations(pattern=str(write_jsonl(tmp_path / 'talks.jsonl')))
  return ConversationInput(
    source=source, tokenizer=ByteTokenizer(), template=TEMPLATE, batch_size=4, seq_len=48, seed=1
  )


def once(training, **changes):
  return dataclasses.replace(training, num_epochs=1, shuffle=False, **changes)


def segments(batches):
  """Yields (all tokens, learned tokens) of each segment, as text."""
  decode = ByteTokenizer().decode
  for batch in batches:
    for row in range(len(batch['ids'])):
      for segment in range(1, batch['segment_ids'][row].max() + 1):
        at = batch['segment_ids'][row] == segment
        assert batch['segment_pos'][row, at].tolist() == list(range(at.sum()))
        labels, weights = batch['labels'][row, at], batch['weights'][row, at]
        yield decode([batch['ids'][row, at][0], *labels]), decode(labels[weights > 0])


def test_one_epoch_has_every_conversation_once_and_whole(training):
  batches, _ = take(once(training))
  texts = list(segments(batches))
  assert [text for text, _ in texts] == [rendered(talk) for talk in TALKS]
  assert [learned for _, learned in texts] == [talk[1]['content'] + ';' for talk in TALKS]
  assert any(batch['segment_ids'].max() > 1 for batch in batches)  # packed
  shuffled = dataclasses.replace(training, num_epochs=2)
  twice = [text for text, _ in segments(take(shuffled)[0])]
  assert sorted(twice[:37]) == sorted(twice[37:]) == sorted(rendered(talk) for talk in TALKS)
  assert twice[:37] != twice[37:]
  alone = take(once(training, packing=False))[0]
  assert max(batch['segment_ids'].max() for batch in alone) == 1
  assert list(segments(alone)) == texts


def test_all_file_formats_give_the_same_batches(training, tmp_path):
  """Tables have null for missing fields of objects, and may have objects as JSON text."""
  talks = [*TALKS, [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': None, 'tool_calls': [{'n': 1}]}]]
  template = dataclasses.replace(TEMPLATE, template=TEMPLATE.template.replace('{{ m.content }};', '{{ m | tojson }};'))
  settings = once(training, template=template, seq_len=128)
  parts = [{'type': 'text', 'text': text} for text in ('x', '')]  # one text
  lines = write_jsonl(tmp_path / 'all.jsonl', [*TALKS, [{'role': 'user', 'content': parts}, talks[-1][1]]])
  expected = take(dataclasses.replace(settings, source=Conversations(pattern=str(lines))))[0]
  table = pa.table({'messages': talks, 'id': list(range(38))})
  pq.write_table(table, tmp_path / 'all.parquet', row_group_size=7)
  pa.feather.write_feather(table, tmp_path / 'all.feather', compression='uncompressed')
  with pa.ipc.new_stream(str(tmp_path / 'all.arrow'), table.schema) as stream:
    stream.write_table(table, max_chunksize=10)
  pq.write_table(pa.table({'messages': [json.dumps(talk) for talk in talks]}), tmp_path / 'text.parquet')
  for name in ('all.parquet', 'all.feather', 'all.arrow', 'text.parquet'):
    source = Conversations(pattern=str(tmp_path / name))
    assert_same(take(dataclasses.replace(settings, source=source))[0], expected)


def test_a_model_without_a_tokenizer_is_refused_with_how_to_write_one(training):
  with pytest.raises(ValueError, match=r'IdTokenizer has no offsets .* tokenizer\.json\. .*save_pretrained'):
    dataclasses.replace(training, tokenizer=IdTokenizer(vocab_size=300, eos_id=0)).make_iterator()


def test_a_variable_that_the_template_does_not_use_is_refused(training):
  with pytest.raises(ValueError, match="template_variables has 'moood', which the chat template does not use: correct"):
    dataclasses.replace(training, template_variables={'moood': False})


@pytest.mark.parametrize('is_marked', [True, False])
def test_a_turn_of_weight_0_is_context(training, tmp_path, is_marked):
  turns = [('q', None), ('first', 0), ('q', None), ('', 0), ('q', None), ('last', 1)]
  talk = [
    {'role': 'user', 'content': text} if weight is None else {'role': 'assistant', 'content': text, 'weight': weight}
    for text, weight in turns
  ]
  source = Conversations(pattern=str(write_jsonl(tmp_path / 'weights.jsonl', [talk])))
  template = TEMPLATE
  if not is_marked:
    unmarked = TEMPLATE.template.replace('{% generation %}', '').replace('{% endgeneration %}', '')
    template = dataclasses.replace(TEMPLATE, template=unmarked + '{% if add_generation_prompt %}<a>{% endif %}')
  ((text, learned),) = segments(take(once(training, source=source, template=template))[0])
  assert (text, learned) == (rendered(talk), 'last;')


def test_roles_of_the_template_are_known(training, tmp_path):
  template = dataclasses.replace(TEMPLATE, template='{# critic #}' + TEMPLATE.template)
  path = write_jsonl(tmp_path / 'roles.jsonl', [[{'role': 'critic', 'content': 'x'}, *TALKS[3]]])
  training = once(training, source=Conversations(pattern=str(path)))
  assert next(segments(take(dataclasses.replace(training, template=template))[0]))[0].startswith('<c>x<u>')
  with pytest.raises(ValueError, match="'critic'"):
    take(training)


def test_tools_and_variables_reach_the_template(training, tmp_path):
  tool = {'type': 'function', 'function': {'name': 'f'}}
  template = dataclasses.replace(
    TEMPLATE, template='{{ tools | tojson if tools else 0 }}{{ mood }}{% generation %}!{% endgeneration %}'
  )
  path = tmp_path / 'tools.jsonl'
  talks = [{'messages': TALKS[0]}, {'messages': TALKS[0], 'tools': [tool]}, {'messages': TALKS[0], 'tools': None}]
  path.write_text(''.join(json.dumps(talk) + '\n' for talk in talks))
  settings = once(training, template=template, template_variables={'mood': 'calm'}, seq_len=99)
  batches, _ = take(dataclasses.replace(settings, source=Conversations(pattern=str(path))))
  assert [text for text, _ in segments(batches)] == ['0calm!', json.dumps([tool]) + 'calm!', '0calm!']


CALLS = {
  'guarded': '{% for m in messages %}<{{ m.role }}>{% if m.content %}{{ m.content }}{% endif %}'
  '{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}',
  'unguarded': "{% for m in messages %}<{{ m.role }}>{{ '' + m.content }}"
  "{% if 'tool_calls' in m %}{% for c in m.tool_calls %}{{ c.function.name + '{' }}"
  '{% for k, v in c.function.arguments | items %}"{{ k }}": {{ v | tojson }}{% endfor %}}{% endfor %}{% endif %};'
  '{% endfor %}',
  'null content': "{% for m in messages %}<{{ m.role }}>{% if m['content'] is none %}{% for c in m.tool_calls %}"
  '{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %};'
  '{% endfor %}',
}


@pytest.mark.parametrize('source', CALLS.values(), ids=CALLS)
def test_tool_calls_are_rendered_as_the_server_renders_them(source, training):
  """In messages of OpenAI's client, arguments are JSON text, and content and unused fields are null."""
  from openai.types.chat import ChatCompletionMessage

  call = {'id': 'c1', 'type': 'function', 'function': {'name': 'f', 'arguments': '{"city": "Zürich"}'}}
  said = ChatCompletionMessage(role='assistant', content=None, tool_calls=[call]).model_dump()
  assert (said['content'], said['refusal']) == (None, None)
  prompt = [{'role': 'developer', 'content': 'D'}, {'role': 'user', 'content': [{'type': 'text', 'text': 'U'}]}]
  prompt += [said, {'role': 'tool', 'tool_call_id': 'c1', 'content': None}]
  answer = ChatCompletionMessage(role='assistant', content='7').model_dump()
  before = '<system>D;<user>U;<assistant>f{"city": "Zürich"};<tool>;'
  template = ChatTemplate(template=source, writes_bos=True)
  renderer, decode = dataclasses.replace(training, template=template).renderer(), ByteTokenizer().decode
  assert decode(renderer.turns(messages_of({'messages': [*prompt, answer]}, 'messages'), None)[0]) == (
    before + '<assistant>7;'
  )
  pair = {'prompt': prompt, 'chosen': [answer], 'rejected': [said]}
  assert decode(encode_answer(renderer, pair, 'rejected')[0]) == before + '<assistant>f{"city": "Zürich"};'
  text = ScoredEncoder(ScoredInput(source=None, tokenizer=ByteTokenizer(), template=template, batch_size=1, seq_len=9))
  assert decode(text._ids({'messages': [*prompt, answer]}, 'text')) == before + '<assistant>7;'
  assert template.render(prompt, add_generation_prompt=False) == before
  server = [_turn(Message(role='assistant', tool_calls=[call]), 'messages', template)]
  assert template.render(server, add_generation_prompt=False) == '<assistant>f{"city": "Zürich"};'


def test_a_conversation_longer_than_a_row(training, caplog):
  lengths = [len(rendered(talk)) - 1 for talk in TALKS]
  with pytest.raises(ValueError, match=r'talks\.jsonl:\d+: the conversation has \d+ tokens, .*seq_len = 16.*too_long'):
    take(once(training, seq_len=16))
  skipped, state = take(once(training, seq_len=16, too_long='skip'))
  texts = [rendered(talk) for talk in TALKS]
  assert [text for text, _ in segments(skipped)] == [t for t, n in zip(texts, lengths) if n <= 16]
  assert state['num_too_long'] == [[0, sum(n > 16 for n in lengths)]]
  cut, state = take(once(training, seq_len=16, too_long='truncate'))
  assert [text for text, _ in segments(cut)] == [text[:17] for text in texts]
  assert state['num_too_long'] == [[sum(n > 16 for n in lengths), 0]]
  assert 'documents were truncated' in caplog.text
  # Conversations without a token of the assistant after truncation are left out.
  shorter, state = take(once(training, seq_len=9, too_long='truncate'))
  assert all(learned for _, learned in segments(shorter))
  assert state['num_too_long'][0][1] > 0
  with pytest.raises(ValueError, match=r'none of the \d+ records fits in a row: raise seq_len'):
    take(dataclasses.replace(training, seq_len=2, too_long='skip'), 1)


GOOD = json.dumps({'messages': TALKS[0]})
NO_TEXT = r"'content' of messages\[0\] must be text or parts of text, not \["


def talk(**turns):
  """A conversation of one message of each role."""
  return json.dumps({'messages': [{'role': role, 'content': content} for role, content in turns.items()]})


@pytest.mark.parametrize(
  'content, message',
  [
    ('', 'have no records: correct the pattern'),
    (GOOD + '\n{"messages": [', r'talks\.jsonl:2: .* not JSON'),
    (f'[{GOOD}]', r'talks\.jsonl:1: the line is a list: it must be a JSON object; write each record'),
    (json.dumps([json.loads(GOOD)], indent=2), 'the file is an array on several lines: write each of its records'),
    ('{"text": "a"}', r"talks\.jsonl:1: the record has no field 'messages', only \['text'\]"),
    ('{"messages": [{"from": "human", "value": "a"}]}', r"messages\[0\] must be an object with a text 'role'"),
    (talk(user='a', assistant=' '), r'messages\[1\] is an empty message of the assistant: remove'),
    (talk(user=[{'type': 'image'}], assistant='a'), NO_TEXT),
    (talk(user=[{'type': 'text', 'text': None}]), NO_TEXT),
    (
      '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "7 °C"}}]}]}',
      r"messages\[0\]\.tool_calls\[0\]\.function\.arguments must be a JSON object, or its text, not '7 °C'",
    ),
    (talk(human='a', gpt='b'), r"no message with the role 'assistant', only human, gpt: correct"),
    (talk(human='a', assistant='b'), r"messages\[0\] has the role 'human', .* correct it to 'user', or give"),
    (talk(user='a', asistant='b', assistant='c'), r"the role 'asistant', .* correct it to 'assistant'"),
    ('{"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}', r"'weight' of messages\[0\] must be 0"),
    ('{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}', 'has no token of the assistant to learn'),
  ],
)
def test_the_error_names_an_invalid_record(training, tmp_path, content, message):
  (tmp_path / 'talks.jsonl').write_text(content)
  with pytest.raises(ValueError, match=message) as refused:
    take(once(training))
  assert '\n' not in str(refused.value)


def test_the_error_names_an_invalid_table(training, tmp_path):
  pq.write_table(pa.table({'text': ['a']}), tmp_path / 'a.parquet')
  (tmp_path / 'b.parquet').write_bytes(b'PAR1')
  (tmp_path / 'c.csv').write_text('a')
  pq.write_table(pa.Table.from_arrays([pa.array(['a'])] * 2, ['messages'] * 2), tmp_path / 'd.parquet')
  for name, message in (
    ('a', "has no column 'messages'"),
    ('b', 'not a readable Parquet'),
    ('c', r'c\.csv must end in one of \.jsonl'),
    ('d', "has several columns 'messages'"),
  ):
    source = Conversations(pattern=f'{tmp_path}/{name}.*')
    with pytest.raises(ValueError, match=message):
      take(dataclasses.replace(training, source=source), 1)


def test_positions_of_other_settings_or_content_are_refused(training, tmp_path):
  _, state = take(training, 3)
  changes = {'too_long': 'skip', 'template_variables': {'role': 1}, 'date': '2020-01-01', 'template': ChatTemplate()}
  for name, value in changes.items():
    with pytest.raises(ValueError, match=r'the saved input state has (too_long|template) = '):
      dataclasses.replace(training, **{name: value}).make_iterator().set_state(state)
  path = tmp_path / 'talks.jsonl'
  path.write_text(path.read_text().replace('qqqq', 'qqqp'))  # without changing the size
  with pytest.raises(ValueError, match='the saved input state was taken from other data'):
    training.make_iterator().set_state(state)
