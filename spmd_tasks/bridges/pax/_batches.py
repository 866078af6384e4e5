"""Converts batches: a Pax NestedMap has branches, a batch of ours is flat, with names such as `target/ids`.

In names a `/` of a key is `~1`, and `~` is `~0` (RFC 6901): `y_w~1ids`. The elements of a list are `views/[0]`, ....
"""

from collections.abc import Mapping
import re
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
      found['/'.join(map(_name_of_key, path))] = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
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
  """Returns the NestedMap of which `flatten_batch` gave the names; tuples in it become lists."""
  nested: dict[str, Any] = {}
  for name, value in batch.items():
    *branches, leaf = (key.replace('~1', '/').replace('~0', '~') for key in name.split('/'))
    node = nested
    for branch in branches:
      node = node.setdefault(branch, {})
    node[leaf] = value
  return _nested_maps(nested)


def _name_of_key(key: Any) -> str:
  if isinstance(key, jax.tree_util.SequenceKey):
    return f'[{key.idx}]'
  return jax.tree_util.keystr((key,), simple=True).replace('~', '~0').replace('/', '~1')


def _nested_maps(node: Any) -> Any:
  """Returns dicts as NestedMaps, and those whose keys are `[0]`, `[1]`, ... as lists."""
  if not isinstance(node, dict):
    return node
  children = {key: _nested_maps(child) for key, child in node.items()}
  if children and all(re.fullmatch(r'\[\d+\]', key) for key in children):
    return [children[key] for key in sorted(children, key=lambda key: int(key[1:-1]))]
  return py_utils.NestedMap(children)
