"""Exports and imports folders bit for bit, and refuses unsupported configs and damaged files; without transformers."""

import errno
import functools
import json
import os
import shutil

from flax import traverse_util
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_tasks.bridges._lazy_arrays import lazy_array
from spmd_tasks.bridges.huggingface import PretrainedLanguageModel, open_folder
from spmd_tasks.bridges.huggingface._config_keys import Config
from spmd_tasks.bridges.huggingface._decoder import build_model
from spmd_tasks.bridges.huggingface._describe import describe_model
from spmd_tasks.bridges.huggingface._families import FAMILIES, WRAPPERS
from spmd_tasks.bridges.huggingface._safetensors import new_folder
from spmd_tasks.bridges.huggingface.exporting import export_folder
from spmd_tasks.errors import UserError
from spmd_tasks.files import StorageError
from spmd_tasks.sharding.weights import unbox_weights
from tests.bridges.huggingface.tiny_configs import CONFIGS
from tests.shapes import shapes_alone

SHARD_BYTES = 40_000


def decoder_of(config):
  return FAMILIES[config['model_type']].read(Config(config, 'config.json'))


@functools.lru_cache  # tracing takes 0.3 s
def abstract_weights(model):
  def init():
    batch = dict.fromkeys(('ids', 'encoder_ids'), np.zeros((1, 4), np.int32))
    return unbox_weights(model.init({'params': jax.random.key(0)}, batch))['params']

  with shapes_alone():
    return jax.eval_shape(init)


def opened(path):
  """Returns the folder, its model, and the model's lazy weights by name."""
  folder = open_folder(path)
  model = folder.build_model()
  return folder, model, folder.lazy_weights(model, abstract_weights(model))


def as_tree(lazy):
  """Reads lazy weights into the tree that the model takes."""
  return traverse_util.unflatten_dict({name: np.asarray(weight) for name, weight in lazy.items()}, sep='/')


def random_weights(model, dtype, rng):
  flat = traverse_util.flatten_dict(abstract_weights(model), sep='/')
  return {name: rng.normal(size=leaf.shape).astype(dtype).astype(np.float32) for name, leaf in flat.items()}


def write_folder(path, name, rng, dtype='float32'):
  """Exports random weights to a folder; returns the model and the weights."""
  config = CONFIGS[name]
  model = build_model(decoder_of(config))
  weights = random_weights(model, jax.numpy.dtype(dtype), rng)
  # An origin without tensors selects the family; several may express the model.
  origin_path = path.with_name(f'{path.name}_origin')
  origin_path.mkdir(parents=True)
  (origin_path / 'config.json').write_text(json.dumps(config))
  save_file({}, origin_path / 'model.safetensors')
  lazy = {key: lazy_array(value) for key, value in weights.items()}
  export_folder(path, model, lazy, origin=open_folder(origin_path), dtype=dtype, max_shard_bytes=SHARD_BYTES)
  return model, weights


def rewrite(path, rename, **others):
  """Joins the shards of a folder in one file, with renamed and further tensors."""
  tensors = others
  for file in path.glob('*.safetensors'):
    tensors |= {rename(name): value for name, value in load_file(file).items()}
    file.unlink()
  (path / 'model.safetensors.index.json').unlink()
  save_file(tensors, path / 'model.safetensors')


@pytest.mark.parametrize('name', CONFIGS)
def test_exported_weights_are_imported_bit_for_bit(name, tmp_path, rng):
  model, weights = write_folder(tmp_path / 'model', name, rng)
  folder = open_folder(tmp_path / 'model')
  assert folder.decoder == decoder_of(CONFIGS[name])
  assert describe_model(model) == folder.decoder
  read = folder.lazy_weights(model, abstract_weights(model))
  assert read.keys() == weights.keys()
  for key, value in weights.items():
    np.testing.assert_array_equal(np.asarray(read[key]), value, err_msg=key)


def test_the_safetensors_library_reads_the_files(tmp_path, rng):
  write_folder(tmp_path / 'model', 'mixtral', rng)
  files = sorted((tmp_path / 'model').glob('*.safetensors'))
  assert len(files) > 3
  index = json.loads((tmp_path / 'model' / 'model.safetensors.index.json').read_text())
  loaded = {}
  for path in files:
    loaded |= (shard := load_file(path))
    assert {index['weight_map'][name] for name in shard} == {path.name}
  ours = open_folder(tmp_path / 'model').tensors
  assert ours.keys() == loaded.keys() == index['weight_map'].keys()
  for name, value in loaded.items():
    np.testing.assert_array_equal(np.asarray(ours[name]), value)


