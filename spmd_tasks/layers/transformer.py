"""Transformer blocks, stacks of them, and their remat policies.

The sublayers of a block are Linen modules given as fields, so a config replaces a sublayer by replacing a field:

    attention(x, segment_ids, segment_pos, train=...) -> [B, T, D]
    cross_attention(x, segment_ids, segment_pos, encoded=..., encoder_segment_ids=..., train=...) -> [B, T, D]
    ffn(x, segment_ids, train=...) -> ([B, T, D], aux)
    norm(x) -> [B, T, D]

`aux` maps names to Statistics of the tokens. The stack turns them into one number per layer, `name -> [L]`.

Shapes: B batch, T sequence, D model, L layers.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping
import re
from typing import TYPE_CHECKING, Any

from flax.core import DenyList
import flax.linen as nn
import jax
from jax import checkpoint_policies
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention._plain import ATTENTION_NAME
from spmd_tasks.layers.attention.attention import ATTENTION_INPUTS_NAME
from spmd_tasks.layers.base import (
  CACHE,
  SharedKv,
  Statistics,
  WithSublayers,
  current_layer_scope,
  declare_weight,
  dropout,
  layer_scope,
  num_blocks,
  run_layer,
  values_per_layer,
)
from spmd_tasks.layers.feed_forward import PRE_ACTIVATIONS_NAME
from spmd_tasks.sharding import SplitDims, constrain
from spmd_tasks.sharding.specs import current_platform
from spmd_tasks.sharding.weights import STACK_DIM, refuse_plain_weights

if TYPE_CHECKING:
  from spmd_tasks.layers.attention.positions import PositionBias

Aux = Mapping[str, Statistics]

# The `checkpoint_name` of discrete decisions, such as a router's choice of experts, and of small values derived from
# them. Every remat policy saves them: a recomputed decision may differ from the first.
ROUTING_NAME = 'routing'

LAYER_INPUT_NAME = 'layer_input'  # the `checkpoint_name` of a layer's input
# Policies that offload the first 1/N of the features of a layer's input, with N, and the `checkpoint_name` of the rest.
_OFFLOADED_PARTS = {'full_quarter_offloaded': 4, 'full_half_offloaded': 2}
_KEPT_INPUT_NAME = 'kept_layer_input'

# Primitives that compute an element from a few others or move it, and the gathers of sharded weights: XLA fuses their
# recomputation into what reads them. `lt` is not one of them: it makes the masks of dropout from random bits.
_ELEMENTWISE = frozenset({
  'abs', 'add', 'add_any', 'all_gather', 'all_gather_invariant', 'and', 'bitcast_convert_type', 'broadcast_in_dim',
  'cbrt', 'ceil', 'clamp', 'concatenate', 'convert_element_type', 'copy', 'copy_p', 'cos', 'div', 'dynamic_slice', 'eq',
  'erf', 'erfc', 'exp', 'exp2', 'expand_dims', 'expm1', 'floor', 'ge', 'gt', 'integer_pow', 'iota', 'is_finite', 'le',
  'log', 'log1p', 'logistic', 'max', 'mesh_cast', 'min', 'mul', 'name', 'ne', 'neg', 'not', 'optimization_barrier',
  'or', 'pad', 'pcast', 'pow', 'pvary', 'reduce_precision', 'rem', 'reshape', 'reshard', 'rev', 'round', 'rsqrt',
  'select_n', 'shard_alike', 'sharding_constraint', 'shift_left', 'shift_right_arithmetic', 'shift_right_logical',
  'sign', 'sin', 'slice', 'split', 'sqrt', 'square', 'squeeze', 'stop_gradient', 'sub', 'tanh', 'transpose', 'xor',
})  # fmt: skip


def _not_elementwise(primitive: Any, *_: Any, **__: Any) -> bool:
  return primitive.name not in _ELEMENTWISE


_routing = checkpoint_policies.save_only_these_names(ROUTING_NAME)
_routing_and_attention = checkpoint_policies.save_only_these_names(ROUTING_NAME, ATTENTION_NAME)
_attention = (ATTENTION_NAME, ATTENTION_INPUTS_NAME)


def _offloaded(*names: str, saved: tuple[str, ...] = ()) -> Callable[..., Any]:
  return checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[ROUTING_NAME, *saved],
    names_which_can_be_offloaded=names,
    offload_src='device',
    offload_dst='pinned_host',
  )


# Name -> `jax.checkpoint` policy: which values of a layer are saved for its backward pass, or offloaded to the host.
# From most device memory to least.
REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
  # No remat: saves everything.
  'none': None,
  # Saves everything but the results of elementwise functions, whose recomputation costs no product, kernel or exchange.
  'elementwise': checkpoint_policies.save_from_both_policies(_not_elementwise, _routing_and_attention),
  # Saves the results of all matmuls, experts' included, and of attention.
  'dots': checkpoint_policies.save_from_both_policies(checkpoint_policies.dots_saveable, _routing_and_attention),
  # Saves the results of matmuls with weights, and of attention.
  'dots_no_batch': checkpoint_policies.save_from_both_policies(
    checkpoint_policies.dots_with_no_batch_dims_saveable, _routing_and_attention
  ),
  # Saves what 'attention' saves, and the pre-activations of dense feed-forward networks: one product is recomputed.
  'attention_and_ffn': checkpoint_policies.save_only_these_names(ROUTING_NAME, *_attention, PRE_ACTIVATIONS_NAME),
  # The same, with everything but the pre-activations offloaded.
  'attention_offloaded_and_ffn': _offloaded(LAYER_INPUT_NAME, *_attention, saved=(PRE_ACTIVATIONS_NAME,)),
  # Saves the input of each layer, and the inputs and results of attention, whose recomputation costs most.
  'attention': checkpoint_policies.save_only_these_names(ROUTING_NAME, *_attention),
  # Saves the input of each layer only.
  'full': _routing,
  # Saves the input of each layer only, with a quarter of its features offloaded.
  'full_quarter_offloaded': _offloaded(LAYER_INPUT_NAME, saved=(_KEPT_INPUT_NAME,)),
  # The same, with half of the features offloaded.
  'full_half_offloaded': _offloaded(LAYER_INPUT_NAME, saved=(_KEPT_INPUT_NAME,)),
  # Offloads what 'attention' saves: transfers instead of recomputation.
  'attention_offloaded': _offloaded(LAYER_INPUT_NAME, *_attention),
  # Offloads the input of each layer, and saves nothing else.
  'full_offloaded': _offloaded(LAYER_INPUT_NAME),
}


# What a policy can save or offload by name: a layer's input, attention's inputs (all, or one of them), results and
# output, and the pre-activations and the output of a feed-forward layer.
REMAT_NAMES = (
  LAYER_INPUT_NAME,
  ATTENTION_INPUTS_NAME,
  'query',
  'key',
  'value',
  ATTENTION_NAME,
  'attention_output',
  PRE_ACTIVATIONS_NAME,
  'ffn_output',
)
_SAVE_OR_OFFLOAD = re.compile(r'(?:save\(([\w, ]+)\))?\s*(?:offload\(([\w, ]+)\))?')


def remat_policy(name: str) -> Callable[..., Any] | None:
  """Returns the `jax.checkpoint` policy of a name, None for 'none'.

  A policy is one of REMAT_POLICIES or names what is saved and offloaded, such as
  'save(query, key) offload(layer_input)'. Raises a UserError: there is no such policy or name.
  """
  if name in REMAT_POLICIES:
    return REMAT_POLICIES[name]
  match = _SAVE_OR_OFFLOAD.fullmatch(name)
  if not name or match is None:
    raise UserError(
      f"remat_policy {name!r} is unknown: choose one of {list(REMAT_POLICIES)}, or write 'save(NAME, ...) "
      f"offload(NAME, ...)' with names of {list(REMAT_NAMES)}."
    )
  saved, offloaded = ([word.strip() for word in (group or '').split(',') if word.strip()] for group in match.groups())
  if unknown := [word for word in (*saved, *offloaded) if word not in REMAT_NAMES]:
    raise UserError(f'remat_policy {name!r} names {unknown[0]!r}: choose from {", ".join(REMAT_NAMES)}.')
  return _offloaded(*offloaded, saved=tuple(saved))


def name_layer_input(x: jax.Array, policy: str) -> jax.Array:
  """Names the input of a layer for the remat policy `policy`."""
  if policy not in _OFFLOADED_PARTS:
    return checkpoint_name(x, LAYER_INPUT_NAME)
  offloaded, kept = jnp.split(x, [x.shape[-1] // _OFFLOADED_PARTS[policy]], axis=-1)
  named = checkpoint_name(offloaded, LAYER_INPUT_NAME), checkpoint_name(kept, _KEPT_INPUT_NAME)
  return jnp.concatenate(named, axis=-1)


class TransformerBlock(WithSublayers, kw_only=True):
  """Pre-norm block: x + attention(norm(x)), in a decoder x + cross_attention(norm(x)), then x + ffn(norm(x)).

  Weights under `attention` and `ffn`; with `pre_norm` (Xiong et al., 2020) also `attention_norm` and `ffn_norm`; with
  `post_norm` also `attention_post_norm` and `ffn_post_norm`; likewise for `cross_attention`. The residual stream keeps
  the dtype of the block's input (the embedding's), whatever dtype the sublayers compute in.

  Fields:
    attention, ffn: the sublayers.
    cross_attention: the sublayer that attends to an encoder's text, `Attention(cross=True)`; None for none.
    norm: template of all norms.
    pre_norm, post_norm: whether each sublayer's input is normalized, and its output before it is added to the residual
      stream: both (Ding et al., 2021; Primer, Gemma 2), or only the output (OLMo 2).
    ffn_pre_norm: whether the input of `ffn` is normalized; None for the same as `pre_norm`. False if `ffn` has norms of
      its inputs, as a MixtureOfExperts with a `branch_norm` does.
    parallel: whether `ffn` reads what `attention` reads, attention_norm(x), and there is no `ffn_norm`:
      x + attention(norm(x)) + ffn(norm(x)) (GPT-J: Wang and Komatsuzaki, 2021; PaLM, Cohere).
    residual_multiplier: factor of each sublayer's output before it is added (Granite).
    layer_input: the sublayer after `ffn` that adds the layer's vector of a `layer_embedding`, such as LayerInput. Its
      output is normalized like other sublayers' outputs. None if the model has no `layer_embedding`.
    output_scale: whether the block's output is multiplied by a weight `output_scale` [1] that is not trained (Gemma 4).
    dropout_rate: of each sublayer's output in training; needs the rng `dropout`.
    dropout_broadcast_dims: dims of the output that share one mask; T5X has (-2,), all tokens of a row.
    activation_split_dims: of the residual stream.
  """

  attention: nn.Module
  ffn: nn.Module
  norm: nn.Module
  cross_attention: nn.Module | None = None
  pre_norm: bool = True
  post_norm: bool = False
  ffn_pre_norm: bool | None = None
  parallel: bool = False
  residual_multiplier: float = 1.0
  layer_input: nn.Module | None = None
  output_scale: bool = False
  dropout_rate: float = 0.0
  dropout_broadcast_dims: tuple[int, ...] = ()
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  def __post_init__(self):
    if self.parallel and (self.cross_attention is not None or not self.pre_norm):
      raise UserError('parallel=True needs pre_norm=True and no cross_attention: set them, or parallel=False.')
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    *,
    position_bias: 'PositionBias | None' = None,
    prefix_mask: jax.Array | None = None,
    encoded: jax.Array | None = None,
    encoder_segment_ids: jax.Array | None = None,
    token_mask: jax.Array | None = None,
    layer_inputs: jax.Array | None = None,
    train: bool = False,
  ) -> tuple[jax.Array, Aux]:
    """Returns ([B, T, D], aux of the sublayers) for x [B, T, D]; the other arguments are those of Attention.

    `layer_inputs` [1, B, T, P] are for `layer_input`. Where `token_mask` [B, T] is False, the inputs of all sublayers
    are zeroed, and `ffn` treats the token as padding.
    """
    if (self.layer_input is None) != (layer_inputs is None):
      raise UserError(
        'a model with a layer_embedding needs blocks with a layer_input, and the other way round: set both, or neither.'
      )
    if encoded is not None and self.cross_attention is None:
      raise UserError('the blocks of a decoder need cross_attention, such as Attention(cross=True): set it.')
    segments = {'segment_ids': segment_ids, 'segment_pos': segment_pos}
    arguments = {**segments, 'position_bias': position_bias, 'prefix_mask': prefix_mask}
    normed = self._norm('attention_norm', x, True) if self.parallel else None
    x, attention_aux = self._add('attention', self.attention, x, train, arguments, token_mask, normed)
    cross_aux: Aux = {}
    if self.cross_attention is not None:
      arguments = {**segments, 'encoded': encoded, 'encoder_segment_ids': encoder_segment_ids}
      x, cross_aux = self._add('cross_attention', self.cross_attention, x, train, arguments, token_mask)
    ffn_ids = segment_ids if token_mask is None else token_mask.astype(jnp.int32)  # id 0 is padding
    if normed is None and self.ffn_pre_norm is False:
      normed = x
    x, aux = self._add('ffn', self.ffn, x, train, {'segment_ids': ffn_ids}, token_mask, normed)
    if self.layer_input is not None and layer_inputs is not None:
      x, _ = self._add('layer_input', self.layer_input, x, train, {'layer_input': layer_inputs[0]}, token_mask, x)
    if self.output_scale:
      ones, tags = jax.nn.initializers.ones, ('no_decay',)
      scale = declare_weight(self, 'output_scale', shape=(1,), init=ones, split_dims=(None,), tags=tags)
      x = x * jax.lax.stop_gradient(scale).astype(x.dtype)[None, None, :]
    return x, {**attention_aux, **cross_aux, **aux}

  @nn.nowrap
  def _add(
    self,
    role: str,
    layer: nn.Module,
    x: jax.Array,
    train: bool,
    arguments: Mapping[str, Any],
    mask: jax.Array | None,
    normed: jax.Array | None = None,
  ) -> tuple[jax.Array, Aux]:
    """Adds a sublayer's output to the residual stream x; `normed` is the sublayer's input, None for x normalized."""
    y = self._norm(f'{role}_norm', x, self.pre_norm) if normed is None else normed
    y, aux = run_layer(role, layer, y if mask is None else jnp.where(mask[..., None], y, 0), **arguments, train=train)
    y = checkpoint_name(y, f'{role}_output')
    y = self._norm(f'{role}_post_norm', y, self.post_norm)
    y = dropout(self.dropout_rate, broadcast_dims=self.dropout_broadcast_dims, train=train)(y)
    if self.residual_multiplier != 1.0:
      y = y * self.residual_multiplier
    return constrain(x + y.astype(x.dtype), self.activation_split_dims), aux

  @nn.nowrap
  def _norm(self, name: str, x: jax.Array, is_present: bool) -> jax.Array:
    return self.norm.copy(name=name)(x) if is_present else x


class TransformerStack(WithSublayers, kw_only=True):
  """Runs `num_layers` blocks of one shape, each with its own weights, which are stacked, [L, ...], under `layers`.

  With `scan=True`, one compiled block runs L times, so that trace and compile time do not grow with depth. With
  `scan=False`, the loop is unrolled, so that XLA can schedule each layer separately. Both are one `nn.scan` with the
  same tree of weights, so checkpoints of one fit the other.

  Fields:
    block: template of the layers: block(x, segment_ids, segment_pos, train=...) -> (x, aux).
    num_layers: L.
    scan: whether the compiled program has a loop over layers, or L copies of its body. Programs that generate on a GPU
      always have copies: a loop would copy each layer's weights, see decoding/weight_storage.py.
    remat_policy: which values each layer saves for its backward pass: a name in REMAT_POLICIES, or the values by name,
      such as 'save(query, key) offload(layer_input)'.
  """

  block: nn.Module
  num_layers: int
  scan: bool = True
  remat_policy: str = 'elementwise'

  def __post_init__(self):
    if self.num_layers < 1:
      raise UserError(f'num_layers={self.num_layers} must be at least 1.')
    remat_policy(self.remat_policy)
    super().__post_init__()

  @property
  def num_blocks(self) -> int:
    return self.num_layers * num_blocks(self.block)

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    segment_ids: jax.Array | None = None,
    segment_pos: jax.Array | None = None,
    *,
    train: bool = False,
    **context: Any,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns ([B, T, D], {name of a statistic: [L], or [L, E] for a vector}).

    `context` is passed to the blocks; of `layer_inputs` [number of blocks, B, T, P], each gets its own.
    """
    layers = scan_layers(num_layers=self.num_layers, scan=self.scan, remat_policy_name=self.remat_policy, train=train)
    arguments = {'segment_ids': segment_ids, 'segment_pos': segment_pos, **context}
    x, aux = layers(self.block.copy(name='layers'), x, arguments)
    return x, values_per_layer(aux)


