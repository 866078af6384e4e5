"""Attention by splash, JAX's Pallas kernel for TPUs: no scores in memory, and masked blocks are skipped.

The kernel runs on one device, for some rows and heads: inside a `shard_map` over the axes that split queries. Heads
that these axes do not divide are padded. So is a sequence that the kernel's tiles, of 128 tokens, do not divide.

Shapes: B batch, T sequence, H query heads, G key/value heads, K head dim, V dim of a value.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd_tasks.errors import UserError
from spmd_tasks.sharding import (
  SplitDims,
  current_sharding_scope,
  num_parts,
  spec_axes,
  split_dims_to_partition_spec,
)

_TILE = 128
_LARGEST_BLOCK = 1024

# The `checkpoint_name` of what the kernel's backward pass needs of its forward pass: results and softmax denominators.
ATTENTION_NAME = 'attention'


def attend_by_splash(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  segment_ids: jax.Array | None,
  *,
  causal: bool,
  window: int | None,
  softmax_scale: float | None,
  logit_cap: float | None,
  sinks: jax.Array | None,
  split_dims: SplitDims,
  interpret: bool,
) -> jax.Array:
  """Computes `attend` by the kernel; `interpret` runs it on any platform, slowly.

  Raises:
    UserError: the sequence is split over a mesh axis.
  """
  num_rows, length, num_heads, head_dim = query.shape
  scope = current_sharding_scope()
  batch_axes: tuple[str, ...] = ()
  head_axes: tuple[str, ...] = ()
  row_parts = head_parts = 1
  if scope is not None:
    spec = split_dims_to_partition_spec(split_dims, scope.mesh.axis_names, scope.axis_rules)
    batch_axes, sequence_axes, head_axes, _ = spec_axes(spec, 4)
    if num_parts(sequence_axes, scope.mesh.shape) > 1:
      raise UserError(
        "implementation='splash' of attention needs all of a sequence on each device, but the axis rules split it "
        f"over {sequence_axes}: set the rule of 'seq' to None, or choose another implementation."
      )
    row_parts, head_parts = num_parts(batch_axes, scope.mesh.shape), num_parts(head_axes, scope.mesh.shape)

  # Every device gets whole groups of query heads, each with its key/value head.
  repeats = _repeats(num_heads, key.shape[2], head_parts)
  if repeats > 1:
    key, value = jnp.repeat(key, repeats, axis=2), jnp.repeat(value, repeats, axis=2)
  heads_per_group = num_heads // key.shape[2]
  padded_length = -(-length // _TILE) * _TILE
  if padded_length > length and not causal and segment_ids is None:
    segment_ids = jnp.ones((num_rows, length), jnp.int32)
  query = query * jnp.asarray(softmax_scale or 1.0 / math.sqrt(head_dim), query.dtype)

  def pad(x: jax.Array, multiples: tuple[int, ...], fill: int = 0) -> jax.Array:
    widths = [(0, -size % multiple) for size, multiple in zip(x.shape, multiples)]
    return x if not any(after for _, after in widths) else jnp.pad(x, widths, constant_values=fill)

  query = pad(query, (row_parts, _TILE, head_parts * heads_per_group, 1))
  key, value = (pad(x, (row_parts, _TILE, head_parts, 1)) for x in (key, value))
  segments = None if segment_ids is None else pad(segment_ids, (row_parts, _TILE), -1)
  sinks = None if sinks is None else pad(sinks.astype(jnp.float32), (head_parts * heads_per_group,))

  def on_device(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, sinks: jax.Array | None
  ) -> jax.Array:
    kernel = _kernel(query.shape[2], padded_length, causal, window, logit_cap, interpret)

    def attend_row(query, key, value, segments):
      by_head = (jnp.moveaxis(x, 1, 0) for x in (query, key, value))
      return jnp.moveaxis(kernel(*by_head, None if segments is None else _segment_ids(segments), sinks), 0, 1)

    return jax.vmap(attend_row)(query, key, value, segments)

  if scope is not None:
    mesh, axis_names = scope.free_mesh()
    heads_spec = PartitionSpec(batch_axes, None, head_axes, None)
    on_device = jax.shard_map(
      on_device,
      mesh=mesh,
      axis_names=axis_names,
      in_specs=(
        heads_spec,
        heads_spec,
        heads_spec,
        None if segments is None else PartitionSpec(batch_axes, None),
        None if sinks is None else PartitionSpec(head_axes),
      ),
      out_specs=heads_spec,
      check_vma=False,  # kernels do not track varying axes
    )
  attended = on_device(query, key, value, segments, sinks)
  return attended[:num_rows, :length, :num_heads]


def _repeats(num_heads: int, num_kv_heads: int, parts: int) -> int:
  """How often to repeat each key/value head so that `parts` devices get groups of heads with the least padding."""
  per_group = num_heads // num_kv_heads
  choices = [repeats for repeats in range(1, per_group + 1) if per_group % repeats == 0]

  def padded_heads(repeats: int) -> int:
    return -(-num_kv_heads * repeats // parts) * parts * (per_group // repeats)

  return min(choices, key=lambda repeats: (padded_heads(repeats), repeats))


def _segment_ids(segments: jax.Array) -> Any:
  from jax.experimental.pallas.ops.tpu import splash_attention

  return splash_attention.SegmentIds(q=segments, kv=segments)


@functools.lru_cache(maxsize=32)
def _kernel(
  num_heads: int, length: int, causal: bool, window: int | None, logit_cap: float | None, interpret: bool
) -> Any:
  """The kernel for the heads of a device: `(query [H, T, K], key [G, T, K], value [G, T, V], segments, sinks)`."""
  from jax.experimental.pallas.ops.tpu import splash_attention  # Pallas takes a second to import

  mask: Any
  shape = (length, length)
  if window is not None:
    mask = splash_attention.LocalMask(shape, window_size=(window - 1, 0), offset=0)
  else:
    mask = splash_attention.CausalMask(shape) if causal else splash_attention.FullMask(shape)
  block = next(size for size in range(_LARGEST_BLOCK, 0, -_TILE) if length % size == 0)
  compute = next(size for size in range(min(block, _LARGEST_BLOCK // 2), 0, -_TILE) if block % size == 0)
  with jax.ensure_compile_time_eval():  # the mask's tables are constants of the program
    return splash_attention.make_splash_mha(
      mask=splash_attention.MultiHeadMask([mask] * num_heads),
      block_sizes=splash_attention.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=compute,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=compute,
        block_q_dq=block,
        block_kv_dq=block,
      ),
      head_shards=1,
      q_seq_shards=1,
      attn_logits_soft_cap=logit_cap,
      residual_checkpoint_name=ATTENTION_NAME,
      interpret=interpret,
    )
