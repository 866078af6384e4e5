"""Keys of a config.json that map to several fields of the Decoder, or depend on other keys.

These are experts, latent attention, rotary positions, and keys of Gemma, Phi and T5 alone. Rotary positions are
`rope_parameters` since transformers 5, and were `rope_theta` and `rope_scaling` before. Both are read; the new form is
written. Gemma 3 has one dict per type of layer; in the old form, it has `rope_local_base_freq` for windowed layers.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any, Literal

from absl import logging

from spmd_tasks.bridges.huggingface._config_keys import (
  ACTIVATIONS,
  MAX_LAYERS,
  Config,
  Entry,
  FixedKey,
  Key,
  PerLayer,
  Values,
  is_neutral,
  read_list,
)
from spmd_tasks.bridges.huggingface._decoder import Decoder
from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention import (
  LinearScaling,
  Llama3Scaling,
  LongRopeScaling,
  Rotary,
  RotaryScaling,
  YarnScaling,
)
from spmd_tasks.layers.attention.rotary_scaling import ProportionalScaling
from spmd_tasks.layers.attention.temperature import Temperature

_UNBOUNDED = 2**31 - 1  # `expert_capacity` of Switch with dropless routing
NORMALIZE_GATES = {True: 1.0, False: None}  # `norm_topk_prob` -> `normalize_gates`


def experts(
  num_experts: Key,
  num_selected: int,
  hidden_dim: tuple[str, int],
  normalized_key: str | None = 'norm_topk_prob',
  *,
  is_normalized: bool = False,
) -> tuple[Entry, ...]:
  """Returns the keys of Mixtral, Qwen-MoE and OLMoE, which have experts in every layer and no shared experts.

  Args:
    num_experts: the key of E.
    num_selected: the family's default of `num_experts_per_tok`.
    hidden_dim: the name of the key of F, and its default.
    normalized_key: the name of the key that says whether gates are divided by their sum; None if they always are.
    is_normalized: the family's default of that key.
  """
  normalized = normalized_key and Key(
    normalized_key, 'mixture.routing.normalize_gates', bool, is_normalized, names=NORMALIZE_GATES
  )
  return (
    num_experts,
    Key('num_experts_per_tok', 'mixture.routing.num_selected', int, num_selected),
    Key(hidden_dim[0], 'mixture.hidden_dim', int, hidden_dim[1]),
    *([normalized] if normalized else []),
  )


def num_experts_key(key: str, default: int, *aliases: str) -> Key:
  """Returns the key of E."""
  return Key(key, 'mixture.routing.num_experts', int, default, aliases=aliases)


# Fixed settings of DeepSeek-V3 and GLM-4-MoE.
SIGMOID_ROUTING = {
  'mixture.routing.score_function': 'sigmoid',
  'mixture.routing.balance_bias': True,
  'mixture.routing.group_score': 'top2_sum',
}


def shared_experts(
  num_experts: int,
  num_selected: int | None,
  num_shared: int,
  hidden_dim: int,
  mixed: PerLayer,
  gate_scale: float,
  groups: tuple[int | None, int | None],
  *,
  is_sigmoid: bool,
  is_normalized: bool = True,
) -> tuple[Entry, ...]:
  """Returns the keys of DeepSeek, GLM-4-MoE and dots1, which have shared experts, and dense and mixed layers.

  The arguments are the family's defaults; `groups` are the defaults of `n_group` and `topk_group`, `is_normalized` is
  the default of `norm_topk_prob`. `mixed` says which layers have experts. Without `is_sigmoid`, the router has a
  softmax (DeepSeek-V2), and transformers ignores `norm_topk_prob`.
  """
  normalized = Key('norm_topk_prob', 'mixture.routing.normalize_gates', bool, is_normalized, names=NORMALIZE_GATES)
  return (
    num_experts_key('n_routed_experts', num_experts, 'num_local_experts'),
    Key('num_experts_per_tok', 'mixture.routing.num_selected', int, num_selected),
    Key('moe_intermediate_size', 'mixture.hidden_dim', int, hidden_dim),
    Key('routed_scaling_factor', 'mixture.routing.gate_scale', float, gate_scale),
    FixedKey('scoring_func', 'sigmoid', ('noaux_tc',)) if is_sigmoid else FixedKey('scoring_func', 'softmax'),
    FixedKey('moe_layer_freq', 1),
    normalized if is_sigmoid else FixedKey('norm_topk_prob', False),
    ExpertGroups(*groups, ('noaux_tc',) if is_sigmoid else ('greedy', 'group_limited_greedy')),
    SharedExperts('n_shared_experts', num_shared),
    mixed,
  )


@dataclasses.dataclass(frozen=True)
class ExpertGroups:
  """`n_group`, `topk_group` and `topk_method`; the attributes are the family's defaults and supported methods.

  `key` is another name of `n_group`.
  """

  num_groups: int | None
  num_selected: int | None
  methods: tuple[str, ...]
  key: str = 'n_group'

  def read(self, config: Config, known: Values) -> Values:
    num_groups = config.read('n_group', int, config.read(self.key, int, self.num_groups)) or 1
    num_selected = config.read('topk_group', int, self.num_selected)
    method = config.read('topk_method', str, self.methods[0])
    if method not in self.methods:
      raise config.error('topk_method', f'must be {" or ".join(self.methods)}')
    if num_groups == 1 or method == 'greedy':
      num_groups, num_selected = 1, None
    return {'mixture.routing.num_groups': num_groups, 'mixture.routing.num_selected_groups': num_selected}

  def write(self, decoder: Decoder) -> Values:
    assert decoder.mixture is not None  # the keys before this one require it
    routing = decoder.mixture.routing
    method = self.methods[0 if routing.num_selected_groups is None else -1]
    return {self.key: routing.num_groups, 'topk_group': routing.num_selected_groups or 1, 'topk_method': method}


def first_dense(default: int) -> PerLayer:
  """Returns the key `first_k_dense_replace`, the number of layers without experts, which are the first."""
  read = lambda config: config.read('first_k_dense_replace', int, default)
  return PerLayer(
    'mixed',
    lambda config, num_layers: [layer >= read(config) for layer in range(num_layers)],
    lambda mixed: {'first_k_dense_replace': mixed.index(True)},
  )


@dataclasses.dataclass(frozen=True)
class NextnHeads:
  """The number of multi-token prediction heads; many folders lack their tensors, so Folder counts them.

  Attributes:
    key: the key.
    most: how many heads can be read; of more, none are. Several heads of Qwen share one projection, ours do not.
    has_key: whether all folders with heads have the key; without it, there are as many as have tensors.
  """

  key: str = 'num_nextn_predict_layers'
  most: int = MAX_LAYERS
  has_key: bool = True

  def read(self, config: Config, known: Values) -> Values:
    num = config.read(self.key, int, 0)
    if not 0 <= num <= MAX_LAYERS:
      raise config.error(self.key, f'must be from 0 to {MAX_LAYERS}')
    return {'num_nextn': num if num <= self.most else 0}

  def write(self, decoder: Decoder) -> Values:
    if decoder.num_nextn > self.most:
      raise UserError(f'the model has {decoder.num_nextn} multi-token prediction heads, and this family {self.most}.')
    return {self.key: decoder.num_nextn} if self.has_key or decoder.num_nextn else {}


def latent_keys(query_rank: int | None, kv_rank: int, nope: int, rope: int, value: int) -> tuple[Entry, ...]:
  """Returns the keys of DeepSeek's latent attention; the arguments are the family's defaults."""
  return (
    Key('q_lora_rank', 'latent.query_rank', int, query_rank, nullable=True),
    Key('kv_lora_rank', 'latent.kv_rank', int, kv_rank),
    Key('qk_nope_head_dim', 'latent.nope_head_dim', int, nope),
    Key('qk_rope_head_dim', 'latent.rope_head_dim', int, rope),
    Key('v_head_dim', 'latent.value_head_dim', int, value),
    LatentHeads(),
  )


class LatentHeads:
  """`head_dim` and `qk_head_dim`, which follow from other keys."""

  def read(self, config: Config, known: Values) -> Values:
    config.expect('head_dim', known['latent.rope_head_dim'])
    config.expect('qk_head_dim', known['latent.nope_head_dim'] + known['latent.rope_head_dim'])
    return {}

  def write(self, decoder: Decoder) -> Values:
    return {'head_dim': decoder.latent.rope_head_dim} if decoder.latent else {}


class Llama4Temperature:
  """`attn_temperature_tuning`, `floor_scale` and `attn_scale` of Llama 4, which apply to layers without rotation."""

  def read(self, config: Config, known: Values) -> Values:
    is_used = config.read('attn_temperature_tuning', (bool, int), True)
    length, scale = config.read('floor_scale', int, 8192), config.read('attn_scale', float, 0.1)
    is_used = bool(is_used) and any(known['unrotated'])
    return {'temperature': Temperature(scale=scale, length=length, offset=1) if is_used else None}

  def write(self, decoder: Decoder) -> Values:
    temperature = decoder.temperature
    if temperature is None:
      return {'attn_temperature_tuning': False}
    return {'attn_temperature_tuning': True, 'floor_scale': temperature.length, 'attn_scale': temperature.scale}


def no_rope_layers(interval: int = 4) -> PerLayer:
  """Returns the keys `no_rope_layers` and `no_rope_layer_interval`: 0 and every n-th layer have no rotary positions."""

  def read_flags(config: Config, num_layers: int) -> list[bool]:
    step = config.read('no_rope_layer_interval', int, interval)
    rotates = read_list(config, 'no_rope_layers', int, num_layers) if config.values.get('no_rope_layers') else None
    if rotates is None and step < 1:
      raise config.error('no_rope_layer_interval', 'must be at least 1')
    return [(layer + 1) % step == 0 if rotates is None else not rotates[layer] for layer in range(num_layers)]

  return PerLayer('unrotated', read_flags, lambda flags: {'no_rope_layers': [int(not flag) for flag in flags]})


@dataclasses.dataclass(frozen=True)
class FullUnrotated:
  """Layers without a window have no rotary positions; with `needs_window`, only if `sliding_window` is not null."""

  needs_window: bool = False

  def read(self, config: Config, known: Values) -> Values:
    if self.needs_window and config.is_null('sliding_window'):
      return {}
    return {'unrotated': tuple(not is_windowed for is_windowed in known['windowed'])}

  def write(self, decoder: Decoder) -> Values:
    return {}


def sparse_step() -> PerLayer:
  """Returns the keys `decoder_sparse_step` and `mlp_only_layers` of Qwen-MoE, which say which layers have experts."""

  def read_flags(config: Config, num_layers: int) -> list[bool]:
    step, dense = config.read('decoder_sparse_step', int, 1), config.read('mlp_only_layers', list, [])
    if step < 1:
      raise config.error('decoder_sparse_step', 'must be at least 1')
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)]

  return PerLayer(
    'mixed', read_flags, lambda mixed: {'decoder_sparse_step': 1, 'mlp_only_layers': _places(mixed, False)}
  )


def _places(flags: Sequence[bool], flag: bool) -> list[int]:
  return [place for place, value in enumerate(flags) if value == flag]


def llama4_layers() -> PerLayer:
  """Returns the keys `moe_layers` and `interleave_moe_layer_step` of Llama 4, which say which layers have experts."""

  def read_flags(config: Config, num_layers: int) -> list[bool]:
    step, layers = config.read('interleave_moe_layer_step', int, 1), config.read('moe_layers', list, None)
    if layers is None and step < 1:
      raise config.error('interleave_moe_layer_step', 'must be at least 1')
    return [(layer + 1) % step == 0 if layers is None else layer in layers for layer in range(num_layers)]

  return PerLayer('mixed', read_flags, lambda mixed: {'moe_layers': _places(mixed, True)})


def ernie_layers() -> PerLayer:
  """Returns the keys `moe_layer_*_index` and `moe_layer_interval` of ERNIE, which say which layers have experts."""

  def flags_of(num_layers: int, first: int, last: int, interval: int) -> tuple[bool, ...]:
    return tuple((layer + 1) % interval == 0 and first <= layer <= last for layer in range(num_layers))

  def read_flags(config: Config, num_layers: int) -> tuple[bool, ...]:
    first, last = config.read('moe_layer_start_index', int, 1), config.read('moe_layer_end_index', int, -1)
    interval = config.read('moe_layer_interval', int, 1)
    if interval < 1:
      raise config.error('moe_layer_interval', 'must be at least 1')
    return flags_of(num_layers, first, num_layers - 1 if last == -1 else last, interval)

  def write_flags(mixed: tuple[bool, ...]) -> Values:
    places = _places(mixed, True)
    intervals = (n for n in range(1, len(mixed) + 1) if flags_of(len(mixed), places[0], places[-1], n) == mixed)
    interval = next(intervals, 1)  # if there is none, the caller notices the difference
    return {
      'moe_layer_start_index': places[0],
      'moe_layer_end_index': places[-1],
      'moe_layer_interval': interval,
    }

  return PerLayer('mixed', read_flags, write_flags)


def mlp_layer_types(num_dense: int = 1, *, has_number: bool = False) -> PerLayer:
  """Returns the key `mlp_layer_types` of GLM-4-MoE-Lite, Mellum and EXAONE-MoE.

  By default, the first `num_dense` layers are dense, or as many as `first_k_dense_replace` says, if it `has_number`.
  """
  names = {False: 'dense', True: 'sparse'}

  def read_flags(config: Config, num_layers: int) -> list[bool]:
    types = read_list(config, 'mlp_layer_types', str, num_layers)
    num = config.read('first_k_dense_replace', int, num_dense) if has_number else num_dense
    if types is None:
      return [layer >= num for layer in range(num_layers)]
    if set(types) - {*names.values()}:
      raise config.error('mlp_layer_types', "must name 'dense' or 'sparse' layers")
    return [kind == 'sparse' for kind in types]

  return PerLayer('mixed', read_flags, lambda mixed: {'mlp_layer_types': [names[flag] for flag in mixed]})


@dataclasses.dataclass(frozen=True)
class SharedExperts:
  """The number of shared experts, each with an expert's `hidden_dim`, under a key with this default; 0 for none."""

  key: str
  default: int

  def read(self, config: Config, known: Values) -> Values:
    return {'mixture.shared_dim': known['mixture.hidden_dim'] * config.read(self.key, int, self.default) or None}

  def write(self, decoder: Decoder) -> Values:
    return {self.key: num_shared_experts(decoder)}


