"""EAGLE-3: a head beside a frozen model that guesses the next tokens from activations of three depths.

    EagleLanguageModel(..., eagle_head=EagleHead(...), feature_layers=(2, 16, 29), num_guesses=4)

After Li et al., arXiv 2503.01840, section 3: the residual stream behind a low, a middle and a high layer is projected
to the model's width and joined with the embedding of the next token; one block predicts the token behind that one. Its
own result takes the place of the features for all further guesses. Training does as drafting does ("training-time
test"): guess k is computed of the head's own results, k - 1 times, and each guess is compared with what the model
itself predicts there. The model's embedding makes vectors of tokens, and logits of results. decoding/nextn_drafts.py
drafts with the head, eagle_tuning.py trains it.

Shapes: B batch, T sequence, D model, F features (3), N guesses, V vocab, H query heads, G key/value heads, K head dim.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers import LanguageModel, Linear, LossOutput, NextnLanguageModel, TransformerBlock, WithSublayers
from spmd_tasks.layers.adapter import ADAPTER_TAG
from spmd_tasks.layers.attention import Attention
from spmd_tasks.layers.base import NEW_CACHE, is_decoding, run_layer
from spmd_tasks.layers.label_scores import in_chunks
from spmd_tasks.layers.linear import project
from spmd_tasks.layers.nextn import HIDDEN, shift
from spmd_tasks.runtime import Task
from spmd_tasks.sharding import SplitDims, constrain

_QUERIES = 512  # whose scores are in memory at a time


class RecordingBlock(TransformerBlock, kw_only=True):
  """A TransformerBlock of the residual stream [B, T, (F + 1) D + 1], which carries features and the number of blocks.

  Behind the stream itself are what it was behind the blocks `feature_layers`, counted from 1, zeros before.
  """

  feature_layers: tuple[int, ...] = ()

  counterpart: ClassVar[type] = TransformerBlock  # what it is to a folder in Hugging Face's format

  def __call__(self, x: jax.Array, *args: Any, **given: Any) -> tuple[jax.Array, Any]:
    stream, *features = jnp.split(x[..., :-1], len(self.feature_layers) + 1, axis=-1)
    number = x[..., -1:] + 1  # exact up to 256 in bfloat16
    stream, aux = super().__call__(stream, *args, **given)
    features = [jnp.where(number == layer, stream, old) for layer, old in zip(self.feature_layers, features)]
    return jnp.concatenate([stream, *features, number], axis=-1), aux


class EagleAttention(Attention, kw_only=True):
  """Attention of a head. Outside of generation it returns its keys and values, too, and takes those of guesses before.

  Token t of guess k sees the tokens up to t of the first guess, and itself in the guesses 2 to k. Only `num_heads`,
  `num_kv_heads`, `head_dim`, `rotary`, `dtype` and the split dims of Attention's fields have a meaning.
  """

  @nn.compact
  def __call__(  # type: ignore[override]
    self,
    x: jax.Array,
    segment_ids: jax.Array | None,
    segment_pos: jax.Array,
    before: tuple[jax.Array, ...] = (),
  ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns ([B, T, D], keys and values [n, B, T, G, K] of n guesses), n - 1 of which `before` has."""
    if is_decoding(self):
      return super().__call__(x, segment_ids, segment_pos), ()
    assert self.rotary is not None
    num_kv_heads, head_dim = self._dims(x.shape[-1])
    of_query = (self.num_heads, head_dim), self.query_split_dims, self.query_activation_split_dims
    of_key = (num_kv_heads, head_dim), self.kv_split_dims, self.kv_activation_split_dims
    given = zip(('query', 'key', 'value'), (of_query, of_key, of_key))
    query, key, value = (project(self, name, x, *each, scale=self.init_scale) for name, each in given)
    query, key = self.rotary(query, segment_pos), self.rotary(key, segment_pos)
    keys, values = key[None], value[None]
    if before:
      keys, values = jnp.concatenate([before[0], keys]), jnp.concatenate([before[1], values])
    attended = attend_to_guesses(query, keys, values, segment_ids)
    out = x.shape[-1], self.out_split_dims, self.activation_split_dims
    return project(self, 'out', attended, *out, scale=self.out_init_scale, num_input_dims=2), (keys, values)


