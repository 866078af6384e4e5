"""Computes Muon's direction: the momentum of each layer's matrix, made nearly orthogonal.

Momentum M = U S V^T is replaced by about U V^T, by Newton-Schulz steps on M / |M| (Jordan et al., "Muon: An optimizer
for hidden layers in neural networks", 2024). A layer's matrix is [inputs, outputs], as its WeightSpec declares it:
kernels of queries [D, H, K] are D x HK, those of the output [H, K, D] are HK x D. Layers of a stack, stages and experts
are matrices of their own.

On a mesh the stack of matrices is dealt out to the devices that share each matrix: [L, D, F], split as (None, 'data',
'mdl'), is computed as (('data', 'mdl'), None, None), two all-to-alls for all of its products. Axes that have more
devices than there are layers split the longer dim of a matrix instead, and the smaller products are summed over them.

Shapes: S separate matrices (layers, experts; several dims), I inputs, O outputs, R and C the smaller and the larger of
the two.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmd_tasks.learning.layer_weights import as_layers, layer_matrix, num_separate_dims
from spmd_tasks.learning.skipping import SkippableTransformation, keep_if_finite
from spmd_tasks.sharding import (
  WeightSpec,
  current_sharding_scope,
  num_parts,
  padding,
  spec_axes,
  split_dims_to_partition_spec,
)

# The factor of a direction by (inputs, outputs), as torch.optim.Muon names them.
SCALES = {
  'original': lambda inputs, outputs: math.sqrt(max(1.0, outputs / inputs)),  # Jordan et al.
  'match_rms_adamw': lambda inputs, outputs: 0.2 * math.sqrt(max(inputs, outputs)),  # Moonshot, arXiv 2502.16982
  'spectral_unclamped': lambda inputs, outputs: math.sqrt(outputs / inputs),  # Bernstein, "Deriving Muon", 2025
}


class MuonState(NamedTuple):
  """`momentum` is congruent to the weights, with None where a weight is no matrix."""

  momentum: Any


def scale_by_muon(
  weight_specs: Any,
  *,
  momentum: float,
  nesterov: bool,
  momentum_dtype: str,
  scale: str,
  coefficients: tuple[float, float, float],
  num_iterations: int,
  epsilon: float,
  dtype: str,
) -> SkippableTransformation:
  """Returns the transformation of the matrices' gradients, float32; arguments as those of `Muon` (optimizers.py).

  Args:
    weight_specs: tree of WeightSpec congruent to the gradients, of matrices only.
  """

  def init(weights: Any) -> MuonState:
    return MuonState(jax.tree.map(lambda w: jnp.zeros(w.shape, momentum_dtype), weights))

  def update(grads: Any, state: MuonState, weights: Any = None, *, is_finite: jax.typing.ArrayLike, **extra_args: Any):
    del weights, extra_args
    old = jax.tree.map(lambda m: m.astype(jnp.float32), state.momentum)
    new = keep_if_finite(is_finite, jax.tree.map(lambda m, g: m + (1 - momentum) * (g - m), old, grads), old)
    ahead = jax.tree.map(lambda m, g: g + momentum * (m - g), new, grads) if nesterov else new

    def direction(spec: WeightSpec, x: jax.Array) -> jax.Array:
      layouts, shape = _dealings(spec)
      x = padding.pad(x, jax.ShapeDtypeStruct(shape, x.dtype))
      for layout in layouts:
        x = jax.lax.with_sharding_constraint(x, layout)
      matrices = as_layers(x, dataclasses.replace(spec, shape=shape))
      x = orthogonalized(matrices, coefficients, num_iterations, epsilon, dtype).reshape(shape)
      for layout in reversed(layouts):
        x = jax.lax.with_sharding_constraint(x, layout)
      return padding.unpad(x, spec) * SCALES[scale](*layer_matrix(spec))

    stored = jax.tree.map(lambda m, s: m.astype(s.dtype), new, state.momentum)
    return jax.tree.map(direction, weight_specs, ahead), MuonState(stored)

  return SkippableTransformation(init, update)


def orthogonalized(
  x: jax.Array, coefficients: tuple[float, float, float], num_iterations: int, epsilon: float, dtype: str
) -> jax.Array:
  """Returns float32 [S..., I, O] with singular values near 1, by Newton-Schulz steps in `dtype`; zeros stay zeros."""
  is_tall = x.shape[-2] > x.shape[-1]
  x = jnp.swapaxes(x, -1, -2) if is_tall else x
  norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
  x = (x / jnp.maximum(norm, epsilon)).astype(dtype)
  a, b, c = (jnp.asarray(value, dtype) for value in coefficients)

  def step(_, x: jax.Array) -> jax.Array:
    gram = jnp.einsum('...rc,...sc->...rs', x, x, precision='highest')
    polynomial = b * gram + c * jnp.matmul(gram, gram, precision='highest')
    return a * x + jnp.matmul(polynomial, x, precision='highest')

  x = jax.lax.fori_loop(0, num_iterations, step, x).astype(jnp.float32)
  return jnp.swapaxes(x, -1, -2) if is_tall else x


def _dealings(spec: WeightSpec) -> tuple[list[NamedSharding], tuple[int, ...]]:
  """Returns the layouts from a weight's own to one of whole matrices, as far as there are enough, and a shape for them.

  Each layout moves one mesh axis from one dim to another, which is one all-to-all; XLA replicates an array to move two,
  or one unevenly. So the shape rounds up every dim to what divides it: zero rows, columns and matrices stay zero.
  """
  scope = current_sharding_scope()
  if scope is None or spec.split_dims is None:
    return [], spec.shape
  sizes, num_separate, ndim = scope.mesh.shape, num_separate_dims(spec), len(spec.shape)
  partition = split_dims_to_partition_spec(spec.split_dims, scope.mesh.axis_names, scope.axis_rules)
  axes = [[*each] for each in spec_axes(partition, ndim)]
  inputs, outputs = layer_matrix(spec)
  longer = num_separate if inputs > outputs else num_separate + (spec.num_input_dims or 0)
  layouts, parts = [], [1] * ndim

  def keep_layout() -> None:
    layouts.append(NamedSharding(scope.mesh, PartitionSpec(*[tuple(each) or None for each in axes])))
    parts[:] = [math.lcm(old, num_parts(each, sizes)) for old, each in zip(parts, axes)]

  keep_layout()
  for source in sorted(range(num_separate, ndim), key=lambda dim: dim != longer):
    for axis in reversed(list(axes[source])):
      counts = [num_parts([*axes[dim], axis], sizes) for dim in range(num_separate)]
      even = [dim for dim, count in enumerate(counts) if spec.shape[dim] % count == 0]
      enough = [dim for dim, count in enumerate(counts) if spec.shape[dim] >= count]
      target = (even or enough or [longer])[0]
      if target == source:
        break
      axes[source].remove(axis)
      axes[target].append(axis)
      keep_layout()
  return layouts, tuple(-(-size // count) * count for size, count in zip(spec.shape, parts))
