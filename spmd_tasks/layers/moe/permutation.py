"""Permutation: assignments of tokens to experts, sorted so that each expert's rows are contiguous.

Shapes: n tokens, k choices per token, R = n * k rows, E experts, D model.

An *assignment* is a token's choice of an expert; sorted by expert, assignments are *rows*. Every token has exactly k
rows, so both directions are gathers: rows from tokens by `token_ids`, and a token's sum over its rows by `positions`.
Left to itself, autodiff makes the second a scatter-add, which is slower on CPU and in no fixed order on GPU.
"""

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

INT32_MAX = np.iinfo(np.int32).max


class Permutation(struct.PyTreeNode):
  """Where each assignment went in the order by expert.

  Attributes:
    token_ids: int32 [R], each row's token; n in a row without one, as capacity leaves them.
    positions: int32 [n, k], each assignment's row: the inverse. R where it has none.
    group_sizes: int32 [E], rows per expert. Rows after their sum belong to no expert.
  """

  token_ids: jax.Array
  positions: jax.Array
  group_sizes: jax.Array


def sort_by_expert(expert_ids: jax.Array, num_experts: int) -> Permutation:
  """Sorts all assignments by expert, and those of one expert by token, then choice (MegaBlocks' indices and bins).

  Args:
    expert_ids: int32 [n, k], each in [0, num_experts]; num_experts is nowhere, and sorts last.
    num_experts: E.
  """
  num_rows, num_choices = expert_ids.size, expert_ids.shape[-1]
  flat_ids, iota = expert_ids.reshape(-1), jnp.arange(num_rows, dtype=jnp.int32)
  if num_rows * (num_experts + 1) <= INT32_MAX:
    # One key that carries the assignment with it: XLA's CPU backend sorts single arrays 3 times faster than pairs.
    order = jax.lax.sort(flat_ids * num_rows + iota, is_stable=False) % num_rows
  else:
    order = jnp.argsort(flat_ids, stable=True).astype(jnp.int32)
  positions = jnp.zeros_like(order).at[order].set(iota, unique_indices=True, mode='promise_in_bounds')
  return Permutation(
    token_ids=order // num_choices,
    positions=positions.reshape(expert_ids.shape),
    group_sizes=jnp.zeros(num_experts, jnp.int32).at[flat_ids].add(1, mode='drop'),
  )


def take_rows(x: jax.Array, ids: jax.Array) -> jax.Array:
  """x[ids], with zeros for ids past the end."""
  return x.at[ids].get(mode='fill', fill_value=0)


def sum_rows_per_token(rows: jax.Array, positions: jax.Array) -> jax.Array:
  """[n, D], each token's sum over its rows [R, D], accumulated in float32."""
  total = sum(take_rows(rows, positions[:, choice]).astype(jnp.float32) for choice in range(positions.shape[1]))
  return jnp.asarray(total, rows.dtype)


@jax.custom_vjp
def gather_rows(x: jax.Array, permutation: Permutation) -> jax.Array:
  """[R, D], every assignment's token in the order by expert, for tokens x [n, D].

  Rows of assignments to nowhere hold their token too. The gradient is a gather and a sum over k.
  """
  return take_rows(x, permutation.token_ids)


def _gather_rows_forward(x, permutation):
  return gather_rows(x, permutation), permutation.positions


def _gather_rows_backward(positions, d_rows):
  return sum_rows_per_token(d_rows, positions), None


gather_rows.defvjp(_gather_rows_forward, _gather_rows_backward)