def attend_to_guesses(query: jax.Array, keys: jax.Array, values: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
  """Attention [B, T, H, K] of the queries [B, T, H, K] of guess n to keys and values [n, B, T, G, K] of n guesses."""
  (num_rows, length, _, head_dim), num_groups = query.shape, keys.shape[3]
  segments = jnp.zeros((num_rows, length), jnp.int32) if segment_ids is None else segment_ids
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  block = _QUERIES if length % _QUERIES == 0 else length
  columns = jnp.arange(length)

  def attend(query: jax.Array, segments_of: jax.Array, columns_of: jax.Array, *own: jax.Array) -> jax.Array:
    may_see = (columns_of[:, None] >= columns[None, :])[None] & (segments_of[:, :, None] == segments[:, None, :])
    logits = jnp.where(may_see[:, None, None], product('BCGRK,BSGK->BGRCS', query, keys[0]), -1e30)
    logits = jnp.concatenate([logits, product('BCGRK,NBCGK->BGRCN', query, own[0])], axis=-1) / head_dim**0.5
    weights = jax.nn.softmax(logits, axis=-1).astype(values.dtype)
    attended = product('BGRCS,BSGK->BCGRK', weights[..., :length], values[0])
    return (attended + product('BGRCN,NBCGK->BCGRK', weights[..., length:], own[1])).astype(values.dtype)

  def blocks(x: jax.Array, axis: int) -> jax.Array:
    shape = (*x.shape[:axis], length // block, block, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)

  grouped = query.reshape(num_rows, length, num_groups, -1, head_dim)
  given = blocks(grouped, 1), blocks(segments, 1), blocks(columns, 0), blocks(keys[1:], 2), blocks(values[1:], 2)
  attended = jax.lax.map(lambda xs: jax.checkpoint(attend, prevent_cse=False)(*xs), given)
  return jnp.moveaxis(attended, 0, 1).reshape(query.shape)


class EagleHead(WithSublayers, kw_only=True):
  """final_norm(block([embedding_norm(e); hidden_norm(h)] . projection)), the block being attention and `ffn`.

  h is features . `features` at first, then the head's own result. As in the paper, and unlike the published code, whose
  attention reads both halves, the halves are joined before the block; results are normalized, as those of NextnHead.

  Weights under these names, `attention`, `attention_norm`, `ffn` and `ffn_norm`.

  Fields:
    attention: an EagleAttention.
    ffn: a dense feed-forward sublayer.
    norm: template of all norms.
    split_dims, activation_split_dims: of the two projections' kernels and their outputs.
  """

  attention: nn.Module
  ffn: nn.Module
  norm: nn.Module
  split_dims: SplitDims = ('mlp', 'embed')
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  @nn.compact
  def __call__(
    self,
    hidden: jax.Array,
    embedded: jax.Array,
    before: tuple[jax.Array, ...] = (),
    *,
    segment_ids: jax.Array | None,
    segment_pos: jax.Array,
    train: bool,
    **context: Any,
  ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns ([B, T, D], keys and values of all guesses); `hidden` is [B, T, F D] or [B, T, D]."""
    norm = lambda name, x: self.norm.copy(name=name)(x)
    splits: Any = {'split_dims': self.split_dims, 'activation_split_dims': self.activation_split_dims}
    linear = functools.partial(Linear, output_dims=embedded.shape[-1], dtype=embedded.dtype, **splits)
    hidden = constrain(hidden, self.activation_split_dims)  # see NextnHead
    if hidden.shape[-1] != embedded.shape[-1]:
      hidden = linear(name='features')(hidden)
    halves = norm('embedding_norm', embedded), norm('hidden_norm', hidden.astype(embedded.dtype))
    x = linear(name='projection')(jnp.concatenate(halves, axis=-1))
    y, kept = self.attention(norm('attention_norm', x), segment_ids, segment_pos, before)
    x = x + y.astype(x.dtype)
    y, _ = run_layer('ffn', self.ffn, norm('ffn_norm', x), segment_ids=segment_ids, train=train)
    return norm('final_norm', x + y.astype(x.dtype)), kept


class EagleLanguageModel(NextnLanguageModel, kw_only=True):
  """A LanguageModel of RecordingBlocks with a head under `eagle`.

  Where the batch has labels, the predictions are `guesses`, what EagleLoss reads, and no logits. No gradient reaches
  the model. In generation it is called as a NextnLanguageModel is.

  Fields:
    eagle_head: an EagleHead.
    feature_layers: as the blocks have it.
    num_guesses: N, how many guesses of a token are trained.
  """

  num_nextn_predict_layers: int = 0
  nextn_head: nn.Module | None = None  # type: ignore[assignment]
  eagle_head: EagleHead
  feature_layers: tuple[int, ...]
  num_guesses: int = 4

  chains_drafts: ClassVar[bool] = True  # one head guesses all drafts, see decoding/nextn_drafts.py

  def __post_init__(self):
    if self.num_guesses < 1:
      raise UserError(f'num_guesses={self.num_guesses} must be at least 1.')
    super().__post_init__()

  @nn.nowrap
  def _embed(self, batch: Mapping[str, jax.Array], prefix: str, train: bool) -> Any:
    x, *others = super()._embed(batch, prefix, train)
    added = jnp.zeros((*x.shape[:-1], len(self.feature_layers) * x.shape[-1] + 1), x.dtype)
    return jnp.concatenate([x, added], axis=-1), *others

  @nn.nowrap
  def _predict_of(
    self, x: jax.Array, aux: Mapping[str, jax.Array], batch: Mapping[str, Any], text: Mapping[str, Any], train: bool
  ) -> dict[str, Any]:
    num_dims = self.embedding.embed_dim
    x, features = x[..., :num_dims], x[..., num_dims:-1]
    if 'returns_hidden' in batch:
      self.put_variable(NEW_CACHE, HIDDEN, features)
    if is_decoding(self) or not ('labels' in batch or self.is_initializing()):
      return LanguageModel._predict_of(self, x, aux, batch, text, train)
    head, hidden, kept, results = self._head(0), jax.lax.stop_gradient(features), (), []
    for number in range(self.num_guesses):
      given = {'segment_ids': text['segment_ids'], 'segment_pos': text['segment_pos'] + number, 'train': train}
      hidden, kept = head(hidden, self.embedding(shift(batch['ids'], number + 1)), kept, **given)
      # Where the model itself predicts the token that is guessed, so that the two are compared place by place.
      results.append(jnp.pad(hidden[:, : -number - 1], ((0, 0), (number + 1, 0), (0, 0))))
    told = jax.lax.stop_gradient(self.final_norm(x))
    if self.is_initializing():
      return LanguageModel._predict_of(self, x, aux, batch, text, train)
    weights, logits_of = self.embedding.logits_function(told)
    compare, stacked = functools.partial(compare_guesses, logits_of), jnp.stack(results, axis=2)
    return {'guesses': in_chunks(compare, weights, told, stacked, num_chunks=self.num_logit_chunks)}

  @nn.nowrap
  def _head(self, number: int) -> nn.Module:
    del number
    return self.eagle_head.copy(name='eagle')


def compare_guesses(
  logits_of: Callable[[Any, jax.Array], jax.Array], weights: Any, told: jax.Array, results: jax.Array
) -> jax.Array:
  """Returns float32 [2, N, B, t]: of N guesses the cross-entropy to the model's distribution, and 1.0 where the
  likeliest tokens are the same. Both are made of logits, of `told` [B, t, D] and `results` [B, t, N, D].
  """
  logits = logits_of(weights, told)
  probabilities, likeliest = jax.nn.softmax(logits, axis=-1), jnp.argmax(logits, axis=-1)
  found = []
  for number in range(results.shape[2]):
    log_probs = jax.nn.log_softmax(logits_of(weights, results[:, :, number]), axis=-1)
    is_right = jnp.argmax(log_probs, axis=-1) == likeliest
    found.append(jnp.stack([-jnp.sum(probabilities * log_probs, axis=-1), is_right.astype(jnp.float32)]))
  return jnp.stack(found, axis=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleLoss:
  """The sum over guesses k of decay^(k - 1) times the cross-entropy to the model's distribution, a mean over tokens.

  A token counts for a guess as it does where it is the next one, unless the guess begins in another document. The
  metric `acceptance_k` is how often guess k is the model's likeliest token, the guesses before it being right.

  Fields:
    decay: above 0; the paper's code has 0.8.
  """

  decay: float = 0.8

  def __post_init__(self):
    if not 0 < self.decay < float('inf'):
      raise UserError(f'decay={self.decay} of an EagleLoss must be above 0 and finite, such as 0.8.')

  def __call__(self, predictions: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> LossOutput:
    """Computes the LossOutput of `guesses` [2, N, B, T]; `batch` as for LanguageModelLoss."""
    losses, is_right = predictions['guesses']
    weights = batch['weights'].astype(jnp.float32)
    segments = batch.get('segment_ids', jnp.ones_like(batch['labels']))
    total, loss, metrics = jnp.sum(weights), jnp.float32(0), {}
    for number in range(len(losses)):
      first = jnp.pad(segments[:, : -number - 1], ((0, 0), (number + 1, 0)))
      counted = jnp.where((first == segments) & (segments > 0), weights, 0.0)
      num = jnp.sum(counted)
      loss += self.decay**number * jnp.sum(jnp.where(counted == 0, 0.0, losses[number] * counted))
      metrics[f'acceptance_{number + 1}'] = (jnp.sum(is_right[number] * counted) / jnp.maximum(num, 1e-6), num)
    return LossOutput(loss=loss / jnp.maximum(total, 1e-6), weight=total, metrics=metrics)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleTask(Task):
  """A Task whose head's weights are, like an adapter, in no model's folder, read or exported."""

  def mark_weights(self, weight_specs: Any) -> Any:
    mark = lambda spec: dataclasses.replace(spec, tags=(*spec.tags, ADAPTER_TAG))
    return super().mark_weights({**weight_specs, 'eagle': jax.tree.map(mark, weight_specs['eagle'])})


def default_layers(num_layers: int) -> Sequence[int]:
  """The blocks whose results are features, counted from 1: of 32 layers 2, 16 and 29, as in the paper's code."""
  low, high = min(2, max(num_layers // 3, 1)), max(num_layers - 3, -(-3 * num_layers // 4))
  return low, max(num_layers // 2, 1), high
