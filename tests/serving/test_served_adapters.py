"""Several low-rank adapters of one base model in one batch: each name answers like its merged model.

The adapters are peft folders of different ranks, targets and kinds, and a job; numpy or the export merges them.
"""

from concurrent.futures import ThreadPoolExecutor
import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import openai
import pytest
from safetensors.numpy import load_file, save_file
import scipy.special

from spmd_tasks import load
from spmd_tasks.bridges.huggingface import open_folder
from spmd_tasks.bridges.huggingface.origin import variables_from_folder
from spmd_tasks.checkpoints.manifest import CheckpointError
from spmd_tasks.config import resolve
from spmd_tasks.decoding import DecodeSteps, Request, generate
from spmd_tasks.decoding.engine import ModelEngine
from spmd_tasks.decoding.scoring import score_texts
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.inputs.tokenizers import decode_generated
from tests import binary
from tests.adapter_folders import ATTENTION, FEED_FORWARD, write_adapter, write_merged
from tests.model_folders import write_llama
from tests.serving.served import model_of, serving

JOB = 'tests.tuning.low_rank_jobs.Small'
SIZES = ('max_len=64', 'num_slots=4', 'prefill_rows=2', 'prefill_chunk=16', 'min_bucket=16', 'num_top_logprobs=2')
KINDS = {
  'all': {'modules': (*ATTENTION, *FEED_FORWARD, 'lm_head'), 'rank': 4, 'alpha': 6.0, 'seed': 1},
  'rslora': {'modules': ATTENTION[::2], 'rank': 2, 'alpha': 3.0, 'seed': 2, 'use_rslora': True},
  'some': {'modules': ('self_attn.q_proj', *FEED_FORWARD), 'rank': 3, 'alpha': 3.0, 'seed': 3},
}
PROMPTS = np.random.default_rng(0).integers(10, 250, (2, 21)).tolist()  # the second of two chunks is reused, or not
NUM_TOKENS = 8


@pytest.fixture(scope='module')
def base(tmp_path_factory):
  return write_llama(tmp_path_factory.mktemp('served') / 'llama')


@pytest.fixture(scope='module')
def adapters(base, tmp_path_factory):
  """Name -> the folder of the adapter; `job` is the directory of a job that has trained one, and serves its average."""
  directory = tmp_path_factory.mktemp('adapters')
  folders = {name: write_adapter(directory / name, base, **settings) for name, settings in KINDS.items()}
  flags = ('--exp', JOB, '--set', f'model={base}', '--num_train_steps', 2, '--set', 'learning_rate=0.3')
  flags += ('--set', 'task.learner.ema_decay=0.01', '--set', 'task.eval_with_ema=true')
  assert binary.run_in_process('--mode', 'train', '--job_log_dir', directory / 'job', *flags) == 0
  return folders | {'job': directory / 'job'}


@pytest.fixture(scope='module')
def merged(base, adapters, tmp_path_factory):
  """Name -> a folder with the same model alone; '' is the base."""
  directory = tmp_path_factory.mktemp('merged')
  folders = {name: write_merged(directory / name, base, adapters[name]) for name in KINDS}
  flags = ('--mode', 'export', '--job_log_dir', adapters['job'], '--format', 'hf', '--out', directory / 'job')
  assert binary.run_in_process(*flags) == 0
  return {'': base} | folders | {'job': directory / 'job'}


class Together:
  """A base and its adapters on a mesh."""

  def __init__(self, base, adapters, sizes):
    settings = [f'model={base}', f'adapters={ {name: str(path) for name, path in adapters.items()}!r}']
    settings += [f'ici_mesh_shape={",".join(map(str, sizes))}', *(f'task.decode.{size}' for size in SIZES)]
    self.job = resolve('hf.Model', settings).build()
    self.model = partition_job(self.job, self.job.experiment.mesh_spec().build(jax.devices()[: int(np.prod(sizes))]))
    self.variables = self.job.experiment.origin().variables(self.model)
    self.steps = DecodeSteps(self.model)


@pytest.fixture(scope='module')
def on_eight(base, adapters):
  return Together(base, adapters, (1, 2, 4))


