"""Attention to a paged KV cache by a Pallas kernel for NVIDIA GPUs, compiled by Triton, that reads blocks in place.

Each program has one row, one key/value head, some of its queries, and one part of the row's used entries. It looks up
the blocks in the row's table: nothing is gathered or sliced out of the stack of layers, unused entries are not read,
and all queries of the head share each read. Splitting a row into parts keeps many multiprocessors busy if there are few
rows (Flash-Decoding: Dao et al., 2023); their sums are merged afterwards. How a row is split depends only on its own
length and on shapes: no bit of its result depends on other rows.

The sizes of Triton's arrays are powers of two: features are split into pieces of such sizes, 576 into 512 + 64. Tile
sizes are the fastest of those tried on an H200 (2026-11-27), which reads heads of 128 at 3.4 TB/s.

Shapes: B rows, G key/value heads, Q queries of one in a row, K head dim, V dim of a value; L layers, N blocks of b
entries, M of a table.
"""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
import jax.numpy as jnp

from spmd_tasks.layers.attention import AttentionOptions
from spmd_tasks.layers.base import soft_cap
from spmd_tasks.sharding.specs import current_device

_DEVICES = re.compile(r'\b(G?H\d+|G?B\d{3})\b')  # Hopper and Blackwell: H100, GH200, B200, ..., not GB10
_PROGRAMS = 4 * 132  # at least, if there are enough entries: a few for each multiprocessor of an H100
_MOST_OF_A_PART = 8192  # entries, so that many programs read a long row among short ones
_LEAST_QUERIES, _MOST_QUERIES = 16, 64  # of a program; a product needs 16
_LEAST_ENTRIES, _MOST_ENTRIES = 16, 64  # that are read at a time
_SHARED_BYTES = 227 << 10  # of a multiprocessor, for the queries and two such tiles
_UNSEEN = -1e30


def obstacle(query: jax.Array, keys: Any) -> str | None:
  """Returns why the kernel does not support a call with keys in blocks; None if it does."""
  if not _DEVICES.search(kind := current_device().device_kind):
    return f'is a kernel for GPUs of the generations Hopper and Blackwell, not for {kind}'
  if query.dtype.name not in ('bfloat16', 'float16', 'float32'):
    return f'needs queries in bfloat16, float16 or float32, not {query.dtype}'
  if keys.array.shape[-1] % 16:
    return f'needs a head dim that is divisible by 16, not {keys.array.shape[-1]}'
  if keys.array.dtype.itemsize == 1 and 2**31 < keys.array.size <= 2**32:  # Pallas indexes them in int32
    return 'does not support 8-bit caches of 2**31 to 2**32 numbers: change task.decode.max_cache_tokens'
  return None


