"""Lets our decoding engine generate with a Praxis LanguageModel: Praxis' extend_step reads the engine's KV cache.

    logits, new = read_tokens(model, variables, cache, batch)      # Forward of decoding/step_functions.py

Praxis' `extend_step` adds one token to every row at one time step, the same for all rows, but the slots of an engine
stand at different positions. Attention does not depend on the order of a cache's places: the positions are in the keys
already, and a mask says which places a row sees. So the T tokens of a call get the places behind the S of the cache,
the same in every row, and a row's mask shows the places before its own start. The states in those T places are the new
keys and values, which the engine writes to the places of their positions.

The beginning of a prompt needs no cache and is one forward pass. A later chunk of it takes an `extend_step` per token.

Refused by name: attention that measures distances in places (relative biases, local windows, convolutions, n-grams),
mixtures of experts (all slots share their capacity, so that a request would depend on the others), pipelines, cross
attention, and models without a causal mask.

Shapes: B rows, T tokens, S places, G key/value heads, K head dim, V vocabulary; `...` counts layers.
"""

from collections.abc import Callable, Mapping
import re
from typing import Any

from flax import traverse_util
import flax.linen as nn
import jax
import jax.numpy as jnp
from praxis import base_layer, py_utils
from praxis.layers import (
  attentions,
  grouped_query_attention,
  models,
  multi_query_attention,
  transformer_models,
  transformers,
)

from spmd_tasks.bridges.pax._variables import filled_split_dims
from spmd_tasks.decoding.step_functions import take_slots
from spmd_tasks.errors import UserError
from spmd_tasks.sharding.weights import WeightBox

_CACHE = base_layer.DECODE_CACHE
_STATES = ('key_state', 'value_state', 'key_post_rotary_pos_emb')
_LAYER_OF_REPEAT = re.compile(r'layer\d+')
_ONE_HEAD = ' of one head'  # in the name of a state [..., B, S, K]
# Kinds of attention whose extend_step was read: its result does not depend on the order of the cache's places.
_ATTENTIONS = (
  attentions.DotProductAttention,
  grouped_query_attention.GroupedQueryAttention,
  multi_query_attention.MultiQueryDotProductAttention,
)
# Fields by which attention depends on it.
_FIELDS_BY_PLACE = ('relative_bias_tpl', 'dconv_qkv', 'ngrammer_tpl')
_NOT_SERVED = {
  transformers.TransformerFeedForwardMoe: 'all slots share the capacity of its experts',
  transformers.PipelinedTransformer: 'it has no extend_step: take the experiment with repeated layers instead',
}


