"""Runs a function of one device's queries, keys and values on every device of the mesh.

Rows, heads and, for context parallelism, tokens are split as the queries are. Heads and tokens that the mesh does not
divide are padded. A key/value head that serves query heads of several devices is repeated.

Shapes: B batch, T sequence, H query heads, G key/value heads, K head dim, V dim of a value.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from spmd_tasks.layers.attention._plain import AttentionLayout, AttentionOptions, Heads
from spmd_tasks.sharding.specs import current_sharding_scope


def attend_on_devices(
  attend_local: Callable[..., jax.Array],
  heads: Heads,
  options: AttentionOptions,
  *,
  layout: AttentionLayout,
  tile: int,
  table: Callable[[int, int], Any] | None = None,
) -> jax.Array:
  """Returns [B, T, H, V]; each device computes its part.

  Args:
    attend_local: (query [b, t, h, K], key [b, t, g, K], value [b, t, g, V], segment ids [b, t] or None, sinks [h] or
      None, table) -> [b, t, h, V]; t is a multiple of `tile`, and g divides h. Padded tokens at the end have segment
      -1, unless a causal attention has no segments.
    heads, options: see `attend`; queries and keys have the same segment ids.
    layout: of the queries.
    tile: t is a multiple of it.
    table: (h, padded T) -> a tree of arrays with `manual_sharding_spec`; each device gets its tokens' part.
  """
  query, key, value, segment_ids, _ = heads
  num_rows, length, num_heads, _ = query.shape
  repeats = _repeats(num_heads, key.shape[2], layout.num_heads)
  if repeats > 1:
    key, value = jnp.repeat(key, repeats, axis=2), jnp.repeat(value, repeats, axis=2)
  group = num_heads // key.shape[2]
  token_multiple = layout.num_tokens * tile
  if length % token_multiple and not options.causal and segment_ids is None:
    segment_ids = jnp.ones((num_rows, length), jnp.int32)
  query = _pad(query, (layout.num_rows, token_multiple, layout.num_heads * group, 1))
  key, value = (_pad(x, (layout.num_rows, token_multiple, layout.num_heads, 1)) for x in (key, value))
  segments = None if segment_ids is None else _pad(segment_ids, (layout.num_rows, token_multiple), -1)
  sinks = None if options.sinks is None else _pad(options.sinks, (layout.num_heads * group,))
  tables = table(query.shape[2] // layout.num_heads, query.shape[1]) if table else None

  scope = current_sharding_scope()
  if scope is None:
    attended = attend_local(query, key, value, segments, sinks, tables)
  else:
    heads_spec = PartitionSpec(layout.rows, layout.tokens, layout.heads, None)
    table_spec = None
    if tables is not None:  # manual_sharding_spec reads only shapes, and does not know manual axes
      plain_mesh = AbstractMesh(tuple(scope.mesh.shape.values()), scope.mesh.axis_names)
      table_spec = tables.manual_sharding_spec(NamedSharding(plain_mesh, PartitionSpec(None, layout.tokens)))
    segments_spec = None if segments is None else PartitionSpec(layout.rows, layout.tokens)
    sinks_spec = None if sinks is None else PartitionSpec(layout.heads)
    in_specs = heads_spec, heads_spec, heads_spec, segments_spec, sinks_spec, table_spec
    attended = scope.shard_map(attend_local, in_specs, heads_spec)(query, key, value, segments, sinks, tables)
  return attended[:num_rows, :length, :num_heads]


def _pad(x: jax.Array, multiples: tuple[int, ...], fill: int = 0) -> jax.Array:
  """Pads every dim at its end to a multiple."""
  widths = [(0, -size % multiple) for size, multiple in zip(x.shape, multiples)]
  return x if not any(after for _, after in widths) else jnp.pad(x, widths, constant_values=fill)


def _repeats(num_heads: int, num_kv_heads: int, parts: int) -> int:
  """Returns how often to repeat key/value heads, so that `parts` devices get whole groups with the least padding."""
  per_group = num_heads // num_kv_heads
  choices = [repeats for repeats in range(1, per_group + 1) if per_group % repeats == 0]

  def padded_heads(repeats: int) -> int:
    return -(-num_kv_heads * repeats // parts) * parts * (per_group // repeats)

  return min(choices, key=lambda repeats: (padded_heads(repeats), repeats))
