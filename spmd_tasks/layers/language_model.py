"""LanguageModel: token embedding, transformer stack, final norm, logits.

Shapes: B batch, T sequence, V vocab, D model, L layers.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention.positions import LearnedPositions
from spmd_tasks.layers.embedding import TokenEmbedding
from spmd_tasks.layers.sublayers import WithSublayers


class LanguageModel(WithSublayers, kw_only=True):
  """A decoder-only language model over packed text.

  Fields:
    embedding: looks tokens up and gives the logits.
    stack: stack(x, segment_ids, segment_pos, train=...) -> (x, aux).
    final_norm: before the logits.
    positions: learned positions, added to the embeddings; None where attention is rotary.
  """

  embedding: TokenEmbedding
  stack: nn.Module
  final_norm: nn.Module
  positions: LearnedPositions | None = None

  @nn.compact
  def __call__(self, batch: Mapping[str, jax.Array], train: bool = False) -> dict[str, Any]:
    """Returns {'logits': float32 [B, T, V], 'aux': {name: [L]}}.

    Args:
      batch: `ids` int32 [B, T], and optionally `segment_ids` and `segment_pos` (both int32 [B, T]): the document of
        each token (0: padding) and the position in it. Without `segment_ids` a row is one document; without
        `segment_pos` positions count from the start of the row. `logit_columns` int32 [B, n] are those of the T columns
        whose logits are wanted, [B, n, V]; without it all are.
      train: whether dropout is on; it then needs the rng `dropout`.

    Raises:
      UserError: the batch gives documents without the positions in them.
    """
    ids, segment_ids, segment_pos = batch['ids'], batch.get('segment_ids'), batch.get('segment_pos')
    if segment_pos is None:
      if segment_ids is not None:
        raise UserError("batch has 'segment_ids' but no 'segment_pos': packed documents need their own positions.")
      segment_pos = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :], ids.shape)
    x = self.embedding(ids)
    if self.positions is not None:
      x = self.positions(x, segment_pos)
    x, aux = self.stack(x, segment_ids, segment_pos, train=train)
    if 'logit_columns' in batch:
      x = jnp.take_along_axis(x, batch['logit_columns'][:, :, None], axis=1)
    return {'logits': self.embedding.attend(self.final_norm(x)), 'aux': dict(aux)}
