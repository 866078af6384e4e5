"""Learner: computes new weights and a new state from gradients (optax underneath).

The arithmetic is float32 whatever the dtype of the weights. A step with a non-finite loss or gradient changes only the
counts of skipped steps, and so does a spike (spikes.py). Frozen weights (frozen_weights.py) are ignored.
"""

import abc
from collections.abc import Mapping
import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

from absl import logging
import fiddle as fdl
from flax import struct, traverse_util
import jax
import jax.numpy as jnp
import optax

from spmd_tasks.errors import UserError
from spmd_tasks.learning import optimizer_specs, schedules
from spmd_tasks.learning.evaluation_weights import evaluation_weights, has_evaluation_weights
from spmd_tasks.learning.expert_weights import scale_expert_grads, update_balance_biases
from spmd_tasks.learning.from_optax import FromOptax
from spmd_tasks.learning.frozen_weights import fill_in, without_frozen, without_tag
from spmd_tasks.learning.host_state import host_state_specs, sharded_first, streamed
from spmd_tasks.learning.optimizers import Optimizer, OptimizerSettings
from spmd_tasks.learning.skipping import SkippableTransformation, keep_if_finite, skippable
from spmd_tasks.learning.spikes import RecentSteps
from spmd_tasks.learning.unread_gradients import unread_gradients
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.reductions import sum_of_squares
from spmd_tasks.sharding.weights import (
  BALANCE_BIAS_TAG,
  WEIGHT_FACTORS,
  leaf_name,
  leaves_by_name,
  replicated_spec,
)


class LearnerState(struct.PyTreeNode):
  """The state of the learner between steps.

  Attributes:
    opt_state: optax's state, float32 unless the optimizer sets other dtypes.
    ema_weights: float32, congruent to the trained weights; None without `ema_decay`.
    num_skipped: int32 scalar, the number of steps skipped since the start of the job.
    num_skipped_in_a_row: int32 scalar, the number of steps skipped since the last applied step.
    recent: the losses and gradient norms of recent steps; None without `spike_threshold`.
  """

  opt_state: Any
  ema_weights: Any
  num_skipped: jax.Array
  num_skipped_in_a_row: jax.Array
  recent: RecentSteps | None = None


def global_norm(tree: Any, weight_specs: Any) -> jax.Array:
  """Returns the L2 norm of a tree congruent to the weights, a float32 scalar accumulated in float32."""
  return jnp.sqrt(sum_of_squares(tree, weight_specs))


def _optimized(tree: Any, weight_specs: Any) -> Any:
  """Removes the weights that the optimizer does not update from a tree congruent to the weights."""
  return without_tag(tree, weight_specs, BALANCE_BIAS_TAG)


def _float32(tree: Any) -> Any:
  return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _warn_of_narrow_weights(weight_specs: Any) -> None:
  """Warns once if trained weights are stored in fewer bits than float32, which round small updates away."""
  dtypes = {name: jnp.dtype(spec.dtype) for name, spec in leaves_by_name(weight_specs).items()}
  narrow = [name for name, dtype in dtypes.items() if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4]
  if narrow:
    logging.log_first_n(
      logging.WARNING,
      '%d trained weights, such as %s, are stored in less than float32 without a float32 copy: small updates are '
      'rounded away. Declare them in float32 (param_dtype), and compute in bfloat16 (dtype).',
      1,
      len(narrow),
      narrow[0],
    )


