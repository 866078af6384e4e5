"""FAMILIES: one table per model family, with its keys of config.json, its tensor names, and its fixed settings.

An absent key has the family's default in transformers 5.23.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
import dataclasses
import re
from typing import Any, Literal

from spmd_tasks.bridges._operations import Reshape, Transpose
from spmd_tasks.bridges._rules import Rule
from spmd_tasks.bridges.huggingface._config_keys import (
  AllWindowed,
  Config,
  DivisorKey,
  Entry,
  FixedKey,
  Key,
  LayerFlag,
  LayerTypes,
  Values,
  activation,
  attention_bias,
)
from spmd_tasks.bridges.huggingface._decoder import Decoder, decoder_of
from spmd_tasks.bridges.huggingface._describe import LayerSlot
from spmd_tasks.bridges.huggingface._quantized import check_quantization
from spmd_tasks.bridges.huggingface._special_keys import (
  NORMALIZE_GATES,
  SIGMOID_ROUTING,
  EqualInLayers,
  ExpertGroups,
  FullUnrotated,
  Gemma4Experts,
  Gemma4Layers,
  Gemma4SharedKv,
  Granite4Rope,
  GraniteExperts,
  GraniteLayers,
  KimiLinearLayers,
  LayerEmbeddingKeys,
  Llama4Temperature,
  NextnHeads,
  OptionalRope,
  OriginalLength,
  PhiGates,
  QueryScale,
  Rope,
  SharedDim,
  SharedExperts,
  SharedKv,
  SwitchKeys,
  T5FeedForward,
  T5Logits,
  activation_sparsity,
  delta_net_keys,
  ernie_layers,
  experts,
  first_dense,
  latent_keys,
  llama4_layers,
  mlp_layer_types,
  no_rope_layers,
  num_experts_key,
  shared_experts,
  sparse_step,
)
from spmd_tasks.bridges.huggingface._tensors import TensorNames, gpt2_rules, granite_rules, llama_rules, t5_rules
from spmd_tasks.errors import UserError

_FUSED_EXPERTS = 'mlp.experts.gate_up_proj', 'mlp.experts.down_proj'
SCORE_HEAD = 'score.weight'  # in every ForSequenceClassification
MakeRules = Callable[[Decoder, Sequence[LayerSlot], TensorNames], Iterator[Rule]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """A model family.

  Attributes:
    architecture: the name of its class in `transformers`.
    old_architectures: former names of the class.
    keys: the settings that vary between models of the family.
    fixed: fields of the Decoder, or of its parts, that are the same for all models of the family.
    names: the names of the tensors.
    make_rules: returns the rules between tensors and weights.
    ignored: patterns of tensor names that are not weights.
    inert: keys of config.json that do not affect what the model computes.
    base: the prefix of all tensor names but the head's, which old files leave out; '' for no prefix.
    constants: tensors of each layer, by name, with a value that is the same in all models.
    table_copies: names of further copies of the embedding table.
    writes_copies: whether exports need the copies if logits are not scaled; `transformers` ties them only if they are.
    other_names: the end of a tensor's name -> fields of `names` that differ in files that have such a tensor.
    modules: parts of tensor names -> how the names of the modules in `transformers` differ there.
    tied_by_files: whether the head is untied if and only if the files have one, whatever config.json says.
  """

  architecture: str
  old_architectures: tuple[str, ...] = ()
  keys: tuple[Entry, ...]
  fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  names: TensorNames = dataclasses.field(default_factory=TensorNames)
  make_rules: MakeRules = llama_rules
  ignored: tuple[str, ...] = (r'.*rotary_emb\.inv_freq',)
  inert: tuple[str, ...] = ()
  base: str = ''
  constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
  table_copies: tuple[str, ...] = ()
  writes_copies: bool = False
  other_names: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
  modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
  tied_by_files: bool = False

  @property
  def architectures(self) -> Mapping[str, int | None]:
    """Maps class names in `transformers` to `num_labels` of the Decoder: None for logits, 1 for scores, 0 headless."""
    others: dict[str, int | None] = dict.fromkeys(self.old_architectures)
    if logits := re.search('(Gemma3)?(ForCausalLM|LMHeadModel)$', self.architecture):
      stem = self.architecture[: logits.start()] + ('Gemma3Text' if logits[1] else '')
      others |= {f'{stem}ForSequenceClassification': 1, f'{stem}Model': 0}
    return {self.architecture: None, **others}

  def of_files(self, names: Collection[str]) -> 'Family':
    """Returns the family with the names that files with these tensors have."""
    fields = [fields for end, fields in self.other_names.items() if any(name.endswith(end) for name in names)]
    return self if not fields else dataclasses.replace(self, names=dataclasses.replace(self.names, **fields[0]))

  def architecture_of(self, decoder: Decoder) -> str:
    """Returns the name of a Decoder's class in `transformers`."""
    kind = decoder.num_labels and 1
    return next(name for name, num_labels in self.architectures.items() if num_labels == kind)

  def read(self, config: Config) -> Decoder:
    """Returns the Decoder that a config.json describes. Raises a UserError that names an unsupported key."""
    values: Values = {}
    for entry in self.keys:
      values |= entry.read(config, values)
    check_quantization(config)
    config.finish(self.inert)
    (architecture,) = config.values.get('architectures') or [self.architecture]
    names = config.values.get('id2label') or range(config.values.get('num_labels') or 2)
    num_labels = self.architectures.get(architecture) and len(names)
    return decoder_of({**values, **self.fixed, 'num_labels': num_labels})

  def write(self, decoder: Decoder) -> Values:
    """Returns the keys of config.json that describe a Decoder.

    Raises a UserError that names a field that this family cannot express.
    """
    written: Values = {'architectures': [self.architecture_of(decoder)]}
    if decoder.num_labels:
      names = [f'LABEL_{i}' for i in range(decoder.num_labels)]
      written |= {'id2label': dict(enumerate(names)), 'label2id': {name: i for i, name in enumerate(names)}}
    for entry in self.keys:
      written |= entry.write(decoder)
    reread = self.read(Config(written, 'the written config.json'))
    for name, value in vars(decoder).items():
      if value != (supported := getattr(reread, name)) and not (name == 'tied' and self.tied_by_files):
        raise UserError(f'{self.architecture} has {name} = {supported!r}, not {value!r}.')
    return written

  def rules(self, decoder: Decoder, layers: Sequence[LayerSlot]) -> tuple[Rule, ...]:
    """Returns the rules from the tensors in files to our weights in the checkpoint layout."""
    head = [Rule(SCORE_HEAD, 'embedding/score_kernel', Transpose((1, 0)))] if decoder.num_labels else []
    return (*self.make_rules(decoder, layers, self.names), *head)

  def full_name(self, name: str, decoder: Decoder) -> str:
    """Returns a tensor's name with the prefix that old files and headless models leave out."""
    base = self.base or ('model.' if decoder.num_labels == 0 else '')
    return name if name.startswith(base) or name in (self.names.head, SCORE_HEAD) else base + name

  def module_name(self, name: str) -> str:
    """Returns the name in `transformers` of the module whose weight has this name in files."""
    for part, other in self.modules.items():
      name = name.replace(part, other)
    return name

  def is_ignored(self, name: str, decoder: Decoder) -> bool:
    """Whether a tensor in a file is not a weight of the model, such as a head that is tied to the table."""
    if decoder.tied and name == self.names.head:
      return True
    names = self.names
    unread = names.key, names.value, names.key_norm, 'self_attn.v_norm'  # in layers that share keys and values
    for layer in range(decoder.num_layers - decoder.num_kv_shared, decoder.num_layers):
      if name in [f'{names.layer.format(layer)}{module}.weight' for module in unread]:
        return True
    return any(re.fullmatch(pattern, name) for pattern in self.ignored)

  def constant_tensors(self, decoder: Decoder) -> dict[str, float]:
    """Returns the names of the tensors that are the same in all models -> their value."""
    layers = [self.names.layer.format(i) for i in range(decoder.num_layers)]
    return {layer + name: value for layer in layers for name, value in self.constants.items()}

  @property
  def nextn(self) -> NextnHeads | None:
    """The key of the multi-token prediction heads that models of the family may have; None if they have none."""
    return next((key for key in self.keys if isinstance(key, NextnHeads)), None)

  def is_unused_nextn(self, name: str, decoder: Decoder) -> bool:
    """Whether a tensor belongs to a multi-token prediction head that the model leaves out; exports copy it."""
    if self.nextn is None:
      return False
    if self.names.nextn_head:
      return decoder.num_nextn == 0 and name.removeprefix('model.').startswith(self.names.nextn_head)
    layer = re.match(re.escape(self.names.layer).replace(r'\{\}', r'(\d+)'), name)
    return layer is not None and int(layer[1]) >= decoder.num_layers + decoder.num_nextn

  def nextn_copies(self, decoder: Decoder) -> dict[str, str]:
    """Returns names of tensors in multi-token prediction heads that may repeat one of the model -> its name."""
    if self.names.nextn_head:
      return {}
    heads = [self.names.nextn_prefixes(decoder, number)[1] for number in range(decoder.num_nextn)]
    tables = {f'{head}embed_tokens.weight': self.names.table for head in heads}
    kernel = self.names.table if decoder.tied else self.names.head
    return tables | {f'{head}shared_head.head.weight': kernel for head in heads}


