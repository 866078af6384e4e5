"""Muon: the momentum of each layer's matrix, made nearly orthogonal, is the direction.

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
from typing import Any, ClassVar, Literal, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import optax

from spmd_tasks.errors import UserError
from spmd_tasks.learning.frozen_weights import fill_in
from spmd_tasks.learning.layer_weights import are_matrices, as_layers, layer_matrix
from spmd_tasks.learning.optimizers import OptimizerSettings
from spmd_tasks.learning.skipping import SkippableTransformation, keep_if_finite, scale_by_adam
from spmd_tasks.sharding import WeightSpec, padding, split_dims_to_partition_spec
from spmd_tasks.sharding.specs import current_sharding_scope, num_parts, spec_axes

# The factor of a direction by (inputs, outputs), as torch.optim.Muon names them.
SCALES = {
  'original': lambda inputs, outputs: math.sqrt(max(1.0, outputs / inputs)),  # Jordan et al.
  'match_rms_adamw': lambda inputs, outputs: 0.2 * math.sqrt(max(inputs, outputs)),  # Moonshot, arXiv 2502.16982
  'spectral_unclamped': lambda inputs, outputs: math.sqrt(outputs / inputs),  # Bernstein, "Deriving Muon", 2025
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Muon(OptimizerSettings):
  """Momentum made orthogonal, matrix by matrix (Jordan et al., 2024).

  Kernels of hidden layers are matrices, with heads joined; a router's and adapters' too. Embeddings, the output head,
  norms and biases are updated as by AdamW. Weights decay by the learning rate alone, without the scale, as in
  `torch.optim.Muon`. Jordan et al. use no decay; Moonshot (arXiv 2502.16982) decays all weights by 0.1.

  Attributes:
    momentum: decay of the average of gradients, which is not debiased.
    nesterov: whether the direction looks ahead by one more momentum step.
    momentum_dtype: of the stored average, and of AdamW's first moment.
    scale: factor of a matrix's direction, by torch's names: 'match_rms_adamw', 0.2 sqrt(max(inputs, outputs)), makes it
      as large as AdamW's (Moonshot), so that one learning rate suits all weights; 'original' is
      sqrt(max(1, outputs / inputs)) (Jordan et al.); 'spectral_unclamped' is sqrt(outputs / inputs) (Bernstein).
    coefficients, num_iterations: of the Newton-Schulz steps a x + b x^3 + c x^5.
    dtype: of their products. The publications use bfloat16, which is faster; float32 is the same on every mesh.
    beta1, beta2, epsilon: AdamW's.
    adam_scale: factor of the learning rate of the weights that AdamW updates, and so of their decay.
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
    name = type(self).__name__
    if self.scale not in SCALES:
      raise UserError(f'{name}.scale is {self.scale!r}; it must be one of {tuple(SCALES)}.')
    if len(self.coefficients) != 3 or self.num_iterations < 1:
      raise UserError(
        f'{name}.coefficients are {self.coefficients} for num_iterations={self.num_iterations}: give three numbers, '
        'and 1 step or more.'
      )
    if self.dtype not in ('float32', 'bfloat16'):
      raise UserError(f'{name}.dtype is {self.dtype!r}; it must be float32 or bfloat16.')
    if not self.adam_scale >= 0:
      raise UserError(f'{name}.adam_scale is {self.adam_scale}; it must be 0 or more.')

  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    is_matrix = are_matrices(weight_specs, type(self).__name__)

    def part(tree: Any, of_matrices: bool) -> Any:
      return jax.tree.map(lambda matrix, leaf: leaf if matrix == of_matrices else None, is_matrix, tree)

    adam = scale_by_adam(beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon, momentum_dtype=self.momentum_dtype)
    muon = self._orthogonal_momentum(part(weight_specs, True))

    def update(grads: Any, state: Any, weights: Any = None, **extra_args: Any) -> tuple[Any, Any]:
      of_matrices, muon_state = muon.update(part(grads, True), state[0], **extra_args)
      of_others, adam_state = adam.update(part(grads, False), state[1], **extra_args)
      return fill_in(of_matrices, of_others), (muon_state, adam_state)

    def init(weights: Any) -> Any:
      return muon.init(part(weights, True)), adam.init(part(weights, False))

    return [SkippableTransformation(init, update)]

  def _orthogonal_momentum(self, weight_specs: Any) -> SkippableTransformation:
    """Returns the transformation of the gradients, float32, of weights that are all matrices."""

    def init(weights: Any) -> MuonState:
      return MuonState(jax.tree.map(lambda w: jnp.zeros(w.shape, self.momentum_dtype), weights))

    def update(
      grads: Any, state: MuonState, weights: Any = None, *, is_finite: jax.typing.ArrayLike, **extra_args: Any
    ) -> tuple[Any, MuonState]:
      old = jax.tree.map(lambda m: m.astype(jnp.float32), state.momentum)
      average = jax.tree.map(lambda m, g: m + (1 - self.momentum) * (g - m), old, grads)
      new = keep_if_finite(is_finite, average, old)
      ahead = jax.tree.map(lambda m, g: g + self.momentum * (m - g), new, grads) if self.nesterov else new

      def direction(spec: WeightSpec, x: jax.Array) -> jax.Array:
        layouts, shape = _dealings(spec)
        x = padding.pad(x, jax.ShapeDtypeStruct(shape, x.dtype))
        for layout in layouts:
          x = jax.lax.with_sharding_constraint(x, layout)
        x = self._orthogonalized(as_layers(x, dataclasses.replace(spec, shape=shape))).reshape(shape)
        for layout in reversed(layouts):
          x = jax.lax.with_sharding_constraint(x, layout)
        return padding.unpad(x, spec) * SCALES[self.scale](*layer_matrix(spec))

      stored = jax.tree.map(lambda m, s: m.astype(s.dtype), new, state.momentum)
      return jax.tree.map(direction, weight_specs, ahead), MuonState(stored)

    return SkippableTransformation(init, update)

  def _orthogonalized(self, x: jax.Array) -> jax.Array:
    """Returns float32 [S..., I, O] with singular values near 1, by Newton-Schulz steps in `dtype`; zeros stay zeros."""
    is_tall = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if is_tall else x
    norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True))
    x = (x / jnp.maximum(norm, 1e-7)).astype(self.dtype)  # torch's bound
    a, b, c = (jnp.asarray(value, self.dtype) for value in self.coefficients)

    def step(_, x: jax.Array) -> jax.Array:
      gram = jnp.einsum('...rc,...sc->...rs', x, x, precision='highest')
      polynomial = b * gram + c * jnp.matmul(gram, gram, precision='highest')
      return a * x + jnp.matmul(polynomial, x, precision='highest')

    x = jax.lax.fori_loop(0, self.num_iterations, step, x).astype(jnp.float32)
    return jnp.swapaxes(x, -1, -2) if is_tall else x

  def transformation(self, weight_specs: Any) -> SkippableTransformation:
    """Returns the transformation from gradients to the direction; see the base class."""
    whole = super().transformation(weight_specs)
    if self.adam_scale == 1:
      return whole
    is_matrix = are_matrices(weight_specs, type(self).__name__)

    def update(grads: Any, state: Any, weights: Any = None, **extra_args: Any) -> tuple[Any, Any]:
      directions, state = whole.update(grads, state, weights, **extra_args)
      return jax.tree.map(lambda d, matrix: d if matrix else self.adam_scale * d, directions, is_matrix), state

    return SkippableTransformation(whole.init, update)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuonClip(Muon):
  """Muon, for a model whose attention has `qk_clip`, which bounds its logits (Kimi K2, 2025)."""

  needs_weight_factors: ClassVar[bool] = True


