"""Statistics of one step by layer: norms, maxima and NaNs of weights, gradients, activations and updates.

    gradients, metrics = gradient_model(task, model, experiment).train_step(gradient_state(state), batch)
    LayerStatistics(model)(gradients)             # {'stack/ffn/kernel': {'norm': [L], 'max': [L], 'nan': [L]}, ...}

A separate program computes the gradients without changing the state: the training step with a learner that returns the
gradients as the new weights.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.experiment import Experiment
from spmd_tasks.learning import BaseLearner, LearnerState
from spmd_tasks.learning.frozen_weights import fill_in, without_frozen
from spmd_tasks.runtime import PartitionedModel, Task, TrainState, partition_spmd_model
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.weights import BALANCE_BIAS_TAG, leaves_by_name

# Leaf -> 'norm', 'max', 'nan' -> a value, or one value per layer if the leaf is stacked.
Statistics = dict[str, dict[str, float | list[float]]]


class GradientLearner(BaseLearner):
  """A learner whose new weights are the gradients, accumulated like another learner. It has no optimizer state."""

  def __init__(self, learner: BaseLearner):
    self.num_microbatches, self.accumulation = learner.num_microbatches, learner.accumulation
    self.ema_decay = learner.ema_decay  # so that the state has the same averages beside the weights

  def init(self, weights: Any, weight_specs: Any) -> LearnerState:
    del weights, weight_specs
    return _no_learner_state(jnp.zeros((), jnp.int32))

  def update(
    self,
    grads: Any,
    loss: Any,
    step: Any,
    state: LearnerState,
    weights: Any,
    weight_specs: Any,
    factors: Any = None,
  ) -> tuple[Any, LearnerState, dict[str, jax.Array]]:
    del loss, step, factors

    def gradient(spec: WeightSpec, grad: jax.Array, weight: jax.Array) -> jax.Array:
      if BALANCE_BIAS_TAG in spec.tags:  # which gets its expert's load, not a gradient, as its cotangent
        return jnp.zeros_like(weight)
      return grad.astype(weight.dtype)

    trained, specs = (without_frozen(tree, weight_specs) for tree in (weights, weight_specs))
    grads = jax.tree.map(gradient, specs, grads, trained)
    return fill_in(grads, weights), state, {'skipped': jnp.zeros(())}

  def state_split_dims(self, abstract_state: LearnerState, weight_specs: Any) -> LearnerState:
    del weight_specs
    return jax.tree.map(lambda x: WeightSpec(shape=(), init=None, split_dims=(), dtype=x.dtype), abstract_state)


def gradient_model(task: Task, model: PartitionedModel, experiment: Experiment) -> PartitionedModel:
  """Returns a model whose train step returns the gradients of `task` on `model` as the new weights."""
  return partition_spmd_model(
    dataclasses.replace(task, learner=GradientLearner(task.learner)),
    model.mesh,
    model.input_layout.spec,
    axis_rules=model.axis_rules,
    inputs_split_mapping=model.inputs_split_mapping,
    default_split_dim=experiment.default_split_dim,
  )


def gradient_state(state: TrainState) -> TrainState:
  """Returns a copy of the state without the learner's, which a step of a `gradient_model` may donate."""
  return jax.tree.map(jnp.copy, state.replace(learner=_no_learner_state(state.learner.num_skipped)))


def _no_learner_state(num_skipped: jax.Array) -> LearnerState:
  """Returns the state of a learner that has none: the counts, without anything that a learner may have beside them."""
  return LearnerState(opt_state=(), ema_weights=None, num_skipped=num_skipped, num_skipped_in_a_row=num_skipped)


class LayerStatistics:
  """Computes the statistics of trees like a model's weights, in the layout of the live state."""

  def __init__(self, model: PartitionedModel):
    self._model = model
    specs = jax.tree.leaves(without_frozen(model.weight_specs, model.weight_specs))
    self._is_stacked = [spec.stacked > 0 for spec in specs]

  def __call__(self, state: TrainState, before: TrainState | None = None) -> Statistics:
    """Returns the statistics of a state's trained weights, or of their change since `before`. A collective call."""
    tree = self._model.to_canonical(state, self._part)
    if before is not None:
      tree = jax.tree.map(jnp.subtract, tree, self._model.to_canonical(before, self._part))
    leaves = leaves_by_name(tree)
    return _as_json(dict(zip(leaves, jax.device_get(self._compute([*leaves.values()])), strict=True)))

  def _part(self, state: TrainState) -> Any:
    return self._model.trained_part(state).weights

  @functools.cached_property
  def _compute(self) -> Any:
    return jax.jit(lambda leaves: list(map(_leaf_statistics, leaves, self._is_stacked)))


