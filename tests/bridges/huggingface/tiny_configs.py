"""Contents of config.json of small models of each family, with uneven vocabularies, heads and widths."""

from typing import Any

_SIZES: dict[str, Any] = {'vocab_size': 259, 'hidden_size': 30, 'intermediate_size': 44, 'num_hidden_layers': 3}
_SIZES |= {'num_attention_heads': 3, 'num_key_value_heads': 3, 'head_dim': 8, 'max_position_embeddings': 256}
_PLAIN = {key: value for key, value in _SIZES.items() if key != 'head_dim'}  # head_dim is 10
_EXPERTS = {'num_experts_per_tok': 3, 'intermediate_size': 20}
_YARN = {'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 4.0, 'original_max_position_embeddings': 16}
_LLAMA3 = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}

_LATENT = {'kv_lora_rank': 18, 'qk_nope_head_dim': 6, 'qk_rope_head_dim': 4, 'v_head_dim': 10}
_LATENT |= {'n_routed_experts': 12, 'num_experts_per_tok': 3, 'moe_intermediate_size': 20}

_GRANITE = {'embedding_multiplier': 3.0, 'logits_scaling': 0.7, 'residual_multiplier': 0.22}
_GRANITE |= {'attention_multiplier': 0.15}

_DELTA_NET = {'linear_num_key_heads': 2, 'linear_num_value_heads': 6, 'linear_key_head_dim': 6}
_DELTA_NET |= {'linear_value_head_dim': 5}

