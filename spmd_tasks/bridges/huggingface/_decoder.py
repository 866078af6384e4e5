"""Decoder: what a config.json says about a model of any family, in our terms; made into a LanguageModel and back.

    decoder = Decoder(vocab_size=32_000, embed_dim=512, num_layers=8, ...)
    model = build_model(decoder, dtype='bfloat16')
    describe_model(model) == decoder

A family (_families.py) is a table between keys of config.json and fields of Decoder. This module is the one place that
says what a Decoder is as layers of ours; `describe_model` therefore only has to guess: it builds the model that it
describes, and any setting in which the two differ is an error.

Shapes: L layers, D model, F ffn, H heads, G key/value heads, K head dim, V vocab, E experts.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import flax.linen as nn

from spmd_tasks.errors import UserError
from spmd_tasks.layers import (
  BlockGroup,
  FeedForward,
  GatedFeedForward,
  LanguageModel,
  LayerNorm,
  RmsNorm,
  TokenEmbedding,
  TransformerBlock,
  TransformerStack,
)
from spmd_tasks.layers.attention import Attention, LearnedPositions, LongRopeScaling, Rotary
from spmd_tasks.layers.moe import Dropless, Experts, MixtureOfExperts, TopKRouter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
  """The feed-forward sublayer of layers with experts.

  Attributes:
    num_experts, num_selected, hidden_dim: E, k, and F of one expert.
    normalized: whether a token's gates are divided by their sum.
    score_function, gate_scale, balance_bias: as in TopKRouter.
    shared_dim: F of a gated network that every token passes too; None for none.
  """

  num_experts: int
  num_selected: int
  hidden_dim: int
  normalized: bool = True
  score_function: str = 'softmax'
  gate_scale: float = 1.0
  balance_bias: bool = False
  shared_dim: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
  """A decoder-only model.

  Attributes:
    vocab_size, embed_dim, num_layers: V, D, L.
    num_heads, num_kv_heads, head_dim: H, G, K; 0 stands for H and for D / H.
    hidden_dim: F of the layers without experts, or that of an expert if there are none.
    activation, gated, mlp_bias: of the feed-forward sublayers.
    norm, norm_eps: 'rms' or 'layer'.
    tied: whether the logits use the embedding's table.
    scaled_embedding: whether embeddings are multiplied by sqrt(D).
    logits_cap, attention_cap: soft caps of the logits and of attention's.
    norm_plus_one: whether norms multiply by 1 + scale.
    pre_norm, post_norm: of the blocks.
    positions: how many positions have a learned vector; None for rotary ones.
    rotary: of the attention.
    local_rotary: of the layers with the window; None: the same as of all others.
    qkv_bias, out_bias: of the attention's projections.
    qk_norm: 'head' normalizes queries and keys head by head, 'flat' all heads of a token together; None does not.
    clip_qkv, softmax_scale, sinks: of the attention.
    window: of the layers in `windowed`.
    windowed: for each layer, whether it has the window; () for no layer.
    mixture: of the layers in `mixed`.
    mixed: for each layer, whether it has experts; () for no layer.
  """

  vocab_size: int
  embed_dim: int
  num_layers: int
  num_heads: int
  num_kv_heads: int = 0
  head_dim: int = 0
  hidden_dim: int
  activation: str = 'silu'
  gated: bool = True
  mlp_bias: bool = False
  norm: str = 'rms'
  norm_eps: float = 1e-6
  tied: bool = False
  scaled_embedding: bool = False
  logits_cap: float | None = None
  attention_cap: float | None = None
  norm_plus_one: bool = False
  pre_norm: bool = True
  post_norm: bool = False
  positions: int | None = None
  rotary: Rotary | None = None
  local_rotary: Rotary | None = None
  qkv_bias: bool = False
  out_bias: bool = False
  qk_norm: str | None = None
  clip_qkv: float | None = None
  softmax_scale: float | None = None
  sinks: bool = False
  window: int | None = None
  windowed: tuple[bool, ...] = ()
  mixture: Mixture | None = None
  mixed: tuple[bool, ...] = ()

  def __post_init__(self):
    for name in ('windowed', 'mixed'):
      flags = tuple(getattr(self, name)) or (False,) * self.num_layers
      if len(flags) != self.num_layers:
        raise UserError(f'{len(flags)} kinds of layers are given for {self.num_layers} layers.')
      object.__setattr__(self, name, flags)
    for attribute, flags in (('window', self.windowed), ('mixture', self.mixed)):
      if not any(flags):
        object.__setattr__(self, attribute, None)
      elif getattr(self, attribute) is None:
        raise UserError(f'layers with a {attribute} are named, but none is given.')
    object.__setattr__(self, 'num_kv_heads', self.num_kv_heads or self.num_heads)
    object.__setattr__(self, 'head_dim', self.head_dim or self.embed_dim // self.num_heads)
    if self.mixture is not None and all(self.mixed):
      object.__setattr__(self, 'hidden_dim', self.mixture.hidden_dim)
    if self.local_rotary is not None and all(self.windowed):
      object.__setattr__(self, 'rotary', self.local_rotary)
    if not any(self.windowed) or self.local_rotary == self.rotary:
      object.__setattr__(self, 'local_rotary', None)

  def kind(self, layer: int) -> tuple[bool, bool]:
    """Returns what distinguishes a layer from others: whether it has the window, and experts."""
    return self.windowed[layer], self.mixed[layer]


def build_model(decoder: Decoder, *, dtype: str = 'float32') -> LanguageModel:
  """Returns the unbound model, which computes in `dtype`."""
  norm = _norm(decoder, dtype)
  return LanguageModel(
    embedding=TokenEmbedding(
      vocab_size=decoder.vocab_size,
      embed_dim=decoder.embed_dim,
      tied=decoder.tied,
      scale_sqrt_depth=decoder.scaled_embedding,
      logits_cap=decoder.logits_cap,
      dtype=dtype,
    ),
    stack=_stack([_block(decoder, layer, norm, dtype) for layer in range(decoder.num_layers)], decoder),
    final_norm=norm,
    positions=None if decoder.positions is None else LearnedPositions(max_len=decoder.positions, dtype=dtype),
  )


def _norm(decoder: Decoder, dtype: str, num_dims: int = 1) -> Any:
  if decoder.norm == 'layer':
    return LayerNorm(epsilon=decoder.norm_eps, dtype=dtype)
  return RmsNorm(epsilon=decoder.norm_eps, scale_plus_one=decoder.norm_plus_one, num_dims=num_dims, dtype=dtype)


def _block(decoder: Decoder, layer: int, norm: nn.Module, dtype: str) -> TransformerBlock:
  windowed, mixed = decoder.kind(layer)
  attention = Attention(
    num_heads=decoder.num_heads,
    num_kv_heads=decoder.num_kv_heads,
    head_dim=decoder.head_dim,
    window=decoder.window if windowed else None,
    rotary=decoder.local_rotary if windowed and decoder.local_rotary is not None else decoder.rotary,
    qk_norm=False if decoder.qk_norm is None else _norm(decoder, dtype, 2 if decoder.qk_norm == 'flat' else 1),
    clip_qkv=decoder.clip_qkv,
    softmax_scale=decoder.softmax_scale,
    logit_cap=decoder.attention_cap,
    sinks=decoder.sinks,
    use_bias=decoder.qkv_bias,
    out_bias=decoder.out_bias,
    dtype=dtype,
  )
  ffn = _experts(decoder, dtype) if mixed else _feed_forward(decoder, decoder.hidden_dim, dtype)
  return TransformerBlock(
    attention=attention, ffn=ffn, norm=norm, pre_norm=decoder.pre_norm, post_norm=decoder.post_norm
  )


def _feed_forward(decoder: Decoder, hidden_dim: int, dtype: str) -> FeedForward:
  cls = GatedFeedForward if decoder.gated else FeedForward
  return cls(hidden_dim=hidden_dim, activation=decoder.activation, use_bias=decoder.mlp_bias, dtype=dtype)


def _experts(decoder: Decoder, dtype: str) -> MixtureOfExperts:
  mixture = decoder.mixture
  assert mixture is not None
  return MixtureOfExperts(
    router=TopKRouter(
      num_experts=mixture.num_experts,
      num_selected=mixture.num_selected,
      score_function=mixture.score_function,
      normalize_gates=1.0 if mixture.normalized else None,
      gate_scale=mixture.gate_scale,
      balance_bias=mixture.balance_bias,
    ),
    experts=Experts(
      num_experts=mixture.num_experts, hidden_dim=mixture.hidden_dim, activation=decoder.activation, dtype=dtype
    ),
    computation=Dropless(),
    shared_expert=None if mixture.shared_dim is None else _feed_forward(decoder, mixture.shared_dim, dtype),
  )


def _stack(blocks: Sequence[TransformerBlock], decoder: Decoder) -> nn.Module:
  """Returns a stack of the blocks: equal ones, or the shortest pattern that repeats, are scanned."""
  kinds = [decoder.kind(layer) for layer in range(decoder.num_layers)]
  period = _period(kinds)
  block = blocks[0] if period == 1 else BlockGroup(blocks=tuple(blocks[:period]))
  return TransformerStack(block=block, num_layers=len(blocks) // period)


def _period(kinds: Sequence[Any]) -> int:
  """Returns the length of the shortest pattern whose repeats are the whole sequence."""
  length = len(kinds)
  return next(n for n in range(1, length + 1) if length % n == 0 and [*kinds[:n]] * (length // n) == [*kinds])


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a layer's weights are: `prefix` of their names, and the index in their stacked dims, as in checkpoints."""

  prefix: str
  index: tuple[int, ...]
  block: TransformerBlock