def num_shared_experts(decoder: Decoder) -> int:
  """Returns the number of shared experts. Raises a UserError if they do not have the `hidden_dim` of experts."""
  mixture = decoder.mixture
  if mixture is None or (mixture.shared_dim or 0) % mixture.hidden_dim:
    raise UserError("the model has no shared experts of a multiple of an expert's `hidden_dim`.")
  return (mixture.shared_dim or 0) // mixture.hidden_dim


@dataclasses.dataclass(frozen=True)
class SharedDim:
  """The size of the one shared expert, under a key with this default; 0 for none."""

  key: str
  default: int

  def read(self, config: Config, known: Values) -> Values:
    return {'mixture.shared_dim': config.read(self.key, int, self.default) or None}

  def write(self, decoder: Decoder) -> Values:
    return {self.key: (decoder.mixture and decoder.mixture.shared_dim) or 0}


@dataclasses.dataclass(frozen=True)
class EqualInLayers:
  """A key that may be a list with a value per layer, which must be equal."""

  key: Key

  def read(self, config: Config, known: Values) -> Values:
    value = config.values.get(self.key.key)
    if not isinstance(value, list):
      return self.key.read(config, known)
    if len(set(map(repr, value))) != 1:
      raise config.error(self.key.key, 'must have one value for all layers; others are not supported')
    read = self.key.read(Config({**config.values, self.key.key: value[0]}, config.path), known)
    config.keys_read.update((self.key.key, *self.key.aliases))
    return read

  def write(self, decoder: Decoder) -> Values:
    return self.key.write(decoder)