# name -> config; it has a `model_type` if that is not the name.
CONFIGS: dict[str, dict[str, Any]] = {
  'llama': _SIZES | {'num_attention_heads': 6, 'num_key_value_heads': 2, 'attention_bias': True, 'mlp_bias': True},
  'llama3': _SIZES
  | {'model_type': 'llama', 'tie_word_embeddings': True}
  | {'rope_parameters': _LLAMA3 | {'rope_theta': 5e5, 'original_max_position_embeddings': 16}},
  'mistral': _SIZES | {'sliding_window': 7},
  'mixtral': _SIZES | _EXPERTS | {'num_local_experts': 12, 'sliding_window': None},
  'qwen2': _PLAIN
  | {'num_hidden_layers': 4, 'use_sliding_window': True, 'sliding_window': 5, 'max_window_layers': 0}
  | {'rope_parameters': _YARN},
  'qwen3': _SIZES | {'tie_word_embeddings': True, 'rms_norm_eps': 1e-2},
  'qwen3_moe': _SIZES | _EXPERTS | {'num_experts': 12, 'moe_intermediate_size': 20, 'norm_topk_prob': True},
  'olmo2': _PLAIN | {'num_key_value_heads': 1},
  'olmoe': _PLAIN | _EXPERTS | {'num_experts': 12, 'clip_qkv': 0.3},
  'gemma2': _SIZES | {'num_hidden_layers': 4, 'sliding_window': 5, 'query_pre_attn_scalar': 7},
  'gemma3_text': _SIZES
  | {'num_hidden_layers': 6, 'sliding_window': 5, 'query_pre_attn_scalar': 7}
  | {
    'rope_parameters': {
      'full_attention': {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 1e6},
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4},
    }
  },
  'glm4': _SIZES | {'num_key_value_heads': 1, 'pad_token_id': 0, 'eos_token_id': [1, 2]},
  'glm4_moe': _SIZES
  | {'num_key_value_heads': 1, 'num_experts_per_tok': 3, 'n_routed_experts': 12, 'moe_intermediate_size': 20}
  | {'n_group': 4, 'topk_group': 2, 'first_k_dense_replace': 1, 'use_qk_norm': True, 'attention_bias': True}
  | {'routed_scaling_factor': 1.5},
  'gpt_oss': _SIZES
  | {'num_hidden_layers': 4, 'num_local_experts': 6, 'num_experts_per_tok': 2, 'sliding_window': 5}
  | {'rope_parameters': _YARN | {'truncate': False}},
  'deepseek_v2': _PLAIN
  | _LATENT
  | {'q_lora_rank': None, 'n_shared_experts': 2, 'n_group': 3, 'topk_group': 2, 'routed_scaling_factor': 16.0}
  | {'topk_method': 'group_limited_greedy', 'first_k_dense_replace': 1},
  'deepseek_v3': _PLAIN
  | _LATENT
  | {'q_lora_rank': 14, 'n_shared_experts': 1, 'n_group': 4, 'topk_group': 2, 'first_k_dense_replace': 2}
  | {'rope_parameters': _YARN | {'mscale': 1.0, 'mscale_all_dim': 0.7}, 'attention_bias': True},
  'phi3': _PLAIN
  | {'hidden_size': 48, 'num_key_value_heads': 1, 'pad_token_id': 0, 'original_max_position_embeddings': 96}
  | {
    'rope_parameters': {
      'rope_type': 'longrope',
      'rope_theta': 1e4,
      'partial_rotary_factor': 0.75,
      'short_factor': [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
      'long_factor': [2.0, 2.1, 2.2, 2.3, 2.4, 2.5],
    }
  },
  'qwen3_next': _SIZES
  | _EXPERTS
  | _DELTA_NET
  | {'num_hidden_layers': 5, 'num_key_value_heads': 1, 'num_experts': 12, 'moe_intermediate_size': 20}
  | {'shared_expert_intermediate_size': 28, 'mlp_only_layers': [2], 'norm_topk_prob': False, 'rms_norm_eps': 1e-2},
  'qwen3_5_text': _SIZES
  | _DELTA_NET
  | {'num_hidden_layers': 4, 'tie_word_embeddings': True, 'attention_bias': True, 'linear_conv_kernel_dim': 3}
  | {'rope_parameters': {'rope_type': 'default', 'rope_theta': 1e6, 'partial_rotary_factor': 0.5}},
  'qwen3_5_moe_text': {key: value for key, value in _SIZES.items() if key != 'intermediate_size'}
  | _DELTA_NET
  | {'num_key_value_heads': 1, 'num_experts': 12, 'num_experts_per_tok': 3, 'moe_intermediate_size': 20}
  | {'shared_expert_intermediate_size': 28, 'linear_num_key_heads': 3, 'linear_num_value_heads': 3}
  | {'layer_types': ['linear_attention', 'full_attention', 'linear_attention']},
  'olmo_hybrid': _PLAIN
  | _DELTA_NET
  | {'num_hidden_layers': 4, 'num_key_value_heads': 1, 'linear_num_value_heads': 4, 'linear_value_head_dim': 3}
  | {'pad_token_id': 0, 'rope_parameters': {'rope_type': 'default', 'rope_theta': None}},
  'kimi_linear': _PLAIN
  | {key: value for key, value in _LATENT.items() if key != 'n_routed_experts'}
  | {'num_hidden_layers': 5, 'linear_num_heads': 5, 'linear_head_dim': 6, 'num_experts_per_tok': 3, 'pad_token_id': 0}
  | {'num_experts': 12, 'n_group': 4, 'topk_group': 2, 'num_shared_experts': 2, 'first_k_dense_replace': 2}
  | {'layer_types': ['linear_attention', 'full_attention'] * 2 + ['linear_attention']},
  'gpt2': {'vocab_size': 259, 'n_positions': 256, 'n_embd': 30, 'n_layer': 3, 'n_head': 3},
  'gemma': _SIZES | {'num_key_value_heads': 1},
  'gemma4_text': _SIZES
  | {'num_hidden_layers': 5, 'num_attention_heads': 6, 'num_key_value_heads': 3, 'sliding_window': 5}
  | {'layer_types': ['sliding_attention', 'sliding_attention', 'full_attention', 'sliding_attention', 'full_attention']}
  | {'global_head_dim': 12, 'num_global_key_value_heads': 2, 'attention_k_eq_v': True, 'final_logit_softcapping': 3.0}
  | {'hidden_size_per_layer_input': 0, 'vocab_size_per_layer_input': 259},
  'vaultgemma': _SIZES | {'num_hidden_layers': 4, 'sliding_window': 5, 'query_pre_attn_scalar': 7},
  'helium': _SIZES | {'num_attention_heads': 5, 'num_key_value_heads': 1, 'head_dim': 6, 'mlp_bias': True},
  'solar_open': _SIZES
  | {'num_key_value_heads': 1, 'n_routed_experts': 12, 'num_experts_per_tok': 3, 'moe_intermediate_size': 20}
  | {'n_group': 4, 'topk_group': 2, 'routed_scaling_factor': 1.5},
  'flex_olmo': _PLAIN | _EXPERTS | {'num_experts': 6, 'num_key_value_heads': 1, 'pad_token_id': 0},
  'mellum': _SIZES
  | {'num_key_value_heads': 1, 'num_experts': 12, 'num_experts_per_tok': 3, 'moe_intermediate_size': 20}
  | {'sliding_window': 5, 'layer_types': ['sliding_attention', 'full_attention', 'sliding_attention']}
  | {'mlp_layer_types': ['dense', 'sparse', 'sparse']},
  'hyperclovax': _SIZES | _GRANITE | {'num_key_value_heads': 1, 'mlp_bias': True},
  'youtu': _PLAIN
  | {'kv_lora_rank': 18, 'q_lora_rank': 14, 'qk_nope_head_dim': 6, 'qk_rope_head_dim': 4, 'v_head_dim': 10},
  'jais2': _SIZES | {'num_key_value_heads': 1},
  'qwen2_moe': _PLAIN
  | _EXPERTS
  | {'num_hidden_layers': 5, 'num_experts': 12, 'moe_intermediate_size': 20, 'shared_expert_intermediate_size': 28}
  | {'decoder_sparse_step': 2, 'mlp_only_layers': [3], 'use_sliding_window': True, 'sliding_window': 5}
  | {'max_window_layers': 3},
  'ministral': _SIZES
  | {'sliding_window': 5, 'layer_types': ['sliding_attention', 'full_attention', 'sliding_attention']},
  'ministral3': _SIZES
  | {'num_key_value_heads': 1}
  | {'rope_parameters': _YARN | {'original_max_position_embeddings': 8, 'llama_4_scaling_beta': 0.3}},
  'olmo': _PLAIN | {'num_key_value_heads': 1, 'clip_qkv': 0.3},
  'olmo3': _PLAIN
  | {'num_hidden_layers': 5, 'sliding_window': 5}
  | {
    'rope_parameters': {
      'full_attention': _YARN | {'rope_theta': 5e5},
      'sliding_attention': {'rope_type': 'default', 'rope_theta': 5e5},
    }
  },
  'smollm3': _PLAIN
  | {
    'num_hidden_layers': 5,
    'no_rope_layer_interval': 2,
    'use_sliding_window': True,
    'sliding_window': 5,
    'pad_token_id': 0,
  },
  'seed_oss': _SIZES | {'num_key_value_heads': 1, 'attention_out_bias': False},
  'granite': _PLAIN | _GRANITE | {'attention_bias': True, 'mlp_bias': True},
  'granitemoe': _PLAIN | _GRANITE | _EXPERTS | {'num_local_experts': 12},
  'granitemoeshared': _PLAIN
  | _GRANITE
  | _EXPERTS
  | {'num_local_experts': 12, 'shared_intermediate_size': 28, 'tie_word_embeddings': True},
  'granitemoehybrid': _PLAIN
  | _GRANITE
  | _EXPERTS
  | {'num_local_experts': 12, 'shared_intermediate_size': 28, 'layer_types': ['attention'] * 3}
  | {'position_embedding_type': 'rope', 'mamba_n_heads': 6, 'mamba_d_head': 10},
  'granitemoehybrid_dense': _PLAIN
  | _GRANITE
  | {'model_type': 'granitemoehybrid', 'num_local_experts': 0, 'num_experts_per_tok': 0}
  | {'shared_intermediate_size': 28, 'layer_types': ['attention'] * 3, 'mamba_n_heads': 6, 'mamba_d_head': 10},
  'glm': _SIZES | {'num_key_value_heads': 1, 'pad_token_id': 0, 'eos_token_id': [1, 2]},
  'glm4_moe_lite': _PLAIN | _LATENT | {'q_lora_rank': 14, 'n_shared_experts': 2, 'n_group': 4, 'topk_group': 2},
  'llama4_text': _SIZES
  | {'num_hidden_layers': 5, 'num_key_value_heads': 1, 'num_local_experts': 5, 'num_experts_per_tok': 2}
  | {'intermediate_size': 20, 'intermediate_size_mlp': 44, 'interleave_moe_layer_step': 2, 'no_rope_layer_interval': 3}
  | {'attention_chunk_size': 7, 'floor_scale': 5, 'attn_scale': 0.3}
  | {'rope_parameters': _LLAMA3 | {'rope_theta': 5e5, 'original_max_position_embeddings': 16}},
  'minimax_m2': _SIZES
  | {'num_key_value_heads': 1, 'num_experts_per_tok': 3, 'intermediate_size': 20, 'num_local_experts': 12}
  | {'rope_parameters': {'rope_type': 'default', 'rope_theta': 5e6, 'partial_rotary_factor': 0.5}},
  'ernie4_5': _SIZES | {'num_key_value_heads': 1, 'use_bias': True},
  'ernie4_5_moe': _PLAIN
  | {'num_hidden_layers': 5, 'moe_num_experts': 12, 'moe_k': 3, 'moe_intermediate_size': 20}
  | {'moe_num_shared_experts': 2, 'moe_layer_start_index': 1, 'moe_layer_end_index': 3, 'use_bias': False},
  'hunyuan_v1_dense': _SIZES | {'num_key_value_heads': 1, 'attention_bias': True},
  'hunyuan_v1_moe': _SIZES | {'num_experts': 12, 'moe_topk': 3, 'intermediate_size': 20, 'num_key_value_heads': 1},
  'dots1': _PLAIN
  | {'n_routed_experts': 12, 'num_experts_per_tok': 3, 'moe_intermediate_size': 20, 'n_shared_experts': 2}
  | {'n_group': 4, 'topk_group': 2, 'first_k_dense_replace': 1, 'norm_topk_prob': True, 'routed_scaling_factor': 1.5}
  | {'sliding_window': 5, 'max_window_layers': 2, 'num_hidden_layers': 4, 'attention_bias': True},
  'exaone4': _SIZES | {'num_hidden_layers': 5, 'num_key_value_heads': 1, 'sliding_window': 5},
  'exaone_moe': _SIZES
  | {'num_hidden_layers': 5, 'num_key_value_heads': 1, 'sliding_window': 5, 'num_experts': 12, 'num_experts_per_tok': 3}
  | {'moe_intermediate_size': 20, 'num_shared_experts': 2, 'n_group': 4, 'topk_group': 2},
  'phi': _PLAIN | {'num_attention_heads': 5, 'num_key_value_heads': 1, 'hidden_size': 40, 'qk_layernorm': True},
  'stablelm': _PLAIN
  | {'num_attention_heads': 6, 'num_key_value_heads': 2, 'hidden_size': 48, 'use_qkv_bias': True}
  | {'use_parallel_residual': True, 'qk_layernorm': True},
  'apertus': _PLAIN | {'num_key_value_heads': 1},
  'cohere': _PLAIN | {'num_key_value_heads': 1, 'logit_scale': 0.3, 'use_qk_norm': True},
  'cohere2': _PLAIN | {'num_hidden_layers': 5, 'num_key_value_heads': 1, 'sliding_window': 5, 'attention_bias': True},
  'starcoder2': _PLAIN | {'num_key_value_heads': 1, 'sliding_window': 5},
  'phimoe': _PLAIN
  | _EXPERTS
  | {'num_local_experts': 6, 'num_experts_per_tok': 2, 'attention_bias': True, 'lm_head_bias': True}
  | {'router_jitter_noise': 0.2, 'num_key_value_heads': 1, 'sliding_window': 7},
  'nemotron': _SIZES | {'num_key_value_heads': 1, 'mlp_bias': True, 'attention_bias': True},
  'arcee': _SIZES | {'num_key_value_heads': 1, 'mlp_bias': True},
}
CONFIGS['gemma4_moe'] = CONFIGS['gemma4_text'] | {  # as 26B-A4B
  'model_type': 'gemma4_text',
  **{'enable_moe_block': True, 'num_experts': 12, 'top_k_experts': 3, 'moe_intermediate_size': 20},
}
CONFIGS['gemma4_shared'] = CONFIGS['gemma4_text'] | {  # as E2B and E4B
  'model_type': 'gemma4_text',
  **{'num_hidden_layers': 9, 'layer_types': ['sliding_attention', 'sliding_attention', 'full_attention'] * 3},
  **{'num_kv_shared_layers': 4, 'use_double_wide_mlp': True, 'attention_k_eq_v': False, 'num_key_value_heads': 1},
  **{'hidden_size_per_layer_input': 7, 'vocab_size_per_layer_input': 263},
}
CONFIGS['gemma4_unified_text'] = {  # as 12B
  key: value for key, value in CONFIGS['gemma4_text'].items() if not key.endswith('per_layer_input')
}
CONFIGS['gemma3n_text'] = _SIZES | {
  **{'num_hidden_layers': 9, 'layer_types': ['sliding_attention', 'sliding_attention', 'full_attention'] * 3},
  **{'sliding_window': 5, 'num_kv_shared_layers': 4, 'num_key_value_heads': 1, 'altup_num_inputs': 3},
  **{'hidden_size_per_layer_input': 7, 'vocab_size_per_layer_input': 257, 'laurel_rank': 5},
  **{'activation_sparsity_pattern': [0.8] * 3 + [0.0] * 6, 'final_logit_softcapping': 3.0},
  **{'intermediate_size': [44] * 9, 'query_pre_attn_scalar': 256, 'altup_lr_multiplier': 1.0},  # as published
}
# Texts exceed the original length, so that the long factors are used.
CONFIGS['phi3_long'] = CONFIGS['phi3'] | {'model_type': 'phi3', 'original_max_position_embeddings': 8}
for _name, _config in CONFIGS.items():
  _config.setdefault('model_type', _name)
