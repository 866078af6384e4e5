"""Says which weights are trained, by patterns of their names, and marks the others as frozen (frozen_weights.py).

specs = mark_frozen(specs, trained=('lora_',), dtype='bfloat16')     # the others get the tag `frozen`
"""

import dataclasses
from typing import Any

import jax

from spmd_tasks.learning.frozen_weights import FROZEN_TAG
from spmd_tasks.sharding.quantized import stored_spec
from spmd_tasks.sharding.weight_names import matching_names
from spmd_tasks.sharding.weights import leaf_name, leaves_by_name


def mark_frozen(weight_specs: Any, trained: tuple[str, ...], dtype: str | None = None) -> Any:
  """Returns the specs with the tag `frozen` for all weights but those that the patterns name (`matching_names`).

  `dtype` is that in which frozen kernels are held, as `stored_spec` says (sharding/quantized.py); None: as they are.
  Raises a UserError if a pattern names no weight.
  """
  kept = set(matching_names(trained, [*leaves_by_name(weight_specs)], setting='task.trained'))

  def mark(path: Any, spec: Any) -> Any:
    if (name := leaf_name(path)) in kept:
      return spec
    frozen = dataclasses.replace(spec, tags=(*spec.tags, FROZEN_TAG))
    if dtype is None:
      return frozen
    return stored_spec(name, frozen, dtype)

  return jax.tree_util.tree_map_with_path(mark, weight_specs)
