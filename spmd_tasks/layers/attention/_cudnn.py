"""Attention by cuDNN's kernel for NVIDIA GPUs, of the rows and heads of each device.

Documents of packed text are told apart by a mask [B, 1, T, T], which cuDNN reads as a bias: 2 bytes per pair of tokens
and row, once for all heads. cuDNN wants an even number of tokens; what a token that is added sees is cut off.
"""

import jax

from spmd_tasks.layers.attention._on_devices import AttentionLayout, attend_on_devices
from spmd_tasks.layers.attention._plain import AttentionOptions, attend_plainly


def attend_by_cudnn(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  segment_ids: jax.Array | None,
  options: AttentionOptions,
  *,
  layout: AttentionLayout,
) -> jax.Array:
  """Computes `attend`."""

  def attend_local(query, key, value, segment_ids, sinks, table):
    del sinks, table  # cuDNN has none
    return attend_plainly(query, key, value, segment_ids, options, implementation='cudnn')

  return attend_on_devices(attend_local, query, key, value, segment_ids, options, layout=layout, tile=2)
