"""Turns what Paxml's train and eval steps report into metrics of ours: losses, weighted scalars, summaries, norms."""

from typing import Any

from clu import metrics as clu_metrics
import jax
import jax.numpy as jnp
from paxml import base_metrics
from praxis import py_utils

from spmd_tasks.errors import UserError
from spmd_tasks.runtime.task import Variables

# Metrics of ours by the name of the summary that Paxml's learner makes of the same number.
_LEARNER_SUMMARIES = {'grad_norm': 'learning/raw_grad_norm', 'learning_rate': 'learning/lr'}


def train_metrics(task: Any, output: Any, squares: Any) -> dict[str, jax.Array]:
  """Returns the metrics of a train step, float32, scalars or vectors.

  Args:
    task: the SingleTask.
    output: the `trainer_lib.StepFnOutput` of its step.
    squares: the sums of the squares of the new weights, a tree.
  """
  summaries = _scalar_summaries(output.summary_tensors)
  metrics = {name: value for name, (value, _) in output.weighted_scalars.items()} | summaries
  metrics |= _computed(output.clu_metrics or {})
  metrics |= {ours: summaries[theirs] for ours, theirs in _LEARNER_SUMMARIES.items() if theirs in summaries}
  metrics |= {
    'loss': output.loss,
    'loss_weight': _loss_weight(task, output),
    'skipped': jnp.zeros(()),
    'weight_norm': jnp.sqrt(jax.tree.reduce(jnp.add, squares)),
  }
  return {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items() if jnp.ndim(value) <= 1}


def eval_metrics(task: Any, output: Any) -> dict[str, clu_metrics.Metric]:
  """Returns averages of an eval step's weighted scalars and loss, and the metrics of clu that the model returns."""
  means = dict(output.weighted_scalars) | {'loss': (output.loss, _loss_weight(task, output))}
  averages = {}
  for name, (mean, weight) in means.items():  # numbers of Python among them
    mean, weight = jnp.asarray(mean, jnp.float32), jnp.asarray(weight, jnp.float32)
    averages[name] = clu_metrics.Average(total=mean * weight, count=weight)
  return dict(output.clu_metrics or {}) | averages


def check_loss_names(aggregator: Any) -> None:
  """Makes Paxml's aggregator of losses name a loss that the model does not return, where it only asserts."""
  if type(aggregator) is not base_metrics.LossAggregator:
    return
  aggregate = aggregator.aggregate

  def checked(losses: Any) -> Any:
    if aggregator.loss_key not in losses:
      raise UserError(
        f'task.train.learner.loss_name = {aggregator.loss_key!r} is none of the losses that compute_loss of the model '
        f'returns first: take one of {sorted(losses)}.'
      )
    return aggregate(losses)

  aggregator.aggregate = checked


def _computed(metrics: Any) -> dict[str, jax.Array]:
  """Returns the values of metrics of clu that can be computed on devices; others are seen in evals alone."""
  found = {}
  for name, metric in metrics.items():
    try:
      value = metric.compute()
    except jax.errors.JAXTypeError:  # by NumPy on the host
      continue
    if isinstance(value, jax.Array):
      found[name] = value
  return found


def _loss_weight(task: Any, output: Any) -> jax.Array:
  name = task.learners[0].loss_name
  if name in (output.clu_metrics or {}):
    return jnp.asarray(output.clu_metrics[name].weight)
  if name in output.weighted_scalars:
    return jnp.asarray(output.weighted_scalars[name][1])
  return jnp.ones(())  # several losses are added up: Paxml has no weight of their sum


def variable_norms(variables: Variables, squares: Any) -> dict[str, jax.Array]:
  """Returns what Paxml summarises, by its names: the root of the mean square of each variable.

  `squares` are the sums of the squares of the weights.
  """
  others = {name: tree for name, tree in variables.items() if name != 'params'}
  sums = {'params': squares} | jax.tree.map(lambda x: jnp.sum(jnp.square(x.astype(jnp.float32))), others)
  norms = jax.tree.map(lambda total, x: jnp.sqrt(total / x.size), sums, variables)
  return {
    f'vars/{jax.tree_util.keystr(path, simple=True, separator="/")}': norm
    for path, norm in jax.tree_util.tree_leaves_with_path(norms)
  }


def _scalar_summaries(summaries: Any) -> dict[str, jax.Array]:
  """Returns the summaries that are one number, by the name that Paxml gave, without the type at its end."""
  found: dict[str, Any] = {}
  for name, value in py_utils.NestedMap(summaries).FlattenItems():
    values = value if isinstance(value, list | tuple) else [value]
    if all(hasattr(item, 'ndim') and item.ndim == 0 for item in values):
      found[name.removesuffix('_scalar').removesuffix('_aggregate')] = sum(values) / len(values)
  return found