def requests_of(number):
  return [Request(ids=tuple(ids), max_tokens=NUM_TOKENS, adapter=number) for ids in PROMPTS]


def texts():
  return [(PROMPTS[0][:4], PROMPTS[0][4:]), (PROMPTS[1][:9], PROMPTS[1][9:])]


@pytest.fixture(scope='module')
def expected(merged):
  """Name -> (completions of the requests, scores of the texts), by full forward passes of the merged models."""
  job = resolve('hf.Model', [f'model={merged[""]}']).build()
  model = partition_job(job, job.experiment.mesh_spec().build(jax.devices()[:1]))
  apply, answers = jax.jit(model.task.model.apply), {}
  for name, folder in merged.items():
    variables = variables_from_folder(model, open_folder(folder))

    def logprobs(ids, variables=variables):
      row = np.zeros((1, 32), np.int32)
      row[0, : len(ids)] = ids
      return scipy.special.log_softmax(np.asarray(apply(variables, {'ids': row})['logits'])[0, : len(ids)], axis=-1)

    def scored(ids, first, logprobs=logprobs):
      return SimpleNamespace(ids=ids[first:], logprobs=logprobs(ids)[np.arange(first - 1, len(ids) - 1), ids[first:]])

    completions = []
    for prompt in PROMPTS:
      ids = list(prompt)
      while len(ids) < len(prompt) + NUM_TOKENS:
        ids.append(int(np.argmax(logprobs(ids)[-1])))
      completions.append(scored(ids, len(prompt)))
    answers[name] = completions, [scored([*context, *text], len(context)) for context, text in texts()]
  return answers


# Float32: a mesh and a cache add in another order, and after two layers a few of the log probabilities, around -7,
# differ by dozens of units in the last place.
SAME = {'rtol': 5e-6, 'atol': 3e-5}


def check(completion, theirs):
  assert completion.ids == theirs.ids
  np.testing.assert_allclose(completion.logprobs, theirs.logprobs, **SAME)


def check_all(together, expected):
  """One batch has requests of the base and of all adapters, in turn."""
  names = ['', *together.steps.adapter_names]
  turns = [(name, i) for i in range(len(PROMPTS)) for name in names]
  requests = [requests_of(names.index(name))[i] for name, i in turns]
  completions = dict(generate(together.steps, together.variables, requests, decode=lambda ids: ''))
  for number, (name, i) in enumerate(turns):
    check(completions[number], expected[name][0][i])
  assert len({tuple(completions[number].ids) for number in range(len(names))}) == len(names)
  for number, name in enumerate(names):
    scores = dict(score_texts(together.steps, together.variables, texts(), num_rows=2, adapter=number))
    for text, score in scores.items():
      np.testing.assert_allclose(score.logprobs, expected[name][1][text].logprobs, **SAME)


def test_a_mixed_batch_on_eight_devices_matches_each_merged_model(on_eight, expected):
  kernel = on_eight.model.padded_state.weights['stack']['layers']['attention']['query']
  assert kernel['lora_a'].shape == (2, 5, 24, 4)
  assert kernel['lora_b'].shape == (2, 5, 4, 4, 8)  # 3 heads, padded
  check_all(on_eight, expected)


def test_a_job_with_averaged_weights_serves_the_average(on_eight, adapters):
  b = on_eight.variables['params']['stack']['layers']['attention']['query']['lora_b'][:, 4, :, :3]
  alone = load(adapters['job']).weights['stack']['layers']['attention']['query']['lora_b']
  np.testing.assert_allclose(b, 16 / 4 * np.asarray(alone), rtol=1e-6)


