"""Context parallelism: the tokens of a sequence are split over devices.

    axis_rules = context_axis_rules(DEFAULT_AXIS_RULES)  # splits `seq` over the mesh axis `context`

Everything but attention works on tokens one by one, so only attention communicates: each device gathers all keys and
values, which are small where heads share them, and computes its queries against them (Llama 3, 2024, section 3.3.2).

With a causal mask, late queries see more keys than early ones. So device i of P computes the i-th run of T / 2P queries
and the (2P - 1 - i)-th: together they see as many keys as any other device's. `exchange` brings these queries to their
device and `undo_exchange` the results back, so that no other part of the model sees another order than the text's.

Shapes: as in implementations.py; P devices along the axes that split the tokens, t = T / P tokens of one.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.layers.attention._blockwise import attend_blockwise
from spmd_tasks.layers.attention._layout import AttentionLayout, Axes
from spmd_tasks.layers.attention._on_devices import attend_on_devices
from spmd_tasks.layers.attention._plain import AttentionOptions


def attend_gathered(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  segment_ids: jax.Array | None,
  options: AttentionOptions,
  *,
  layout: AttentionLayout,
  block: int,
) -> jax.Array:
  """Computes `attend` from gathered keys and values, for `block` queries of a device at a time."""

  def attend_local(query, key, value, segments, sinks, _):
    key, value, key_segments = gather_tokens((key, value, segments), layout.tokens)
    return attend_blockwise(
      query,
      key,
      value,
      segments,
      dataclasses.replace(options, sinks=sinks),
      block=block,
      key_segments=key_segments,
      first_column=jax.lax.axis_index(layout.tokens) * query.shape[1],
    )

  return attend_on_devices(attend_local, query, key, value, segment_ids, options, layout=layout, tile=1)


def gather_tokens(tree: Any, axes: Axes) -> Any:
  """Gathers the tokens of all devices, dim 1 of each array; runs inside a `shard_map`."""
  return jax.tree.map(lambda x: jax.lax.all_gather(x, axes, axis=1, tiled=True), tree)


def balanced_order(length: int, num_parts: int) -> np.ndarray:
  """Returns int32 [T]: the place in the text of each token after `exchange`, device by device.

  `length` must be a multiple of 2 * num_parts.
  """
  runs = np.arange(length, dtype=np.int32).reshape(2 * num_parts, -1)
  return np.concatenate([runs[run] for i in range(num_parts) for run in (i, 2 * num_parts - 1 - i)])


def exchange(x: jax.Array, axes: Axes) -> jax.Array:
  """Brings the tokens of a device, [b, t, ...], into the balanced order; runs inside a `shard_map`.

  Device d holds the runs 2d and 2d + 1. Even runs go to one another's devices in one permutation, odd runs in a second.
  """
  num_parts = jax.lax.axis_size(axes)
  even, odd = jnp.split(x, 2, axis=1)
  even = jax.lax.ppermute(even, axes, _routes(num_parts, 0))
  odd = jax.lax.ppermute(odd, axes, _routes(num_parts, 1))
  # Of device i's two runs, i is even where i is, and 2P - 1 - i is odd where i is even.
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
  """(from, to) of the even (0) or odd (1) run of every device."""
  runs = range(parity, 2 * num_parts, 2)
  return [(run // 2, run if run < num_parts else 2 * num_parts - 1 - run) for run in runs]
