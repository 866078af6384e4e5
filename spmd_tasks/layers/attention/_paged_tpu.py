"""Pallas kernels for TPUs that read and write a paged KV cache where its blocks lie.

In `attend_to_pages` the cache stays in HBM as it is stored, with the blocks of all layers. The grid goes over rows,
key/value heads and queries; each step copies the row's used blocks to vector memory, a few at a time, while it computes
with those before them, and the first ones of the next step while it computes with its last (two buffers). The softmax
is a running one (Milakov and Gimelshein, 2018; FlashAttention: Dao et al., 2022; over pages: Kwon et al., 2023).

JAX has `ragged_paged_attention`, which does not serve: it wants pages [N, b, 2 G, K], keys and values of all heads side
by side and of one layer only, and returns results that are normalised, to which no tokens of the call can be added.

Shapes: L layers, B rows, T tokens, G key/value heads, Q queries of one of them, K head dim, V dim of a value, R M
tables, N blocks of b entries; a step has g heads and q queries, and computes with P blocks, n = P b entries, at a time.
"""

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from spmd_tasks.layers.attention._plain import AttentionOptions
from spmd_tasks.layers.base import soft_cap

_LANES, _SUBLANES = 128, 8
_ENTRIES = 512  # n, where the blocks are not larger
_QUERIES, _LONG_QUERIES = 1024, 256  # g q at most, of heads of up to 256 features and of longer ones
_BUFFERS = 2**22  # bytes of the blocks in vector memory
_TABLES = 2**17  # blocks that all rows have: half of the memory for scalars
_WRITTEN = 2**20  # bytes of the tiles that a step of `write_to_pages` reads


def obstacle(query: jax.Array, keys: Any) -> str | None:
  """Returns why the kernel cannot compute a call with keys in blocks, None if it can."""
  if keys.scale is not None:
    return 'has no caches of 8 bits'
  if keys.array.dtype != query.dtype:
    return f'needs keys of the dtype of the queries, and they are {keys.array.dtype} and {query.dtype}'
  tile = _tile(keys.array)
  if keys.array.shape[-2] % tile:
    return f'needs blocks of a multiple of {tile} entries in {keys.array.dtype}, and not {keys.array.shape[-2]}'
  if keys.array.shape[-1] < _LANES // 2:  # which DecodeSteps does not store by rows
    return f'needs keys of {_LANES // 2} features or more, and not {keys.array.shape[-1]}'
  assert keys.tables is not None
  if keys.tables.size > keys.tables.shape[0] * _TABLES:
    return f'needs tables of at most {_TABLES} blocks on a device, and not {keys.tables.size // keys.tables.shape[0]}'
  return None


