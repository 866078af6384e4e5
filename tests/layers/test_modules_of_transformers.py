"""The building blocks of published families give transformers' numbers: its modules, with our weights from theirs.

Whole models from their folders: tests/bridges/huggingface. Importing torch takes longer than these tests.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers import RmsNorm
from spmd_tasks.layers.attention import (
  Attention,
  LatentAttention,
  LinearScaling,
  Llama3Scaling,
  LongRopeScaling,
  Rotary,
  YarnScaling,
  yarn_magnitude,
)
from spmd_tasks.layers.moe import Experts, MixtureOfExperts, TopKRouter

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

B, T, D, H, G, K, E, F = 2, 9, 24, 6, 2, 8, 8, 10
POSITIONS = np.tile(np.arange(T), (B, 1))
SHORT, LONG = tuple(np.linspace(1.0, 1.5, K // 2).tolist()), tuple(np.linspace(1.5, 9.0, K // 2).tolist())
YARN = {'factor': 8.0, 'original_max_position_embeddings': 64}
SCALINGS = {
  'linear': ({'rope_type': 'linear', 'factor': 4.0}, LinearScaling(factor=4.0)),
  'llama3': (
    {
      'rope_type': 'llama3',
      'factor': 8.0,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 512,
    },
    Llama3Scaling(factor=8.0, original_length=512),
  ),
  'yarn': ({'rope_type': 'yarn', **YARN}, YarnScaling(factor=8.0, original_length=64)),
  'yarn of gpt-oss': (
    {'rope_type': 'yarn', 'truncate': False, 'beta_fast': 16.0, 'beta_slow': 2.0, **YARN},
    YarnScaling(factor=8.0, original_length=64, truncate=False, beta_fast=16.0, beta_slow=2.0),
  ),
  'yarn of DeepSeek': (
    {'rope_type': 'yarn', 'mscale': 1.0, 'mscale_all_dim': 0.7, **YARN},
    YarnScaling(factor=8.0, original_length=64, mscale=1.0, mscale_all_dim=0.7),
  ),
  'longrope': (
    {'rope_type': 'longrope', 'short_factor': SHORT, 'long_factor': LONG, 'original_max_position_embeddings': 64},
    LongRopeScaling(factor=8.0, original_length=64, short_factors=SHORT, long_factors=LONG),
  ),
}


@pytest.mark.parametrize('name', SCALINGS)
def test_rope_scalings(name):
  from transformers import LlamaConfig
  from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

  parameters, scaling = SCALINGS[name]
  config = LlamaConfig(
    hidden_size=K, num_attention_heads=1, max_position_embeddings=512, rope_parameters={'rope_theta': 5e4, **parameters}
  )
  if name == 'longrope':
    config.original_max_position_embeddings = 64
  expected, amplitude = ROPE_INIT_FUNCTIONS[parameters['rope_type']](config, device='cpu')
  frequencies = jnp.float32(5e4) ** -(jnp.arange(0, K, 2) / K)
  np.testing.assert_allclose(scaling.scale(frequencies, 5e4), expected.numpy(), rtol=2e-6)
  assert scaling.amplitude() == pytest.approx(amplitude)


def with_drawn_weights(module):
  """A torch module with weights away from their initial values, and them as numpy by name, buffers included."""
  import torch

  generator = torch.Generator().manual_seed(0)
  state = {name: 0.4 * torch.randn(x.shape, generator=generator) for name, x in module.state_dict().items()}
  module.load_state_dict(state)
  return module.eval(), {name: x.numpy() for name, x in state.items()}


def run_attention(module, rotary, x, window=None):
  """What the torch attention computes of x [B, T, D] with a causal mask."""
  import torch

  distance = np.arange(T)[:, None] - np.arange(T)[None]
  may_see = (distance >= 0) & (distance < (window or T))
  mask = torch.where(torch.tensor(may_see), 0.0, torch.finfo(torch.float32).min)[None, None]
  tokens = torch.tensor(x)
  with torch.no_grad():
    positions = rotary(tokens, torch.tensor(POSITIONS))
    return module(tokens, position_embeddings=positions, attention_mask=mask)[0].numpy()


def kernel(weight, *output_dims):
  """[D, H, K] from a torch kernel [H * K, D]."""
  return {'kernel': weight.T.reshape(weight.shape[1], *output_dims)}


def out_kernel(weight, heads, head_dim):
  return {'kernel': weight.T.reshape(heads, head_dim, -1)}


def apply(layer, weights, x, *args):
  return jax.jit(layer.apply)({'params': weights}, x, *args)


def test_attention_of_gpt_oss(rng):
  from transformers import GptOssConfig
  from transformers.models.gpt_oss import modeling_gpt_oss

  config = GptOssConfig(
    hidden_size=D,
    num_attention_heads=H,
    num_key_value_heads=G,
    head_dim=K,
    sliding_window=4,
    layer_types=['sliding_attention'],
    num_hidden_layers=1,
    rope_parameters={'rope_type': 'yarn', 'rope_theta': 1.5e5, 'truncate': False, **YARN},
    attn_implementation='eager',
  )
  module, weights = with_drawn_weights(modeling_gpt_oss.GptOssAttention(config, 0))
  x = rng.normal(size=(B, T, D)).astype(np.float32)
  expected = run_attention(module, modeling_gpt_oss.GptOssRotaryEmbedding(config), x, window=4)
  ours = {
    name: kernel(weights[f'{name[0]}_proj.weight'], heads, K)
    | {'bias': weights[f'{name[0]}_proj.bias'].reshape(heads, K)}
    for name, heads in (('query', H), ('key', G), ('value', G))
  }
  ours |= {'out': out_kernel(weights['o_proj.weight'], H, K) | {'bias': weights['o_proj.bias']}}
  scaling = YarnScaling(factor=8.0, original_length=64, truncate=False)
  layer = Attention(
    num_heads=H,
    num_kv_heads=G,
    head_dim=K,
    window=4,
    sinks=True,
    use_bias=True,
    rotary=Rotary(max_wavelength=1.5e5, scaling=scaling),
  )
  actual = apply(layer, ours | {'sinks': weights['sinks']}, x, None, POSITIONS)
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_attention_of_olmo2(rng):
  from transformers import Olmo2Config
  from transformers.models.olmo2 import modeling_olmo2

  config = Olmo2Config(
    hidden_size=D,
    num_attention_heads=3,
    num_key_value_heads=1,
    rms_norm_eps=1e-2,
    num_hidden_layers=1,
    attn_implementation='eager',
  )
  module, weights = with_drawn_weights(modeling_olmo2.Olmo2Attention(config, 0))
  x = rng.normal(size=(B, T, D)).astype(np.float32)
  expected = run_attention(module, modeling_olmo2.Olmo2RotaryEmbedding(config), x)
  ours = {
    name: kernel(weights[f'{name[0]}_proj.weight'], heads, K)
    for name, heads in (('query', 3), ('key', 1), ('value', 1))
  }
  ours |= {f'{name}_norm': {'scale': weights[f'{name[0]}_norm.weight'].reshape(-1, K)} for name in ('query', 'key')}
  ours |= {'out': out_kernel(weights['o_proj.weight'], 3, K)}
  layer = Attention(num_heads=3, num_kv_heads=1, head_dim=K, qk_norm=RmsNorm(epsilon=1e-2, num_dims=2))
  np.testing.assert_allclose(apply(layer, ours, x, None, POSITIONS), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('query_rank', [None, 7])
def test_attention_of_deepseek(rng, query_rank):
  from transformers import DeepseekV3Config
  from transformers.models.deepseek_v3 import modeling_deepseek_v3

  nope, rope, value, rank = 6, 4, 5, 9
  config = DeepseekV3Config(
    hidden_size=D,
    num_attention_heads=3,
    num_key_value_heads=3,
    q_lora_rank=query_rank,
    kv_lora_rank=rank,
    qk_nope_head_dim=nope,
    qk_rope_head_dim=rope,
    v_head_dim=value,
    rope_interleave=False,
    num_hidden_layers=1,
    rope_parameters={'rope_type': 'yarn', 'rope_theta': 1e4, 'mscale': 1.0, 'mscale_all_dim': 0.7, **YARN},
    attn_implementation='eager',
  )
  module, weights = with_drawn_weights(modeling_deepseek_v3.DeepseekV3Attention(config, 0))
  x = rng.normal(size=(B, T, D)).astype(np.float32)
  expected = run_attention(module, modeling_deepseek_v3.DeepseekV3RotaryEmbedding(config), x)
  if query_rank is None:
    ours = {'query': kernel(weights['q_proj.weight'], 3, nope + rope)}
  else:
    ours = {
      'query_down': kernel(weights['q_a_proj.weight'], query_rank),
      'query_norm': {'scale': weights['q_a_layernorm.weight']},
      'query_up': kernel(weights['q_b_proj.weight'], 3, nope + rope),
    }
  ours |= {
    'kv_down': kernel(weights['kv_a_proj_with_mqa.weight'], rank + rope),
    'kv_norm': {'scale': weights['kv_a_layernorm.weight']},
    'kv_up': kernel(weights['kv_b_proj.weight'], 3, nope + value)['kernel'],
    'out': out_kernel(weights['o_proj.weight'], 3, value),
  }
  layer = LatentAttention(
    num_heads=3,
    query_rank=query_rank,
    kv_rank=rank,
    nope_head_dim=nope,
    rope_head_dim=rope,
    value_head_dim=value,
    rotary=Rotary(scaling=YarnScaling(factor=8.0, original_length=64, mscale=1.0, mscale_all_dim=0.7)),
    softmax_scale=(nope + rope) ** -0.5 * yarn_magnitude(8.0, 0.7) ** 2,
  )
  np.testing.assert_allclose(apply(layer, ours, x, None, POSITIONS), expected, rtol=1e-5, atol=1e-5)


def test_experts_of_gpt_oss(rng):
  import torch
  from transformers import GptOssConfig
  from transformers.models.gpt_oss import modeling_gpt_oss

  config = GptOssConfig(hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=2)
  module, weights = with_drawn_weights(modeling_gpt_oss.GptOssMLP(config))
  x = 4 * rng.normal(size=(B, T, D)).astype(np.float32)  # beyond the limits
  with torch.no_grad():
    expected = module(torch.tensor(x))[0].numpy().reshape(x.shape)
  fused, bias = weights['experts.gate_up_proj'], weights['experts.gate_up_proj_bias']
  experts = {'gate': fused[..., ::2], 'up': fused[..., 1::2], 'down': weights['experts.down_proj']}
  experts |= {'gate_bias': bias[..., ::2], 'up_bias': bias[..., 1::2], 'down_bias': weights['experts.down_proj_bias']}
  layer = MixtureOfExperts(
    router=TopKRouter(num_experts=E, num_selected=2, normalize_gates=1.0, use_bias=True),
    experts=Experts(num_experts=E, hidden_dim=F, use_bias=True, activation='clamped_swiglu'),
  )
  router = {'kernel': weights['router.weight'].T, 'bias': weights['router.bias']}
  actual = apply(layer, {'router': router, 'experts': experts}, x)[0]
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)


def test_groups_of_deepseek(rng):
  import torch
  from transformers import DeepseekV3Config
  from transformers.models.deepseek_v3 import modeling_deepseek_v3

  config = DeepseekV3Config(
    hidden_size=D,
    moe_intermediate_size=F,
    n_routed_experts=E,
    n_shared_experts=1,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    experts_implementation='eager',
  )
  module, weights = with_drawn_weights(modeling_deepseek_v3.DeepseekV3MoE(config))
  x = rng.normal(size=(B, T, D)).astype(np.float32)
  with torch.no_grad():
    expected = (module(torch.tensor(x)) - module.shared_experts(torch.tensor(x))).numpy()
  gate, up = np.split(weights['experts.gate_up_proj'].swapaxes(1, 2), 2, axis=-1)
  experts = {'gate': gate, 'up': up, 'down': weights['experts.down_proj'].swapaxes(1, 2)}
  router = TopKRouter(
    num_experts=E,
    num_selected=3,
    score_function='sigmoid',
    normalize_gates=1.0,
    gate_scale=2.5,
    balance_bias=True,
    num_groups=4,
    num_selected_groups=2,
    group_score='top2_sum',
  )
  ours = {'kernel': weights['gate.weight'].T, 'balance_bias': weights['gate.e_score_correction_bias']}
  layer = MixtureOfExperts(router=router, experts=Experts(num_experts=E, hidden_dim=F))
  actual = apply(layer, {'router': ours, 'experts': experts}, x)[0]
  np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
