"""Reads the config.json of published folders (published_configs.json, by name) as transformers does.

These have keys that transformers does not write: from its older versions, training code and other software. Keys that
do not matter are ignored, and others are refused.
"""

import copy
import dataclasses
import importlib
import inspect
import json
from pathlib import Path
import re

import numpy as np
import pytest

from spmd_tasks import load
from spmd_tasks.bridges.huggingface import open_folder
from spmd_tasks.bridges.huggingface._config_keys import Config, is_inert
from spmd_tasks.bridges.huggingface._families import FAMILIES
from spmd_tasks.errors import UserError
from spmd_tasks.layers.feed_forward import ACTIVATIONS
from spmd_tasks.runtime.origin import origin_named
from tests.bridges.huggingface.reference_models import (
  assert_close,
  logits_of,
  quiet_transformers,
  random_ids,
  random_model,
)
from tests.model_folders import write_llama

PUBLISHED = json.loads(Path(__file__).with_name('published_configs.json').read_text())
POSITIONS = np.array([[0, 1, 7, 100]])


def opened(config, tmp_path, **settings):
  (tmp_path / 'config.json').write_text(json.dumps(config))
  return open_folder(tmp_path, **settings)


def theirs(config, tmp_path):
  """Returns the config of the text model as transformers reads it."""
  (tmp_path / 'config.json').write_text(json.dumps(config))
  return quiet_transformers().AutoConfig.from_pretrained(tmp_path).get_text_config()


def sizes(config):
  """Returns the fields of a Decoder that follow from a config of transformers."""
  heads = config.num_attention_heads
  fields = {
    'vocab_size': config.vocab_size,
    'embed_dim': config.hidden_size,
    'num_layers': getattr(config, 'num_decoder_layers', config.num_hidden_layers),
    'num_heads': heads,
    'norm_eps': getattr(config, 'rms_norm_eps', getattr(config, 'layer_norm_epsilon', None)),
    'logits_cap': getattr(config, 'final_logit_softcapping', None),
    'attention_cap': getattr(config, 'attn_logit_softcapping', None),
    'clip_qkv': getattr(config, 'clip_qkv', None),
    'positions': config.n_positions if config.model_type == 'gpt2' else None,
  }
  if not config.is_encoder_decoder:  # the files of encoder-decoders decide
    fields['tied'] = config.tie_word_embeddings
  if not getattr(config, 'kv_lora_rank', None):
    fields['num_kv_heads'] = getattr(config, 'num_key_value_heads', None) or heads
    fields['head_dim'] = getattr(config, 'head_dim', None) or config.hidden_size // heads
  if not getattr(config, 'num_experts_per_tok', None):
    hidden = [getattr(config, name, None) for name in ('intermediate_size', 'd_ff', 'n_inner')]
    fields['hidden_dim'] = next(filter(None, hidden), 4 * config.hidden_size)
  return fields


ALL_WINDOWED = ('mistral', 'mixtral', 'phi3', 'qwen3_moe')  # in transformers, all layers of these have the window


def windows(config):
  """Returns the window of each layer, or None."""
  window, layers = getattr(config, 'sliding_window', None), range(config.num_hidden_layers)
  if config.model_type in ALL_WINDOWED:
    return [window for _ in layers]
  types = getattr(config, 'layer_types', None) or ['full_attention'] * len(layers)
  return [window if types[layer] == 'sliding_attention' else None for layer in layers]


