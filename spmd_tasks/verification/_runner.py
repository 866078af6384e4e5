"""Runner: the compiled train step of an experiment in one setting, which also returns its gradients.

`Runner.step` starts from a canonical state, which does not depend on the mesh, and returns metrics, gradients, weights
and optimizer state as numpy arrays with canonical shapes.
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
  """A learner whose state also has the gradients of the last step."""

  def __init__(self, learner: BaseLearner):
    self.learner = learner
    self.ema_decay, self.max_consecutive_skips = learner.ema_decay, learner.max_consecutive_skips
    self.num_microbatches, self.accumulation = learner.num_microbatches, learner.accumulation

  def init(self, weights: Any, weight_specs: Any) -> LearnerState:
    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), without_frozen(weights, weight_specs))
    return with_gradients(self.learner.init(weights, weight_specs), zeros)

  def update(self, grads: Any, loss: Any, step: Any, state: LearnerState, *arguments: Any, **named: Any) -> Any:
    learner_state = state.replace(opt_state=state.opt_state['optimizer'])
    weights, new_state, metrics = self.learner.update(grads, loss, step, learner_state, *arguments, **named)
    return weights, with_gradients(new_state, grads), metrics

  def check_variables(self, variables: Mapping[str, Any]) -> None:
    self.learner.check_variables(variables)

  def ema_decay_at(self, step: Any) -> Any:
    return self.learner.ema_decay_at(step)

  def evaluation_weights(self, state: LearnerState, weights: Any, *, averaged: bool) -> Any:
    return self.learner.evaluation_weights(state, weights, averaged=averaged)

  def state_split_dims(self, abstract_state: LearnerState, weight_specs: Any) -> LearnerState:
    learner_state = abstract_state.replace(opt_state=abstract_state.opt_state['optimizer'])
    gradient_specs = jax.tree.map(lambda spec: dataclasses.replace(spec, init=None, dtype=jnp.float32), weight_specs)
    gradient_specs = without_frozen(gradient_specs, weight_specs)
    return with_gradients(self.learner.state_split_dims(learner_state, weight_specs), gradient_specs)


def with_gradients(state: LearnerState, gradients: Any) -> LearnerState:
  """Returns a learner's state with the gradients of a step, as _GradientRecorder has it."""
  return state.replace(opt_state={'optimizer': state.opt_state, 'gradients': gradients})


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
  """The results of one train step.

  Attributes:
    forward: the task's metrics, the gradients and the non-trainable variables, by name.
    state: the whole new canonical state.
    updated: the learner's metrics, new weights, optimizer state, averages, step count and rng, by name.
    nonzero_padding: names of leaves whose padding is not zero after the step.
  """

  forward: Leaves
  state: TrainState
  updated: Leaves
  nonzero_padding: tuple[str, ...]


