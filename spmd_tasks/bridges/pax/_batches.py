"""Converts batches: a Pax NestedMap has branches, a batch of ours is flat, with names such as `target/ids`."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from praxis import py_utils


def flatten_batch(batch: Any) -> dict[str, np.ndarray]:
  """Returns the arrays of a NestedMap by path. Strings, which no device can hold, are left out.

  64-bit numbers become those of 32 bits that JAX computes with.
  """
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
    array = np.asarray(leaf)
    if array.dtype.kind in 'biufcV':  # V: bfloat16
      name = jax.tree_util.keystr(path, simple=True, separator='/')
      found[name] = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
  return found


def take_strings(batch: Any) -> dict[str, Any]:
  """Returns the texts of a NestedMap, which `flatten_batch` leaves out, in branches like its own."""
  found: dict[str, Any] = {}
  for name, value in batch.items():
    if hasattr(value, 'items'):
      if texts := take_strings(value):
        found[name] = texts
    elif np.asarray(value).dtype.kind in 'OSU':
      found[name] = value
  return found


def complete_tokens(batch: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a batch with all that a language model of Praxis asks for; `ids` [B, T] alone are one document a row."""
  if 'ids' not in batch:
    return dict(batch)
  ids = jnp.asarray(batch['ids'])
  ones = jnp.ones(ids.shape, jnp.int32)
  positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
  batch = {'labels': ids, 'segment_ids': ones, 'segment_pos': positions} | dict(batch)
  paddings = (batch['segment_ids'] == 0).astype(jnp.float32)
  return {'paddings': paddings, 'weights': 1 - paddings} | batch


def to_nested_map(batch: Mapping[str, Any]) -> py_utils.NestedMap:
  """Returns the NestedMap of which `flatten_batch` gave the names; lists in it become maps by index."""
  nested = py_utils.NestedMap()
  for name, value in batch.items():
    *branches, leaf = name.split('/')
    node = nested
    for branch in branches:
      node = node.setdefault(branch, py_utils.NestedMap())
    node[leaf] = value
  return nested
