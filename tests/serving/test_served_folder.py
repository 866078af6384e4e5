"""Serves a Hugging Face folder from an object store with the real binary, in int8.

Checks its tokenizer, chat template and defaults, that texts match `load`, and the export to the store.
"""

import json
import secrets

import httpx
import jax
import numpy as np
import pytest

from spmd_tasks import load
from spmd_tasks.inputs import ChatTemplate, FolderTokenizer
from spmd_tasks.stores import upload
from tests import binary
from tests.inputs.test_as_transformers_does import TALKS, TEMPLATES
from tests.model_folders import write_llama
from tests.serving.served import client_of_binary, one_device

pytestmark = pytest.mark.slow
EOS = [2, 4]
FORM = {'type': 'json_schema', 'json_schema': {'name': 'x', 'schema': {'enum': ['the cat', 7]}}}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  source = (TEMPLATES / 'qwen3.jinja').read_text()
  settings = {'do_sample': True, 'temperature': 1.5, 'max_new_tokens': 12, 'eos_token_id': EOS}
  return write_llama(tmp_path_factory.mktemp('llama'), chat_template=source, **settings)


@pytest.fixture(scope='module')
def url(folder, s3_emulator, tmp_path_factory):
  """Where the folder is in the store."""
  url = f's3://bucket/{secrets.token_hex(4)}/{folder.name}'
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))
    upload(folder, url)
    yield url


@pytest.fixture(scope='module')
def client(url):
  settings = (
    'max_len=1024',
    'num_slots=2',
    'min_bucket=1024',  # one program reads all prompts; test_serve_binary.py has chunks
    'prefill_chunk=1024',
    'prefill_rows=1',
    'weights_dtype=int8',
  )
  overrides = [word for setting in settings for word in ('--set', f'task.decode.{setting}')]
  with client_of_binary('--exp', 'hf.Model', '--set', f'model={url}', '--job_log_dir', f'{url}_job', *overrides) as it:
    yield it


def ask(client, messages, **settings):
  return client.chat.completions.create(**{'model': 'hf.Model', 'messages': messages} | settings)


def test_the_model_is_named_after_the_folder(client, folder):
  """The other tests ask by the experiment's name, which is understood too."""
  assert [card.id for card in client.models.list()] == [folder.name]
  assert client.completions.create(model=folder.name, prompt='the cat', max_tokens=1).model == folder.name


def test_texts_match_load_and_an_export_goes_to_the_store(client, url):
  text = client.completions.create(model='hf.Model', prompt='the cat', max_tokens=6, temperature=0).choices[0].text
  settings = ('max_len=64', 'min_bucket=64', 'num_slots=1', 'temperature=0', 'weights_dtype=int8')
  loaded = load(url, mesh=one_device(), overrides=[f'task.decode.{setting}' for setting in settings])
  assert loaded.generate(['the cat'], max_tokens=6) == [text] != ['']
  flags = ('--exp', 'hf.Model', '--set', f'model={url}', '--job_log_dir', f'{url}_job', '--mode', 'export')
  assert binary.run_in_process(*flags, '--format', 'hf', '--out', f'{url}_out') == 0
  exported = load(f'{url}_out', mesh=one_device(), overrides=['seq_len=64'])
  assert jax.tree.all(jax.tree.map(np.array_equal, exported.weights, loaded.weights))


@pytest.mark.parametrize('name', ['turns', 'tools', 'thinking off', 'called'])
def test_the_chat_template_renders_the_prompt(client, folder, name):
  messages, settings = TALKS[name]
  template, tokenizer = ChatTemplate.from_folder(str(folder)), FolderTokenizer(path=str(folder))
  if name == 'thinking off':
    settings = {'enable_thinking': False}
  tokens = tokenizer.encode(template.render(messages, **settings))
  asked = {'tools': settings['tools']} if 'tools' in settings else {'extra_body': {'chat_template_kwargs': settings}}
  answer = ask(client, json.loads(json.dumps(messages)), **asked)
  assert answer.usage.prompt_tokens == len(tokens)
  body = {'messages': messages} | asked.pop('extra_body', {}) | asked
  assert httpx.post(str(client.base_url.join('/tokenize')), json=body).json()['tokens'] == tokens
  assert answer.usage.completion_tokens <= 12


def test_defaults_and_eos_come_from_generation_config(client):
  texts = [ask(client, TALKS['one'][0], seed=seed).choices[0].message.content for seed in range(3)]
  assert len(set(texts)) == 3  # sampled
  greedy = [ask(client, TALKS['one'][0], seed=seed, temperature=0).choices[0].message.content for seed in range(2)]
  assert greedy[0] == greedy[1]
  form = {'structured_outputs': {'regex': 'a*'}}  # few tokens are allowed, among them both ends
  for ignore_eos, reason in ((False, 'stop'), (True, 'length')):
    answer = ask(client, TALKS['one'][0], seed=1, n=2, extra_body=form | {'ignore_eos': ignore_eos})
    assert {choice.finish_reason for choice in answer.choices} == {reason}


def test_streams_match_whole_answers_and_grammars_hold(client):
  for settings in ({'temperature': 0.0}, {'seed': 3}, {'seed': 4, 'response_format': FORM}):
    whole = ask(client, TALKS['one'][0], logprobs=True, top_logprobs=2, **settings).choices[0]
    chunks = [chunk.choices[0] for chunk in ask(client, TALKS['one'][0], stream=True, **settings)]
    assert ''.join(chunk.delta.content or '' for chunk in chunks) == whole.message.content
    if 'response_format' in settings:
      assert json.loads(whole.message.content) in ('the cat', 7)
