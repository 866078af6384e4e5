"""Accumulates gradients over microbatches, so that only one microbatch's activations are in memory.

If the loss is a mean or a sum over tokens, the result is the gradient of the full batch. Aux losses are averaged over
microbatches, so they count once per step. The load-balancing loss of a mixture of experts still differs from the full
batch's, because it is a product of two means over a microbatch: it balances the experts within every microbatch. A
microbatch of weight 0 contributes nothing, even if its loss is NaN.

Shapes: B batch rows, M microbatches, E experts.
"""

from collections.abc import Callable
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.weights import WEIGHT_FACTORS

# (weights, batch, rng) -> (mean loss, loss output); see `accumulate_gradients`.
LossFn = Callable[[Any, Any, Any], tuple[jax.Array, Any]]


def check_num_microbatches(batch_size: int, num_microbatches: int) -> None:
  """Raises a UserError if the batch size is not divisible by the number of microbatches."""
  if batch_size % num_microbatches:
    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    nearest = min(divisors, key=lambda m: (abs(m - num_microbatches), m))
    raise UserError(
      f'a batch of {batch_size} rows is not divisible by num_microbatches={num_microbatches}: choose a divisor, such '
      f'as {nearest}, or another batch size.'
    )


def split_microbatches(batch: Any, num_microbatches: int) -> Any:
  """Reshapes leaves [B, ...] to [M, B/M, ...]; microbatch m has rows m, M + m, 2M + m, ...

  Shard p of P data shards has rows [p B/P, (p+1) B/P). With these strides, every shard contributes B/(PM) of its own
  rows to every microbatch, so no row moves. With consecutive rows, microbatch 0 would be on the first P/M shards only.
  Raises a UserError if leaves differ in their number of rows, or if the number is not divisible by M.
  """
  sizes = {leaf.shape[0] if leaf.ndim else -1 for leaf in jax.tree.leaves(batch)}
  if len(sizes) != 1 or -1 in sizes:
    shapes = jax.tree.map(lambda leaf: leaf.shape, batch)
    raise UserError(f'the batch has shapes {shapes}: give all arrays the same number of rows in dim 0.')
  check_num_microbatches(sizes.pop(), num_microbatches)

  def split(leaf: jax.Array) -> jax.Array:
    rows = leaf.reshape(leaf.shape[0] // num_microbatches, num_microbatches, *leaf.shape[1:])
    return jnp.swapaxes(rows, 0, 1)

  return jax.tree.map(split, batch)


def _num_with_tokens(batches_M: Any) -> jax.Array:
  """Returns the number of microbatches up to the last one with a token, at least 1."""
  segment_ids = batches_M['segment_ids']
  has_tokens = jnp.any(segment_ids > 0, axis=tuple(range(1, segment_ids.ndim)))
  return jnp.maximum(jnp.max(jnp.where(has_tokens, jnp.arange(1, len(has_tokens) + 1), 0)), 1)


def compute_in_parts(
  function: Callable[[Any], Any], batch: Any, num_microbatches: int, *, skips_empty: bool = False
) -> Any:
  """Computes function(batch), a tree of arrays [B, ...], microbatch by microbatch.

  With `skips_empty`, microbatches after the last one with a token (`segment_ids`) are not computed; their rows are 0.
  """
  if num_microbatches == 1:
    return function(batch)
  batches_M = split_microbatches(batch, num_microbatches)
  shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], batches_M))
  zeros_M = jax.tree.map(lambda x: jnp.zeros((num_microbatches, *x.shape), x.dtype), shapes)

  def compute(m: jax.Array, outputs_M: Any) -> Any:
    outputs = function(jax.tree.map(lambda x: x[m], batches_M))
    return jax.tree.map(lambda x_M, x: x_M.at[m].set(x), outputs_M, outputs)

  num_computed = _num_with_tokens(batches_M) if skips_empty else num_microbatches
  return jax.tree.map(_merge_microbatches, jax.lax.fori_loop(0, num_computed, compute, zeros_M))


def _merge_microbatches(rows_M: jax.Array) -> jax.Array:
  """Inverts `split_microbatches`: returns the rows of the batch in order."""
  return jnp.swapaxes(rows_M, 0, 1).reshape(-1, *rows_M.shape[2:])


