"""Attention to a paged KV cache by the kernel of the platform; where it cannot, kv_cache.py computes it by a loop.

'xla'     the loop over blocks of the cache, which it copies out; on every platform.
'pallas'  a kernel that reads each row's blocks in place; on GPUs (_paged_gpu.py).

TPUs use the loop. JAX's kernels for TPUs (`paged_attention` and `ragged_paged_attention` in
jax.experimental.pallas.ops.tpu, JAX 0.10 to 0.12) do not fit: they take the pages of one layer, [G, N, b, K] or [N, b,
2 G, K], with this call's tokens among them, and return normalized results. Here all layers share one array, of which
each layer would copy its part, and a call's own tokens are written after its last layer.

`task.decode.cache_attention` names one, which must be possible where there are pages: rings, of layers with a short
attention window, and whole rows have none. None takes the kernel where it can compute a call, and logs once what is
taken and why.

A module with a kernel has `obstacle(query, keys)`, what it cannot compute of a call, and `attend_to_pages(query, keys,
values, start, options, num_columns)`. That takes the queries [B, G, Q, K] of one device, CachedArrays [L, N, G, b, K]
with tables [1, B, M] (of one array where values are the keys) and how many entries each row has, int32 [B], and returns

  the highest logit of a query to an entry of its row, float32 [B, G, Q, 1]; -1e30 where the row has none,
  the sum of its weights, exp(logit - highest), [B, G, Q, 1]; 0 there,
  the sum of the values with these weights, [B, G, Q, V]; 0 there.

Shapes: B rows, T tokens of a call, G key/value heads, Q = H / G T queries of one of them, K and V their features; the
cache has N blocks of b entries in D parts, and tables [D, R, M] (CachedArray).
"""

import functools
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention._plain import AttentionOptions
from spmd_tasks.layers.base import current_layer_scope, soft_cap
from spmd_tasks.sharding import SplitDims
from spmd_tasks.sharding.specs import current_platform, current_sharding_scope, num_parts, spec_axes, spec_entry

Partial = tuple[jax.Array, jax.Array, jax.Array]


def attend_to_pages(
  query: jax.Array,
  cached: tuple[Any, ...],
  start: jax.Array,
  options: AttentionOptions,
  num_columns: int,
  split_dims: SplitDims,
  kv_split_dims: SplitDims,
) -> Partial | None:
  """Computes a softmax over each row's cached entries, to which others can be added; None: by the loop.

  Args:
    query: [B, G, Q, K]; query i of a head is that of the call's token i mod T.
    cached: keys and values, CachedArrays; the same one twice where values are keys.
    start: int32 [B], how many entries a row has.
    options: of the attention.
    num_columns: T.
    split_dims, kv_split_dims: of queries [B, T, H, K], and of keys [B, T, G, K].

  Returns:
    (highest logit [B, G, Q, 1], sum of weights [B, G, Q, 1], sum of weighted values [B, G, Q, V]), float32.

  Raises a UserError: 'pallas' is asked for and impossible.
  """
  asked, kernel = current_layer_scope().cache_attention, kernel_of(current_platform())
  if asked == 'xla' or current_layer_scope().plain_products or (asked is None and kernel is None):
    return None
  is_ring = options.window is not None and cached[0].num_entries <= options.window
  if cached[0].tables is None or is_ring:  # no pages
    return None
  specs = _specs(query, cached[0], num_columns, split_dims, kv_split_dims)
  obstacle = specs if isinstance(specs, str) else _obstacle(kernel, query, cached[0], options)
  if asked is None:
    _log_once(current_platform(), obstacle)
  elif obstacle:
    raise UserError(f'task.decode.cache_attention={asked!r} {obstacle}: set it to None, or to xla.')
  if obstacle:
    return None
  first, tables, is_one = cached[0], cached[0].tables, cached[0].array is cached[1].array
  assert tables is not None

  def local(query: jax.Array, start: jax.Array, tables: jax.Array, layer: jax.Array, *stored: Any) -> Partial:
    def held(array: jax.Array, scale: jax.Array | None) -> Any:
      of_array = None if scale is None else held(scale, None)
      return first._replace(array=array, layer=(layer,), tables=tables, num_rows=len(query), scale=of_array)

    keys_and_values = [held(*each) for each in stored]
    return kernel.attend_to_pages(query, keys_and_values[0], keys_and_values[-1], start, options, num_columns)

  flat = lambda x: None if x is None else x.array.reshape(-1, *x.array.shape[-4:])
  stored = [(flat(each), flat(each.scale)) for each in cached[: 1 if is_one else 2]]
  layer = jnp.zeros((), jnp.int32)
  for number, size in zip(first.layer, first.array.shape, strict=False):
    layer = layer * size + number
  num_rows, padding = len(query), tables.shape[0] * tables.shape[1] - len(query)
  if padding:
    query, start = jnp.pad(query, ((0, padding), *((0, 0),) * 3)), jnp.pad(start, (0, padding))
  scope, compute = current_sharding_scope(), local
  if specs is not None and scope is not None:
    rows, heads, queries = map(spec_entry, specs)
    of_queries, of_array = PartitionSpec(rows, heads, queries), PartitionSpec(None, rows, heads)
    in_specs = of_queries, PartitionSpec(rows), PartitionSpec(rows), PartitionSpec(), *(of_array for _ in stored)
    compute = scope.shard_map(local, in_specs, (of_queries,) * 3)
  highest, total, attended = (x[:num_rows] for x in compute(query, start, tables, layer, *stored))
  return highest, total, attended


