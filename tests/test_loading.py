"""`spmd_tasks.load` gives the weights, logits and texts of a job's checkpoint, on its own mesh and on others."""

import json
import re

import jax
import numpy as np
import pytest

from spmd_tasks import UserError, exit_codes, load
from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.config import resolve, to_json
from spmd_tasks.decoding import Prompt, generate
from spmd_tasks.decoding.sampling import prompt_seed
from spmd_tasks.experiment import partition_job
from spmd_tasks.sharding import MeshSpec
from tests import binary
from tests.model_folders import write_llama
from tests.shared_models import shared_models

# Experiments whose weights are padded on their own mesh, made smaller.
JOBS = {
  'dense': ('synthetic.Uneven', ['num_layers=1']),
  'moe': ('moe.UnevenExperts', ['num_layers=1', 'seq_len=32', 'task.decode.num_slots=2', 'task.decode.min_bucket=32']),
}
IDS = np.random.default_rng(0).integers(1, 257, (3, 7))
PROMPTS = [{'prompt': 'def f', 'max_tokens': 5, 'temperature': 1.0}]
PROMPTS += [PROMPTS[0] | {'prompt': prompt} for prompt in ('ñ', 'x' * 9)]


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """Directories of jobs with random weights: name -> (directory, Linen module, true weights on the host)."""
  made = {}
  for name, (experiment, overrides) in JOBS.items():
    directory = tmp_path_factory.mktemp(name)
    resolved = resolve(experiment, overrides)
    model = partition_job(resolved.build())
    assert model.padding_waste > 0
    state = model.to_canonical(model.init(0))
    (directory / 'config.json').write_text(json.dumps(to_json(resolved)))
    checkpointer = Checkpointer(directory / 'checkpoints')
    checkpointer.save(1, state)
    checkpointer.close()
    weights = jax.tree.map(
      lambda x, true: np.reshape(x, true.shape), jax.device_get(state.weights), model.abstract_state.weights
    )
    made[name] = (directory, model.task.model, weights)
  return made