OLD_LLAMA = CONFIGS['llama3'] | {'rope_theta': 5e5}
OLD_GEMMA = CONFIGS['gemma3_text'] | {'rope_theta': 1e6, 'rope_local_base_freq': 1e4, 'sliding_window_pattern': 6}


@pytest.mark.parametrize(
  'old, new',
  [
    (OLD_LLAMA | {'rope_parameters': None, 'rope_scaling': CONFIGS['llama3']['rope_parameters']}, CONFIGS['llama3']),
    (OLD_GEMMA | {'rope_parameters': None, 'rope_scaling': {'type': 'linear', 'factor': 8.0}}, CONFIGS['gemma3_text']),
    (CONFIGS['mistral'] | {'rope_theta': 1e4, 'rope_scaling': None, 'torch_dtype': 'float16'}, CONFIGS['mistral']),
    (CONFIGS['glm4'] | {'partial_rotary_factor': 0.5}, CONFIGS['glm4']),
    (CONFIGS['minimax_m2'] | {'rope_parameters': None, 'rotary_dim': 4, 'use_qk_norm': True}, CONFIGS['minimax_m2']),
    (CONFIGS['hunyuan_v1_moe'] | {'moe_topk': [3] * 3, 'use_rotary_pos_emb': True}, CONFIGS['hunyuan_v1_moe']),
    (CONFIGS['cohere2'] | {'use_parallel_block': True, 'sliding_window_pattern': 4}, CONFIGS['cohere2']),
    (CONFIGS['exaone4'] | {'sliding_window_pattern': 'LLLG'}, CONFIGS['exaone4']),
    (CONFIGS['granite'] | {'normalization_function': 'rmsnorm', 'rope_theta': 1e4}, CONFIGS['granite']),
    (
      CONFIGS['qwen3_5_text']
      | {'rope_parameters': {'rope_theta': 1e6, 'mrope_section': [1, 1, 0], 'mrope_interleaved': True}}
      | {'partial_rotary_factor': 0.5, 'full_attention_interval': 4, 'attn_output_gate': True}
      | {'mamba_ssm_dtype': 'float32', 'mtp_num_hidden_layers': 0, 'mtp_use_dedicated_embeddings': False},
      CONFIGS['qwen3_5_text'],
    ),
    (
      CONFIGS['qwen3_next'] | {'full_attention_interval': 2},
      CONFIGS['qwen3_next'] | {'layer_types': ['linear_attention', 'full_attention'] * 2 + ['linear_attention']},
    ),
    (CONFIGS['gemma'] | {'hidden_act': 'gelu', 'hidden_activation': 'gelu_pytorch_tanh'}, CONFIGS['gemma']),
  ],
)
def test_old_keys_of_a_config_mean_the_same(old, new):
  assert decoder_of(old) == decoder_of(new)


WRAPPER = {
  'model_type': 'gemma3',
  'architectures': ['Gemma3ForConditionalGeneration'],
  'vision_config': {'model_type': 'siglip_vision_model'},
  'image_token_index': 7,
  'eos_token_id': [1, 2],
  'dtype': 'float32',
}


@pytest.mark.parametrize('prefix', ['language_model.model.', 'model.language_model.'])
def test_the_text_model_of_a_multimodal_model(prefix, tmp_path, rng):
  model, weights = write_folder(tmp_path / 'model', 'gemma3_text', rng)
  of_images = dict.fromkeys(('vision_tower.x.weight', 'model.multi_modal_projector.y'), np.zeros(3, np.float32))
  rewrite(tmp_path / 'model', lambda name: name.replace('model.', prefix, 1), **of_images)
  config = json.loads((tmp_path / 'model' / 'config.json').read_text())
  text = {key: value for key, value in config.items() if key != 'architectures'} | {'dtype': None, 'eos_token_id': 1}
  (tmp_path / 'model' / 'config.json').write_text(json.dumps(WRAPPER | {'text_config': text}))
  folder = open_folder(tmp_path / 'model')
  assert folder.decoder == decoder_of(config)
  read = folder.lazy_weights(model, abstract_weights(model))
  for key, value in weights.items():
    np.testing.assert_array_equal(np.asarray(read[key]), value, err_msg=key)
  export_folder(tmp_path / 'text', model, read, origin=folder)
  exported = open_folder(tmp_path / 'text')
  assert not exported.is_text_part
  assert exported.config['eos_token_id'] == [1, 2]
  (tmp_path / 'model' / 'config.json').write_text(
    json.dumps(WRAPPER | {'text_config': text, 'scent_config': {'num_layers': 2}})
  )
  with pytest.raises(UserError, match='scent_config'):
    open_folder(tmp_path / 'model')


