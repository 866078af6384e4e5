"""ByHand: a train step by the formulas of its parts, with which steps are compared that all layouts take alike.

It has what a Trajectory wants of a Runner. The gradient of each microbatch is computed by itself, of the model and the
loss as they are; the microbatches are put together in float64, and so is what the learner makes of them. It is of one
device, without the code of the train step, of accumulation and of the learner. From the docs it takes which rows and
random numbers a microbatch has: microbatch m of M has rows m, M + m, 2M + m, ..., and draws from `fold_in(rng of the
step, m)`; the rng of step s is `fold_in(base, s)`; the only microbatch of a step draws from the step's rng itself.

An average of weights starts at zero here, and not at the weights, from which it would hardly differ.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.layers.losses import WithAuxLosses
from spmd_tasks.learning import Learner
from spmd_tasks.learning.frozen_weights import fill_in, without_frozen
from spmd_tasks.runtime import Task, TrainState
from spmd_tasks.runtime.sown_values import declared_updates
from spmd_tasks.sharding.specs import sharding_scope
from spmd_tasks.sharding.weights import WEIGHT_FACTORS
from spmd_tasks.verification import _formulas
from spmd_tasks.verification._runner import Leaves, Runner, StepResult, rounding_unit, split_result
from spmd_tasks.verification._settings import Batch, Setting, Source


def why_not_by_hand(task: Any) -> str | None:
  """Returns why the steps of a task have no formulas here; None if they have."""
  if type(task).train_step is not Task.train_step:
    return f'{type(task).__name__} has a train step of its own'
  return None if type(task.learner) is Learner else f'{type(task.learner).__name__} is a learner of its own'


def has_formula(task: Task) -> bool:
  """Whether the loss of a task is written down in _formulas.py."""
  return _formulas.has_loss_formula(task.loss) and type(task).compute_loss is Task.compute_loss


class _Part(struct.PyTreeNode):
  """What a microbatch gives: the loss without its aux losses, these, and as in LossOutput the others."""

  loss: jax.Array
  aux_loss: jax.Array
  aux_weight: jax.Array
  weight: jax.Array
  metrics: dict[str, tuple[jax.Array, jax.Array]]
  updated: Mapping[str, Any]
  is_sum: bool = struct.field(pytree_node=False)


class ByHand:
  """The experiment in one setting, of one device."""

  # The learner's float32 has a bias correction 1 - beta^n with few bits left.
  update_epsilon = 2.0**-20

  def __init__(self, source: Source, setting: Setting):
    self.setting = setting
    self._shapes = Runner(source, dataclasses.replace(setting, mesh=(), slices=None, by_hand=False))
    self.job, self.task, self.model = self._shapes.job, self._shapes.task, self._shapes.model
    self._gradient = jax.jit(self._compute_gradient)
    self._program: Any = None

  def init(self) -> TrainState:
    """Returns the canonical state at step 0."""
    return self._shapes.init()

  def start(self, state: TrainState) -> TrainState:
    """Returns the state from which steps are compared: with averages of zero."""
    return state.replace(
      learner=state.learner.replace(ema_weights=jax.tree.map(np.zeros_like, state.learner.ema_weights))
    )

  @property
  def epsilon(self) -> float:
    """The rounding unit of the coarsest type that the gradient is computed in."""
    assert self._program is not None, 'no step was taken'
    return rounding_unit(self._program)

  def step(self, canonical: TrainState, batch: Mapping[str, np.ndarray]) -> StepResult:
    """Takes one step from a canonical state."""
    state = _reshaped(canonical, self.model.abstract_state)
    metrics, gradients, updated = self._of_batch(state, batch)
    old = state.learner.opt_state
    learner = state.learner.replace(opt_state={**old, 'gradients': gradients})
    new = state.replace(learner=learner, non_trainable=state.non_trainable | updated)
    return self._updated(state, new, metrics)

  def steps(self, canonical: TrainState, batches: Sequence[Batch]) -> list[StepResult]:
    """Takes one step after another."""
    results: list[StepResult] = []
    for batch in batches:
      results.append(self.step(results[-1].state if results else canonical, batch))
    return results

  def losses(self, canonical: TrainState, batches: Sequence[Batch]) -> np.ndarray:
    """Returns the loss of each of these steps, float64."""
    return np.array([float(result.forward['loss']) for result in self.steps(canonical, batches)])

  def updated_from(self, before: TrainState, result: StepResult) -> Leaves:
    """Computes what the learner makes of the gradients and the loss of a step."""
    state, new = (_reshaped(each, self.model.abstract_state) for each in (before, result.state))
    return self._updated(state, new, {'loss': result.forward['loss']}).updated

  @property
  def gradient_shapes(self) -> Any:
    """Shapes of the gradients, canonical."""
    return self.model.canonical_state.learner.opt_state['gradients']

  def evaluation_variables(self, state: TrainState) -> Any:
    """Returns the model's variables of a canonical state that are evaluated, in true shapes."""
    weights = state.weights
    if self.task.eval_with_ema:
      weights = fill_in(state.learner.ema_weights, weights)
    true = self.model.abstract_state.variables
    return _reshaped(state.replace(weights=weights).variables, true)

  def evaluate(self, variables: Any, batches: Sequence[Batch]) -> Leaves:
    """Returns the metrics of an eval set: means over all tokens of weights other than 0."""
    task, totals = self.task, dict[str, Any]()
    for batch in batches:
      if not has_formula(task) and 'weights' in batch:  # what such a loss makes of other rows is its own
        is_example = np.any(batch['weights'] != 0, axis=tuple(range(1, batch['weights'].ndim)))
        batch = {name: rows[is_example] if rows.ndim else rows for name, rows in batch.items()}
      output = jax.device_get(self._evaluate(variables, batch))
      means = {**output.metrics, 'loss': (output.loss, 1.0 if output.is_sum else output.weight)}
      for name, (mean, weight) in means.items():
        total, count = totals.get(name, (0.0, 0.0))
        totals[name] = total + np.float64(mean) * weight, count + np.float64(weight)
    return {name: np.asarray(total / np.where(count == 0, 1, count)) for name, (total, count) in totals.items()}

  @functools.cached_property
  def _evaluate(self) -> Any:
    task = self.task

    def evaluate(variables, batch):
      with sharding_scope(self.model.mesh, self.model.axis_rules, self.model.inputs_split_mapping):
        if has_formula(task):
          unlabelled = {name: rows for name, rows in batch.items() if name != 'labels'}
          predictions = task.predict(variables, batch)
          if 'label_scores' in predictions:
            predictions = task.predict(variables, unlabelled)
          if 'nextn' not in predictions:
            return _formulas.language_model_loss(task.loss, predictions, batch)
        return task.compute_loss(variables, batch, train=False)

    return jax.jit(evaluate)

  def _updated(self, state: TrainState, new: TrainState, metrics: Leaves) -> StepResult:
    """Returns the step from `state` whose gradients and variables beside the weights are those of `new`."""
    gradients = new.learner.opt_state['gradients']
    with sharding_scope(self.model.mesh, self.model.axis_rules):
      weights, learner, of_learner = _formulas.update(
        self.task.learner,
        gradients,
        float(metrics['loss']),
        int(state.step),
        state.learner.replace(opt_state=state.learner.opt_state['optimizer']),
        state.weights,
        self.model.weight_specs,
        new.non_trainable.get(WEIGHT_FACTORS),
      )
    is_skipped = bool(of_learner['skipped'])
    learner = learner.replace(opt_state={'optimizer': learner.opt_state, 'gradients': gradients})
    result = state.replace(
      step=np.int32(state.step + (not is_skipped)),
      weights=weights,
      learner=learner,
      non_trainable=state.non_trainable if is_skipped else new.non_trainable,
    )
    all_metrics = {name: np.asarray(value) for name, value in {**metrics, **of_learner}.items()}
    return split_result(all_metrics, _reshaped(result, self.model.canonical_state), ())

  def _of_batch(self, state: TrainState, batch: Mapping[str, np.ndarray]) -> tuple[Leaves, Any, Any]:
    """Returns the metrics and the gradients of a batch, in float64, and its variables beside the weights."""
    task = self.task
    learner, count = task.learner, task.learner.num_microbatches
    if count > 1:
      batch = dict(task.loss.prepare_whole_batch(task, state.variables, batch, count))
    rng = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(state.rng), impl='threefry2x32'), state.step)
    rngs = [rng] if count == 1 else [jax.random.fold_in(rng, m) for m in range(count)]
    rows = [{name: values[m::count] for name, values in batch.items()} for m in range(count)]
    one = np.float32(1)
    computed = [self._call(state, part, key, one, one) for part, key in zip(rows, rngs, strict=True)]
    parts = [part for part, _ in computed]
    total, total_aux = (sum(float(getattr(part, name)) for part in parts) for name in ('weight', 'aux_weight'))
    shares = [float(part.weight) / (total or 1.0) for part in parts]
    aux_shares = [float(part.aux_weight) / (total_aux or 1.0) for part in parts]
    of_loss = [1.0] * count if parts[0].is_sum else shares  # of a sum, each part is whole
    # Aux losses are means, which count once a step. By accumulation='sum' the gradients of all are added.
    own, aux = ([1.0] * count,) * 2 if learner.accumulation == 'sum' else (of_loss, aux_shares)
    if own != [1.0] * count or aux != [1.0] * count:
      computed = [
        self._call(state, part, key, np.float32(a), np.float32(b)) for part, key, a, b in zip(rows, rngs, own, aux)
      ]
    gradients = jax.tree.map(lambda *each: sum(np.asarray(x, np.float64) for x in each), *[g for _, g in computed])
    if learner.accumulation == 'sum':
      aux_shares = of_loss
    metrics = {'loss': sum(a * float(p.loss) + b * float(p.aux_loss) for a, b, p in zip(of_loss, aux_shares, parts))}
    metrics['loss_weight'] = total
    for name in parts[0].metrics:
      means, weights = (np.array([np.float64(part.metrics[name][i]) for part in parts]) for i in (0, 1))
      by_part = weights.reshape(weights.shape + (1,) * (means.ndim - weights.ndim))
      metrics[name] = np.sum(means * by_part, axis=0) / np.where(
        np.sum(by_part, axis=0) == 0, 1, np.sum(by_part, axis=0)
      )
    updated = {
      name: jax.tree.map(functools.partial(_joined, name), *[part.updated[name] for part in parts])
      for name in parts[0].updated
    }
    return {name: np.asarray(value) for name, value in metrics.items()}, gradients, updated

  def _call(self, state: TrainState, rows: Batch, rng: jax.Array, share: Any, aux_share: Any) -> tuple[_Part, Any]:
    trained = without_frozen(state.weights, self.model.weight_specs)
    arguments = (trained, state.variables, rows, rng, share, aux_share)
    if self._program is None:
      self._program = self._gradient.lower(*arguments).compile()
    return jax.device_get(self._program(*arguments))

  def _compute_gradient(self, trained, variables, batch, rng, share, aux_share) -> tuple[_Part, Any]:
    """Returns what a microbatch gives, and the gradient of `share` of its loss with `aux_share` of its aux losses."""

    def total(trained):
      weights = fill_in(trained, variables['params'])
      with sharding_scope(self.model.mesh, self.model.axis_rules, self.model.inputs_split_mapping):
        part = _forward(self.task, variables | {'params': weights}, batch, rng)
      return share * part.loss + aux_share * part.aux_loss, part

    gradients, part = jax.grad(total, has_aux=True)(trained)
    return part, gradients


