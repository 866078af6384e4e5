"""EncoderDecoderLm: encodes one text, and decodes another that attends to it (T5).

Shapes: B batch, T sequence of the decoder, S sequence of the encoder, D model.
"""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.layers.attention.positions import RelativePositionBias
from spmd_tasks.layers.base import layer_scope, run_layer
from spmd_tasks.layers.language_model import LanguageModel


class EncoderDecoderLm(LanguageModel, kw_only=True):
  """A LanguageModel, the decoder, whose blocks also attend to the output of an encoder; both share the embedding.

  Beside the decoder's entries, the batch has `encoder_ids` int32 [B, S], and optionally `encoder_segment_ids` and
  `encoder_segment_pos` (both int32 [B, S]). A token of the decoder attends to the encoder's tokens of its own document.
  Without `encoder_ids`, as in decoding steps, cross-attention reads its keys and values from the KV cache.

  Fields:
    encoder_stack: stack of blocks whose attention is not causal.
    encoder_norm: normalizes the encoder's output.
    encoder_position_bias: a RelativePositionBias that all layers of the encoder share; None as for `position_bias`.
  """

  encoder_stack: nn.Module
  encoder_norm: nn.Module
  encoder_position_bias: RelativePositionBias | None = None

  @nn.nowrap
  def _context(self, batch: Mapping[str, jax.Array], train: bool) -> tuple[dict[str, Any], Mapping[str, jax.Array]]:
    context, _ = super()._context(batch, train)
    if 'encoder_ids' not in batch:
      return context, {}
    x, segment_ids, segment_pos = self._embed(batch, 'encoder_', train)
    text: dict[str, Any] = {'segment_ids': segment_ids, 'segment_pos': segment_pos}
    if self.encoder_position_bias is not None:
      text['position_bias'] = self.encoder_position_bias()
    if self.masks_zeros:
      text['token_mask'] = batch['encoder_ids'] > 0
    with layer_scope(cache=None):  # an encoder reads its whole text at once
      x, aux = run_layer('stack', self.encoder_stack, x, **text, train=train)
    # T5X does not share this dropout mask, whatever `dropout_broadcast_dims` is.
    encoded = self._dropout(self.encoder_norm(x), train, broadcast_dims=())
    if self.masks_zeros:
      encoded = jnp.where(text['token_mask'][..., None], encoded, 0)
    return context | {'encoded': encoded, 'encoder_segment_ids': segment_ids}, aux