@pytest.mark.parametrize(
  'wrapper, text',
  [
    *(('mistral3', 'ministral3'), ('llama4', 'llama4_text'), ('llava', 'llama')),
    *(('qwen3_5', 'qwen3_5_text'), ('qwen3_5_moe', 'qwen3_5_moe_text')),
    *(('gemma3n', 'gemma3n_text'), ('gemma4', 'gemma4_shared'), ('gemma4_unified', 'gemma4_unified_text')),
  ],
)
def test_the_text_config_of_other_wrappers(wrapper, text, tmp_path):
  config = {'model_type': wrapper, 'architectures': [WRAPPERS[wrapper][0]], 'vision_config': {}}
  (tmp_path / 'config.json').write_text(json.dumps(config | {'text_config': CONFIGS[text]}))
  folder = open_folder(tmp_path)
  assert folder.is_text_part
  assert folder.decoder == decoder_of(CONFIGS[text])


def test_kimi_linear_is_read_from_its_own_config(tmp_path):
  config = {
    key: value for key, value in CONFIGS['kimi_linear'].items() if not key.startswith(('linear', 'layer_types'))
  }
  theirs = {'num_experts_per_token': config.pop('num_experts_per_tok'), 'num_expert_group': config.pop('n_group')}
  layers = {'full_attn_layers': [2, 4], 'kda_layers': [1, 3, 5]}
  theirs |= {'linear_attn_config': layers | {'num_heads': 5, 'head_dim': 6, 'short_conv_kernel_size': 4}}
  theirs |= {'moe_renormalize': True, 'moe_router_activation_func': 'sigmoid', 'use_grouped_topk': True}
  theirs |= {'mla_use_nope': True, 'moe_layer_freq': 1, 'num_nextn_predict_layers': 0, 'model_max_length': 1_048_576}
  theirs |= {'head_dim': 72, 'rope_theta': 1e4, 'rope_scaling': None, 'auto_map': {'AutoModel': 'own.KimiModel'}}
  (tmp_path / 'config.json').write_text(json.dumps(config | theirs | {'architectures': ['KimiLinearForCausalLM']}))
  assert open_folder(tmp_path).decoder == decoder_of(CONFIGS['kimi_linear'])
  theirs['linear_attn_config'] = layers | {'kda_layers': [1, 3]}
  (tmp_path / 'config.json').write_text(json.dumps(config | theirs | {'architectures': ['KimiLinearForCausalLM']}))
  with pytest.raises(UserError, match=r'linear_attn_config = .* must list each layer, from 1 on, once'):
    open_folder(tmp_path)


def test_kimi_k2_is_read_as_deepseek_v3(tmp_path):
  own_code = {'auto_map': {'AutoModelForCausalLM': 'modeling_deepseek.DeepseekV3ForCausalLM'}}
  config = {'model_type': 'kimi_k2', 'architectures': ['DeepseekV3ForCausalLM'], **own_code}
  (tmp_path / 'config.json').write_text(json.dumps(CONFIGS['deepseek_v3'] | config))
  folder = open_folder(tmp_path)
  assert folder.decoder == decoder_of(CONFIGS['deepseek_v3'])
  assert folder.family is FAMILIES['deepseek_v3']


