"""Rules between the tensors of a family's files and our weights.

`torch.nn.Linear` is [out, in] and our kernels are [in, out]; heads are the outermost part of `out`. A family gives the
names (TensorNames), and the rules follow from the Decoder and from where its layers are (layer_places).

Shapes: D model, F ffn, H heads, G key/value heads, K head dim, V vocab, E experts.
"""

from collections.abc import Iterator, Sequence
import dataclasses

from spmd_tasks.bridges._operations import Operation, SplitHeads, Take, Transpose, Unstack
from spmd_tasks.bridges._operations import Split as SplitDim
from spmd_tasks.bridges._rules import Rule
from spmd_tasks.bridges.huggingface._decoder import Decoder, Place

_TRANSPOSE = Transpose((1, 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorNames:
  """What a family calls its tensors; those of a layer are below `layer`, those of an expert below `expert`.

  `qkv` and `gate_up` name fused projections, where a family has them. `interleaved`: the rotary positions turn the
  features 2i and 2i + 1 of a head together, and ours i and i + d/2.
  """

  table: str = 'model.embed_tokens.weight'
  head: str = 'lm_head.weight'
  final_norm: str = 'model.norm'
  layer: str = 'model.layers.{}.'
  attention_norm: str = 'input_layernorm'
  attention_post_norm: str = 'post_attention_layernorm'
  ffn_norm: str = 'post_attention_layernorm'
  ffn_post_norm: str = 'post_feedforward_layernorm'
  interleaved: bool = False
  query: str = 'self_attn.q_proj'
  key: str = 'self_attn.k_proj'
  value: str = 'self_attn.v_proj'
  qkv: str | None = None
  out: str = 'self_attn.o_proj'
  query_norm: str = 'self_attn.q_norm'
  key_norm: str = 'self_attn.k_norm'
  gate: str = 'mlp.gate_proj'
  up: str = 'mlp.up_proj'
  gate_up: str | None = None
  down: str = 'mlp.down_proj'
  router: str = 'mlp.gate'
  expert: str = 'mlp.experts.{}.'
  expert_gate: str = 'gate_proj'
  expert_up: str = 'up_proj'
  expert_down: str = 'down_proj'


def llama_rules(decoder: Decoder, places: Sequence[Place], names: TensorNames) -> Iterator[Rule]:
  """Yields the rules of models with the structure of Llama, Mixtral, Qwen and their relatives."""
  yield Rule(names.table, 'embedding/table')
  if not decoder.tied:
    yield Rule(names.head, 'embedding/softmax_kernel', _TRANSPOSE)
  yield Rule(f'{names.final_norm}.weight', 'final_norm/scale')
  for i, place in enumerate(places):
    layer = _Layer(names.layer.format(i), place)
    if decoder.pre_norm:
      yield layer.rule(f'{names.attention_norm}.weight', 'attention_norm/scale')
      yield layer.rule(f'{names.ffn_norm}.weight', 'ffn_norm/scale')
    if decoder.post_norm:
      yield layer.rule(f'{names.attention_post_norm}.weight', 'attention_post_norm/scale')
      yield layer.rule(f'{names.ffn_post_norm}.weight', 'ffn_post_norm/scale')
    yield from _attention(layer, decoder, names)
    yield from _experts(layer, decoder, names) if decoder.mixed[i] else _feed_forward(layer, decoder, names)


@dataclasses.dataclass(frozen=True)
class _Layer:
  """Makes rules between tensors below a prefix and our weights of a layer."""

  source: str
  place: Place

  def rule(self, source: str, target: str | list[str], *operations: Operation, expert: int | None = None) -> Rule:
    targets = target if isinstance(target, list) else [target]
    index = self.place.index if expert is None else (*self.place.index, expert)
    return Rule(self.source + source, [(self.place.prefix + name, *index) for name in targets], *operations)


def _attention(layer: _Layer, decoder: Decoder, names: TensorNames) -> Iterator[Rule]:
  heads = SplitHeads(decoder.head_dim)
  rotated: tuple[Operation, ...] = ()
  if names.interleaved:
    assert decoder.rotary is not None
    rotated = (pairs_to_halves(decoder.rotary.num_features or decoder.head_dim, decoder.head_dim),)
  projections = [('query', names.query, rotated), ('key', names.key, rotated), ('value', names.value, ())]
  if names.qkv is not None:
    sizes = tuple(n * decoder.head_dim for n in (decoder.num_heads, decoder.num_kv_heads, decoder.num_kv_heads))
    kernels = [f'attention/{ours}/kernel' for ours, _, _ in projections]
    yield layer.rule(f'{names.qkv}.weight', kernels, SplitDim(-2, sizes), _TRANSPOSE, heads)
  else:
    for ours, theirs, order in projections:
      yield layer.rule(f'{theirs}.weight', f'attention/{ours}/kernel', _TRANSPOSE, heads, *order)
  if decoder.qkv_bias:
    for ours, theirs, order in projections:
      yield layer.rule(f'{theirs}.bias', f'attention/{ours}/bias', heads, *order)
  yield layer.rule(f'{names.out}.weight', 'attention/out/kernel', heads, Transpose((1, 2, 0)))
  if decoder.out_bias:
    yield layer.rule(f'{names.out}.bias', 'attention/out/bias')
  if decoder.sinks:
    yield layer.rule('self_attn.sinks', 'attention/sinks')
  if decoder.qk_norm is not None:
    split = (heads,) if decoder.qk_norm == 'flat' else ()
    yield layer.rule(f'{names.query_norm}.weight', 'attention/query_norm/scale', *split)
    yield layer.rule(f'{names.key_norm}.weight', 'attention/key_norm/scale', *split)


def pairs_to_halves(num_features: int, size: int) -> Take:
  """Returns the reordering of a last dim, of which the first features rotate in pairs of neighbours, for our Rotary."""
  order = [*range(0, num_features, 2), *range(1, num_features, 2), *range(num_features, size)]
  return Take(-1, tuple(order))


def _feed_forward(layer: _Layer, decoder: Decoder, names: TensorNames) -> Iterator[Rule]:
  if names.gate_up is not None:
    sizes = (decoder.hidden_dim, decoder.hidden_dim)
    yield layer.rule(f'{names.gate_up}.weight', ['ffn/gate/kernel', 'ffn/up/kernel'], SplitDim(-2, sizes), _TRANSPOSE)
    yield layer.rule(f'{names.down}.weight', 'ffn/down/kernel', _TRANSPOSE)
    return
  for ours, theirs in (('gate', names.gate), ('up', names.up), ('down', names.down)):
    yield layer.rule(f'{theirs}.weight', f'ffn/{ours}/kernel', _TRANSPOSE)
    if decoder.mlp_bias:
      yield layer.rule(f'{theirs}.bias', f'ffn/{ours}/bias')


def _experts(layer: _Layer, decoder: Decoder, names: TensorNames) -> Iterator[Rule]:
  mixture = decoder.mixture
  assert mixture is not None
  yield layer.rule(f'{names.router}.weight', 'ffn/router/kernel', _TRANSPOSE)
  for e in range(mixture.num_experts):
    for ours, theirs in (('gate', names.expert_gate), ('up', names.expert_up), ('down', names.expert_down)):
      yield layer.rule(f'{names.expert.format(e)}{theirs}.weight', f'ffn/experts/{ours}', _TRANSPOSE, expert=e)


def gpt2_rules(decoder: Decoder, places: Sequence[Place], names: TensorNames) -> Iterator[Rule]:
  """Yields the rules of GPT-2, whose kernels are [in, out], with queries, keys and values in one."""
  heads = SplitHeads(decoder.head_dim)
  yield Rule(names.table, 'embedding/table')
  yield Rule('transformer.wpe.weight', 'positions/table')
  if not decoder.tied:
    yield Rule(names.head, 'embedding/softmax_kernel', _TRANSPOSE)
  norms = [('transformer.ln_f', 'final_norm')]
  for weight, ours in (('weight', 'scale'), ('bias', 'bias')):
    yield from (Rule(f'{theirs}.{weight}', f'{mine}/{ours}') for theirs, mine in norms)
  for i, place in enumerate(places):
    layer = _Layer(names.layer.format(i), place)
    for theirs, mine in (('ln_1', 'attention_norm'), ('ln_2', 'ffn_norm')):
      yield layer.rule(f'{theirs}.weight', f'{mine}/scale')
      yield layer.rule(f'{theirs}.bias', f'{mine}/bias')
    for weight, ours in (('weight', 'kernel'), ('bias', 'bias')):
      qkv = [f'attention/{name}/{ours}' for name in ('query', 'key', 'value')]
      yield layer.rule(f'attn.c_attn.{weight}', qkv, SplitHeads(decoder.embed_dim), Unstack(-2, 3), heads)
      yield layer.rule(f'mlp.c_fc.{weight}', f'ffn/up/{ours}')
      yield layer.rule(f'mlp.c_proj.{weight}', f'ffn/down/{ours}')
    # [H * K, D] -> [H, K, D]
    yield layer.rule('attn.c_proj.weight', 'attention/out/kernel', _TRANSPOSE, heads, Transpose((1, 2, 0)))
    yield layer.rule('attn.c_proj.bias', 'attention/out/bias')
