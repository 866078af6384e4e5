"""grouped_matmul: rows sorted by group, each group times a matrix of its own.

Shapes: R rows, E groups (experts), K in, N out.
"""

import jax


def grouped_matmul(
  rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, backend: str | None = None
) -> jax.Array:
  """Returns [R, N]: row r times the matrix of its group. Rows past the groups' end give zeros and take no gradient.

  Args:
    rows: [R, K], sorted by group.
    weights: [E, K, N].
    group_sizes: int32 [E], with a sum of at most R.
    backend: a name; None for the best here.
  """
  del backend
  return jax.lax.ragged_dot(rows, weights, group_sizes)
