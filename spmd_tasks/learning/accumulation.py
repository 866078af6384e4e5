"""Accumulates the gradient of a large batch over microbatches: one microbatch's activations are alive at a time.

If the loss is a mean over tokens, the result is the gradient of the full batch. The load-balancing loss of a mixture of
experts is not: a product of two means, each taken over one microbatch, it balances the experts within every microbatch.

Shapes: B batch rows, M microbatches, E experts.
"""

from collections.abc import Callable
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
  """Averages the microbatches' means [M, ...] by their weights [M, ...], in float32; 0 where all weights are 0."""
  weights_M = weights_M.astype(jnp.float32)
  total = jnp.sum(weights_M, axis=0)
  weighted = means_M.astype(jnp.float32) * weights_M.reshape(*weights_M.shape, *[1] * (means_M.ndim - weights_M.ndim))
  return jnp.sum(weighted, axis=0) / jnp.where(total == 0, 1.0, total)


def _combine(outputs_M: Any, num_used: jax.Array | None) -> Any:
  """Combines M stacked loss outputs into one; with `num_used` those behind the first ones are zeros."""
  loss, weight = outputs_M.loss, outputs_M.weight
  if num_used is not None:
    is_used = jnp.arange(len(loss)) < num_used
    stands_in = {name: getattr(outputs_M, name) for name in ('summaries', 'updated_variables')}
    outputs_M = outputs_M.replace(**jax.tree.map(lambda x: x[jnp.where(is_used, jnp.arange(len(x)), 0)], stands_in))
  return outputs_M.replace(
    loss=jnp.sum(loss) if outputs_M.is_sum else weighted_mean(loss, weight),
    weight=jnp.sum(weight),
    metrics={name: (weighted_mean(means, w), jnp.sum(w, axis=0)) for name, (means, w) in outputs_M.metrics.items()},
    per_example={name: _joined(rows) for name, rows in outputs_M.per_example.items()},
    summaries={name: jnp.mean(each) if each.ndim == 1 else each for name, each in outputs_M.summaries.items()},
    updated_variables={
      name: jax.tree.map((lambda x: jnp.min(x, axis=0)) if name == WEIGHT_FACTORS else _mean_of_updates, tree)
      for name, tree in outputs_M.updated_variables.items()
    },
  )


def _mean_of_updates(values_M: jax.Array) -> jax.Array:
  """Averages a variable that each microbatch updated from the same old value; integers are the last microbatch's."""
  if not jnp.issubdtype(values_M.dtype, jnp.floating):
    return values_M[-1]
  return jnp.mean(values_M.astype(jnp.float32), axis=0).astype(values_M.dtype)


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
      where `loss_output.is_sum`, a sum, of which gradients are added in both modes. `loss_output` is like a LossOutput.
    weights: the gradient is taken with respect to these.
    batch: tree of arrays [B, ...], whose B `num_microbatches`, M, must divide.
    rng: microbatch m gets `fold_in(rng, m)`. May be None.
    mode: 'mean': gradients are averaged by the microbatches' weights, which gives the full batch's gradient even if
      microbatches have different numbers of tokens. 'sum': gradients are added, as T5X does; learning rate and clipping
      threshold must then suit M.
    is_sum: a tree of bools congruent to the weights: which gradients are sums over the tokens, not derivatives of the
      mean loss, and are added in both modes; None for none.
    skips_empty: whether microbatches behind the last one with a token (`segment_ids`) are not computed: their loss,
      weight and metrics are 0, and in summaries and updated variables the first one stands for each of them.

  Returns:
    (loss_output, gradients). Gradients are float32 and congruent to the weights. Loss, metrics and `per_example` are
    those of the full batch in both modes. Summaries that are scalars are means over microbatches, others are stacked.
    Updated variables are the mean over microbatches; of factors of weights, which bound something, the smallest.
  """
  grad_fn = jax.grad(loss_fn, has_aux=True)
  if is_sum is None or mode == 'sum':
    is_sum = jax.tree.map(lambda _: mode == 'sum', weights)
  batches_M = split_microbatches(batch, num_microbatches)

  def add_microbatch(total: Any, m_and_batch: tuple[jax.Array, Any]) -> tuple[Any, Any]:
    m, microbatch = m_and_batch
    microbatch_rng = None if rng is None else jax.random.fold_in(rng, m)
    grads, loss_output = grad_fn(weights, microbatch, microbatch_rng)
    scale = loss_output.weight.astype(jnp.float32)
    total = jax.tree.map(
      lambda t, g, added: t + (1.0 if added or loss_output.is_sum else scale) * g.astype(jnp.float32),
      total,
      grads,
      is_sum,
    )
    return total, loss_output

  zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
  numbers = jnp.arange(num_microbatches)
  num_used: jax.Array | None = None
  if skips_empty:
    num_used = _num_with_tokens(batches_M)
    parts = jax.tree.map(lambda x: x[0], batches_M)
    outputs = jax.eval_shape(add_microbatch, zeros, (numbers[0], parts))[1]
    nothing = jax.tree.map(lambda x: jnp.zeros((num_microbatches, *x.shape), x.dtype), outputs)

    def add(m: jax.Array, carry: Any) -> Any:
      total, output = add_microbatch(carry[0], (m, jax.tree.map(lambda x: x[m], batches_M)))
      return total, jax.tree.map(lambda all_of, x: all_of.at[m].set(x), carry[1], output)

    grads, loss_outputs_M = jax.lax.fori_loop(0, num_used, add, (zeros, nothing))
  else:
    grads, loss_outputs_M = jax.lax.scan(add_microbatch, zeros, (numbers, batches_M))
  loss_output = _combine(loss_outputs_M, num_used)
  total_weight = loss_output.weight.astype(jnp.float32)
  # A batch without tokens has gradient 0, and the guarded division keeps it 0.
  inverse = 1 / jnp.where(total_weight == 0, 1.0, total_weight)
  return loss_output, jax.tree.map(lambda g, added: g if added or loss_output.is_sum else g * inverse, grads, is_sum)