def test_files_with_all_experts_of_a_layer_in_one_tensor(tmp_path, rng):
  """As Qwen 3.5 is published; transformers writes a tensor per expert."""
  model, weights = write_folder(tmp_path / 'model', 'qwen3_5_moe_text', rng)
  rewrite(tmp_path / 'model', lambda name: name)
  tensors = load_file(tmp_path / 'model' / 'model.safetensors')

  def take(prefix, name):
    return np.stack([tensors.pop(f'{prefix}{expert}.{name}_proj.weight') for expert in range(12)])

  for layer in range(3):
    prefix = f'model.layers.{layer}.mlp.experts.'
    gate_up = np.concatenate([take(prefix, 'gate'), take(prefix, 'up')], axis=1)
    tensors |= {f'{prefix}gate_up_proj': gate_up, f'{prefix}down_proj': take(prefix, 'down')}
  tensors['mtp.fc.weight'] = np.zeros((2, 2), np.float32)  # of a head that config.json does not count
  save_file(tensors, tmp_path / 'model' / 'model.safetensors')
  folder = open_folder(tmp_path / 'model')
  read = folder.lazy_weights(model, abstract_weights(model))
  for key, value in weights.items():
    np.testing.assert_array_equal(np.asarray(read[key]), value, err_msg=key)
  export_folder(tmp_path / 'again', model, read, origin=folder)
  again = load_file(tmp_path / 'again' / 'model.safetensors')
  assert again.keys() == tensors.keys()
  for key, value in again.items():
    np.testing.assert_array_equal(value, tensors[key], err_msg=key)


def test_a_model_with_few_positions_has_rows_of_as_many_tokens(tmp_path, rng):
  write_folder(tmp_path / 'model', 'gpt2', rng)
  assert PretrainedLanguageModel(model=str(tmp_path / 'model')).seq_len == 256
  assert PretrainedLanguageModel(model=str(tmp_path / 'model'), seq_len=300).seq_len == 300  # which is an error later
  write_folder(tmp_path / 'other', 'llama', rng)
  assert PretrainedLanguageModel(model=str(tmp_path / 'other')).seq_len == PretrainedLanguageModel.seq_len


def test_constants_of_a_family_are_written_and_checked(tmp_path, rng):
  model, _ = write_folder(tmp_path / 'model', 'apertus', rng)
  beta = 'model.layers.1.mlp.act_fn.beta'
  rewrite(tmp_path / 'model', lambda name: name)
  open_folder(tmp_path / 'model').lazy_weights(model, abstract_weights(model))
  assert load_file(tmp_path / 'model' / 'model.safetensors')[beta] == 0.5
  _with(tmp_path / 'model', beta, np.array(0.75, np.float32))
  with pytest.raises(UserError, match=f'{beta} = 0.75, which must be 0.5'):
    open_folder(tmp_path / 'model').lazy_weights(model, abstract_weights(model))


CHANGES = {
  'an unknown setting': ({'clever_attention': 3}, 'clever_attention = 3'),
  'a neutral setting with an effect': ({'is_encoder_decoder': True}, 'is_encoder_decoder = True'),
  'a setting of another type': ({'num_hidden_layers': '3'}, "num_hidden_layers = '3', but it must be of type int"),
  'an unknown rotary type': ({'rope_scaling': {'type': 'dynamic', 'factor': 2.0}}, "of type 'dynamic'"),
  'a rotary setting that its family ignores': ({'partial_rotary_factor': 0.5}, 'transformers ignores'),
  'a parallel block that is not one': (CONFIGS['cohere2'] | {'use_parallel_block': False}, 'use_parallel_block'),
  'another number of experts per layer': (CONFIGS['hunyuan_v1_moe'] | {'moe_topk': [3, 2, 3]}, 'one value for all'),
  'keys of no layer': (CONFIGS['gemma4_text'] | {'num_kv_shared_layers': 3, 'mlp_bias': None}, 'a layer of each type'),
  'an unknown family': ({'model_type': 'qwen9', 'architectures': ['Qwen9ForCausalLM']}, 'The nearest by name is qwen'),
  'a family with another layer': (
    {'model_type': 'minimax', 'architectures': ['MiniMaxForCausalLM']},
    'Lightning Attention. The nearest family that is read is minimax_m2 (MiniMaxM2ForCausalLM).',
  ),
  'a hybrid': (
    {'model_type': 'granitemoehybrid', 'architectures': None, 'layer_types': ['linear_attention', 'attention'] * 2},
    'Mamba-2',
  ),
  'code of its own': ({'model_type': 'mine', 'auto_map': {}}, 'code of its own (auto_map), which is not run'),
}


