"""Heads of folders that predict further tokens: their logits as torch computes the paper's equations, in and out.

transformers ignores these tensors. The reference takes its decoder blocks and computes what is around them by section
2.2 of arXiv 2412.19437; the embedding's half comes first in `eh_proj`, as in SGLang, vLLM and Megatron.
"""

import json
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from spmd_tasks import load
from spmd_tasks.bridges._lazy_arrays import lazy_array
from spmd_tasks.bridges.huggingface import open_folder
from spmd_tasks.bridges.huggingface._decoder import build_model
from spmd_tasks.bridges.huggingface.exporting import export_folder
from spmd_tasks.decoding import DecodeSteps, Request, SamplingParams, generate
from spmd_tasks.errors import UserError
from spmd_tasks.layers import NextnLanguageModel
from tests.bridges.huggingface.reference_models import assert_close, random_ids, random_model, tensors_of
from tests.bridges.huggingface.test_against_transformers import mesh_of
from tests.bridges.huggingface.test_folders import abstract_weights, as_tree, decoder_of, opened, random_weights
from tests.bridges.huggingface.tiny_configs import CONFIGS

HEADS = 'num_nextn_predict_layers'


def rewrite(path, tensors, **config):
  """Changes the folder's config and its tensors; None removes one."""
  known = json.loads((path / 'config.json').read_text()) | config
  (path / 'config.json').write_text(json.dumps(known))
  tensors = tensors_of(path) | tensors
  for file in path.glob('*.safetensors'):
    file.unlink()
  save_file({name: each for name, each in tensors.items() if each is not None}, path / 'model.safetensors')


@pytest.fixture(scope='module', params=['deepseek_v3', pytest.param('glm4_moe', marks=pytest.mark.exhaustive)])
def made(request, tmp_path_factory):
  """(A folder with a head, which of its tensors are the head's, logits and the head's logits [B, T - 1, V])."""
  import torch

  path, num_layers = tmp_path_factory.mktemp('heads') / 'model', CONFIGS[request.param]['num_hidden_layers']
  settings = CONFIGS[request.param] | {'num_hidden_layers': num_layers + 1, 'bos_token_id': None, 'eos_token_id': 258}
  model = random_model('AutoModelForCausalLM', settings, lambda key, value: 0.1 if value.ndim == 1 else 0.08)
  model.save_pretrained(path)
  body, ids, layer = model.model, torch.tensor(random_ids()), f'model.layers.{num_layers}.'
  enorm, hnorm, shared_norm = (torch.rand(body.embed_tokens.embedding_dim) + 0.5 for _ in range(3))
  eh_proj = torch.randn(len(enorm), 2 * len(enorm)) * 0.1

  def norm(x, scale):
    return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + model.config.rms_norm_eps) * scale

  with torch.no_grad():
    table, kernel, layers = body.embed_tokens.weight, model.lm_head.weight, body.layers
    body.layers = layers[:num_layers]
    hidden = body(ids, use_cache=False).last_hidden_state[:, :-1]
    halves = norm(table[ids[:, 1:]], enorm), norm(hidden, hnorm)
    body.layers, body.norm = layers[num_layers:], torch.nn.Identity()
    x = body(inputs_embeds=torch.cat(halves, -1) @ eh_proj.T, use_cache=False).last_hidden_state
    logits = [(each @ kernel.T).numpy() for each in (hidden, norm(x, shared_norm))]
    of_head = {'enorm': enorm, 'hnorm': hnorm, 'eh_proj': eh_proj, 'shared_head.norm': shared_norm}
    of_head |= {'embed_tokens': table, 'shared_head.head': kernel}
    of_head = {f'{layer}{name}.weight': each.numpy() for name, each in of_head.items()}
  rewrite(path, of_head, num_hidden_layers=num_layers, **{HEADS: 1})
  return path, {name for name in tensors_of(path) if name.startswith(layer)}, logits


def folder_of_heads(path, rng):
  """Writes a folder of random weights whose config and tensors have one head."""
  model = build_model(decoder_of(CONFIGS['glm4_moe'] | {HEADS: 1}))
  export_folder(path, model, {key: lazy_array(each) for key, each in random_weights(model, np.float32, rng).items()})


