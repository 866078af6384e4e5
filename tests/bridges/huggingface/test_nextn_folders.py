"""Compares multi-token prediction heads of folders with the paper's equations in torch, and exports them.

transformers ignores these heads. The reference uses its decoder blocks, and computes the rest by section 2.2 of arXiv
2412.19437, with the embedding first in `eh_proj`, as in SGLang, vLLM and Megatron.
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
# How Qwen 3.5 names the tensors of a head: in place of those after the last layer, and of its own.
QWEN_HEADS, QWEN_BLOCK = 'mtp_num_hidden_layers', 'mtp.layers.0.'
QWEN_NAMES = {
  'enorm': 'pre_fc_norm_embedding',
  'hnorm': 'pre_fc_norm_hidden',
  'eh_proj': 'fc',
  'shared_head.norm': 'norm',
}


def rewrite(path, tensors, **config):
  """Changes a folder's config and tensors; None removes a tensor."""
  config = json.loads((path / 'config.json').read_text()) | config
  (path / 'config.json').write_text(json.dumps(config))
  tensors = tensors_of(path) | tensors
  for file in path.glob('*.safetensors'):
    file.unlink()
  save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path / 'model.safetensors')


EXHAUSTIVE = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ('glm4_moe', 'qwen3_next')]


@pytest.fixture(scope='module', params=['deepseek_v3', 'qwen3_5_text', *EXHAUSTIVE])
def reference(request, tmp_path_factory):
  """Returns a folder with a head, the names of the head's tensors, and the logits of model and head [B, T - 1, V]."""
  import torch

  path, num_layers = tmp_path_factory.mktemp('heads') / 'model', CONFIGS[request.param]['num_hidden_layers']
  settings = CONFIGS[request.param] | {'num_hidden_layers': num_layers + 1, 'bos_token_id': None, 'eos_token_id': 258}
  is_qwen = 'qwen' in request.param
  if is_qwen:  # the head's block is not recurrent
    layer_types = (['linear_attention'] * 3 + ['full_attention', 'linear_attention'])[:num_layers]
    settings |= {'layer_types': [*layer_types, 'full_attention'], 'tie_word_embeddings': False}
  model = random_model('AutoModelForCausalLM', settings, lambda key, value: 0.1 if value.ndim == 1 else 0.08)
  model.save_pretrained(path)
  body, ids, layer = model.model, torch.tensor(random_ids()), f'model.layers.{num_layers}.'
  enorm, hnorm, shared_norm = (torch.rand(body.embed_tokens.embedding_dim) + 0.5 for _ in range(3))
  eh_proj = torch.randn(len(enorm), 2 * len(enorm)) * 0.1

  def norm(x, scale):
    return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + model.config.rms_norm_eps) * (scale + is_qwen)

  with torch.no_grad():
    table, kernel, layers = body.embed_tokens.weight, model.lm_head.weight, body.layers
    body.layers = layers[:num_layers]
    hidden = body(ids, use_cache=False).last_hidden_state[:, :-1]
    halves = norm(table[ids[:, 1:]], enorm), norm(hidden, hnorm)
    body.layers, body.norm = layers[num_layers:], torch.nn.Identity()
    x = body(inputs_embeds=torch.cat(halves, -1) @ eh_proj.T, use_cache=False).last_hidden_state
    logits = [(activations @ kernel.T).numpy() for activations in (hidden, norm(x, shared_norm))]
    head_tensors = {'enorm': enorm, 'hnorm': hnorm, 'eh_proj': eh_proj, 'shared_head.norm': shared_norm}
  if is_qwen:
    own = {f'mtp.{QWEN_NAMES[name]}.weight': tensor.detach().numpy() for name, tensor in head_tensors.items()}
    block = {name: tensor for name, tensor in tensors_of(path).items() if name.startswith(layer)}
    own |= {name.replace(layer, QWEN_BLOCK): tensor for name, tensor in block.items()} | dict.fromkeys(block)
    rewrite(path, own, num_hidden_layers=num_layers, layer_types=layer_types, **{QWEN_HEADS: 1})
    return path, {name for name in tensors_of(path) if name.startswith('mtp.')}, logits
  head_tensors |= {'embed_tokens': table, 'shared_head.head': kernel}
  head_tensors = {f'{layer}{name}.weight': tensor.detach().numpy() for name, tensor in head_tensors.items()}
  rewrite(path, head_tensors, num_hidden_layers=num_layers, **{HEADS: 1})
  return path, {name for name in tensors_of(path) if name.startswith(layer)}, logits