def delta_net_keys(num_heads: Any, num_key_heads: Any, key_head_dim: Any, value_head_dim: Any) -> tuple[Entry, ...]:
  """Returns the keys of the recurrent layers of hybrids, and which layers these are.

  The arguments are the family's defaults, or functions that compute them from the known fields.
  """
  return (
    Key('linear_num_value_heads', 'delta_net.num_heads', int, num_heads, null=_computed(num_heads)),
    Key('linear_num_key_heads', 'delta_net.num_key_heads', int, num_key_heads, null=_computed(num_key_heads)),
    Key('linear_key_head_dim', 'delta_net.key_head_dim', int, key_head_dim, null=_computed(key_head_dim)),
    Key('linear_value_head_dim', 'delta_net.value_head_dim', int, value_head_dim, null=_computed(value_head_dim)),
    Key('linear_conv_kernel_dim', 'delta_net.conv_size', int, 4),
    recurrent_layers(),
  )


def _computed(default: Any) -> Callable[[Values], Any] | None:
  return default if callable(default) else None


def recurrent_layers() -> PerLayer:
  """Returns the keys `layer_types` and `full_attention_interval` of hybrids, which say which layers are recurrent."""
  kinds = {'linear_attention': True, 'full_attention': False}

  def read_flags(config: Config, num_layers: int) -> list[bool]:
    interval = config.read('full_attention_interval', int, 4)
    types = read_list(config, 'layer_types', str, num_layers)
    flags = [interval == 0 or (i + 1) % interval != 0 for i in range(num_layers)]
    if types is not None and not set(types) - kinds.keys():
      flags = [kinds[kind] for kind in types]
    elif types is not None:
      raise config.error('layer_types', "must name 'linear_attention' or 'full_attention' for each layer")
    if all(flags):
      raise config.error('layer_types', 'must have a layer with full attention, as in all models of its family')
    return flags

  types = {flag: kind for kind, flag in kinds.items()}
  return PerLayer('recurrent', read_flags, lambda flags: {'layer_types': [types[flag] for flag in flags]})