@pytest.mark.slow  # it imports torch
def test_logits_of_a_head_and_its_way_back_byte_for_byte(made, tmp_path):
  path, of_head, logits = made
  folder, model, weights = opened(path)
  assert folder.decoder.num_nextn == 1
  with jax.default_matmul_precision('highest'):
    predicted = jax.jit(model.apply)({'params': as_tree(weights)}, {'ids': random_ids(), 'labels': random_ids()})
  for ours, theirs in zip((predicted['logits'], predicted['nextn'][0]['logits']), logits, strict=True):
    assert_close(np.asarray(ours)[:, :-1], theirs, 1e-5)

  plain = folder.with_nextn_heads(0).build_model()  # an export has the head as it was, too
  for place, given in (('with', model), ('without', plain)):
    export_folder(tmp_path / place, given, folder.lazy_weights(given, abstract_weights(given)), origin=folder)
    exported, before = tensors_of(tmp_path / place), tensors_of(path)
    assert exported.keys() == before.keys() > of_head
    for name, each in before.items():
      assert exported[name].tobytes() == each.tobytes(), name
    assert open_folder(tmp_path / place).config[HEADS] == 1
  export_folder(tmp_path / 'new', model, weights)
  assert open_folder(tmp_path / 'new').decoder == folder.decoder
  assert tensors_of(tmp_path / 'new').keys() == before.keys()


@pytest.mark.exhaustive  # by default tests/decoding/test_drafts.py has texts with heads
@pytest.mark.parametrize('made', ['deepseek_v3'], indirect=True)
def test_texts_with_drafts_of_a_head_are_those_without(made):
  bias = tuple((token, 30.0) for token in (11, 12))
  rows = random_ids()[:2, :9].tolist()
  requests = [
    Request(ids=tuple(row), max_tokens=20, logit_bias=bias, seed=7, sampling=SamplingParams(temperature=temperature))
    for row, temperature in zip(rows, (0.0, 1.0), strict=True)
  ]
  settings, found = ['seq_len=32', 'task.decode.num_slots=3', 'task.decode.min_bucket=32'], {}
  for case in ('num_nextn_predict_layers=0', 'task.decode.num_drafts=2'):
    model = load(made[0], mesh=mesh_of((1, 1, 1)), overrides=[*settings, case])
    steps = DecodeSteps(model.partitioned)
    steps.step.row_counts = steps.step.row_counts[-1:]  # fewer programs
    found[case] = dict(generate(steps, model.padded_variables, requests, decode=lambda ids: ''))
  without, drafted = found.values()
  for number, done in drafted.items():
    assert done.ids == without[number].ids
    np.testing.assert_allclose(done.logprobs, without[number].logprobs, atol=4e-6)  # latent attention: the last bits
  assert all(0 < each.num_accepted < each.num_drafted for each in drafted.values())
  assert not any(each.num_drafted for each in without.values())


HEAD = 'model.layers.3.'
OWN_LOGITS = f'{HEAD}shared_head.head.weight, which differs from lm_head.weight'
DAMAGES = {
  'no head, as in many folders': (('', None), {}, ''),
  'a part of a head': (('hnorm.weight', None), {}, f'has no {HEAD}hnorm.weight'),
  'logits of its own': (('shared_head.head.weight', 2.0), {}, OWN_LOGITS),
  'an impossible number': (('', 1.0), {HEADS: -1}, f'{HEADS} = -1, but it must be from 0'),
  'tensors that the config does not name': (('', 1.0), {HEADS: 0}, ''),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_folder_without_whole_heads(damage, tmp_path, rng, caplog):
  """It is loaded without any, or refused in one sentence."""
  (name, factor), config, message = DAMAGES[damage]
  folder_of_heads(tmp_path / 'model', rng)
  tensors = {key: each for key, each in tensors_of(tmp_path / 'model').items() if key.startswith(HEAD + name)}
  assert tensors
  rewrite(tmp_path / 'model', {key: factor and each * np.float32(factor) for key, each in tensors.items()}, **config)
  if message:
    with pytest.raises(UserError, match=re.escape(message)):
      _ = opened(tmp_path / 'model')
    return
  model = load(tmp_path / 'model', overrides=['seq_len=32'])
  assert not isinstance(model.model, NextnLanguageModel)
  assert ('no tensors of 1 of these heads' in caplog.text) == (factor is None)