def attend_to_pages(
  query: jax.Array,
  keys: Any,
  values: Any,
  start: jax.Array,
  options: AttentionOptions,
  num_columns: int,
  *,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Computes attention to the entries of each row, see paged_attention.py; `interpret` runs it on any platform."""
  num_rows, num_groups, num_queries, head_dim = query.shape
  sources = [keys] if keys.array is values.array else [keys, values]
  num_entries, value_dim = keys.num_entries, values.array.shape[-1]
  tile = min(_MOST_QUERIES, max(_LEAST_QUERIES, pl.next_power_of_2(num_queries)))
  free = _SHARED_BYTES - tile * head_dim * query.dtype.itemsize
  width = sum(source.array.shape[-1] for source in sources) * query.dtype.itemsize
  size = min(_MOST_ENTRIES, max(_LEAST_ENTRIES, 2 ** int(math.log2(max(free, 1) / (2 * width)))))
  num_tiles = pl.cdiv(num_queries, tile)
  num_parts = max(_PROGRAMS // (num_rows * num_groups * num_tiles), pl.cdiv(num_entries, _MOST_OF_A_PART), 1)
  num_parts = min(num_parts, pl.cdiv(num_entries, 2 * size))
  static = _Static(
    scale=options.scale(head_dim),
    cap=options.logit_cap,
    window=options.window,
    num_columns=num_columns,
    num_entries=num_entries,
    tile=tile,
    size=size,
    num_parts=num_parts,
    num_arrays=len(sources),
  )
  stored = [source.array for source in sources]
  stored += [source.scale.array for source in sources if source.scale is not None]
  indices = (start, keys.layer[0].reshape(1), keys.tables[0])
  whole = lambda x: pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)
  of_head = pl.BlockSpec((None, None, num_queries, head_dim), lambda i, p, g, b: (b, g, 0, 0))
  sums = pl.BlockSpec((None, None, None, num_queries), lambda i, p, g, b: (b, g, p, 0))
  vectors = pl.BlockSpec((None, None, None, num_queries, value_dim), lambda i, p, g, b: (b, g, p, 0, 0))
  shape = num_rows, num_groups, num_parts, num_queries
  results = (jax.ShapeDtypeStruct(sizes, jnp.float32) for sizes in (shape, shape, (*shape, value_dim)))
  highest, total, attended = pl.pallas_call(
    functools.partial(_kernel, static),
    grid=(num_tiles, num_parts, num_groups, num_rows),
    in_specs=[*map(whole, indices), of_head, *map(whole, stored)],
    out_specs=[sums, sums, vectors],
    out_shape=[*results],
    compiler_params=pltriton.CompilerParams(num_warps=8 if tile * value_dim > 64 * 128 else 4, num_stages=3),
    interpret=interpret,
    name='paged_attention',
  )(*indices, query, *stored)
  higher = jnp.max(highest, axis=2, keepdims=True)
  factors = jnp.exp(highest - higher)
  attended = jnp.sum(attended * factors[..., None], axis=2)
  return higher[:, :, 0, :, None], jnp.sum(total * factors, axis=2)[..., None], attended


class _Static(NamedTuple):
  """Static arguments of the kernel, which compares `tile` queries and `size` entries at a time."""

  scale: float
  cap: float | None
  window: int | None
  num_columns: int
  num_entries: int
  tile: int
  size: int
  num_parts: int
  num_arrays: int


def _kernel(static: _Static, start_ref, layer_ref, tables_ref, query_ref, *refs) -> None:
  """Computes one part of a row; the last refs are (highest [Q], total [Q], attended [Q, V])."""
  *stored, highest_ref, total_ref, attended_ref = refs
  arrays, scales = stored[: static.num_arrays], stored[static.num_arrays :]
  (_, num_blocks, _, block, _), (num_queries, head_dim) = arrays[0].shape, query_ref.shape
  part, group, row = pl.program_id(1), pl.program_id(2), pl.program_id(3)
  layer, start = layer_ref[0], start_ref[row]
  # The used entries are those from `first` to before `end`. Parts have equal numbers of whole tiles.
  first: Any = 0
  end = jnp.minimum(start, static.num_entries)
  if static.window is not None:
    first = jnp.maximum(start - static.window + 1, 0)
  num_tiles = pl.cdiv(end, static.size)
  of_a_part = pl.cdiv(num_tiles - first // static.size, static.num_parts)
  begin = first // static.size + part * of_a_part

  queries = pl.program_id(0) * static.tile + jnp.arange(static.tile)
  known = jnp.minimum(queries, num_queries - 1)
  query = [query_ref[known, piece] for piece in _pieces(head_dim)]
  position = start + jax.lax.rem(known, static.num_columns)

  def add_tile(i, carry):
    highest, total, attended = carry
    entries = i * static.size + jnp.arange(static.size)
    is_used = (entries >= first) & (entries < end)
    entries = jnp.maximum(jnp.minimum(entries, end - 1), first)
    blocks = jnp.maximum(jnp.minimum(tables_ref[row, entries // block], num_blocks - 1), 0)
    place = jax.lax.rem(entries, block)

    def read(number):
      pieces = [arrays[number][layer, blocks, group, place, piece] for piece in _pieces(arrays[number].shape[-1])]
      if scales:
        scale = scales[number][layer, blocks, group, place, 0][:, None]
        pieces = [piece.astype(jnp.float32) * scale for piece in pieces]
      return [piece.astype(query_ref.dtype) for piece in pieces]

    keys = read(0)
    values = keys if static.num_arrays == 1 else read(1)
    logits: Any = sum(_product(x, key.T) for x, key in zip(query, keys, strict=True))
    logits = soft_cap(logits * static.scale, static.cap)
    may_see = jnp.broadcast_to(is_used[None, :], (static.tile, static.size))
    if static.window is not None:
      may_see &= position[:, None] - entries[None, :] < static.window
    logits = jnp.where(may_see, logits, _UNSEEN)
    higher = jnp.maximum(highest, jnp.max(logits, axis=1))
    factor = jnp.exp(highest - higher)
    weights = jnp.where(may_see, jnp.exp(logits - higher[:, None]), 0)
    total = total * factor + jnp.sum(weights, axis=1)
    weights = weights.astype(query_ref.dtype)
    return higher, total, [x * factor[:, None] + _product(weights, y) for x, y in zip(attended, values, strict=True)]

  pieces = _pieces(attended_ref.shape[1])
  zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
  carry = zeros(static.tile) + _UNSEEN, zeros(static.tile), [zeros((static.tile, piece.size)) for piece in pieces]
  highest, total, attended = jax.lax.fori_loop(begin, jnp.minimum(begin + of_a_part, num_tiles), add_tile, carry)
  is_query = queries < num_queries
  pltriton.store(highest_ref.at[queries], highest, mask=is_query)
  pltriton.store(total_ref.at[queries], total, mask=is_query)
  for piece, x in zip(pieces, attended, strict=True):
    columns = piece.start + jnp.arange(piece.size)
    pltriton.store(attended_ref.at[queries[:, None], columns[None, :]], x, mask=is_query[:, None])


def _pieces(num_features: int) -> list[Any]:
  """Returns slices whose sizes are powers of two, the longest first."""
  sizes = [2**i for i in reversed(range(num_features.bit_length())) if num_features & 2**i]
  return [pl.ds(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
  precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
  return jnp.dot(x, y, precision=precision, preferred_element_type=jnp.float32)
