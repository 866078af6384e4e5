"""Adafactor, with separate statistics for each layer and each expert.

Second moments of a weight [..., R, C] are stored as their means over C (`v_row`) and over R (`v_col`), after Shazeer
and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (arXiv 1804.04235). A scanned weight [L, R,
C] is treated as L weights by `jax.vmap` over optax's transformations: otherwise L could become a factored dim, and one
rms would cover all layers.

In the same way, expert weights, [E, R, C] or [L, E, R, C] with the tag `expert`, are treated as E weights per layer.
Their moments [L, E, R] and [L, E, C] are on the devices of their experts. Clipping and parameter scale are computed per
expert, as with T5X's factor rules for experts. A rarely chosen expert has small second moments when tokens reach it;
with one rms over all experts, its step could be sqrt(E) times longer, and clipping would shorten the steps of the other
experts. Below, "one layer's weight" is the weight of one expert in one layer if the weight has experts.

T5X chooses the factored dims of each weight by rules. `Adafactor.as_t5x` has T5X's rules, and T5X's order of learning
rate, momentum and decay.

Shapes: L layers of a scanned stack, E experts, R and C the two largest dims of one layer's weight (R <= C).
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from spmd_tasks.errors import UserError
from spmd_tasks.learning.layer_weights import as_matrices
from spmd_tasks.learning.optimizers import OptimizerSettings, decay_mask
from spmd_tasks.learning.skipping import SkippableTransformation, chain
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.weight_names import check_pattern, compile_pattern
from spmd_tasks.sharding.weights import leaf_name

# How one layer's weight is factored. 'largest': over its two largest dims. 'matrix': as a matrix [inputs, outputs] with
# merged heads. Both only if the dims have `min_dim_size_to_factor`. 'always': as a matrix of any size. 'never'.
FactorRule = Literal['largest', 'matrix', 'always', 'never']

# T5X's `standard_logical_factor_rules`, for models without a scan and with one (`scalable_t5`). With a scan, and for
# experts, a weight of 3 dims or more is factored whatever its size.
T5X_FACTOR_RULES: tuple[tuple[str, FactorRule], ...] = ((r'.*/experts/', 'always'), ('', 'matrix'))
T5X_SCANNED_FACTOR_RULES: tuple[tuple[str, FactorRule], ...] = (
  (r'.*position_bias/', 'never'),
  (r'(encoder_)?stack/', 'always'),
  *T5X_FACTOR_RULES,
)
# For `scalable_t5` without a scan: attention kernels have 3 dims.
T5X_HEADS_FACTOR_RULES: tuple[tuple[str, FactorRule], ...] = ((r'.*attention/\w+/kernel', 'always'), *T5X_FACTOR_RULES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adafactor(OptimizerSettings):
  """Adafactor as T5 and Pax use it. Layers of a scanned stack are separate weights.

  Attributes:
    momentum: decay of an average (T5X's beta1, not debiased); None: no average.
    momentum_of: what is averaged: 'directions', before they are multiplied by the learning rate; or 'steps', after it,
      as in T5X. The two are equal while the learning rate is constant.
    momentum_dtype: dtype of the stored average.
    decay_exponent: the decay of the second moments at update t = 1, 2, ... is `1 - t ** -decay_exponent`.
    step_offset: subtracted from t, so that fine-tuning forgets older second moments.
    factor_rules: (regular expression, FactorRule) pairs; the first expression that matches the beginning of a weight's
      name applies, and 'largest' if none does.
    min_dim_size_to_factor: second moments are factored if one layer's weight has two dims of at least this size.
    epsilon: added to the squared gradient.
    clipping_threshold: the largest rms of one layer's direction, before the parameter scale; None turns clipping off.
    multiply_by_parameter_scale: whether directions are multiplied by the rms of one layer's weight; or a regular
      expression for the weights for which they are, by the beginning of their names.
    min_parameter_scale: lower bound of this rms.
    max_parameter_scale: upper bound of this rms; None for no bound.
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
  def as_t5x(cls, *, scanned: bool = False, heads_apart: bool = False, **settings: Any) -> 'Adafactor':
    """Returns T5X's defaults, changed by `settings`, which must include `learning_rate`.

    Args:
      scanned: whether T5X stacks layers into one weight, as in its `scalable_t5` with a scan.
      heads_apart: whether T5X's kernels have a dim for heads, as in `scalable_t5` without a scan.
    """
    rules = T5X_HEADS_FACTOR_RULES if heads_apart else T5X_FACTOR_RULES
    defaults: dict[str, Any] = {
      'factor_rules': T5X_SCANNED_FACTOR_RULES if scanned else rules,
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
    scales = ('min_parameter_scale', 'max_parameter_scale', 'clipping_threshold')
    for name in ('decay_exponent', 'min_dim_size_to_factor', *scales):
      value = getattr(self, name)
      if value is not None and not value > 0:
        raise UserError(f'Adafactor.{name} is {value}; it must be larger than 0.')
    if self.base_width is not None:
      raise UserError(f'Adafactor has no rule for base_width, which is {self.base_width}: use AdamW or Muon.')
    if self.momentum_of not in ('directions', 'steps'):
      raise UserError(f"Adafactor.momentum_of is {self.momentum_of!r}; it must be 'directions' or 'steps'.")
    if isinstance(self.multiply_by_parameter_scale, str):
      check_pattern(self.multiply_by_parameter_scale, 'Adafactor.multiply_by_parameter_scale')
    for pattern, rule in self.factor_rules:
      check_pattern(pattern, 'Adafactor.factor_rules')
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
      return chain(directions, *average, _scale_by_learning_rate(), *self._decay(weight_specs))
    return chain(directions, _scale_by_learning_rate(), *average, *self._decay(weight_specs))

  def _decay(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    mask = decay_mask(weight_specs, self.decay_exempt_tags)

    def update(steps: Any, state: Any, weights: Any = None, *, learning_rate: Any, **extra_args: Any) -> Any:
      rate = self.weight_decay * learning_rate**self.weight_decay_exponent
      new_steps = jax.tree.map(lambda decays, s, w: s + rate * w if decays else s, mask, steps, weights)
      return new_steps, state

    return [optax.GradientTransformationExtraArgs(optax.init_empty_state, update)] if self.weight_decay else []

  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    transformations = [self._scale_by_factored_rms(weight_specs)]
    if self.momentum is not None:
      dtype = jnp.dtype(self.momentum_dtype)
      transformations.append(optax.ema(self.momentum, debias=False, accumulator_dtype=dtype))
    return transformations

  def _scale_by_factored_rms(self, weight_specs: Any) -> optax.GradientTransformation:
    """Divides by the factored root mean square, clips each layer's rms, multiplies by each layer's parameter scale.

    The state is one `optax.FactoredState` for the whole tree: a scalar count, and `v_row`, `v_col` and `v` congruent to
    the weights. For a moment that a weight does not need, it has one zero per layer as a placeholder: [1], [L, 1] for a
    stack, [L, E, 1] for a stack of experts.
    """

    def unzip(tree_of_tuples: Any, num: int) -> Any:
      return jax.tree.transpose(jax.tree.structure(weight_specs), jax.tree.structure((0,) * num), tree_of_tuples)

    def init_weight(path: Any, spec: WeightSpec, weight: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
      rule = self._factor_rule(path)

      def init_layer(weight: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        state = self._factored_rms(rule).init(weight)
        return state.v_row, state.v_col, state.v

      v_row, v_col, v = _vmap_layers(init_layer, spec, 0)(_reshape_for(rule, weight, spec))
      return v_row, v_col, v.reshape(weight.shape) if v.size == weight.size else v

    def init(weights: Any) -> optax.FactoredState:
      v_row, v_col, v = unzip(jax.tree_util.tree_map_with_path(init_weight, weight_specs, weights), 3)
      return optax.FactoredState(count=jnp.zeros((), jnp.int32), v_row=v_row, v_col=v_col, v=v)

    def update(grads: Any, state: optax.FactoredState, weights: Any) -> tuple[Any, optax.FactoredState]:
      def update_weight(path: Any, spec: WeightSpec, *operands: jax.Array):
        rule, is_relative = self._factor_rule(path), self.multiply_by_parameter_scale
        if isinstance(is_relative, str):
          is_relative = bool(compile_pattern(is_relative).match(leaf_name(path)))

        def update_layer(count, grad, v_row, v_col, v, weight):
          old = optax.FactoredState(count=count, v_row=v_row, v_col=v_col, v=v)
          direction, new = self._factored_rms(rule).update(grad, old, weight)
          if self.clipping_threshold is not None:
            clip = optax.clip_by_block_rms(self.clipping_threshold)
            direction, _ = clip.update(direction, optax.EmptyState(), weight)
          if is_relative:
            scale = jnp.sqrt(jnp.mean(jnp.square(weight)))
            direction = direction * jnp.clip(scale, self.min_parameter_scale, self.max_parameter_scale)
          return direction, new.v_row, new.v_col, new.v

        # All layers share the count, so vmap does not map over it.
        update_layers = _vmap_layers(update_layer, spec, (None, 0, 0, 0, 0, 0))
        direction, v_row, v_col, v = update_layers(state.count, *(_reshape_for(rule, x, spec) for x in operands))
        return direction.reshape(spec.shape), v_row, v_col, v.reshape(operands[3].shape)

      results = jax.tree_util.tree_map_with_path(
        update_weight, weight_specs, grads, state.v_row, state.v_col, state.v, weights
      )
      directions, v_row, v_col, v = unzip(results, 4)
      return directions, optax.FactoredState(count=state.count + 1, v_row=v_row, v_col=v_col, v=v)

    return optax.GradientTransformation(init, update)

  def _factor_rule(self, path: Any) -> FactorRule:
    return next(
      (rule for pattern, rule in self.factor_rules if compile_pattern(pattern).match(leaf_name(path))), 'largest'
    )

  def _factored_rms(self, rule: FactorRule) -> optax.GradientTransformation:
    return optax.scale_by_factored_rms(
      factored=rule != 'never',
      decay_rate=self.decay_exponent,
      step_offset=self.step_offset,
      min_dim_size_to_factor=1 if rule == 'always' else self.min_dim_size_to_factor,
      epsilon=self.epsilon,
    )


def _vmap_layers(function: Callable[..., Any], spec: WeightSpec, in_axes: Any) -> Callable[..., Any]:
  for _ in range(spec.num_separate_dims):
    function = jax.vmap(function, in_axes=in_axes)
  return function


def _reshape_for(rule: FactorRule, x: jax.Array, spec: WeightSpec) -> jax.Array:
  """Reshapes an array like the weight to matrices, if the rule factors matrices."""
  return as_matrices(x, spec) if rule in ('matrix', 'always') and x.shape == spec.shape else x


def _scale_by_learning_rate() -> optax.GradientTransformationExtraArgs:
  def update(directions: Any, state: Any, weights: Any = None, *, learning_rate: Any, **extra_args: Any) -> Any:
    return jax.tree.map(lambda d: learning_rate * d, directions), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
