"""Computes attention by cuDNN's kernel, on the rows and heads of each device.

Documents of packed text are told apart by a mask [B, 1, T, T], which cuDNN reads as a bias: 2 bytes per pair of tokens
and row, once for all heads. cuDNN wants an even number of tokens; what a token that is added sees is cut off.

Shapes: B batch, T sequence, H query heads, G key/value heads, K head dim.
"""

import jax

from spmd_tasks.layers.attention._layout import AttentionLayout
from spmd_tasks.layers.attention._on_devices import attend_on_devices
from spmd_tasks.layers.attention._plain import AttentionOptions, segment_mask


def attend_by_cudnn(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  segment_ids: jax.Array | None,
  options: AttentionOptions,
  *,
  layout: AttentionLayout,
) -> jax.Array:
  """Computes `attend` (implementations.py)."""

  def attend_local(query, key, value, segment_ids, sinks, table):
    del sinks, table  # cuDNN has none
    return jax.nn.dot_product_attention(
      query,
      key,
      value,
      mask=None if segment_ids is None else segment_mask(segment_ids),
      scale=options.softmax_scale,
      is_causal=options.causal,
      # Documents are contiguous, so the distance of two columns is the distance within the document.
      local_window_size=None if options.window is None else (options.window - 1, 0),
      implementation='cudnn',
    )

  return attend_on_devices(attend_local, query, key, value, segment_ids, options, layout=layout, tile=2)
