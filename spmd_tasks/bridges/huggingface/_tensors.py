"""Rules between the tensors of a family's files and our weights.

`torch.nn.Linear` is [out, in] and our kernels are [in, out]; heads are the outermost part of `out`. The rules are
computed from the family's tensor names (TensorNames), the Decoder, and the slots of its layers (model_slots).

Shapes: D model, F ffn, H heads, G key/value heads, K head dim, V vocab, E experts.
"""

from collections.abc import Iterator, Sequence
import dataclasses
from typing import Any, Literal

from spmd_tasks.bridges._operations import Each, Operation, Reshape, Take, Transpose, split_heads
from spmd_tasks.bridges._operations import Split as SplitDim
from spmd_tasks.bridges._rules import Rule
from spmd_tasks.bridges.huggingface._decoder import NORMS, Decoder, DeltaNet, block_norms
from spmd_tasks.bridges.huggingface._describe import LayerSlot
from spmd_tasks.layers import LayerNorm
from spmd_tasks.layers.feed_forward import LEARNED_ACTIVATIONS

_TRANSPOSE = Transpose((1, 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorNames:
  """The names of a family's tensors.

  `layer` is the prefix of a layer's names, `expert` the prefix of an expert's. `qkv`, `gate_up` and `shared_gate_up`
  name fused projections, None for separate ones. If `interleaved`, rotary positions rotate the features 2i and 2i + 1
  of a head as a pair; ours rotate i and i + d/2. `fused_experts` names the kernels into and out of the hidden layers of
  all experts, None for a tensor per expert. Their `expert_layout` is 'halves', [E, D, 2F] and [E, F, D], with all
  columns of the gate first; 'interleaved', whose columns of gate and up alternate; or 'transposed', [E, 2F, D] and
  [E, D, F]. `recurrent` is the prefix of recurrent layers, and `delta_net` their layout, see `_delta_net`.

  `nextn_block` and `nextn_head` are the prefixes of a multi-token prediction head's block and of its other tensors, ''
  for the number after the last layer.
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
  balance_bias: str = 'mlp.gate.e_score_correction_bias'
  balance_bias_operations: tuple[Operation, ...] = ()
  shared: str = 'mlp.shared_experts.'
  shared_gate: str = 'mlp.shared_expert_gate'
  shared_gate_up: str | None = None
  shared_down: str = 'down_proj'
  expert: str = 'mlp.experts.{}.'
  expert_gate: str = 'gate_proj'
  expert_up: str = 'up_proj'
  expert_down: str = 'down_proj'
  fused_experts: tuple[str, str] | None = None
  expert_layout: Literal['halves', 'interleaved', 'transposed'] = 'halves'
  recurrent: str = 'linear_attn.'
  delta_net: Literal['by_key_head', 'fused', 'separate'] = 'fused'
  nextn_block: str = ''
  nextn_head: str = ''
  embedding_norm: str = 'enorm'
  hidden_norm: str = 'hnorm'
  nextn_projection: str = 'eh_proj'
  nextn_norm: str = 'shared_head.norm'

  def nextn_prefixes(self, decoder: Decoder, number: int) -> tuple[str, str]:
    """Returns the prefixes of the block and of the other tensors of a multi-token prediction head, from 0 on."""
    own = self.layer.format(decoder.num_layers + number)
    return (self.nextn_block or own).format(number), self.nextn_head or own


def llama_rules(decoder: Decoder, layers: Sequence[LayerSlot], names: TensorNames) -> Iterator[Rule]:
  """Yields the rules of families with the structure of Llama, such as Mixtral and Qwen."""
  yield Rule(names.table, 'embedding/table')
  if not decoder.tied:
    yield Rule(names.head, 'embedding/softmax_kernel', _TRANSPOSE)
  if decoder.logits_bias:
    yield Rule(names.head.replace('weight', 'bias'), 'embedding/softmax_bias')
  kind, norm_settings = NORMS[decoder.norm]
  norm_weights = [
    (theirs, ours)
    for theirs, ours, is_there in (
      ('weight', 'scale', norm_settings.get('use_scale', True)),
      ('bias', 'bias', kind is LayerNorm and norm_settings.get('use_bias', True)),
    )
    if is_there
  ]
  for theirs, ours in norm_weights:
    yield Rule(f'{names.final_norm}.{theirs}', f'final_norm/{ours}')
  if decoder.layer_dim:
    by_layer = _TRANSPOSE, split_heads(decoder.layer_dim)
    yield Rule('model.embed_tokens_per_layer.weight', 'layer_embedding/tokens/table')
    yield Rule('model.per_layer_model_projection.weight', 'layer_embedding/projection/kernel', *by_layer)
    yield Rule('model.per_layer_projection_norm.weight', 'layer_embedding/norm_of_projection/scale')
  for i in range(decoder.num_streams - 1):
    yield Rule(f'model.altup_projections.{i}.weight', [('streams/expand', i)], _TRANSPOSE)
    yield Rule(f'model.altup_unembed_projections.{i}.weight', [('streams/merge', i)], _TRANSPOSE)
  for i, slot in enumerate(layers):
    layer = _LayerRules(names.layer.format(i), slot)
    kind, is_head = min(i, decoder.num_layers - 1), i >= decoder.num_layers  # heads are like the last layer
    if is_head:
      block, prefix = names.nextn_prefixes(decoder, i - decoder.num_layers)
      layer = dataclasses.replace(layer, prefix=block)
    is_recurrent = decoder.recurrent[kind] and not is_head
    pre_norm, post_norm = block_norms(decoder, is_recurrent=is_recurrent)
    has_branch_norms = decoder.mixed[kind] and decoder.mixture is not None and decoder.mixture.branch_norms
    for their_norm, our_norm, is_there in (
      (names.attention_norm, 'attention_norm', pre_norm),
      (names.ffn_norm, 'ffn/shared_norm' if has_branch_norms else 'ffn_norm', pre_norm and not decoder.parallel),
      (names.attention_post_norm, 'attention_post_norm', post_norm),
      (names.ffn_post_norm, 'ffn_post_norm', post_norm),
    ):
      for theirs, ours in norm_weights if is_there else ():
        yield layer.rule(f'{their_norm}.{theirs}', f'{our_norm}/{ours}')
    if is_recurrent:
      assert decoder.delta_net is not None
      recurrent = dataclasses.replace(layer, prefix=layer.prefix + names.recurrent)
      yield from _delta_net(recurrent, decoder.delta_net, names.delta_net)
    elif decoder.latent is not None:
      yield from _latent_attention(layer, decoder, names)
    else:
      is_shared = kind >= decoder.num_layers - decoder.num_kv_shared
      yield from _attention(layer, decoder, names, is_windowed=decoder.windowed[kind], is_shared=is_shared)
    if decoder.layer_dim:
      yield layer.rule('per_layer_input_gate.weight', 'layer_input/gate/kernel', _TRANSPOSE)
      yield layer.rule('per_layer_projection.weight', 'layer_input/out/kernel', _TRANSPOSE)
      yield layer.rule('post_per_layer_input_norm.weight', 'layer_input_post_norm/scale')
    if decoder.num_streams:
      yield from _altup(layer, decoder)
    if decoder.output_scale:
      yield layer.rule('layer_scalar', 'output_scale')
    yield from _experts(layer, decoder, names) if decoder.mixed[kind] else _feed_forward(layer, decoder, names)
    if is_head:
      head = _LayerRules(prefix, LayerSlot(f'nextn_{i - decoder.num_layers}/', (), slot.block))
      yield head.rule(f'{names.embedding_norm}.weight', 'embedding_norm/scale')
      yield head.rule(f'{names.hidden_norm}.weight', 'hidden_norm/scale')
      yield head.rule(f'{names.nextn_projection}.weight', 'projection/kernel', _TRANSPOSE)
      yield head.rule(f'{names.nextn_norm}.weight', 'final_norm/scale')


@dataclasses.dataclass(frozen=True)
class _LayerRules:
  """Builds rules between the tensors with a prefix and the weights of one layer."""

  prefix: str
  slot: LayerSlot

  def rule(
    self, source: str | list[str], target: str | list[str], *operations: Operation, part: int | None = None
  ) -> Rule:
    """Returns a rule of whole weights, or of one of their experts or heads."""
    sources, targets = (names if isinstance(names, list) else [names] for names in (source, target))
    index = self.slot.index if part is None else (*self.slot.index, part)
    return Rule(
      [self.prefix + name for name in sources], [(self.slot.prefix + name, *index) for name in targets], *operations
    )


def _altup(layer: _LayerRules, decoder: Decoder) -> Iterator[Rule]:
  num = decoder.num_streams
  yield layer.rule('altup.router_norm.weight', 'altup/norm_of_input/scale')
  yield layer.rule('altup.modality_router.weight', 'altup/router/kernel', _TRANSPOSE)
  yield layer.rule('altup.prediction_coefs.weight', 'altup/prediction/kernel', _TRANSPOSE, split_heads(num))
  yield layer.rule('altup.correction_coefs.weight', 'altup/correction/kernel', _TRANSPOSE)
  yield layer.rule('altup.correct_output_scale', 'first_scale')
  yield layer.rule('laurel.linear_left.weight', 'laurel/left/kernel', _TRANSPOSE)
  yield layer.rule('laurel.linear_right.weight', 'laurel/right/kernel', _TRANSPOSE)
  yield layer.rule('laurel.post_laurel_norm.weight', 'laurel/out_norm/scale')


def _attention(
  layer: _LayerRules, decoder: Decoder, names: TensorNames, *, is_windowed: bool, is_shared: bool
) -> Iterator[Rule]:
  head_dim, num_kv_heads = decoder.full_head_dim, decoder.full_kv_heads
  if is_windowed:
    head_dim, num_kv_heads = decoder.head_dim, decoder.num_kv_heads
  heads, rotary = split_heads(head_dim), decoder.rotary
  num_rotating = (rotary and rotary.num_features) or head_dim
  rotated = (pairs_to_halves(num_rotating, head_dim),) if names.interleaved else ()
  projections = [('query', names.query, rotated), ('key', names.key, rotated), ('value', names.value, ())]
  if decoder.values_from_keys and not is_windowed:
    projections.pop()
  if is_shared:
    del projections[1:]
  if decoder.output_gate:  # the rows of a head are its query's, then its gate's
    del projections[0]
    query_and_gate = split_heads(2 * head_dim), _halves(head_dim)
    yield layer.rule(
      f'{names.query}.weight', ['attention/query/kernel', 'attention/gate/kernel'], _TRANSPOSE, *query_and_gate
    )
    if decoder.qkv_bias:
      yield layer.rule(f'{names.query}.bias', ['attention/query/bias', 'attention/gate/bias'], *query_and_gate)
  if names.qkv is not None:
    sizes = tuple(n * head_dim for n in (decoder.num_heads, num_kv_heads, num_kv_heads))
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
  if decoder.qk_norm not in (None, 'unscaled'):
    split = (heads,) if decoder.qk_norm == 'flat' else rotated if decoder.qk_norm == 'layer_by_head' else ()
    norms = ('query', names.query_norm, decoder.num_heads), ('key', names.key_norm, num_kv_heads)
    for ours, norm, num_heads in norms[:1] if is_shared else norms:
      if '{}' in norm:  # a tensor for each head
        for head in range(num_heads):
          yield layer.rule(f'{norm.format(head)}.weight', f'attention/{ours}_norm/scale', *split, part=head)
      else:
        yield layer.rule(f'{norm}.weight', f'attention/{ours}_norm/scale', *split)
      if decoder.qk_norm == 'layer':
        yield layer.rule(f'{norm}.bias', f'attention/{ours}_norm/bias')


def _halves(size: int) -> SplitDim:
  return SplitDim(-1, (size, size))


def _delta_net(layer: _LayerRules, delta_net: DeltaNet, layout: str) -> Iterator[Rule]:
  """Yields the rules of a GatedDeltaNet.

  A `layout` is how files have the rows of the projections: 'separate' as tensors of their own (OLMo Hybrid, and Kimi
  Linear with products of two for the gates), 'fused' with queries, keys and values in one (Qwen 3.5), or 'by_key_head'
  also with gates, all rows of a head of keys together (Qwen3-Next).
  """
  num_groups, key_dim, value_dim = delta_net.num_key_heads, delta_net.key_head_dim, delta_net.value_head_dim
  repeats = delta_net.num_heads // num_groups
  keys, values = split_heads(key_dim), split_heads(value_dim)
  kernels, taps = ([f'attention/{name}{end}' for name in ('query', 'key', 'value')] for end in ('/kernel', '_taps'))
  gate, strength, step = (f'attention/{name}/kernel' for name in ('gate', 'strength', 'step'))
  sizes = (num_groups * key_dim, num_groups * key_dim, num_groups * repeats * value_dim)
  parts = SplitDim(-1, sizes), Each((keys, keys, values))
  by_tap = Reshape((-1, 1, delta_net.conv_size), (-1, delta_net.conv_size)), _TRANSPOSE
  gates: dict[str, tuple[Any, ...]] = {'in_proj_z': (gate, values), 'in_proj_b': (strength,), 'in_proj_a': (step,)}
  others = {'norm': 'norm', 'out': 'out_proj'}
  if layout == 'by_key_head':
    of_head = key_dim, key_dim, repeats * value_dim, repeats * value_dim
    same, merge = Reshape((num_groups, key_dim), (-1, key_dim)), Reshape((num_groups, of_head[-1]), (-1, value_dim))
    joint = split_heads(sum(of_head)), SplitDim(-1, of_head), Each((same, same, merge, merge))
    yield layer.rule('in_proj_qkvz.weight', [*kernels, gate], _TRANSPOSE, *joint)
    joint = split_heads(2 * repeats), _halves(repeats), Each((Reshape((num_groups, repeats), (-1,)),) * 2)
    yield layer.rule('in_proj_ba.weight', [strength, step], _TRANSPOSE, *joint)
    gates = {}
  elif layout == 'fused':
    yield layer.rule('in_proj_qkv.weight', kernels, _TRANSPOSE, *parts)
  else:
    for name, kernel, split in zip('qkv', kernels, (keys, keys, values), strict=True):
      yield layer.rule(f'{name}_proj.weight', kernel, _TRANSPOSE, split)
    gates = {'g_proj': (gate, values), 'b_proj': (strength,), 'a_proj': (step,)}
    others = {'norm': 'o_norm', 'out': 'o_proj'}
  rates: tuple[Operation, ...] = ()
  if delta_net.gate_rank is not None:
    del gates['g_proj'], gates['a_proj']
    gates |= {'g_a_proj': ('attention/gate_down/kernel',), 'f_a_proj': ('attention/step_down/kernel',)}
    gates |= {'g_b_proj': (gate, values), 'f_b_proj': (step, keys)}
    rates = (Reshape((1, 1, -1, 1), (-1,)),)
  for name, (kernel, *operations) in gates.items():
    yield layer.rule(f'{name}.weight', kernel, _TRANSPOSE, *operations)
  if layout == 'separate':  # joined first, because transformers splits them into equal parts
    sources = [f'{name}_conv1d.weight' for name in 'qkv']
    yield layer.rule(sources, taps, SplitDim(-3, sizes, joins=True), *by_tap, *parts)
  else:
    yield layer.rule('conv1d.weight', taps, *by_tap, *parts)
  yield layer.rule('A_log', 'attention/log_rate', *rates)
  yield layer.rule('dt_bias', 'attention/step_bias', *[keys] * delta_net.feature_decays)
  yield layer.rule(f'{others["norm"]}.weight', 'attention/out_norm/scale')
  yield layer.rule(f'{others["out"]}.weight', 'attention/out/kernel', values, Transpose((1, 2, 0)))


def _latent_attention(layer: _LayerRules, decoder: Decoder, names: TensorNames) -> Iterator[Rule]:
  latent = decoder.latent
  assert latent is not None
  heads, nope = split_heads(decoder.head_dim), latent.nope_head_dim
  num_rotating = latent.rope_head_dim if decoder.rotary else 0
  query = pairs_to_halves(num_rotating, latent.rope_head_dim, before=nope)
  key = pairs_to_halves(num_rotating, latent.rope_head_dim, before=latent.kv_rank)
  if latent.query_rank is None:
    yield layer.rule('self_attn.q_proj.weight', 'attention/query/kernel', _TRANSPOSE, heads, query)
  else:
    yield layer.rule('self_attn.q_a_proj.weight', 'attention/query_down/kernel', _TRANSPOSE)
    yield layer.rule('self_attn.q_a_layernorm.weight', 'attention/query_norm/scale')
    yield layer.rule('self_attn.q_b_proj.weight', 'attention/query_up/kernel', _TRANSPOSE, heads, query)
  yield layer.rule('self_attn.kv_a_proj_with_mqa.weight', 'attention/kv_down/kernel', _TRANSPOSE, key)
  yield layer.rule('self_attn.kv_a_layernorm.weight', 'attention/kv_norm/scale')
  keys_and_values = split_heads(nope + latent.value_head_dim)
  yield layer.rule('self_attn.kv_b_proj.weight', 'attention/kv_up', _TRANSPOSE, keys_and_values)
  values = split_heads(latent.value_head_dim)
  yield layer.rule(f'{names.out}.weight', 'attention/out/kernel', values, Transpose((1, 2, 0)))
  if decoder.qkv_bias:
    if latent.query_rank is not None:
      yield layer.rule('self_attn.q_a_proj.bias', 'attention/query_down/bias')
    yield layer.rule('self_attn.kv_a_proj_with_mqa.bias', 'attention/kv_down/bias', key)
    yield layer.rule(f'{names.out}.bias', 'attention/out/bias')


def pairs_to_halves(num_features: int, size: int, before: int = 0) -> Take:
  """Reorders the last dim from interleaved pairs of rotating features to two halves, as our Rotary expects.

  Args:
    num_features: the number of features that rotate; they come first.
    size: the number of features of a head, or of its rotary part.
    before: the number of features before these, which stay in place.
  """
  order = [*range(0, num_features, 2), *range(1, num_features, 2), *range(num_features, size)]
  return Take(-1, (*range(before), *(before + i for i in order)))


def _feed_forward(layer: _LayerRules, decoder: Decoder, names: TensorNames) -> Iterator[Rule]:
  if names.gate_up is not None:
    sizes = (decoder.hidden_dim, decoder.hidden_dim)
    yield layer.rule(f'{names.gate_up}.weight', ['ffn/gate/kernel', 'ffn/up/kernel'], SplitDim(-2, sizes), _TRANSPOSE)
    yield layer.rule(f'{names.down}.weight', 'ffn/down/kernel', _TRANSPOSE)
    return
  for ours, theirs in (('gate', names.gate), ('up', names.up), ('down', names.down))[not decoder.gated :]:
    yield layer.rule(f'{theirs}.weight', f'ffn/{ours}/kernel', _TRANSPOSE)
    if decoder.mlp_bias:
      yield layer.rule(f'{theirs}.bias', f'ffn/{ours}/bias')
  for scalar in LEARNED_ACTIVATIONS.get(decoder.activation, ((), ()))[1]:
    yield layer.rule(f'mlp.act_fn.{scalar}', f'ffn/{scalar}')


def _experts(layer: _LayerRules, decoder: Decoder, names: TensorNames) -> Iterator[Rule]:
  mixture = decoder.mixture
  assert mixture is not None
  yield layer.rule(f'{names.router}.weight', 'ffn/router/kernel', _TRANSPOSE)
  if mixture.routing.use_bias:
    yield layer.rule(f'{names.router}.bias', 'ffn/router/bias')
  if mixture.routing.balance_bias:
    yield layer.rule(names.balance_bias, 'ffn/router/balance_bias', *names.balance_bias_operations)
  if mixture.shared_dim is not None:
    yield from _shared_expert(layer, decoder, mixture.shared_dim, names)
  if mixture.routing.expert_scales:
    yield layer.rule('router.per_expert_scale', 'ffn/router/expert_scales')
  if mixture.branch_norms:
    yield layer.rule('router.scale', 'ffn/router/norm_of_input/scale')
    yield layer.rule('pre_feedforward_layernorm_2.weight', 'ffn/experts_norm/scale')
    yield layer.rule('post_feedforward_layernorm_2.weight', 'ffn/experts_post_norm/scale')
    yield layer.rule('post_feedforward_layernorm_1.weight', 'ffn/shared_post_norm/scale')
  if mixture.shared_gate:
    yield layer.rule(f'{names.shared_gate}.weight', 'ffn/shared_gate', Reshape((1, -1), (-1,)))
  if names.fused_experts is not None:
    yield from _fused_experts(layer, decoder, names.fused_experts, names.expert_layout)
    return
  for e in range(mixture.routing.num_experts):
    kernels = ('gate', names.expert_gate), ('up', names.expert_up), ('down', names.expert_down)
    for ours, theirs in kernels[not decoder.gated :]:
      yield layer.rule(f'{names.expert.format(e)}{theirs}.weight', f'ffn/experts/{ours}', _TRANSPOSE, part=e)


def _shared_expert(layer: _LayerRules, decoder: Decoder, hidden_dim: int, names: TensorNames) -> Iterator[Rule]:
  ours = 'ffn/shared_expert/'
  if names.shared_gate_up is not None:
    sizes, kernels = (hidden_dim, hidden_dim), [f'{ours}gate/kernel', f'{ours}up/kernel']
    yield layer.rule(f'{names.shared}{names.shared_gate_up}.weight', kernels, SplitDim(-2, sizes), _TRANSPOSE)
  else:
    for name in ('gate', 'up')[not decoder.gated :]:
      yield layer.rule(f'{names.shared}{name}_proj.weight', f'{ours}{name}/kernel', _TRANSPOSE)
  yield layer.rule(f'{names.shared}{names.shared_down}.weight', f'{ours}down/kernel', _TRANSPOSE)
  for name in ('gate', 'up', 'down') if decoder.mlp_bias else ():
    yield layer.rule(f'{names.shared}{name}_proj.bias', f'{ours}{name}/bias')


def _fused_experts(layer: _LayerRules, decoder: Decoder, names: tuple[str, str], layout: str) -> Iterator[Rule]:
  """Yields the rules of experts whose kernels, and biases, are one tensor for all of them."""
  mixture = decoder.mixture
  assert mixture is not None
  size, (gate_up, down) = mixture.hidden_dim, names
  transpose = (_TRANSPOSE,) if layout == 'transposed' else ()
  order = (pairs_to_halves(2 * size, 2 * size),) if layout == 'interleaved' else ()
  for kind in ('', '_bias')[: 2 if mixture.routing.use_bias else 1]:
    gate_and_up = [f'ffn/experts/gate{kind}', f'ffn/experts/up{kind}']
    yield layer.rule(f'{gate_up}{kind}', gate_and_up, *transpose, *order, SplitDim(-1, (size, size)))
    yield layer.rule(f'{down}{kind}', f'ffn/experts/down{kind}', *transpose)


def granite_rules(decoder: Decoder, layers: Sequence[LayerSlot], names: TensorNames) -> Iterator[Rule]:
  """Yields the rules of Granite 4, which names the network of dense layers like a shared expert."""
  if decoder.mixture is None:
    gate_up, down = f'{names.shared}{names.shared_gate_up}', f'{names.shared}{names.shared_down}'
    names = dataclasses.replace(names, gate_up=gate_up, down=down)
  yield from llama_rules(decoder, layers, names)


def gpt2_rules(decoder: Decoder, layers: Sequence[LayerSlot], names: TensorNames) -> Iterator[Rule]:
  """Yields the rules of GPT-2, whose kernels are [in, out], with fused queries, keys and values."""
  heads = split_heads(decoder.head_dim)
  yield Rule(names.table, 'embedding/table')
  yield Rule('transformer.wpe.weight', 'positions/table')
  if not decoder.tied:
    yield Rule(names.head, 'embedding/softmax_kernel', _TRANSPOSE)
  yield Rule('transformer.ln_f.weight', 'final_norm/scale')
  yield Rule('transformer.ln_f.bias', 'final_norm/bias')
  for i, slot in enumerate(layers):
    layer = _LayerRules(names.layer.format(i), slot)
    for theirs, ours in (('ln_1', 'attention_norm'), ('ln_2', 'ffn_norm')):
      yield layer.rule(f'{theirs}.weight', f'{ours}/scale')
      yield layer.rule(f'{theirs}.bias', f'{ours}/bias')
    for weight, ours in (('weight', 'kernel'), ('bias', 'bias')):
      qkv = [f'attention/{name}/{ours}' for name in ('query', 'key', 'value')]
      yield layer.rule(f'attn.c_attn.{weight}', qkv, SplitDim(-1, (decoder.embed_dim,) * 3), heads)
      yield layer.rule(f'mlp.c_fc.{weight}', f'ffn/up/{ours}')
      yield layer.rule(f'mlp.c_proj.{weight}', f'ffn/down/{ours}')
    # [H * K, D] -> [H, K, D]
    yield layer.rule('attn.c_proj.weight', 'attention/out/kernel', _TRANSPOSE, heads, Transpose((1, 2, 0)))
    yield layer.rule('attn.c_proj.bias', 'attention/out/bias')


def t5_rules(decoder: Decoder, layers: Sequence[LayerSlot], names: TensorNames) -> Iterator[Rule]:
  """Yields the rules of T5's families; `layers` has the encoder's layers, then the decoder's."""
  heads, bias = split_heads(decoder.head_dim), 'SelfAttention.relative_attention_bias.weight'
  yield Rule(names.table, 'embedding/table')
  if not decoder.tied:
    yield Rule(names.head, 'embedding/softmax_kernel', _TRANSPOSE)
  if decoder.gated:
    names = dataclasses.replace(names, up=f'{names.up}_1')
  num, cross = decoder.num_encoder_layers, [('EncDecAttention', 'cross_attention')]
  sides = (
    ('encoder', 'encoder_norm', 'encoder_position_bias', layers[:num], decoder.encoder_mixed, cross[:0]),
    ('decoder', 'final_norm', 'position_bias', layers[num:], decoder.mixed, cross),
  )
  for side, norm, shared_bias, slots, mixed, more in sides:
    yield Rule(f'{side}.final_layer_norm.weight', f'{norm}/scale')
    if not decoder.bias_per_layer:
      yield Rule(f'{side}.block.0.layer.0.{bias}', f'{shared_bias}/table', _TRANSPOSE)
    for i, slot in enumerate(slots):
      attentions = [('SelfAttention', 'attention'), *more]
      for j, (theirs, ours) in enumerate(attentions):
        layer = _LayerRules(f'{side}.block.{i}.layer.{j}.', slot)
        yield layer.rule('layer_norm.weight', f'{ours}_norm/scale')
        for name in ('query', 'key', 'value'):
          yield layer.rule(f'{theirs}.{name[0]}.weight', f'{ours}/{name}/kernel', _TRANSPOSE, heads)
        yield layer.rule(f'{theirs}.o.weight', f'{ours}/out/kernel', heads, Transpose((1, 2, 0)))
      layer = _LayerRules(f'{side}.block.{i}.layer.{len(attentions)}.', slot)
      yield layer.rule('layer_norm.weight', 'ffn_norm/scale')
      yield from _experts(layer, decoder, names) if mixed[i] else _feed_forward(layer, decoder, names)
      if decoder.bias_per_layer:
        layer = _LayerRules(f'{side}.block.{i}.layer.0.', slot)
        yield layer.rule(bias, 'attention/position_bias/table', _TRANSPOSE)
