"""Decoder: a family-independent description of a model, and the LanguageModel that it builds.

    decoder = Decoder(vocab_size=32_000, embed_dim=512, num_layers=8, ...)
    model = build_model(decoder, dtype='bfloat16')
    describe_model(model) == decoder               # _describe.py

A family (_families.py) is a table between keys of config.json and fields of Decoder. Only this module maps a Decoder to
layers.

Shapes: L layers, D model, F ffn, H heads, G key/value heads, K head dim, V vocab, E experts.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import itertools
from typing import Any, Literal, NamedTuple

import flax.linen as nn

from spmd_tasks.errors import UserError
from spmd_tasks.layers import (
  AltUp,
  AltUpBlock,
  BlockGroup,
  EncoderDecoderLm,
  FeedForward,
  GatedFeedForward,
  LanguageModel,
  LayerEmbedding,
  LayerInput,
  LayerNorm,
  LearnedResidual,
  NextnHead,
  NextnLanguageModel,
  ResidualStreams,
  RmsNorm,
  ScoreEmbedding,
  StackSequence,
  TokenEmbedding,
  TransformerBlock,
  TransformerStack,
)
from spmd_tasks.layers.attention import (
  Attention,
  LatentAttention,
  LearnedPositions,
  RelativePositionBias,
  Rotary,
  YarnScaling,
)
from spmd_tasks.layers.attention.rotary_scaling import yarn_magnitude
from spmd_tasks.layers.attention.temperature import Temperature
from spmd_tasks.layers.moe import Dropless, Experts, MixtureOfExperts, TopKRouter
from spmd_tasks.layers.recurrent import GatedDeltaNet


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
  """TopKRouter's settings that a config.json has, by TopKRouter's names; `use_bias` also applies to the experts."""

  num_experts: int
  num_selected: int
  normalize_gates: float | None = 1.0
  score_function: str = 'softmax'
  gate_scale: float = 1.0
  expert_scales: bool = False
  gate_margin: float | None = None
  balance_bias: bool = False
  num_groups: int = 1
  num_selected_groups: int | None = None
  group_score: Literal['max', 'top2_sum'] = 'max'
  use_bias: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
  """The feed-forward sublayer of layers with experts.

  Attributes:
    routing: the settings of the router.
    hidden_dim: F of one expert.
    shared_dim: F of the shared experts, one gated network for all tokens; None for no shared experts.
    shared_gate: whether the shared experts have a gate.
    branch_norms: whether the router, the experts and the shared experts have norms of their own.
    gates_inputs: whether gates multiply the experts' inputs.
    row_capacity: maximum number of tokens of a row per expert; None for no limit.
  """

  routing: Routing
  hidden_dim: int
  shared_dim: int | None = None
  shared_gate: bool = False
  branch_norms: bool = False
  gates_inputs: bool = False
  row_capacity: int | None = None


# Kinds of norms: the layer and its settings.
NORMS: dict[str, tuple[Any, dict[str, bool]]] = {
  'rms': (RmsNorm, {}),
  'layer': (LayerNorm, {}),
  'layer_without_bias': (LayerNorm, {'use_bias': False}),
  'layer_without_weights': (LayerNorm, {'use_bias': False, 'use_scale': False}),
}


class Kind(NamedTuple):
  """What distinguishes a layer from others; layers of one kind are equal. See Decoder."""

  windowed: bool = False
  mixed: bool = False
  unrotated: bool = False
  recurrent: bool = False
  kv: Literal['own', 'stored', 'shared'] = 'own'
  sparsity: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
  """The sizes of LatentAttention, by its names; `query_rank` None for full-rank queries."""

  query_rank: int | None
  kv_rank: int
  nope_head_dim: int
  rope_head_dim: int
  value_head_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNet:
  """The settings of GatedDeltaNet, by its names, with `epsilon` of its norm.

  Attributes:
    has_own_norms: whether blocks with it normalize the inputs of sublayers and not the outputs, while the others
      normalize the outputs and not the inputs (OLMo Hybrid).
  """

  num_heads: int
  num_key_heads: int
  key_head_dim: int
  value_head_dim: int
  conv_size: int = 4
  max_strength: float = 1.0
  feature_decays: bool = False
  gate_rank: int | None = None
  gate_activation: str = 'silu'
  epsilon: float = 1e-6
  has_own_norms: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
  """A decoder-only model, or T5's encoder and decoder, which share all settings except attention masks.

  Attributes:
    vocab_size: V.
    embed_dim: D.
    num_layers: L.
    num_heads: H.
    num_kv_heads: G; 0 stands for H.
    head_dim: K; 0 stands for D / H.
    full_kv_heads, full_head_dim: G and K of layers without a window; 0 stands for the same as of the others.
    num_kv_shared: number of layers, the last ones, whose attention reads the keys and values of the last layer before
      these with or without a window, as it has itself.
    hidden_dim: F of the layers without experts; if there are none, F of an expert.
    shared_hidden_dim: F of the layers that read the keys and values of others; 0 stands for the same.
    sparsity: per layer, the setting of GatedFeedForward; () for none.
    num_streams, residual_rank: N and R of AltUpBlocks; 0 for TransformerBlocks.
    layer_vocab_size, layer_dim: V and P of a LayerEmbedding; 0 for none.
    activation, gated, mlp_bias: settings of the feed-forward sublayers.
    norm, norm_eps: the kind of norm, one of NORMS, and its epsilon.
    tied: whether the logits use the embedding table.
    scaled_embedding: whether embeddings are multiplied by sqrt(D).
    scale_logits: whether logits are divided by sqrt(D).
    embedding_multiplier, logits_multiplier, residual_multiplier: factors of embeddings, of logits, and of the outputs
      of sublayers.
    logits_bias: whether logits have a bias.
    logits_cap, attention_cap: soft caps of the logits and of the attention logits.
    norm_plus_one: whether norms multiply by 1 + scale.
    pre_norm, post_norm: whether blocks normalize the input and the output of sublayers.
    parallel: whether both sublayers of a block read the same normalized input.
    positions: number of learned position embeddings; None for rotary positions.
    rotary: the rotary positions.
    local_rotary: the rotary positions of windowed layers; None for the same as `rotary`.
    unrotated: per layer, whether it has no rotary positions; () for no layer.
    temperature: the temperature of unrotated layers, or of all layers if none is unrotated.
    qkv_bias, out_bias: whether the attention projections have biases.
    qk_norm: 'head' normalizes queries and keys per head, 'flat' over all heads of a token, 'rotated' per head after
      the rotation, 'unscaled' likewise without scales and not in unrotated layers; 'layer' is a LayerNorm per head,
      'layer_by_head' one with scales of each head and no bias; None does not normalize.
    value_norm: whether values are normalized per head, without scales.
    values_from_keys: whether the values of layers without a window are the projected keys.
    output_scale: whether blocks have a scale of their output.
    clip_qkv, softmax_scale, sinks, output_gate: settings of Attention.
    latent: the sizes of LatentAttention; None for Attention.
    window: the attention window of windowed layers.
    windowed: per layer, whether it has the window; () for no layer.
    chunked: whether windowed layers attend within chunks of `window` tokens instead.
    mixture: the mixture of experts of mixed layers.
    mixed: per layer, whether it has experts; () for all layers, if there is a mixture.
    delta_net: the settings of recurrent layers, which have a GatedDeltaNet in place of attention.
    recurrent: per layer, whether it is recurrent; () for no layer.
    num_encoder_layers: number of encoder layers; 0 for a decoder-only model.
    encoder_mixed: `mixed` of the encoder.
    num_buckets, max_distance, bias_per_layer: T5's relative position biases.
    num_nextn: number of multi-token prediction heads, each with one block like the last layer, but not recurrent.
    num_labels: number of labels of a score head in place of the logits, as in a reward model; 0 for no head at all;
      None for a language model. If it is set, `tied` is true and has no meaning.
  """

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int = 0
  head_dim: int = 0
  full_kv_heads: int = 0
  full_head_dim: int = 0
  num_kv_shared: int = 0
  hidden_dim: int
  shared_hidden_dim: int = 0
  sparsity: tuple[float, ...] = ()
  num_streams: int = 0
  residual_rank: int = 0
  layer_vocab_size: int = 0
  layer_dim: int = 0
  activation: str = 'silu'
  gated: bool = True
  mlp_bias: bool = False
  norm: str = 'rms'
  norm_eps: float = 1e-6
  tied: bool = False
  scaled_embedding: bool = False
  scale_logits: bool = False
  embedding_multiplier: float = 1.0
  logits_multiplier: float = 1.0
  residual_multiplier: float = 1.0
  logits_bias: bool = False
  logits_cap: float | None = None
  attention_cap: float | None = None
  norm_plus_one: bool = False
  pre_norm: bool = True
  post_norm: bool = False
  parallel: bool = False
  positions: int | None = None
  rotary: Rotary | None = None
  local_rotary: Rotary | None = None
  unrotated: tuple[bool, ...] = ()
  temperature: Temperature | None = None
  qkv_bias: bool = False
  out_bias: bool = False
  qk_norm: str | None = None
  value_norm: bool = False
  values_from_keys: bool = False
  output_scale: bool = False
  clip_qkv: float | None = None
  softmax_scale: float | None = None
  sinks: bool = False
  output_gate: bool = False
  latent: Latent | None = None
  window: int | None = None
  windowed: tuple[bool, ...] = ()
  chunked: bool = False
  mixture: Mixture | None = None
  mixed: tuple[bool, ...] = ()
  delta_net: DeltaNet | None = None
  recurrent: tuple[bool, ...] = ()
  num_encoder_layers: int = 0
  encoder_mixed: tuple[bool, ...] = ()
  num_buckets: int | None = None
  max_distance: int | None = None
  bias_per_layer: bool = False
  num_nextn: int = 0
  num_labels: int | None = None

  def __post_init__(self):
    if self.num_labels is not None:
      object.__setattr__(self, 'tied', True)
    per_layer = dict.fromkeys(('windowed', 'unrotated', 'mixed', 'recurrent'), self.num_layers)
    for name, num_layers in (per_layer | {'encoder_mixed': self.num_encoder_layers}).items():
      flags = tuple(getattr(self, name)) or (name == 'mixed' and self.mixture is not None,) * num_layers
      if len(flags) != num_layers:
        raise UserError(f'the kinds of {len(flags)} layers are set, but there are {num_layers} layers.')
      object.__setattr__(self, name, flags)
    object.__setattr__(self, 'sparsity', self.sparsity or (0.0,) * self.num_layers)
    settings = {'window': self.windowed, 'mixture': self.encoder_mixed + self.mixed, 'delta_net': self.recurrent}
    for attribute, flags in settings.items():
      if not any(flags):
        object.__setattr__(self, attribute, None)
      elif getattr(self, attribute) is None:
        raise UserError(f'some layers have a {attribute}, but its settings are missing.')
    if self.latent is not None:
      object.__setattr__(self, 'num_kv_heads', self.num_heads)
      object.__setattr__(self, 'head_dim', self.latent.nope_head_dim + self.latent.rope_head_dim)
    object.__setattr__(self, 'num_kv_heads', self.num_kv_heads or self.num_heads)
    object.__setattr__(self, 'head_dim', self.head_dim or self.embed_dim // self.num_heads)
    for name, full_name in (('num_kv_heads', 'full_kv_heads'), ('head_dim', 'full_head_dim')):
      if not getattr(self, full_name) or all(self.windowed):
        object.__setattr__(self, full_name, getattr(self, name))
      if not any(self.windowed):
        object.__setattr__(self, name, getattr(self, full_name))
    if all(self.windowed):
      object.__setattr__(self, 'values_from_keys', False)
    if not any(self.windowed):
      object.__setattr__(self, 'chunked', False)
    if not self.layer_dim:
      object.__setattr__(self, 'layer_vocab_size', 0)
    if all(self.unrotated):  # as without rotary positions
      object.__setattr__(self, 'rotary', None)
    if self.rotary is None:
      object.__setattr__(self, 'unrotated', (False,) * self.num_layers)
      object.__setattr__(self, 'qk_norm', {'rotated': 'head', 'unscaled': None}.get(str(self.qk_norm), self.qk_norm))
    if self.mixture is not None and all(self.encoder_mixed + self.mixed):
      object.__setattr__(self, 'hidden_dim', self.mixture.hidden_dim)
    if not self.num_kv_shared or not self.shared_hidden_dim or all(self.mixed):
      object.__setattr__(self, 'shared_hidden_dim', self.hidden_dim)
    if self.local_rotary is not None and all(self.windowed):
      object.__setattr__(self, 'rotary', self.local_rotary)
    if not any(self.windowed) or self.local_rotary == self.rotary:
      object.__setattr__(self, 'local_rotary', None)


_MANY_BLOCKS, _MANY_LAYERS = 8, 200  # two cuts are tried only for more blocks to compile, and fewer layers
_PARTS = {'latent': Latent, 'mixture': Mixture, 'routing': Routing, 'delta_net': DeltaNet}


def decoder_of(fields: Mapping[str, Any]) -> Decoder:
  """Builds a Decoder from flat fields, such as `latent.kv_rank` and `mixture.routing.num_experts`."""
  return Decoder(**_nested(fields))


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
  nested: dict[str, Any] = {name: value for name, value in fields.items() if '.' not in name}
  for part in dict.fromkeys(name.partition('.')[0] for name in fields if '.' in name):
    part_fields = {
      name.removeprefix(f'{part}.'): value for name, value in fields.items() if name.startswith(f'{part}.')
    }
    nested[part] = _PARTS[part](**_nested(part_fields))
  return nested


def build_model(decoder: Decoder, *, dtype: str = 'float32') -> LanguageModel:
  """Builds the unbound model; it computes in `dtype`."""
  norm = _norm(decoder, dtype)
  flags = decoder.windowed, decoder.mixed, decoder.unrotated, decoder.recurrent, _kv_kinds(decoder), decoder.sparsity
  kinds = [Kind(*of_layer) for of_layer in zip(*flags, strict=True)]
  scores = {} if decoder.num_labels is None else {'num_labels': decoder.num_labels}
  embedding_class: Any = ScoreEmbedding if scores else TokenEmbedding
  parts: dict[str, Any] = {
    'embedding': embedding_class(
      vocab_size=decoder.vocab_size,
      embed_dim=decoder.embed_dim,
      tied=decoder.tied,
      scale_sqrt_depth=decoder.scaled_embedding,
      scale_logits=decoder.scale_logits,
      embedding_multiplier=decoder.embedding_multiplier,
      logits_multiplier=decoder.logits_multiplier,
      use_bias=decoder.logits_bias,
      logits_cap=decoder.logits_cap,
      dtype=dtype,
      **scores,
    ),
    'stack': _stack([_block(decoder, kind, norm, dtype) for kind in kinds], kinds),
    'final_norm': norm,
    'positions': None if decoder.positions is None else LearnedPositions(max_len=decoder.positions, dtype=dtype),
  }
  if decoder.layer_dim:
    parts['layer_embedding'] = LayerEmbedding(
      vocab_size=decoder.layer_vocab_size,
      num_layers=decoder.num_layers,
      dim=decoder.layer_dim,
      norm=norm,
      dtype=dtype,
    )
  if decoder.num_streams:
    parts['streams'] = ResidualStreams(num_streams=decoder.num_streams, embed_dim=decoder.embed_dim, dtype=dtype)
  if decoder.num_nextn:
    kind = kinds[-1]._replace(recurrent=False)
    head = NextnHead(stack=_stack([_block(decoder, kind, norm, dtype)], [kind]), norm=norm)
    return NextnLanguageModel(**parts, num_nextn_predict_layers=decoder.num_nextn, nextn_head=head)
  if not decoder.num_encoder_layers:
    return LanguageModel(**parts)
  encoder_kinds = [Kind(mixed=is_mixed) for is_mixed in decoder.encoder_mixed]
  blocks = [_block(decoder, kind, norm, dtype, encodes=True) for kind in encoder_kinds]
  parts |= {'encoder_stack': _stack(blocks, encoder_kinds), 'encoder_norm': norm}
  if not decoder.bias_per_layer:
    parts |= {'position_bias': _position_bias(decoder), 'encoder_position_bias': _position_bias(decoder, encodes=True)}
  return EncoderDecoderLm(**parts)


def _kv_kinds(decoder: Decoder) -> list[str]:
  """Returns, per layer, whether its keys and values are its own, stored for later layers, or shared by an earlier."""
  first = decoder.num_layers - decoder.num_kv_shared
  own, shared = decoder.windowed[:first], decoder.windowed[first:]
  stored = [first - 1 - own[::-1].index(is_windowed) for is_windowed in {*shared}]
  return [*('stored' if layer in stored else 'own' for layer in range(first)), *['shared'] * len(shared)]


def _position_bias(decoder: Decoder, *, encodes: bool = False) -> RelativePositionBias:
  buckets: Any = {'num_buckets': decoder.num_buckets, 'max_distance': decoder.max_distance}
  return RelativePositionBias(num_heads=decoder.num_heads, bidirectional=encodes, **buckets)


def _norm(decoder: Decoder, dtype: str) -> Any:
  cls, settings = NORMS[decoder.norm]
  return cls(epsilon=decoder.norm_eps, scale_plus_one=decoder.norm_plus_one, dtype=dtype, **settings)


def _qk_norm(decoder: Decoder, dtype: str, *, rotated: bool) -> Any:
  if decoder.qk_norm is None or (decoder.qk_norm == 'unscaled' and not rotated):
    return False
  special: dict[str, dict[str, Any]] = {
    **{'flat': {'num_dims': 2}, 'unscaled': {'use_scale': False}},
    'layer_by_head': {'use_bias': False, 'num_weight_dims': 2},
  }
  settings = special.get(decoder.qk_norm, {})
  if decoder.qk_norm.startswith('layer'):
    return LayerNorm(epsilon=decoder.norm_eps, dtype=dtype, **settings)
  return RmsNorm(epsilon=decoder.norm_eps, scale_plus_one=decoder.norm_plus_one, dtype=dtype, **settings)


def _block(decoder: Decoder, kind: Kind, norm: nn.Module, dtype: str, *, encodes: bool = False) -> TransformerBlock:
  settings: dict[str, Any] = {'causal': not encodes}
  if decoder.bias_per_layer:
    settings['position_bias'] = _position_bias(decoder, encodes=encodes)
  if kind.recurrent:
    attention: nn.Module = _delta_net(decoder, dtype)
  elif decoder.latent:
    attention = _latent_attention(decoder, dtype)
  else:
    attention = _attention(decoder, kind, dtype, **settings)
  hidden_dim = decoder.shared_hidden_dim if kind.kv == 'shared' else decoder.hidden_dim
  is_crossed = decoder.num_encoder_layers and not encodes
  pre_norm, post_norm = block_norms(decoder, is_recurrent=kind.recurrent)
  cls: Any = TransformerBlock
  streams: dict[str, Any] = {}
  if decoder.num_streams:
    altup = AltUp(num_streams=decoder.num_streams, norm=norm, dtype=dtype)
    residual = LearnedResidual(rank=decoder.residual_rank, norm=norm, dtype=dtype)
    cls, streams = AltUpBlock, {'altup': altup, 'laurel': residual}
  return cls(
    **streams,
    attention=attention,
    cross_attention=_attention(decoder, Kind(), dtype, cross=True) if is_crossed else None,
    ffn=_experts(decoder, dtype) if kind.mixed else _feed_forward(decoder, hidden_dim, dtype, kind.sparsity),
    layer_input=LayerInput(activation=decoder.activation, dtype=dtype) if decoder.layer_dim else None,
    norm=norm,
    pre_norm=pre_norm,
    post_norm=post_norm,
    ffn_pre_norm=False if kind.mixed and decoder.mixture and decoder.mixture.branch_norms else None,
    parallel=decoder.parallel,
    output_scale=decoder.output_scale,
    residual_multiplier=decoder.residual_multiplier,
  )


def block_norms(decoder: Decoder, *, is_recurrent: bool) -> tuple[bool, bool]:
  """Returns `pre_norm` and `post_norm` of a block."""
  if is_recurrent and decoder.delta_net is not None and decoder.delta_net.has_own_norms:
    return True, False
  return decoder.pre_norm, decoder.post_norm


def _delta_net(decoder: Decoder, dtype: str) -> GatedDeltaNet:
  settings = dict(vars(decoder.delta_net))
  del settings['has_own_norms']
  norm = RmsNorm(epsilon=settings.pop('epsilon'), dtype=dtype)
  return GatedDeltaNet(**settings, out_norm=norm, dtype=dtype)


def _attention(decoder: Decoder, kind: Kind, dtype: str, **settings: Any) -> Attention:
  rotary = decoder.local_rotary if kind.windowed and decoder.local_rotary is not None else decoder.rotary
  is_rotated = rotary is not None and not kind.unrotated
  if kind.windowed:
    settings['chunk' if decoder.chunked else 'window'] = decoder.window
  if kind.unrotated or not any(decoder.unrotated):
    settings['temperature'] = decoder.temperature
  if kind.kv != 'own':
    settings['stores_kv' if kind.kv == 'stored' else 'reads_kv'] = 'windowed' if kind.windowed else 'full'
  return Attention(
    num_heads=decoder.num_heads,
    num_kv_heads=decoder.num_kv_heads if kind.windowed else decoder.full_kv_heads,
    head_dim=decoder.head_dim if kind.windowed else decoder.full_head_dim,
    value_norm=RmsNorm(epsilon=decoder.norm_eps, use_scale=False, dtype=dtype) if decoder.value_norm else None,
    values_from_keys=decoder.values_from_keys and not kind.windowed,
    rotary=rotary if is_rotated else None,
    qk_norm=_qk_norm(decoder, dtype, rotated=is_rotated),
    norms_rotated=is_rotated and decoder.qk_norm in ('rotated', 'unscaled'),
    clip_qkv=decoder.clip_qkv,
    softmax_scale=decoder.softmax_scale,
    logit_cap=decoder.attention_cap,
    sinks=decoder.sinks,
    output_gate=decoder.output_gate,
    use_bias=decoder.qkv_bias,
    out_bias=decoder.out_bias,
    dtype=dtype,
    **settings,
  )


def _latent_attention(decoder: Decoder, dtype: str) -> LatentAttention:
  rotary, scale = decoder.rotary, None
  scaling = None if rotary is None else rotary.scaling
  if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
    scale = decoder.head_dim**-0.5 * yarn_magnitude(scaling.factor, scaling.mscale_all_dim) ** 2
  settings: dict[str, Any] = {'rotary': rotary, 'softmax_scale': scale, 'use_bias': decoder.qkv_bias, 'dtype': dtype}
  return LatentAttention(num_heads=decoder.num_heads, **vars(decoder.latent), **settings)


def _feed_forward(decoder: Decoder, hidden_dim: int, dtype: str, sparsity: float = 0.0) -> FeedForward:
  settings: Any = {'activation': decoder.activation, 'use_bias': decoder.mlp_bias, 'dtype': dtype}
  if decoder.gated:
    return GatedFeedForward(hidden_dim=hidden_dim, sparsity=sparsity, **settings)
  return FeedForward(hidden_dim=hidden_dim, **settings)


def _experts(decoder: Decoder, dtype: str) -> MixtureOfExperts:
  mixture = decoder.mixture
  assert mixture is not None
  norm = _norm if mixture.branch_norms else lambda *settings: None
  return MixtureOfExperts(
    router=TopKRouter(**vars(mixture.routing), input_norm=norm(decoder, 'float32')),
    experts=Experts(
      num_experts=mixture.routing.num_experts,
      hidden_dim=mixture.hidden_dim,
      gated=decoder.gated,
      activation=decoder.activation,
      gates_inputs=mixture.gates_inputs,
      use_bias=mixture.routing.use_bias,
      dtype=dtype,
    ),
    computation=Dropless(),
    row_capacity=mixture.row_capacity,
    shared_gate=mixture.shared_gate,
    branch_norm=norm(decoder, dtype),
    shared_expert=None if mixture.shared_dim is None else _feed_forward(decoder, mixture.shared_dim, dtype),
  )


def _stack(blocks: Sequence[TransformerBlock], kinds: Sequence[Kind]) -> nn.Module:
  """Returns a stack of the blocks, or several; layers that read keys and values of others have stacks of their own."""
  first = next((i for i, kind in enumerate(kinds) if kind.kv == 'shared'), 0)
  parts = ((blocks[:first], kinds[:first]), (blocks[first:], kinds[first:]))
  stacks = [stack for part, of_part in parts if part for stack in _stacks(part, of_part)]
  return stacks[0] if len(stacks) == 1 else StackSequence(stacks=tuple(stacks))


def _stacks(blocks: Sequence[TransformerBlock], kinds: Sequence[Kind]) -> list[TransformerStack]:
  """Returns stacks of the blocks, each of which scans over the shortest pattern that repeats in it."""
  borders = (0, *_cuts(kinds), len(kinds))
  return [_scanned(blocks[i:j], kinds[i:j]) for i, j in itertools.pairwise(borders)]


def _cuts(kinds: Sequence[Kind]) -> tuple[int, ...]:
  """Returns where to cut layers into stacks so that few blocks are compiled.

  There is one cut if it compiles fewer blocks than none, as with a first dense layer or a pattern that ends early, and
  there are two if they compile less than half of that, as with both (Kimi Linear).
  """
  known: dict[Kind, int] = {}
  numbers, num_layers = [known.setdefault(kind, len(known)) for kind in kinds], len(kinds)

  @functools.cache
  def num_compiled(*cuts: int) -> int:
    return sum(_period(numbers[i:j]) for i, j in itertools.pairwise((0, *cuts, num_layers)))

  inner = range(1, num_layers)
  once = min(((cut,) for cut in inner), key=lambda cuts: num_compiled(*cuts), default=())
  once = once if num_compiled(*once) < num_compiled() else ()
  if num_compiled(*once) <= _MANY_BLOCKS or num_layers > _MANY_LAYERS:
    return once
  twice = min(itertools.combinations(inner, 2), key=lambda cuts: num_compiled(*cuts))
  return twice if 2 * num_compiled(*twice) < num_compiled(*once) else once


def _scanned(blocks: Sequence[TransformerBlock], kinds: Sequence[Any]) -> TransformerStack:
  period = _period(kinds)
  block = blocks[0] if period == 1 else BlockGroup(blocks=tuple(blocks[:period]))
  return TransformerStack(block=block, num_layers=len(blocks) // period)


def _period(kinds: Sequence[Any]) -> int:
  """Returns the length of the shortest pattern that repeats to form the whole sequence."""
  length = len(kinds)
  return next(n for n in range(1, length + 1) if length % n == 0 and [*kinds[:n]] * (length // n) == [*kinds])