class KimiLinearLayers:
  """The sizes of Kimi Delta Attention, and which layers have it, in `linear_attn_config` or in keys of transformers."""

  # Key of transformers -> field, key in `linear_attn_config`, default.
  _SIZES = {
    'linear_num_heads': (('num_heads', 'num_key_heads'), 'num_heads', 32),
    'linear_head_dim': (('key_head_dim', 'value_head_dim', 'gate_rank'), 'head_dim', 128),
    'linear_conv_kernel_dim': (('conv_size',), 'short_conv_kernel_size', 4),
  }
  _KINDS = {'full_attention': False, 'linear_attention': True}
  _LISTS = {'full_attn_layers': False, 'kda_layers': True}

  def read(self, config: Config, known: Values) -> Values:
    published = config.read('linear_attn_config', dict, {})
    if published.keys() - self._LISTS.keys() - {key for _, key, _ in self._SIZES.values()}:
      raise config.error('linear_attn_config', 'must have sizes and lists of layers alone')
    values: Values = {}
    for key, (fields, published_key, default) in self._SIZES.items():
      size = published.get(published_key, config.read(key, int, default))
      if type(size) is not int or size < 1:
        raise config.error('linear_attn_config', f'must have a positive number as its {published_key}')
      values |= dict.fromkeys((f'delta_net.{field}' for field in fields), size)
    num_layers = known['num_layers']
    types = read_list(config, 'layer_types', str, num_layers)
    if types is None and self._LISTS.keys() <= published.keys():
      flags = {layer: flag for key, flag in self._LISTS.items() for layer in published[key]}
      if sorted(layer for key in self._LISTS for layer in published[key]) != [*range(1, num_layers + 1)]:
        raise config.error('linear_attn_config', 'must list each layer, from 1 on, once')
      return values | {'recurrent': tuple(flags[layer] for layer in range(1, num_layers + 1))}
    if types is not None and set(types) - self._KINDS.keys():
      raise config.error('layer_types', f'must name {" or ".join(self._KINDS)} for each layer')
    if types is None:
      return values | {'recurrent': tuple(layer % 4 != 0 or layer == 0 for layer in range(num_layers))}
    return values | {'recurrent': tuple(self._KINDS[kind] for kind in types)}

  def write(self, decoder: Decoder) -> Values:
    if decoder.delta_net is None:
      raise UserError('the model has no recurrent layers.')
    sizes = {key: getattr(decoder.delta_net, fields[0]) for key, (fields, _, _) in self._SIZES.items()}
    names = {flag: kind for kind, flag in self._KINDS.items()}
    return sizes | {'layer_types': [names[flag] for flag in decoder.recurrent]}


class GraniteLayers:
  """`layer_types` of Granite 4: all layers must have attention."""

  def read(self, config: Config, known: Values) -> Values:
    key = 'layer_types' if config.has('layer_types') or not config.has('layers_block_type') else 'layers_block_type'
    types = config.read(key, list, ['linear_attention'])
    if others := sorted({*map(str, types)} - {'attention', 'full_attention'}):
      raise UserError(
        f'{config.path} has layers of the kind {others[0]!r} in {key}, which are the layer Mamba-2, a state-space '
        'model that is not supported: use a folder whose layers all have attention, such as granite-4.0-micro.'
      )
    return {}

  def write(self, decoder: Decoder) -> Values:
    unused = {'mamba_n_heads': 1, 'mamba_d_head': 'auto'}  # transformers checks them without such layers too
    return {'layer_types': ['attention'] * decoder.num_layers, **unused}


class Granite4Rope:
  """`position_embedding_type` of Granite 4: with 'rope', the keys of rotary positions; otherwise no positions."""

  def read(self, config: Config, known: Values) -> Values:
    values = Rope().read(config, known)
    return values if config.read('position_embedding_type', str, None) == 'rope' else {'rotary': None}

  def write(self, decoder: Decoder) -> Values:
    if decoder.rotary is None:
      return {'position_embedding_type': None}
    return {'position_embedding_type': 'rope', **Rope().write(decoder)}


class OptionalRope:
  """`rope_parameters` of OLMo Hybrid: no rotary positions if their type or base is null."""

  def read(self, config: Config, known: Values) -> Values:
    parameters = config.read('rope_parameters', dict, {})
    if config.is_null('rope_parameters'):
      raise config.error(
        'rope_parameters',
        "must name its base: of transformers' versions, some read null as no positions and others as rotary positions. "
        'Write {"rope_theta": null, "rope_type": "default"} for none',
      )
    if None in (parameters.get('rope_type', ''), parameters.get('rope_theta', '')):
      return {'rotary': None}
    return Rope().read(config, known)

  def write(self, decoder: Decoder) -> Values:
    if decoder.rotary is None:
      return {'rope_parameters': {'rope_type': 'default', 'rope_theta': None}}
    return Rope().write(decoder)


class GraniteExperts:
  """The experts of Granite 4; with `num_local_experts` 0 the shared expert is a dense layer's network."""

  _EXPERTS = (
    num_experts_key('num_local_experts', 8),
    Key('num_experts_per_tok', 'mixture.routing.num_selected', int, 2),
    Key('intermediate_size', 'mixture.hidden_dim', int, 11_008),
  )

  def read(self, config: Config, known: Values) -> Values:
    shared_dim = config.read('shared_intermediate_size', int, 1024)
    if config.read('num_local_experts', int, 8) == 0:
      config.keys_read.update(('num_experts_per_tok', 'intermediate_size'))
      return {'hidden_dim': shared_dim}
    values: Values = {'mixture.shared_dim': shared_dim}
    for entry in self._EXPERTS:
      values |= entry.read(config, known)
    return values

  def write(self, decoder: Decoder) -> Values:
    if decoder.mixture is None:
      return {'num_local_experts': 0, 'num_experts_per_tok': 0, 'shared_intermediate_size': decoder.hidden_dim}
    written: Values = {'shared_intermediate_size': decoder.mixture.shared_dim}
    for entry in self._EXPERTS:
      written |= entry.write(decoder)
    return written