def attend_to_pages(
  query: jax.Array,
  keys: Any,
  values: Any,
  start: jax.Array,
  options: AttentionOptions,
  num_columns: int,
  *,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Computes attention to the entries of each row, as _paged.py says; `interpret` does it on any platform."""
  assert keys.tables is not None
  pages = (keys.array,) if keys.array is values.array else (keys.array, values.array)
  tables = keys.tables[0]
  num_rows, num_groups, num_queries, head_dim = query.shape
  num_blocks, _, block, _ = pages[0].shape[1:]
  value_dim, table_len = pages[-1].shape[-1], tables.shape[1]
  lanes = [-(-x.shape[-1] // _LANES) * _LANES for x in pages]
  most = _QUERIES if max(lanes) <= 2 * _LANES else _LONG_QUERIES
  padded = -(-num_queries // _SUBLANES) * _SUBLANES
  q = min(padded, most)
  padded = -(-padded // q) * q
  g = max(size for size in range(1, num_groups + 1) if num_groups % size == 0 and (size == 1 or size * q <= most))
  of_block = 2 * g * block * sum(lanes) * pages[0].dtype.itemsize
  at_once = max(min(_ENTRIES // block, _BUFFERS // of_block, table_len), 1)

  grid = (num_rows, num_groups // g, padded // q)
  of_queries = lambda size: pl.BlockSpec((1, g, q, size), lambda row, heads, queries, *_: (row, heads, queries, 0))
  num_entries = table_len * block
  if options.window is not None:
    num_entries = min(num_entries, options.window + block)
  num_products = 2 * num_rows * num_groups * num_queries * num_entries
  # Of full rows: how much they have is not known when the program is compiled.
  held = min(num_rows * num_entries, num_blocks * block) * num_groups
  cost = pl.CostEstimate(
    flops=num_products * (head_dim + value_dim),
    transcendentals=num_products // 2,
    bytes_accessed=held * sum(lanes) * pages[0].dtype.itemsize
    + num_rows * num_groups * padded * (head_dim * query.dtype.itemsize + 4 * (value_dim + _LANES)),
  )
  stats, attended = pl.pallas_call(
    functools.partial(
      _kernel,
      scale=options.scale(head_dim),
      cap=options.logit_cap,
      window=options.window,
      num_columns=num_columns,
      table_len=table_len,
      num_arrays=len(pages),
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=grid,
      in_specs=[of_queries(head_dim), *(pl.BlockSpec(memory_space=pltpu.HBM) for _ in pages)],
      out_specs=[of_queries(_LANES), of_queries(value_dim)],
      scratch_shapes=[
        *(pltpu.VMEM((2, at_once, g, block, x.shape[-1]), x.dtype) for x in pages),
        pltpu.VMEM((g, q, _LANES), jnp.float32),
        pltpu.VMEM((g, q, _LANES), jnp.float32),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.SemaphoreType.DMA((2,)),
      ],
    ),
    out_shape=[jax.ShapeDtypeStruct((num_rows, num_groups, padded, size), jnp.float32) for size in (_LANES, value_dim)],
    compiler_params=pltpu.CompilerParams(dimension_semantics=('arbitrary',) * 3, disable_bounds_checks=True),
    cost_estimate=cost,
    name='paged_attention',
    interpret=interpret,
  )(
    keys.layer[0].reshape(1),
    tables.reshape(-1),
    jnp.minimum(start, table_len * block),
    jnp.pad(query, ((0, 0), (0, 0), (0, padded - num_queries), (0, 0))),
    *pages,
  )
  stats = stats[:, :, :num_queries]
  return stats[..., :1], stats[..., _LANES // 2 :][..., :1], attended[:, :, :num_queries]


def _kernel(layer, tables, starts, query, *refs, scale, cap, window, num_columns, table_len, num_arrays):
  """Computes one step of the grid. `refs` are the pages, the two results, the pages' buffers and other memory."""
  pages, (stats, attended), refs = refs[:num_arrays], refs[num_arrays:][:2], refs[num_arrays + 2 :]
  buffers, (highest, total, turn, semaphores) = refs[:num_arrays], refs[num_arrays:]
  (_, g, q, _), (_, at_once, _, block, _) = query.shape, buffers[0].shape
  num_groups, num_parts = pl.num_programs(1), pl.num_programs(2)
  row, part = pl.program_id(0), pl.program_id(2)
  step = (row * num_groups + pl.program_id(1)) * num_parts + part
  num_steps = pl.num_programs(0) * num_groups * num_parts

  def first_block(row):
    return 0 if window is None else jnp.maximum(starts[row] - window + 1, 0) // block

  def blocks_of(row, turns):
    """The first of the blocks that a row computes with after so many turns, and how many these are."""
    first = first_block(row) + turns * at_once
    return first, jnp.clip((starts[row] + block - 1) // block - first, 0, at_once)

  def for_blocks(step, turns, buffer, act):
    row, heads = step // (num_groups * num_parts), step // num_parts % num_groups
    first, count = blocks_of(row, turns)

    def one(i, _):
      number = jnp.clip(tables[row * table_len + first + i], 0, pages[0].shape[1] - 1)
      for source, target in zip(pages, buffers, strict=True):
        source = source.at[layer[0], number, pl.ds(heads * g, g)]
        act(pltpu.make_async_copy(source, target.at[buffer, i], semaphores.at[buffer]))
      return 0

    jax.lax.fori_loop(0, count, one, 0)

  @pl.when(step == 0)
  def begin():
    turn[0] = 0
    for_blocks(step, 0, 0, lambda copy: copy.start())

  highest[...] = jnp.full_like(highest, -1e30)
  total[...] = jnp.zeros_like(total)
  attended[...] = jnp.zeros_like(attended)
  num_blocks = (starts[row] + block - 1) // block - first_block(row)
  num_turns = jnp.maximum((num_blocks + at_once - 1) // at_once, 1)  # one without entries copies the next step's

  def add_blocks(turns, buffer):
    is_last = turns + 1 == num_turns
    following = jnp.where(is_last, step + 1, step)

    @pl.when(following < num_steps)
    def fetch():
      for_blocks(following, jnp.where(is_last, 0, turns + 1), 1 - buffer, lambda copy: copy.start())

    for_blocks(step, turns, buffer, lambda copy: copy.wait())
    first, count = blocks_of(row, turns)

    @pl.when(count > 0)
    def compute():
      def clear(i, _):  # what another row left there, which may be no number, has a weight of 0
        buffers[-1][buffer, i] = jnp.zeros_like(buffers[-1][buffer, i])
        return 0

      jax.lax.fori_loop(count, at_once, clear, 0)
      size = at_once * block
      entries = first * block + jax.lax.broadcasted_iota(jnp.int32, (q, size), 1)
      may_see = entries < starts[row]
      if window is not None:
        columns = part * q + jax.lax.broadcasted_iota(jnp.int32, (q, size), 0)
        may_see &= starts[row] + jax.lax.rem(columns, num_columns) - entries < window
      for head in range(g):
        keys, values = (x[buffer, :, head].reshape(size, x.shape[-1]) for x in (buffers[0], buffers[-1]))
        products = jax.lax.dot_general(
          query[0, head], keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        logits = jnp.where(may_see, soft_cap(products * scale, cap), -1e30)
        before = highest[head][:, :1]
        higher = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
        factor, weights = jnp.exp(before - higher), jnp.exp(logits - higher)
        highest[head] = jnp.broadcast_to(higher, (q, _LANES))
        added = jnp.sum(weights, axis=1, keepdims=True)
        total[head] = jnp.broadcast_to(total[head][:, :1] * factor + added, (q, _LANES))
        added = jnp.dot(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
        attended[0, head] = attended[0, head] * factor + added

    return 1 - buffer

  turn[0] = jax.lax.fori_loop(0, num_turns, add_blocks, turn[0])
  is_highest = jax.lax.broadcasted_iota(jnp.int32, (g, q, _LANES), 2) < _LANES // 2
  stats[0] = jnp.where(is_highest, highest[...], total[...])


def can_write(pages: jax.Array, num_columns: int) -> bool:
  """Whether `write_to_pages` can write T tokens of each row to pages [..., N, G, b, K]."""
  tile = _tile(pages)
  has_tiles = pages.shape[-2] % tile == 0 and (num_columns == 1 or num_columns % tile == 0)
  return has_tiles and pages.shape[-1] >= _LANES // 2


def write_to_pages(
  pages: jax.Array, new: jax.Array, tables: jax.Array, starts: jax.Array, lengths: jax.Array, *, interpret: Any = False
) -> jax.Array:
  """Writes tokens [L, B, G, T, K] to pages [L, N, G, b, K] in place: the result takes their buffer.

  A TPU's memory holds arrays in tiles of t entries and 128 features, so whoever writes one entry reads a tile and
  writes it back. XLA's scatter does so with whole blocks of all layers, and where a device has one key/value head it
  brings the array to another layout first, by a copy of the whole cache, and back. Here each step of the grid reads the
  tile of one row's tokens in some layers, while the one before is written.

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
  numbers = starts[:, None] // tile + jnp.arange(num_tiles, dtype=jnp.int32)[None]  # [B, tiles], in the row
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
  size = max(n for n in range(1, num_layers + 1) if num_layers % n == 0 and (n == 1 or n * of_layer <= _WRITTEN))

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
  """Returns t."""
  return _SUBLANES * 4 // pages.dtype.itemsize
