"""Runner: the compiled train step of an experiment in one setting, which also gives its gradients.

A Runner steps from any canonical state: `step` starts from the numbers that it is given, on whatever mesh, and returns
everything that the step made: metrics, gradients, weights, optimizer state, as numpy arrays of canonical shapes.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.experiment import partition_job
from spmd_tasks.learning import BaseLearner, LearnerState
from spmd_tasks.learning.frozen_weights import without_frozen
from spmd_tasks.runtime import PartitionedModel, TrainState
from spmd_tasks.sharding.specs import sharding_scope
from spmd_tasks.sharding.weights import leaf_name, leaves_by_name
from spmd_tasks.verification._settings import Setting, Source, build_job

Leaves = dict[str, np.ndarray]  # name of a leaf, such as 'gradients/embedding/table' -> its values


class _GradientRecorder(BaseLearner):
  """A learner that keeps the gradients of the last step in its state, beside the optimizer's state."""

  def __init__(self, learner: BaseLearner):
    self.learner = learner
    self.ema_decay, self.max_consecutive_skips = learner.ema_decay, learner.max_consecutive_skips
    self.num_microbatches, self.accumulation = learner.num_microbatches, learner.accumulation

  def init(self, weights: Any, weight_specs: Any) -> LearnerState:
    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), without_frozen(weights, weight_specs))
    return with_gradients(self.learner.init(weights, weight_specs), zeros)

  def update(self, grads: Any, loss: Any, step: Any, state: LearnerState, *arguments: Any, **named: Any) -> Any:
    own = state.replace(opt_state=state.opt_state['optimizer'])
    weights, new_state, metrics = self.learner.update(grads, loss, step, own, *arguments, **named)
    return weights, with_gradients(new_state, grads), metrics

  def check_variables(self, variables: Mapping[str, Any]) -> None:
    self.learner.check_variables(variables)

  def evaluates_trained_weights(self, state: LearnerState, *, averaged: bool) -> bool:
    return self.learner.evaluates_trained_weights(state, averaged=averaged)

  def evaluation_weights(self, state: LearnerState, weights: Any, *, averaged: bool) -> Any:
    return self.learner.evaluation_weights(state, weights, averaged=averaged)

  def state_split_dims(self, abstract_state: LearnerState, weight_specs: Any) -> LearnerState:
    own = abstract_state.replace(opt_state=abstract_state.opt_state['optimizer'])
    float32 = jax.tree.map(lambda spec: dataclasses.replace(spec, init=None, dtype=jnp.float32), weight_specs)
    float32 = without_frozen(float32, weight_specs)
    return with_gradients(self.learner.state_split_dims(own, weight_specs), float32)


def with_gradients(state: LearnerState, gradients: Any) -> LearnerState:
  """Returns the state that a learner has where the gradients of a step are recorded."""
  return state.replace(opt_state={'optimizer': state.opt_state, 'gradients': gradients})


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
  """The results of one train step.

  Attributes:
    forward: the task's metrics, the gradients and the variables beside the weights, by name.
    state: the whole new state, canonical.
    updated: the learner's metrics, new weights, optimizer state and averages, the count of steps and the rng, by name.
    nonzero_padding: names of leaves whose padding is not zero after the step.
  """

  forward: Leaves
  state: TrainState
  updated: Leaves
  nonzero_padding: tuple[str, ...]