class PhiGates:
  """`router_jitter_noise` of Phi-MoE, which also affects the gates outside of training."""

  def read(self, config: Config, known: Values) -> Values:
    config.read('input_jitter_noise', float, 0.0)
    margin = 2 * config.read('router_jitter_noise', float, 0.01)
    return {'mixture.routing.gate_margin': margin, 'mixture.routing.normalize_gates': None}

  def write(self, decoder: Decoder) -> Values:
    if decoder.mixture is None or decoder.mixture.routing.gate_margin is None:
      raise UserError('the router has no gate_margin, which this family requires.')
    return {'router_jitter_noise': decoder.mixture.routing.gate_margin / 2}


class Gemma4Layers:
  """What differs in the layers without a window of Gemma 4, of which the last layer is always one.

  It is `global_head_dim` and `num_global_key_value_heads` in published folders, and `per_layer_config` in those that
  transformers writes.
  """

  _SIZES = {'head_dim': 'full_head_dim', 'num_key_value_heads': 'full_kv_heads'}

  def read(self, config: Config, known: Values) -> Values:
    windowed = (*known['windowed'][:-1], False)
    full = {layer for layer, is_windowed in enumerate(windowed) if not is_windowed}
    shares = config.read('attention_k_eq_v', bool, False)
    sizes: Mapping[str, Any] = {'head_dim': config.read('global_head_dim', int, 512)}
    if (num_heads := config.read('num_global_key_value_heads', int, None)) and shares:
      sizes = {**sizes, 'num_key_value_heads': num_heads}
    if per_layer := config.read('per_layer_config', dict, {}):
      sizes = next(iter(per_layer.values()))
      if {*map(int, per_layer)} != full or any(other != sizes for other in per_layer.values()):
        raise config.error('per_layer_config', 'must have the same settings for all layers of full attention alone')
      if sizes.keys() - self._SIZES.keys():
        raise config.error('per_layer_config', f'must set {" and ".join(self._SIZES)} alone')
    if any(type(size) is not int or size < 1 for size in sizes.values()):
      raise UserError(f'{config.path} has {sizes} for layers of full attention, which must be positive numbers.')
    window = known['window'] if any(windowed) else None
    values: Values = {'windowed': windowed, 'window': window, 'values_from_keys': shares}
    return values | {self._SIZES[key]: size for key, size in sizes.items()}

  def write(self, decoder: Decoder) -> Values:
    if decoder.windowed[-1]:
      raise UserError('the last layer has a window, which this family does not have there.')
    sizes = {key: getattr(decoder, field) for key, field in self._SIZES.items()}
    width = len(str(decoder.num_layers - 1))  # transformers writes '05' beside '11'
    full = [str(layer).zfill(width) for layer, is_windowed in enumerate(decoder.windowed) if not is_windowed]
    return {'attention_k_eq_v': decoder.values_from_keys, 'per_layer_config': dict.fromkeys(full, sizes)}


class Gemma4Experts:
  """The experts of Gemma 4, beside the network of a dense layer, which is read as the shared expert."""

  _EXPERTS = (
    Key('num_experts', 'mixture.routing.num_experts', int),
    Key('top_k_experts', 'mixture.routing.num_selected', int),
    Key('moe_intermediate_size', 'mixture.hidden_dim', int),
  )

  def read(self, config: Config, known: Values) -> Values:
    if not config.read('enable_moe_block', bool, False):
      config.keys_read.update(entry.key for entry in self._EXPERTS)
      return {}
    values: Values = {'mixture.shared_dim': known['hidden_dim'], 'mixture.branch_norms': True}
    values['mixture.routing.expert_scales'] = True
    for entry in self._EXPERTS:
      values |= entry.read(config, known)
    return values

  def write(self, decoder: Decoder) -> Values:
    if decoder.mixture is None:
      return {'enable_moe_block': False}
    written: Values = {'enable_moe_block': True, 'intermediate_size': decoder.mixture.shared_dim}
    for entry in self._EXPERTS:
      written |= entry.write(decoder)
    return written


def activation_sparsity() -> PerLayer:
  """Returns the key `activation_sparsity_pattern` of Gemma 3n, one number per layer."""

  def read(config: Config, num_layers: int) -> list[float]:
    key = 'activation_sparsity_pattern'
    default = [0.95 * (num_layers > 10 and layer < 10) for layer in range(num_layers)]
    values = config.read(key, list, default)
    if len(values) < num_layers or not all(type(x) in (int, float) and 0 <= x < 1 for x in values):
      raise config.error(key, f'must be {num_layers} numbers from 0 to 1')
    return values[:num_layers]

  return PerLayer('sparsity', read, lambda values: {'activation_sparsity_pattern': [*values]}, kind=float)


@dataclasses.dataclass(frozen=True)
class SharedKv:
  """`num_kv_shared_layers` of Gemma 3n and 4, with its default."""

  default: int = 0

  def read(self, config: Config, known: Values) -> Values:
    num = config.read('num_kv_shared_layers', int, self.default)
    first, windowed = known['num_layers'] - num, known['windowed']
    if not 0 <= num < known['num_layers'] or not {*windowed[first:]} <= {*windowed[:first]}:
      raise config.error(
        'num_kv_shared_layers', 'must leave a layer of each type whose keys and values the last ones read'
      )
    return {'num_kv_shared': num}

  def write(self, decoder: Decoder) -> Values:
    return {'num_kv_shared_layers': decoder.num_kv_shared}


class Gemma4SharedKv(SharedKv):
  """Also `use_double_wide_mlp`, which doubles `intermediate_size` of the layers that share keys and values."""

  def read(self, config: Config, known: Values) -> Values:
    values, is_wide = super().read(config, known), config.read('use_double_wide_mlp', bool, False)
    if values['num_kv_shared'] and is_wide and 'mixture.shared_dim' in known:
      raise config.error('use_double_wide_mlp', 'is not supported with experts')
    return values | {'shared_hidden_dim': known['hidden_dim'] * (1 + is_wide)}

  def write(self, decoder: Decoder) -> Values:
    is_wide = decoder.shared_hidden_dim == 2 * decoder.hidden_dim
    return super().write(decoder) | {'use_double_wide_mlp': is_wide}


