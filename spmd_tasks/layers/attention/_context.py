"""Context parallelism: the tokens of a sequence are split over devices.

  axis_rules = context_axis_rules(DEFAULT_AXIS_RULES)  # splits `seq` over the mesh axis `context`

Only attention communicates, in one of two ways:

all-gather  each device gathers all keys and values, and attends to them with its queries (Llama 3, 2024, section
            3.3.2). Keys and values are small if query heads share them.
ring        keys and values travel from device to device in a ring; each device accumulates the attention of its queries
            to each part (Liu et al., 2023, "Ring Attention"). No device ever holds all of them.

With a causal mask, late queries see more keys than early ones. Device i of P therefore computes the i-th run of T / 2P
queries and the (2P - 1 - i)-th: every device's queries see the same number of keys. `exchange` sends these queries to
their device and `undo_exchange` returns the results, so that the rest of the model keeps the order of the text. Or the
whole stack has its tokens in this order (`balance_tokens`), and only keys and values are reordered.

Shapes: as in implementations.py; P devices along the axes that split the tokens, t = T / P tokens of one.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from spmd_tasks.layers.attention._blockwise import attend_blockwise
from spmd_tasks.layers.attention._on_devices import attend_on_devices
from spmd_tasks.layers.attention._plain import AttentionLayout, AttentionOptions, Axes, Heads, visible
from spmd_tasks.layers.base import float32_product, soft_cap
from spmd_tasks.sharding.specs import current_sharding_scope


def attend_gathered(heads: Heads, options: AttentionOptions, *, layout: AttentionLayout, block: int) -> jax.Array:
  """Computes `attend` with gathered keys and values, for `block` queries of a device at a time."""

  def attend_local(query, key, value, segments, sinks, _):
    key, value, key_segments = gather_tokens((key, value, segments), layout.tokens)
    gathered, own_options = Heads(query, key, value, segments, key_segments), dataclasses.replace(options, sinks=sinks)
    first_column = jax.lax.axis_index(layout.tokens) * query.shape[1]
    return attend_blockwise(gathered, own_options, block=block, first_column=first_column)

  return attend_on_devices(attend_local, heads, options, layout=layout, tile=1)


def attend_by_ring(heads: Heads, options: AttentionOptions, *, layout: AttentionLayout) -> jax.Array:
  """Computes `attend` as keys and values go round; the scores of t queries and t keys are in memory at a time."""
  axes, num_parts = layout.tokens, layout.num_tokens
  scale = options.scale(heads.query.shape[-1])

  @jax.checkpoint
  def add(total: Total, queries: Run, keys: Run) -> Total:
    """Adds the attention of a run of queries to a run of keys."""
    values = keys.value
    assert values is not None
    logits = float32_product('BTGHK,BSGK->BGHTS')(queries.key, keys.key)
    may_see = visible(queries.columns, keys.columns, queries.segments, keys.segments, options)
    logits = jnp.where(may_see[:, None, None], soft_cap(logits * scale, options.logit_cap), -jnp.inf)
    highest = jnp.maximum(total.highest, jax.lax.stop_gradient(jnp.max(logits, axis=-1)))
    shrink = jnp.exp(total.highest - highest)
    weights = jnp.exp(logits - highest[..., None])
    seen = float32_product('BGHTS,BSGV->BGHTV')(weights.astype(values.dtype), values)
    return Total(
      sums=total.sums * shrink[..., None] + seen,
      weight=total.weight * shrink + jnp.sum(weights, axis=-1),
      highest=highest,
    )

  def attend_local(query, key, value, segments, sinks, _):
    num_rows, length, num_heads, _ = query.shape
    order = jnp.asarray(balanced_order(length * num_parts, num_parts).reshape(num_parts, length))
    me = jax.lax.axis_index(axes)
    query, key, value, segments = (None if x is None else exchange(x, axes) for x in (query, key, value, segments))
    grouped = query.reshape(num_rows, length, key.shape[2], num_heads // key.shape[2], -1)
    early, late = _halves(Run(grouped, None, segments, order[me]))

    def hop(carry, distance):
      (early_total, late_total), others = carry
      source = (me - distance) % num_parts
      early_keys, late_keys = _halves(Run(others[0], others[1], others[2], order[source]))
      late_total = add(late_total, late, early_keys)
      if options.causal:  # early queries see early runs up to their own, late queries late runs up to theirs
        early_total = jax.lax.cond(source <= me, add, _skip, early_total, early, early_keys)
        late_total = jax.lax.cond(source >= me, add, _skip, late_total, late, late_keys)
      else:
        early_total = add(add(early_total, early, early_keys), early, late_keys)
        late_total = add(late_total, late, late_keys)
      ring = [(i, (i + 1) % num_parts) for i in range(num_parts)]
      return ((early_total, late_total), jax.tree.map(lambda x: jax.lax.ppermute(x, axes, ring), others)), None

    shape = (num_rows, *grouped.shape[2:4], length // 2)
    lowest = jnp.full(shape, -1e30)  # finite: a difference of infinities would be NaN
    nothing = Total(sums=jnp.zeros((*shape, value.shape[-1])), weight=jnp.zeros(shape), highest=lowest)
    (totals, _), _ = jax.lax.scan(hop, ((nothing, nothing), (key, value, segments)), jnp.arange(num_parts))

    def results(total: Total) -> jax.Array:
      weight = total.weight
      if sinks is not None:
        weight += jnp.exp(sinks.astype(jnp.float32).reshape(1, *shape[1:3], 1) - total.highest)
      return jnp.moveaxis(total.sums / weight[..., None], 3, 1)

    attended = jnp.concatenate([results(total) for total in totals], axis=1).astype(value.dtype)
    return undo_exchange(attended.reshape(num_rows, length, num_heads, -1), axes)

  return attend_on_devices(attend_local, heads, options, layout=layout, tile=2)


class Run(NamedTuple):
  """Consecutive tokens of the text: `key` holds keys [B, t, G, K], or queries [B, t, G, H/G, K]."""

  key: jax.Array
  value: jax.Array | None
  segments: jax.Array | None
  columns: jax.Array


class Total(NamedTuple):
  """Sums over the keys so far, float32: of weighted values [B, G, H/G, t, V], of weights, and the highest logit."""

  sums: jax.Array
  weight: jax.Array
  highest: jax.Array


def _skip(total: Total, queries: Run, keys: Run) -> Total:
  del queries, keys
  return total


def _halves(run: Run) -> tuple[Run, Run]:
  """Returns the two runs of a device, the earlier one first."""
  half = run.columns.shape[0] // 2

  def part(start: int) -> Run:
    key, value, segments = jax.tree.map(lambda x: jax.lax.slice_in_dim(x, start, start + half, axis=1), run[:3])
    return Run(key, value, segments, run.columns[start : start + half])

  return part(0), part(half)


def gather_tokens(tree: Any, axes: Axes) -> Any:
  """Gathers the tokens of all devices, dim 1 of each array; called within `shard_map`."""
  return jax.tree.map(lambda x: jax.lax.all_gather(x, axes, axis=1, tiled=True), tree)


def balanced_order(length: int, num_parts: int) -> np.ndarray:
  """Returns int32 [T]: the place in the text of each token after `exchange`, device by device; 2 P must divide T."""
  runs = np.arange(length, dtype=np.int32).reshape(2 * num_parts, -1)
  return np.concatenate([runs[run] for i in range(num_parts) for run in (i, 2 * num_parts - 1 - i)])


def in_text_order(tree: Any, num_parts: int) -> Any:
  """Returns gathered arrays [b, T, ...] in the order of the text, from the balanced order."""
  places = np.argsort(balanced_order(2 * num_parts, num_parts))

  def restore(x: jax.Array) -> jax.Array:
    runs = jnp.split(x, 2 * num_parts, axis=1)
    return jnp.concatenate([runs[place] for place in places], axis=1)

  return jax.tree.map(restore, tree)


def balance_tokens(tree: Any, layout: AttentionLayout, *, back: bool = False) -> Any:
  """Reorders arrays [B, T, ...] into the balanced order, or `back`; 2 P must divide T."""
  scope = current_sharding_scope()
  if scope is None or layout.num_tokens == 1:
    return tree
  spec, move = PartitionSpec(layout.rows, layout.tokens), undo_exchange if back else exchange
  return scope.shard_map(lambda tree: jax.tree.map(lambda x: move(x, layout.tokens), tree), spec, spec)(tree)


def exchange(x: jax.Array, axes: Axes) -> jax.Array:
  """Reorders the tokens of a device, [b, t, ...], into the balanced order; called within `shard_map`.

  Device d holds the runs 2d and 2d + 1. One permutation sends the even runs, another the odd runs.
  """
  num_parts = jax.lax.axis_size(axes)
  even, odd = jnp.split(x, 2, axis=1)
  even = jax.lax.ppermute(even, axes, _routes(num_parts, 0))
  odd = jax.lax.ppermute(odd, axes, _routes(num_parts, 1))
  # Device i gets the runs i and 2P - 1 - i: the first is even if i is, the second is odd if i is even.
  is_even = jax.lax.axis_index(axes) % 2 == 0
  return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=1)


def undo_exchange(x: jax.Array, axes: Axes) -> jax.Array:
  """The inverse of `exchange`."""
  num_parts = jax.lax.axis_size(axes)
  first, second = jnp.split(x, 2, axis=1)
  is_even = jax.lax.axis_index(axes) % 2 == 0
  even, odd = jnp.where(is_even, first, second), jnp.where(is_even, second, first)
  back = [[(target, source) for source, target in _routes(num_parts, parity)] for parity in (0, 1)]
  even, odd = jax.lax.ppermute(even, axes, back[0]), jax.lax.ppermute(odd, axes, back[1])
  return jnp.concatenate([even, odd], axis=1)


def _routes(num_parts: int, parity: int) -> list[tuple[int, int]]:
  """Returns (source, target) of the even (0) or odd (1) run of every device."""
  runs = range(parity, 2 * num_parts, 2)
  return [(run // 2, run if run < num_parts else 2 * num_parts - 1 - run) for run in runs]
