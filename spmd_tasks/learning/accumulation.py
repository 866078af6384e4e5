"""Accumulates the gradient of a large batch over microbatches: one microbatch's activations are alive at a time.

If the loss is a mean or a sum over tokens, the result is the full batch's gradient. Aux losses count once per step:
the microbatches average them. The load-balancing loss of a mixture of experts is then still another number than that of
the full batch: a product of two means, each taken over one microbatch, it balances the experts within every microbatch.
A microbatch of weight 0 contributes nothing, even if its loss is NaN.

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
  """Raises a UserError if the batch cannot be cut into that many equal parts."""
  if batch_size % num_microbatches:
    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    nearest = min(divisors, key=lambda m: (abs(m - num_microbatches), m))
    raise UserError(
      f'a batch of {batch_size} rows cannot be cut into num_microbatches = {num_microbatches} equal parts: choose a '
      f'divisor of the batch size ({nearest} is the nearest), or a batch size that is a multiple of {num_microbatches}.'
    )


def split_microbatches(batch: Any, num_microbatches: int) -> Any:
  """Reshapes leaves [B, ...] to [M, B/M, ...]; microbatch m holds rows m, M + m, 2M + m, ...

  Shard p of P data shards has rows [p B/P, (p+1) B/P). With strides, each shard gives B/(PM) of its own rows to every
  microbatch, so no row moves and every shard has work in every microbatch. In blocks, microbatch 0 would lie entirely
  on the first P/M shards. Raises a UserError if leaves differ in their number of rows, or M does not divide it.
  """
  sizes = {leaf.shape[0] if leaf.ndim else -1 for leaf in jax.tree.leaves(batch)}
  if len(sizes) != 1 or -1 in sizes:
    shapes = jax.tree.map(lambda leaf: leaf.shape, batch)
    raise UserError(f'the batch has shapes {shapes}; all its arrays must have the same number of rows in dim 0.')
  check_num_microbatches(sizes.pop(), num_microbatches)

  def split(leaf: jax.Array) -> jax.Array:
    rows = leaf.reshape(leaf.shape[0] // num_microbatches, num_microbatches, *leaf.shape[1:])
    return jnp.swapaxes(rows, 0, 1)

  return jax.tree.map(split, batch)


def _num_with_tokens(batches_M: Any) -> jax.Array:
  """How many microbatches there are up to the last one with a token, at least 1."""
  segment_ids = batches_M['segment_ids']
  has_tokens = jnp.any(segment_ids > 0, axis=tuple(range(1, segment_ids.ndim)))
  return jnp.maximum(jnp.max(jnp.where(has_tokens, jnp.arange(1, len(has_tokens) + 1), 0)), 1)


def compute_in_parts(
  function: Callable[[Any], Any], batch: Any, num_microbatches: int, *, skips_empty: bool = False
) -> Any:
  """Returns function(batch), arrays [B, ...] of its rows, computed microbatch by microbatch.

  With `skips_empty` those behind the last one with a token (`segment_ids`) are not computed: their rows are zeros.
  """
  if num_microbatches == 1:
    return function(batch)
  batches_M = split_microbatches(batch, num_microbatches)
  shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], batches_M))
  nothing = jax.tree.map(lambda x: jnp.zeros((num_microbatches, *x.shape), x.dtype), shapes)

  def add(m: jax.Array, made: Any) -> Any:
    rows = function(jax.tree.map(lambda x: x[m], batches_M))
    return jax.tree.map(lambda all_of, x: all_of.at[m].set(x), made, rows)

  num_used = _num_with_tokens(batches_M) if skips_empty else num_microbatches
  made = jax.lax.fori_loop(0, num_used, add, nothing)
  return jax.tree.map(_joined, made)


def _joined(rows_M: jax.Array) -> jax.Array:
  """The rows of a batch, of which microbatch m has rows m, M + m, ..."""
  return jnp.swapaxes(rows_M, 0, 1).reshape(-1, *rows_M.shape[2:])


def weighted_mean(means_M: jax.Array, weights_M: jax.Array) -> jax.Array:
  """Averages the microbatches' means [M, ...] by their weights [M, ...], in float32; 0 where all weights are 0.

  A mean of weight 0 may be NaN.
  """
  weights_M = weights_M.astype(jnp.float32)
  total = jnp.sum(weights_M, axis=0)
  weights_M = weights_M.reshape(*weights_M.shape, *[1] * (means_M.ndim - weights_M.ndim))
  weighted = jnp.where(weights_M == 0, 0.0, means_M.astype(jnp.float32) * weights_M)
  return jnp.sum(weighted, axis=0) / jnp.where(total == 0, 1.0, total)


def _combine(outputs_M: Any, *, adds_aux: bool) -> Any:
  """Combines M stacked loss outputs into one. Those of weight 0 are left out; of all of them, the first is taken."""
  loss, weight, aux_loss = outputs_M.loss, outputs_M.weight, outputs_M.aux_loss
  numbers = jnp.arange(len(weight))
  is_used = jnp.where(jnp.any(weight != 0), weight != 0, numbers == 0)
  stands_in = jnp.where(is_used, numbers, jnp.argmax(is_used))
  if adds_aux or aux_loss is None:
    aux_loss = None
  else:
    loss = loss - aux_loss[0]
    aux_loss = weighted_mean(*aux_loss), jnp.sum(aux_loss[1])
  loss = jnp.sum(jnp.where(weight != 0, loss, 0.0)) if outputs_M.is_sum else weighted_mean(loss, weight)

  def updated(x_M: jax.Array, *, is_factor: bool) -> jax.Array:
    """Of a variable that each microbatch updated from the same old value; integers are the last microbatch's."""
    if is_factor:
      return jnp.min(x_M[stands_in], axis=0)
    is_float = jnp.issubdtype(x_M.dtype, jnp.floating)
    return weighted_mean(x_M, is_used).astype(x_M.dtype) if is_float else x_M[stands_in[-1]]

  return outputs_M.replace(
    loss=loss if aux_loss is None else loss + aux_loss[0],
    weight=jnp.sum(weight),
    aux_loss=aux_loss,
    metrics={name: (weighted_mean(means, w), jnp.sum(w, axis=0)) for name, (means, w) in outputs_M.metrics.items()},
    per_example={name: _joined(rows) for name, rows in outputs_M.per_example.items()},
    summaries={
      name: weighted_mean(x, is_used) if x.ndim == 1 else x[stands_in] for name, x in outputs_M.summaries.items()
    },
    updated_variables={
      name: jax.tree.map(functools.partial(updated, is_factor=name == WEIGHT_FACTORS), tree)
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
    loss_fn: `(weights, batch, rng) -> (loss, loss_output)`. The loss is a mean weighted by `loss_output.weight`, or,
      where `loss_output.is_sum`, a sum, of which gradients are added in both modes. `loss_output` is a LossOutput.
    weights: the gradient is taken with respect to these.
    batch: tree of arrays [B, ...], whose B `num_microbatches`, M, must divide.
    rng: microbatch m gets `fold_in(rng, m)`. May be None.
    mode: 'mean': gradients are averaged by the microbatches' weights, which gives the full batch's gradient even if
      microbatches have different numbers of tokens. 'sum': gradients are added, as T5X does; learning rate and clipping
      threshold must then suit M. Aux losses are added too, so that they count M times beside a loss that is a sum.
    is_sum: a tree of bools congruent to the weights: which gradients are sums over the tokens, not derivatives of the
      mean loss, and are added in both modes; None for none.
    skips_empty: whether microbatches behind the last one with a token (`segment_ids`) are not computed: their loss,
      weight and metrics are 0.

  Returns:
    (loss_output, gradients). Gradients are float32 and congruent to the weights. Loss, metrics and `per_example` are
    those of the full batch in both modes. Summaries that are scalars are means over microbatches, others are stacked.
    Updated variables are the mean over microbatches; of factors of weights, which bound something, the smallest.
    Microbatches of weight 0 are left out; among stacked summaries, the first with a weight stands for each of them.
  """
  adds = mode == 'sum'
  if is_sum is None:
    is_sum = jax.tree.map(lambda _: False, weights)
  batches_M, numbers = split_microbatches(batch, num_microbatches), jnp.arange(num_microbatches)

  def compute(weights: Any, m: jax.Array, microbatch: Any) -> tuple[jax.Array, Any]:
    return loss_fn(weights, microbatch, None if rng is None else jax.random.fold_in(rng, m))

  aux_factors_M = None if adds else _aux_factors(functools.partial(compute, weights), numbers, batches_M)

  def add_microbatch(total: Any, m_and_batch: tuple[jax.Array, Any]) -> tuple[Any, Any]:
    m, microbatch = m_and_batch

    def scaled(weights: Any) -> tuple[jax.Array, Any]:
      loss, output = compute(weights, m, microbatch)
      return loss if aux_factors_M is None else loss + (aux_factors_M[m] - 1) * output.aux_loss[0], output

    grads, loss_output = jax.grad(scaled, has_aux=True)(weights)
    weight = loss_output.weight.astype(jnp.float32)
    scale = 1.0 if adds or loss_output.is_sum else weight

    def add(total: jax.Array, grad: jax.Array, counts: bool) -> jax.Array:
      grad = grad.astype(jnp.float32)
      return total + (grad if counts else jnp.where(weight == 0, 0.0, scale * grad))

    return jax.tree.map(add, total, grads, is_sum), loss_output

  zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
  if skips_empty:
    parts = jax.tree.map(lambda x: x[0], batches_M)
    outputs = jax.eval_shape(add_microbatch, zeros, (numbers[0], parts))[1]
    nothing = jax.tree.map(lambda x: jnp.zeros((num_microbatches, *x.shape), x.dtype), outputs)

    def add(m: jax.Array, carry: Any) -> Any:
      total, output = add_microbatch(carry[0], (m, jax.tree.map(lambda x: x[m], batches_M)))
      return total, jax.tree.map(lambda all_of, x: all_of.at[m].set(x), carry[1], output)

    grads, loss_outputs_M = jax.lax.fori_loop(0, _num_with_tokens(batches_M), add, (zeros, nothing))
  else:
    grads, loss_outputs_M = jax.lax.scan(add_microbatch, zeros, (numbers, batches_M))
  loss_output = _combine(loss_outputs_M, adds_aux=adds)
  if adds or loss_output.is_sum:
    return loss_output, grads
  total_weight = loss_output.weight.astype(jnp.float32)
  # A batch without tokens has gradient 0, and the guarded division keeps it 0.
  inverse = 1 / jnp.where(total_weight == 0, 1.0, total_weight)
  return loss_output, jax.tree.map(lambda g, counts: g if counts else g * inverse, grads, is_sum)


def _aux_factors(compute: Callable[..., tuple[jax.Array, Any]], numbers: jax.Array, batches_M: Any) -> Any:
  """Returns [M], by what to multiply the aux loss of each microbatch so that it counts once; None if there is none.

  The loss of a microbatch, `compute(m, microbatch)`, is in the total once if it is a sum, and by its weight otherwise.
  """
  abstract = jax.eval_shape(compute, numbers[0], jax.tree.map(lambda x: x[0], batches_M))[1]
  if abstract.aux_loss is None:
    return None

  def weights_of(m_and_batch: tuple[jax.Array, Any]) -> tuple[jax.Array, jax.Array]:
    output = compute(*m_and_batch)[1]
    weight = jnp.ones((), jnp.float32) if output.is_sum else output.weight.astype(jnp.float32)
    return weight, output.aux_loss[1].astype(jnp.float32)

  # They depend on the batch alone as a rule: the compiler leaves out the model.
  weight, aux_weight = jax.lax.map(weights_of, (numbers, batches_M))
  shares = aux_weight / jnp.where(jnp.sum(aux_weight) == 0, 1.0, jnp.sum(aux_weight))
  return shares if abstract.is_sum else shares * jnp.sum(weight) / jnp.where(weight == 0, 1.0, weight)