def multiplied(weights: Any, weight_specs: Any, factors: Any) -> Any:
  """Multiplies weights [..., H, K] by factors [stacked..., H, K] under their names, with dots for the last slashes."""
  flat = {name.replace('.', '/'): x for name, x in traverse_util.flatten_dict(factors, sep='/').items()}

  def multiplied_one(path: Any, spec: WeightSpec, weight: jax.Array) -> jax.Array:
    factor = flat.get(jax.tree_util.keystr(path, simple=True, separator='/'))
    if factor is None:
      return weight
    stacked, of_heads = factor.shape[: spec.stacked], factor.shape[spec.stacked :]
    factor = factor.reshape(*stacked, *(1,) * (weight.ndim - factor.ndim), *of_heads)
    return (weight * factor).astype(weight.dtype)

  return jax.tree_util.tree_map_with_path(multiplied_one, weight_specs, weights)


class MuonState(NamedTuple):
  """`momentum` is congruent to the weights, with None where a weight is no matrix."""

  momentum: Any


def _dealings(spec: WeightSpec) -> tuple[list[NamedSharding], tuple[int, ...]]:
  """Returns the layouts from a weight's own to one of whole matrices, as far as there are enough, and a shape for them.

  Each layout moves one mesh axis from one dim to another, which is one all-to-all; XLA replicates an array to move two,
  or one unevenly. So the shape rounds up every dim to what divides it: zero rows, columns and matrices stay zero.
  """
  scope = current_sharding_scope()
  if scope is None or spec.split_dims is None:
    return [], spec.shape
  sizes, num_separate, ndim = scope.mesh.shape, spec.num_separate_dims, len(spec.shape)
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
