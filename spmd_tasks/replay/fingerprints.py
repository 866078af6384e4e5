"""Makes numbers of arrays that tell whether two of them agree in every bit, wherever they lie.

    prints = tree_fingerprints(state)                   # {'weights/embedding/table': (lo, hi), ...}
    digest(prints)                                      # 16 hexadecimal digits

A fingerprint is two sums, modulo 2^32, over the elements: each element's bits and its place are mixed by a one-to-one
function (the finalizer of MurmurHash3). So one changed element always changes both sums, and more of them escape with
a chance of 2^-64. Sums of integers do not depend on their order, hence not on the mesh.
"""

from collections.abc import Mapping
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.sharding.weights import leaves_by_name

Prints = Mapping[str, tuple[int, ...]]


def fingerprint(x: jax.Array) -> jax.Array:
  """Returns the fingerprint of an array of any shape and dtype, uint32 [2]; traceable."""
  words = _words(x)
  place = jnp.zeros(words.shape, jnp.uint32)
  for dim in range(words.ndim):
    place = place * jnp.uint32(words.shape[dim]) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
  sums = [jnp.sum(_mix(_mix(place + jnp.uint32(seed)) ^ words), dtype=jnp.uint32) for seed in (0x9E3779B9, 0x7F4A7C15)]
  return jnp.stack(sums)


def _words(x: jax.Array) -> jax.Array:
  """The bits of each element as uint32; elements of 64 bits become two."""
  if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  if x.dtype == jnp.bool_:
    return x.astype(jnp.uint32)
  size = max(8, jax.dtypes.itemsize_bits(x.dtype))
  if size == 64:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)
  return jax.lax.bitcast_convert_type(x, {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[size]).astype(jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
  """One-to-one on uint32."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  return x ^ (x >> 16)


@jax.jit
def _all(leaves: list[jax.Array]) -> jax.Array:
  return jnp.stack([fingerprint(leaf) for leaf in leaves])


def tree_fingerprints(tree: Any) -> dict[str, tuple[int, ...]]:
  """Returns the fingerprint of every leaf of a tree of arrays by its name. A collective call."""
  if not (leaves := leaves_by_name(tree)):
    return {}
  prints = np.asarray(jax.device_get(_all([*leaves.values()]))).tolist()
  return {name: tuple(both) for name, both in zip(leaves, prints, strict=True)}


def digest(prints: Prints) -> str:
  """Returns 16 hexadecimal digits for all fingerprints."""
  text = '\n'.join(f'{name} {prints[name]}' for name in sorted(prints))
  return hashlib.sha256(text.encode()).hexdigest()[:16]
