"""Tokens and rendered conversations agree with transformers, for ten families' chat templates."""

import json
from pathlib import Path
import shutil

import pytest

from spmd_tasks.decoding.generated_sequence import IncrementalText
from spmd_tasks.inputs import ChatTemplate, FolderTokenizer
from spmd_tasks.inputs.tokenizers import bytes_of_tokens, encode_prompt
from tests.model_folders import PREFIXES, TEXTS, write_tokenizer

TEMPLATES = Path(__file__).parents[1] / 'data' / 'chat_templates'
WEATHER = {
  'type': 'function',
  'function': {
    'name': 'weather',
    'description': 'The weather <now>, in °C',
    'parameters': {
      'type': 'object',
      'properties': {
        'city': {'type': 'string', 'description': 'Where'},
        'unit': {'type': 'string', 'enum': ['°C', '°F']},
        'days': {'type': 'array', 'items': {'type': 'integer'}, 'default': 1},
      },
      'required': ['city'],
    },
  },
}
CALL = {'id': 'call_123456789', 'type': 'function', 'function': {'name': 'weather', 'arguments': {'city': 'Zürich'}}}
SYSTEM, ASK, MORE = [
  {'role': role, 'content': text}
  for role, text in (('system', ' be <brief> '), ('user', 'é {{ x }}\n'), ('user', ' and Bern? '))
]
SAY = {'role': 'assistant', 'content': '<think>\nwhy\n</think>\n\nIt is 7 °C.'}
CALLS = {'role': 'assistant', 'content': '', 'tool_calls': [CALL]}
TOLD = {'role': 'tool', 'content': '{"celsius": 7}', 'tool_call_id': 'call_123456789', 'name': 'weather'}
TALKS = {
  'one': ([ASK], {}),
  'turns': ([SYSTEM, ASK, SAY, MORE], {}),
  'whole': ([ASK, SAY], {'add_generation_prompt': False}),
  'thinking off': ([SYSTEM, ASK], {'enable_thinking': False, 'thinking': True, 'reasoning_effort': 'low'}),
  'tools': ([SYSTEM, ASK], {'tools': [WEATHER, WEATHER]}),
  'called': ([ASK, CALLS, TOLD], {'tools': [WEATHER]}),
  'reasoned': ([ASK, CALLS | {'reasoning': 'hm'}, TOLD, SAY | {'reasoning_content': 'so'}], {'tools': [WEATHER]}),
  'in no order': ([MORE, ASK, TOLD], {}),
}


def reference(folder):
  from transformers import PreTrainedTokenizerFast

  return PreTrainedTokenizerFast.from_pretrained(str(folder))


def rendered_by(tokenizer, messages, source, settings):
  """Returns (the rendered conversation, ''), or ('', the template's error)."""
  try:
    return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **settings), ''
  except Exception as error:
    return '', str(error).rstrip('.')


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  return {kind: write_tokenizer(tmp_path_factory.mktemp(kind), kind) for kind in PREFIXES}


@pytest.mark.parametrize('kind', PREFIXES)
def test_tokens(folders, kind):
  ours, theirs = FolderTokenizer(path=str(folders[kind])), reference(folders[kind])
  assert (ours.eos_id, ours.pad_id, ours.vocab_size) == (theirs.eos_token_id, theirs.pad_token_id, len(theirs))
  for text in [*TEXTS, '', ' two  spaces ', 'x<|im_end|> y', 'a\n\tb']:
    ids = theirs(text)['input_ids']
    assert list(encode_prompt(ours, text)) == ids
    assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    for split in range(1, len(ids)):  # a streamed continuation after each prefix
      if theirs.decode(ids[:split], skip_special_tokens=True).endswith('\ufffd'):
        continue
      pieces = IncrementalText(ours.decode, before=ids[:split])
      text_after = ''.join(pieces.push(token) for token in ids[split:]) + pieces.finish()
      assert ours.decode(ids[:split]) + text_after == ours.decode(ids)


@pytest.mark.parametrize('kind', PREFIXES)
def test_bytes_of_tokens_agree_with_llguidance_and_concatenate_to_the_text(folders, kind):
  import llguidance

  ours = FolderTokenizer(path=str(folders[kind]))
  theirs = llguidance.LLTokenizer(ours.to_json(), n_vocab=ours.vocab_size, eos_token=ours.eos_id)
  contents = bytes_of_tokens(ours, range(ours.vocab_size + 2))
  assert contents[ours.vocab_size :] == [b'', b'']
  added = {token for token, _ in ours.added_tokens.values()}
  for token, content in enumerate(contents[: ours.vocab_size]):
    if token in added:  # with the space that the normalizer prepends
      assert content.decode() == ours.decode([*ours.encode('a'), token])[len(ours.decode(ours.encode('a'))) :]
    else:  # llguidance drops the byte 0xff, which marks special tokens
      assert content.removeprefix(b'\xff') == theirs.decode_bytes([token]), token
  for text in (*TEXTS, ' 漢<tool_call>é'):
    ids = ours.encode(f'the {text}')
    assert b''.join(contents[token] for token in ids).removeprefix(b' ') == f'the {text}'.encode()


