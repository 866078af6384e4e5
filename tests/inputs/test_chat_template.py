"""Conversations as text: chat templates of transformers, and errors in them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers

from spmd_tasks.inputs import ChatTemplate, FolderTokenizer

MESSAGES = [
  {'role': 'system', 'content': 'be brief'},
  {'role': 'user', 'content': '{role} {{ x }} {% if %}'},
  {'role': 'assistant', 'content': 'é <b>'},
  {'role': 'user', 'content': ' more '},
]


def test_the_default_is_a_transcript_and_content_is_never_parsed_as_a_template():
  expected = 'system: be brief\nuser: {role} {{ x }} {% if %}\nassistant: é <b>\nuser:  more \n'
  assert ChatTemplate().render(MESSAGES) == expected + 'assistant: '
  assert ChatTemplate().render(MESSAGES, add_generation_prompt=False) == expected
  assert ChatTemplate().stop == ('\nuser:', '\nsystem:')


def test_turns_with_any_characters_around_them():
  template = ChatTemplate.from_turns('<{role}>{{"\\{content}😀\n', reply='{{ role }}', stop=['x'])
  assert template.render(MESSAGES[:1]) == '<system>{{"\\be brief😀\n{{ role }}'
  assert template.stop == ('x',)
  assert ChatTemplate.from_turns().render(MESSAGES) == ChatTemplate().render(MESSAGES)


@pytest.mark.parametrize(
  'template, line, message',
  [
    ('{% for x in %}', 1, 'Expected an expression'),
    ('a\nb\n{{ x', 3, 'unexpected end of template'),
    ('\n{{ messages | fancy }}', 2, "No filter named 'fancy'"),
  ],
)
def test_invalid_jinja_is_reported_with_its_line(template, line, message):
  with pytest.raises(ValueError, match=rf'not valid Jinja in line {line}: .*{message}[^.]*\.$'):
    ChatTemplate(template=template)


@pytest.mark.parametrize(
  'template, message',
  [
    ('\n{{ messages[0].content + 3 }}', 'fails in line 2 for these messages: can only concatenate'),
    ("{{ messages[0]['name'].x }}", "fails in line 1 .* has no attribute 'name'"),
    ('{{ messages.append(1) }}', 'fails in line 1 .* is unsafe'),
    ("{{ ''.__class__.__mro__ }}", 'fails in line 1 .* is unsafe'),
    ('{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}', 'recursion'),
  ],
)
def test_messages_that_a_template_cannot_render(template, message):
  with pytest.raises(ValueError, match=message):
    ChatTemplate(template=template).render([MESSAGES[0], MESSAGES[2]])


@pytest.mark.parametrize(
  'template, message',
  [
    ("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", 'writes more than 16,000,000 characters'),
    ('{{ ' + '(' * 3000 + '1' + ')' * 3000 + ' }}', 'not valid Jinja: it is nested too deeply'),
    ("{{ raise_exception('a\n\x1b[31mb') }}", 'refuses the messages: a \\[31mb$'),
  ],
)
def test_templates_that_exceed_a_limit_or_refuse_the_messages(template, message):
  with pytest.raises(ValueError, match=message):
    ChatTemplate(template=template).render(MESSAGES)


def test_threads_render_concurrently():
  template = ChatTemplate(template='{{ messages[0].content * 1000 }}')
  with ThreadPoolExecutor(4) as pool:
    texts = pool.map(lambda number: template.render([{'role': 'user', 'content': f'{number},'}]), range(40))
  assert [text[:3] for text in texts] == [f'{number},{number}'[:3] for number in range(40)]


PUBLISHED = Path(__file__).parents[1] / 'data' / 'chat_templates'
ENDS = {
  'chatml': ['<|im_end|>'],
  'deepseek': ['</s>'],
  'gemma': ['<end_of_turn>'],
  'glm4': ['<|user|>', '<|observation|>'],  # which begin the next message: nothing ends a turn
  'harmony': ['<|return|>', '<|call|>'],
  'llama3': ['<|eot_id|>'],
  'mistral': ['</s>'],
  'phi4': ['<|end|>'],
  'qwen3': ['<|im_end|>'],
  'zephyr': ['</s>'],
}


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  """A tokenizer with the special tokens of all published templates, and added tokens that are not special."""
  special = ['<|start|>', '<|message|>', '<|channel|>', '<|end|>', '<start_of_turn>', '<|im_start|>', '<|assistant|>']
  special = sorted({*special, *(end for ends in ENDS.values() for end in ends)})
  built = tokenizers.Tokenizer(tokenizers.models.BPE())
  built.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
  built.train_from_iterator([], tokenizers.trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
  built.add_tokens(['<tool_call>', '</tool_call>', '</arg_value>', '\n', '\n\n'])
  folder = tmp_path_factory.mktemp('ends')
  built.save(str(folder / 'tokenizer.json'))
  return FolderTokenizer(path=str(folder))


def test_turns_end_where_the_template_ends_them(tokenizer):
  sources = {path.stem: path.read_text() for path in PUBLISHED.glob('*.jinja')}
  assert sources.keys() == ENDS.keys()
  for name, source in sources.items():
    template = ChatTemplate(template=source, bos_token='<s>', eos_token='</s>', writes_bos=True)
    assert [tokenizer.decode_all([end]) for end in template.turn_ends(tokenizer)] == ENDS[name], name


@pytest.mark.parametrize(
  'source, message',
  [
    (
      '{% for m in messages %}{{ m.role }}: {{ m.content }}<eot>\n{% endfor %}',
      r"'<eot>\\n', which has no added token",
    ),
    ('{{ raise_exception("no talk today") }}', 'end of a turn cannot be determined: .*no talk today'),
  ],
)
def test_turns_without_an_end_token_are_refused(tokenizer, source, message):
  with pytest.raises(ValueError, match=message):
    ChatTemplate(template=source).turn_ends(tokenizer)