class LayerEmbeddingKeys:
  """`hidden_size_per_layer_input` and `vocab_size_per_layer_input`: the sizes of embeddings per layer; 0 for none."""

  def read(self, config: Config, known: Values) -> Values:
    dim, key = config.read('hidden_size_per_layer_input', int, 256), 'vocab_size_per_layer_input'
    if dim < 0:
      raise config.error('hidden_size_per_layer_input', 'must not be negative')
    return {'layer_dim': dim, 'layer_vocab_size': config.read(key, int, 262_144)}

  def write(self, decoder: Decoder) -> Values:
    if not decoder.layer_dim:
      return {'hidden_size_per_layer_input': 0}
    sizes = {'vocab_size_per_layer_input': decoder.layer_vocab_size}
    return {'hidden_size_per_layer_input': decoder.layer_dim, **sizes}


class QueryScale:
  """`query_pre_attn_scalar`: attention logits are divided by its square root."""

  def read(self, config: Config, known: Values) -> Values:
    return {'softmax_scale': config.read('query_pre_attn_scalar', float, 256.0) ** -0.5}

  def write(self, decoder: Decoder) -> Values:
    scale = decoder.head_dim**-0.5 if decoder.softmax_scale is None else decoder.softmax_scale
    number = scale**-2
    return {'query_pre_attn_scalar': round(number) if abs(number - round(number)) < 1e-9 * number else number}


class OriginalLength:
  """Phi-3's `original_max_position_embeddings`, which `Rope` reads."""

  def read(self, config: Config, known: Values) -> Values:
    return {}

  def write(self, decoder: Decoder) -> Values:
    scaling = None if decoder.rotary is None else decoder.rotary.scaling
    return {'original_max_position_embeddings': getattr(scaling, 'original_length', 4096)}


# `feed_forward_proj` -> (activation, gated).
_T5_ACTIVATIONS = {
  **{name: (ours, False) for name, ours in ACTIVATIONS.items()},
  **{f'gated-{name}': (ours, True) for name, ours in ACTIVATIONS.items() if name != 'gelu'},
  'gated-gelu': ('gelu', True),  # unlike `gelu` elsewhere in transformers, the tanh approximation
}


@dataclasses.dataclass(frozen=True)
class T5FeedForward:
  """`feed_forward_proj` of T5's families; `dense_act_fn` and `is_gated_act` must agree with it."""

  default: str

  def read(self, config: Config, known: Values) -> Values:
    name = config.read('feed_forward_proj', str, self.default)
    if name not in _T5_ACTIVATIONS:
      raise config.error('feed_forward_proj', f'must be one of {", ".join(_T5_ACTIVATIONS)}')
    activation, gated = _T5_ACTIVATIONS[name]
    for key, is_same in (
      ('dense_act_fn', ACTIVATIONS.get(config.read('dense_act_fn', str, name.split('-')[-1])) == activation),
      ('is_gated_act', config.read('is_gated_act', bool, gated) == gated),
    ):
      if not is_same and config.has(key):
        raise config.error(key, f'must agree with feed_forward_proj = {name!r}')
    return {'activation': activation, 'gated': gated}

  def write(self, decoder: Decoder) -> Values:
    activation, gated = decoder.activation, decoder.gated
    names = [name for name, setting in _T5_ACTIVATIONS.items() if setting == (activation, gated)]
    if not names:
      raise UserError(f'T5 has no name for the activation {activation!r} {"with" if gated else "without"} a gate.')
    return {'feed_forward_proj': 'gated-gelu' if 'gated-gelu' in names else names[0]}


@dataclasses.dataclass(frozen=True)
class T5Logits:
  """`tie_word_embeddings` and `scale_decoder_outputs`: whether logits are divided by sqrt(D).

  Whether the weights are tied follows from the files (Family.tied_by_files): transformers ties the weights of T5's
  families except Switch unless the files have both tensors.

  Attributes:
    scaled: whether the family divides logits; None if keys of config.json say so.
    has_key: whether `scale_decoder_outputs` is read; its default, and its value without `has_key`, is
      `tie_word_embeddings`.
  """

  scaled: bool | None = None
  has_key: bool = False

  def read(self, config: Config, known: Values) -> Values:
    tied = config.read('tie_word_embeddings', bool, True)
    scaled = tied if self.scaled is None else self.scaled
    if self.has_key:
      scaled = config.read('scale_decoder_outputs', bool, scaled)
    return {'tied': tied, 'scale_logits': scaled}

  def write(self, decoder: Decoder) -> Values:
    if self.has_key:
      return {'tie_word_embeddings': decoder.tied, 'scale_decoder_outputs': decoder.scale_logits}
    return {'tie_word_embeddings': decoder.tied if self.scaled is not None else decoder.scale_logits}


@dataclasses.dataclass(frozen=True)
class SwitchKeys:
  """`num_sparse_*_layers` and `expert_capacity` of Switch, which has experts in every n-th layer of a stack."""

  _SIDES = (('encoder', 'num_encoder_layers', 'encoder_mixed'), ('decoder', 'num_layers', 'mixed'))

  def read(self, config: Config, known: Values) -> Values:
    values: Values = {}
    for side, num_layers, mixed in self._SIDES:
      layers, num_sparse = known[num_layers], config.read(f'num_sparse_{side}_layers', int, 3)
      step = layers // num_sparse if num_sparse > 0 else layers
      config.expect(f'{side}_sparse_step', step)
      values[mixed] = tuple(step == 1 or (step > 0 and layer % step == 1) for layer in range(layers))
    capacity = config.read('expert_capacity', int, 64)
    row_capacity = None if capacity >= _UNBOUNDED else capacity
    return values | {'mixture.hidden_dim': known['hidden_dim'], 'mixture.row_capacity': row_capacity}

  def write(self, decoder: Decoder) -> Values:
    mixture = decoder.mixture
    if mixture is None:
      raise UserError('the model has no experts.')
    return {
      'num_sparse_encoder_layers': sum(decoder.encoder_mixed),
      'num_sparse_decoder_layers': sum(decoder.mixed),
      'expert_capacity': _UNBOUNDED if mixture.row_capacity is None else mixture.row_capacity,
    }