def test_clients_select_an_adapter_by_name(on_eight, expected):
  """All names at once, whole and streamed, with prefixes that one name must not take from another."""
  engine = ModelEngine(on_eight.steps, on_eight.variables)
  served = model_of(on_eight.steps, on_eight.job.tokenizer, name='hf.Model')
  with (
    serving(engine, model=served) as running,
    openai.OpenAI(base_url=f'{running.url}/v1', api_key='none', max_retries=0, timeout=60) as client,
    ThreadPoolExecutor(10) as pool,
  ):
    names = [card.id for card in client.models.list().data]
    assert names == ['hf.Model', *KINDS, 'job']
    settings = {'prompt': PROMPTS[0], 'max_tokens': NUM_TOKENS, 'extra_body': {'ignore_eos': True}}

    def ask(name):
      return client.completions.create(model=name, logprobs=1, **settings)

    for name, answer in zip(names * 2, pool.map(ask, names * 2), strict=True):
      theirs = expected['' if name == 'hf.Model' else name][0][0]
      assert answer.model == name
      assert answer.choices[0].text == decode_generated(on_eight.job.tokenizer, theirs.ids)
      np.testing.assert_allclose(answer.choices[0].logprobs.token_logprobs, theirs.logprobs, **SAME)
    whole = [ask('some') for _ in range(2)][1]
    assert whole.usage.prompt_tokens_details.cached_tokens == 16
    pieces = client.completions.create(model='some', stream=True, **settings)
    assert ''.join(piece.choices[0].text for piece in pieces) == whole.choices[0].text


@pytest.mark.parametrize(
  'adapters_given, said',
  [
    ({'x y': 'rslora'}, "adapters has the name 'x y'"),
    ({'x': 'nowhere'}, "'x' in .*nowhere.*correct the path"),
    ({'x': 'wide'}, r'has model.layers.0.self_attn.q_proj with \[24, 2\] . \[2, 25\]'),
    ({'x': 'dora'}, r"the adapter 'x' in .*dora has use_dora"),
    ({'x': 'untrained'}, 'no checkpoint'),
    ({'x': 'exported'}, r'exported has adapters of the base trained/on with the digest 111111111111, but .* has '),
    ({'x': 'job'}, 'use the folder on which the adapters were trained'),
  ],
)
def test_unsupported_adapters_are_rejected(adapters_given, said, base, adapters, tmp_path):
  shutil.copytree(adapters['rslora'], tmp_path / 'wide')
  tensors = load_file(adapters['rslora'] / 'adapter_model.safetensors')
  wide = {key: np.pad(a, [(0, 0), (0, 1)]) if 'lora_A' in key else a for key, a in tensors.items()}
  save_file(wide, tmp_path / 'wide/adapter_model.safetensors')
  write_adapter(tmp_path / 'dora', base, **KINDS['some'], use_dora=True)
  shutil.copytree(adapters['rslora'], tmp_path / 'exported')
  (tmp_path / 'exported/base.json').write_text(json.dumps({'folder': 'trained/on', 'sha256': '1' * 64}))
  shutil.copytree(adapters['job'], tmp_path / 'untrained')
  shutil.rmtree(tmp_path / 'untrained/checkpoints')
  shutil.copytree(base, tmp_path / 'other base')
  with (tmp_path / 'other base/config.json').open('a') as file:
    file.write('\n')
  places = {name: adapters.get(path, tmp_path / path) for name, path in adapters_given.items()}
  base = tmp_path / 'other base' if 'job' in adapters_given.values() else base
  with pytest.raises((UserError, CheckpointError), match=said):
    Together(base, places, (1, 1, 1))


@pytest.mark.parametrize('mode', ['train', 'eval', 'export'])
def test_other_modes_reject_adapters(mode, base, adapters, tmp_path, capsys):
  flags = ('--set', f'model={base}', '--set', f'adapters={ {"x": str(adapters["all"])}!r}', '--job_log_dir', tmp_path)
  more = ('--out', tmp_path / 'out') if mode == 'export' else ()
  assert binary.run_in_process('--exp', 'hf.Model', '--mode', mode, *flags, *more) == 2
  assert f'are for --mode serve, decode and decode_once, not for --mode {mode}' in capsys.readouterr().err


def test_adapters_require_a_folder_as_base(base, adapters):
  with pytest.raises(UserError, match=r'cannot be combined .*: serve them with --exp hf.Model'):
    resolve(JOB, [f'model={base}', f'adapters={ {"x": str(adapters["all"])}!r}'])