def experts(config):
  """Returns the settings of experts in a config of transformers."""
  number = next(filter(None, (getattr(config, name, None) for name in ('n_routed_experts', 'num_experts'))), None)
  first_dense = getattr(config, 'first_k_dense_replace', 0)
  uses_groups = getattr(config, 'topk_method', None) != 'greedy' and (getattr(config, 'n_group', 1) or 1) > 1
  return {
    'num_experts': number or config.num_local_experts,
    'num_selected': config.num_experts_per_tok,
    'hidden_dim': getattr(config, 'moe_intermediate_size', None) or config.intermediate_size,
    'divides': config.model_type != 'deepseek_v2' and getattr(config, 'norm_topk_prob', True),
    'gate_scale': getattr(config, 'routed_scaling_factor', 1.0),
    'groups': (config.n_group, config.topk_group) if uses_groups else (1, None),
    'mixed': tuple(layer >= first_dense for layer in range(config.num_hidden_layers)),
    'shared_dim': (getattr(config, 'n_shared_experts', 0) or 0) * getattr(config, 'moe_intermediate_size', 0),
  }


def ours(decoder):
  """Returns the settings of `experts` in a Decoder."""
  mixture = decoder.mixture
  assert mixture is not None
  routing = mixture.routing
  return {
    'num_experts': routing.num_experts,
    'num_selected': routing.num_selected,
    'hidden_dim': mixture.hidden_dim,
    'divides': routing.normalize_gates is not None,
    'gate_scale': routing.gate_scale,
    'groups': (routing.num_groups, routing.num_selected_groups),
    'mixed': decoder.mixed,
    'shared_dim': mixture.shared_dim or 0,
  }


# Field of a Decoder -> the suffixes of weight names in a layer of transformers that has it.
WEIGHTS = {
  'qkv_bias': ('.q_proj.bias', '.qkv_proj.bias', '.c_attn.bias', '.kv_a_proj_with_mqa.bias'),
  'out_bias': ('.o_proj.bias', '.attn.c_proj.bias'),
  'mlp_bias': ('.mlp.down_proj.bias', '.mlp.c_proj.bias'),
  'qk_norm': ('.q_norm.weight',),
  'sinks': ('.sinks',),
  'post_norm': ('.post_feedforward_layernorm.weight', '.post_mlp_layernorm.weight'),
}


def weight_names(config):
  """Returns the names of the weights of a model with one layer, on the meta device."""
  import torch

  config = copy.deepcopy(config)
  config.num_hidden_layers = 1
  if getattr(config, 'layer_types', None):
    config.layer_types = config.layer_types[:1]
  with torch.device('meta'):
    model = quiet_transformers().AutoModelForCausalLM.from_config(config)
  return [name for name, _ in model.named_parameters()]


def angles(config, layer_type):
  """Returns cosine and sine [T, d/2] of `POSITIONS` of the family's rotary module."""
  import torch

  modeling = importlib.import_module(type(config).__module__.replace('configuration_', 'modeling_'))
  (name,) = (name for name in vars(modeling) if name.endswith('RotaryEmbedding'))
  module = getattr(modeling, name)(config)
  prefix = f'{layer_type}_' if hasattr(module, f'{layer_type}_inv_freq') else ''
  angle = torch.tensor(POSITIONS[0])[:, None] * getattr(module, f'{prefix}inv_freq').float()
  scale = getattr(module, f'{prefix}attention_scaling')
  return scale * angle.cos().numpy(), scale * angle.sin().numpy()


def assert_rotates_as(rotary, config, layer_type):
  cos, sin = angles(config, layer_type)
  x = np.zeros((1, 4, 1, 2 * cos.shape[1]), np.float32)
  x[..., : cos.shape[1]] = 1.0
  rotated = np.asarray(dataclasses.replace(rotary, num_features=None)(x, POSITIONS))[0, :, 0]
  np.testing.assert_allclose(rotated, np.concatenate([cos, sin], -1), atol=2e-5)
  head_dim = getattr(config, 'qk_rope_head_dim', None) or getattr(config, 'head_dim', None)
  head_dim = head_dim or config.hidden_size // config.num_attention_heads
  assert (rotary.num_features or head_dim) == 2 * cos.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize('name', PUBLISHED)
