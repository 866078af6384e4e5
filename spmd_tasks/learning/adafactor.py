"""Adafactor, for each layer and each expert separately.

Second moments of a weight [..., R, C] are stored as their means over C (`v_row`) and over R (`v_col`), after Shazeer
and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (arXiv 1804.04235). A scanned weight [L, R,
C] is L weights. Treated as one weight, L could become a factored dim, and one rms would cover all layers. Praxis avoids
this with its "repeat prefix" vectorisation, this module with `jax.vmap` over optax's transformations.

Weights of experts, [E, R, C] or [L, E, R, C] with the tag `expert`, are E weights per layer in the same way. Their
moments are [L, E, R] and [L, E, C] and lie on the devices of their experts; clipping and parameter scale are computed
per expert, as with T5X's factor rules for experts. A rarely chosen expert has small second moments when tokens reach
it. With one rms over all experts, its step could be sqrt(E) times as long and would shorten the steps of the others.
Below, "a layer's weight" means the weight of one expert of the layer, for weights of experts.

Shapes: L layers of a scanned stack, E experts, R and C the two largest dims of one layer's weight (R <= C).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd_tasks.errors import UserError
from spmd_tasks.learning.layer_weights import num_separate_dims
from spmd_tasks.learning.optimizers import OptimizerSettings
from spmd_tasks.sharding import WeightSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(OptimizerSettings):
  """Adafactor as T5 and Pax use it. Layers of a scanned stack are separate weights.

  `momentum` averages directions before the learning rate multiplies them, T5X's after. The two are equal while the
  learning rate is constant.

  Attributes:
    momentum: decay of an average of the directions (T5X's beta1, not debiased); None: no average.
    momentum_dtype: of the stored average.
    decay_exponent: update t = 1, 2, ... keeps `1 - t ** -decay_exponent` of the old second moments.
    min_dim_size_to_factor: second moments are factored where a layer's weight has two dims of at least this size.
    epsilon: added to the squared gradient.
    clipping_threshold: the largest rms of one layer's direction before the parameter scale; None turns it off.
    multiply_by_parameter_scale: makes the learning rate relative to the rms of the layer's weight.
    min_parameter_scale: lower bound of that rms.
  """

  momentum: float | None = None
  momentum_dtype: str = 'float32'
  decay_exponent: float = 0.8
  min_dim_size_to_factor: int = 128
  epsilon: float = 1e-30
  clipping_threshold: float | None = 1.0
  multiply_by_parameter_scale: bool = True
  min_parameter_scale: float = 1e-3

  def __post_init__(self):
    super().__post_init__()
    for name in ('decay_exponent', 'min_dim_size_to_factor', 'min_parameter_scale', 'clipping_threshold'):
      value = getattr(self, name)
      if value is not None and not value > 0:
        raise UserError(f'Adafactor.{name} is {value}; it must be larger than 0.')

  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    pieces = [
      scale_by_adafactor(
        weight_specs,
        decay_exponent=self.decay_exponent,
        min_dim_size_to_factor=self.min_dim_size_to_factor,
        epsilon=self.epsilon,
        clipping_threshold=self.clipping_threshold,
        multiply_by_parameter_scale=self.multiply_by_parameter_scale,
        min_parameter_scale=self.min_parameter_scale,
      )
    ]
    if self.momentum is not None:
      pieces.append(optax.ema(self.momentum, debias=False, accumulator_dtype=jnp.dtype(self.momentum_dtype)))
    return pieces


def scale_by_adafactor(
  weight_specs: Any,
  *,
  decay_exponent: float,
  min_dim_size_to_factor: int,
  epsilon: float,
  clipping_threshold: float | None,
  multiply_by_parameter_scale: bool,
  min_parameter_scale: float,
) -> optax.GradientTransformation:
  """Divides by the factored root mean square, clips each layer's rms, multiplies by each layer's parameter scale.

  The state is one `optax.FactoredState` for the whole tree: a scalar count, and `v_row`, `v_col` and `v` congruent to
  the weights. A moment that a weight does not need is a placeholder of one zero per layer: [1], [L, 1] for a stack, [L,
  E, 1] for a stack of experts.

  Args:
    weight_specs: tree of WeightSpec congruent to the weights; read for `stacked` and the tag `expert`.
    decay_exponent: update t = 1, 2, ... keeps `1 - t ** -decay_exponent` of the old moments.
    min_dim_size_to_factor: a layer's weight is factored if its two largest dims have at least this size.
    epsilon: added to the squared gradient.
    clipping_threshold: the largest rms of a layer's update before the parameter scale; None turns it off.
    multiply_by_parameter_scale: makes the learning rate relative to the rms of the layer's weight.
    min_parameter_scale: lower bound of that rms, so that weights of zeros can move.
  """
  factored_rms = optax.scale_by_factored_rms(
    decay_rate=decay_exponent, min_dim_size_to_factor=min_dim_size_to_factor, epsilon=epsilon
  )
  stateless = [optax.identity()]  # optax.chain needs at least one transformation.
  if clipping_threshold is not None:
    stateless.append(optax.clip_by_block_rms(clipping_threshold))
  if multiply_by_parameter_scale:
    stateless.append(optax.scale_by_param_block_rms(min_parameter_scale))
  per_layer_scale = optax.chain(*stateless)

  def init_layer(weight: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    state = factored_rms.init(weight)
    return state.v_row, state.v_col, state.v

  def update_layer(count, grad, v_row, v_col, v, weight):
    state = optax.FactoredState(count=count, v_row=v_row, v_col=v_col, v=v)
    direction, state = factored_rms.update(grad, state, weight)
    direction, _ = per_layer_scale.update(direction, per_layer_scale.init(weight), weight)
    return direction, state.v_row, state.v_col, state.v

  def per_layer(function, spec: WeightSpec, in_axes):
    for _ in range(num_separate_dims(spec)):
      function = jax.vmap(function, in_axes=in_axes)
    return function

  def unzip(tree_of_tuples: Any, num: int) -> Any:
    return jax.tree.transpose(jax.tree.structure(weight_specs), jax.tree.structure((0,) * num), tree_of_tuples)

  def init(weights: Any) -> optax.FactoredState:
    moments = jax.tree.map(lambda spec, w: per_layer(init_layer, spec, 0)(w), weight_specs, weights)
    v_row, v_col, v = unzip(moments, 3)
    return optax.FactoredState(count=jnp.zeros((), jnp.int32), v_row=v_row, v_col=v_col, v=v)

  def update(grads: Any, state: optax.FactoredState, weights: Any) -> tuple[Any, optax.FactoredState]:
    def update_weight(spec: WeightSpec, *operands: jax.Array):
      # The count is the same for all layers, so vmap does not map over it.
      return per_layer(update_layer, spec, (None, 0, 0, 0, 0, 0))(state.count, *operands)

    results = jax.tree.map(update_weight, weight_specs, grads, state.v_row, state.v_col, state.v, weights)
    directions, v_row, v_col, v = unzip(results, 4)
    return directions, optax.FactoredState(count=state.count + 1, v_row=v_row, v_col=v_col, v=v)

  return optax.GradientTransformation(init, update)