def _num_heads(known: Values) -> int:
  return known['num_heads']


def _sizes(
  vocab_size: int,
  hidden_size: int,
  intermediate_size: int,
  num_layers: int,
  num_heads: int,
  num_kv_heads: int | None = None,
  head_dim: int | None = None,
  eps: float | None = 1e-6,
  tied: bool = False,
  eps_key: str = 'rms_norm_eps',
) -> tuple[Entry, ...]:
  """Returns the keys that most families share; the arguments are the family's defaults. `eps` None for no key."""
  return (
    Key('vocab_size', 'vocab_size', int, vocab_size),
    Key('hidden_size', 'embed_dim', int, hidden_size),
    Key('intermediate_size', 'hidden_dim', int, intermediate_size),
    Key('num_hidden_layers', 'num_layers', int, num_layers),
    Key('num_attention_heads', 'num_heads', int, num_heads),
    Key('num_key_value_heads', 'num_kv_heads', int, num_kv_heads or _num_heads, null=_num_heads),
    Key('head_dim', 'head_dim', int, head_dim or (lambda known: known['embed_dim'] // known['num_heads'])),
    *([] if eps is None else [Key(eps_key, 'norm_eps', float, eps)]),
    Key('tie_word_embeddings', 'tied', bool, tied),
  )


def _llama(*sizes: Any, rope: Entry = Rope(), act: Entry = activation(), **settings: Any) -> tuple[Entry, ...]:
  """Returns the keys of Llama and similar families."""
  return (*_sizes(*sizes, **settings), act, rope)


def _latent_sizes(*sizes: Any, latent: tuple[int, ...] = (1536, 512, 128, 64, 128), **settings: Any) -> Iterator[Entry]:
  """Yields the keys that all DeepSeek families share; they have no `head_dim`."""
  yield from _without('head_dim', _sizes(*sizes, **settings))
  yield from (*latent_keys(*latent), activation(), Rope(), attention_bias(), FixedKey('mlp_bias', False))


def _without(name: str, keys: tuple[Entry, ...]) -> tuple[Entry, ...]:
  return tuple(entry for entry in keys if getattr(entry, 'key', '') != name)


def _says(**values: Any) -> tuple[FixedKey, ...]:
  """Returns keys of published folders that say what all models of the family have, and that transformers ignores."""
  return tuple(FixedKey(key, None, (value,)) for key, value in values.items())


def _granite(*keys: Entry, rope: Entry = Rope()) -> tuple[Entry, ...]:
  """Returns the keys that all Granite families share, and further keys."""
  return (
    *_llama(32_000, 4096, 11_008, 32, 32, rope=rope),
    attention_bias(),
    Key('embedding_multiplier', 'embedding_multiplier', float, 1.0),
    Key('residual_multiplier', 'residual_multiplier', float, 1.0),
    Key('attention_multiplier', 'softmax_scale', float, 1.0),
    DivisorKey('logits_scaling', 'logits_multiplier'),
    *_says(normalization_function='rmsnorm'),
    *keys,
  )


def _every_but(interval: int) -> LayerFlag:
  """Returns the default of `layer_types`: every `interval`-th layer has no window, or as `sliding_window_pattern` says.

  The pattern may be a number or letters, L for a layer with a window (EXAONE 4).
  """

  def is_windowed(layer: int, config: Config) -> bool:
    pattern = config.read('sliding_window_pattern', (int, str), interval)
    if isinstance(pattern, str):
      return bool(pattern) and pattern[layer % len(pattern)] == 'L'
    return pattern > 0 and (layer + 1) % pattern != 0

  return is_windowed


def _t5(name: str, sizes: tuple[int, int, int, int, int], *keys: Entry, **fixed: Any) -> Family:
  """Returns a family with the structure of T5.

  Args:
    name: the prefix of its classes in `transformers`.
    sizes: the family's defaults (V, D, F, L, H).
    *keys: further keys of the family.
    **fixed: further fixed fields of the Decoder, or `bias_per_layer`.
  """
  vocab_size, embed_dim, hidden_dim, num_layers, num_heads = sizes
  mlp = 'mlp' if name.startswith('Switch') else 'DenseReluDense'
  return Family(
    architecture=f'{name}ForConditionalGeneration',
    old_architectures=(f'{name}WithLMHeadModel',),
    keys=(
      Key('vocab_size', 'vocab_size', int, vocab_size),
      Key('d_model', 'embed_dim', int, embed_dim, aliases=('hidden_size',)),
      Key('d_ff', 'hidden_dim', int, hidden_dim),
      Key('num_layers', 'num_encoder_layers', int, num_layers, aliases=('num_hidden_layers',)),
      Key('num_decoder_layers', 'num_layers', int, lambda known: known['num_encoder_layers']),
      Key('num_heads', 'num_heads', int, num_heads, aliases=('num_attention_heads',)),
      Key('d_kv', 'head_dim', int, 64, aliases=('head_dim',)),
      Key('layer_norm_epsilon', 'norm_eps', float, 1e-6),
      Key('relative_attention_num_buckets', 'num_buckets', int, 32),
      Key('relative_attention_max_distance', 'max_distance', int, 128),
      FixedKey('is_encoder_decoder', True),
      *keys,
    ),
    fixed={'softmax_scale': 1.0, **fixed},
    names=TensorNames(
      table='shared.weight',
      gate=f'{mlp}.wi_0',
      up=f'{mlp}.wi',
      down=f'{mlp}.wo',
      router='mlp.router.classifier',
      expert='mlp.experts.expert_{}.',
      expert_up='wi',
      expert_down='wo',
    ),
    make_rules=t5_rules,
    ignored=(r'decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight',),
    inert=(
      *('n_positions', 'scalable_attention', 'add_router_probs', 'router_ignore_padding_tokens', 'router_type'),
      'batch_prioritized_routing',
    ),
    writes_copies=mlp == 'mlp',
    table_copies=('encoder.embed_tokens.weight', 'decoder.embed_tokens.weight'),
    tied_by_files=True,
  )


def _gemma4(
  architecture: str, sizes: tuple[Entry, ...], *keys: Entry, layers: LayerTypes, rope: Rope, **fixed: Any
) -> Family:
  """Returns a family of Gemma 3n or 4.

  Args:
    architecture: the name of its class in `transformers`.
    sizes: the keys of `_sizes`.
    *keys: keys of the family alone.
    layers, rope: the keys of windows and of rotary positions.
    **fixed: further fixed fields of the Decoder.
  """
  return Family(
    architecture=architecture,
    keys=(
      *sizes,
      activation('hidden_activation', 'gelu_pytorch_tanh'),
      rope,
      layers,
      attention_bias(),
      FixedKey('use_bidirectional_attention', None, (False, 'vision')),
      *keys,
    ),
    fixed={
      **{'scaled_embedding': True, 'post_norm': True, 'qk_norm': 'head', 'value_norm': True, 'softmax_scale': 1.0},
      **fixed,
    },
    # The clip acts only in training, and transformers does not read `query_pre_attn_scalar`.
    inert=('hidden_act', 'altup_coef_clip', 'altup_lr_multiplier', 'query_pre_attn_scalar'),
    names=TensorNames(
      ffn_norm='pre_feedforward_layernorm',
      router='router.proj',
      fused_experts=('experts.gate_up_proj', 'experts.down_proj'),
      expert_layout='transposed',
      shared='mlp.',
    ),
    modules={'.mlp.experts.': '.experts.'},
  )


def _qwen_hybrid(
  architecture: str,
  sizes: tuple[Any, ...],
  *keys: Entry,
  rope: Entry = Rope(partial=0.25, variant='mrope'),
  nextn: NextnHeads = NextnHeads('mtp_num_hidden_layers', most=1),
  layout: Literal['by_key_head', 'fused'] = 'fused',
) -> Family:
  """Returns a family of hybrids of Qwen: recurrent layers and gated attention, with norms of 1 + scale.

  Args:
    architecture: the name of its class in `transformers`.
    sizes: the defaults, see `_sizes`.
    *keys: the keys of experts, and other keys of the family alone.
    rope, nextn: the keys of rotary positions and of multi-token prediction heads.
    layout: of the projections of recurrent layers.
  """
  has_experts = any(getattr(key, 'field', None) == 'mixture.shared_dim' for key in keys)
  fixed: Values = {'qk_norm': 'head', 'norm_plus_one': True, 'output_gate': True}
  return Family(
    architecture=architecture,
    keys=(
      *_sizes(*sizes),
      FixedKey('hidden_act', 'silu'),
      rope,
      attention_bias(),
      *delta_net_keys(32, 16, 128, 128),
      Key('rms_norm_eps', 'delta_net.epsilon', float, 1e-6),
      *keys,
      nextn,
      *_says(attn_output_gate=True, output_gate_type='swish', mtp_use_dedicated_embeddings=False),
    ),
    fixed=fixed | ({'mixture.shared_gate': True} if has_experts else {}),
    names=TensorNames(
      shared='mlp.shared_expert.',
      delta_net=layout,
      nextn_block='mtp.layers.{}.',
      nextn_head='mtp.',
      embedding_norm='pre_fc_norm_embedding',
      hidden_norm='pre_fc_norm_hidden',
      nextn_projection='fc',
      nextn_norm='norm',
    ),
    other_names={_FUSED_EXPERTS[1]: {'fused_experts': _FUSED_EXPERTS, 'expert_layout': 'transposed'}},
    inert=('mamba_ssm_dtype',),
  )


_NEVER: LayerFlag = lambda layer, config: False
_GEMMA = {'scaled_embedding': True, 'norm_plus_one': True, 'post_norm': True}
_GPT_OSS_YARN = {'rope_type': 'yarn', 'factor': 32.0, 'truncate': False, 'original_max_position_embeddings': 4096}
_GEMMA2_KEYS: tuple[Entry, ...] = (
  *_sizes(256_000, 2304, 9216, 26, 8, 4, 256, tied=True),
  activation('hidden_activation', 'gelu_pytorch_tanh'),
  Rope(),
  LayerTypes(lambda layer, config: layer % 2 == 0, default_window=4096),
  attention_bias(),
  QueryScale(),
  Key('final_logit_softcapping', 'logits_cap', float, 30.0, nullable=True),
  Key('attn_logit_softcapping', 'attention_cap', float, 50.0, nullable=True),
  FixedKey('use_bidirectional_attention', None, (False,)),
)
_GRANITE_EXPERTS = TensorNames(
  router='block_sparse_moe.router.layer',
  fused_experts=('block_sparse_moe.input_linear.weight', 'block_sparse_moe.output_linear.weight'),
  expert_layout='transposed',
  shared='shared_mlp.',
  shared_gate_up='input_linear',
  shared_down='output_linear',
)
_MIXTRAL = TensorNames(
  router='block_sparse_moe.gate',
  balance_bias='block_sparse_moe.e_score_correction_bias',
  expert='block_sparse_moe.experts.{}.',
  expert_gate='w1',
  expert_up='w3',
  expert_down='w2',
)
_HUNYUAN_KEYS: tuple[Entry, ...] = (
  attention_bias(),
  *_says(qk_norm=True, use_qk_norm=True, use_rotary_pos_emb=True, norm_type='rms'),
)
# The checks of the weights' shapes tell if one of these matters.
_HUNYUAN_INERT = (
  *('attention_head_dim', 'cla_share_factor', 'dense_list', 'num_media_embeds', 'org_vocab_size', 'pool_type'),
  *('pad_id', 'im_start_id', 'im_end_id', 'im_newline_id', 'mask_init_id', 'text_start_id', 'text_end_id'),
  *('video_start_id', 'video_end_id'),
  *('moe_intermediate_size', 'num_shared_expert', 'anyres_vit_max_image_size', 'anyres_pooling_size'),
)
_HUNYUAN = TensorNames(
  query_norm='self_attn.query_layernorm',
  key_norm='self_attn.key_layernorm',
  router='mlp.gate.wg',
  shared='mlp.shared_mlp.',
)
_APERTUS_ROPE = {'rope_type': 'llama3', 'factor': 8.0, 'original_max_position_embeddings': 8192}
_APERTUS_ROPE |= {'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
_MINISTRAL_YARN = {'rope_type': 'yarn', 'factor': 16.0, 'original_max_position_embeddings': 16_384}
_MINISTRAL_YARN |= {'beta_fast': 32.0, 'beta_slow': 1.0, 'mscale': 1.0, 'mscale_all_dim': 1.0}
_MINISTRAL_YARN |= {'llama_4_scaling_beta': 0.1}
_COHERE: tuple[Entry, ...] = (attention_bias(), Key('logit_scale', 'logits_multiplier', float, 0.0625))
_COHERE_BLOCK = {'norm': 'layer_without_bias', 'parallel': True}
_QWEN_WINDOW = LayerTypes(
  lambda layer, config: layer >= config.read('max_window_layers', int, 28), default_window=4096, use_key=True
)

_GEMMA4_SIZES = _sizes(262_144, 2304, 9216, 30, 8, 4, 256, tied=True)
_GEMMA4_KEYS = (Gemma4Layers(), Key('final_logit_softcapping', 'logits_cap', float, None, nullable=True))
_GEMMA4_ROPE = Rope(1e6, 10_000.0, default={'rope_type': 'proportional', 'partial_rotary_factor': 0.25})

# An export without an origin has the first family that expresses the model.
FAMILIES: dict[str, Family] = {
  'llama': Family(
    architecture='LlamaForCausalLM',
    keys=(
      *_llama(32_000, 4096, 11_008, 32, 32),
      attention_bias(),
      Key('mlp_bias', 'mlp_bias', bool, False),
      FixedKey('activation', None, ('swiglu',)),  # Falcon 3 repeats `hidden_act`
    ),
  ),
  'mistral': Family(
    architecture='MistralForCausalLM',
    keys=(*_llama(32_000, 4096, 14_336, 32, 32, 8), AllWindowed(4096)),
  ),
  'mixtral': Family(
    architecture='MixtralForCausalLM',
    keys=(
      *_llama(32_000, 4096, 14_336, 32, 32, 8, eps=1e-5, rope=Rope(1e6)),
      AllWindowed(),
      *experts(num_experts_key('num_local_experts', 8, 'num_experts'), 2, ('intermediate_size', 14_336), None),
    ),
    names=_MIXTRAL,
  ),
  'qwen2': Family(
    architecture='Qwen2ForCausalLM',
    keys=(*_llama(151_936, 4096, 22_016, 32, 32, 32), _QWEN_WINDOW),
    fixed={'qkv_bias': True},
    inert=('qkv_bias', 'attention_bias'),  # q, k and v always have a bias
  ),
  'qwen3': Family(
    architecture='Qwen3ForCausalLM',
    keys=(*_llama(151_936, 4096, 22_016, 32, 32, 32, 128), _QWEN_WINDOW, attention_bias()),
    fixed={'qk_norm': 'head'},
    inert=('use_qk_norm',),
  ),
  'qwen3_moe': Family(
    architecture='Qwen3MoeForCausalLM',
    keys=(
      *_llama(151_936, 2048, 6144, 24, 32, 4),
      AllWindowed(4096, use_key=True),
      attention_bias(),
      sparse_step(),
      *experts(num_experts_key('num_experts', 128, 'num_local_experts'), 8, ('moe_intermediate_size', 768)),
    ),
    fixed={'qk_norm': 'head'},
    inert=('max_window_layers', 'use_qk_norm'),
  ),
  'olmo2': Family(
    architecture='Olmo2ForCausalLM',
    keys=(*_llama(50_304, 4096, 11_008, 32, 32, eps=1e-5), attention_bias()),
    fixed={'qk_norm': 'flat', 'pre_norm': False, 'post_norm': True},
  ),
  'olmoe': Family(
    architecture='OlmoeForCausalLM',
    keys=(
      *_llama(50_304, 2048, 2048, 16, 16, eps=1e-5),
      attention_bias(),
      Key('clip_qkv', 'clip_qkv', float, None, nullable=True),
      *experts(num_experts_key('num_experts', 64, 'num_local_experts'), 8, ('intermediate_size', 2048)),
    ),
    fixed={'qk_norm': 'flat'},
  ),
  'gemma2': Family(
    architecture='Gemma2ForCausalLM',
    keys=_GEMMA2_KEYS,
    fixed=_GEMMA,
    inert=('hidden_act',),  # `hidden_activation` is read
    names=TensorNames(ffn_norm='pre_feedforward_layernorm'),
  ),
  'gemma3_text': Family(
    architecture='Gemma3ForCausalLM',
    keys=(
      *_sizes(262_208, 2304, 9216, 26, 8, 4, 256, tied=True),
      activation('hidden_activation', 'gelu_pytorch_tanh'),
      Rope(1e6, 10_000.0),
      LayerTypes(_every_but(6), default_window=4096),
      attention_bias(),
      QueryScale(),
      Key('final_logit_softcapping', 'logits_cap', float, None, nullable=True),
      Key('attn_logit_softcapping', 'attention_cap', float, None, nullable=True),
      FixedKey('use_bidirectional_attention', None, (False,)),
    ),
    fixed=_GEMMA | {'qk_norm': 'head'},
    inert=('hidden_act',),  # `hidden_activation` is read
    names=TensorNames(ffn_norm='pre_feedforward_layernorm'),
  ),
  'glm4': Family(
    architecture='Glm4ForCausalLM',
    keys=(
      *_llama(151_552, 4096, 13_696, 40, 32, 2, 128, eps=1.5625e-7, rope=Rope(partial=0.5)),
      Key('attention_bias', 'qkv_bias', bool, True),
    ),
    fixed={'post_norm': True},
    names=TensorNames(
      attention_post_norm='post_self_attn_layernorm',
      ffn_post_norm='post_mlp_layernorm',
      gate_up='mlp.gate_up_proj',
      interleaved=True,
    ),
  ),
  'glm4_moe': Family(
    architecture='Glm4MoeForCausalLM',
    keys=(
      *_llama(151_552, 4096, 10_944, 46, 96, 8, eps=1e-5, rope=Rope(partial=0.5)),
      Key('attention_bias', 'qkv_bias', bool, False),
      Key('use_qk_norm', 'qk_norm', bool, False, names={True: 'head', False: None}),
      *shared_experts(128, 8, 1, 1408, first_dense(1), 1.0, (1, 1), is_sigmoid=True),
      NextnHeads(),
    ),
    fixed=SIGMOID_ROUTING,
    inert=('num_mtp_layers',),
  ),
  'gpt_oss': Family(
    architecture='GptOssForCausalLM',
    keys=(
      *_sizes(201_088, 2880, 2880, 36, 64, 8, 64, eps=1e-5),
      FixedKey('hidden_act', 'silu'),
      FixedKey('swiglu_alpha', 1.702),
      FixedKey('swiglu_limit', 7.0),
      Rope(150_000.0, default=_GPT_OSS_YARN),
      LayerTypes(lambda layer, config: layer % 2 == 0, default_window=128),
      attention_bias(True),
      *experts(num_experts_key('num_local_experts', 128, 'num_experts'), 4, ('intermediate_size', 2880), None),
    ),
    fixed={'sinks': True, 'activation': 'clamped_swiglu', 'mixture.routing.use_bias': True},
    names=TensorNames(
      router='mlp.router',
      fused_experts=_FUSED_EXPERTS,
      expert_layout='interleaved',
    ),
    inert=('experts_per_token', 'initial_context_length'),
  ),
  'deepseek_v2': Family(
    architecture='DeepseekV2ForCausalLM',
    keys=(
      *_latent_sizes(102_400, 4096, 11_008, 32, 32),
      *shared_experts(64, None, 2, 1407, first_dense(0), 1.0, (None, None), is_sigmoid=False),
    ),
    fixed={'mixture.routing.normalize_gates': None},
    names=TensorNames(interleaved=True),
  ),
  'deepseek_v3': Family(
    architecture='DeepseekV3ForCausalLM',
    keys=(
      *_latent_sizes(129_280, 7168, 18_432, 61, 128),
      FixedKey('rope_interleave', True),
      *shared_experts(256, 8, 1, 2048, first_dense(3), 2.5, (8, 4), is_sigmoid=True),
      NextnHeads(),
    ),
    fixed=SIGMOID_ROUTING,
    names=TensorNames(interleaved=True),
    inert=('num_mtp_layers',),
  ),
  'phi3': Family(
    architecture='Phi3ForCausalLM',
    keys=(
      *_llama(32_064, 3072, 8192, 32, 32, eps=1e-5, rope=Rope(max_length=4096, partial=1.0, variant='phi3')),
      OriginalLength(),
      AllWindowed(),
    ),
    names=TensorNames(qkv='self_attn.qkv_proj', gate_up='mlp.gate_up_proj'),
  ),
  'gpt2': Family(
    architecture='GPT2LMHeadModel',
    keys=(
      Key('vocab_size', 'vocab_size', int, 50_257),
      Key('n_embd', 'embed_dim', int, 768, aliases=('hidden_size',)),
      Key('n_layer', 'num_layers', int, 12, aliases=('num_hidden_layers',)),
      Key('n_head', 'num_heads', int, 12, aliases=('num_attention_heads',)),
      Key('n_inner', 'hidden_dim', int, lambda known: 4 * known['embed_dim']),
      Key('n_positions', 'positions', int, 1024),
      Key('layer_norm_epsilon', 'norm_eps', float, 1e-5),
      Key('tie_word_embeddings', 'tied', bool, True),
      activation('activation_function', 'gelu_new'),
      FixedKey('scale_attn_weights', True),
      FixedKey('scale_attn_by_inverse_layer_idx', False),
      FixedKey('reorder_and_upcast_attn', False, (True,)),
    ),
    fixed={'norm': 'layer', 'gated': False, 'mlp_bias': True, 'qkv_bias': True, 'out_bias': True},
    names=TensorNames(table='transformer.wte.weight', layer='transformer.h.{}.'),
    make_rules=gpt2_rules,
    ignored=(r'.*\.attn\.(bias|masked_bias)',),
    inert=(
      *(f'summary_{name}' for name in ('type', 'use_proj', 'activation', 'proj_to_labels', 'first_dropout')),
      'predict_special_tokens',
    ),
    base='transformer.',
  ),
  'gemma': Family(
    architecture='GemmaForCausalLM',
    keys=(
      *_sizes(256_000, 3072, 24_576, 28, 16, 16, 256, tied=True),
      activation('hidden_act', 'gelu_pytorch_tanh', gelu='gelu'),
      Rope(),
      attention_bias(),
      FixedKey('use_bidirectional_attention', None, (False,)),
    ),
    fixed={'scaled_embedding': True, 'norm_plus_one': True},
    inert=('hidden_activation',),
  ),
  'gemma4_text': _gemma4(
    *('Gemma4ForCausalLM', _GEMMA4_SIZES, *_GEMMA4_KEYS, Gemma4Experts(), LayerEmbeddingKeys(), Gemma4SharedKv()),
    layers=LayerTypes(_every_but(6), default_window=512),
    rope=_GEMMA4_ROPE,
    output_scale=True,
  ),
  'gemma4_unified_text': _gemma4(
    *('Gemma4UnifiedForCausalLM', _GEMMA4_SIZES, *_GEMMA4_KEYS, Gemma4SharedKv()),
    layers=LayerTypes(_every_but(6), default_window=1024),
    rope=_GEMMA4_ROPE,
    output_scale=True,
  ),
  'gemma3n_text': _gemma4(
    'Gemma3nForCausalLM',
    (
      *_without('intermediate_size', _sizes(262_400, 2048, 16_384, 35, 8, 2, 256, tied=True)),
      EqualInLayers(Key('intermediate_size', 'hidden_dim', int, 16_384)),
    ),
    Key('final_logit_softcapping', 'logits_cap', float, 30.0, nullable=True),
    SharedKv(15),
    LayerEmbeddingKeys(),
    Key('altup_num_inputs', 'num_streams', int, 4),
    Key('laurel_rank', 'residual_rank', int, 64),
    activation_sparsity(),
    *(FixedKey('altup_active_idx', 0), FixedKey('altup_correct_scale', True)),
    layers=LayerTypes(_every_but(5), default_window=512),
    rope=Rope(1e6, 10_000.0),
  ),
  'vaultgemma': Family(
    architecture='VaultGemmaForCausalLM',
    keys=_GEMMA2_KEYS,
    fixed={'scaled_embedding': True, 'norm_plus_one': True},
    inert=('hidden_act',),
    names=TensorNames(ffn_norm='pre_feedforward_layernorm'),
  ),
  'helium': Family(
    architecture='HeliumForCausalLM',
    keys=(
      *_llama(48_000, 2560, 7040, 24, 20, 20, 128, eps=1e-8, rope=Rope(1e5)),
      Key('attention_bias', 'qkv_bias', bool, False),
      Key('mlp_bias', 'mlp_bias', bool, False),
    ),
    names=TensorNames(interleaved=True),
  ),
  'solar_open': Family(
    architecture='SolarOpenForCausalLM',
    keys=(
      *_without('intermediate_size', _llama(196_608, 4096, 1, 48, 64, 8, 128, eps=1e-5, rope=Rope(1e6, partial=1.0))),
      Key('attention_bias', 'qkv_bias', bool, False),
      *shared_experts(128, 8, 1, 1280, first_dense(0), 1.0, (1, 1), is_sigmoid=True),
    ),
    fixed=SIGMOID_ROUTING | {'hidden_dim': 1},  # of no layer
    inert=('intermediate_size', 'use_qk_norm'),
  ),
  'flex_olmo': Family(
    architecture='FlexOlmoForCausalLM',
    keys=(
      *_llama(100_352, 4096, 11_008, 32, 32, rope=Rope(5e5)),
      attention_bias(),
      *experts(num_experts_key('num_experts', 7, 'num_local_experts'), 5, ('intermediate_size', 11_008)),
    ),
    fixed={'qk_norm': 'flat', 'pre_norm': False, 'post_norm': True},
  ),
  'mellum': Family(
    architecture='MellumForCausalLM',
    keys=(
      *_llama(98_304, 2304, 7168, 28, 32, 4, 128, rope=Rope(5e5, 10_000.0)),
      LayerTypes(_NEVER, default_window=1024),
      attention_bias(),
      *experts(
        *(num_experts_key('num_experts', 64, 'num_local_experts'), 8, ('moe_intermediate_size', 896)),
        is_normalized=True,
      ),
      mlp_layer_types(0),
    ),
    fixed={'qk_norm': 'head'},
  ),
  'hyperclovax': Family(
    architecture='HyperCLOVAXForCausalLM',
    keys=(
      *_llama(32_000, 4096, 11_008, 32, 32),
      attention_bias(),
      Key('mlp_bias', 'mlp_bias', bool, False),
      Key('embedding_multiplier', 'embedding_multiplier', float, 1.0),
      Key('residual_multiplier', 'residual_multiplier', float, 1.0),
      Key('attention_multiplier', 'softmax_scale', float, None, nullable=True),
      Key('logits_scaling', 'logits_multiplier', float, 1.0),
      Key('use_post_norm', 'post_norm', bool, True),
    ),
    names=TensorNames(attention_post_norm='post_norm1', ffn_post_norm='post_norm2'),
  ),
  'youtu': Family(
    architecture='YoutuForCausalLM',
    keys=(*_latent_sizes(128_256, 2048, 6144, 32, 16, tied=True), FixedKey('rope_interleave', True)),
    names=TensorNames(interleaved=True),
  ),
  'jais2': Family(
    architecture='Jais2ForCausalLM',
    keys=(
      *_llama(
        *(150_272, 3328, 26_624, 32, 26), eps=1e-5, eps_key='layer_norm_eps', act=activation('hidden_act', 'relu2')
      ),
      attention_bias(True),
      Key('mlp_bias', 'mlp_bias', bool, True),
    ),
    fixed={'norm': 'layer', 'gated': False},
  ),
  'qwen2_moe': Family(
    architecture='Qwen2MoeForCausalLM',
    keys=(
      *_llama(151_936, 2048, 5632, 24, 16, 16),
      LayerTypes(
        lambda layer, config: layer % 2 == 0 and layer < config.read('max_window_layers', int, 28),
        default_window=4096,
        use_key=True,
      ),
      Key('qkv_bias', 'qkv_bias', bool, True),
      sparse_step(),
      *experts(num_experts_key('num_experts', 60, 'num_local_experts'), 4, ('moe_intermediate_size', 1408)),
      Key('shared_expert_intermediate_size', 'mixture.shared_dim', int, 5632),
    ),
    fixed={'mixture.shared_gate': True},
    names=TensorNames(shared='mlp.shared_expert.'),
    inert=('max_window_layers',),
  ),
  'ministral': Family(
    architecture='MinistralForCausalLM',
    keys=(
      *_llama(32_000, 4096, 14_336, 32, 32, 8),
      LayerTypes(lambda layer, config: not config.is_null('sliding_window'), default_window=4096),
    ),
  ),
  'ministral3': Family(
    architecture='Ministral3ForCausalLM',
    keys=(
      *_llama(
        131_072, 4096, 14_336, 34, 32, 8, 128, eps=1e-5, rope=Rope(1e6, default=_MINISTRAL_YARN, variant='ministral')
      ),
      AllWindowed(),
    ),
  ),
  'olmo': Family(
    architecture='OlmoForCausalLM',
    keys=(
      *_llama(50_304, 4096, 11_008, 32, 32, eps=None),
      attention_bias(),
      Key('clip_qkv', 'clip_qkv', float, None, nullable=True),
    ),
    fixed={'norm': 'layer_without_weights', 'norm_eps': 1e-5},
  ),
  'olmo3': Family(
    architecture='Olmo3ForCausalLM',
    keys=(
      *_llama(50_304, 4096, 11_008, 32, 32, eps=1e-5, rope=Rope(5e5, 5e5)),
      LayerTypes(_every_but(4), default_window=4096),
      attention_bias(),
    ),
    fixed={'qk_norm': 'flat', 'pre_norm': False, 'post_norm': True},
  ),
  'smollm3': Family(
    architecture='SmolLM3ForCausalLM',
    keys=(
      *_llama(128_256, 2048, 11_008, 36, 16, 4, tied=True, rope=Rope(2e6)),
      no_rope_layers(),
      LayerTypes(_NEVER, default_window=None, use_key=True, windowed_if_rotated=False),
      attention_bias(),
      Key('mlp_bias', 'mlp_bias', bool, False),
    ),
    inert=('max_window_layers',),
  ),
  'seed_oss': Family(
    architecture='SeedOssForCausalLM',
    keys=(
      *_llama(155_136, 4096, 27_648, 64, 80, 8, 128),
      Key('attention_bias', 'qkv_bias', bool, True),
      Key('attention_out_bias', 'out_bias', bool, False),
      Key('mlp_bias', 'mlp_bias', bool, False),
    ),
  ),
  'granite': Family(architecture='GraniteForCausalLM', keys=_granite(Key('mlp_bias', 'mlp_bias', bool, False))),
  'granitemoe': Family(
    architecture='GraniteMoeForCausalLM',
    keys=_granite(*experts(num_experts_key('num_local_experts', 8), 2, ('intermediate_size', 11_008), None)),
    names=_GRANITE_EXPERTS,
  ),
  'granitemoeshared': Family(
    architecture='GraniteMoeSharedForCausalLM',
    keys=_granite(
      *experts(num_experts_key('num_local_experts', 8), 2, ('intermediate_size', 11_008), None),
      SharedDim('shared_intermediate_size', 0),
    ),
    names=_GRANITE_EXPERTS,
  ),
  'granitemoehybrid': Family(
    architecture='GraniteMoeHybridForCausalLM',
    keys=_granite(GraniteLayers(), GraniteExperts(), rope=Granite4Rope()),
    names=_GRANITE_EXPERTS,
    make_rules=granite_rules,
    inert=(
      *('mamba_n_heads', 'mamba_n_groups', 'mamba_d_state', 'mamba_d_head', 'mamba_d_conv', 'mamba_expand'),
      *('mamba_chunk_size', 'mamba_conv_bias', 'mamba_proj_bias', 'time_step_limit'),
    ),
  ),
  'glm': Family(
    architecture='GlmForCausalLM',
    keys=(
      *_llama(151_552, 4096, 13_696, 40, 32, 2, 128, eps=1.5625e-7, rope=Rope(partial=0.5)),
      Key('attention_bias', 'qkv_bias', bool, True),
    ),
    names=TensorNames(gate_up='mlp.gate_up_proj', interleaved=True),
  ),
  'glm4_moe_lite': Family(
    architecture='Glm4MoeLiteForCausalLM',
    keys=(
      *_latent_sizes(154_880, 2048, 10_240, 47, 20, eps=1e-5, latent=(768, 512, 192, 64, 256)),
      FixedKey('rope_interleave', True),
      *shared_experts(64, 4, 1, 1536, mlp_layer_types(), 1.8, (1, 1), is_sigmoid=True),
      NextnHeads(),
    ),
    fixed=SIGMOID_ROUTING,
    names=TensorNames(interleaved=True),
    inert=('num_mtp_layers', 'partial_rotary_factor'),
  ),
  'llama4_text': Family(
    architecture='Llama4ForCausalLM',
    keys=(
      *_llama(202_048, 5120, 8192, 48, 40, 8, 128, eps=1e-5, rope=Rope(5e5)),
      Key('intermediate_size', ('mixture.hidden_dim', 'mixture.shared_dim'), int, 8192),
      Key('intermediate_size_mlp', 'hidden_dim', int, 16_384),
      attention_bias(),
      no_rope_layers(),
      Llama4Temperature(),
      Key('use_qk_norm', 'qk_norm', bool, True, names={True: 'unscaled', False: None}),
      LayerTypes(
        _NEVER,
        default_window=8192,
        windowed_type='chunked_attention',
        window_key='attention_chunk_size',
        windowed_if_rotated=True,
      ),
      num_experts_key('num_local_experts', 16),
      Key('num_experts_per_tok', 'mixture.routing.num_selected', int, 1),
      llama4_layers(),
    ),
    fixed={
      'chunked': True,
      'mixture.gates_inputs': True,
      'mixture.routing.score_function': 'sigmoid',
      'mixture.routing.normalize_gates': None,
    },
    names=TensorNames(
      interleaved=True,
      gate='feed_forward.gate_proj',
      up='feed_forward.up_proj',
      down='feed_forward.down_proj',
      router='feed_forward.router',
      shared='feed_forward.shared_expert.',
      fused_experts=('feed_forward.experts.gate_up_proj', 'feed_forward.experts.down_proj'),
    ),
    inert=('for_llm_compressor', 'router_jitter_noise'),
  ),
  'minimax_m2': Family(
    architecture='MiniMaxM2ForCausalLM',
    keys=(
      *_llama(200_064, 3072, 1536, 62, 48, 8, 128, rope=Rope(5e6, partial=1.0, variant='minimax')),
      *experts(num_experts_key('num_local_experts', 256, 'num_experts'), 8, ('intermediate_size', 1536), None),
      *_says(scoring_func='sigmoid', use_qk_norm=True, qk_norm_type='per_layer', use_routing_bias=True),
    ),
    fixed={
      'qk_norm': 'flat',
      'mixture.routing.score_function': 'sigmoid',
      'mixture.routing.balance_bias': True,
    },
    names=_MIXTRAL,
    inert=('num_mtp_modules', 'mtp_transformer_layers', 'use_mtp', 'attn_type_list'),
  ),
  'ernie4_5': Family(
    architecture='Ernie4_5ForCausalLM',
    keys=(
      *_llama(103_424, 1024, 3072, 18, 16, 2, 128, eps=1e-5, tied=True, rope=Rope(5e5)),
      Key('use_bias', ('qkv_bias', 'out_bias', 'mlp_bias'), bool, False),
    ),
    names=TensorNames(interleaved=True),
  ),
  'ernie4_5_moe': Family(
    architecture='Ernie4_5_MoeForCausalLM',
    keys=(
      *_llama(103_424, 2560, 12_288, 28, 20, 4, eps=1e-5, tied=True, rope=Rope(5e5)),
      Key('use_bias', ('qkv_bias', 'out_bias', 'mlp_bias', 'logits_bias'), bool, False),
      num_experts_key('moe_num_experts', 64, 'num_experts', 'num_local_experts'),
      Key('moe_k', 'mixture.routing.num_selected', int, 6, aliases=('num_experts_per_tok',)),
      Key('moe_intermediate_size', 'mixture.hidden_dim', int, 1536),
      SharedExperts('moe_num_shared_experts', 2),
      ernie_layers(),
      *_says(moe_gate='topk', moe_use_aux_free=True),
    ),
    fixed={'mixture.routing.balance_bias': True},
    names=TensorNames(
      interleaved=True,
      balance_bias='mlp.moe_statics.e_score_correction_bias',
      balance_bias_operations=(Reshape((1, -1), (-1,)),),
    ),
    ignored=(r'.*rotary_emb\.inv_freq', r'model\.mtp_.*'),
    inert=('moe_norm_min', 'moe_capacity'),
  ),
  'hunyuan_v1_dense': Family(
    architecture='HunYuanDenseV1ForCausalLM',
    keys=(
      *_llama(290_943, 4096, 11_008, 32, 32, eps=1e-5, rope=Rope(variant='hunyuan')),
      *_HUNYUAN_KEYS,
    ),
    fixed={'qk_norm': 'rotated'},
    names=_HUNYUAN,
    inert=_HUNYUAN_INERT,
  ),
  'hunyuan_v1_moe': Family(
    architecture='HunYuanMoEV1ForCausalLM',
    keys=(
      *_llama(290_943, 4096, 11_008, 32, 32, eps=1e-5, rope=Rope(variant='hunyuan')),
      *_HUNYUAN_KEYS,
      *_says(use_mixed_mlp_moe=True, norm_topk_prob=True),
      Key('intermediate_size', ('mixture.hidden_dim', 'mixture.shared_dim'), int, 11_008),
      EqualInLayers(num_experts_key('num_experts', 1, 'num_local_experts')),
      EqualInLayers(Key('moe_topk', 'mixture.routing.num_selected', int, 1, aliases=('num_experts_per_tok',))),
    ),
    fixed={'qk_norm': 'rotated'},
    names=_HUNYUAN,
    inert=_HUNYUAN_INERT,
  ),
  'dots1': Family(
    architecture='Dots1ForCausalLM',
    keys=(
      *_llama(152_064, 4608, 10_944, 62, 32, 32),
      LayerTypes(lambda layer, config: layer >= config.read('max_window_layers', int, 62), default_window=4096),
      attention_bias(),
      *shared_experts(*(128, 6, 2, 1408, first_dense(0), 1.0, (1, 1)), is_sigmoid=True, is_normalized=False),
    ),
    fixed=SIGMOID_ROUTING | {'qk_norm': 'head'},
    inert=('max_window_layers',),
  ),
  'exaone4': Family(
    architecture='Exaone4ForCausalLM',
    keys=(
      *_llama(102_400, 4096, 16_384, 32, 32, 32, eps=1e-5),
      LayerTypes(_every_but(4), default_window=4096),
      FullUnrotated(needs_window=True),
    ),
    fixed={'qk_norm': 'head', 'pre_norm': False, 'post_norm': True},
    inert=('sliding_window_pattern',),
  ),
  'exaone_moe': Family(
    architecture='ExaoneMoeForCausalLM',
    keys=(
      *_llama(102_400, 4096, 16_384, 32, 32, 32, eps=1e-5),
      LayerTypes(_every_but(4), default_window=4096),
      FullUnrotated(needs_window=True),
      *experts(
        *(num_experts_key('num_experts', 64, 'num_local_experts'), 8, ('moe_intermediate_size', 1024)),
        is_normalized=True,
      ),
      Key('routed_scaling_factor', 'mixture.routing.gate_scale', float, 2.5),
      ExpertGroups(1, 1, ('noaux_tc',)),
      SharedExperts('num_shared_experts', 1),
      mlp_layer_types(has_number=True),
      *_says(scoring_func='sigmoid'),
    ),
    fixed=SIGMOID_ROUTING | {'qk_norm': 'head'},
    names=TensorNames(balance_bias='mlp.e_score_correction_bias'),
    ignored=(r'.*rotary_emb\.inv_freq', r'mtp\..*'),
    inert=('sliding_window_pattern', 'is_moe_layer', 'num_nextn_predict_layers'),
  ),
  'apertus': Family(
    architecture='ApertusForCausalLM',
    keys=(
      *_llama(
        *(131_072, 4096, 14_336, 32, 32),
        eps=1e-5,
        act=activation('hidden_act', 'xielu', xielu='xielu'),
        rope=Rope(12e6, default=_APERTUS_ROPE),
      ),
      attention_bias(),
      *_says(qk_norm=True),
    ),
    fixed={'gated': False, 'qk_norm': 'head'},
    names=TensorNames(attention_norm='attention_layernorm', ffn_norm='feedforward_layernorm'),
    constants={'mlp.act_fn.beta': 0.5, 'mlp.act_fn.eps': -1e-6},
  ),
  'cohere': Family(
    architecture='CohereForCausalLM',
    keys=(
      *_llama(256_000, 8192, 22_528, 40, 64, eps=1e-5, tied=True, eps_key='layer_norm_eps', rope=Rope(5e5)),
      *_COHERE,
      Key('use_qk_norm', 'qk_norm', bool, False, names={True: 'layer_by_head', False: None}),
    ),
    fixed=_COHERE_BLOCK,
    names=TensorNames(interleaved=True),
  ),
  'cohere2': Family(
    architecture='Cohere2ForCausalLM',
    keys=(
      *_llama(256_000, 8192, 22_528, 40, 64, eps=1e-5, tied=True, eps_key='layer_norm_eps'),
      *_COHERE,
      LayerTypes(_every_but(4), default_window=4096),
      FullUnrotated(),
      *_says(order_of_interleaved_layers='local_attn_first', position_embedding_type='rope_gptj'),
      *_says(use_embedding_sharing=True, use_gated_activation=True, use_parallel_block=True),
    ),
    fixed=_COHERE_BLOCK,
    names=TensorNames(interleaved=True),
    inert=('layer_switch', 'use_parallel_embedding'),  # `sliding_window_pattern` is read
  ),
  'starcoder2': Family(
    architecture='Starcoder2ForCausalLM',
    keys=(
      *_llama(
        *(49_152, 3072, 12_288, 30, 24, 2),
        eps=1e-5,
        tied=True,
        eps_key='norm_epsilon',
        act=activation('hidden_act', 'gelu_pytorch_tanh'),
      ),
      AllWindowed(),
      Key('use_bias', ('qkv_bias', 'out_bias', 'mlp_bias'), bool, True),
      *_says(mlp_type='default', norm_type='layer_norm', scale_attn_weights=True),
    ),
    fixed={'norm': 'layer', 'gated': False},
    names=TensorNames(up='mlp.c_fc', down='mlp.c_proj'),
    # `hidden_act` is read
    inert=('activation_function', 'attention_softmax_in_fp32', 'scale_attention_softmax_in_fp32'),
  ),
  'phimoe': Family(
    architecture='PhimoeForCausalLM',
    old_architectures=('PhiMoEForCausalLM',),
    keys=(
      *_llama(32_064, 4096, 6400, 32, 32, 8, eps=1e-5, rope=Rope(variant='phimoe', max_length=131_072)),
      AllWindowed(),
      attention_bias(),
      Key('lm_head_bias', 'logits_bias', bool, False),
      *experts(num_experts_key('num_local_experts', 16, 'num_experts'), 2, ('intermediate_size', 6400), None),
      PhiGates(),
    ),
    fixed={'norm': 'layer'},
    names=_MIXTRAL,
    inert=('original_max_position_embeddings',),  # repeats the key in `rope_parameters`
  ),
  'phi': Family(
    architecture='PhiForCausalLM',
    keys=(
      *_llama(
        *(51_200, 2048, 8192, 24, 32),
        eps=1e-5,
        eps_key='layer_norm_eps',
        act=activation('hidden_act', 'gelu_new'),
        rope=Rope(partial=0.5),
      ),
      Key('qk_layernorm', 'qk_norm', bool, False, names={True: 'layer', False: None}),
    ),
    fixed={
      **{'norm': 'layer', 'parallel': True, 'gated': False},
      **dict.fromkeys(('qkv_bias', 'out_bias', 'mlp_bias', 'logits_bias'), True),
    },
    names=TensorNames(
      out='self_attn.dense',
      up='mlp.fc1',
      down='mlp.fc2',
      final_norm='model.final_layernorm',
      query_norm='self_attn.q_layernorm',
      key_norm='self_attn.k_layernorm',
    ),
  ),
  'stablelm': Family(
    architecture='StableLmForCausalLM',
    keys=(
      *_llama(50_304, 2560, 6912, 32, 32, 32, eps=1e-5, eps_key='layer_norm_eps', rope=Rope(partial=0.25)),
      Key('use_qkv_bias', 'qkv_bias', bool, False),
      Key('use_parallel_residual', 'parallel', bool, False),
      Key('qk_layernorm', 'qk_norm', bool, False, names={True: 'layer_by_head', False: None}),
    ),
    fixed={'norm': 'layer'},
    names=TensorNames(query_norm='self_attn.q_layernorm.norms.{}', key_norm='self_attn.k_layernorm.norms.{}'),
  ),
  'nemotron': Family(
    architecture='NemotronForCausalLM',
    keys=(
      *_llama(
        *(256_000, 6144, 24_576, 32, 48),
        eps=1e-5,
        eps_key='norm_eps',
        act=activation('hidden_act', 'relu2'),
        rope=Rope(partial=0.5),
      ),
      attention_bias(),
      Key('mlp_bias', 'mlp_bias', bool, False),
    ),
    fixed={'norm': 'layer', 'norm_plus_one': True, 'gated': False},
    inert=('kv_channels', 'rope_percent'),  # `head_dim` and `partial_rotary_factor` are read
  ),
  'arcee': Family(
    architecture='ArceeForCausalLM',
    keys=(
      *_llama(32_000, 2560, 18_432, 32, 32, eps=1e-5, act=activation('hidden_act', 'relu2')),
      attention_bias(),
      Key('mlp_bias', 'mlp_bias', bool, False),
    ),
    fixed={'gated': False},
  ),
  'qwen3_next': _qwen_hybrid(
    'Qwen3NextForCausalLM',
    (151_936, 2048, 5632, 48, 16, 2, 256),
    sparse_step(),
    *experts(
      *(num_experts_key('num_experts', 512, 'num_local_experts'), 10, ('moe_intermediate_size', 512)),
      is_normalized=True,
    ),
    Key('shared_expert_intermediate_size', 'mixture.shared_dim', int, 512),
    rope=Rope(partial=0.25),
    nextn=NextnHeads(most=1, has_key=False),
    layout='by_key_head',
  ),
  'qwen3_5_text': _qwen_hybrid('Qwen3_5ForCausalLM', (248_320, 4096, 12_288, 32, 16, 4, 256)),
  'qwen3_5_moe_text': _qwen_hybrid(
    'Qwen3_5MoeForCausalLM',
    (248_320, 2048, 1, 40, 16, 2, 256),
    *experts(num_experts_key('num_experts', 256, 'num_local_experts'), 8, ('moe_intermediate_size', 512), None),
    Key('shared_expert_intermediate_size', 'mixture.shared_dim', int, 512),
    *_says(norm_topk_prob=True),
  ),
  'olmo_hybrid': Family(
    architecture='OlmoHybridForCausalLM',
    keys=(
      *_sizes(100_352, 3840, 11_008, 32, 30),
      FixedKey('hidden_act', 'silu'),
      OptionalRope(),
      attention_bias(),
      *delta_net_keys(
        _num_heads,
        _num_heads,
        lambda known: int(0.75 * known['embed_dim'] / known['delta_net.num_key_heads']),
        lambda known: 2 * known['delta_net.key_head_dim'],
      ),
      Key('linear_allow_neg_eigval', 'delta_net.max_strength', bool, True, names={True: 2.0, False: 1.0}),
    ),
    fixed={
      **{'qk_norm': 'flat', 'pre_norm': False, 'post_norm': True},
      **{'delta_net.has_own_norms': True, 'delta_net.epsilon': 1e-5},
    },
    names=TensorNames(
      attention_norm='attention_layer_norm',
      ffn_norm='feedforward_layer_norm',
      attention_post_norm='feedforward_layer_norm',
      delta_net='separate',
    ),
    # transformers writes one name for both kinds of layers.
    other_names={'post_attention_layernorm.weight': {'attention_post_norm': 'post_attention_layernorm'}},
    inert=('linear_a_log_min', 'linear_a_log_max', 'linear_dt_min', 'linear_dt_max', 'linear_dt_init_floor'),
  ),
  'kimi_linear': Family(
    architecture='KimiLinearForCausalLM',
    keys=(
      *_without('head_dim', _sizes(163_840, 2304, 9216, 27, 32, 32, eps=1e-5)),
      *latent_keys(None, 512, 128, 64, 128)[:-1],
      activation(),
      attention_bias(),
      KimiLinearLayers(),
      Key('rms_norm_eps', 'delta_net.epsilon', float, 1e-5),
      num_experts_key('num_experts', 256, 'num_local_experts'),
      Key('num_experts_per_token', 'mixture.routing.num_selected', int, 8, aliases=('num_experts_per_tok',)),
      Key('moe_intermediate_size', 'mixture.hidden_dim', int, 1024),
      Key('routed_scaling_factor', 'mixture.routing.gate_scale', float, 2.446),
      Key(
        *('moe_renormalize', 'mixture.routing.normalize_gates', bool, True),
        aliases=('norm_topk_prob',),
        names=NORMALIZE_GATES,
      ),
      ExpertGroups(1, 1, ('noaux_tc',), key='num_expert_group'),
      SharedExperts('num_shared_experts', 1),
      mlp_layer_types(has_number=True),
      *_says(moe_layer_freq=1, moe_router_activation_func='sigmoid', use_grouped_topk=True, mla_use_nope=True),
    ),
    fixed=SIGMOID_ROUTING | {'delta_net.feature_decays': True, 'delta_net.gate_activation': 'sigmoid'},
    names=dataclasses.replace(
      _MIXTRAL,
      balance_bias='block_sparse_moe.gate.e_score_correction_bias',
      shared='block_sparse_moe.shared_experts.',
      recurrent='self_attn.',
      delta_net='separate',
    ),
    # transformers writes this prefix in dense layers too, and reads both.
    other_names={
      'block_sparse_moe.gate_proj.weight': {name: f'block_sparse_moe.{name}_proj' for name in ('gate', 'up', 'down')}
    },
    modules={'.f_a_proj': '.forget_gate.f_a_proj', '.f_b_proj': '.forget_gate.f_b_proj', 'block_sparse_moe.': 'mlp.'},
    inert=('head_dim', 'qk_head_dim', 'rope_theta', 'rope_scaling', 'rope_parameters', 'num_nextn_predict_layers'),
  ),
  't5': _t5('T5', (32_128, 512, 2048, 6, 8), T5FeedForward('relu'), T5Logits(has_key=True)),
  'mt5': _t5('MT5', (250_112, 512, 1024, 8, 6), T5FeedForward('gated-gelu'), T5Logits(scaled=False)),
  'umt5': _t5(
    'UMT5', (250_112, 512, 1024, 8, 6), T5FeedForward('gated-gelu'), T5Logits(scaled=True), bias_per_layer=True
  ),
  'switch_transformers': _t5(
    'SwitchTransformers',
    (32_128, 768, 2048, 12, 12),
    *(
      activation('dense_act_fn', 'relu'),
      FixedKey('is_gated_act', False),
      FixedKey('feed_forward_proj', None, ('relu',)),
    ),
    *(FixedKey('router_bias', False), FixedKey('router_dtype', 'float32'), num_experts_key('num_experts', 8)),
    *(SwitchKeys(), T5Logits()),
    **{'gated': False, 'mixture.routing.num_selected': 1, 'mixture.routing.normalize_gates': None},
  ),
}

# Model types of folders that bring their own code -> the family that has the same model.
ALIASES = {'kimi_k2': 'deepseek_v3'}

# Multimodal models whose text model is read: model type -> architecture, and the text's model type if it is not named.
WRAPPERS = {
  'gemma3': ('Gemma3ForConditionalGeneration', 'gemma3_text'),
  'gemma3n': ('Gemma3nForConditionalGeneration', 'gemma3n_text'),
  'gemma4': ('Gemma4ForConditionalGeneration', 'gemma4_text'),
  'gemma4_unified': ('Gemma4UnifiedForConditionalGeneration', 'gemma4_unified_text'),
  'qwen3_5': ('Qwen3_5ForConditionalGeneration', 'qwen3_5_text'),
  'qwen3_5_moe': ('Qwen3_5MoeForConditionalGeneration', 'qwen3_5_moe_text'),
  'mistral3': ('Mistral3ForConditionalGeneration', 'mistral'),
  'llama4': ('Llama4ForConditionalGeneration', 'llama4_text'),
  'kimi_k25': ('KimiK25ForConditionalGeneration', 'deepseek_v3'),
  'internvl': ('InternVLForConditionalGeneration', 'qwen2'),
  'llava': ('LlavaForConditionalGeneration', 'llama'),
  'llava_next': ('LlavaNextForConditionalGeneration', 'llama'),
  'voxtral': ('VoxtralForConditionalGeneration', 'llama'),
}
# Keys of wrappers that the text model does not read, beside those that are inert.
WRAPPER_KEYS = (
  *('text_config', 'tie_word_embeddings', 'vision_config', 'audio_config', 'mm_tokens_per_image'),
  *('boi_token_index', 'eoi_token_index', 'image_token_index', 'eoa_token_index', 'image_seq_length'),
  *('projector_hidden_act', 'vision_feature_layer', 'vision_feature_select_strategy', 'multimodal_projector_bias'),
  *('spatial_merge_size', 'downsample_ratio', 'image_grid_pinpoints'),
  *('projection_hidden_size', 'projection_layer_norm_eps'),
  *('hidden_size', 'use_image_newline_parameter', 'vision_soft_tokens_per_image', 'audio_soft_tokens_per_image'),
)

_MAMBA = 'some of its layers are the state-space model Mamba'
_SPARSE = 'its attention reads only keys that the layer DeepSeek sparse attention (an indexer) chooses'
# Families of transformers that need a layer of another kind: model type -> the layer, and the nearest family.
REFUSED = {
  'longt5': ('its encoder attends to local blocks and block summaries', 't5'),
  'minimax': ('some of its layers are the recurrent layer Lightning Attention', 'minimax_m2'),
  'recurrent_gemma': ('some of its layers are the recurrent layer RG-LRU', 'gemma'),
  'deepseek_v32': (_SPARSE, 'deepseek_v3'),
  'deepseek_v4': ('its attention reads compressed keys, and its residual stream has hyper-connections', 'deepseek_v3'),
  'glm_moe_dsa': (_SPARSE, 'glm4_moe'),
  'longcat_flash': ('its blocks have two attentions, and experts without computation', 'deepseek_v3'),
  'mamba': (_MAMBA, 'llama'),
  'mamba2': (_MAMBA, 'llama'),
  'falcon_mamba': (_MAMBA, 'llama'),
  'falcon_h1': (_MAMBA, 'llama'),
  'bamba': (_MAMBA, 'llama'),
  'jamba': (_MAMBA, 'mixtral'),
  'zamba': (_MAMBA, 'llama'),
  'zamba2': (_MAMBA, 'llama'),
  'nemotron_h': (_MAMBA, 'nemotron'),
  'lfm2': ('some of its layers are short convolutions', 'llama'),
  'lfm2_moe': ('some of its layers are short convolutions', 'qwen3_moe'),
  'rwkv': ('its layers are recurrent (RWKV)', 'llama'),
  'xlstm': ('its layers are recurrent (xLSTM)', 'llama'),
  'mllama': ('some of its layers attend to images', 'llama'),
  'bitnet': ('its projections are the ternary layer BitLinear', 'llama'),
  'bloom': ('its attention has positions by ALiBi', 'gpt2'),
  'mpt': ('its attention has positions by ALiBi', 'gpt2'),
}