def layer_places(stack: Any, prefix: str = 'stack/') -> list[Place]:
  """Returns the places of a stack's layers, in the order of execution.

  Raises:
    UserError: the stack is of another kind than those that are made here.
  """
  if not hasattr(stack, 'block') or not hasattr(stack, 'num_layers'):
    raise UserError(f'a {type(stack).__name__} has no counterpart in any family of Hugging Face.')
  templates = stack.block.blocks if isinstance(stack.block, BlockGroup) else (stack.block,)
  names = [f'block_{i}/' for i in range(len(templates))] if isinstance(stack.block, BlockGroup) else ['']
  if not all(isinstance(template, TransformerBlock) for template in templates):
    names = [type(template).__name__ for template in templates]
    raise UserError(f'blocks {names} have no counterpart in any family of Hugging Face.')
  return [
    Place(f'{prefix}layers/{name}', (i,), template)
    for i in range(stack.num_layers)
    for name, template in zip(names, templates)
  ]


def describe_model(model: Any) -> Decoder:
  """Returns the Decoder whose model computes what this one does.

  Raises:
    UserError: no Decoder says what the model is; the settings in question are named.
  """
  if not isinstance(model, LanguageModel):
    raise UserError(f'a {type(model).__name__} is no LanguageModel, so that no family of Hugging Face has it.')
  blocks = [place.block for place in layer_places(model.stack)]
  try:
    decoder = _guess(model, blocks)
  except (AttributeError, TypeError) as error:
    raise UserError(f'the model has parts that no family of Hugging Face has ({error}).') from error
  built = build_model(decoder)
  differences = _differences(_settings(built, layer_places(built.stack)), _settings(model, layer_places(model.stack)))
  if differences:
    raise UserError(f'no family of Hugging Face has these settings of the model: {"; ".join(differences[:5])}.')
  return decoder


