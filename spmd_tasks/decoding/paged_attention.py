"""Attention to a paged KV cache by the platform's kernel; cached_attention.py has the loop for all other calls.

'xla'     the loop, which copies one block of the cache after another; on every platform.
'pallas'  a kernel that reads each row's blocks in place; on GPUs (paged_attention_gpu.py).

TPUs use the loop. JAX's kernels for TPUs (`paged_attention` and `ragged_paged_attention` in
jax.experimental.pallas.ops.tpu, JAX 0.10 to 0.12) do not fit: they take the pages of one layer, [G, N, b, K] or [N, b,
2 G, K], with this call's tokens among them, and return normalized results. Here all layers share one array, of which
each layer would copy its part, and a call's own tokens are written after its last layer.

`task.decode.cache_attention` names an implementation, which must support every layer that has pages; rings, of layers
with a short attention window, and whole rows have none. None picks the kernel for the calls that it supports, and logs
the choice and the reason once.

A module with a kernel has `obstacle(query, keys)`, which returns why the kernel does not support a call, and
`attend_to_pages(query, keys, values, start, options, num_columns)`. It takes one device's queries [B, G, Q, K],
CachedArrays [L, N, G, b, K] with tables [1, B, M] (of one array if keys are the values) and the number of entries of
each row, int32 [B]. It returns a softmax over the entries of each row (partial_softmax.py), with queries [B, G, Q]; if
a row has none, the highest logit is -1e30, and the sums are 0.

Shapes: B rows, T tokens of a call, G key/value heads, R query heads of each, Q = R T queries, K and V their features;
the cache has N blocks of b entries in D parts, and tables [D, R, M] (CachedArray).
"""

import functools
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from spmd_tasks.decoding.cache_arrays import CachedArray
from spmd_tasks.decoding.partial_softmax import PartialSoftmax, Queries
from spmd_tasks.errors import UserError
from spmd_tasks.layers.base import current_layer_scope
from spmd_tasks.sharding import SplitDims
from spmd_tasks.sharding.specs import current_platform, current_sharding_scope, num_parts, spec_axes, spec_entry


def attend_to_pages(
  queries: Queries,
  keys: CachedArray,
  values: CachedArray,
  implementation: str | None,
  split_dims: SplitDims,
  kv_split_dims: SplitDims,
) -> PartialSoftmax | None:
  """Computes a softmax over the entries of each row in the cache by a kernel; None: the loop must compute it.

  Args:
    queries: [B, G, R, T, K]; a row has as many entries as it has tokens before the call.
    keys, values: the same array twice if keys are the values.
    implementation: 'pallas', 'xla' or None.
    split_dims, kv_split_dims: of queries [B, T, H, K], and of keys [B, T, G, K]; the kernel runs on each device's rows
      and heads.

  Raises:
    UserError: `implementation` is 'pallas', but the kernel does not support the call.
  """
  kernel, options = kernel_of(current_platform()), queries.options
  if implementation == 'xla' or current_layer_scope().plain_products or (implementation is None and kernel is None):
    return None
  window = options.window or options.chunk
  is_ring = window is not None and keys.num_entries <= window
  if keys.tables is None or is_ring:  # no pages
    return None
  specs = _specs(queries, keys, split_dims, kv_split_dims)
  obstacle = specs if isinstance(specs, str) else _obstacle(kernel, queries, keys)
  if implementation is None:
    _log_once(current_platform(), obstacle)
  elif obstacle:
    raise UserError(f'task.decode.cache_attention={implementation!r} {obstacle}: set it to None or xla.')
  if obstacle:
    return None
  tables, arrays = keys.tables, (keys,) if keys.array is values.array else (keys, values)
  num_rows, num_groups, _, num_columns, head_dim = queries.array.shape
  query = queries.array.reshape(num_rows, num_groups, -1, head_dim)

  def attend_local(query: jax.Array, start: jax.Array, tables: jax.Array, layer: jax.Array, *stored: Any) -> Any:
    def cached(array: jax.Array, scale: jax.Array | None) -> CachedArray:
      scales = None if scale is None else cached(scale, None)
      return CachedArray(array, (layer,), tables, len(query), scales)

    local = [cached(*array_and_scale) for array_and_scale in stored]
    return kernel.attend_to_pages(query, local[0], local[-1], start, options, num_columns)

  flat = lambda x: None if x is None else x.array.reshape(-1, *x.array.shape[-4:])
  stored = [(flat(x), flat(x.scale)) for x in arrays]
  layer = jnp.zeros((), jnp.int32)
  for number, size in zip(keys.layer, keys.array.shape, strict=False):
    layer = layer * size + number
  start, padding = queries.start[:, 0], tables.shape[0] * tables.shape[1] - num_rows
  if padding:
    query, start = jnp.pad(query, ((0, padding), *((0, 0),) * 3)), jnp.pad(start, (0, padding))
  scope, attend = current_sharding_scope(), attend_local
  if specs is not None and scope is not None:
    rows, heads, query_axes = map(spec_entry, specs)
    of_queries, of_array = PartitionSpec(rows, heads, query_axes), PartitionSpec(None, rows, heads)
    in_specs = of_queries, PartitionSpec(rows), PartitionSpec(rows), PartitionSpec(), *(of_array for _ in stored)
    attend = scope.shard_map(attend_local, in_specs, (of_queries,) * 3)
  softmax = attend(query, start, tables, layer, *stored)
  highest, total, attended = (x[:num_rows].reshape(*queries.array.shape[:4], -1) for x in softmax)
  return highest, total, attended