def test_published_configs_are_read_as_in_transformers(name, tmp_path):
  config, decoder = theirs(PUBLISHED[name], tmp_path), opened(PUBLISHED[name], tmp_path).decoder
  fields = sizes(config)
  assert {key: getattr(decoder, key) for key in fields} == fields
  assert [decoder.window if is_windowed else None for is_windowed in decoder.windowed] == windows(config)
  if hasattr(config, 'num_experts_per_tok'):
    assert ours(decoder) == experts(config)
  if hasattr(config, 'query_pre_attn_scalar'):
    assert decoder.softmax_scale == config.query_pre_attn_scalar**-0.5
  if not decoder.num_encoder_layers:
    names = weight_names(config)
    has = {field: any(name.endswith(ends) for name in names) for field, ends in WEIGHTS.items()}
    assert {field: bool(getattr(decoder, field)) for field in WEIGHTS} == has
  if decoder.rotary is not None:
    assert_rotates_as(decoder.rotary, config, 'full_attention')
    assert_rotates_as(decoder.local_rotary or decoder.rotary, config, 'sliding_attention')
  activation = next(getattr(config, key) for key in ACTIVATION_KEYS if getattr(config, key, None))
  if decoder.activation != 'clamped_swiglu':  # gpt-oss ignores `hidden_act`
    import torch
    from transformers.activations import ACT2FN

    x = np.linspace(-3, 3, 13, dtype=np.float32)
    np.testing.assert_allclose(ACTIVATIONS[decoder.activation](x), ACT2FN[activation](torch.tensor(x)), atol=1e-6)


ACTIVATION_KEYS = ('hidden_activation', 'dense_act_fn', 'hidden_act', 'activation_function')
MAY_MATTER = {
  'Qwen/Qwen2.5-7B-Instruct-1M': ('Qwen/Qwen2.5-7B-Instruct', {'dual_chunk_attention_config': {'chunk_size': 262144}}),
  'a window in Llama': ('huggyllama/llama-7b', {'sliding_window': 4096}),
  'a temperature of logits': ('meta-llama/Llama-3.2-1B', {'logits_scaling': 8.0}),
  'residuals by a factor': ('Qwen/Qwen3-0.6B', {'scale_emb': 12, 'scale_depth': 1.4}),
}


@pytest.mark.parametrize('case', MAY_MATTER)
def test_keys_that_may_matter_are_refused_unless_accepted(case, tmp_path):
  name, keys = MAY_MATTER[case]
  with pytest.raises(UserError) as refused:
    opened(PUBLISHED[name] | keys, tmp_path)
  for key, value in keys.items():
    assert f'{key} = {value!r:.60}' in str(refused.value)
  assert f'--set accept_config_keys={",".join(sorted(keys))}, or in init_from' in str(refused.value)
  assert opened(PUBLISHED[name] | keys, tmp_path, accept_config_keys=[*keys]).decoder == (
    opened(PUBLISHED[name], tmp_path).decoder
  )


CHANGES_NUMBERS = {
  'not causal (Alibaba-NLP/gte-Qwen2-7B-instruct)': ('Qwen/Qwen2.5-7B-Instruct', {'is_causal': False}),
  'both directions (google/embeddinggemma-300m)': ('google/gemma-3-270m', {'use_bidirectional_attention': True}),
  'experts in no layer': ('Qwen/Qwen3-30B-A3B', {'decoder_sparse_step': 0}),
  'rotary positions that grow': ('huggyllama/llama-7b', {'rope_scaling': {'type': 'dynamic', 'factor': 2.0}}),
  'AWQ': ('Qwen/Qwen2.5-7B-Instruct', {'quantization_config': {'bits': 4, 'quant_method': 'awq', 'zero_point': True}}),
  'GPTQ': ('Qwen/Qwen2.5-7B-Instruct', {'quantization_config': {'bits': 4, 'quant_method': 'gptq'}}),
  'compressed-tensors': ('Qwen/Qwen3-8B', {'quantization_config': {'quant_method': 'compressed-tensors'}}),
  'MLX': ('Qwen/Qwen3-8B', {'quantization_config': {'bits': 4, 'group_size': 64}}),
}


