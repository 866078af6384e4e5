"""FormulaRunner: a train step on one device, written from its formulas, as a reference for errors of all layouts.

It has the interface of a Runner that a Trajectory uses. It computes the gradient of each microbatch separately,
combines microbatches in float64, and computes the learner's update in float64. It shares no code with the train step,
with accumulation or with the learner. The rows and random numbers of a microbatch are those of the docs: microbatch m
of M has rows m, M + m, 2M + m, ..., and the rng `fold_in(rng of the step, m)`, or the rng of the step if M is 1; the
rng of step s is `fold_in(base, s)`.

The average of the weights starts at zero here, because an average that starts at the weights hardly differs from them.
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


def no_formula_reason(task: Any) -> str | None:
  """Returns why there are no formulas for a task's steps; None if there are."""
  if type(task).train_step is not Task.train_step:
    return f'{type(task).__name__} has a train step of its own'
  return None if type(task.learner) is Learner else f'{type(task.learner).__name__} is a learner of its own'


def has_formula(task: Task) -> bool:
  """Returns whether _formulas.py has the formula of a task's loss."""
  return _formulas.has_loss_formula(task.loss) and type(task).compute_loss is Task.compute_loss


class _MicrobatchOutput(struct.PyTreeNode):
  """The loss output of a microbatch: `loss` excludes aux losses; the other fields are as in LossOutput."""

  loss: jax.Array
  aux_loss: jax.Array
  aux_weight: jax.Array
  weight: jax.Array
  metrics: dict[str, tuple[jax.Array, jax.Array]]
  updated: Mapping[str, Any]
  is_sum: bool = struct.field(pytree_node=False)