_SCALINGS: dict[str, type[RotaryScaling]] = {
  'linear': LinearScaling,
  'llama3': Llama3Scaling,
  'yarn': YarnScaling,
  'longrope': LongRopeScaling,
  'proportional': ProportionalScaling,
}
_ORIGINAL_LENGTH = 'original_max_position_embeddings'
# Fields of the scalings -> their keys, if the names differ.
_KEYS = {
  'original_length': _ORIGINAL_LENGTH,
  'low_frequency_factor': 'low_freq_factor',
  'high_frequency_factor': 'high_freq_factor',
  'short_factors': 'short_factor',
  'long_factors': 'long_factor',
  'fraction': 'partial_rotary_factor',
}
_REQUIRED = ('low_freq_factor', 'high_freq_factor')  # in transformers; our fields have defaults
_NUMBER = (int, float)
_TYPES: dict[str, Any] = {
  _ORIGINAL_LENGTH: (int,),
  'truncate': (bool,),
  'short_factor': (list,),
  'long_factor': (list,),
}


def _fields(cls: type[RotaryScaling]) -> dict[str, dataclasses.Field[Any]]:
  """Maps the keys of a scaling to its fields."""
  return {_KEYS.get(field.name, field.name): field for field in dataclasses.fields(cls) if field.name != 'is_long'}


@dataclasses.dataclass(frozen=True)
class Rope:
  """The keys of rotary positions.

  Attributes:
    theta: the family's default of `rope_theta`.
    local_theta: its default for windowed layers; None if all layers have the same positions.
    partial: the family's default of `partial_rotary_factor`; None if `transformers` ignores the key and rotates all
      features.
    default: the family's default of `rope_parameters`.
    max_length: the family's default of `max_position_embeddings`.
    variant: what else is special. 'phi3': the original length is a key of its own, and `su` and `yarn` mean `longrope`.
      'phimoe': the amplitude of `longrope` is `short_mscale` and `long_mscale`. 'hunyuan': `dynamic` has a fixed
      `alpha`. 'ministral': `llama_4_scaling_beta` is the scale of a temperature. 'minimax': `rotary_dim` is the number
      of features that rotate. 'mrope': text, image and video have positions of their own, which are equal in texts.
  """

  theta: float = 10_000.0
  local_theta: float | None = None
  partial: float | None = None
  default: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  max_length: int = 131_072
  variant: Literal['phi3', 'phimoe', 'hunyuan', 'ministral', 'minimax', 'mrope'] | None = None

  def read(self, config: Config, known: Values) -> Values:
    parameters = config.read('rope_parameters', dict, {})
    old_parameters = config.read('rope_scaling', dict, {})
    partial = 1.0 if self.partial is None or config.is_null('partial_rotary_factor') else self.partial
    if self.variant == 'minimax' and (num_features := config.read('rotary_dim', int, None)):
      partial = num_features / known['head_dim']
    defaults = {
      'rope_theta': config.read('rope_theta', float, self.theta),
      'partial_rotary_factor': config.read('partial_rotary_factor', float, partial),
    }
    original_length = config.read(_ORIGINAL_LENGTH, int, 4096) if self.variant == 'phi3' else None
    lengths = (original_length, config.read('max_position_embeddings', int, self.max_length))
    head_dim = known.get('latent.rope_head_dim') or known['head_dim']
    if self.local_theta is None:
      if not old_parameters and not config.has('rope_parameters'):
        parameters = self.default
      parameters = old_parameters or parameters
      if self.variant == 'phi3' and (parameters.get('rope_type') or parameters.get('type')) in ('su', 'yarn'):
        parameters = {**parameters, 'rope_type': 'longrope'}
      parameters, temperature = self._standard(defaults | parameters, head_dim, config)
      rotary = read_rotary(parameters, head_dim, lengths, config)
      if self.partial is None and rotary.num_features is not None:
        raise UserError(
          f'{config.path} has a partial_rotary_factor, which transformers ignores in this family: remove the key.'
        )
      return {'rotary': rotary, **temperature}
    if parameters and not {'full_attention', 'sliding_attention'} <= parameters.keys():
      raise config.error('rope_parameters', "must have the keys 'full_attention' and 'sliding_attention'")
    local_defaults = defaults | {'rope_theta': config.read('rope_local_base_freq', float, self.local_theta)}
    full = parameters.get('full_attention') or old_parameters or dict(self.default)
    local = parameters.get('sliding_attention') or {}
    return {
      'rotary': read_rotary(defaults | full, head_dim, lengths, config),
      'local_rotary': read_rotary(local_defaults | local, head_dim, lengths, config),
    }

  def _standard(self, parameters: Values, head_dim: int, config: Config) -> tuple[Values, Values]:
    """Returns the parameters without what is special to the family, and the fields of a temperature."""
    parameters, kind = dict(parameters), parameters.get('rope_type') or parameters.get('type')
    if self.variant == 'mrope':
      for key in ('mrope_section', 'mrope_interleaved'):
        parameters.pop(key, None)
    if self.variant == 'phimoe' and kind == 'longrope':
      short, long = parameters.pop('short_mscale', None), parameters.pop('long_mscale', None)
      if type(short) not in _NUMBER or short != long:
        raise UserError(
          f'{config.path} has rotary positions with short_mscale = {short!r} and long_mscale = {long!r}, which must be '
          'equal numbers; others are not supported.'
        )
      parameters['attention_factor'] = short
    if self.variant == 'hunyuan' and kind == 'dynamic' and (alpha := parameters.get('alpha')):
      if type(alpha) not in _NUMBER or not alpha > 0 or head_dim <= 2:
        raise UserError(f'{config.path} has rotary positions with alpha = {alpha!r}, which must be positive.')
      theta = parameters['rope_theta'] * alpha ** (head_dim / (head_dim - 2))
      parameters = {'rope_theta': theta, 'partial_rotary_factor': parameters['partial_rotary_factor']}
    if self.variant != 'ministral':
      return parameters, {}
    parameters.pop('max_position_embeddings', None)
    beta, length = parameters.pop('llama_4_scaling_beta', None), parameters.get(_ORIGINAL_LENGTH)
    if type(beta) not in _NUMBER or type(length) is not int or length < 1:
      raise UserError(
        f'{config.path} has rotary positions with llama_4_scaling_beta = {beta!r} and {_ORIGINAL_LENGTH} = {length!r}, '
        'which its family requires to be numbers.'
      )
    return parameters, {'temperature': Temperature(scale=float(beta), length=length)}

  def _special(self, decoder: Decoder) -> Values:
    """Returns the parameters that `_standard` removed."""
    scaling = None if decoder.rotary is None else decoder.rotary.scaling
    if self.variant == 'phimoe' and isinstance(scaling, LongRopeScaling):
      return dict.fromkeys(('short_mscale', 'long_mscale'), scaling.amplitude())
    if self.variant == 'ministral':
      if decoder.temperature is None:
        raise UserError('the attention has no temperature, which this family requires.')
      return {'llama_4_scaling_beta': decoder.temperature.scale, _ORIGINAL_LENGTH: decoder.temperature.length}
    return {}

  def write(self, decoder: Decoder) -> Values:
    if self.partial is None and decoder.rotary is not None and decoder.rotary.num_features is not None:
      raise UserError('the rotary positions have num_features, which this family does not support.')
    if self.local_theta is None:
      return {'rope_parameters': write_rotary(decoder.rotary, decoder) | self._special(decoder)}
    return {
      'rope_parameters': {
        'full_attention': write_rotary(decoder.rotary, decoder),
        'sliding_attention': write_rotary(decoder.local_rotary or decoder.rotary, decoder),
      }
    }