def write_folder_with_head(path, rng):
  """Writes a folder of random weights with one head."""
  model = build_model(decoder_of(CONFIGS['glm4_moe'] | {HEADS: 1}))
  weights = random_weights(model, np.float32, rng)
  export_folder(path, model, {key: lazy_array(weight) for key, weight in weights.items()})


@pytest.mark.slow  # it imports torch
def test_logits_of_a_head_and_its_export(reference, tmp_path):
  path, head_tensors, logits = reference
  folder, model, weights = opened(path)
  assert folder.decoder.num_nextn == 1
  with jax.default_matmul_precision('highest'):
    predicted = jax.jit(model.apply)({'params': as_tree(weights)}, {'ids': random_ids(), 'labels': random_ids()})
  for ours, theirs in zip((predicted['logits'], predicted['nextn'][0]['logits']), logits, strict=True):
    assert_close(np.asarray(ours)[:, :-1], theirs, 1e-5)

  without_head = folder.with_nextn_heads(0).build_model()  # its export copies the head
  for directory, exported_model in (('with', model), ('without', without_head)):
    weights_to_export = folder.lazy_weights(exported_model, abstract_weights(exported_model))
    export_folder(tmp_path / directory, exported_model, weights_to_export, origin=folder)
    exported, before = tensors_of(tmp_path / directory), tensors_of(path)
    assert exported.keys() == before.keys() > head_tensors
    for name, tensor in before.items():
      assert exported[name].tobytes() == tensor.tobytes(), name
    assert open_folder(tmp_path / directory).decoder.num_nextn == 1
  export_folder(tmp_path / 'new', model, weights)
  assert open_folder(tmp_path / 'new').decoder == folder.decoder
  assert tensors_of(tmp_path / 'new').keys() == before.keys()


@pytest.mark.exhaustive  # tests/decoding/test_drafts.py covers generation with heads by default
@pytest.mark.parametrize('reference', ['deepseek_v3', 'qwen3_5_text'], indirect=True)
def test_drafts_of_a_head_do_not_change_texts(reference):
  bias = tuple((token, 30.0) for token in (11, 12))
  rows = random_ids()[:2, :9].tolist()
  requests = [
    Request(ids=tuple(row), max_tokens=20, logit_bias=bias, seed=7, sampling=SamplingParams(temperature=temperature))
    for row, temperature in zip(rows, (0.0, 1.0), strict=True)
  ]
  settings, results = ['seq_len=32', 'task.decode.num_slots=3', 'task.decode.min_bucket=32'], {}
  for case in ('num_nextn_predict_layers=0', 'task.decode.num_drafts=2'):
    model = load(reference[0], mesh=mesh_of((1, 1, 1)), overrides=[*settings, case])
    steps = DecodeSteps(model.partitioned)
    steps.step.row_counts = steps.step.row_counts[-1:]  # fewer programs
    results[case] = dict(generate(steps, model.padded_variables, requests, decode=lambda ids: ''))
  without, drafted = results.values()
  for number, done in drafted.items():
    assert done.ids == without[number].ids
    np.testing.assert_allclose(done.logprobs, without[number].logprobs, atol=4e-6)  # latent attention: the last bits
  assert all(0 < completion.num_accepted < completion.num_drafted for completion in drafted.values())
  assert not any(completion.num_drafted for completion in without.values())


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
  """The folder is loaded without heads, or refused."""
  (name, factor), config, message = DAMAGES[damage]
  write_folder_with_head(tmp_path / 'model', rng)
  tensors = {key: tensor for key, tensor in tensors_of(tmp_path / 'model').items() if key.startswith(HEAD + name)}
  assert tensors
  changed = {key: factor and tensor * np.float32(factor) for key, tensor in tensors.items()}
  rewrite(tmp_path / 'model', changed, **config)
  if message:
    with pytest.raises(UserError, match=re.escape(message)):
      _ = opened(tmp_path / 'model')
    return
  model = load(tmp_path / 'model', overrides=['seq_len=32'])
  assert not isinstance(model.model, NextnLanguageModel)
  assert ('no tensors of 1 of these heads' in caplog.text) == (factor is None)