@pytest.mark.parametrize('case', CHANGES)
def test_unsupported_configs_are_refused(case, tmp_path):
  changed, message = CHANGES[case]
  (tmp_path / 'config.json').write_text(json.dumps(CONFIGS['llama'] | changed))
  with pytest.raises(UserError) as refused:
    open_folder(tmp_path)
  assert message in str(refused.value)
  assert '\n' not in str(refused.value)


def _with(path, name, value):
  tensors = load_file(path / 'model.safetensors') | {name: value}
  save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, path / 'model.safetensors')


def _truncate(path):
  data = (path / 'model.safetensors').read_bytes()
  (path / 'model.safetensors').write_bytes(data[:-5])


def _lie(path, **changes):
  data = (path / 'model.safetensors').read_bytes()
  end = 8 + int.from_bytes(data[:8], 'little')
  header = json.loads(data[8:end])
  header[NORM] |= changes
  text = json.dumps(header)
  (path / 'model.safetensors').write_bytes(len(text).to_bytes(8, 'little') + text.encode() + data[end:])


def _fifo(path):
  (path / 'model.safetensors').unlink()
  os.mkfifo(path / 'model.safetensors')


def _device(path):
  (path / 'model.safetensors').unlink()
  os.symlink('/dev/zero', path / INDEX)


def _pickle(path):
  (path / 'model.safetensors').rename(path / 'pytorch_model.bin')


def _index(path, file):
  names = load_file(path / 'model.safetensors')
  (path / 'model.safetensors').unlink()
  (path / INDEX).write_text(json.dumps({'metadata': {}, 'weight_map': dict.fromkeys(names, file)}))


NORM, INDEX = 'model.norm.weight', 'model.safetensors.index.json'
DAMAGES = {
  'a missing tensor': (lambda path: _with(path, NORM, None), f'has no {NORM}'),
  'a layer too many': (
    lambda path: _with(path, 'model.layers.7.mlp.up_proj.weight', np.zeros((44, 30), np.float32)),
    'model.layers.7.mlp.up_proj.weight [44, 30], which has no counterpart on the other side',
  ),
  'a wrong shape': (lambda path: _with(path, NORM, np.zeros(7, np.float32)), 'gives [7], but the model has [30]'),
  'whole numbers': (lambda path: _with(path, NORM, np.zeros(30, np.int32)), f'{NORM} in int32'),
  'a truncated file': (_truncate, 'not a complete safetensors file'),
  'overlapping offsets': (lambda path: _lie(path, data_offsets=[8, 128]), 'not a complete safetensors file'),
  'fractional offsets': (lambda path: _lie(path, data_offsets=[0.0, 120.0]), 'not a complete safetensors file'),
  'a FIFO': (_fifo, 'Not a regular file'),
  'a device as index': (_device, 'Not a regular file'),
  'a pickle': (_pickle, 'a pickle (pytorch_model.bin)'),
  'an index of elsewhere': (lambda path: _index(path, '../model.safetensors'), "'../model.safetensors'"),
}


@pytest.fixture(scope='module')
def whole_folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('folders') / 'llama'
  model, _ = write_folder(path, 'llama3', np.random.default_rng(0))
  rewrite(path, lambda name: name)
  return path, model


@pytest.mark.parametrize('damage', DAMAGES)
def test_weights_that_do_not_fit_are_refused(damage, whole_folder, tmp_path):
  path, model = whole_folder
  shutil.copytree(path, tmp_path / 'model')
  harm, message = DAMAGES[damage]
  harm(tmp_path / 'model')
  with pytest.raises(UserError) as refused:
    open_folder(tmp_path / 'model').lazy_weights(model, abstract_weights(model))
  assert message in str(refused.value)


def test_tensors_that_are_not_weights_are_ignored(whole_folder, tmp_path):
  path, model = whole_folder  # tied, but files of older versions also have the head
  shutil.copytree(path, tmp_path / 'model')
  _with(tmp_path / 'model', 'lm_head.weight', load_file(path / 'model.safetensors')['model.embed_tokens.weight'])
  _with(tmp_path / 'model', 'model.layers.0.self_attn.rotary_emb.inv_freq', np.zeros(4, np.float32))
  assert open_folder(tmp_path / 'model').lazy_weights(model, abstract_weights(model))


