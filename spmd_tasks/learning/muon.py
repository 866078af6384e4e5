"""Muon: the direction is the orthogonalized momentum of each layer's matrix.

Newton-Schulz steps on M / |M| replace the momentum M = U S V^T by about U V^T (Jordan et al., "Muon: An optimizer for
hidden layers in neural networks", 2024). A layer's matrix is [inputs, outputs], as its WeightSpec declares it: a query
kernel [D, H, K] is D x HK, an output kernel [H, K, D] is HK x D. Each layer of a stack, each stage and each expert is a
separate matrix.

On a mesh, whole matrices of a stack are distributed over the devices that share each matrix: [L, D, F], split as (None,
'data', 'mdl'), is computed as (('data', 'mdl'), None, None), which takes two all-to-alls for all products. If an axis
has more devices than there are layers, it splits the longer dim of each matrix, and the smaller products are summed
over it.

Shapes: S separate matrices (layers, experts; several dims), I inputs, O outputs.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import optax

from spmd_tasks.errors import UserError
from spmd_tasks.learning.frozen_weights import fill_in
from spmd_tasks.learning.layer_weights import are_matrices, as_matrices, layer_matrix
from spmd_tasks.learning.optimizers import OptimizerSettings, scale_directions
from spmd_tasks.learning.skipping import SkippableTransformation, keep_if_finite, scale_by_adam
from spmd_tasks.sharding import WeightSpec, padding, split_dims_to_partition_spec
from spmd_tasks.sharding.specs import current_sharding_scope, num_parts, spec_axes

# Factors of directions by (inputs, outputs), with the names of torch.optim.Muon.
SCALES = {
  'original': lambda inputs, outputs: math.sqrt(max(1.0, outputs / inputs)),  # Jordan et al.
  'match_rms_adamw': lambda inputs, outputs: 0.2 * math.sqrt(max(inputs, outputs)),  # Moonshot, arXiv 2502.16982
  'spectral_unclamped': lambda inputs, outputs: math.sqrt(outputs / inputs),  # Bernstein, "Deriving Muon", 2025
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(OptimizerSettings):
  """Orthogonalized momentum for matrices, AdamW for other weights (Jordan et al., 2024).

  Kernels of hidden layers are matrices, with heads merged, as are kernels of routers and adapters. AdamW updates
  embeddings, the output head, norms and biases. Weight decay is multiplied by the learning rate but not by the scale,
  as in `torch.optim.Muon`. Jordan et al. use no decay; Moonshot (arXiv 2502.16982) decays all weights by 0.1.

  Attributes:
    momentum: decay of the average of gradients, which is not debiased.
    nesterov: whether the direction looks ahead by one more momentum step.
    momentum_dtype: dtype of the stored average, and of AdamW's first moment.
    scale: factor of a matrix's direction, by torch's names: 'match_rms_adamw', 0.2 sqrt(max(inputs, outputs)), makes it
      as large as AdamW's (Moonshot), so that one learning rate suits all weights; 'original' is
      sqrt(max(1, outputs / inputs)) (Jordan et al.); 'spectral_unclamped' is sqrt(outputs / inputs) (Bernstein).
    coefficients, num_iterations: the Newton-Schulz steps are a x + b x^3 + c x^5.
    dtype: dtype of the Newton-Schulz products. The publications use bfloat16, which is faster; float32 gives the same
      result on every mesh.
    beta1, beta2, epsilon: AdamW's.
    adam_scale: factor of the learning rate, and so of the decay, of the weights that AdamW updates.
  """

  momentum: float = 0.95
  nesterov: bool = True
  momentum_dtype: str = 'float32'
  scale: Literal['match_rms_adamw', 'original', 'spectral_unclamped'] = 'match_rms_adamw'
  coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
  num_iterations: int = 5
  dtype: str = 'float32'
  beta1: float = 0.9
  beta2: float = 0.95
  epsilon: float = 1e-8
  adam_scale: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    for name, is_valid, constraint in (
      ('scale', self.scale in SCALES, f'one of {tuple(SCALES)}'),
      ('coefficients', len(self.coefficients) == 3, 'three numbers'),
      ('num_iterations', self.num_iterations >= 1, '1 or more'),
      ('dtype', self.dtype in ('float32', 'bfloat16'), 'float32 or bfloat16'),
      ('adam_scale', self.adam_scale >= 0, '0 or more'),
      ('scale', self.base_width is None or self.scale == 'spectral_unclamped', "'spectral_unclamped' with base_width"),
    ):
      if not is_valid:
        raise UserError(f'{type(self).__name__}.{name} is {getattr(self, name)!r}; it must be {constraint}.')

  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    is_matrix = are_matrices(weight_specs, type(self).__name__)

    def select(tree: Any, matrices: bool) -> Any:
      return jax.tree.map(lambda matrix, leaf: leaf if matrix == matrices else None, is_matrix, tree)

    adam = scale_by_adam(beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon, momentum_dtype=self.momentum_dtype)
    muon = self._scale_by_muon(select(weight_specs, True))

    def update(grads: Any, state: Any, weights: Any = None, **extra_args: Any) -> tuple[Any, Any]:
      muon_directions, muon_state = muon.update(select(grads, True), state[0], **extra_args)
      adam_directions, adam_state = adam.update(select(grads, False), state[1], **extra_args)
      return fill_in(muon_directions, adam_directions), (muon_state, adam_state)

    def init(weights: Any) -> Any:
      return muon.init(select(weights, True)), adam.init(select(weights, False))

    return [SkippableTransformation(init, update)]

  def _scale_by_muon(self, weight_specs: Any) -> SkippableTransformation:
    """Returns the transformation from float32 gradients of matrices to directions."""

    def init(weights: Any) -> MuonState:
      return MuonState(jax.tree.map(lambda w: jnp.zeros(w.shape, self.momentum_dtype), weights))

    def update(
      grads: Any, state: MuonState, weights: Any = None, *, is_finite: jax.typing.ArrayLike, **extra_args: Any
    ) -> tuple[Any, MuonState]:
      old = jax.tree.map(lambda m: m.astype(jnp.float32), state.momentum)
      average = jax.tree.map(lambda m, g: m + (1 - self.momentum) * (g - m), old, grads)
      new = keep_if_finite(is_finite, average, old)
      lookahead = jax.tree.map(lambda m, g: g + self.momentum * (m - g), new, grads) if self.nesterov else new

      def direction(spec: WeightSpec, x: jax.Array) -> jax.Array:
        shardings, shape = _matrix_shardings(spec)
        x = padding.pad(x, jax.ShapeDtypeStruct(shape, x.dtype))
        for sharding in shardings:
          x = jax.lax.with_sharding_constraint(x, sharding)
        x = self._orthogonalize(as_matrices(x, dataclasses.replace(spec, shape=shape))).reshape(shape)
        for sharding in reversed(shardings):
          x = jax.lax.with_sharding_constraint(x, sharding)
        return padding.unpad(x, spec) * SCALES[self.scale](*layer_matrix(spec))

      stored = jax.tree.map(lambda m, s: m.astype(s.dtype), new, state.momentum)
      return jax.tree.map(direction, weight_specs, lookahead), MuonState(stored)

    return SkippableTransformation(init, update)

  def _orthogonalize(self, x: jax.Array) -> jax.Array:
    """Moves the singular values of [S..., I, O] near 1 by Newton-Schulz steps; returns float32. Zeros stay zeros."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if is_tall else x
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
    x = (x / jnp.maximum(norm, 1e-7)).astype(self.dtype)  # torch's epsilon
    a, b, c = (jnp.asarray(value, self.dtype) for value in self.coefficients)

    def step(_, x: jax.Array) -> jax.Array:
      gram = jnp.einsum('...rc,...sc->...rs', x, x, precision='highest')
      polynomial = b * gram + c * jnp.matmul(gram, gram, precision='highest')
      return a * x + jnp.matmul(polynomial, x, precision='highest')

    x = jax.lax.fori_loop(0, self.num_iterations, step, x).astype(jnp.float32)
    return jnp.swapaxes(x, -1, -2) if is_tall else x

  def transformation(self, weight_specs: Any) -> SkippableTransformation:
    """Returns the transformation from gradients to the direction; see the base class."""
    unscaled = super().transformation(weight_specs)
    if self.adam_scale == 1:
      return unscaled
    is_matrix = are_matrices(weight_specs, type(self).__name__)
    return scale_directions(unscaled, jax.tree.map(lambda matrix: 1.0 if matrix else self.adam_scale, is_matrix))

  def _width_factors(self, weight_specs: Any) -> Any:
    """The scale 'spectral_unclamped' follows the width by itself, so only AdamW's weights have other factors."""
    is_matrix = are_matrices(weight_specs, type(self).__name__)
    return jax.tree.map(
      lambda matrix, factor: 1.0 if matrix else factor, is_matrix, super()._width_factors(weight_specs)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonClip(Muon):
  """Muon for a model whose attention bounds its logits by `qk_clip` (Kimi K2, 2025)."""

  needs_weight_factors: ClassVar[bool] = True


class MuonState(NamedTuple):
  """`momentum` is congruent to the weights, with None for weights that are not matrices."""

  momentum: Any


def _matrix_shardings(spec: WeightSpec) -> tuple[list[NamedSharding], tuple[int, ...]]:
  """Returns shardings that lead from the weight's own to one with whole matrices on devices, and a padded shape.

  If there are fewer matrices than devices, the last sharding splits matrices. Between two shardings one mesh axis moves
  from one dim to another, which is one all-to-all; XLA would replicate the array to move two axes, or an uneven one. So
  all shardings divide the padded shape; padded rows, columns and matrices are zero and stay zero.
  """
  scope = current_sharding_scope()
  if scope is None or spec.split_dims is None:
    return [], spec.shape
  sizes, num_separate, ndim = scope.mesh.shape, spec.num_separate_dims, len(spec.shape)
  partition = split_dims_to_partition_spec(spec.split_dims, scope.mesh.axis_names, scope.axis_rules)
  axes = [[*dim_axes] for dim_axes in spec_axes(partition, ndim)]
  inputs, outputs = layer_matrix(spec)
  longer = num_separate if inputs > outputs else num_separate + (spec.num_input_dims or 0)
  shardings, multiples = [], [1] * ndim

  def add_sharding() -> None:
    shardings.append(NamedSharding(scope.mesh, PartitionSpec(*[tuple(dim_axes) or None for dim_axes in axes])))
    multiples[:] = [math.lcm(multiple, num_parts(dim_axes, sizes)) for multiple, dim_axes in zip(multiples, axes)]

  add_sharding()
  for source in sorted(range(num_separate, ndim), key=lambda dim: dim != longer):
    for axis in reversed(list(axes[source])):
      counts = [num_parts([*axes[dim], axis], sizes) for dim in range(num_separate)]
      even = [dim for dim, count in enumerate(counts) if spec.shape[dim] % count == 0]
      large_enough = [dim for dim, count in enumerate(counts) if spec.shape[dim] >= count]
      target = (even or large_enough or [longer])[0]
      if target == source:
        break
      axes[source].remove(axis)
      axes[target].append(axis)
      add_sharding()
  return shardings, tuple(-(-size // multiple) * multiple for size, multiple in zip(spec.shape, multiples))
