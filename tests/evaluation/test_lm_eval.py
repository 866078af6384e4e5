"""Compares EleutherAI's harness on our models, directly and over HTTP, with its model of transformers."""

import contextlib
import json
import logging

import jax
import numpy as np
import pytest

from spmd_tasks import UserError
from spmd_tasks.decoding.engine import ModelEngine
from spmd_tasks.sharding import MeshSpec
from tests import binary
from tests.evaluation.harness_tasks import TASKS, answers, evaluate, import_harness, metrics, write_tasks
from tests.model_folders import write_llama
from tests.serving.served import model_of, serving

MAX_LENGTH = 62  # what the harness's clients of servers leave of 64
SIZES = {'num_slots': 4, 'prefill_rows': 4, 'min_bucket': 32, 'prefill_chunk': 32}
SMALL = {f'task.decode.{name}': size for name, size in SIZES.items()}
TEMPLATE = (
  '{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}'
  '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
exhaustive = pytest.mark.exhaustive


@pytest.fixture(scope='module')
def harness(tmp_path_factory):
  logging.getLogger('lm_eval').setLevel(logging.ERROR)
  return import_harness(tmp_path_factory.mktemp('huggingface'))


@pytest.fixture(scope='module')
def tasks(harness, tmp_path_factory):
  return write_tasks(tmp_path_factory.mktemp('tasks'))


@pytest.fixture(scope='module')
def reference(harness, tasks, tmp_path_factory):
  """Returns a folder, and the harness's results with transformers."""
  from lm_eval.models.huggingface import HFLM

  folder = write_llama(tmp_path_factory.mktemp('llama'), chat_template=TEMPLATE)
  theirs = HFLM(pretrained=str(folder), device='cpu', batch_size=4, max_length=MAX_LENGTH)
  return folder, evaluate(theirs, tasks)


def our_model(folder, **arguments):
  from spmd_tasks.evaluation import HarnessModel

  return HarnessModel(path=str(folder), **{'max_length': MAX_LENGTH, 'batch_size': 3} | SMALL | arguments)


@pytest.fixture(scope='module')
def on_eight(reference):
  """A model on 8 devices; a server shares its steps, and needs two more tokens and the top 5 log-probabilities."""
  ours = our_model(reference[0], mesh='1x2x4', max_length=MAX_LENGTH + 2, **{'task.decode.num_top_logprobs': 5})
  ours.max_length = MAX_LENGTH
  return ours


def one_device():
  return MeshSpec(axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=(1, 1, 1)).build(jax.devices()[:1])


def assert_same(ours, theirs):
  """Asserts that texts and greediness are equal, and log-likelihoods up to float32 rounding over up to 60 tokens."""
  actual, expected = answers(ours), answers(theirs)
  assert actual.keys() <= expected.keys()
  for task in actual:
    assert len(actual[task]) == len(expected[task])
    for mine, yours in zip(actual[task], expected[task], strict=True):
      if task == 'write':
        assert mine == yours
      else:
        np.testing.assert_allclose(np.array(mine, float), np.array(yours, float), rtol=2e-5, atol=2e-4, err_msg=task)
    for name, value in metrics(ours)[task].items():
      np.testing.assert_allclose(value, metrics(theirs)[task][name], rtol=1e-3, err_msg=f'{task} {name}')


@pytest.mark.parametrize('mesh', [pytest.param('one device', marks=exhaustive), '1x2x4'])
def test_all_kinds_of_requests_have_the_answers_of_transformers(reference, tasks, mesh, on_eight):
  folder, theirs = reference
  ours = our_model(folder, mesh=one_device()) if mesh == 'one device' else on_eight
  assert ours.loaded.mesh.size == (1 if mesh == 'one device' else 8)
  results = evaluate(ours, tasks)
  assert_same(results, theirs)
  assert set(answers(results)) == set(TASKS)
  assert any(text for texts in answers(results)['write'] for text in texts)
  assert len(results['samples']['ending'][4]['arguments'][0][0].split()) > MAX_LENGTH  # is truncated
  assert results['config']['model_mesh']['mdl'] == (1 if mesh == 'one device' else 4)


def test_conversations_are_rendered_as_in_transformers(reference, tasks):
  folder, _ = reference
  from lm_eval.models.huggingface import HFLM

  theirs = HFLM(pretrained=str(folder), device='cpu')
  ours = our_model(folder)
  turns = [{'role': 'user', 'content': 'the cat '}, {'role': 'assistant', 'content': ' sat  '}]
  for history, prompted in ((turns[:1], True), (turns, True), (turns, False)):
    rendered = ours.apply_chat_template(history, prompted)
    assert rendered == theirs.apply_chat_template(history, prompted)
    assert ours.tok_encode(rendered) == theirs.tok_encode(rendered)
  assert ours.chat_template(True) == theirs.chat_template(True)
  assert (ours.prefix_token_id, ours.eot_token_id) == (theirs.prefix_token_id, theirs.eot_token_id)
  assert set(ours.tokenizer_name) <= set('0123456789abcdef')  # part of a file name in the cache


def test_repeated_requests_are_sampled_and_invalid_settings_are_refused(reference, on_eight):
  from lm_eval.api.instance import Instance

  folder, _ = reference

  def ask(**settings):
    requests = [Instance('generate_until', {}, ('the cat', settings), i) for i in range(3)]
    return on_eight.generate_until(requests, disable_tqdm=True)

  sampled = ask(do_sample=True, temperature=1.5, max_gen_toks=8)
  assert len(set(sampled)) == 3
  assert ask(do_sample=True, temperature=1.5, max_gen_toks=8) == sampled
  assert len(set(ask(temperature=0.0, max_gen_toks=8))) == 1
  with pytest.raises(UserError, match='have num_beams, but'):
    ask(num_beams=2)
  with pytest.raises(UserError, match=r'62 tokens.*max_length=62: raise max_length'):
    ask(max_gen_toks=62)
  with pytest.raises(UserError, match='has no path: write --model_args path='):
    type(on_eight)(pth=str(folder))
  for arguments, sentence in (
    ({'mesh': '1,2'}, 'mesh=1,2 must be the sizes'),
    ({'batch_size': 0}, "batch_size=0 must be at least 1, or 'auto'"),
    ({'batchsize': 2}, 'batch_size'),
  ):
    with pytest.raises(UserError, match=sentence):
      our_model(folder, **arguments)


@contextlib.contextmanager
def server_of(ours):
  """Serves the same model in a thread; yields the URL."""
  steps, _, variables = ours.loaded._decoder
  template = ours.loaded.job.experiment.chat_template()
  model = model_of(steps, ours.loaded.tokenizer, name='tiny', chat_template=template)
  with serving(ModelEngine(steps, variables, score_prompts=True), model=model) as served:
    yield served.url


@exhaustive  # the server has scores and texts of the same steps (tests/serving)
def test_a_server_has_the_answers_of_the_model(reference, tasks, on_eight, monkeypatch):
  folder, theirs = reference
  monkeypatch.setenv('OPENAI_API_KEY', 'none')
  with server_of(on_eight) as url:
    shared = {'model': 'tiny', 'base_url': f'{url}/v1/completions', 'max_length': MAX_LENGTH + 2}
    by_folder = shared | {'tokenizer': str(folder), 'tokenizer_backend': 'huggingface', 'add_bos_token': True}
    # Without a context, the harness's clients and its model of transformers send different tokens.
    results = evaluate('local-completions', tasks, ('choice', 'whole', 'write'), model_args=by_folder, batch_size=4)
    assert_same(results, theirs)
    # With the server's tokenizer and concurrent requests; texts then have no prefix.
    results = evaluate('local-completions', tasks, ['ending'], model_args=shared | {'num_concurrent': 3})
    with monkeypatch.context() as patch:
      patch.setattr(on_eight, '_add_bos', False)
      assert_same(results, evaluate(on_eight, tasks, ['ending']))
    chat = {'model': 'tiny', 'base_url': f'{url}/v1/chat/completions', 'max_length': MAX_LENGTH + 2}
    results = evaluate('local-chat-completions', tasks, ['write'], model_args=chat, apply_chat_template=True)
  expected = evaluate(on_eight, tasks, ['write'], apply_chat_template=True)
  assert answers(results) == answers(expected)


@exhaustive
def test_the_command(reference, tasks, tmp_path):
  folder, theirs = reference
  arguments = f'path={folder},mesh=1x2x4,num_fake_devices=8,max_length={MAX_LENGTH},task.decode.num_slots=4'
  finished = binary.run_binary(
    'run', '--model', 'spmd_tasks', '--model_args', arguments, '--include_path', tasks, '--tasks', 'choice,write',
    '--batch_size', 'auto', '--output_path', tmp_path,
    command=('-m', 'spmd_tasks.evaluation'), fresh=True, env={'HF_HUB_OFFLINE': '1', 'HF_HOME': str(tmp_path)},
  )  # fmt: skip
  assert finished.returncode == 0, finished.stderr
  (file,) = tmp_path.rglob('results_*.json')
  expected = {task: pytest.approx(metrics(theirs)[task]) for task in ('choice', 'write')}
  assert metrics(json.loads(file.read_text())) == expected
  wrong = binary.run_binary(
    'run', '--model', 'spmd_tasks', '--model_args', f'path={tmp_path}', '--include_path', tasks, '--tasks', 'choice',
    command=('-m', 'spmd_tasks.evaluation'), fresh=True, env={'HF_HUB_OFFLINE': '1', 'HF_HOME': str(tmp_path)},
  )  # fmt: skip
  assert wrong.returncode == 2
  assert wrong.stderr.splitlines()[-1].startswith(f'spmd_tasks.evaluation: {tmp_path} has no config.json')
