"""Sorts assignments of tokens to experts, gathers the tokens' rows in that order, and combines the experts' results.

Shapes: n tokens, k choices per token, R = n * k rows, E experts, D model.

An *assignment* is one token's choice of one expert. Sorting by expert turns assignments into *rows*, so that each
expert's rows are contiguous (MegaBlocks: Gale et al., 2022). Every token has exactly k rows. Both directions are
therefore gathers: from tokens to rows by `token_ids`, and from rows to tokens by `positions`. Plain autodiff would turn
the second into a scatter-add, which is slower on CPU and has no fixed order of summation on GPU.

    permutation = sort_by_expert(expert_ids, num_experts)
    rows = gather_rows(x, permutation)                     # [R, D], sorted by expert
    row_gates = gather_gates(gates, permutation)           # [R]
    y = sum_rows(network(rows, row_gates), permutation)    # [n, D]

The gates go into the network, so that the backward pass needs none of its results.
"""

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.sharding.specs import current_platform

INT32_MAX = np.iinfo(np.int32).max


class Permutation(struct.PyTreeNode):
  """The order of the rows by expert, and its inverse.

  Attributes:
    token_ids: int32 [R], each row's token; n for a row without a token, which buffers of fixed sizes have.
    positions: int32 [n, k], each assignment's row (the inverse); R for an assignment without a row.
    group_sizes: int32 [E], the number of rows per expert. Rows after their sum belong to no expert.
    assignments: int32 [R], each row's assignment, numbered token * k + choice; n * k for a row without one.
    is_full: whether every row has a token.
  """

  token_ids: jax.Array
  positions: jax.Array
  group_sizes: jax.Array
  assignments: jax.Array
  is_full: bool = struct.field(pytree_node=False, default=False)


def sort_by_expert(expert_ids: jax.Array, num_experts: int) -> Permutation:
  """Sorts assignments int32 [n, k] by expert, token and choice; the id E means 'not routed' and sorts last."""
  num_rows, num_choices = expert_ids.size, expert_ids.shape[-1]
  flat_ids, iota = expert_ids.reshape(-1), jnp.arange(num_rows, dtype=jnp.int32)
  if num_rows * (num_experts + 1) <= INT32_MAX:
    # One key holds both expert and assignment: XLA's CPU backend sorts a single array 3 times faster than pairs.
    order = jax.lax.sort(flat_ids * num_rows + iota, is_stable=False) % num_rows
  else:
    order = jnp.argsort(flat_ids, stable=True).astype(jnp.int32)
  if current_platform() == 'tpu':  # a scatter would write one element after another
    _, positions = jax.lax.sort((order, iota), num_keys=1, is_stable=False)
    experts = jnp.arange(num_experts, dtype=flat_ids.dtype)
    group_sizes = jnp.sum(flat_ids[:, None] == experts[None, :], axis=0, dtype=jnp.int32)
  else:
    positions = jnp.zeros_like(order).at[order].set(iota, unique_indices=True, mode='promise_in_bounds')
    group_sizes = jnp.zeros(num_experts, jnp.int32).at[flat_ids].add(1, mode='drop')
  return Permutation(
    token_ids=order // num_choices,
    positions=positions.reshape(expert_ids.shape),
    group_sizes=group_sizes,
    assignments=order,
    is_full=True,
  )


def without_unrouted(permutation: Permutation) -> Permutation:
  """Returns a permutation by `sort_by_expert` in which assignments that are not routed have no position.

  Their rows, which may hold anything, are then never read.
  """
  positions, num_rows = permutation.positions, permutation.token_ids.shape[0]
  is_routed = positions < jnp.sum(permutation.group_sizes)
  return permutation.replace(positions=jnp.where(is_routed, positions, num_rows))


def take_rows(x: jax.Array, ids: jax.Array, *, in_bounds: bool = False) -> jax.Array:
  """Returns x[ids], with zeros for ids past the end; `in_bounds` promises that there are none."""
  return x.at[ids].get(mode='promise_in_bounds') if in_bounds else x.at[ids].get(mode='fill', fill_value=0)


def _sum_per_token(rows: jax.Array, positions: jax.Array) -> jax.Array:
  """Returns [n, D]: the sum of each token's rows [R, D], accumulated in float32."""
  # One gather per choice: a single gather of [n, k, D] would be written to memory before the sum.
  total = sum(take_rows(rows, positions[:, choice]).astype(jnp.float32) for choice in range(positions.shape[1]))
  return jnp.asarray(total, rows.dtype)


@jax.custom_vjp
def gather_rows(x: jax.Array, permutation: Permutation) -> jax.Array:
  """Returns [R, D]: the token of every assignment, in the order by expert, for tokens x [n, D].

  Assignments that are not routed have a row too, which holds their token. The gradient is a gather and a sum over k.
  """
  return take_rows(x, permutation.token_ids, in_bounds=permutation.is_full)


gather_rows.defvjp(
  lambda x, permutation: (gather_rows(x, permutation), permutation.positions),
  lambda positions, d_rows: (_sum_per_token(d_rows, positions), None),
)


@jax.custom_vjp
def sum_rows(rows: jax.Array, permutation: Permutation) -> jax.Array:
  """Returns [n, D]: the sum of each token's rows, for rows [R, D]. The transpose of `gather_rows`.

  Rows to which no position points may hold any value, NaN included, and their gradient is undefined.
  """
  return _sum_per_token(rows, permutation.positions)


sum_rows.defvjp(
  lambda rows, permutation: (sum_rows(rows, permutation), permutation),
  lambda permutation, d_y: (take_rows(d_y, permutation.token_ids, in_bounds=permutation.is_full), None),
)


@jax.custom_vjp
def gather_gates(gates: jax.Array, permutation: Permutation) -> jax.Array:
  """Returns [R]: each row's gate, for gates [n, k]; 0 for a row without an assignment.

  Rows to which no position points contribute no gradient to the gates.
  """
  return take_rows(gates.reshape(-1), permutation.assignments, in_bounds=permutation.is_full)


gather_gates.defvjp(
  lambda gates, permutation: (gather_gates(gates, permutation), permutation.positions),
  lambda positions, d_row_gates: (take_rows(d_row_gates, positions), None),
)


@jax.custom_vjp
def move_rows(rows: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
  """Moves rows [M, ...] to [N, ...], zeros for a place without a row.

  Args:
    rows: [M, ...].
    sources: int32 [N], the row for each place, M for none.
    targets: int32 [M], the place of each row, N for none: the inverse of `sources`, which moves the gradient back.
  """
  del targets
  return take_rows(rows, sources)


move_rows.defvjp(
  lambda rows, sources, targets: (move_rows(rows, sources, targets), (sources, targets)),
  lambda places, d_moved: (move_rows(d_moved, *places[::-1]), None, None),
)
