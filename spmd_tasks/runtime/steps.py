"""Defines TrainState and the pure steps on it: plain mathematics on whole arrays of true shapes.

There is no mesh, no sharding and no padding here; `partition.py` wraps these functions into compiled steps.
"""

from typing import Any

from clu import metrics as clu_metrics
from flax import struct
import jax
import jax.numpy as jnp

from spmd_tasks.learning import LearnerState, accumulate_gradients
from spmd_tasks.runtime.task import Batch, Task


class TrainState(struct.PyTreeNode):
  """Everything that a training step changes. A pytree, donated to every training step.

  Attributes:
    step: int32 scalar, the number of updates applied so far (a skipped step does not count).
    rng: uint32[2], the job's base key data; step s draws from `fold_in(rng, s)`.
    weights: the model's parameters, a tree of arrays.
    learner: optimizer state, averaged weights and the counts of skipped steps.

  Shapes, PartitionSpecs and shardings come in trees of this class too, hence the loose types.
  """

  step: Any
  rng: Any
  weights: Any
  learner: LearnerState


def init_train_state(task: Task, weights: Any, weight_specs: Any, rng: jax.Array) -> TrainState:
  """Returns the state at step 0. `rng` is uint32[2] key data, from which every step derives its own key."""
  return TrainState(
    step=jnp.zeros((), jnp.int32), rng=rng, weights=weights, learner=task.learner.init(weights, weight_specs)
  )


def train_step(
  task: Task, weight_specs: Any, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Applies one update. If the loss or a gradient is not finite, weights, optimizer state and step stay unchanged.

  Returns:
    The new state, and metrics: float32 scalars, or vectors with one value per expert. The scalars `loss`,
    `loss_weight` and `skipped` (0 or 1) are always among them.
  """

  def loss_fn(weights, microbatch, rng):
    output = task.compute_loss(weights, microbatch, train=True, rng=rng)
    return output.loss, output

  learner = task.learner
  rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng, impl='threefry2x32'), state.step)
  output, gradients = accumulate_gradients(
    loss_fn, state.weights, batch, rng, learner.num_microbatches, learner.accumulation
  )
  weights, learner_state, learner_metrics = learner.update(
    gradients, output.loss, state.step, state.learner, state.weights, weight_specs
  )
  step = state.step + (1 - learner_metrics['skipped'].astype(jnp.int32))
  metrics = {name: mean for name, (mean, _) in output.metrics.items()}
  metrics |= {'loss': output.loss, 'loss_weight': output.weight} | learner_metrics
  return state.replace(step=step, weights=weights, learner=learner_state), metrics


def eval_step(task: Task, weights: Any, batch: Batch) -> dict[str, clu_metrics.Average]:
  """Evaluates one batch. Returns averages over its loss weights, to be merged over the batches of the set.

  A metric with one value per expert has a vector as its total and a scalar as its count.
  """
  output = task.compute_loss(weights, batch, train=False)
  means = {'loss': (output.loss, output.weight)} | output.metrics
  return {name: clu_metrics.Average(total=mean * weight, count=weight) for name, (mean, weight) in means.items()}