def merged(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> Partial:
  """The softmax over what two have seen."""
  highest = jnp.maximum(one[0], other[0])
  factors = jnp.exp(one[0] - highest), jnp.exp(other[0] - highest)
  total, attended = (x * factors[0] + y * factors[1] for x, y in zip(one[1:], other[1:], strict=True))
  return highest, total, attended


def attend_by_text(
  drafts: Any,
  query: jax.Array,
  new: tuple[jax.Array, jax.Array],
  cached: tuple[Any, ...],
  start: jax.Array,
  options: AttentionOptions,
  split_dims: SplitDims,
  kv_split_dims: SplitDims,
) -> Partial | None:
  """Computes attend_to_pages for rows that are tokens of one text, as those of a step that checks drafts.

  A text's rows are queries of one call of the kernel, which so reads the text's blocks once. What each of them sees of
  the rows before it, whose keys and values are not in the cache yet, is added.

  Args:
    drafts: LayerScope.cache_drafts, which says which of R rows are those of n texts, of T tokens at most; k = T - 1.
    query, new: queries [R, G, Q, K], where Q is H / G, and the keys and values [R, 1, G, K] of these tokens.
    start: int32 [R], their positions.
    cached, options, split_dims, kv_split_dims: as those of `attend_to_pages`.
  """
  (num_rows, num_groups, num_heads, _), tables = query.shape, drafts.tables_of_texts(cached[0].tables)
  (num_parts, of_part, _), num_columns = tables.shape, drafts.rows.shape[1]
  num_texts = num_parts * of_part  # with padding
  rows = jnp.pad(drafts.rows, ((0, num_texts - len(drafts.rows)), (0, 0)), constant_values=num_rows)

  def take(x: jax.Array, numbers: jax.Array) -> jax.Array:
    """Returns x[numbers], each of its own part: a mesh that splits these moves nothing."""
    parts = x.reshape(num_parts, -1, *x.shape[1:])
    numbers_in_part = numbers.reshape(num_parts, -1) % parts.shape[1]
    return jax.vmap(lambda part, each: part[each])(parts, numbers_in_part).reshape(*numbers.shape, *x.shape[1:])

  first = jnp.where(rows[:, 0] < num_rows, take(start, rows[:, 0]), 0)
  queries = jnp.moveaxis(take(query, rows), 1, 3).reshape(num_texts, num_groups, num_heads * num_columns, -1)
  of_texts = tuple(each._replace(tables=tables, num_rows=num_texts) for each in cached)
  found = attend_to_pages(queries, of_texts, first, options, num_columns, split_dims, kv_split_dims)
  if found is None:
    return None
  by_columns = (jnp.moveaxis(x.reshape(num_texts, num_groups, num_heads, num_columns, -1), 3, 1) for x in found)
  places = drafts.owners * num_columns + drafts.columns
  of_pages: Any = tuple(take(x.reshape(-1, *x.shape[2:]), places) for x in by_columns)

  keys, values = (take(held.as_read(x[:, 0]), drafts.earlier) for held, x in zip(cached, new, strict=True))
  may_see = drafts.earlier < num_rows
  if options.window is not None:
    may_see &= jnp.arange(1, num_columns)[None, :] < options.window
  may_see = may_see[:, None, None, :]
  logits = jnp.einsum('RGQK,RkGK->RGQk', query, keys, preferred_element_type=jnp.float32)
  logits = soft_cap(logits * options.scale(query.shape[-1]), options.logit_cap)
  highest = jnp.max(jnp.where(may_see, logits, -1e30), axis=-1, keepdims=True)
  weights = jnp.where(may_see, jnp.exp(logits - highest), 0)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  weights = weights.astype(values.dtype)
  attended = jnp.einsum('RGQk,RkGV->RGQV', weights, values, preferred_element_type=jnp.float32)
  return merged(of_pages, (highest, total, attended))


def kernel_of(platform: str) -> Any:
  """Returns the module with the kernel of a platform, None where there is none."""
  if platform == 'gpu':
    from spmd_tasks.layers.attention import _paged_gpu  # Pallas takes a second to import

    return _paged_gpu
  return None


def _obstacle(kernel: Any, query: jax.Array, keys: Any, options: AttentionOptions) -> str | None:
  """Returns why a kernel cannot compute a call, None if it can."""
  if kernel is None:
    return f"is a kernel for GPUs, and the mesh's devices are of the platform {current_platform()!r}"
  if options.bias is not None:
    return 'has no relative position biases'
  return kernel.obstacle(query, keys)


def _specs(query: jax.Array, keys: Any, num_columns: int, split_dims: SplitDims, kv_split_dims: SplitDims) -> Any:
  """Returns the mesh axes that split D, G and Q, None without a mesh, or why these cannot be split so."""
  scope = current_sharding_scope()
  if scope is None or scope.mesh.size == 1:
    return None
  sizes = scope.mesh.shape
  axes_of = lambda split, shape: spec_axes(scope.activation_spec(split, shape), len(shape))
  of_rows, of_entries, of_heads, of_features = kv_split_dims or (None,) * 4
  rows, heads, *others = axes_of((of_rows, of_heads, of_entries, of_features), keys.array.shape[-4:])
  num_groups, num_queries = query.shape[1:3]
  if num_parts(rows, sizes) != keys.tables.shape[0] or any(num_parts(axes, sizes) > 1 for axes in others):
    return 'needs blocks that are split as the rows are, and not in themselves'
  if num_groups % num_parts(heads, sizes):
    return f'needs a number of key/value heads that the mesh divides, and not {num_groups}'
  if num_groups > 1 or split_dims is None:
    return rows, heads, ()
  (queries,) = axes_of((tuple(split_dims)[2],), (num_queries,))  # all devices have the head
  is_even = num_queries // num_columns % num_parts(queries, sizes) == 0 and not {*queries} & {*rows, *heads}
  return rows, heads, queries if is_even else ()


@functools.cache
def _log_once(platform: str, obstacle: str | None) -> None:
  if obstacle:  # which costs time, so that it is shown
    logging.warning("Attention to the KV cache is computed by 'xla': pallas %s.", obstacle)
  else:
    logging.info("Attention to the KV cache is computed by 'pallas': the devices are of the platform %r.", platform)
