"""Translates Praxis's sublayers of a transformer block into layers of ours: norms, attention, feed-forward, experts.

Each function takes the settings of a Praxis layer and returns our layer with the rules between their weights, whose
names are relative to the layer. Settings reports every setting that nothing has read:

    settings = Settings(config, 'lm.final_ln_tpl', report)
    epsilon = settings.read('epsilon')
    report.finish()       # any other setting that is not at its default goes into the report

So a translation cannot overlook a setting: neither one that it forgot, nor one that a newer Praxis adds.

Shapes: B batch, T sequence, D model, F ffn, H heads, G key/value heads, K head dim, E experts, C slots per expert and
group of S tokens.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

from spmd_tasks.bridges._operations import Offset, Reshape, Transpose, Unstack
from spmd_tasks.bridges._rules import Rule, Slot
from spmd_tasks.layers import FeedForward, GatedFeedForward, LayerNorm, RmsNorm
from spmd_tasks.layers.attention import Attention, Rotary
from spmd_tasks.layers.moe import CapacityGather, Dropless, ExpertComputation, Experts, MixtureOfExperts, TopKRouter

_ACTIVATIONS = {'ReLU': 'relu', 'SiLU': 'silu', 'Swish': 'silu', 'SquaredReLU': 'squared_relu'}
# Settings of every Praxis layer that do not change what it computes: names, initial values, where weights lie.
_IRRELEVANT = frozenset(
  {
    'activation_split_dims_mapping',
    'contiguous_submeshes',
    'dcn_mesh_shape',
    'dtype',
    'fprop_dtype',
    'ici_mesh_shape',
    'mesh_axis_names',
    'name',
    'params_init',
    'parent',
    'skip_lp_regularization',
    'weight_init',
    'weight_split_dims_mapping',
  }
)


@dataclasses.dataclass(frozen=True)
class Report:
  """Collects the settings that a translation cannot express.

  Attributes:
    outputs: settings that change what the model computes; with any of these, outputs differ.
    training: settings that change training only, such as dropout of attention weights.
    balance_weights: of the load balance losses of the layers with experts.
    settings: all that were made with this report.
  """

  outputs: list[str] = dataclasses.field(default_factory=list)
  training: list[str] = dataclasses.field(default_factory=list)
  balance_weights: list[float] = dataclasses.field(default_factory=list)
  settings: 'list[Settings]' = dataclasses.field(default_factory=list)

  def finish(self) -> None:
    """Reports every setting that nothing has read and that is not at its default."""
    for settings in self.settings:
      self.outputs.extend(settings.unread())


class Settings:
  """Reads a Praxis layer's settings by name.

  Attributes:
    path: of the config, for the report.
    report: what cannot be expressed.
  """

  def __init__(self, config: Any, path: str, report: Report):
    """Takes a config, `pax_fiddle.Config(layers.LayerNorm)`, or a layer that was built from one."""
    from praxis import pax_fiddle

    self._config = config
    self.path = path
    self.report = report
    self.layer_class = config.cls if isinstance(config, pax_fiddle.Config) else type(config)
    self._default = pax_fiddle.Config(self.layer_class)
    self._read: set[str] = set()
    report.settings.append(self)

  @property
  def class_name(self) -> str:
    """The name of a class of Praxis; for any other class the name with its module, which nothing knows."""
    name, module = self.layer_class.__name__, self.layer_class.__module__
    return name if module.startswith('praxis.') else f'{module}.{name}'

  def has(self, name: str) -> bool:
    """Whether the layer has a setting of this name."""
    return any(field.name == name for field in dataclasses.fields(self.layer_class))

  def read(self, name: str) -> Any:
    self._read.add(name)
    return getattr(self._config, name)

  def child(self, name: str) -> 'Settings | None':
    """Returns the settings of a sublayer's template, None if it has none."""
    template = self.read(name)
    return None if template is None else Settings(template, f'{self.path}.{name}', self.report)

  def ignore(self, *names: str) -> None:
    """Names settings that change nothing here, or that the layer around this one overrides."""
    self._read.update(names)

  def training_only(self, *names: str) -> None:
    """Reports the settings that change training, where they are not at their defaults."""
    for name in names:
      if self._differs(name):
        self.report.training.append(self._describe(name))
    self._read.update(names)

  def refuse(self, why: str, *names: str) -> None:
    """Reports that the values of these settings cannot be expressed; of the whole layer, if none is named."""
    what = ', '.join(map(self._describe, names)) or f'{self.path}: {self.class_name}'
    self.report.outputs.append(f'{what}: {why}')
    self._read.update(names)

  def unread(self) -> list[str]:
    """Returns every setting that was not read and is not at its default."""
    names = [field.name for field in dataclasses.fields(self.layer_class)]
    return [self._describe(name) for name in names if name not in self._read | _IRRELEVANT and self._differs(name)]

  def _differs(self, name: str) -> bool:
    return bool(getattr(self._config, name) != getattr(self._default, name))

  def _describe(self, name: str) -> str:
    value = getattr(self._config, name)
    if hasattr(value, 'cls'):
      value = value.cls.__name__
    return f'{self.path}.{name}={value!r}'


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
  settings.ignore('reductions_in_fp32', 'intermediate_dtype')
  epsilon, use_bias = settings.read('epsilon'), settings.class_name == 'LayerNorm' and settings.read('use_bias')
  layer: Any = RmsNorm(epsilon=epsilon, dtype=dtype)
  if settings.class_name == 'LayerNorm':
    layer = LayerNorm(epsilon=epsilon, use_bias=use_bias, dtype=dtype)
  rules = (scale, Rule('bias', 'bias')) if use_bias else (scale,)
  return Translated(layer, rules)


