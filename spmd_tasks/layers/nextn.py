"""NextnHead: predicts the token after the next one, from the activations and the next token (DeepSeek-V3).

Head k gets the activations of head k - 1, and predicts one token further. In training, heads teach the model to look
ahead; in generation, they draft tokens, which a step then verifies (decoding/nextn_drafts.py).

Shapes: B batch, T sequence, D model.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import NEW_CACHE, WithSublayers, current_layer_scope, run_layer
from spmd_tasks.layers.language_model import LanguageModel, join_aux
from spmd_tasks.layers.linear import Linear
from spmd_tasks.layers.losses import shift
from spmd_tasks.sharding import SplitDims, constrain

HIDDEN = 'hidden'  # in `new_cache`, the activations from which logits are computed


class NextnHead(WithSublayers, kw_only=True):
  """final_norm(stack([embedding_norm(e); hidden_norm(h)] . projection)): a module of arXiv 2412.19437, section 2.2.

  As in the published weights (`eh_proj`), the embedding is the first half. h are the activations after the final norm,
  as in vLLM and Megatron. The model's embedding embeds the tokens as e, and computes the logits.

  Weights under `embedding_norm`, `hidden_norm`, `projection`, `stack` and `final_norm`.

  Fields:
    stack: as in LanguageModel; DeepSeek-V3 has one block.
    norm: template of the three norms.
    split_dims, activation_split_dims: of the projection's kernel [2 D, D] and its output.
  """

  stack: nn.Module
  norm: nn.Module
  split_dims: SplitDims = ('mlp', 'embed')
  activation_split_dims: SplitDims = ('batch', 'seq', 'act_embed')

  @nn.compact
  def __call__(
    self, hidden: jax.Array, embedded: jax.Array, *, train: bool, **text: Any
  ) -> tuple[jax.Array, Mapping[str, jax.Array]]:
    """Returns ([B, T, D], aux of the stack) for the activations h and the embeddings of the following tokens."""
    norm = lambda name, x: self.norm.copy(name=name)(x)
    # Otherwise XLA would shard the model's own sums as the projection is: other bits with heads than without.
    hidden = constrain(hidden, self.activation_split_dims)
    halves = norm('embedding_norm', embedded), norm('hidden_norm', hidden.astype(embedded.dtype))
    projection = Linear(
      output_dims=embedded.shape[-1],
      dtype=embedded.dtype,
      split_dims=self.split_dims,
      activation_split_dims=self.activation_split_dims,
      name='projection',
    )
    x = projection(jnp.concatenate(halves, axis=-1))
    x, aux = run_layer('stack', self.stack, x, **text, train=train)
    return norm('final_norm', x), aux


class NextnLanguageModel(LanguageModel, kw_only=True):
  """A LanguageModel with a chain of heads; head k (from 0) predicts the token k + 2 positions ahead.

  If the batch has labels, the predictions have `nextn`, a list with the logits, and the SoftmaxHead, of each head. In
  generation, a batch with `returns_hidden` writes the activations h to `new_cache`, and a batch with `hidden` [B, T, D]
  and the tokens that follow as `ids` returns the logits of head number `nextn`; see decoding/nextn_drafts.py.

  Fields:
    num_nextn_predict_layers: how many heads; Hugging Face's name. Their weights are under `nextn_0`, `nextn_1`, ...
    nextn_head: template of the heads.
    nextn_loss_weight: of the heads' mean cross-entropy in the loss; it is normalized as the loss of the next token is.
      DeepSeek-V3 has 0.3, and 0.1 in the last part of its training.
  """

  num_nextn_predict_layers: int = 1
  nextn_head: NextnHead
  nextn_loss_weight: float = 0.3

  def __post_init__(self):
    if self.layer_embedding is not None or self.streams is not None:
      raise UserError('multi-token prediction heads support neither layer_embedding nor streams: set them to None.')
    super().__post_init__()

  @nn.nowrap
  def _predict(self, batch: Mapping[str, Any], train: bool) -> dict[str, Any]:
    if 'hidden' not in batch:
      return super()._predict(batch, train)
    context, _ = self._context(batch, train)
    text = {'segment_ids': batch['segment_ids'], 'segment_pos': batch['segment_pos'], **context}
    hidden, aux = self._head(batch['nextn'])(batch['hidden'], self.embedding(batch['ids']), **text, train=False)
    self.put_variable(NEW_CACHE, HIDDEN, hidden)
    if 'logit_columns' in batch:
      hidden = jnp.take_along_axis(hidden, batch['logit_columns'][:, :, None], axis=1)
    if 'logit_rows' in batch:
      hidden = jnp.take(hidden, batch['logit_rows'], axis=0, mode='clip')
    return {'logits': self.embedding.attend(hidden), 'aux': dict(aux)}

  @nn.nowrap
  def _predict_of(
    self, x: jax.Array, aux: Mapping[str, jax.Array], batch: Mapping[str, Any], text: Mapping[str, Any], train: bool
  ) -> dict[str, Any]:
    if 'returns_hidden' in batch:
      self.put_variable(NEW_CACHE, HIDDEN, self.final_norm(x))
    if current_layer_scope().cache is not None or not ('labels' in batch or self.is_initializing()):
      return super()._predict_of(x, aux, batch, text, train)
    heads: list[Any] = []
    hidden = self._dropout(self.final_norm(x), train)
    for number in range(self.num_nextn_predict_layers):
      embedded = self._dropout(self.embedding(shift(batch['ids'], number + 1)), train)
      hidden, head_aux = self._head(number)(hidden, embedded, **text, train=train)
      hidden, aux = self._dropout(hidden, train), join_aux(aux, head_aux)
      heads.append(self._logits_of(hidden, 'labels' in batch))
    return {
      **super()._predict_of(x, aux, batch, text, train),
      'nextn': heads,
      'nextn_loss_weight': self.nextn_loss_weight,
    }

  @nn.nowrap
  def _head(self, number: int) -> nn.Module:
    return self.nextn_head.copy(name=f'nextn_{number}')