def read_rotary(
  parameters: Mapping[str, Any], head_dim: int, lengths: tuple[int | None, int], config: Config
) -> Rotary:
  """Returns the rotary positions that a dict of `rope_parameters` describes.

  Args:
    parameters: the dict.
    head_dim: K, or the size of the rotary part of a head.
    lengths: the original length if it is a key outside of the dict, and the maximum length.
    config: the config, for errors.

  Raises:
    UserError: the type or a setting is not supported.
  """
  values = dict(parameters)
  kind = values.pop('rope_type', None) or values.get('type') or 'default'
  values.pop('type', None)
  theta, partial = values.pop('rope_theta'), values.pop('partial_rotary_factor')
  subject = f'{config.path} has rotary positions'
  if not 0 < theta < float('inf'):
    raise UserError(f'{subject} with rope_theta = {theta!r}, which must be positive and finite.')
  if kind not in ('default', *_SCALINGS):
    raise UserError(f'{subject} of type {kind!r}, which must be one of {", ".join(_SCALINGS)}.')
  if kind == 'proportional':
    values['partial_rotary_factor'], partial = partial, 1.0
  scaling = None if kind == 'default' else _read_scaling(kind, values, lengths, subject)
  if kind == 'default':
    values.pop(_ORIGINAL_LENGTH, None)  # has no effect without a scaling
  ignored = ('finetuned', 'attn_factor')
  if values.get('attn_factor'):
    logging.warning('%s with attn_factor = %s, which transformers ignores, too.', subject, values['attn_factor'])
  if unknown := {key: value for key, value in values.items() if key not in ignored and not is_neutral(value)}:
    raise UserError(f'{subject} of type {kind!r} with the unknown settings {unknown}.')
  num_features = None if int(head_dim * partial) == head_dim else int(head_dim * partial)
  return Rotary(max_wavelength=float(theta), num_features=num_features, scaling=scaling)


def _read_scaling(kind: str, values: dict[str, Any], lengths: tuple[int | None, int], subject: str) -> RotaryScaling:
  """Removes the settings of a scaling from the values, and returns the scaling."""
  fields, (original_length, max_length) = _fields(_SCALINGS[kind]), lengths
  if original_length is not None and _ORIGINAL_LENGTH in fields:
    values[_ORIGINAL_LENGTH] = original_length
  defaults: dict[str, Any] = {_ORIGINAL_LENGTH: max_length, **dict.fromkeys(_REQUIRED, dataclasses.MISSING)}
  if kind in ('yarn', 'longrope'):
    defaults['factor'] = max_length / (values.get(_ORIGINAL_LENGTH) or max_length)
  settings: dict[str, Any] = {}
  for key, field in fields.items():
    value, types = values.pop(key, None), _TYPES.get(key, _NUMBER)
    if value is None:
      value = defaults.get(key, field.default)
    elif type(value) not in types:
      raise UserError(f'{subject} with {key} = {value!r}, which must be of type {types[-1].__name__}.')
    elif types is _NUMBER:
      value = float(value)
    if value is dataclasses.MISSING:
      raise UserError(f'{subject} of type {kind!r} without {key}, which it requires.')
    settings[field.name] = tuple(map(float, value)) if isinstance(value, list) else value
  return _SCALINGS[kind](**settings)


def write_rotary(rotary: Rotary | None, decoder: Decoder) -> dict[str, Any]:
  """Returns the dict of `rope_parameters` that describes rotary positions."""
  if rotary is None:
    raise UserError('the model has no rotary positions.')
  written: dict[str, Any] = {'rope_type': 'default', 'rope_theta': rotary.max_wavelength}
  if rotary.num_features is not None:
    written['partial_rotary_factor'] = rotary.num_features / decoder.head_dim
  if rotary.scaling is not None:
    kind = next((kind for kind, cls in _SCALINGS.items() if type(rotary.scaling) is cls), None)
    if kind is None:
      raise UserError(f'{type(rotary.scaling).__name__} has no name in transformers.')
    values = {key: getattr(rotary.scaling, field.name) for key, field in _fields(_SCALINGS[kind]).items()}
    values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    written |= {'rope_type': kind, **{key: value for key, value in values.items() if value is not None}}
  return written