def test_a_head_that_differs_from_the_table_is_not_tied_to_it(whole_folder, tmp_path, rng):
  """As in `tie_weights` of transformers 5, which compares both; a head without a table becomes the table."""
  path, tied_model = whole_folder
  head = 2 + rng.normal(size=(259, 30)).astype(np.float32)
  shutil.copytree(path, tmp_path / 'model')
  _with(tmp_path / 'model', 'lm_head.weight', head)
  folder, model, lazy = opened(tmp_path / 'model')
  assert not folder.decoder.tied
  np.testing.assert_array_equal(np.asarray(lazy['embedding/softmax_kernel']), head.T)
  export_folder(tmp_path / 'out', model, lazy, origin=folder)
  assert json.loads((tmp_path / 'out' / 'config.json').read_text())['tie_word_embeddings'] is False
  np.testing.assert_array_equal(load_file(tmp_path / 'out' / 'model.safetensors')['lm_head.weight'], head)

  _with(tmp_path / 'model', 'model.embed_tokens.weight', None)
  lazy = open_folder(tmp_path / 'model').lazy_weights(tied_model, abstract_weights(tied_model))
  np.testing.assert_array_equal(np.asarray(lazy['embedding/table']), head)


def test_a_single_file_takes_precedence_over_an_old_index(tmp_path, rng):
  """As in `_get_resolved_checkpoint_files` of transformers."""
  _, old = write_folder(tmp_path / 'old', 'llama3', rng)
  _, new = write_folder(tmp_path / 'new', 'llama3', rng)
  rewrite(tmp_path / 'new', lambda name: name)
  shutil.copy(tmp_path / 'new' / 'model.safetensors', tmp_path / 'old')
  name = 'stack/layers/attention/query/kernel'
  np.testing.assert_array_equal(np.asarray(opened(tmp_path / 'old')[2][name]), new[name])
  for file in (tmp_path / 'old').glob('model-0*'):  # transformers removes the shards, but not the index
    file.unlink()
  np.testing.assert_array_equal(np.asarray(opened(tmp_path / 'old')[2][name]), new[name])
  assert not np.array_equal(old[name], new[name])


def test_weights_of_another_model_are_refused(whole_folder):
  path, _ = whole_folder
  other = build_model(decoder_of(CONFIGS['llama3'] | {'rms_norm_eps': 1e-3}))
  with pytest.raises(UserError, match=r'norm_eps = 0\.001, not 1e-06'):
    open_folder(path).lazy_weights(other, abstract_weights(other))


def test_settings_of_training_and_computation_do_not_matter():
  decoder = decoder_of(CONFIGS['llama'])
  model = build_model(decoder)
  attention = model.stack.block.attention.clone(qk_clip=100.0, gradient_keys=2048, implementation='splash')
  model = model.clone(stack=model.stack.clone(block=model.stack.block.clone(attention=attention)))
  assert describe_model(model) == decoder


def test_a_model_of_no_family_is_not_exported(tmp_path):
  model = build_model(decoder_of(CONFIGS['llama']))
  model = model.clone(embedding=model.embedding.clone(scale_logits=True))
  with pytest.raises(UserError, match=r'LlamaForCausalLM has scale_logits = False, not True'):
    export_folder(tmp_path / 'out', model, {})
  assert not (tmp_path / 'out').exists()


def test_concurrent_exports_and_full_disks_raise_errors(tmp_path):
  def fill_the_disk():
    with new_folder(tmp_path / 'out') as folder:
      (folder / 'config.json').write_text('{')
      with pytest.raises(UserError, match='being written by another export'):
        new_folder(tmp_path / 'out').__enter__()
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with pytest.raises(StorageError, match='No space left on device'):
    fill_the_disk()
  assert not list(tmp_path.iterdir())


def test_gates_are_divided_by_their_sum_as_in_transformers():
  """Logits of these families are only compared with --all."""
  mixtures = {name: mixture for name in CONFIGS if (mixture := decoder_of(CONFIGS[name]).mixture)}
  not_summed = {name for name, mixture in mixtures.items() if mixture.routing.normalize_gates is None}
  assert not_summed == {'olmoe', 'flex_olmo', 'deepseek_v2', 'qwen2_moe', 'qwen3_next', 'llama4_text', 'phimoe'}