class FormulaRunner:
  """The experiment in one setting, on one device."""

  # The learner's float32 bias correction 1 - beta^n has few significant bits.
  update_epsilon = 2.0**-20

  def __init__(self, source: Source, setting: Setting):
    self.setting = setting
    self._runner = Runner(source, dataclasses.replace(setting, mesh=(), slices=None, by_formulas=False))
    self.job, self.task, self.model = self._runner.job, self._runner.task, self._runner.model
    self._gradient = jax.jit(self._compute_gradient)
    self._program: Any = None

  def init(self) -> TrainState:
    """Returns the canonical state at step 0."""
    return self._runner.init()

  def start(self, state: TrainState) -> TrainState:
    """Returns the state at which comparisons start, with averages of zero."""
    return state.replace(
      learner=state.learner.replace(ema_weights=jax.tree.map(np.zeros_like, state.learner.ema_weights))
    )

  @property
  def epsilon(self) -> float:
    """The rounding unit of the coarsest dtype in the computation of the gradient."""
    assert self._program is not None, 'call step first'
    return rounding_unit(self._program)

  def step(self, canonical: TrainState, batch: Mapping[str, np.ndarray]) -> StepResult:
    """Takes one step from a canonical state."""
    state = _reshape(canonical, self.model.abstract_state)
    metrics, gradients, updated = self._compute_batch(state, batch)
    learner = state.learner.replace(opt_state={**state.learner.opt_state, 'gradients': gradients})
    others = self.task.with_averages(state.non_trainable, state.non_trainable | updated, state.step)
    new_state = state.replace(learner=learner, non_trainable=others)
    return self._apply_learner(state, new_state, metrics)

  def steps(self, canonical: TrainState, batches: Sequence[Batch]) -> list[StepResult]:
    """Takes consecutive steps."""
    results: list[StepResult] = []
    for batch in batches:
      results.append(self.step(results[-1].state if results else canonical, batch))
    return results

  def losses(self, canonical: TrainState, batches: Sequence[Batch]) -> np.ndarray:
    """Takes consecutive steps. Returns their losses, float64."""
    return np.array([float(result.forward['loss']) for result in self.steps(canonical, batches)])

  def learner_update(self, before: TrainState, result: StepResult) -> Leaves:
    """Applies the learner to the gradients and the loss of a step."""
    state, new_state = (_reshape(tree, self.model.abstract_state) for tree in (before, result.state))
    return self._apply_learner(state, new_state, {'loss': result.forward['loss']}).updated

  @property
  def gradient_shapes(self) -> Any:
    """The canonical shapes of the gradients."""
    return self.model.canonical_state.learner.opt_state['gradients']

  def evaluation_variables(self, state: TrainState) -> Any:
    """Returns the variables to evaluate of a canonical state, in true shapes."""
    variables = self.task.evaluation_variables(state)
    if self.task.eval_with_ema:
      variables |= {'params': fill_in(state.learner.ema_weights, state.weights)}
    return _reshape(variables, self.model.abstract_state.variables)

  def evaluate(self, variables: Any, batches: Sequence[Batch]) -> Leaves:
    """Returns the metrics of an eval set: means over all tokens with nonzero weights."""
    task, totals = self.task, dict[str, Any]()
    for batch in batches:
      if not has_formula(task) and 'weights' in batch:  # such a loss may treat rows of weight 0 in any way
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
      with self.model.scope():
        if has_formula(task):
          predictions = task.predict(variables, batch)
          if 'nextn' not in predictions:
            return _formulas.language_model_loss(task.loss, predictions, batch)
        return task.compute_loss(variables, batch, train=False)

    return jax.jit(evaluate)

  def _apply_learner(self, state: TrainState, new_state: TrainState, metrics: Leaves) -> StepResult:
    """Completes the step from `state`, given the gradients and the non-trainable variables of `new_state`."""
    gradients = new_state.learner.opt_state['gradients']
    with sharding_scope(self.model.mesh, self.model.axis_rules):
      weights, learner, learner_metrics = _formulas.update(
        self.task.learner,
        gradients,
        float(metrics['loss']),
        int(state.step),
        state.learner.replace(opt_state=state.learner.opt_state['optimizer']),
        state.weights,
        self.model.weight_specs,
        new_state.non_trainable.get(WEIGHT_FACTORS),
      )
    is_skipped = bool(learner_metrics['skipped'])
    learner = learner.replace(opt_state={'optimizer': learner.opt_state, 'gradients': gradients})
    result = state.replace(
      step=np.int32(state.step + (not is_skipped)),
      weights=weights,
      learner=learner,
      non_trainable=state.non_trainable if is_skipped else new_state.non_trainable,
    )
    all_metrics = {name: np.asarray(value) for name, value in {**metrics, **learner_metrics}.items()}
    return split_result(all_metrics, _reshape(result, self.model.canonical_state), ())

  def _compute_batch(self, state: TrainState, batch: Mapping[str, np.ndarray]) -> tuple[Leaves, Any, Any]:
    """Returns the metrics and gradients of a batch, in float64, and its updated non-trainable variables."""
    task = self.task
    learner, count = task.learner, task.learner.num_microbatches
    if count > 1:
      batch = dict(task.loss.prepare_whole_batch(task, state.variables, batch, count))
    rng = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(state.rng), impl='threefry2x32'), state.step)
    rngs = [rng] if count == 1 else [jax.random.fold_in(rng, m) for m in range(count)]
    rows = [{name: values[m::count] for name, values in batch.items()} for m in range(count)]
    ones = [1.0] * count
    results = [self._call(state, *microbatch, 1.0, 1.0) for microbatch in zip(rows, rngs, strict=True)]
    outputs = [output for output, _ in results]
    total, total_aux = (sum(float(getattr(output, name)) for output in outputs) for name in ('weight', 'aux_weight'))
    shares = ones if outputs[0].is_sum else [float(output.weight) / (total or 1.0) for output in outputs]
    aux_shares = [float(output.aux_weight) / (total_aux or 1.0) for output in outputs]
    # Aux losses are means that count once per step. accumulation='sum' adds all gradients.
    factors, aux_factors = (ones, ones) if learner.accumulation == 'sum' else (shares, aux_shares)
    if (factors, aux_factors) != (ones, ones):
      results = [self._call(state, *microbatch) for microbatch in zip(rows, rngs, factors, aux_factors)]
    gradients = jax.tree.map(
      lambda *parts: sum(np.asarray(part, np.float64) for part in parts), *[gradients for _, gradients in results]
    )
    if learner.accumulation == 'sum':
      aux_shares = shares
    losses = [a * float(o.loss) + b * float(o.aux_loss) for a, b, o in zip(shares, aux_shares, outputs)]
    metrics = {'loss': sum(losses), 'loss_weight': total}
    for name in outputs[0].metrics:
      means, weights = (np.array([np.float64(output.metrics[name][i]) for output in outputs]) for i in (0, 1))
      weights = weights.reshape(weights.shape + (1,) * (means.ndim - weights.ndim))
      sums = np.sum(weights, axis=0)
      metrics[name] = np.sum(means * weights, axis=0) / np.where(sums == 0, 1, sums)
    updated = {
      name: jax.tree.map(functools.partial(_combine_variable, name), *[output.updated[name] for output in outputs])
      for name in outputs[0].updated
    }
    return {name: np.asarray(value) for name, value in metrics.items()}, gradients, updated

  def _call(
    self, state: TrainState, rows: Batch, rng: jax.Array, factor: float, aux_factor: float
  ) -> tuple[_MicrobatchOutput, Any]:
    trained = without_frozen(state.weights, self.model.weight_specs)
    arguments = (trained, state.variables, rows, rng, np.float32(factor), np.float32(aux_factor))
    if self._program is None:
      self._program = self._gradient.lower(*arguments).compile()
    return jax.device_get(self._program(*arguments))

  def _compute_gradient(self, trained, variables, batch, rng, factor, aux_factor) -> tuple[_MicrobatchOutput, Any]:
    """Returns the output of a microbatch, and the gradient of `factor * loss + aux_factor * aux losses`."""

    def total(trained):
      weights = fill_in(trained, variables['params'])
      with self.model.scope():
        output = _forward(self.task, variables | {'params': weights}, batch, rng)
      return factor * output.loss + aux_factor * output.aux_loss, output

    gradients, output = jax.grad(total, has_aux=True)(trained)
    return output, gradients


def _forward(task: Any, variables: Any, batch: dict[str, Any], rng: jax.Array) -> _MicrobatchOutput:
  """Runs the training forward pass of a microbatch."""
  mutable = [name for name in variables if name != 'params']

  predictions: Any = {'nextn': None}
  if has_formula(task):
    positional, named = task.arguments(batch, train=True)
    with task.layer_context():
      predictions, updated = task.model.apply(
        variables | task.constants(variables, batch), *positional, **named, rngs={'dropout': rng}, mutable=mutable
      )
    updated = declared_updates(updated, variables)
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
  return _MicrobatchOutput(
    loss=output.loss - aux_loss,
    aux_loss=aux_loss,
    aux_weight=aux_weight,
    weight=output.weight,
    metrics=output.metrics,
    updated=updated,
    is_sum=output.is_sum,
  )


def _combine_variable(collection: str, *values: np.ndarray) -> np.ndarray:
  """Combines a variable's updates: the mean, the last one for integers, the smallest for weight factors."""
  if collection == WEIGHT_FACTORS:
    return np.min(values, axis=0)
  if not np.issubdtype(values[0].dtype, np.floating):
    return values[-1]
  return np.mean(np.asarray(values, np.float64), axis=0).astype(values[0].dtype)


def _reshape(tree: Any, shapes: Any) -> Any:
  return jax.tree.map(lambda x, shape: np.asarray(x).reshape(shape.shape), tree, shapes)