def weighted_mean(means_M: jax.Array, weights_M: jax.Array) -> jax.Array:
  """Averages the microbatches' means [M, ...] by their weights [M, ...] in float32; 0 if all weights are 0.

  A mean with weight 0 may be NaN.
  """
  weights_M = weights_M.astype(jnp.float32)
  total = jnp.sum(weights_M, axis=0)
  weights_M = weights_M.reshape(*weights_M.shape, *[1] * (means_M.ndim - weights_M.ndim))
  weighted = jnp.where(weights_M == 0, 0.0, means_M.astype(jnp.float32) * weights_M)
  return jnp.sum(weighted, axis=0) / jnp.where(total == 0, 1.0, total)


def _combine(outputs_M: Any, *, adds_aux: bool) -> Any:
  """Combines M stacked loss outputs into one.

  Ignores outputs of weight 0; if all outputs have weight 0, uses the first.
  """
  loss, weight, aux_loss = outputs_M.loss, outputs_M.weight, outputs_M.aux_loss
  indices = jnp.arange(len(weight))
  is_used = jnp.where(jnp.any(weight != 0), weight != 0, indices == 0)
  substitutes = jnp.where(is_used, indices, jnp.argmax(is_used))  # the first used output replaces unused ones
  if adds_aux or aux_loss is None:
    aux_loss = None
  else:
    loss = loss - aux_loss[0]
    aux_loss = weighted_mean(*aux_loss), jnp.sum(aux_loss[1])
  loss = jnp.sum(jnp.where(weight != 0, loss, 0.0)) if outputs_M.is_sum else weighted_mean(loss, weight)

  def combine_variable(x_M: jax.Array, *, is_factor: bool) -> jax.Array:
    """Combines the values to which each microbatch updated a variable: the mean, or the last one for integers."""
    if is_factor:
      return jnp.min(x_M[substitutes], axis=0)
    is_float = jnp.issubdtype(x_M.dtype, jnp.floating)
    return weighted_mean(x_M, is_used).astype(x_M.dtype) if is_float else x_M[substitutes[-1]]

  def combine_summary(x_M: Any) -> Any:
    if not isinstance(x_M, jax.Array):  # a picture or a table
      return jax.tree.map(lambda leaf_M: leaf_M[substitutes[0]], x_M)
    return weighted_mean(x_M, is_used) if x_M.ndim == 1 else x_M[substitutes]

  return outputs_M.replace(
    loss=loss if aux_loss is None else loss + aux_loss[0],
    weight=jnp.sum(weight),
    aux_loss=aux_loss,
    metrics={name: (weighted_mean(means, w), jnp.sum(w, axis=0)) for name, (means, w) in outputs_M.metrics.items()},
    per_example={name: _merge_microbatches(rows) for name, rows in outputs_M.per_example.items()},
    summaries={name: combine_summary(x) for name, x in outputs_M.summaries.items()},
    updated_variables={
      name: jax.tree.map(functools.partial(combine_variable, is_factor=name == WEIGHT_FACTORS), tree)
      for name, tree in outputs_M.updated_variables.items()
    },
  )


