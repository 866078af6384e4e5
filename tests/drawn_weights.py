"""Random weights of a model, and jobs with such, without the seconds that compiling an initialization takes.

Usage:

    directory = write_job(tmp_path / 'job', 'lm.UnevenTiny', ['num_layers=1'], steps=(2, 4))
"""

from collections.abc import Sequence
import contextlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from spmd_tasks.checkpoints import Checkpointer
from spmd_tasks.config import resolve, to_json
from spmd_tasks.experiment import partition_job
from spmd_tasks.runtime import PartitionedModel
from spmd_tasks.runtime.task import Variables


def draw_variables(model: PartitionedModel, seed: int, scale: float = 0.15) -> Variables:
  """Normal numbers, those of norms around 1."""
  return _draw(model.padded_state.variables, seed, scale)


def draw_canonical_state(model: PartitionedModel, seed: int) -> Any:
  """A state as checkpoints have it: drawn weights, and zeros in the rest."""
  zeros = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding),
                       model.canonical_state)  # fmt: skip
  return zeros.replace(weights=_draw(model.canonical_state.weights, seed, 0.15))


def write_job(directory: Path, experiment: str, overrides: Sequence[str], *, steps: Sequence[int]) -> Path:
  """Writes the directory of a job with checkpoints of these steps, the step being the seed of its weights."""
  directory.mkdir()
  resolved = resolve(experiment, overrides)
  (directory / 'config.json').write_text(json.dumps(to_json(resolved)))
  model = partition_job(resolved.build())
  with contextlib.closing(Checkpointer(directory / 'checkpoints')) as checkpointer:
    for step in steps:
      checkpointer.save(step, draw_canonical_state(model, step))
  return directory


def _draw(tree: Any, seed: int, scale: float) -> Any:
  rng = np.random.default_rng(seed)

  def drawn(path, leaf):
    values = scale * rng.standard_normal(leaf.shape) + jax.tree_util.keystr(path).endswith("['scale']")
    return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

  return jax.tree_util.tree_map_with_path(drawn, tree)