class Runner:
  """The experiment in one setting: a partitioned model whose train step also returns its gradients."""

  update_epsilon = float(jnp.finfo(jnp.float32).eps)  # the rounding unit of the learner's update

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
    return _with_random_adapters(state)

  def start(self, state: TrainState) -> TrainState:
    """Returns the state at which comparisons start."""
    return state

  def place(self, canonical: TrainState) -> TrainState:
    """Converts a canonical state to a padded one on the mesh. Pads on the host, so it does not compile a program."""

    def pad(x, true, target):
      padded = np.zeros(target.shape, target.dtype)
      padded[tuple(slice(0, size) for size in true.shape)] = np.asarray(x).reshape(true.shape)
      return padded

    state = jax.tree.map(pad, canonical, self.model.abstract_state, self.model.padded_state)
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, self.model.padded_state))

  def step(self, canonical: TrainState, batch: Mapping[str, np.ndarray]) -> StepResult:
    """Takes one step from a canonical state."""
    return self.steps(canonical, [batch])[0]

  def steps(self, canonical: TrainState, batches: Sequence[Mapping[str, np.ndarray]]) -> list[StepResult]:
    """Takes consecutive steps; the state stays on the mesh."""
    padded, results = self.place(canonical), []
    for batch in batches:
      padded, result = self.step_from(padded, batch)
      results.append(result)
    return results

  def losses(self, canonical: TrainState, batches: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
    """Takes consecutive steps. Returns their losses, float64."""
    padded, losses = self.place(canonical), []
    for batch in batches:
      padded, metrics = self.model.train_step(padded, self.model.train_step.place(batch))
      losses.append(float(metrics['loss']))
    return np.array(losses)

  def step_from(self, padded: TrainState, batch: Mapping[str, np.ndarray]) -> tuple[TrainState, StepResult]:
    """Takes one step from a padded state, which is donated. Returns (new padded state, result)."""
    padded, metrics = self.model.train_step(padded, self.model.train_step.place(batch))
    canonical, nonzero_padding = self.to_numpy(padded)
    metrics = {name: np.asarray(value) for name, value in jax.device_get(metrics).items() if name != 'outputs'}
    return padded, split_result(metrics, canonical, nonzero_padding)

  def to_numpy(self, state: TrainState) -> tuple[TrainState, tuple[str, ...]]:
    """Converts a padded state to canonical numpy arrays. Returns (state, names of leaves with nonzero padding)."""
    nonzero = []

    def unpad(path, x, true, canonical):
      x, true_slices = np.asarray(x), tuple(slice(0, size) for size in true.shape)
      if x.shape != true.shape:
        padding = x.copy()
        padding[true_slices] = 0
        if padding.any():
          nonzero.append(leaf_name(path))
      return np.array(x[true_slices]).reshape(canonical.shape)

    state = jax.tree_util.tree_map_with_path(
      unpad, jax.device_get(state), self.model.abstract_state, self.model.canonical_state
    )
    return state, tuple(nonzero)

  def learner_update(self, before: TrainState, result: StepResult) -> Leaves:
    """Applies this setting's learner to the gradients and the loss of another setting's step."""
    gradients = result.state.learner.opt_state['gradients']
    true = self.model.abstract_state

    def reshape(tree, shapes):
      return jax.tree.map(lambda x, shape: np.asarray(x).reshape(shape.shape), tree, shapes)

    weights, learner, metrics = self._update(
      reshape(gradients, true.learner.opt_state['gradients']), result.forward['loss'], reshape(before, true)
    )
    step = before.step + (1 - np.asarray(metrics['skipped'], np.int32))
    state = reshape(before.replace(step=step, weights=weights, learner=learner), self.model.canonical_state)
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
    """The rounding unit of the coarsest dtype in the step: 2^-23 for float32, 2^-7 for bfloat16."""
    return rounding_unit(self.model.train_step.compile())


def _with_random_adapters(state: TrainState) -> TrainState:
  """Replaces adapter matrices that start at zero by random ones.

  With zeros the model equals its base, so a loss that compares the two would consist of rounding errors.
  """
  rng = np.random.default_rng(0)

  def replace(path, leaf):
    return rng.normal(0, 0.05, leaf.shape).astype(leaf.dtype) if leaf_name(path).endswith('lora_b') else leaf

  return state.replace(weights=jax.tree_util.tree_map_with_path(replace, state.weights))


_COARSE_TYPES = {'bf16[': 'bfloat16', ' f16[': 'float16'}


def rounding_unit(program: Any) -> float:
  """Returns the rounding unit of the coarsest dtype in a compiled program."""
  text = program.as_text()
  coarsest = next((name for mark, name in _COARSE_TYPES.items() if mark in text), 'float32')
  return float(jnp.finfo(coarsest).eps)


_LEARNER_METRICS = ('grad_norm', 'weight_norm', 'learning_rate', 'skipped')


def split_result(metrics: Leaves, state: TrainState, nonzero_padding: tuple[str, ...]) -> StepResult:
  """Separates the results of the forward and backward pass from the learner's update."""
  gradients = state.learner.opt_state['gradients']
  learner = state.learner.replace(opt_state=state.learner.opt_state['optimizer'])
  forward = {name: value for name, value in metrics.items() if name not in _LEARNER_METRICS}
  updated = {name: value for name, value in metrics.items() if name in _LEARNER_METRICS}
  return StepResult(
    forward=forward | leaves_of({'gradients': gradients, 'non_trainable': state.non_trainable}),
    state=state,
    updated=updated | leaves_of({'weights': state.weights, 'learner': learner, 'step': state.step, 'rng': state.rng}),
    nonzero_padding=nonzero_padding,
  )


def leaves_of(tree: Any) -> Leaves:
  """Returns the leaves of a tree in numpy, by name."""
  return {name: np.asarray(leaf) for name, leaf in leaves_by_name(tree).items()}
