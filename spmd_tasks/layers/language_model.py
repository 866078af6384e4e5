"""LanguageModel: token embedding, stack of transformer blocks, final norm, logits.

Shapes: B batch, T sequence, V vocab, D model, L layers.
"""

from collections.abc import Mapping
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention._context import balance_tokens
from spmd_tasks.layers.attention._plain import attention_layout
from spmd_tasks.layers.base import WithSublayers, current_layer_scope, dropout, layer_scope, num_blocks, run_layer
from spmd_tasks.layers.embedding import TokenEmbedding


class LanguageModel(WithSublayers, kw_only=True):
  """A decoder-only language model over packed text.

  Fields:
    embedding: embeds the tokens and computes the logits.
    stack: stack(x, segment_ids, segment_pos, train=...) -> x or (x, aux), such as TransformerStack.
    final_norm: normalizes x before the logits.
    positions: LearnedPositions or SinusoidalPositions, added to the embeddings; None for rotary attention.
    layer_embedding: a LayerEmbedding, whose vectors the blocks of `stack` add by a `layer_input`; None for none.
    streams: a ResidualStreams, for blocks over several residual streams (AltUpBlock); None for one stream.
    position_bias: a RelativePositionBias that all layers of `stack` share; None if layers have none, or their own.
    dropout_rate: of the embeddings and of the final norm's output in training; needs the rng `dropout`.
    dropout_broadcast_dims: dims that share one dropout mask; T5X has (-2,), all tokens of a row.
    masks_zeros: whether the inputs of all sublayers are zeroed at tokens of id 0, except the first of a row and one
      that another token follows (Flaxformer's mask, which decides which padding the experts of a mixture compute).
    num_logit_chunks: in how many chunks of a device's tokens a loss computes the logits and their gradient, which take
      4.2 GB each in float32 for 8,192 tokens and 128,256 words; 1 for all at once. 'auto' has chunks of at most
      max(2 D, 512) tokens. Results are the same.
    scatters_gradients: whether gradients of kernels that are sharded over the tokens' devices are reduce-scattered by
      explicit collectives, or summed as XLA chooses. Faster on TPUs on a mesh with a `replica` axis; see
      scattered_gradients.py.
    balances_tokens: if a row is split over N devices, whether the stack gets its tokens in the order that balances
      causal attention; otherwise each layer permutes its queries and back. T must be divisible by 2 N. Results are the
      same, except for dropout and for experts with a capacity, which drop tokens by their order.
  """

  embedding: TokenEmbedding
  stack: nn.Module
  final_norm: nn.Module
  positions: nn.Module | None = None
  layer_embedding: nn.Module | None = None
  streams: nn.Module | None = None
  position_bias: nn.Module | None = None
  dropout_rate: float = 0.0
  dropout_broadcast_dims: tuple[int, ...] = ()
  masks_zeros: bool = False
  num_logit_chunks: int | Literal['auto'] = 'auto'
  scatters_gradients: bool = False
  balances_tokens: bool = False

  def __post_init__(self):
    if self.num_logit_chunks != 'auto' and not (isinstance(self.num_logit_chunks, int) and self.num_logit_chunks > 0):
      raise UserError(f"num_logit_chunks={self.num_logit_chunks!r} must be at least 1 (all logits at once), or 'auto'.")
    super().__post_init__()

  @nn.compact
  def __call__(self, batch: Mapping[str, jax.Array], train: bool = False) -> dict[str, Any]:
    """Returns {'logits': float32 [B, T, V], 'aux': {name: [L]}}, and a SoftmaxHead as 'softmax_head' for losses.

    A loss reads one of the two; a compiled program computes only what is read.

    Args:
      batch: `ids` int32 [B, T], and optionally
        `segment_ids`, `segment_pos`: int32 [B, T], the document of each token (0: padding) and its position there.
          Without both, a row is one document. `segment_ids` need `segment_pos`.
        `logit_columns`: int32 [B, n]; logits are computed for these columns of T only, [B, n, V].
        `logit_rows`: int32 [n]; logits are computed for these rows of B only, [n, T, V].
        `labels`: int32 [B, T]; without them, or with an adapter of the logits, there is no 'softmax_head'.
        `prefix_mask`: [B, T]; tokens where it is 1 attend to one another in both directions, within their document.
      train: whether dropout is on, which needs the rng `dropout`.
    """
    cache = current_layer_scope().cache
    cache = None if cache is None else cache.of_model(self)
    with layer_scope(scatters_gradients=self.scatters_gradients, cache=cache, shared_kv={}):
      return self._predict(batch, train)

  @nn.nowrap
  def _predict(self, batch: Mapping[str, jax.Array], train: bool) -> dict[str, Any]:
    context, encoder_aux = self._context(batch, train)
    x, segment_ids, segment_pos = self._embed(batch, '', train)
    text = {'segment_ids': segment_ids, 'segment_pos': segment_pos, **context}
    if self.layer_embedding is not None:
      if (num := num_blocks(self.stack)) != self.layer_embedding.num_layers:
        raise UserError(
          f'layer_embedding.num_layers={self.layer_embedding.num_layers} must be {num}, the number of blocks in the '
          'stack: set it.'
        )
      text['layer_inputs'] = jnp.moveaxis(self.layer_embedding(batch['ids'], x), 2, 0)
    x, aux = self._run_stack(x if self.streams is None else self.streams.expand(x), text, train)
    x = x if self.streams is None else self.streams.merge(x)
    return self._predict_of(x, join_aux(encoder_aux, aux), batch, text, train)

  @nn.nowrap
  def _run_stack(self, x: jax.Array, text: Mapping[str, Any], train: bool) -> tuple[jax.Array, Any]:
    layout = attention_layout(('batch', 'seq', None, None), len(x))
    if not self.balances_tokens or layout.num_tokens == 1 or current_layer_scope().cache is not None:
      return run_layer('stack', self.stack, x, **text, train=train)
    if x.shape[1] % (2 * layout.num_tokens) or text.keys() & {'position_bias', 'encoded', 'layer_inputs'}:
      raise UserError(
        f'balances_tokens needs rows of a number of tokens, here {x.shape[1]}, that {2 * layout.num_tokens} divides, '
        'and a model without relative position biases, encoder or layer_embedding: set it to False.'
      )
    x, text = balance_tokens((x, dict(text)), layout)
    with layer_scope(balanced_tokens=True):
      x, aux = run_layer('stack', self.stack, x, **text, train=train)
    return balance_tokens(x, layout, back=True), aux

  @nn.nowrap
  def _predict_of(
    self, x: jax.Array, aux: Mapping[str, jax.Array], batch: Mapping[str, Any], text: Mapping[str, Any], train: bool
  ) -> dict[str, Any]:
    """Returns the predictions for the stack's output x; `text` are the stack's other arguments."""
    del text
    if 'logit_columns' in batch:
      x = jnp.take_along_axis(x, batch['logit_columns'][:, :, None], axis=1)
    if 'logit_rows' in batch:
      x = jnp.take(x, batch['logit_rows'], axis=0, mode='clip')
    x = self._dropout(self.final_norm(x), train)
    has_labels = 'labels' in batch and 'logit_columns' not in batch
    return {**self._logits_of(x, has_labels), 'aux': dict(aux), **self._other_predictions(x)}

  @nn.nowrap
  def _logits_of(self, x: jax.Array, has_labels: bool) -> dict[str, Any]:
    """Returns the logits of the final norm's output x, and a SoftmaxHead if there are labels."""
    head = None
    if has_labels and not current_layer_scope().plain_products:
      head = self.embedding.softmax_head(x, num_chunks=self.num_logit_chunks)
    return {'logits': self.embedding.attend(x), **({} if head is None else {'softmax_head': head})}

  @nn.nowrap
  def _other_predictions(self, x: jax.Array) -> dict[str, jax.Array]:
    """Returns further predictions of a subclass, computed from the final norm's output."""
    del x
    return {}

  @nn.nowrap
  def _embed(
    self, batch: Mapping[str, jax.Array], prefix: str, train: bool
  ) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Returns (embeddings, segment ids, positions) of the batch's entries with this prefix."""
    ids, segment_ids, segment_pos = (batch.get(prefix + name) for name in ('ids', 'segment_ids', 'segment_pos'))
    assert ids is not None
    if segment_pos is None:
      if segment_ids is not None:
        raise UserError(
          f"the batch has '{prefix}segment_ids' but no '{prefix}segment_pos': add the position of each token in its "
          'document.'
        )
      segment_pos = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :], ids.shape)
    x = self.embedding(ids)
    if self.positions is not None:
      x = self.positions(x, segment_pos)
    return self._dropout(x, train), segment_ids, segment_pos

  @nn.nowrap
  def _context(self, batch: Mapping[str, jax.Array], train: bool) -> tuple[dict[str, Any], Mapping[str, jax.Array]]:
    """Returns (further arguments of the stack, aux of the layers that computed them)."""
    del train
    bias = None if self.position_bias is None else self.position_bias()
    context = {'position_bias': bias, 'prefix_mask': batch.get('prefix_mask')}
    if self.masks_zeros:
      is_word = batch['ids'] > 0
      context['token_mask'] = (is_word | jnp.roll(is_word, -1, axis=1).at[:, -1].set(False)).at[:, 0].set(True)
    return {name: value for name, value in context.items() if value is not None}, {}

  @nn.nowrap
  def _dropout(self, x: jax.Array, train: bool, **settings: Any) -> jax.Array:
    settings = {'broadcast_dims': self.dropout_broadcast_dims, **settings}
    return dropout(self.dropout_rate, train=train, **settings)(x)


def join_aux(first: Mapping[str, jax.Array], second: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns the statistics of two stacks, {name: [L] or [L, E]}; a name that both have is concatenated over layers."""
  both = {name: jnp.concatenate([first[name], second[name]]) for name in first if name in second}
  return {**first, **second, **both}