def translate_attention(settings: Settings, num_heads: int, head_dim: int | None, context: Context) -> Translated:
  """Translates DotProductAttention, MultiQueryDotProductAttention and GroupedQueryAttention."""
  kind = settings.class_name
  if kind not in ('DotProductAttention', 'MultiQueryDotProductAttention', 'GroupedQueryAttention'):
    raise Untranslatable(settings)
  head_dim = head_dim or context.model_dim // num_heads
  settings.ignore('input_dim', 'hidden_dim', 'num_heads', 'dim_per_head', 'dropout_tpl', 'decode_cache')
  settings.ignore('internal_gshard_gaussian_init', 'consolidate_rope_key_state', 'attention_mask_summary')
  settings.ignore('cast_rotary_position_emb', 'decoding_maybe_shard_projections', 'atten_dropout_prob')
  settings.ignore('chunked_attn_num_seq_split')
  for name in ('proj_tpl', 'combined_qkv_proj_tpl'):
    if settings.has(name) and (projection := settings.child(name)) is not None:
      projection.ignore('explicit_fan_in_fan_out_axes', 'use_bias')
  use_bias = settings.read('use_bias')
  num_kv_heads = num_heads if kind == 'DotProductAttention' else settings.read('num_kv_heads')
  rotary, per_dim_scale, scale = _positions_and_scale(settings, num_heads, head_dim, context.model_dim)
  layer = Attention(
    num_heads=num_heads,
    num_kv_heads=None if num_kv_heads == num_heads else num_kv_heads,
    head_dim=head_dim,
    causal=context.causal,
    rotary=rotary,
    per_dim_scale=per_dim_scale,
    softmax_scale=None if math.isclose(scale, head_dim**-0.5) else scale,
    logit_cap=settings.read('atten_logit_cap') or None,
    use_bias=use_bias,
    dtype=context.dtype,
  )
  rules = [Rule('per_dim_scale.per_dim_scale', 'per_dim_scale')] if per_dim_scale else []
  names = (('w', 'kernel', 4), ('b', 'bias', 3))[: 1 + use_bias]
  if settings.has('combine_qkv') and settings.read('combine_qkv'):
    for name, leaf, num_dims in names:
      parts = [f'{part}/{leaf}' for part in ('query', 'key', 'value')]
      rules.append(Rule(f'combined_qkv.{name}', [*parts], Unstack(-num_dims, 3)))
  else:
    for part, heads in (('query', num_heads), ('key', num_kv_heads), ('value', num_kv_heads)):
      # One head has no dim in these weights.
      has_dim = kind == 'DotProductAttention' or (kind == 'MultiQueryDotProductAttention' and part == 'query')
      is_headless = heads == 1 and not has_dim
      unflatten = (Reshape((head_dim,), (1, head_dim)),) if is_headless else ()
      rules += [Rule(f'{part}.{name}', f'{part}/{leaf}', *unflatten) for name, leaf, _ in names]
  rules.append(Rule('post.w', 'out/kernel', Transpose((1, 2, 0))))
  if use_bias:
    rules.append(Rule('post.b', 'out/bias'))
  return Translated(layer, tuple(rules))


def _positions_and_scale(
  settings: Settings, num_heads: int, head_dim: int, model_dim: int
) -> tuple[Rotary | None, bool, float]:
  """Returns the rotary positions, whether queries have a scale per dim, and the scale of the logits."""
  if settings.class_name == 'GroupedQueryAttention':
    timescales = settings.read('rope_min_max_timescales')
    if timescales is not None and timescales[0] != 1:
      settings.refuse('the shortest timescale of rotary positions is 1 here', 'rope_min_max_timescales')
    rotary = None if timescales is None else Rotary(max_wavelength=float(timescales[1]))
    return rotary, False, head_dim**-0.5 / settings.read('atten_temp')
  settings.ignore('rotary_position_emb_tpl')
  rotary = None
  if settings.read('use_rotary_position_emb'):
    positions = settings.child('rotary_position_emb_tpl')
    if positions is None or positions.class_name != 'RotaryPositionalEmbedding':
      raise Untranslatable(positions or settings)
    positions.ignore('embedding_dims', 'cast_as_fprop_dtype')
    rotary = Rotary(max_wavelength=float(positions.read('max_timescale')))
  is_scaled, per_dim_scale = settings.read('internal_enable_query_scale'), False
  if settings.class_name == 'MultiQueryDotProductAttention':
    is_scaled = True  # whatever its setting says
  else:
    settings.ignore('per_dim_scale_tpl')
    per_dim_scale = settings.read('internal_enable_per_dim_scale') and is_scaled
  scale = (head_dim if per_dim_scale else model_dim // num_heads) ** -0.5 if is_scaled else 1.0
  return rotary, per_dim_scale, scale


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
    linear.ignore('has_bias', 'activation_tpl', 'input_dims', 'output_dims', 'bias_init', 'checkpoint_str')
  layer = (GatedFeedForward if is_gated else FeedForward)(
    hidden_dim=hidden_dim,
    activation=translate_activation(settings.child('activation_tpl')),
    use_bias=use_bias,
    dtype=context.dtype,
  )
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