@pytest.mark.parametrize('case', CHANGES_NUMBERS)
def test_unsupported_values_are_refused(case, tmp_path):
  name, keys = CHANGES_NUMBERS[case]
  with pytest.raises(UserError) as refused:
    opened(PUBLISHED[name] | keys, tmp_path, accept_config_keys=[*keys])
  assert '\n' not in str(refused.value)


NULLS = {
  'Qwen/Qwen2.5-7B-Instruct': {'num_key_value_heads': None},
  'Qwen/Qwen3-8B': {'num_key_value_heads': None, 'sliding_window': None},
  'huggyllama/llama-7b': {'num_key_value_heads': None, 'head_dim': None, 'rope_scaling': None},
  'openai/gpt-oss-20b': {'rope_scaling': None},  # means the family's default with the rope_theta of the file
  'zai-org/GLM-4-9B-0414': {'partial_rotary_factor': None},
}


@pytest.mark.parametrize('name', NULLS)
def test_null_is_read_as_in_transformers(name, tmp_path):
  values = PUBLISHED[name] | NULLS[name]
  config, decoder = theirs(values, tmp_path), opened(values, tmp_path).decoder
  fields = sizes(config)
  assert {key: getattr(decoder, key) for key in fields} == fields
  assert_rotates_as(decoder.rotary, config, 'full_attention')
  windowed = opened(
    PUBLISHED['Qwen/Qwen2.5-7B-Instruct'] | {'use_sliding_window': True, 'sliding_window': None}, tmp_path
  )
  assert windowed.decoder.window is None


def test_layer_types_of_full_attention_are_the_default(tmp_path):
  values = PUBLISHED['huggyllama/llama-7b']
  same = opened(values | {'layer_types': ['full_attention'] * values['num_hidden_layers']}, tmp_path)
  assert same.decoder == opened(values, tmp_path).decoder


@pytest.mark.parametrize('key', ['hidden_size', 'rms_norm_eps', 'hidden_act', 'tie_word_embeddings', 'vocab_size'])
def test_null_is_refused_as_in_transformers(key, tmp_path):
  pytest.importorskip('transformers')
  values = PUBLISHED['Qwen/Qwen3-8B'] | {key: None}
  with pytest.raises(Exception, match=key):
    theirs(values, tmp_path)
  with pytest.raises(UserError, match=f'{key} = None, but it must have a value'):
    opened(values, tmp_path)


# Keys that only heads, image models and generation read, and `sliding_window` of OLMoE, whose config does not have it.
KEYS_OF_OTHER_PARTS = {
  'num_labels',
  'image_token_id',
  'mm_tokens_per_image',
  'text_config',
  'vision_config',
  'sliding_window',
}


# Settings of families whose defaults need another layer, or whose config has no default.
SUPPORTED = {
  'granitemoehybrid': {'layer_types': ['attention'] * 32},
  'dots1': {'n_routed_experts': 8, 'n_shared_experts': 1},
}


@pytest.mark.slow
@pytest.mark.parametrize('name', FAMILIES)
def test_all_keys_that_transformers_reads_are_read(name):
  from transformers.models.auto.configuration_auto import CONFIG_MAPPING

  config_class = CONFIG_MAPPING[name]
  source = inspect.getsource(importlib.import_module(config_class.__module__.replace('configuration_', 'modeling_')))
  keys = {*re.findall(r'config\.([a-z_0-9]+)', source), *re.findall(r'getattr\((?:self\.)?config, "(\w+)"', source)}
  defaults = config_class().to_dict() | SUPPORTED.get(name, {})
  if name.startswith(('llama4', 'gemma3n', 'gemma4', 'qwen3_5')):  # the module also has models of images
    keys &= defaults.keys()
  if 'num_experts_per_tok' in defaults:  # DeepSeek-V2 has no default
    defaults['num_experts_per_tok'] = 2
  config = Config(defaults, 'config.json')
  FAMILIES[name].read(config)
  others = KEYS_OF_OTHER_PARTS | set(config_class.attribute_map) | set(FAMILIES[name].inert)
  keys = {key for key in keys - config.keys_read - others if not is_inert(key) and not key.startswith('get_')}
  assert keys <= {'add_cross_attention'}  # must be false


