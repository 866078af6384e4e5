"""Random weights of a model on one device, without the seconds that compiling its initialization takes."""

import jax
import numpy as np

from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.task import Variables


def draw_variables(model: PartitionedModel, seed: int, scale: float = 0.15) -> Variables:
  """Normal numbers, those of norms around 1."""
  rng = np.random.default_rng(seed)

  def drawn(path, leaf):
    values = scale * rng.standard_normal(leaf.shape) + jax.tree_util.keystr(path).endswith("['scale']")
    return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

  return jax.tree_util.tree_map_with_path(drawn, model.padded_state.variables)
