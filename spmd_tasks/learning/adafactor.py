"""Adafactor, for each layer and each expert separately.

Second moments of a weight [..., R, C] are stored as their means over C (`v_row`) and over R (`v_col`), after Shazeer
and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (arXiv 1804.04235). A scanned weight [L, R,
C] is L weights, by `jax.vmap` over optax's transformations: as one weight, L could become a factored dim, and one rms
would cover all layers.

Weights of experts, [E, R, C] or [L, E, R, C] with the tag `expert`, are E weights per layer in the same way. Their
moments are [L, E, R] and [L, E, C] and lie on the devices of their experts; clipping and parameter scale are computed
per expert, as with T5X's factor rules for experts. A rarely chosen expert has small second moments when tokens reach
it. With one rms over all experts, its step could be sqrt(E) times as long and would shorten the steps of the others.
Below, "a layer's weight" means the weight of one expert of the layer, for weights of experts.

T5X chooses the rows and columns of each weight by rules: `factor_rules=T5X_FACTOR_RULES`, and with them T5X's order of
learning rate, momentum and decay, are in `Adafactor.as_t5x`.

`moment_rule` lays out the moments: they take the split dims that were not averaged away.

Shapes: L layers of a scanned stack, E experts, R and C the two largest dims of one layer's weight (R <= C).
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmd_tasks.errors import UserError
from spmd_tasks.learning.layer_weights import as_layers, layer_matrix
from spmd_tasks.learning.optimizers import OptimizerSettings, decay_mask
from spmd_tasks.learning.skipping import SkippableTransformation, chain
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.weight_names import check_pattern, compile_pattern
from spmd_tasks.sharding.weights import leaf_name

LeafRule = Callable[[str, Any, Any], Any]  # see optimizer_specs.py

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
# Of `scalable_t5` without a scan: attention's kernels have 3 dims.
T5X_HEADS_FACTOR_RULES: tuple[tuple[str, FactorRule], ...] = ((r'.*attention/\w+/kernel', 'always'), *T5X_FACTOR_RULES)


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
  def as_t5x(cls, *, scanned: bool = False, heads_apart: bool = False, **settings: Any) -> 'Adafactor':
    """Returns the settings that T5X's defaults mean, changed by `settings`, of which `learning_rate` is needed.

    Args:
      scanned: whether T5X's layers are one weight, as in its `scalable_t5`.
      heads_apart: whether heads are a dim of their own in weights of one layer, as in `scalable_t5` without a scan.
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
      return chain(directions, *average, _by_learning_rate(), *self._decay(weight_specs))
    return chain(directions, _by_learning_rate(), *average, *self._decay(weight_specs))

  def _decay(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    mask = decay_mask(weight_specs, self.decay_exempt_tags)

    def update(steps: Any, state: Any, weights: Any = None, *, learning_rate: Any, **extra_args: Any) -> Any:
      rate = self.weight_decay * learning_rate**self.weight_decay_exponent
      decayed = jax.tree.map(lambda decays, s, w: s + rate * w if decays else s, mask, steps, weights)
      return decayed, state

    return [optax.GradientTransformationExtraArgs(optax.init_empty_state, update)] if self.weight_decay else []

  def _direction(self, weight_specs: Any) -> list[optax.GradientTransformation]:
    pieces = [self._scale_by_factored_rms(weight_specs)]
    if self.momentum is not None:
      pieces.append(optax.ema(self.momentum, debias=False, accumulator_dtype=jnp.dtype(self.momentum_dtype)))
    return pieces

  def _scale_by_factored_rms(self, weight_specs: Any) -> optax.GradientTransformation:
    """Divides by the factored root mean square, clips each layer's rms, multiplies by each layer's parameter scale.

    The state is one `optax.FactoredState` for the whole tree: a scalar count, and `v_row`, `v_col` and `v` congruent to
    the weights. A moment that a weight does not need is a placeholder of one zero per layer: [1], [L, 1] for a stack,
    [L, E, 1] for a stack of experts.
    """

    def unzip(tree_of_tuples: Any, num: int) -> Any:
      return jax.tree.transpose(jax.tree.structure(weight_specs), jax.tree.structure((0,) * num), tree_of_tuples)

    def init_weight(path: Any, spec: WeightSpec, weight: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
      rule = self._rule_of(path)

      def init_layer(weight: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        state = self._factored_rms(rule).init(weight)
        return state.v_row, state.v_col, state.v

      v_row, v_col, v = _per_layer(init_layer, spec, 0)(_viewed(weight, spec, rule))
      return v_row, v_col, v.reshape(weight.shape) if v.size == weight.size else v

    def init(weights: Any) -> optax.FactoredState:
      v_row, v_col, v = unzip(jax.tree_util.tree_map_with_path(init_weight, weight_specs, weights), 3)
      return optax.FactoredState(count=jnp.zeros((), jnp.int32), v_row=v_row, v_col=v_col, v=v)

    def update(grads: Any, state: optax.FactoredState, weights: Any) -> tuple[Any, optax.FactoredState]:
      def update_weight(path: Any, spec: WeightSpec, *operands: jax.Array):
        rule, given = self._rule_of(path), self.multiply_by_parameter_scale
        is_relative = bool(compile_pattern(given).match(leaf_name(path))) if isinstance(given, str) else given

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

        # The count is the same for all layers, so vmap does not map over it.
        run = _per_layer(update_layer, spec, (None, 0, 0, 0, 0, 0))
        direction, v_row, v_col, v = run(state.count, *(_viewed(x, spec, rule) for x in operands))
        return direction.reshape(spec.shape), v_row, v_col, v.reshape(operands[3].shape)

      results = jax.tree_util.tree_map_with_path(
        update_weight, weight_specs, grads, state.v_row, state.v_col, state.v, weights
      )
      directions, v_row, v_col, v = unzip(results, 4)
      return directions, optax.FactoredState(count=state.count + 1, v_row=v_row, v_col=v_col, v=v)

    return optax.GradientTransformation(init, update)

  def _rule_of(self, path: Any) -> FactorRule:
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


def _per_layer(function: Callable[..., Any], spec: WeightSpec, in_axes: Any) -> Callable[..., Any]:
  for _ in range(spec.num_separate_dims):
    function = jax.vmap(function, in_axes=in_axes)
  return function


def _viewed(x: jax.Array, spec: WeightSpec, rule: FactorRule) -> jax.Array:
  """Reshapes an array like the weight to the matrices that the rule factors."""
  return as_layers(x, spec) if rule in ('matrix', 'always') and x.shape == spec.shape else x


def _by_learning_rate() -> optax.GradientTransformationExtraArgs:
  def update(directions: Any, state: Any, weights: Any = None, *, learning_rate: Any, **extra_args: Any) -> Any:
    return jax.tree.map(lambda d: learning_rate * d, directions), state

  return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def factored_dims(shape: Sequence[int], num_separate: int) -> tuple[int, int] | None:
  """Returns the dims that `optax.scale_by_factored_rms` averages away: (dropped in v_col, dropped in v_row).

  These are the second largest and the largest dim of one layer's weight; `np.argsort` breaks ties, as in optax. The
  `num_separate` leading dims count layers and experts. None if the weight of one layer has fewer than 2 dims.
  """
  layer_shape = tuple(shape[num_separate:])
  if len(layer_shape) < 2:
    return None
  order = np.argsort(layer_shape)
  return num_separate + int(order[-2]), num_separate + int(order[-1])


def _joined(weight: WeightSpec) -> WeightSpec:
  """Returns the spec of [S..., I, O]: a dim that joins several is split as the first of them."""
  num_separate, matrix, split_dims = weight.num_separate_dims, layer_matrix(weight), weight.all_split_dims
  firsts = (num_separate, num_separate + (weight.num_input_dims or 0))[: len(matrix)]
  if len(weight.shape) > num_separate + len(matrix):
    split_dims = (*split_dims[:num_separate], *[split_dims[d] for d in firsts])
  return dataclasses.replace(weight, shape=(*weight.shape[:num_separate], *matrix), split_dims=split_dims)


def moment_rule(otherwise: LeafRule, *, is_row: bool) -> LeafRule:
  """Returns the rule for v_row or v_col of `optax.FactoredState`; `otherwise` is that of leaves of another shape."""

  def rule(name: str, leaf: Any, weight: WeightSpec | None) -> WeightSpec:
    if weight is None:
      return otherwise(name, leaf, weight)
    for shown in (weight, _joined(weight)):  # our Adafactor factors [D, H, K], optax's sees D x HK
      dims = factored_dims(shown.shape, shown.num_separate_dims)
      if dims is None:
        continue
      dropped = dims[1] if is_row else dims[0]
      kept = [d for d in range(len(shown.shape)) if d != dropped]
      if tuple(leaf.shape) == tuple(shown.shape[d] for d in kept):
        split_dims = shown.all_split_dims
        return dataclasses.replace(
          weight,
          shape=tuple(leaf.shape),
          init=None,
          dtype=leaf.dtype,
          split_dims=tuple(split_dims[d] for d in kept),
          stacked=sum(d < weight.stacked for d in kept),
        )
    return otherwise(name, leaf, weight)

  return rule