def _guess(model: Any, blocks: Sequence[Any]) -> Decoder:
  attentions = [block.attention for block in blocks]
  attention, embed_dim = attentions[0], model.embedding.embed_dim
  mixed = tuple(isinstance(block.ffn, MixtureOfExperts) for block in blocks)
  dense = next((block.ffn for block, is_mixed in zip(blocks, mixed) if not is_mixed), None)
  experts = next((block.ffn for block, is_mixed in zip(blocks, mixed) if is_mixed), None)
  mixture: Mixture | None = None
  hidden: Any = dense
  if experts is not None:
    hidden = experts.experts if dense is None else dense
    mixture = Mixture(
      num_experts=experts.experts.num_experts,
      num_selected=experts.router.num_selected,
      hidden_dim=experts.experts.hidden_dim,
      normalized=experts.router.normalize_gates is not None,
      score_function=experts.router.score_function,
      gate_scale=experts.router.gate_scale,
      balance_bias=experts.router.balance_bias,
      shared_dim=None if experts.shared_expert is None else experts.shared_expert.hidden_dim,
    )
  return Decoder(
    vocab_size=model.embedding.vocab_size,
    embed_dim=embed_dim,
    num_layers=len(blocks),
    num_heads=attention.num_heads,
    num_kv_heads=attention.num_kv_heads or attention.num_heads,
    head_dim=attention.head_dim or embed_dim // attention.num_heads,
    hidden_dim=hidden.hidden_dim,
    activation=hidden.activation,
    gated=dense is None or isinstance(dense, GatedFeedForward),
    mlp_bias=dense is not None and dense.use_bias,
    norm='layer' if isinstance(model.final_norm, LayerNorm) else 'rms',
    norm_eps=model.final_norm.epsilon,
    tied=model.embedding.tied,
    scaled_embedding=model.embedding.scale_sqrt_depth,
    logits_cap=model.embedding.logits_cap,
    attention_cap=attention.logit_cap,
    norm_plus_one=getattr(model.final_norm, 'scale_plus_one', False),
    pre_norm=blocks[0].pre_norm,
    post_norm=blocks[0].post_norm,
    positions=None if model.positions is None else model.positions.max_len,
    rotary=_canonical_rotary(next((each for each in attentions if each.window is None), attention).rotary),
    local_rotary=_canonical_rotary(next((each for each in attentions if each.window is not None), attention).rotary),
    qkv_bias=attention.use_bias,
    out_bias=attention.use_bias if attention.out_bias is None else attention.out_bias,
    qk_norm=_qk_norm_kind(attention.qk_norm),
    clip_qkv=attention.clip_qkv,
    softmax_scale=attention.softmax_scale,
    sinks=attention.sinks,
    window=next((each.window for each in attentions if each.window is not None), None),
    windowed=tuple(each.window is not None for each in attentions),
    mixture=mixture,
    mixed=mixed,
  )


