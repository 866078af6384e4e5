"""Describes a LanguageModel as a Decoder, and locates the weights of its layers.

`describe_model` guesses a Decoder, builds its model, and compares the two models; an error names the settings that
differ. So a user's own model is accepted if a family can express it.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

from spmd_tasks.bridges.huggingface._decoder import (
  NORMS,
  Decoder,
  DeltaNet,
  Latent,
  Mixture,
  Routing,
  build_model,
)
from spmd_tasks.errors import UserError
from spmd_tasks.layers import (
  AltUpBlock,
  BlockGroup,
  EncoderDecoderLm,
  FeedForward,
  GatedFeedForward,
  LanguageModel,
  LayerNorm,
  RmsNorm,
  StackSequence,
  TransformerBlock,
  TransformerStack,
)
from spmd_tasks.layers.attention import Attention, LatentAttention, LongRopeScaling, Rotary
from spmd_tasks.layers.moe import MixtureOfExperts
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.layers.recurrent import GatedDeltaNet


@dataclasses.dataclass(frozen=True)
class LayerSlot:
  """A layer's weights in a checkpoint: the prefix of their names, and the layer's index in their stacked dims."""

  prefix: str
  index: tuple[int, ...]
  block: TransformerBlock


def layer_slots(stack: Any, prefix: str = 'stack/') -> list[LayerSlot]:
  """Returns the slot of each layer of a stack, in the order of execution.

  Raises a UserError if the stack is not one of this package's, or its blocks are not TransformerBlocks.
  """
  if isinstance(stack, StackSequence):
    return [slot for i, part in enumerate(stack.stacks) for slot in layer_slots(part, f'{prefix}stack_{i}/')]
  if not isinstance(stack, TransformerStack | PipelinedStack):
    raise UserError(f'the stack is a {type(stack).__name__}, which no Hugging Face model has: use a TransformerStack.')
  blocks: dict[str, Any] = {'': stack.block}
  if isinstance(stack.block, BlockGroup):
    blocks = {f'block_{i}/': block for i, block in enumerate(stack.block.blocks)}
  if other := next((block for block in blocks.values() if not isinstance(block, TransformerBlock)), None):
    raise UserError(f'a block is a {type(other).__name__}, which no Hugging Face model has: use TransformerBlock.')
  return [
    LayerSlot(f'{prefix}layers/{name}', (i,), block) for i in range(stack.num_layers) for name, block in blocks.items()
  ]


def model_slots(model: Any) -> list[LayerSlot]:
  """Returns the slots of all layers of a model: the encoder, the decoder, and the multi-token prediction heads.

  Raises a UserError like `layer_slots`.
  """
  encoder = layer_slots(model.encoder_stack, 'encoder_stack/') if isinstance(model, EncoderDecoderLm) else []
  heads = range(num_nextn_heads(model))
  nextn = [slot for k in heads for slot in layer_slots(model.nextn_head.stack, f'nextn_{k}/stack/')]
  return encoder + layer_slots(model.stack) + nextn


def num_nextn_heads(model: Any) -> int:
  """Returns the number of multi-token prediction heads of a model."""
  return getattr(model, 'num_nextn_predict_layers', 0)


def describe_model(model: Any) -> Decoder:
  """Returns the Decoder that describes a model.

  Raises a UserError that names the settings of the model that no Decoder can express.
  """
  if not isinstance(model, LanguageModel):
    raise UserError(f'the model is a {type(model).__name__}: only a LanguageModel can be a Hugging Face model.')
  try:
    blocks = [slot.block for slot in model_slots(model) if not slot.prefix.startswith('nextn_')]
    decoder = _guess(model, blocks)
  except (AttributeError, TypeError) as error:
    raise UserError(f'the model has layers that no Hugging Face model has ({error}).') from error
  expressible, actual = _settings(build_model(decoder)), _settings(model)
  pairs = {path: (actual.get(path), expressible.get(path)) for path in dict.fromkeys([*expressible, *actual])}
  if differences := [f'{path} = {ours!r}, not {theirs!r}' for path, (ours, theirs) in pairs.items() if ours != theirs]:
    raise UserError(f'no Hugging Face model has these settings: {"; ".join(differences[:5])}.')
  return decoder


def _guess(model: Any, blocks: Sequence[Any]) -> Decoder:
  """Returns the Decoder that describes the model if any does; unchecked."""
  mixed = tuple(isinstance(block.ffn, MixtureOfExperts) for block in blocks)
  dense = next((block.ffn for block, is_mixed in zip(blocks, mixed) if not is_mixed), None)
  experts = next((block.ffn for block, is_mixed in zip(blocks, mixed) if is_mixed), None)
  mixture = None
  num_encoder_layers = len(blocks) - len(layer_slots(model.stack))
  attentions = [block.attention for block in blocks[num_encoder_layers:]]
  recurrent = tuple(isinstance(attention, GatedDeltaNet) for attention in attentions)
  full = blocks[num_encoder_layers + recurrent.index(False)] if False in recurrent else blocks[0]
  hidden: Any = dense
  if experts is not None:
    hidden = experts.experts if dense is None else dense
    mixture = Mixture(
      routing=_same_fields(Routing, experts.router),
      hidden_dim=experts.experts.hidden_dim,
      shared_dim=None if experts.shared_expert is None else experts.shared_expert.hidden_dim,
      shared_gate=experts.shared_gate,
      branch_norms=experts.branch_norm is not None,
      gates_inputs=experts.experts.gates_inputs,
      row_capacity=experts.row_capacity,
    )
  shared = [block for block in blocks if getattr(block.attention, 'reads_kv', None)]
  own_bias = getattr(full.attention, 'position_bias', None)
  bias = model.position_bias or own_bias
  return Decoder(
    vocab_size=model.embedding.vocab_size,
    embed_dim=model.embedding.embed_dim,
    num_layers=len(attentions),
    hidden_dim=hidden.hidden_dim,
    shared_hidden_dim=next((block.ffn.hidden_dim for block in shared if isinstance(block.ffn, FeedForward)), 0),
    num_kv_shared=len(shared),
    sparsity=tuple(getattr(block.ffn, 'sparsity', 0.0) for block in blocks[num_encoder_layers:]),
    num_streams=model.streams.num_streams if model.streams else 0,
    residual_rank=blocks[0].laurel.rank if isinstance(blocks[0], AltUpBlock) else 0,
    layer_vocab_size=model.layer_embedding.vocab_size if model.layer_embedding else 0,
    layer_dim=model.layer_embedding.dim if model.layer_embedding else 0,
    activation=hidden.activation,
    gated=hidden.gated if dense is None else isinstance(dense, GatedFeedForward),
    mlp_bias=any(layer is not None and layer.use_bias for layer in (dense, experts and experts.shared_expert)),
    norm=_guess_norm(model.final_norm),
    norm_eps=model.final_norm.epsilon,
    tied=model.embedding.tied,
    num_labels=getattr(model.embedding, 'num_labels', None),
    scaled_embedding=model.embedding.scale_sqrt_depth,
    scale_logits=model.embedding.scale_logits,
    embedding_multiplier=model.embedding.embedding_multiplier,
    logits_multiplier=model.embedding.logits_multiplier,
    residual_multiplier=blocks[0].residual_multiplier,
    logits_bias=model.embedding.use_bias,
    logits_cap=model.embedding.logits_cap,
    norm_plus_one=getattr(model.final_norm, 'scale_plus_one', False),
    pre_norm=full.pre_norm,
    post_norm=full.post_norm,
    parallel=blocks[0].parallel,
    output_scale=blocks[0].output_scale,
    positions=None if model.positions is None else model.positions.max_len,
    mixture=mixture,
    mixed=mixed[num_encoder_layers:],
    delta_net=_guess_delta_net(blocks[num_encoder_layers:], full),
    recurrent=recurrent,
    num_encoder_layers=num_encoder_layers,
    encoder_mixed=mixed[:num_encoder_layers],
    bias_per_layer=own_bias is not None,
    num_nextn=num_nextn_heads(model),
    num_buckets=bias and bias.num_buckets,
    max_distance=bias and bias.max_distance,
    **_guess_attention(attentions, model.embedding.embed_dim),
  )


def _guess_norm(norm: Any) -> str:
  def matches(cls: type, settings: Mapping[str, bool]) -> bool:
    default = cls()
    names = ('use_scale', 'use_bias') if cls is LayerNorm else ()
    return isinstance(norm, cls) and all(getattr(norm, x) == settings.get(x, getattr(default, x)) for x in names)

  return next((name for name, (cls, settings) in NORMS.items() if matches(cls, settings)), 'rms')


def _guess_qk_norm(attention: Attention) -> str | None:
  if not attention.qk_norm:
    return None
  if isinstance(attention.qk_norm, LayerNorm):
    return 'layer_by_head' if attention.qk_norm.num_weight_dims == 2 else 'layer'
  if not getattr(attention.qk_norm, 'use_scale', True):
    return 'unscaled'
  if attention.norms_rotated:
    return 'rotated'
  return 'flat' if getattr(attention.qk_norm, 'num_dims', 1) == 2 else 'head'


def _same_fields(cls: Any, layer: Any) -> Any:
  return cls(**{field.name: getattr(layer, field.name) for field in dataclasses.fields(cls)})


def _guess_delta_net(blocks: Sequence[TransformerBlock], full: TransformerBlock) -> DeltaNet | None:
  block: Any = next((block for block in blocks if isinstance(block.attention, GatedDeltaNet)), None)
  if block is None:
    return None
  layer, own_norms = block.attention, (block.pre_norm, block.post_norm) != (full.pre_norm, full.post_norm)
  settings: dict[str, Any] = {field.name: getattr(layer, field.name, None) for field in dataclasses.fields(DeltaNet)}
  settings['num_key_heads'] = layer.num_key_heads or layer.num_heads
  return DeltaNet(**settings | {'epsilon': layer.out_norm.epsilon, 'has_own_norms': own_norms})


def _guess_attention(layers: Sequence[Any], embed_dim: int) -> dict[str, Any]:
  """Returns fields of the Decoder, from the `attention` of each block."""
  attentions = [layer for layer in layers if not isinstance(layer, GatedDeltaNet)]
  if not attentions:
    raise UserError('the model has no attention, which every Hugging Face model with recurrent layers has in some.')
  first = attentions[0]
  if isinstance(first, LatentAttention):
    latent = _same_fields(Latent, first)
    biases = {'qkv_bias': first.use_bias, 'out_bias': first.use_bias}
    return {'num_heads': first.num_heads, 'latent': latent, 'rotary': first.rotary, **biases}
  sizes: dict[str, int] = {}
  for attention in (first, *attentions):
    names = ('num_kv_heads', 'head_dim') if attention.window or attention.chunk else ('full_kv_heads', 'full_head_dim')
    values = attention.num_kv_heads or first.num_heads, attention.head_dim or embed_dim // first.num_heads
    sizes |= dict(zip(names, values, strict=True))
  windows = [attention.window or attention.chunk for attention in attentions]
  rotated = [attention for attention in attentions if attention.rotary is not None] or [first]
  local = next((attention for attention in rotated if attention.window or attention.chunk), None)
  full = next((attention for attention in rotated if not (attention.window or attention.chunk)), rotated[0])

  def per_layer(has: Callable[[Any], bool]) -> tuple[bool, ...]:
    return tuple(not isinstance(layer, GatedDeltaNet) and has(layer) for layer in layers)

  return {
    'num_heads': first.num_heads,
    **sizes,
    'value_norm': first.value_norm is not None,
    'values_from_keys': any(attention.values_from_keys for attention in attentions),
    'attention_cap': first.logit_cap,
    'rotary': _canonical_rotary(full.rotary),
    'local_rotary': None if local is None else _canonical_rotary(local.rotary),
    'qkv_bias': first.use_bias,
    'out_bias': first.use_bias if first.out_bias is None else first.out_bias,
    'unrotated': per_layer(lambda attention: attention.rotary is None),
    'temperature': next((attention.temperature for attention in attentions if attention.temperature), None),
    'qk_norm': _guess_qk_norm(rotated[0]),
    'clip_qkv': first.clip_qkv,
    'softmax_scale': first.softmax_scale,
    'sinks': first.sinks,
    'output_gate': first.output_gate,
    'window': next(filter(None, windows), None),
    'windowed': per_layer(lambda attention: bool(attention.window or attention.chunk)),
    'chunked': any(attention.chunk for attention in attentions),
  }


def _canonical_rotary(rotary: Rotary | None) -> Rotary | None:
  """Returns the rotary positions without LongRoPE's `is_long`, which config.json does not have."""
  if rotary is None or not isinstance(rotary.scaling, LongRopeScaling):
    return rotary
  return dataclasses.replace(rotary, scaling=dataclasses.replace(rotary.scaling, is_long=None))


