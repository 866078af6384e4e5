"""Defines TrainState and the pure steps on it: plain mathematics on whole arrays of true shapes.

There is no mesh, no sharding and no padding here; `partition.py` wraps these functions into compiled steps.
"""

from typing import Any

from clu import metrics as clu_metrics
from flax import struct
import jax
import jax.numpy as jnp

from spmd_tasks.learning import LearnerState, accumulate_gradients, are_balance_biases, keep_if_finite
from spmd_tasks.runtime.task import Batch, Task, Variables


class TrainState(struct.PyTreeNode):
  """Everything that a training step changes. A pytree, donated to every training step.

  Attributes:
    step: int32 scalar, the number of updates applied so far (a skipped step does not count).
    rng: uint32[2], the job's base key data; step s draws from `fold_in(rng, s)`.
    weights: the model's parameters, a tree of arrays.
    learner: optimizer state, averaged weights and the counts of skipped steps.
    non_trainable: the model's other variables by collection, such as `batch_stats`; they have no gradient.

  Shapes, PartitionSpecs and shardings come in trees of this class too, hence the loose types.
  """

  step: Any
  rng: Any
  weights: Any
  learner: LearnerState
  non_trainable: Any = struct.field(default_factory=dict)

  @property
  def variables(self) -> Variables:
    """All variables of the model by collection; the weights are `params`."""
    return {'params': self.weights, **self.non_trainable}


def init_train_state(task: Task, variables: Variables, weight_specs: Any, rng: jax.Array) -> TrainState:
  """Returns the state at step 0. `rng` is uint32[2] key data, from which every step derives its own key."""
  weights = variables['params']
  return TrainState(
    step=jnp.zeros((), jnp.int32),
    rng=rng,
    weights=weights,
    learner=task.learner.init(weights, weight_specs),
    non_trainable={name: tree for name, tree in variables.items() if name != 'params'},
  )


def train_step(
  task: Task, weight_specs: Any, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Applies one update. If the loss or a gradient is not finite, variables, optimizer state and step stay unchanged.

  Returns:
    The new state, and metrics: float32 scalars, or vectors with one value per expert. The scalars `loss`,
    `loss_weight` and `skipped` (0 or 1) are always among them.
  """

  def loss_fn(weights, microbatch, rng):
    output = task.compute_loss(state.variables | {'params': weights}, microbatch, train=True, rng=rng)
    return output.loss, output

  learner = task.learner
  rng = jax.random.fold_in(jax.random.wrap_key_data(state.rng, impl='threefry2x32'), state.step)
  output, gradients = accumulate_gradients(
    loss_fn,
    state.weights,
    batch,
    rng,
    learner.num_microbatches,
    learner.accumulation,
    is_sum=are_balance_biases(weight_specs),
  )
  weights, learner_state, learner_metrics = learner.update(
    gradients, output.loss, state.step, state.learner, state.weights, weight_specs
  )
  step = state.step + (1 - learner_metrics['skipped'].astype(jnp.int32))
  non_trainable = keep_if_finite(
    learner_metrics['skipped'] == 0, state.non_trainable | dict(output.updated_variables), state.non_trainable
  )
  metrics = {name: mean for name, (mean, _) in output.metrics.items()}
  metrics |= {'loss': output.loss, 'loss_weight': output.weight} | learner_metrics
  return state.replace(step=step, weights=weights, learner=learner_state, non_trainable=non_trainable), metrics


def eval_step(task: Task, variables: Variables, batch: Batch) -> dict[str, clu_metrics.Average]:
  """Evaluates one batch. Returns averages over its loss weights, to be merged over the batches of the set.

  A metric with one value per expert has a vector as its total and a scalar as its count.
  """
  output = task.compute_loss(variables, batch, train=False)
  means = {'loss': (output.loss, output.weight)} | output.metrics
  return {name: clu_metrics.Average(total=mean * weight, count=weight) for name, (mean, weight) in means.items()}