@runtime_checkable
class BaseLearner(Protocol):
  """Turns a Task's gradients into new weights: `Learner`, or a subclass with another update rule.

  All trees are congruent to the model's weights and have true shapes; `weight_specs` has a WeightSpec per weight.

  Attributes:
    ema_decay: decay of the averaged weights; None for no average.
    num_microbatches: the number of microbatches into which the task splits a batch; see `accumulation.py`.
    accumulation: whether to take the 'mean' or the 'sum' of microbatches' gradients, as in Learner.
    max_consecutive_skips: the training program stops after this many consecutive skipped steps.
  """

  ema_decay: float | None = None
  num_microbatches: int = 1
  accumulation: Literal['mean', 'sum'] = 'mean'
  max_consecutive_skips: int = 10

  @abc.abstractmethod
  def init(self, weights: Any, weight_specs: Any) -> LearnerState:
    """Returns the state before the first step. `jax.eval_shape` traces it for the abstract state."""

  @abc.abstractmethod
  def update(
    self,
    grads: Any,
    loss: jax.Array,
    step: jax.Array,
    state: LearnerState,
    weights: Any,
    weight_specs: Any,
    factors: Any = None,
  ) -> tuple[Any, LearnerState, dict[str, jax.Array]]:
    """Computes one step, inside a compiled train step. Returns (new weights, new state, metrics).

    Takes the arguments of `Learner.update`. The metrics are float32 scalars by name and include `skipped` (0 or 1).
    """

  @abc.abstractmethod
  def state_split_dims(self, abstract_state: LearnerState, weight_specs: Any) -> LearnerState:
    """Returns a WeightSpec with split dims for each leaf of the abstract state."""

  def check_variables(self, variables: Mapping[str, Any]) -> None:
    """Called with a new model's variables by collection. Raises a UserError if the learner lacks one."""
    del variables

  def ema_decay_at(self, step: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    """Returns the decay of averages in the update at a step, if the learner has averages."""
    del step
    assert self.ema_decay is not None
    return self.ema_decay

  def evaluation_weights(self, state: LearnerState, weights: Any, *, averaged: bool) -> Any:
    """Returns the weights to evaluate: trained weights, or if `averaged` their average, and frozen weights."""
    return fill_in(state.ema_weights, weights) if averaged else weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner(BaseLearner):
  """Settings and pure functions of one optimizer step.

  Attributes:
    optimizer: an optimizer such as `AdamW(learning_rate=3e-4)`, or of optax, such as `optax.adam(3e-4)`; or its
      fdl.Config, which is built.
    expert_grad_scale: factor of the gradients of experts' weights, applied first; see `expert_weights.py`.
    balance_bias_rate: the step size of routers' balance biases, by default DeepSeek-V3's; see `expert_weights.py`.
    clip_global_norm: gradients are scaled down to this global norm if theirs is larger; None: no clipping.
    ema_decay: decay of the moving average of the weights, `ema = decay * ema + (1 - decay) * weights`, which starts at
      the initial weights; None: no average.
    ema_warmup: whether the decay grows to `ema_decay`: after t updates it is at most (1 + t) / (10 + t), as in
      TensorFlow's `ExponentialMovingAverage` with `num_updates`, so that the initial weights are soon forgotten.
    num_microbatches: the number of microbatches into which a batch is split; see `accumulation.py`.
    accumulation: 'mean' gives the gradient of the full batch; 'sum' adds the microbatches' mean gradients, as T5X does.
    max_consecutive_skips: the training program stops after this many consecutive skipped steps.
    spike_threshold: a step is skipped if its loss or gradient norm lies more than this many standard deviations above
      the mean of the last `spike_window` steps; see `spikes.py`. None: only non-finite steps are skipped.
    spike_window: the number of recent steps with which a step is compared.
    state_on_host: whether the optimizer's state is stored in the host's pinned memory. An update copies it to the
      device a few layers at a time (`host_state.py`). Numbers are the same up to XLA's rounding of the last bit.
  """

  optimizer: Optimizer | optax.GradientTransformation | optax.MultiSteps
  expert_grad_scale: float | Literal['t5x'] = 1.0
  balance_bias_rate: float = 1e-3
  clip_global_norm: float | None = None
  ema_decay: float | None = None
  ema_warmup: bool = False
  num_microbatches: int = 1
  accumulation: Literal['mean', 'sum'] = 'mean'
  max_consecutive_skips: int = 10
  spike_threshold: float | None = None
  spike_window: int = 128
  state_on_host: bool = False

  def __post_init__(self):
    if isinstance(self.optimizer, fdl.Buildable):
      object.__setattr__(self, 'optimizer', fdl.build(self.optimizer))
    if isinstance(self.optimizer, optax.GradientTransformation | optax.MultiSteps):
      object.__setattr__(self, 'optimizer', FromOptax.of(self.optimizer))
    if not isinstance(self.optimizer, Optimizer):
      raise UserError(
        f'learner.optimizer is {self.optimizer!r}; it must be an Optimizer such as AdamW(learning_rate=3e-4), or an '
        'optax optimizer such as optax.adam(3e-4).'
      )
    scale, clip, decay = self.expert_grad_scale, self.clip_global_norm, self.ema_decay
    threshold = self.spike_threshold
    is_scale = scale == 't5x' or (isinstance(scale, int | float) and scale > 0)
    for name, is_valid, constraint in (
      ('expert_grad_scale', is_scale, "larger than 0, or 't5x' for the number of expert partitions of the mesh"),
      ('balance_bias_rate', self.balance_bias_rate >= 0, '0 (do not update biases) or more'),
      ('clip_global_norm', clip is None or clip > 0, 'larger than 0, or None to turn clipping off'),
      ('ema_decay', decay is None or 0 <= decay < 1, 'in [0, 1), or None to keep no average'),
      ('num_microbatches', self.num_microbatches >= 1, '1 (no accumulation) or more'),
      ('accumulation', self.accumulation in ('mean', 'sum'), "'mean' or 'sum'"),
      ('max_consecutive_skips', self.max_consecutive_skips >= 1, '1 (stop at the first) or more'),
      ('ema_warmup', not self.ema_warmup or decay is not None, 'False without ema_decay'),
      ('spike_threshold', threshold is None or threshold > 0, 'larger than 0, or None to skip no spikes'),
      ('spike_window', self.spike_window >= 4, '4 or more'),
    ):
      if not is_valid:
        raise UserError(f'learner.{name} is {getattr(self, name)!r}; it must be {constraint}.')

  def init(self, weights: Any, weight_specs: Any) -> LearnerState:
    """Returns the state before the first step. `jax.eval_shape` traces it for the abstract state."""
    weights, weight_specs = (without_frozen(tree, weight_specs) for tree in (weights, weight_specs))
    _warn_of_narrow_weights(weight_specs)
    # copy=True: a train step donates the average and the weights, so they must not share a buffer.
    ema_weights = None
    if self.ema_decay is not None:
      ema_weights = jax.tree.map(lambda w: jnp.array(w, jnp.float32, copy=True), weights)
    optimized, optimized_specs = (_optimized(tree, weight_specs) for tree in (weights, weight_specs))
    return LearnerState(
      opt_state=self.optimizer.transformation(optimized_specs).init(_float32(optimized)),
      ema_weights=ema_weights,
      num_skipped=jnp.zeros((), jnp.int32),
      num_skipped_in_a_row=jnp.zeros((), jnp.int32),
      recent=None if self.spike_threshold is None else RecentSteps.empty(self.spike_window),
    )

  def ema_decay_at(self, step: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
    decay = super().ema_decay_at(step)
    return jnp.minimum(decay, (1 + step) / (10 + step)) if self.ema_warmup else decay

  def evaluation_weights(self, state: LearnerState, weights: Any, *, averaged: bool) -> Any:
    """Returns the weights to evaluate: if `averaged` the moving average, else the weights that the optimizer evaluates.

    The tree of weights may lack frozen weights. If it is abstract and not averaged, it is returned unchanged.
    """
    if averaged:
      return fill_in(state.ema_weights, weights)
    return evaluation_weights(state.opt_state, weights)

  def check_variables(self, variables: Mapping[str, Any]) -> None:
    """Raises a UserError if the optimizer needs weight factors, and the model does not compute any."""
    if self.optimizer.needs_weight_factors and WEIGHT_FACTORS not in variables:
      raise UserError(
        f'{type(self.optimizer).__name__} needs attention with qk_clip, which the model does not have: set '
        'qk_clip=100.0 in its attention, or choose Muon.'
      )

  def update(
    self,
    grads: Any,
    loss: jax.Array,
    step: jax.Array,
    state: LearnerState,
    weights: Any,
    weight_specs: Any,
    factors: Any = None,
  ) -> tuple[Any, LearnerState, dict[str, jax.Array]]:
    """Computes one optimizer step.

    Args:
      grads: congruent to the weights; gradients of frozen weights may be None.
      loss: scalar; a step with a non-finite loss is skipped.
      step: int32 scalar, the train state's step, at which the learning rate is evaluated.
      state: the state that `init` or the previous step returned.
      weights: all weights, including frozen ones.
      weight_specs: a tree of WeightSpec congruent to the weights.
      factors: variables of the collection WEIGHT_FACTORS, by which new weights are multiplied; None for none.

    Returns:
      (new weights, new state, metrics). Metrics are float32 scalars: `grad_norm` after `expert_grad_scale`, before
      clipping and without balance biases; `weight_norm` of all trained weights after the step; `learning_rate`, if
      it is known; and `skipped`, 1 if the loss or a gradient was not finite or a spike. Weights whose gradients the
      optimizer does not read (unread_gradients.py) are excluded from metrics, clipping and skipping, and their
      gradients are set to 0. In a skipped step, weights, optimizer state and average are bit for bit the old ones. A
      gradient norm that overflows float32 counts as non-finite, because the optimizer's second moments would overflow.
    """
    all_weights = weights
    grads, weights, weight_specs = (without_frozen(tree, weight_specs) for tree in (grads, weights, weight_specs))
    grads = scale_expert_grads(_float32(grads), weight_specs, self.expert_grad_scale)
    optimized_grads, optimized_weights, optimized_specs = (
      _optimized(tree, weight_specs) for tree in (grads, weights, weight_specs)
    )
    rate = self.optimizer.learning_rate
    learning_rate = None if rate is None else schedules.learning_rate_at(rate, step)
    extra_args = {'learning_rate': learning_rate, 'value': loss, 'step': step}
    if isinstance(self.optimizer, OptimizerSettings):  # an optimizer of our own, which reads all gradients
      is_unread = jax.tree.map(lambda _: False, optimized_grads)
    else:
      transformation, float32_weights = self.optimizer.transformation(optimized_specs), _float32(optimized_weights)
      is_unread = unread_gradients(
        lambda grads, opt_state: skippable(transformation).update(
          grads, opt_state, float32_weights, is_finite=True, **extra_args
        ),
        optimized_grads,
        jax.eval_shape(transformation.init, float32_weights),
      )
    optimized_grads = jax.tree.map(lambda g, unread: jnp.zeros_like(g) if unread else g, optimized_grads, is_unread)
    if self.state_on_host:
      optimized_grads = sharded_first(optimized_grads, optimized_specs)
    grad_norm = global_norm(optimized_grads, optimized_specs)
    # The norm is finite only if every gradient element is: inf and NaN propagate through the sum of squares.
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    is_applied, recent = is_finite, state.recent
    if recent is not None and self.spike_threshold is not None:
      values, limits = jnp.stack([loss.astype(jnp.float32), grad_norm]), recent.limits(self.spike_threshold)
      is_applied &= jnp.all(values <= limits)
      recent = keep_if_finite(is_finite, recent.append(jnp.minimum(values, limits)), recent)
    if self.clip_global_norm is not None:
      # The scale is exactly 1 up to the threshold, and never divides by zero.
      extra_args['clip_scale'] = self.clip_global_norm / jnp.maximum(grad_norm, self.clip_global_norm)
    rule = self._update_rule(optimized_specs)
    if self.state_on_host:
      rule = streamed(self._update_rule, self.optimizer, optimized_specs)
    new_weights, opt_state = rule.update(
      optimized_grads, state.opt_state, optimized_weights, is_finite=is_applied, **extra_args
    )
    biases = update_balance_biases(weights, grads, weight_specs, self.balance_bias_rate)
    new_weights = fill_in(new_weights, keep_if_finite(is_applied, biases, weights))
    if factors is not None:
      factors = jax.tree.map(lambda factor: jnp.where(is_applied, factor, 1), factors)
      new_weights = multiply_by_factors(new_weights, weight_specs, factors)
    ema_weights = state.ema_weights
    if self.ema_decay is not None:
      decay = self.ema_decay_at(step)
      average = jax.tree.map(lambda e, w: decay * e + (1 - decay) * w.astype(jnp.float32), ema_weights, new_weights)
      ema_weights = keep_if_finite(is_applied, average, ema_weights)

    def without_unread(tree: Any) -> Any:
      """Replaces the leaves of weights whose gradients are not read by None."""
      return jax.tree.map(lambda _, leaf, unread: None if unread else leaf, weight_specs, tree, is_unread)

    skipped = jnp.where(is_applied, 0, 1).astype(jnp.int32)
    new_state = LearnerState(
      opt_state=opt_state,
      ema_weights=ema_weights,
      num_skipped=state.num_skipped + skipped,
      num_skipped_in_a_row=jnp.where(is_applied, 0, state.num_skipped_in_a_row + 1),
      recent=recent,
    )
    metrics = {
      'grad_norm': grad_norm,
      'weight_norm': global_norm(without_unread(new_weights), without_unread(weight_specs)),
      'skipped': skipped.astype(jnp.float32),
    }
    if learning_rate is not None:
      metrics['learning_rate'] = learning_rate
    return fill_in(new_weights, all_weights), new_state, metrics

  def _update_rule(self, weight_specs: Any) -> SkippableTransformation:
    """Returns the optimizer's transformation whose `update` takes the weights themselves and returns the new ones.

    It also takes `clip_scale`, by which gradients are multiplied if `clip_global_norm` is set.
    """
    transformation = skippable(self.optimizer.transformation(weight_specs))

    def update(
      grads: Any, state: Any, weights: Any, *, is_finite: Any, learning_rate: Any, clip_scale: Any = None, **others: Any
    ) -> tuple[Any, Any]:
      if clip_scale is not None:
        grads = jax.tree.map(lambda g: g * clip_scale, grads)
      steps, state = transformation.update(
        grads, state, _float32(weights), is_finite=is_finite, learning_rate=learning_rate, **others
      )
      if not self.optimizer.applies_learning_rate:
        steps = jax.tree.map(lambda direction: learning_rate * direction, steps)
      new_weights = jax.tree.map(lambda w, s: (w.astype(jnp.float32) - s).astype(w.dtype), weights, steps)
      return keep_if_finite(is_finite, new_weights, weights), state

    return SkippableTransformation(transformation.init, update)

  def state_split_dims(self, abstract_state: LearnerState, weight_specs: Any) -> LearnerState:
    """Returns a WeightSpec per leaf of the abstract state: moments and averages are split like their weights."""
    weight_specs = without_frozen(weight_specs, weight_specs)
    optimized_specs = _optimized(weight_specs, weight_specs)
    state_specs = optimizer_specs.state_weight_specs
    if self.state_on_host:
      if has_evaluation_weights(abstract_state.opt_state):
        raise UserError(
          f'learner.state_on_host is True, but evals need the state of {type(self.optimizer).__name__}: set it to '
          'False, or choose an optimizer that evaluates the weights that it trains.'
        )
      state_specs = host_state_specs
    return abstract_state.replace(
      opt_state=state_specs(abstract_state.opt_state, optimized_specs),
      ema_weights=optimizer_specs.state_weight_specs(abstract_state.ema_weights, weight_specs),
      num_skipped=replicated_spec(abstract_state.num_skipped),
      num_skipped_in_a_row=replicated_spec(abstract_state.num_skipped_in_a_row),
      recent=jax.tree.map(replicated_spec, abstract_state.recent),
    )


def multiply_by_factors(weights: Any, weight_specs: Any, factors: Any) -> Any:
  """Multiplies weights [..., H, K] by factors [stacked..., H, K].

  The factor of weight `attention/query/kernel` is named `attention/query.kernel`.
  """
  factors_by_name = {name.replace('.', '/'): x for name, x in traverse_util.flatten_dict(factors, sep='/').items()}

  def multiply(path: Any, spec: WeightSpec, weight: jax.Array) -> jax.Array:
    factor = factors_by_name.get(leaf_name(path))
    if factor is None:
      return weight
    stacked, head_dims = factor.shape[: spec.stacked], factor.shape[spec.stacked :]
    factor = factor.reshape(*stacked, *(1,) * (weight.ndim - factor.ndim), *head_dims)
    return (weight * factor).astype(weight.dtype)

  return jax.tree_util.tree_map_with_path(multiply, weight_specs, weights)


def as_learner(learner: Any) -> Any:
  """Wraps an optimizer, ours or optax's, in a Learner; returns anything else unchanged."""
  if isinstance(learner, Optimizer | optax.GradientTransformation | optax.MultiSteps):
    return Learner(optimizer=learner)
  return learner
