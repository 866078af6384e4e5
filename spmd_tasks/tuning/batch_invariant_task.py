"""BatchInvariantTask: a task whose losses, scores and samples have the same bits for a token in any batch, on CPUs.

layers/batch_invariant.py says how, and docs/rewards.md what it costs.
"""

import dataclasses
from typing import Any, ClassVar

from spmd_tasks.layers import LossOutput
from spmd_tasks.layers.base import layer_scope
from spmd_tasks.runtime import Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchInvariantTask(Task):
  """A Task in a batch-invariant LayerScope; decoding asks for `batch_invariant`."""

  batch_invariant: ClassVar[bool] = True

  def compute_loss(self, *args: Any, **settings: Any) -> LossOutput:
    with layer_scope(batch_invariant=True):
      return super().compute_loss(*args, **settings)

  def predict(self, *args: Any, **settings: Any) -> Any:
    with layer_scope(batch_invariant=True):
      return super().predict(*args, **settings)