def _qk_norm_kind(norm: Any) -> str | None:
  if not norm:
    return None
  return 'flat' if isinstance(norm, RmsNorm) and norm.num_dims == 2 else 'head'


def _canonical_rotary(rotary: Rotary | None) -> Rotary | None:
  """Returns the rotary positions without what a config.json does not say: which factors of LongRoPE are in use."""
  if rotary is None or not isinstance(rotary.scaling, LongRopeScaling):
    return rotary
  return dataclasses.replace(rotary, scaling=dataclasses.replace(rotary.scaling, is_long=False))


# Settings that say how a model is computed, initialised or trained, and not what it computes.
_NO_MATTER = {
  *('dtype', 'parent', 'name', 'implementation', 'dropout_rate', 'jitter_eps', 'computation'),
  *('init_scale', 'out_init_scale', 'down_init_scale', 'table_init'),
  *('load_balance_shards', 'load_balance_divide_by_k'),
}


def _settings(model: Any, places: Sequence[Place]) -> dict[str, Any]:
  """Returns the settings that decide what a model computes, by path."""
  parts = {'embedding': model.embedding, 'final_norm': model.final_norm, 'positions': model.positions}
  parts |= {f'layer {i}': place.block for i, place in enumerate(places)}
  found: dict[str, Any] = {}
  for name, part in parts.items():
    _collect(part, name, model.embedding.embed_dim, found)
  return found


def _collect(value: Any, path: str, embed_dim: int, found: dict[str, Any]) -> None:
  if isinstance(value, Rotary):
    value = _canonical_rotary(value)
  if not dataclasses.is_dataclass(value) or isinstance(value, Rotary):
    found[path] = value
    return
  found[path] = type(value).__name__
  fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
  if isinstance(value, Attention):  # None stands for a number
    fields['num_kv_heads'] = value.num_kv_heads or value.num_heads
    fields['head_dim'] = value.head_dim or embed_dim // value.num_heads
    fields['out_bias'] = value.use_bias if value.out_bias is None else value.out_bias
    fields['qk_norm'] = RmsNorm() if value.qk_norm is True else value.qk_norm
  for name, item in fields.items():
    if name not in _NO_MATTER and not name.endswith('split_dims'):
      _collect(item, f'{path}.{name}', embed_dim, found)


def _differences(expressible: Mapping[str, Any], actual: Mapping[str, Any]) -> list[str]:
  return [
    f'{path} = {actual.get(path)!r}, not {expressible.get(path)!r}'
    for path in dict.fromkeys([*expressible, *actual])
    if actual.get(path) != expressible.get(path)
  ]
