"""The pure train and eval steps: plain mathematics on whole arrays. No mesh, no sharding, no padding in sight."""

from typing import Any

from clu import metrics as clu_metrics
import jax
import jax.numpy as jnp

from spmd_tasks.learning.accumulation import accumulate_gradients
from spmd_tasks.runtime.task import Batch, Task
from spmd_tasks.runtime.train_state import TrainState


def init_train_state(task: Task, weights: Any, weight_specs: Any, rng: jax.Array) -> TrainState:
  """Step 0. `rng` is uint32[2] key data, from which every step derives its own key."""
  return TrainState(
    step=jnp.zeros((), jnp.int32), rng=rng, weights=weights, learner=task.learner.init(weights, weight_specs)
  )


def train_step(
  task: Task, weight_specs: Any, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, jax.Array]]:
  """One update. Returns the new state and metrics, among them the scalars `loss`, `loss_weight` and `skipped` (0 or 1).

  Metrics are float32 scalars, or vectors with one value per expert.
  A step whose loss or gradient is not finite returns weights, optimizer state and step count unchanged.
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
  """One batch of evaluation: averages over its loss weights, to be merged over the batches of the set.

  The total of a metric that has one value per expert is a vector, its count a scalar.
  """
  output = task.compute_loss(weights, batch, train=False)
  means = {'loss': (output.loss, output.weight)} | output.metrics
  return {name: clu_metrics.Average(total=mean * weight, count=weight) for name, (mean, weight) in means.items()}