# Settings that affect how a model is computed, initialised or trained, but not what it computes.
_IRRELEVANT_SETTINGS = {
  *('dtype', 'parent', 'name', 'implementation', 'dropout_rate', 'jitter_eps', 'computation'),
  *('gradient_keys', 'qk_clip', 'chunk_tokens'),
  *('init_scale', 'query_init_scale', 'out_init_scale', 'down_init_scale', 'table_init', 'softmax_init'),
  *('dropout_broadcast_dims', 'even_padding'),
  *('load_balance_shards', 'load_balance_divide_by_k', 'padding'),
  *('adapters', 'adapter'),  # not part of the base model
}


def _settings(model: Any) -> dict[str, Any]:
  """Returns the settings that affect what a model computes, by path."""
  names = (
    'embedding',
    'final_norm',
    'positions',
    'layer_embedding',
    'streams',
    'position_bias',
    'encoder_norm',
    'encoder_position_bias',
  )
  parts = {name: getattr(model, name, None) for name in names}
  parts['nextn_head.norm'] = getattr(getattr(model, 'nextn_head', None), 'norm', None)
  parts |= {f'layer {i}': slot.block for i, slot in enumerate(model_slots(model))}
  settings: dict[str, Any] = {}
  for name, part in parts.items():
    _collect_settings(part, name, model.embedding.embed_dim, settings)
  return settings


def _collect_settings(value: Any, path: str, embed_dim: int, settings: dict[str, Any]) -> None:
  if isinstance(value, Rotary):
    value = _canonical_rotary(value)
  if not dataclasses.is_dataclass(value) or isinstance(value, Rotary):
    settings[path] = value
    return
  settings[path] = getattr(value, 'counterpart', type(value)).__name__
  fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
  if isinstance(value, GatedDeltaNet):  # resolve defaults
    fields['num_key_heads'] = value.num_key_heads or value.num_heads
  if isinstance(value, Attention):
    fields['num_kv_heads'] = value.num_kv_heads or value.num_heads
    fields['head_dim'] = value.head_dim or embed_dim // value.num_heads
    fields['out_bias'] = value.use_bias if value.out_bias is None else value.out_bias
    fields['qk_norm'] = RmsNorm() if value.qk_norm is True else value.qk_norm
  for name, item in fields.items():
    if name not in _IRRELEVANT_SETTINGS and not name.endswith('split_dims'):
      _collect_settings(item, f'{path}.{name}', embed_dim, settings)