class Runner:
  """The experiment in one setting: a partitioned model whose train step also gives its gradients."""

  update_epsilon = float(jnp.finfo(jnp.float32).eps)  # the rounding unit of what the learner computes

  def __init__(self, source: Source, setting: Setting):
    self.setting = setting
    self.job = build_job(source, setting)
    self.task = self.job.task.as_task('--mode verify')
    task = dataclasses.replace(self.task, learner=_GradientRecorder(self.task.learner))
    mesh = self.job.experiment.mesh_spec().build(jax.devices()[: setting.num_devices])
    self.model: PartitionedModel = partition_job(dataclasses.replace(self.job, task=task), mesh)

  def init(self) -> TrainState:
    """Returns the canonical state at step 0, in numpy."""
    state = self.to_numpy(self.model.init(self.job.experiment.seed))[0]
    return _away_from_base(state)

  def start(self, state: TrainState) -> TrainState:
    """Returns the state from which steps are compared."""
    return state

  def place(self, canonical: TrainState) -> TrainState:
    """Returns the live state with the numbers of a canonical one, made on the host without a compiled program."""

    def padded(x, true, target):
      whole = np.zeros(target.shape, target.dtype)
      whole[tuple(slice(0, size) for size in true.shape)] = np.asarray(x).reshape(true.shape)
      return whole

    state = jax.tree.map(padded, canonical, self.model.abstract_state, self.model.padded_state)
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, self.model.padded_state))

  def step(self, canonical: TrainState, batch: Mapping[str, np.ndarray]) -> StepResult:
    """Takes one step from a canonical state."""
    return self.steps(canonical, [batch])[0]

  def steps(self, canonical: TrainState, batches: Sequence[Mapping[str, np.ndarray]]) -> list[StepResult]:
    """Takes one step after another, the state staying on the mesh."""
    live, results = self.place(canonical), []
    for batch in batches:
      live, result = self.step_from(live, batch)
      results.append(result)
    return results

  def losses(self, canonical: TrainState, batches: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
    """Returns the loss of each of these steps, float64."""
    live, losses = self.place(canonical), []
    for batch in batches:
      live, metrics = self.model.train_step(live, self.model.train_step.place(batch))
      losses.append(float(metrics['loss']))
    return np.array(losses)

  def step_from(self, live: TrainState, batch: Mapping[str, np.ndarray]) -> tuple[TrainState, StepResult]:
    """Takes one step from a live state, which is used up; returns the new one too."""
    live, metrics = self.model.train_step(live, self.model.train_step.place(batch))
    canonical, nonzero_padding = self.to_numpy(live)
    metrics = {name: np.asarray(value) for name, value in jax.device_get(metrics).items() if name != 'outputs'}
    return live, split_result(metrics, canonical, nonzero_padding)

  def to_numpy(self, state: TrainState) -> tuple[TrainState, tuple[str, ...]]:
    """Returns a live state in canonical shapes, and the names of leaves whose padding is not zero."""
    nonzero = []

    def unpad(path, x, true, canonical):
      x, kept = np.asarray(x), tuple(slice(0, size) for size in true.shape)
      if x.shape != true.shape:
        rest = x.copy()
        rest[kept] = 0
        if rest.any():
          nonzero.append(leaf_name(path))
      return np.array(x[kept]).reshape(canonical.shape)

    state = jax.tree_util.tree_map_with_path(
      unpad, jax.device_get(state), self.model.abstract_state, self.model.canonical_state
    )
    return state, tuple(nonzero)

  def updated_from(self, before: TrainState, result: StepResult) -> Leaves:
    """Computes what the learner makes, in this setting, of the gradients and the loss that another one had."""
    gradients = result.state.learner.opt_state['gradients']
    true = self.model.abstract_state

    def reshaped(tree, shapes):
      return jax.tree.map(lambda x, shape: np.asarray(x).reshape(shape.shape), tree, shapes)

    weights, learner, metrics = self._update(
      reshaped(gradients, true.learner.opt_state['gradients']), result.forward['loss'], reshaped(before, true)
    )
    step = before.step + (1 - np.asarray(metrics['skipped'], np.int32))
    state = before.replace(step=step, weights=weights, learner=learner)
    state = jax.tree.map(lambda x, shape: np.asarray(x).reshape(shape.shape), state, self.model.canonical_state)
    metrics = {name: np.asarray(value) for name, value in metrics.items()}
    return split_result(metrics, state, ()).updated

  @functools.cached_property
  def _update(self) -> Callable[..., Any]:
    model, learner = self.model, self.model.task.as_task('--mode verify').learner

    def update(gradients, loss, state):
      arguments = (gradients, loss, state.step, state.learner, state.weights, model.weight_specs)
      with sharding_scope(model.mesh, model.axis_rules):
        return learner.update(*arguments)

    return jax.jit(update)

  @functools.cached_property
  def epsilon(self) -> float:
    """The rounding unit of the coarsest type that the step computes in: 2^-23 for float32, 2^-7 for bfloat16."""
    return rounding_unit(self.model.train_step.compile())


def _away_from_base(state: TrainState) -> TrainState:
  """Draws the matrices of adapters that start at zero.

  With zeros the model is its base, so that a loss which compares the two is made of roundings alone.
  """
  rng = np.random.default_rng(0)

  def draw(path, leaf):
    return rng.normal(0, 0.05, leaf.shape).astype(leaf.dtype) if leaf_name(path).endswith('lora_b') else leaf

  return state.replace(weights=jax.tree_util.tree_map_with_path(draw, state.weights))


_COARSE_TYPES = {'bf16[': 'bfloat16', ' f16[': 'float16'}


def rounding_unit(program: Any) -> float:
  """Returns the rounding unit of the coarsest type that a compiled program computes in."""
  text = program.as_text()
  coarsest = next((name for mark, name in _COARSE_TYPES.items() if mark in text), 'float32')
  return float(jnp.finfo(coarsest).eps)


_OF_LEARNER = ('grad_norm', 'weight_norm', 'learning_rate', 'skipped')


def split_result(metrics: Leaves, state: TrainState, nonzero_padding: tuple[str, ...]) -> StepResult:
  """Sorts what a step made into what follows from weights and batch, and what the learner made of the gradients."""
  gradients = state.learner.opt_state['gradients']
  learner = state.learner.replace(opt_state=state.learner.opt_state['optimizer'])
  forward = {name: value for name, value in metrics.items() if name not in _OF_LEARNER}
  updated = {name: value for name, value in metrics.items() if name in _OF_LEARNER}
  return StepResult(
    forward=forward | leaves_of({'gradients': gradients, 'non_trainable': state.non_trainable}),
    state=state,
    updated=updated | leaves_of({'weights': state.weights, 'learner': learner, 'step': state.step, 'rng': state.rng}),
    nonzero_padding=nonzero_padding,
  )


def leaves_of(tree: Any) -> Leaves:
  """Returns a tree's leaves in numpy by their names."""
  return {name: np.asarray(leaf) for name, leaf in leaves_by_name(tree).items()}
