"""TrainState: everything that a training step changes, and nothing else."""

from typing import Any

from flax import struct

from spmd_tasks.learning.learner import LearnerState


class TrainState(struct.PyTreeNode):
  """A pytree, donated to every training step.

  Attributes:
    step: int32 scalar, the number of updates applied so far (a skipped step does not count).
    rng: uint32[2], the job's base key data; step s draws from `fold_in(rng, s)`.
    weights: the model's parameters, a tree of arrays.
    learner: optimizer state, averaged weights and the counts of skipped steps.

  Shapes, PartitionSpecs and the like come in trees of this class too, hence the loose types.
  """

  step: Any
  rng: Any
  weights: Any
  learner: LearnerState