@pytest.mark.parametrize('name', ['moe', pytest.param('dense', marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize('mesh', ['own', pytest.param('one device', marks=pytest.mark.exhaustive)])
def test_logits_equal_the_linen_modules(saved, name, mesh):
  directory, module, weights = saved[name]
  axes = resolve(JOBS[name][0]).experiment.mesh_axis_names
  one_device = MeshSpec(axis_names=axes, ici_mesh_shape=(1,) * len(axes)).build(jax.devices()[:1])
  lm = load(directory, mesh={'own': None, 'one device': one_device}[mesh])
  assert lm.mesh.size == (1 if mesh == 'one device' else 8)
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(lm.weights), weights)  # of their true shapes
  logits = lm.logits(IDS)
  expected = jax.jit(module.apply)({'params': weights}, {'ids': IDS.astype(np.int32)})['logits']
  assert (logits.shape, logits.dtype) == ((*IDS.shape, expected.shape[-1]), np.float32)
  np.testing.assert_allclose(logits, expected, atol=2e-5)  # float32, summed in another order
  assert lm.logits(IDS.tolist()) is not None  # lists too


def test_texts_equal_decode_once(saved, tmp_path):
  directory, _, _ = saved['moe']
  (tmp_path / 'prompts.jsonl').write_text(''.join(json.dumps(prompt) + '\n' for prompt in PROMPTS))
  flags = ('--decode_input', tmp_path / 'prompts.jsonl', '--decode_output', tmp_path / 'output.jsonl')
  assert binary.run_in_process('--mode', 'decode_once', '--job_log_dir', directory, *flags) == exit_codes.OK
  lines = (tmp_path / 'output.jsonl').read_text().splitlines()
  expected = [json.loads(line)['outputs'][0]['text'] for line in lines]
  texts = [prompt['prompt'] for prompt in PROMPTS]
  with shared_models():
    lm = load(directory)
    seed = lm.job.experiment.seed
    for options in ({}, {'seed': seed}):
      assert lm.generate(texts, max_tokens=5, temperature=1.0, **options) == expected
    assert lm.generate(texts[0], max_tokens=5, temperature=1.0, seed=seed) == expected[:1]
    alike = lm.generate(texts[:1] * 3, max_tokens=5, temperature=1.0)
    assert alike[0] == expected[0]
    assert len(set(alike)) == 3  # each prompt draws from its own noise
    likeliest = lm.generate(texts, max_tokens=5, temperature=0.0)
    assert lm.generate(texts, max_tokens=5, temperature=1.0, top_k=1) == likeliest


def test_chat_continues_the_output_of_the_chat_template(saved, tmp_path):
  asked = {'max_tokens': 6, 'temperature': 1.0, 'seed': 3}
  hello = [{'role': 'user', 'content': 'the cat'}]
  talk = [*hello, {'role': 'assistant', 'content': 'sat'}, *hello]
  chatml = '{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}{{ mood }}<|im_start|>'
  with shared_models():
    lm = load(write_llama(tmp_path / 'model', chat_template=chatml), overrides=['task.decode.max_len=64'])
  first = '<|im_start|>user the cat<|im_end|>'
  texts = [f'{first}<|im_start|>', f'{first}<|im_start|>assistant sat<|im_end|>{first}<|im_start|>']
  seeds = [asked | {'seed': prompt_seed(3, number)} for number in range(2)]
  ids = [tuple(lm.tokenizer.encode(text)) for text in texts]
  expected = lm.generate([Prompt(prompt_ids=ids[number], **seeds[number]) for number in range(2)])
  assert expected[0] != expected[1]
  assert lm.chat([hello, talk], **asked) == expected
  assert lm.chat('the cat', **asked) == lm.chat(hello, **asked) == lm.chat(['the cat'], **asked) == expected[:1]
  calm = Prompt(prompt_ids=tuple(lm.tokenizer.encode(f'{first}calm<|im_start|>')), **asked)
  assert lm.chat(hello, template_variables={'mood': 'calm'}, **asked) == lm.generate([calm])
  with pytest.raises(UserError, match=r"conversation 2 must be .* a list of messages, .* not {'role': 'user'"):
    lm.chat(['a', hello[0]])
  with shared_models():
    transcript = load(saved['moe'][0])  # a transcript: no folder's template
    prompt = Prompt(prompt='user: d\nassistant: ', stop=('\nuser:', '\nsystem:'), **asked)
    assert transcript.chat('d', **asked) == transcript.generate([prompt])
    with pytest.raises(UserError, match=r'cannot chat.*no tokenizer'):
      load(saved['dense'][0]).chat('a')


def test_a_draft_model_has_the_same_tokens(tmp_path):
  """A folder of the same vocabulary in another file; its weights are those of the model, so every draft is right.

  That drafts change no text, tests/decoding/test_drafts.py has.
  """
  folders = [
    write_llama(tmp_path / name, kind) for name, kind in (('a', 'no_bos'), ('b', 'no_bos'), ('c', 'metaspace'))
  ]
  file = folders[1] / 'tokenizer.json'
  file.write_text(json.dumps(json.loads(file.read_text()), indent=1))
  settings = ['seq_len=32', 'task.decode.num_slots=2', 'task.decode.prefill_chunk=16']
  one_device = MeshSpec(axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=(1, 1, 1)).build(jax.devices()[:1])

  def load_with(draft):
    drafts = [f'task.decode.draft_model={draft}', 'task.decode.num_drafts=3']
    return load(folders[0], overrides=[*settings, *drafts], mesh=one_device)

  asked = {'max_tokens': 9, 'temperature': 1.0, 'seed': 3}
  config = json.loads((folders[1] / 'config.json').read_text())
  (folders[1] / 'config.json').write_text(json.dumps(config | {'logits_scaling': 8.0}))  # unknown, and not read
  draft = f'{folders[1]}?accept_config_keys=logits_scaling'
  steps, tokenizer, variables = load_with(draft)._decoder
  request, _ = tokenizer.request(Prompt(prompt='the cat', **asked), 'here')
  ((_, completion),) = generate(steps, variables, [request], decode=tokenizer.decode)
  assert completion.num_accepted == completion.num_drafted > 0
  with pytest.raises(UserError, match=r"draft_model='.*/c' has other tokens than hf.Model: choose a model"):
    load_with(folders[2]).generate(['the cat'])
  with pytest.raises(UserError, match=r'draft_model=.*: set num_drafts'):
    load(folders[0], overrides=[*settings, f'task.decode.draft_model={folders[1]}'], mesh=one_device)


def test_wrong_arguments_are_refused(saved, tmp_path):
  directory, _, _ = saved['dense']
  with pytest.raises(UserError, match=r'has no config\.json.* train first'):
    load(tmp_path)
  with pytest.raises(UserError, match='needs 4 devices but there are 8'):
    load(directory, mesh=(1, 2, 2))
  with pytest.raises(UserError, match='Nearest: num_layers'):
    load(directory, overrides=['num_layer=2'])
  lm = load(directory)
  assert re.fullmatch(r'LoadedModel\(.*, step \d+, [\d,]+ parameters, mesh .*\)', repr(lm))
  with pytest.raises(UserError, match=r'ids int64\[3\] must be integers \[batch, length\]'):
    lm.logits([1, 2, 3])
  with pytest.raises(UserError, match='ids from 1 to 1000000 must be in the vocabulary'):
    lm.logits([[1, 1_000_000]])
  with pytest.raises(UserError, match=r'prompt 1: the prompt is text, but .* no tokenizer'):
    lm.generate(['def'])