def _forward(task: Any, variables: Any, batch: dict[str, Any], rng: jax.Array) -> _Part:
  """Computes a microbatch in training."""
  beside = [name for name in variables if name != 'params']

  def predict(batch):
    positional, named = task.arguments(batch, train=True)
    with task.layer_context():
      predictions, updated = task.model.apply(
        variables | task.constants(variables, batch), *positional, **named, rngs={'dropout': rng}, mutable=beside
      )
    return predictions, declared_updates(updated, variables)

  predictions: Any = {'nextn': None}
  if has_formula(task):
    predictions, updated = predict(batch)
    if 'label_scores' in predictions:  # in place of the logits, where the model reads the labels
      predictions, updated = predict({name: values for name, values in batch.items() if name != 'labels'})
  if 'nextn' in predictions:  # or a loss without a formula
    output = task.compute_loss(variables, batch, train=True, rng=rng)
    updated = output.updated_variables
  else:
    output = _formulas.language_model_loss(task.loss, predictions, batch)
  aux_loss, aux_weight = jnp.float32(0), output.weight
  if isinstance(task.loss, WithAuxLosses):
    for name, share in task.loss.aux_loss_weights.items():
      mean, aux_weight = output.metrics[name]
      aux_loss += share * mean
  return _Part(
    loss=output.loss - aux_loss,
    aux_loss=aux_loss,
    aux_weight=aux_weight,
    weight=output.weight,
    metrics=output.metrics,
    updated=updated,
    is_sum=output.is_sum,
  )


def _joined(collection: str, *values: np.ndarray) -> np.ndarray:
  """A variable that each microbatch has updated: the mean, the last one of integers, of factors the smallest."""
  if collection == WEIGHT_FACTORS:
    return np.min(values, axis=0)
  if not np.issubdtype(values[0].dtype, np.floating):
    return values[-1]
  return np.mean(np.asarray(values, np.float64), axis=0).astype(values[0].dtype)


def _reshaped(tree: Any, shapes: Any) -> Any:
  return jax.tree.map(lambda x, shape: np.asarray(x).reshape(shape.shape), tree, shapes)
