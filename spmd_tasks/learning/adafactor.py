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

T5X chooses the rows and columns of each weight by rules: `factor_rules=T5X_FACTOR_RULES`, and with them T5X's order of
learning rate, momentum and decay, are in `Adafactor.as_t5x`.

Shapes: L layers of a scanned stack, E experts, R and C the two largest dims of one layer's weight (R <= C).
"""

import dataclasses
import re
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from spmd_tasks.errors import UserError
from spmd_tasks.learning.layer_weights import layer_matrix
from spmd_tasks.learning.optimizers import OptimizerSettings
from spmd_tasks.learning.skipping import SkippableTransformation, chain
from spmd_tasks.sharding import WeightSpec

# What is factored of one layer's weight: 'largest', its two largest dims; 'matrix', the matrix [inputs, outputs] that
# it is, with joined heads; both if they have `min_dim_size_to_factor`. 'always', that matrix of any size. 'never'.
FactorRule = Literal['largest', 'matrix', 'always', 'never']

# T5X's `standard_logical_factor_rules`, of models whose layers are weights of their own, and of scanned ones
# (`scalable_t5`): there, as of experts, a weight of 3 dims or more is factored whatever its size.
T5X_FACTOR_RULES: tuple[tuple[str, FactorRule], ...] = ((r'.*/experts/', 'always'), ('', 'matrix'))
T5X_SCANNED_FACTOR_RULES: tuple[tuple[str, FactorRule], ...] = (
  (r'.*position_bias/', 'never'),
  (r'(encoder_)?stack/', 'always'),
  *T5X_FACTOR_RULES,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(OptimizerSettings):
  """Adafactor as T5 and Pax use it. Layers of a scanned stack are separate weights.

  Attributes:
    momentum: decay of an average (T5X's beta1, not debiased); None: no average.
    momentum_of: what is averaged: 'directions', before the learning rate multiplies them; or 'steps', after it, as in
      T5X. The two are equal while the learning rate is constant.
    momentum_dtype: of the stored average.
    decay_exponent: update t = 1, 2, ... keeps `1 - t ** -decay_exponent` of the old second moments.
    step_offset: counts t from this many updates on, so that a fine-tuning forgets older second moments.
    factor_rules: (regular expression, FactorRule) pairs, in order: the first whose expression matches the beginning of
      a weight's name applies; 'largest' where none does.
    min_dim_size_to_factor: second moments are factored where a layer's weight has two dims of at least this size.
    epsilon: added to the squared gradient.
    clipping_threshold: the largest rms of one layer's direction before the parameter scale; None turns it off.
    multiply_by_parameter_scale: makes the learning rate relative to the rms of the layer's weight; or a regular
      expression, for the weights whose names it matches at the beginning.
    min_parameter_scale: lower bound of that rms.
    max_parameter_scale: upper bound of that rms; None: no bound.
    weight_decay_exponent: weights decay by `weight_decay * learning_rate ** weight_decay_exponent` in each step.
  """

  momentum: float | None = None
  momentum_of: Literal['directions', 'steps'] = 'directions'
  momentum_dtype: str = 'float32'
  decay_exponent: float = 0.8
  step_offset: int = 0
  factor_rules: tuple[tuple[str, FactorRule], ...] = ()
  min_dim_size_to_factor: int = 128
  epsilon: float = 1e-30
  clipping_threshold: float | None = 1.0
  multiply_by_parameter_scale: bool | str = True
  min_parameter_scale: float = 1e-3
  max_parameter_scale: float | None = None
  weight_decay_exponent: float = 1.0

  @classmethod
  def as_t5x(cls, *, scanned: bool = False, **settings: Any) -> 'Adafactor':
    """Returns the settings that T5X's defaults mean, changed by `settings`.

    Args:
      scanned: whether T5X's layers are one weight, as in its `scalable_t5`.
      settings: `learning_rate` and others.
    """
    defaults: dict[str, Any] = {
      'factor_rules': T5X_SCANNED_FACTOR_RULES if scanned else T5X_FACTOR_RULES,
      'momentum_of': 'steps',
      'weight_decay_exponent': 0.0,
      'decay_exempt_tags': (),
    }
    return cls(**defaults | settings)

  @property
  def applies_learning_rate(self) -> bool:
    """Whether directions include the learning rate."""
    return self.momentum_of == 'steps' or self.weight_decay_exponent != 1

  def __post_init__(self):
    super().__post_init__()
    for name in (
      'decay_exponent',
      'min_dim_size_to_factor',
      'min_parameter_scale',
      'max_parameter_scale',
      'clipping_threshold',
    ):
      value = getattr(self, name)
      if value is not None and not value > 0:
        raise UserError(f'Adafactor.{name} is {value}; it must be larger than 0.')
    if self.momentum_of not in ('directions', 'steps'):
      raise UserError(f"Adafactor.momentum_of is {self.momentum_of!r}; it must be 'directions' or 'steps'.")
    for pattern, rule in self.factor_rules:
      if rule not in get_args(FactorRule):
        raise UserError(
          f'Adafactor.factor_rules has {rule!r} for {pattern!r}; it must be one of {get_args(FactorRule)}.'
        )

  def transformation(self, weight_specs: Any) -> SkippableTransformation:
    """Returns the transformation from gradients to the direction, or to the step if it applies the learning rate."""
    if not self.applies_learning_rate:
      return super().transformation(weight_specs)
    directions, *average = self._direction(weight_specs)
    if self.momentum_of == 'directions':
      return chain(directions, *average, _by_learning_rate(), *self._decay(weight_specs))
    return chain(directions, _by_learning_rate(), *average, *self._decay(weight_specs))

  def _decay(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    exempt = set(self.decay_exempt_tags)

    def update(steps: Any, state: Any, weights: Any = None, *, learning_rate: Any, **extra_args: Any) -> Any:
      rate = self.weight_decay * learning_rate**self.weight_decay_exponent
      decayed = jax.tree.map(
        lambda spec, s, w: s if exempt.intersection(spec.tags) else s + rate * w, weight_specs, steps, weights
      )
      return decayed, state

    return [optax.GradientTransformationExtraArgs(optax.init_empty_state, update)] if self.weight_decay else []

  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    pieces = [
      scale_by_adafactor(
        weight_specs,
        decay_exponent=self.decay_exponent,
        step_offset=self.step_offset,
        factor_rules=self.factor_rules,
        min_dim_size_to_factor=self.min_dim_size_to_factor,
        epsilon=self.epsilon,
        clipping_threshold=self.clipping_threshold,
        multiply_by_parameter_scale=self.multiply_by_parameter_scale,
        min_parameter_scale=self.min_parameter_scale,
        max_parameter_scale=self.max_parameter_scale,
      )
    ]
    if self.momentum is not None:
      pieces.append(optax.ema(self.momentum, debias=False, accumulator_dtype=jnp.dtype(self.momentum_dtype)))
    return pieces


def _by_learning_rate() -> optax.GradientTransformationExtraArgs:
  def update(directions: Any, state: Any, weights: Any = None, *, learning_rate: Any, **extra_args: Any) -> Any:
    return jax.tree.map(lambda d: learning_rate * d, directions), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def scale_by_adafactor(
  weight_specs: Any,
  *,
  decay_exponent: float,
  min_dim_size_to_factor: int,
  epsilon: float,
  clipping_threshold: float | None,
  multiply_by_parameter_scale: bool | str,
  min_parameter_scale: float,
  max_parameter_scale: float | None = None,
  step_offset: int = 0,
  factor_rules: tuple[tuple[str, FactorRule], ...] = (),
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
    multiply_by_parameter_scale: makes the learning rate relative to the rms of the layer's weight; see Adafactor.
    min_parameter_scale: lower bound of that rms, so that weights of zeros can move.
    max_parameter_scale: upper bound of that rms; None: no bound.
    step_offset: is subtracted from t.
    factor_rules: see Adafactor.
  """

  def rule_of(path: Any) -> FactorRule:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    return next((rule for pattern, rule in factor_rules if re.match(pattern, name)), 'largest')

  def is_relative(path: Any) -> bool:
    given = multiply_by_parameter_scale
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    return re.match(given, name) is not None if isinstance(given, str) else given

  def factored_rms(rule: FactorRule) -> optax.GradientTransformation:
    return optax.scale_by_factored_rms(
      factored=rule != 'never',
      decay_rate=decay_exponent,
      step_offset=step_offset,
      min_dim_size_to_factor=1 if rule == 'always' else min_dim_size_to_factor,
      epsilon=epsilon,
    )

  def per_layer(function, spec: WeightSpec, in_axes):
    for _ in range(spec.num_separate_dims):
      function = jax.vmap(function, in_axes=in_axes)
    return function

  def viewed(x: jax.Array, spec: WeightSpec, rule: FactorRule) -> jax.Array:
    """Reshapes an array like the weight to the matrices that the rule factors."""
    if rule not in ('matrix', 'always') or x.shape != spec.shape:
      return x
    return x.reshape(*x.shape[: spec.num_separate_dims], *layer_matrix(spec))

  def unzip(tree_of_tuples: Any, num: int) -> Any:
    return jax.tree.transpose(jax.tree.structure(weight_specs), jax.tree.structure((0,) * num), tree_of_tuples)

  def init_weight(path: Any, spec: WeightSpec, weight: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    rule = rule_of(path)

    def init_layer(weight: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
      state = factored_rms(rule).init(weight)
      return state.v_row, state.v_col, state.v

    v_row, v_col, v = per_layer(init_layer, spec, 0)(viewed(weight, spec, rule))
    return v_row, v_col, v.reshape(weight.shape) if v.size == weight.size else v

  def init(weights: Any) -> optax.FactoredState:
    v_row, v_col, v = unzip(jax.tree_util.tree_map_with_path(init_weight, weight_specs, weights), 3)
    return optax.FactoredState(count=jnp.zeros((), jnp.int32), v_row=v_row, v_col=v_col, v=v)

  def update(grads: Any, state: optax.FactoredState, weights: Any) -> tuple[Any, optax.FactoredState]:
    def update_weight(path: Any, spec: WeightSpec, *operands: jax.Array):
      rule, relative = rule_of(path), is_relative(path)

      def update_layer(count, grad, v_row, v_col, v, weight):
        old = optax.FactoredState(count=count, v_row=v_row, v_col=v_col, v=v)
        direction, new = factored_rms(rule).update(grad, old, weight)
        if clipping_threshold is not None:
          direction, _ = optax.clip_by_block_rms(clipping_threshold).update(direction, optax.EmptyState(), weight)
        if relative:
          scale = jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(weight))), min_parameter_scale)
          direction = direction * (scale if max_parameter_scale is None else jnp.minimum(scale, max_parameter_scale))
        return direction, new.v_row, new.v_col, new.v

      grad, v_row, v_col, v, weight = (viewed(x, spec, rule) for x in operands)
      # The count is the same for all layers, so vmap does not map over it.
      run = per_layer(update_layer, spec, (None, 0, 0, 0, 0, 0))
      direction, v_row, v_col, new_v = run(state.count, grad, v_row, v_col, v, weight)
      return direction.reshape(spec.shape), v_row, v_col, new_v.reshape(operands[3].shape)

    results = jax.tree_util.tree_map_with_path(
      update_weight, weight_specs, grads, state.v_row, state.v_col, state.v, weights
    )
    directions, v_row, v_col, v = unzip(results, 4)
    return directions, optax.FactoredState(count=state.count + 1, v_row=v_row, v_col=v_col, v=v)

  return optax.GradientTransformation(init, update)
