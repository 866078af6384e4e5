"""Writes new keys and values to a paged KV cache in place, by a Pallas kernel for TPUs.

A TPU's memory holds arrays in tiles of t entries and 128 features, so whoever writes one entry reads a tile and writes
it back. XLA's scatter does so with whole blocks of all layers, and where a device has one key/value head it brings the
array to another layout first, by a copy of the whole cache, and back. Here each step of the grid reads the tile of one
row's tokens in some layers, while the one before is written.

Shapes: L layers, N blocks of b entries, B rows, T tokens, G key/value heads, K head dim, M blocks of a row, C tiles.
"""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

_LANES, _SUBLANES = 128, 8
_BYTES = 2**20  # of the tiles that a step reads


def obstacle(pages: jax.Array, num_columns: int) -> str | None:
  """Returns why the kernel cannot write T tokens of each row to pages [..., N, G, b, K], None if it can."""
  tile = _tile(pages)
  if pages.shape[-1] < _LANES // 2:
    return f'needs {_LANES // 2} features or more'
  if pages.shape[-2] % tile or (num_columns > 1 and num_columns % tile):
    return f'needs blocks, and chunks, of a multiple of {tile} tokens'
  return None


def write_to_pages(
  pages: jax.Array, new: jax.Array, tables: jax.Array, starts: jax.Array, lengths: jax.Array, *, interpret: Any = False
) -> jax.Array:
  """Writes tokens [L, B, G, T, K] to pages [L, N, G, b, K], whose buffer the result takes.

  Args:
    pages, new: of all layers.
    tables: int32 [B, M], the blocks of each row. Rows that write to one block follow one another, in order of `starts`.
    starts: int32 [B], the position of each row's first token, where T > 1 a multiple of b.
    lengths: int32 [B], how many of the row's tokens are written.
    interpret: runs the kernel on any platform, slowly.
  """
  (num_layers, num_blocks, num_groups, block, features), tile = pages.shape, _tile(pages)
  num_rows, num_columns = new.shape[1], new.shape[3]
  num_tiles, of_block = max(num_columns // tile, 1), block // tile
  # The tiles that rows have tokens for; a step without takes that of the step before, and leaves it as it is.
  numbers = starts[:, None] // tile + jnp.arange(num_tiles, dtype=jnp.int32)[None]  # [B, C], in the row
  columns = numbers // of_block
  held = jnp.take_along_axis(tables, jnp.minimum(columns, tables.shape[1] - 1), axis=1)
  is_written = (numbers * tile < (starts + lengths)[:, None]) & (lengths > 0)[:, None]
  is_written = (is_written & (columns < tables.shape[1]) & (held < num_blocks)).reshape(-1)
  last = jax.lax.cummax(jnp.where(is_written, jnp.arange(is_written.size, dtype=jnp.int32), -1))
  chosen = jnp.where(last < 0, jnp.argmax(is_written).astype(jnp.int32), last)
  places = jnp.take((held * of_block + numbers % of_block).reshape(-1), chosen)
  places = jnp.clip(places, 0, num_blocks * of_block - 1)
  ends = jnp.where(is_written, jnp.repeat(starts + lengths, num_tiles), 0)
  is_written = is_written.at[0].set(is_written[0] | ~jnp.any(is_written))  # one tile is read, and comes back
  # Which steps find their tile as the one before has left it: what was read of it is older.
  goes_on = is_written.at[0].set(False) & (places == jnp.roll(places, 1)) & (jnp.roll(last, 1) >= 0)
  kinds = is_written.astype(jnp.int32) + goes_on

  of_layer = num_groups * tile * -(-features // _LANES) * _LANES * pages.dtype.itemsize
  size = max(n for n in range(1, num_layers + 1) if num_layers % n == 0 and (n == 1 or n * of_layer <= _BYTES))

  def of_pages(layers, row, number, places, *_):
    place = places[row * num_tiles + number]
    return layers, place // of_block, 0, place % of_block, 0

  def kernel(places, numbers, starts, ends, kinds, old, new, out):
    del places
    row = pl.program_id(1)
    step = row * num_tiles + pl.program_id(2)

    @pl.when(kinds[step] != 0)
    def write():
      entries = numbers[step] * tile + jax.lax.broadcasted_iota(jnp.int32, old.shape, 3)
      is_new = (entries >= starts[row]) & (entries < ends[step])
      before = jnp.where(kinds[step] == 2, out[...].astype(jnp.float32), old[...].astype(jnp.float32))
      values = jnp.where(is_new, new[...].astype(jnp.float32), before)
      out[...] = values.astype(out.dtype)

  spec = pl.BlockSpec((size, 1, num_groups, tile, features), of_pages)
  of_new = pl.BlockSpec(
    (size, 1, num_groups, min(num_columns, tile), features), lambda layers, row, number, *_: (layers, row, 0, number, 0)
  )
  tiles = num_layers * is_written.size * of_layer
  return pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=5,
      grid=(num_layers // size, num_rows, num_tiles),
      in_specs=[spec, of_new],
      out_specs=spec,
    ),
    out_shape=pltpu.HBM(pages.shape, pages.dtype),  # where a small cache might else be brought to vector memory
    input_output_aliases={5: 0},
    compiler_params=pltpu.CompilerParams(dimension_semantics=('arbitrary',) * 3),
    cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * tiles + new.size * new.dtype.itemsize),
    name='paged_write',
    interpret=interpret,
  )(places, numbers.reshape(-1), starts, ends, kinds, pages, new.astype(pages.dtype))


def _tile(pages: jax.Array) -> int:
  return _SUBLANES * 4 // pages.dtype.itemsize
