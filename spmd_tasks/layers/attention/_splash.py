"""Attention by splash, JAX's Pallas kernel for TPUs: keeps no scores in memory, and skips masked blocks.

The kernel computes one device's rows and heads. If the tokens of a sequence are split over devices, each device gathers
all keys and values; _context.py explains which queries it computes.

Shapes: B batch, T sequence, H query heads, G key/value heads, K head dim, V dim of a value.
"""

import concurrent.futures
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.layers.attention._context import (
  balanced_order,
  exchange,
  gather_tokens,
  in_text_order,
  undo_exchange,
)
from spmd_tasks.layers.attention._on_devices import attend_on_devices
from spmd_tasks.layers.attention._plain import ATTENTION_NAME, AttentionLayout, AttentionOptions, Heads
from spmd_tasks.layers.base import current_layer_scope
from spmd_tasks.sharding.specs import current_device

_TILE = 128
_LARGEST_BLOCK = 1024


def attend_by_splash(heads: Heads, options: AttentionOptions, *, layout: AttentionLayout, interpret: bool) -> jax.Array:
  """Computes `attend` by the kernel; `interpret` interprets it on any platform, slowly."""
  query = heads.query * jnp.asarray(options.scale(heads.query.shape[-1]), heads.query.dtype)
  axes, is_split, is_balanced = layout.tokens, layout.num_tokens > 1, current_layer_scope().balanced_tokens

  # The features of one head fill half of an Ironwood's matrix units, which are 256 wide.
  is_half = query.shape[-1] == _TILE and current_device().device_kind == 'TPU7x'
  flat = _all_heads_at_once if is_half else lambda x: x

  def make_kernel(num_heads: int, length: int) -> Any:
    settings = options.causal, options.window, options.logit_cap, options.gradient_keys
    return _kernel(num_heads, length, *settings, layout.num_tokens, interpret)

  def attend_local(query, key, value, segments, sinks, kernel):
    query = flat(query)
    if kernel is None:
      kernel = make_kernel(query.shape[2], query.shape[1] * layout.num_tokens)
    key_segments = segments
    if is_split and not is_balanced:
      query = exchange(query, axes)
      segments = None if segments is None else exchange(segments, axes)
    if is_split:
      gathered = gather_tokens((key, value, key_segments), axes)
      key, value, key_segments = in_text_order(gathered, layout.num_tokens) if is_balanced else gathered

    def attend_row(query, key, value, segments, key_segments):
      by_head = (jnp.moveaxis(x, 1, 0) for x in (query, key, value))
      return jnp.moveaxis(kernel(*by_head, _segment_ids(segments, key_segments), sinks), 0, 1)

    attended = flat(jax.vmap(attend_row)(query, key, value, segments, key_segments))
    return undo_exchange(attended, axes) if is_split and not is_balanced else attended

  return attend_on_devices(
    attend_local,
    heads._replace(query=query),
    dataclasses.replace(options, sinks=None if options.sinks is None else options.sinks.astype(jnp.float32)),
    layout=layout,
    tile=2 * _TILE if is_split else _TILE,
    table=make_kernel if options.causal else None,
  )


def _all_heads_at_once(x: jax.Array) -> jax.Array:
  """Returns x [B, T, H, K], laid out so that the product before or after it has rows of H K features.

  With the kernel's layout, the compiler would multiply head by head.
  """
  return jax.lax.optimization_barrier(x.reshape(*x.shape[:2], -1)).reshape(x.shape)


def _segment_ids(segments: jax.Array | None, key_segments: jax.Array | None) -> Any:
  from jax.experimental.pallas.ops.tpu import splash_attention

  if segments is None or key_segments is None:
    return None
  return splash_attention.SegmentIds(q=segments, kv=key_segments)


@functools.lru_cache(maxsize=32)
def _kernel(
  num_heads: int,
  length: int,
  causal: bool,
  window: int | None,
  logit_cap: float | None,
  gradient_keys: int | None,
  num_parts: int,
  interpret: bool,
) -> Any:
  """Returns the kernel for the heads of a device: (query [H, T, K], key [G, T, K], value [G, T, V], segments, sinks).

  If T is split into parts, it is a tree of tables; device i's part is for the queries that `exchange` sends to it.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention  # Pallas takes a second to import

  mask: Any
  shape, num_tables = (length, length), num_parts
  if causal:
    mask = _causal_mask(shape, window)
  else:  # the same for every part, which JAX's tables do not express
    mask, num_tables = splash_attention.FullMask((length // num_parts, length)), 1
  if causal and num_parts > 1:
    mask.q_sequence = balanced_order(length, num_parts)  # the place in the text of each query
  run = length // (2 * num_parts) if num_parts > 1 else length  # consecutive queries
  block = next(size for size in range(_LARGEST_BLOCK, 0, -_TILE) if run % size == 0)
  compute = next(size for size in range(min(block, _LARGEST_BLOCK // 2), 0, -_TILE) if block % size == 0)
  # One kernel for all gradients computes scores once less, but returns partial query gradients for each block of keys.
  keys = gradient_keys or block
  has_one_kernel = gradient_keys is not None and length % keys == 0 and keys % compute == 0
  make = functools.partial(
    splash_attention.make_splash_mha,
    mask=splash_attention.MultiHeadMask([mask] * num_heads),
    block_sizes=splash_attention.BlockSizes(
      block_q=block,
      block_kv=block,
      block_kv_compute=compute,
      block_q_dkv=block,
      block_kv_dkv=keys if has_one_kernel else block,
      block_kv_dkv_compute=compute,
      block_q_dq=None if has_one_kernel else block,
      block_kv_dq=None if has_one_kernel else block,
      use_fused_bwd_kernel=has_one_kernel,
    ),
    head_shards=1,
    q_seq_shards=num_tables,
    attn_logits_soft_cap=logit_cap,
    residual_checkpoint_name=ATTENTION_NAME,
    interpret=interpret,
  )
  # The mask's tables are constants of the program. The caller is tracing a step; a new thread has no trace context.
  with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
    return executor.submit(lambda: jax.tree.map(np.asarray, make())).result()


def _causal_mask(shape: tuple[int, int], window: int | None) -> Any:
  """Returns JAX's mask, with shortcuts for blocks that all queries see, or none: most blocks of 128k tokens."""
  from jax.experimental.pallas.ops.tpu import splash_attention

  base: Any = splash_attention.CausalMask if window is None else splash_attention.LocalMask

  class Mask(base):
    def __getitem__(self, slices: Any) -> np.ndarray:
      queries, keys = self.q_sequence[slices[0]], range(*slices[1].indices(shape[1]))
      nearest, farthest = int(queries.min()) - keys[-1], int(queries.max()) - keys[0]
      if nearest >= 0 and (window is None or farthest < window):
        return _uniform(True, len(queries), len(keys))
      if farthest < 0 or (window is not None and nearest >= window):
        return _uniform(False, len(queries), len(keys))
      return super().__getitem__(slices)

  return Mask(shape) if window is None else Mask(shape, window_size=(window - 1, 0), offset=0)


@functools.cache
def _uniform(value: bool, *shape: int) -> np.ndarray:
  return np.full(shape, value)