def read_tokens(model: Any, variables: Any, cache: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
  """Reads a batch's tokens after those in the cache; to be called under a JaxContext of evaluation.

  Args:
    model: the LanguageModel.
    variables: of the model, in the dtype of its computations.
    cache: leaves [..., B, G, S, K], a tree like Praxis' decode cache, or with `tables` in the batch pools of blocks;
      None where there are no tokens before.
    batch: `ids`, `segment_ids` (0: padding, behind the tokens) and `segment_pos` int32 [B, T], which goes on where a
      row's cache ends; with `logit_columns` int32 [B, n] the logits are those of n columns.

  Returns:
    (logits float32 [B, T, V], the tokens' keys and values: leaves [..., B, G, T, K], without a cache in boxes of their
    split dims).

  Raises:
    UserError: a part of the model cannot be served; the message names it.
  """
  if cache is not None:
    cache = take_slots(cache, batch.get('slots'), batch.get('tables'))
  if cache is None:
    logits, new = _read_first(model, variables, batch)
  else:
    logits, new = _read_next(model, variables, cache, batch)
  if (columns := batch.get('logit_columns')) is not None:
    logits = jnp.take_along_axis(logits, columns[:, :, None], axis=1)
  return logits.astype(jnp.float32), new


def _read_first(model: Any, variables: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
  """Reads the first tokens of sequences, in one forward pass."""
  _check_model(model)
  split_dims: dict[tuple[str, ...], tuple[Any, ...]] = {}

  def observe(next_method: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    _check_layer(context.module)
    if isinstance(context.module, _ATTENTIONS):
      split_dims[context.module.path] = _state_split_dims(context.module)
    return next_method(*args, **kwargs)

  def forward(model: Any) -> jax.Array:
    paddings = (batch['segment_ids'] == 0).astype(model.fprop_dtype)
    return model.lm(batch['ids'], paddings, segment_ids=batch['segment_ids'], segment_pos=batch['segment_pos']).logits

  with nn.intercept_methods(observe):
    logits, states = _apply(model, variables, forward)

  boxes: dict[tuple[str, ...], Any] = {}
  for (*owner, name), state in traverse_util.flatten_dict(_without_time(states)).items():
    # Repeated layers keep a state per layer, below a name that is no module's.
    modules = (tuple(owner), tuple(key for key in owner if not _LAYER_OF_REPEAT.fullmatch(key)))
    dims = next((split_dims[module] for module in modules if module in split_dims), None)
    if dims is None or name not in _STATES:
      raise UserError(
        f'the model cannot be served: the state {"/".join([*owner, name])} is no key or value of attention.'
      )
    rows, places, *heads, features = dims
    if not heads:
      state, name, heads = state[..., None, :], name + _ONE_HEAD, [None]
    layers = (None,) * (state.ndim - 4)
    boxes[(*owner, name)] = WeightBox(
      value=jnp.swapaxes(state, -3, -2), split_dims=(*layers, rows, *heads, places, features), tags=(), stacked=0
    )
  return logits, traverse_util.unflatten_dict(boxes)


def _read_next(model: Any, variables: Any, cache: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
  """Reads tokens after those in the cache, one `extend_step` after another."""
  ids, positions = batch['ids'], batch['segment_pos']
  (num_rows, num_tokens), num_places = ids.shape, jax.tree.leaves(cache)[0].shape[-2]
  is_before = jnp.arange(num_places)[None, :] < positions[:, :1]
  hidden = py_utils.get_large_negative_number(jnp.float32)

  def read_token(states: Any, column: jax.Array) -> tuple[Any, jax.Array]:
    is_read = jnp.broadcast_to(jnp.arange(num_tokens) <= column, (num_rows, num_tokens))
    mask = jnp.where(jnp.concatenate([is_before, is_read], axis=-1), 0.0, hidden)[:, None, :]

    def extend_step(model: Any) -> jax.Array:
      return model.lm.extend_step(ids[:, column], segment_pos=positions[:, column], atten_mask=mask).logits

    at_column = states | {'lm': states['lm'] | {'time_step': num_places + column}}
    logits, updated = _apply(model, variables | {_CACHE: at_column}, extend_step)
    return _without_time(updated), logits

  states = _to_praxis(cache, num_tokens)
  states, by_token = jax.lax.scan(read_token, states, jnp.arange(num_tokens))
  return jnp.swapaxes(by_token, 0, 1), _new_states(cache, states, num_places)


def _apply(model: Any, variables: Any, method: Callable[[Any], jax.Array]) -> tuple[jax.Array, Any]:
  """Returns what `method` returns of the bound model, and the decode cache after it."""
  keys = dict(zip((base_layer.PARAMS, base_layer.RANDOM, 'dropout'), jax.random.split(jax.random.PRNGKey(0), 3)))
  logits, updated = model.apply(variables, method=method, rngs=keys, mutable=[_CACHE])
  return logits, updated.get(_CACHE, {})


def _without_time(states: Any) -> Any:
  """Returns the decode cache without the time step of the language model."""
  return states | {'lm': {name: state for name, state in states.get('lm', {}).items() if name != 'time_step'}}


def _to_praxis(cache: Any, num_tokens: int) -> Any:
  """Returns Praxis' decode cache, states [..., B, S + T, G, K] or [..., B, S + T, K], from that of the engine."""
  states = {}
  for path, state in traverse_util.flatten_dict(cache).items():
    state = jnp.swapaxes(state, -3, -2)
    state = jnp.pad(state, [(0, 0)] * (state.ndim - 3) + [(0, num_tokens), (0, 0), (0, 0)])
    states[_praxis_path(path)] = state[..., 0, :] if path[-1].endswith(_ONE_HEAD) else state
  return traverse_util.unflatten_dict(states)


def _new_states(cache: Any, states: Any, num_places: int) -> Any:
  """Returns what stands behind the first S places of Praxis' states, as leaves [..., B, G, T, K]."""
  new, flat = {}, traverse_util.flatten_dict(states)
  for path in traverse_util.flatten_dict(cache):
    state = flat[_praxis_path(path)]
    state = state[..., None, :] if path[-1].endswith(_ONE_HEAD) else state
    new[path] = jnp.swapaxes(state[..., num_places:, :, :], -3, -2)
  return traverse_util.unflatten_dict(new)


def _praxis_path(path: tuple[str, ...]) -> tuple[str, ...]:
  return (*path[:-1], path[-1].removesuffix(_ONE_HEAD))


def _check_model(model: Any) -> None:
  if not isinstance(model, models.LanguageModel):
    raise UserError(f'{type(model).__name__} cannot be served: only a LanguageModel of Praxis continues a text.')
  lm = model.lm_tpl
  if lm.cls.extend_step is not transformer_models.TransformerLm.extend_step:
    raise UserError(f'{lm.cls.__name__} cannot be served: it is no TransformerLm, or has an extend_step of its own.')
  if model.model_type is not transformer_models.LanguageModelType.CAUSAL:
    raise UserError(f'model_type = {model.model_type} cannot be served: attention must be causal.')
  for name in ('ngrammer_tpl', 'skip_compute_loss'):
    if getattr(lm, name):
      raise UserError(f'a TransformerLm with {name} cannot be served.')


def _check_layer(layer: Any) -> None:
  """Refuses a layer that was called, if our cache is no cache for it."""
  for cls, reason in _NOT_SERVED.items():
    if isinstance(layer, cls):
      raise UserError(f'{_path(layer)} cannot be served: {reason}.')
  if getattr(layer, 'use_cross_attention', False):
    raise UserError(f'{_path(layer)} cannot be served: it attends to another sequence.')
  for cls in _ATTENTIONS:
    if isinstance(layer, cls):
      own = ('extend_step', '_dot_atten_one_step')
      by_place = [name for name in own if getattr(type(layer), name, None) is not getattr(cls, name, None)]
      by_place += [name for name in _FIELDS_BY_PLACE if getattr(layer, name, None)]
      if by_place:
        raise UserError(
          f'{_path(layer)} cannot be served: it has {", ".join(by_place)}, by which its attention may depend '
          'on the order of the places in the cache.'
        )


def _path(layer: Any) -> str:
  return f'{type(layer).__name__} ({"/".join(layer.path)})'


def _state_split_dims(attention: Any) -> tuple[Any, ...]:
  """Returns the split dims of an attention's keys: of [B, S, G, K], or of [B, S, K] where it keeps no dim of heads."""
  ndim, dims = 4, attention.activation_split_dims_mapping
  if isinstance(attention, multi_query_attention.MultiQueryDotProductAttention) and attention.num_kv_heads == 1:
    ndim, mapping = 3, dims.blh
  elif isinstance(attention, grouped_query_attention.GroupedQueryAttention):
    mapping = dims.bskh
  else:
    mapping = dims.blnh
  if mapping is None or attention.mesh_axis_names is None:
    return (None,) * ndim
  return filled_split_dims(base_layer.to_partition_spec(mapping, attention.mesh_axis_names), ndim)
