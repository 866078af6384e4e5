"""Translates Praxis's sublayers of a transformer block into layers of ours: norms, attention, feed-forward, experts.

Each function takes the settings of a Praxis layer and returns our layer with the rules between their weights, whose
names are relative to the layer. What our layer cannot express goes into the settings' report.

Shapes: B batch, T sequence, D model, F ffn, H heads, G key/value heads, K head dim, E experts, C slots per expert and
group of S tokens.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

from spmd_tasks.bridges._operations import Offset, Reshape, Transpose, Unstack
from spmd_tasks.bridges._rules import Rule, Slot
from spmd_tasks.bridges.pax._praxis_settings import Settings
from spmd_tasks.layers import FeedForward, GatedFeedForward, LayerNorm, RmsNorm
from spmd_tasks.layers.attention import Attention, Rotary
from spmd_tasks.layers.moe import CapacityGather, Dropless, ExpertComputation, Experts, MixtureOfExperts, TopKRouter

_ACTIVATIONS = {'ReLU': 'relu', 'SiLU': 'silu', 'Swish': 'silu', 'SquaredReLU': 'squared_relu'}


class Untranslatable(Exception):  # noqa: N818
  """A layer's class is unknown here, so that nothing can be said about its weights."""

  def __init__(self, settings: Settings):
    super().__init__(f'{settings.path}: {settings.class_name}')


