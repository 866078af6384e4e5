"""The grouped matmul by tokamax, an optional package of Triton and Mosaic kernels for GPU and TPU.

Shapes: R rows, E groups, K in, N out.
"""

import sys

from absl import flags
import jax
import jax.numpy as jnp


def multiply_by_tokamax(
  rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, *, implementation: str | None = None
) -> jax.Array:
  """`grouped_matmul` by `tokamax.ragged_dot`, where every row is in a group or zero.

  Args:
    rows, weights, group_sizes: see `grouped_matmul`.
    implementation: 'mosaic', 'triton' or 'xla'; None for the first that supports the device and these shapes.

  Raises:
    ImportError: tokamax is not installed.
  """
  import tokamax  # optional, and slow to import

  if not flags.FLAGS.is_parsed():
    flags.FLAGS(sys.argv[:1])  # else tokamax takes the whole command line for absl's flags, and ends at one of ours
  result = tokamax.ragged_dot(
    rows, weights, group_sizes, preferred_element_type=jnp.float32, implementation=implementation
  )
  return result.astype(rows.dtype)