def kernel_of(platform: str) -> Any:
  """Returns the module with a platform's kernel; None if it has none."""
  if platform == 'gpu':
    from spmd_tasks.decoding import paged_attention_gpu  # Pallas takes a second to import

    return paged_attention_gpu
  return None


def _obstacle(kernel: Any, queries: Queries, keys: CachedArray) -> str | None:
  """Returns why a kernel does not support a call; None if it does."""
  if kernel is None:
    return f"is a kernel for GPUs, but the mesh's devices are of the platform {current_platform()!r}"
  if queries.options.bias is not None:
    return 'does not support relative position biases'
  if queries.options.chunk is not None:
    return 'does not support chunked attention'
  return kernel.obstacle(queries.array, keys)


def _specs(queries: Queries, keys: CachedArray, split_dims: SplitDims, kv_split_dims: SplitDims) -> Any:
  """Returns the mesh axes that split D, G and Q, None without a mesh, or why the kernel does not support the split."""
  scope = current_sharding_scope()
  if scope is None or scope.mesh.size == 1:
    return None
  sizes = scope.mesh.shape
  axes_of = lambda split, shape: spec_axes(scope.activation_spec(split, shape), len(shape))
  of_rows, of_entries, of_heads, of_features = kv_split_dims or (None,) * 4
  rows, heads, *others = axes_of((of_rows, of_heads, of_entries, of_features), keys.array.shape[-4:])
  _, num_groups, num_heads, num_columns, _ = queries.array.shape
  assert keys.tables is not None
  if num_parts(rows, sizes) != keys.tables.shape[0] or any(num_parts(axes, sizes) > 1 for axes in others):
    return 'needs blocks that are split over the same axes as the rows, and whole entries'
  if num_groups % num_parts(heads, sizes):
    return f'needs the {num_groups} key/value heads to be divisible by the {num_parts(heads, sizes)} devices of {heads}'
  if num_groups > 1 or split_dims is None:
    return rows, heads, ()
  (axes,) = axes_of((tuple(split_dims)[2],), (num_heads * num_columns,))  # all devices have the head
  is_even = num_heads % num_parts(axes, sizes) == 0 and not {*axes} & {*rows, *heads}
  return rows, heads, axes if is_even else ()


@functools.cache
def _log_once(platform: str, obstacle: str | None) -> None:
  if obstacle:  # a warning, because the loop is slower
    logging.warning("Attention to the KV cache is computed by 'xla': pallas %s.", obstacle)
  else:
    logging.info("Attention to the KV cache is computed by 'pallas': the devices are of the platform %r.", platform)