@dataclasses.dataclass(frozen=True)
class Translated:
  """A layer of ours, and how its weights follow from Praxis's.

  Attributes:
    layer: of ours.
    rules: between Praxis's names (dots) and ours (slashes), both relative to the layer.
  """

  layer: Any
  rules: tuple[Rule, ...]

  def placed(
    self, source: str, target: str, source_index: Sequence[int] = (), target_index: Sequence[int] = ()
  ) -> list[Rule]:
    """Returns the rules for a layer under these prefixes, at a place of stacked weights."""
    return [
      Rule(
        [Slot(source + slot.name, (*source_index, *slot.index)) for slot in rule.source],
        [Slot(target + slot.name, (*target_index, *slot.index)) for slot in rule.target],
        *rule.operations,
      )
      for rule in self.rules
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
  """The settings that sublayers take from the layers around them.

  Attributes:
    model_dim: D.
    dtype: of the computation.
    causal: whether a token sees only earlier ones.
    tokens_shape: B and T of what a block is called with, on which the groups of experts depend; None if unknown.
  """

  model_dim: int
  dtype: str
  causal: bool
  tokens_shape: tuple[int, int] | None


def translate_norm(settings: Settings, dtype: str) -> Translated:
  """Translates LayerNorm and RmsNorm, whose scale is stored as its difference from 1 unless `direct_scale`."""
  if settings.class_name not in ('LayerNorm', 'RmsNorm'):
    raise Untranslatable(settings)
  settings.ignore('dim')
  scale = Rule('scale', 'scale', *(() if settings.read('direct_scale') else (Offset(1.0),)))
  layer: Any
  rules: tuple[Rule, ...]
  if settings.class_name == 'LayerNorm':
    settings.ignore('reductions_in_fp32')
    use_bias = settings.read('use_bias')
    layer, rules = LayerNorm(epsilon=settings.read('epsilon'), use_bias=use_bias, dtype=dtype), (scale,)
    rules += (Rule('bias', 'bias'),) if use_bias else ()
  else:
    settings.ignore('intermediate_dtype')
    layer, rules = RmsNorm(epsilon=settings.read('epsilon'), dtype=dtype), (scale,)
  settings.finish()
  return Translated(layer, rules)


def translate_attention(settings: Settings, num_heads: int, head_dim: int | None, context: Context) -> Translated:
  """Translates DotProductAttention, MultiQueryDotProductAttention and GroupedQueryAttention."""
  if settings.class_name == 'GroupedQueryAttention':
    return _translate_grouped_query_attention(settings, num_heads, head_dim, context)
  is_multi_query = settings.class_name == 'MultiQueryDotProductAttention'
  if not is_multi_query and settings.class_name != 'DotProductAttention':
    raise Untranslatable(settings)
  model_dim, head_dim = context.model_dim, head_dim or context.model_dim // num_heads
  settings.ignore('input_dim', 'hidden_dim', 'num_heads', 'dim_per_head', 'dropout_tpl', 'decode_cache')
  settings.ignore('internal_gshard_gaussian_init', 'consolidate_rope_key_state', 'attention_mask_summary')
  settings.ignore('cast_rotary_position_emb', 'decoding_maybe_shard_projections', 'atten_dropout_prob')
  settings.ignore('chunked_attn_num_seq_split')
  use_bias = settings.read('use_bias')
  num_kv_heads = settings.read('num_kv_heads') if is_multi_query else num_heads
  rotary = _rotary(settings)
  per_dim_scale, softmax_scale = _query_scale(settings, num_heads, head_dim, model_dim)
  qk_norm, norm_rules = _query_key_norm(settings, rotary)
  layer = Attention(
    num_heads=num_heads,
    num_kv_heads=None if num_kv_heads == num_heads else num_kv_heads,
    head_dim=head_dim,
    causal=context.causal,
    rotary=rotary,
    qk_norm=qk_norm,
    per_dim_scale=per_dim_scale,
    softmax_scale=softmax_scale,
    logit_cap=settings.read('atten_logit_cap') or None,
    use_bias=use_bias,
    dtype=context.dtype,
  )
  rules = [*norm_rules]
  if per_dim_scale:
    rules.append(Rule('per_dim_scale.per_dim_scale', 'per_dim_scale'))
  is_flat = _combines_dims(settings)
  if settings.read('combine_qkv'):
    assert not is_multi_query  # Praxis has no such weight
    unflatten = (Reshape((num_heads * head_dim,), (num_heads, head_dim)),) if is_flat else ()
    for name, leaf, num_dims in (('w', 'kernel', 4), ('b', 'bias', 3))[: 1 + use_bias]:
      parts = [f'{part}/{leaf}' for part in ('query', 'key', 'value')]
      rules.append(Rule(f'combined_qkv.{name}', [*parts], *unflatten, Unstack(-num_dims, 3)))
  else:
    for name, heads in (('query', num_heads), ('key', num_kv_heads), ('value', num_kv_heads)):
      is_headless = is_multi_query and name != 'query' and heads == 1
      flat = (head_dim,) if is_headless else (heads * head_dim,)
      unflatten = (Reshape(flat, (heads, head_dim)),) if is_flat or is_headless else ()
      rules.append(Rule(f'{name}.w', f'{name}/kernel', *unflatten))
      if use_bias:
        rules.append(Rule(f'{name}.b', f'{name}/bias', *unflatten))
  flat, full = (num_heads * head_dim,), (num_heads, head_dim)
  if settings.read('output_proj_use_nhd_shape'):
    to_out: tuple[Any, ...] = (Reshape((*flat, model_dim), (*full, model_dim)),) if is_flat else ()
  else:
    to_out = ((Reshape(flat, full),) if is_flat else ()) + (Transpose((1, 2, 0)),)
  rules.append(Rule('post.w', 'out/kernel', *to_out))
  if use_bias:
    rules.append(Rule('post.b', 'out/bias'))
  settings.finish()
  return Translated(layer, tuple(rules))


def _translate_grouped_query_attention(
  settings: Settings, num_heads: int, head_dim: int | None, context: Context
) -> Translated:
  """Translates GroupedQueryAttention, whose projections have no templates; one key head has no dim in the weights."""
  head_dim = head_dim or context.model_dim // num_heads
  settings.ignore('input_dim', 'hidden_dim', 'num_heads', 'dim_per_head', 'atten_dropout_prob')
  num_kv_heads, use_bias = settings.read('num_kv_heads'), settings.read('use_bias')
  temperature, timescales = settings.read('atten_temp'), settings.read('rope_min_max_timescales')
  if timescales is not None and timescales[0] != 1:
    settings.refuse('the shortest timescale of rotary positions is 1 here', 'rope_min_max_timescales')
  layer = Attention(
    num_heads=num_heads,
    num_kv_heads=None if num_kv_heads == num_heads else num_kv_heads,
    head_dim=head_dim,
    causal=context.causal,
    rotary=None if timescales is None else Rotary(max_wavelength=float(timescales[1])),
    softmax_scale=None if temperature == 1 else head_dim**-0.5 / temperature,
    logit_cap=settings.read('atten_logit_cap') or None,
    use_bias=use_bias,
    dtype=context.dtype,
  )
  rules = [Rule('post.w', 'out/kernel', Transpose((1, 2, 0)))]
  if use_bias:
    rules.append(Rule('post.b', 'out/bias'))
  for name, heads in (('query', num_heads), ('key', num_kv_heads), ('value', num_kv_heads)):
    unflatten = (Reshape((head_dim,), (1, head_dim)),) if heads == 1 else ()
    rules.append(Rule(f'{name}.w', f'{name}/kernel', *unflatten))
    if use_bias:
      rules.append(Rule(f'{name}.b', f'{name}/bias', *unflatten))
  settings.finish()
  return Translated(layer, tuple(rules))


def _combines_dims(settings: Settings) -> bool:
  """Whether the kernels hold [D, H * K]: a setting of the projections' templates, which have no other of interest."""
  flags = []
  for name in ('proj_tpl', 'combined_qkv_proj_tpl'):
    if settings.has(name) and (projection := settings.child(name)) is not None:
      flags.append(projection.read('attention_combine_dims'))
      projection.ignore('explicit_fan_in_fan_out_axes', 'use_bias')
      projection.finish()
  return flags[-1] if settings.read('combine_qkv') else flags[0]


def _rotary(settings: Settings) -> Rotary | None:
  positions = settings.child('rotary_position_emb_tpl')
  if not settings.read('use_rotary_position_emb'):
    return None
  if positions is None or positions.class_name != 'RotaryPositionalEmbedding':
    raise Untranslatable(positions or settings)
  positions.ignore('embedding_dims', 'cast_as_fprop_dtype')
  max_timescale = float(positions.read('max_timescale'))
  positions.finish()
  return Rotary(max_wavelength=max_timescale)


def _query_scale(settings: Settings, num_heads: int, head_dim: int, model_dim: int) -> tuple[bool, float | None]:
  """Returns our `per_dim_scale` and `softmax_scale`."""
  is_scaled = settings.read('internal_enable_query_scale')
  by_head_dim = settings.read('scale_query_by_dim_per_head')
  if settings.class_name == 'MultiQueryDotProductAttention':
    is_scaled, per_dim, scaled_logits = True, False, False  # whatever its setting says
  else:
    is_per_dim = settings.read('internal_enable_per_dim_scale')  # in any case: what is not read is reported
    per_dim = is_scaled and is_per_dim
    settings.ignore('per_dim_scale_tpl')
    scaled_logits = settings.read('scale_logits_by_head_dims')
  scale = 1.0
  if is_scaled:
    scale = (head_dim if per_dim or by_head_dim else model_dim // num_heads) ** -0.5
  if scaled_logits:
    scale *= head_dim**-0.5
  return per_dim, None if math.isclose(scale, head_dim**-0.5) else scale


def _query_key_norm(settings: Settings, rotary: Rotary | None) -> tuple[bool, list[Rule]]:
  """Returns our `qk_norm` and its rules: Praxis normalizes after the rotation, which is the same without one."""
  if not settings.has('ln_tpl') or (norm := settings.child('ln_tpl')) is None:
    return False, []
  translated = translate_norm(norm, 'float32')
  if rotary is not None or translated.layer != RmsNorm(epsilon=1e-6):
    settings.refuse('only an RmsNorm with epsilon 1e-6, and without rotary positions', 'ln_tpl')
  pairs = (('layer_norm_q', 'query_norm'), ('layer_norm_k', 'key_norm'))
  return True, [rule for source, target in pairs for rule in translated.placed(f'{source}.', f'{target}/')]


def translate_activation(settings: Settings | None) -> str:
  """Returns the name of the activation in ACTIVATIONS."""
  assert settings is not None
  if settings.class_name == 'GELU':
    name = 'gelu' if settings.read('approximate') else 'gelu_exact'
  elif settings.class_name in _ACTIVATIONS:
    name = _ACTIVATIONS[settings.class_name]
  else:
    settings.refuse('there is no such activation here')
    name = 'relu'
  settings.finish()
  return name


def translate_feed_forward(settings: Settings, hidden_dim: int, context: Context) -> Translated:
  """Translates TransformerFeedForward without its norms, which belong to our block."""
  if settings.class_name != 'TransformerFeedForward':
    raise Untranslatable(settings)
  use_bias, is_gated = settings.read('has_bias'), settings.read('use_gated_activation')
  settings.ignore('input_dims', 'output_dims', 'hidden_dims', 'apply_padding_first', 'ln_tpl', 'norm_policy')
  settings.ignore('relu_dropout_prob', 'residual_dropout_prob', 'residual_droppath_prob')
  settings.ignore('internal_gshard_variance_scaling_fan_in_init')
  if (linear := settings.child('fflayer_tpl')) is not None:
    linear.check_untouched(('has_bias', 'activation_tpl', 'input_dims', 'output_dims', 'bias_init', 'checkpoint_str'))
  layer = (GatedFeedForward if is_gated else FeedForward)(
    hidden_dim=hidden_dim,
    activation=translate_activation(settings.child('activation_tpl')),
    use_bias=use_bias,
    dtype=context.dtype,
  )
  settings.finish()
  names = {'ffn_layer1': 'up', 'ffn_layer2': 'down'} | ({'ffn_layer1_gate': 'gate'} if is_gated else {})
  rules = [Rule(f'{source}.linear.w', f'{target}/kernel') for source, target in names.items()]
  if use_bias:
    rules += [Rule(f'{source}.bias.b', f'{target}/bias') for source, target in names.items()]
  return Translated(layer, tuple(rules))


def translate_experts(
  settings: Settings,
  hidden_dim: int,
  num_experts: int,
  num_groups: int,
  min_group_size: int | None,
  gating: str,
  context: Context,
) -> Translated:
  """Translates TransformerFeedForwardMoe without its norms, which belong to our block."""
  if settings.class_name != 'TransformerFeedForwardMoe':
    raise Untranslatable(settings)
  is_gated = settings.read('use_gated_activation')
  settings.ignore('input_dims', 'hidden_dims', 'apply_padding_first', 'ln_tpl', 'norm_policy', 'num_experts')
  settings.ignore('num_groups', 'min_group_size', 'gating_func', 'expert_weight_shards', 'explicit_fan_in_fan_out_axes')
  settings.ignore('relu_dropout_prob', 'residual_dropout_prob', 'residual_droppath_prob')
  settings.ignore('internal_gshard_variance_scaling_fan_in_init')
  settings.report.balance_weights.append(settings.read('moe_load_balance_loss_weight'))
  settings.report.training.append(
    f'{settings.path}: the load balance loss counts both choices of a token over the batch, in Praxis the first one '
    'over each group'
  )
  factor, least = settings.read('unadjusted_expert_capacity_factor'), settings.read('expert_capacity_dim')
  if gating == 'top2':
    computation: ExpertComputation = _capacity(
      settings, num_experts, num_groups, min_group_size, factor, least, context.tokens_shape
    )
  else:
    computation = Dropless()
    if gating != 'dense_top2':
      settings.report.outputs.append(f"{settings.path}: gating_func={gating!r}: 'top2' and 'dense_top2' are known here")
  layer = MixtureOfExperts(
    router=TopKRouter(num_experts=num_experts, num_selected=2, normalize_gates=1.0),
    experts=Experts(
      num_experts=num_experts,
      hidden_dim=hidden_dim,
      gated=is_gated,
      activation=translate_activation(settings.child('activation_tpl')),
      dtype=context.dtype,
    ),
    computation=computation,
    load_balance_divide_by_k=True,
  )
  settings.finish()
  names = {'gate': 'router/kernel', 'wi_0': 'experts/up', 'wo_0': 'experts/down'}
  names |= {'wi_gate_0': 'experts/gate'} if is_gated else {}
  return Translated(layer, tuple(Rule(source, target) for source, target in names.items()))


def _capacity(
  settings: Settings,
  num_experts: int,
  num_groups: int,
  min_group_size: int | None,
  factor: float,
  least: int | None,
  tokens_shape: tuple[int, int] | None,
) -> CapacityGather:
  """Returns the computation with Praxis's groups and capacity, which depend on the number of tokens of a batch."""
  if tokens_shape is None:
    settings.report.outputs.append(f'{settings.path}: num_groups={num_groups}: the shape of a batch is not known')
    return CapacityGather(capacity_factor=factor)
  num_tokens = math.prod(tokens_shape)
  least = 1 if least is None else least
  if min_group_size is not None and num_tokens / num_groups < min_group_size:
    num_groups = -(-num_tokens // min_group_size)
  group_size = num_tokens // num_groups
  capacity = int(group_size * factor / num_experts) if factor else 0
  capacity = -(-capacity // 4) * 4 if capacity > least else least
  return CapacityGather(
    capacity_factor=capacity * num_experts / group_size,
    min_capacity=1,
    group_size=None if group_size == tokens_shape[1] else group_size,
  )