def activation_statistics(
  task: Task, model: PartitionedModel, state: TrainState, batch: dict[str, jax.Array]
) -> Statistics:
  """Returns the statistics of each block's output, without dropout; {} for a pipeline, which captures none."""

  def forward(variables: Any, batch: Any) -> Any:
    _, captured = task.predict(variables, batch, capture_intermediates=_is_block, mutable=['intermediates'])
    leaves = leaves_by_name(captured.get('intermediates', {})).items()
    return {name: _leaf_statistics(x, x.ndim > 3) for name, x in leaves if x.ndim > 2}  # [B, T, D] or [L, B, T, D]

  step = model.batch_step('activations', model.input_layout.spec, forward)
  return _as_json(jax.device_get(step(state.variables, batch)))


def _is_block(module: Any, method: str) -> bool:
  return method == '__call__' and type(module).__name__.endswith('Block')


def _as_json(values: Mapping[str, Mapping[str, Any]]) -> Statistics:
  return {name: {kind: np.asarray(x, np.float64).tolist() for kind, x in leaf.items()} for name, leaf in values.items()}


def _leaf_statistics(x: jax.Array, is_stacked: bool) -> dict[str, jax.Array]:
  """Returns the norm, the largest magnitude and the number of NaNs of a leaf, or of each layer [L] if it is stacked."""
  dims = tuple(range(is_stacked, x.ndim))
  x, is_nan = x.astype(jnp.float32), jnp.isnan(x)
  magnitude = jnp.max(jnp.abs(x), dims, initial=0.0)
  scale = jnp.where(jnp.isfinite(magnitude) & (magnitude > 0), magnitude, 1.0)  # so that squares do not overflow
  scaled = x / jnp.expand_dims(scale, dims)
  return {'norm': scale * jnp.sqrt(jnp.sum(scaled * scaled, dims)), 'max': magnitude, 'nan': jnp.sum(is_nan, dims)}


def by_layer(statistics: Statistics) -> dict[str, dict[str, float]]:
  """Combines the leaves of each layer: 'stack/3' for stacked leaves, and the first part of the name for others."""
  layers: dict[str, dict[str, float]] = {}
  for name, leaf in statistics.items():
    first = name.partition('/')[0]
    is_stacked = isinstance(leaf['norm'], list)
    for index, (norm, largest, nans) in enumerate(zip(*(np.ravel(leaf[kind]) for kind in ('norm', 'max', 'nan')))):
      layer = layers.setdefault(f'{first}/{index}' if is_stacked else first, {'norm': 0, 'max': 0, 'nan': 0})
      layer['norm'] = math.hypot(layer['norm'], norm)
      layer['max'] = max(layer['max'], largest, key=lambda x: math.inf if math.isnan(x) else x)
      layer['nan'] += nans
  return layers


def format_table(kinds: Mapping[str, Statistics]) -> str:
  """Returns a table with a line per layer, and the norm, max and NaNs of each of `kinds`, such as 'gradients'."""
  rows = {kind: by_layer(statistics) for kind, statistics in kinds.items()}
  names = list(next(iter(rows.values())))
  width = max(map(len, (*names, 'layer'))) + 2
  lines = [f'{"layer":{width}}' + ''.join(f'{f"|{kind}|":>14}{"max":>11}{"NaN":>7}' for kind in rows)]
  for name in names:
    cells = [row.get(name) for row in rows.values()]
    texts = [' ' * 32 if x is None else f'{x["norm"]:14.5g}{x["max"]:11.4g}{x["nan"]:7.0f}' for x in cells]
    lines.append(f'{name:{width}}' + ''.join(texts))
  return '\n'.join(lines)