def shrunk(config):
  """Returns the config with small sizes."""
  sizes = {'vocab_size': 259, 'hidden_size': 32, 'intermediate_size': 44, 'num_hidden_layers': 2, 'head_dim': 8}
  sizes |= {'num_attention_heads': 4, 'num_key_value_heads': 2, 'num_experts': 6, 'num_experts_per_tok': 2}
  sizes |= {'moe_intermediate_size': 20, 'n_routed_experts': 6, 'kv_lora_rank': 18, 'q_lora_rank': 14}
  sizes |= {'qk_nope_head_dim': 6, 'qk_rope_head_dim': 4, 'v_head_dim': 10, 'first_k_dense_replace': 1}
  sizes |= {'n_group': 1, 'topk_group': 1, 'bos_token_id': None, 'eos_token_id': 2, 'pad_token_id': 0}
  others = {key: value for key, value in config.items() if key != 'quantization_config'}
  window = {'sliding_window': 7} if config.get('sliding_window') else {}
  return others | {key: value for key, value in sizes.items() if key in config} | window | {'torch_dtype': 'float32'}


@pytest.mark.slow
@pytest.mark.parametrize(
  'name',
  ['Qwen/Qwen3-30B-A3B']
  + [
    pytest.param(name, marks=pytest.mark.exhaustive)
    for name in (
      'microsoft/Phi-3-mini-4k-instruct',
      'deepseek-ai/DeepSeek-V3.1',
      'deepseek-ai/DeepSeek-R1-Distill-Qwen-7B',
    )
  ],
)
def test_logits_with_the_keys_of_published_configs(name, tmp_path):
  settings = shrunk(PUBLISHED[name])
  model = random_model('AutoModelForCausalLM', settings, lambda key, value: 0.1 if value.ndim == 1 else 0.2)
  model.save_pretrained(tmp_path)
  (tmp_path / 'config.json').write_text(json.dumps(settings))
  assert_close(np.asarray(load(str(tmp_path)).logits(random_ids())), logits_of(model), 1e-5)


@pytest.mark.slow
def test_accepted_keys_apply_to_all_uses_of_a_folder(tmp_path):
  folder = write_llama(tmp_path / 'model')
  expected = load(str(folder)).logits(POSITIONS)
  config = json.loads((folder / 'config.json').read_text())
  (folder / 'config.json').write_text(json.dumps(config | {'logits_scaling': 8.0}))
  with pytest.raises(UserError, match='accept_config_keys=logits_scaling'):
    load(str(folder))
  accept = 'accept_config_keys=logits_scaling'
  accepted = load(str(folder), overrides=[accept])
  np.testing.assert_array_equal(accepted.logits(POSITIONS), expected)
  assert origin_named(f'hf:{folder}?{accept},other', None).open().decoder == accepted.job.experiment.folder.decoder
  with pytest.raises(UserError, match=f'logits_scaling .* or in init_from and draft_model with FOLDER.{accept}'):
    origin_named(f'hf:{folder}', None).open()
  with pytest.raises(UserError, match=r"'accept=all', but .* accept_config_keys=KEY"):
    origin_named(f'hf:{folder}?accept=all', None)


def test_an_unknown_architecture_can_be_accepted(tmp_path):
  config = PUBLISHED['Qwen/Qwen2.5-7B-Instruct'] | {'architectures': ['Qwen2ForProcessRewardModel'], 'auto_map': {}}
  with pytest.raises(UserError, match='--set accept_config_keys=architectures'):
    opened(config, tmp_path)
  assert opened(config, tmp_path, accept_config_keys=['architectures']).decoder.num_labels is None