def accumulate_gradients(
  loss_fn: LossFn,
  weights: Any,
  batch: Any,
  rng: jax.Array | None,
  num_microbatches: int,
  mode: Literal['mean', 'sum'] = 'mean',
  is_sum: Any = None,
  skips_empty: bool = False,
) -> tuple[Any, Any]:
  """Computes the loss output and the gradient of a batch, microbatch by microbatch.

  Args:
    loss_fn: `(weights, batch, rng) -> (loss, loss_output)`. `loss_output` is a LossOutput. The loss is a mean weighted
      by `loss_output.weight`, or a sum if `loss_output.is_sum`; gradients of a sum are added in both modes.
    weights: the gradient is taken with respect to these.
    batch: tree of arrays [B, ...]; B must be divisible by M.
    rng: microbatch m uses `fold_in(rng, m)`. May be None.
    num_microbatches: M.
    mode: 'mean' averages gradients by the microbatches' weights, which gives the full batch's gradient even if
      microbatches have different numbers of tokens. 'sum' adds gradients, as T5X does: choose the learning rate and the
      clipping threshold for M. It also adds aux losses, so that they count M times if the loss is a sum.
    is_sum: a tree of bools congruent to the weights. True marks a gradient that is a sum over tokens and not the
      derivative of a mean loss; it is added in both modes. None: no gradient is.
    skips_empty: whether to skip microbatches after the last one with a token (`segment_ids`): their loss, weight and
      metrics are 0.

  Returns:
    (loss_output, gradients). Gradients are float32 and congruent to the weights. Loss, metrics and `per_example` are
    the full batch's in both modes. Scalar summaries are averaged over microbatches, and other arrays are stacked; a
    tree of arrays, such as an Image, is taken from the first microbatch with a nonzero weight. Updated variables are
    averaged over microbatches; weight factors, which are bounds, take their minimum. Microbatches of weight 0 are
    ignored; in stacked summaries they repeat the first microbatch with a nonzero weight.
  """
  adds = mode == 'sum'
  if is_sum is None:
    is_sum = jax.tree.map(lambda _: False, weights)
  batches_M, indices_M = split_microbatches(batch, num_microbatches), jnp.arange(num_microbatches)

  def compute(weights: Any, m: jax.Array, microbatch: Any) -> tuple[jax.Array, Any]:
    return loss_fn(weights, microbatch, None if rng is None else jax.random.fold_in(rng, m))

  aux_factors_M = None if adds else _aux_factors(functools.partial(compute, weights), indices_M, batches_M)

  def add_microbatch(total: Any, m_and_batch: tuple[jax.Array, Any]) -> tuple[Any, Any]:
    m, microbatch = m_and_batch

    def loss_with_scaled_aux(weights: Any) -> tuple[jax.Array, Any]:
      loss, output = compute(weights, m, microbatch)
      return loss if aux_factors_M is None else loss + (aux_factors_M[m] - 1) * output.aux_loss[0], output

    grads, loss_output = jax.grad(loss_with_scaled_aux, has_aux=True)(weights)
    weight = loss_output.weight.astype(jnp.float32)
    scale = 1.0 if adds or loss_output.is_sum else weight

    def add(total: jax.Array, grad: jax.Array, is_sum: bool) -> jax.Array:
      grad = grad.astype(jnp.float32)
      return total + (grad if is_sum else jnp.where(weight == 0, 0.0, scale * grad))

    return jax.tree.map(add, total, grads, is_sum), loss_output

  zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
  if skips_empty:
    first = jax.tree.map(lambda x: x[0], batches_M)
    outputs = jax.eval_shape(add_microbatch, zeros, (indices_M[0], first))[1]
    zero_outputs_M = jax.tree.map(lambda x: jnp.zeros((num_microbatches, *x.shape), x.dtype), outputs)

    def add(m: jax.Array, carry: Any) -> Any:
      total, output = add_microbatch(carry[0], (m, jax.tree.map(lambda x: x[m], batches_M)))
      return total, jax.tree.map(lambda x_M, x: x_M.at[m].set(x), carry[1], output)

    grads, loss_outputs_M = jax.lax.fori_loop(0, _num_with_tokens(batches_M), add, (zeros, zero_outputs_M))
  else:
    grads, loss_outputs_M = jax.lax.scan(add_microbatch, zeros, (indices_M, batches_M))
  loss_output = _combine(loss_outputs_M, adds_aux=adds)
  if adds or loss_output.is_sum:
    return loss_output, grads
  total_weight = loss_output.weight.astype(jnp.float32)
  # The gradient of a batch without tokens is 0, and stays 0.
  inverse = 1 / jnp.where(total_weight == 0, 1.0, total_weight)
  return loss_output, jax.tree.map(lambda g, is_sum: g if is_sum else g * inverse, grads, is_sum)


def _aux_factors(compute: Callable[..., tuple[jax.Array, Any]], indices_M: jax.Array, batches_M: Any) -> Any:
  """Returns the factors [M] of the microbatches' aux losses by which they count once; None if there is no aux loss.

  The total has the loss of a microbatch, `compute(m, microbatch)`, as it is if it is a sum, else times its weight.
  """
  abstract = jax.eval_shape(compute, indices_M[0], jax.tree.map(lambda x: x[0], batches_M))[1]
  if abstract.aux_loss is None:
    return None

  def weights_of(m_and_batch: tuple[jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
    output = compute(*m_and_batch)[1]
    weight = jnp.ones((), jnp.float32) if output.is_sum else output.weight.astype(jnp.float32)
    return weight, output.aux_loss[1].astype(jnp.float32)

  # Usually weights depend only on the batch, so the compiler removes the model.
  weight, aux_weight = jax.lax.map(weights_of, (indices_M, batches_M))
  shares = aux_weight / jnp.where(jnp.sum(aux_weight) == 0, 1.0, jnp.sum(aux_weight))
  return shares if abstract.is_sum else shares * jnp.sum(weight) / jnp.where(weight == 0, 1.0, weight)