def _token(text, **flags):
  return {'content': text, 'lstrip': False, 'normalized': False, 'rstrip': False, 'single_word': False} | flags


CONFIGS = {  # settings of tokenizer_config.json, and the added_tokens.json of older folders
  'listed': ({'added_tokens_decoder': {'5': _token('[GMASK]', special=True), '1': _token('<s>', special=True)}}, {}),
  'out of order': (
    {'added_tokens_decoder': {'990': _token('<b>', special=True), '900': _token('<a>', lstrip=True, special=False)}},
    {},
  ),
  'old': ({'additional_special_tokens': ['<b>']}, {'<a>': 302, '<b>': 303}),
  'extra': ({'added_tokens_decoder': {}, 'extra_special_tokens': ['<a>', '<b>']}, {}),
  'a piece that ends': ({'eos_token': 'at', 'added_tokens_decoder': {}}, {}),
}


@pytest.mark.parametrize('case', CONFIGS)
def test_tokens_that_only_the_configs_list(case, tmp_path):
  config, added = CONFIGS[case]
  folder = write_tokenizer(tmp_path / 'new', **config)
  plain = FolderTokenizer(path=str(write_tokenizer(tmp_path / 'plain')))
  if added:
    (folder / 'added_tokens.json').write_text(json.dumps(added))
  ours, theirs = FolderTokenizer(path=str(folder)), reference(folder)
  for text in ['x <a> y<b>z', '<a><b>', '[GMASK]the cat', 'cats']:
    ids = theirs(text)['input_ids']
    assert list(encode_prompt(ours, text)) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode_all(ids) == theirs.decode(ids)
  assert (ours.eos_id, ours.vocab_size) == (theirs.eos_token_id, len(theirs))
  assert ours.fingerprint() != plain.fingerprint()


def test_the_end_of_text_may_be_id_0(folders, tmp_path):
  shutil.copy(folders['byte_level'] / 'tokenizer.json', tmp_path)
  (tmp_path / 'config.json').write_text('{"eos_token_id": 0}')
  assert FolderTokenizer(path=str(tmp_path)).eos_id == 0


def test_all_templates_render_all_conversations(folders, tmp_path):
  shutil.copytree(folders['byte_level'], tmp_path, dirs_exist_ok=True)
  theirs, ours = reference(tmp_path), FolderTokenizer(path=str(tmp_path))
  num_rendered = 0
  for path in sorted(TEMPLATES.glob('*.jinja')):
    source = path.read_text()
    (tmp_path / 'chat_template.jinja').write_text(source)
    template = ChatTemplate.from_folder(str(tmp_path))
    assert template.writes_bos
    for name, (messages, settings) in TALKS.items():
      settings = {'add_generation_prompt': True} | settings
      expected, error = rendered_by(theirs, messages, source, settings)
      if error:
        with pytest.raises(ValueError, match=r'the chat template (refuses|fails)') as refused:
          template.render(messages, **settings)
        assert error in str(refused.value), (path.name, name)
        continue
      rendered = template.render(messages, **settings)
      assert rendered == expected, (path.name, name)
      encoded = theirs.apply_chat_template(messages, chat_template=source, return_dict=False, **settings)
      assert ours.encode(rendered) == encoded, (path.name, name)
      num_rendered += 1
  assert num_rendered >= 70


def test_named_templates(folders, tmp_path):
  shutil.copytree(folders['byte_level'], tmp_path, dirs_exist_ok=True)
  (tmp_path / 'additional_chat_templates').mkdir()
  (tmp_path / 'chat_template.jinja').write_text('plain')
  (tmp_path / 'additional_chat_templates' / 'tool_use.jinja').write_text('{{ eos_token }}{{ tools | length }}')
  theirs, ours = reference(tmp_path), ChatTemplate.from_folder(str(tmp_path))
  for tools in (None, [], [WEATHER]):
    expected = theirs.apply_chat_template([ASK], tools=tools, tokenize=False)
    assert ours.render([ASK], tools=tools) == expected
  listed = [{'name': name, 'template': name} for name in ('default', 'tool_use')]
  write_tokenizer(tmp_path / 'listed', chat_template=listed)
  theirs, ours = reference(tmp_path / 'listed'), ChatTemplate.from_folder(str(tmp_path / 'listed'))
  for tools in (None, [WEATHER]):
    assert ours.render([ASK], tools=tools) == theirs.apply_chat_template([ASK], tools=tools, tokenize=False)