def scan_layers(*, num_layers: int, scan: bool, remat_policy_name: str, train: bool) -> Callable[..., Any]:
  """Returns the lifted function (block, x, arguments by name) -> (x, aux [L, ...]) that runs L layers.

  In generation, each layer gets the KV caches of all layers and its own number: a scan over the caches would copy each.
  """
  cache, shared_kv = current_layer_scope().cache, current_layer_scope().shared_kv

  def layer(block, x, arguments, number, layer_inputs):
    x = name_layer_input(x, remat_policy_name)
    new_kv: dict[str, SharedKv] = {}
    all_kv = None if shared_kv is None else ChainMap(new_kv, shared_kv)  # layers add to the first
    if layer_inputs is not None:
      arguments = {**arguments, 'layer_inputs': layer_inputs}
    with layer_scope(cache=None if cache is None else cache.in_layer(number), shared_kv=all_kv):
      y, aux = run_layer('block', block, x, **arguments, train=train)
    if block.is_initializing():
      refuse_plain_weights(block.variables.get('params', {}))
    return y, (aux, new_kv)

  policy = remat_policy(remat_policy_name)
  if policy is not None:
    # prevent_cse adds a barrier that stops XLA from merging recomputation and forward pass. In a loop, XLA cannot.
    layer = nn.remat(layer, policy=policy, prevent_cse=not scan)

  def run(block, x, arguments):
    layers = nn.scan(
      layer,
      variable_axes={DenyList(CACHE): 0},  # of every other collection
      variable_broadcast=CACHE,
      split_rngs={'params': True, 'dropout': True},
      in_axes=(nn.broadcast, 0, 0),
      length=num_layers,
      unroll=num_layers if not scan or (cache is not None and current_platform() == 'gpu') else 1,
      metadata_params={STACK_DIM: 'layers'},
      # The check traces a layer twice, and the second trace continues the rng counters: weights of a seed depend on it.
      check_constancy_invariants=block.is_initializing(),
    )
    numbers = np.arange(num_layers)  # numpy's, so that they are constants in an unrolled loop
    layer_inputs = arguments.get('layer_inputs')
    if layer_inputs is not None:
      arguments = {name: value for name, value in arguments.items() if name != 'layer_inputs'}
      layer_inputs = layer_inputs.reshape(num_layers, -1, *layer_inputs.shape[1:])
    x, (aux, new_kv) = layers(block, x, arguments, None if cache is None else numbers, layer_inputs)
    if shared_kv is not None:
      shared_kv.update(jax.tree.map(lambda of_layers: of_layers[-1], new_kv))
    return x, aux

  return run
