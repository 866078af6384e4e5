"""A second implementation of the formulas of a train step: the loss of language models, and the learner's update.

It is only a reference, and shares no code with the loss, the optimizer and the learner. A user's own loss, optimizers
other than AdamW and schedules other than LinearWarmupCosine have no formula here; they are called directly.

Shapes: B batch rows, T sequence, V vocabulary, L layers.
"""

from collections.abc import Mapping
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmd_tasks.layers import LanguageModelLoss, LossOutput
from spmd_tasks.learning import AdamW, Learner, LearnerState, LinearWarmupCosine
from spmd_tasks.learning.expert_weights import scale_expert_grads
from spmd_tasks.learning.frozen_weights import fill_in, without_frozen, without_tag
from spmd_tasks.learning.learner import multiply_by_factors
from spmd_tasks.learning.optimizers import OptimizerSettings
from spmd_tasks.learning.skipping import SkippableTransformation
from spmd_tasks.sharding.weights import BALANCE_BIAS_TAG, SPLIT_BY_DEFAULT


def has_loss_formula(loss: Any) -> bool:
  """Returns whether `language_model_loss` is the formula of a loss."""
  return isinstance(loss, LanguageModelLoss) and type(loss).__call__ is LanguageModelLoss.__call__


def language_model_loss(
  loss: LanguageModelLoss, predictions: Mapping[str, Any], batch: Mapping[str, Any]
) -> LossOutput:
  """Computes the loss of logits [B, T, V] and its metrics, from the definitions in LanguageModelLoss's docstring."""
  weights = batch['weights'].astype(jnp.float32)
  log_probs = jax.nn.log_softmax(predictions['logits'].astype(jnp.float32))
  vocab_size = log_probs.shape[-1]
  is_label = jax.nn.one_hot(batch['labels'], vocab_size)
  label_log_probs = jnp.sum(is_label * log_probs, axis=-1)
  smoothing, target, entropy = loss.label_smoothing, is_label, 0.0
  if smoothing and loss.smoothing == 'all':
    target = (1 - smoothing) * is_label + smoothing / vocab_size
  elif smoothing:
    target = (1 - smoothing) * is_label + smoothing / (vocab_size - 1) * (1 - is_label)
    entropy = -(1 - smoothing) * math.log(1 - smoothing) - smoothing * math.log(smoothing / (vocab_size - 1))
  z_loss = loss.z_loss_weight * jax.nn.logsumexp(predictions['logits'].astype(jnp.float32), axis=-1) ** 2
  objective = -jnp.sum(target * log_probs, axis=-1) - entropy + z_loss
  highest_other = jnp.max(jnp.where(is_label > 0, -jnp.inf, log_probs), axis=-1)
  num_tokens = jnp.sum(weights)

  def mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    total = jnp.sum(weights)
    return jnp.where(total == 0, 0.0, jnp.sum(values * weights) / jnp.where(total == 0, 1.0, total))

  weight, is_sum = num_tokens, False
  match loss.normalization:
    case 'tokens':
      value = mean(objective, weights)
    case 'all_tokens':
      weight = jnp.float32(weights.size)
      value = jnp.sum(objective * weights) / weights.size
    case 'sequences':
      ids = batch.get('segment_ids', jnp.ones_like(batch['labels']))
      is_same = ids[:, :, None] == ids[:, None, :]
      document_weight = jnp.sum(is_same * weights[:, None, :], axis=-1)
      shares = jnp.where(document_weight == 0, 0.0, weights / jnp.where(document_weight == 0, 1.0, document_weight))
      weight, value = jnp.sum(shares), mean(objective, shares)
    case divisor:
      is_sum = True
      value = jnp.sum(objective * weights) / (1.0 if divisor == 'sum' else divisor)
  metrics = {
    'cross_entropy': (mean(-label_log_probs, weights), num_tokens),
    'accuracy': (mean((label_log_probs > highest_other).astype(jnp.float32), weights), num_tokens),
  }
  if loss.z_loss_weight:
    metrics['z_loss'] = (mean(z_loss, weights), num_tokens)
  for name, values in predictions.get('aux', {}).items():
    layer_values = jnp.atleast_1d(values).astype(jnp.float32)
    metrics[name] = (jnp.where(num_tokens == 0, 0.0, jnp.sum(layer_values, axis=0) / len(layer_values)), num_tokens)
  value += sum(weight * metrics[name][0] for name, weight in loss.aux_loss_weights.items())
  return LossOutput(loss=value, weight=weight, is_sum=is_sum, metrics=metrics)


def learning_rate_at(rate: Any, step: int) -> float:
  """Returns the learning rate at a step."""
  if not isinstance(rate, LinearWarmupCosine):
    return float(rate(np.int32(step)) if callable(rate) else rate)
  if step < rate.warmup_steps:
    return rate.peak * step / rate.warmup_steps
  start = rate.warmup_steps if rate.decay_start is None else rate.decay_start
  progress = min(max((step - start) / (rate.total_steps - start), 0.0), 1.0)
  return rate.peak * (rate.final_fraction + (1 - rate.final_fraction) * (1 + math.cos(math.pi * progress)) / 2)


def update(
  learner: Learner,
  gradients: Any,
  loss: float,
  step: int,
  state: LearnerState,
  weights: Any,
  weight_specs: Any,
  factors: Any = None,
) -> tuple[Any, LearnerState, dict[str, float]]:
  """Computes `Learner.update` in float64 numpy: (new weights, new state, metrics)."""
  old, gradients, specs = (without_frozen(tree, weight_specs) for tree in (weights, gradients, weight_specs))
  if learner.expert_grad_scale != 1:
    gradients = scale_expert_grads(gradients, specs, learner.expert_grad_scale)
  gradients = _float64(gradients)
  optimized_gradients, optimized, optimized_specs = (
    without_tag(tree, specs, BALANCE_BIAS_TAG) for tree in (gradients, old, specs)
  )
  rate = learner.optimizer.learning_rate
  learning_rate = None if rate is None else learning_rate_at(rate, step)

  def optimize(gradients: Any) -> tuple[Any, Any]:
    arguments = (state.opt_state, optimized, optimized_specs, learning_rate, loss, step)
    return _direction(learner.optimizer, gradients, *arguments)

  is_untrained = _untrained_weights(learner.optimizer, optimized_gradients, optimize)
  optimized_gradients = jax.tree.map(
    lambda g, untrained: np.zeros_like(g) if untrained else g, optimized_gradients, is_untrained
  )
  grad_norm = _norm(optimized_gradients)

  def weight_norm(weights: Any) -> float:
    return _norm(jax.tree.map(lambda _, w, out: None if out else np.float64(w), specs, weights, is_untrained))

  is_finite = bool(np.isfinite(loss) and np.isfinite(grad_norm))
  metrics = {'grad_norm': grad_norm, 'skipped': float(not is_finite)}
  metrics |= {} if learning_rate is None else {'learning_rate': learning_rate}
  if not is_finite:
    counts = {name: np.int32(getattr(state, name) + 1) for name in ('num_skipped', 'num_skipped_in_a_row')}
    state = state.replace(**counts)
    return weights, state, metrics | {'weight_norm': weight_norm(old)}
  if learner.clip_global_norm is not None:
    scale = min(1.0, learner.clip_global_norm / grad_norm) if grad_norm else 1.0
    optimized_gradients = jax.tree.map(lambda g: g * scale, optimized_gradients)
  directions, opt_state = optimize(optimized_gradients)
  if not learner.optimizer.applies_learning_rate:
    directions = jax.tree.map(lambda d: learning_rate * d, directions)

  def new_weight(spec, weight, gradient, direction):
    if BALANCE_BIAS_TAG in spec.tags:
      direction = learner.balance_bias_rate * np.sign(gradient)
    return (np.asarray(weight, np.float64) - direction).astype(weight.dtype)

  new = jax.tree.map(new_weight, specs, old, gradients, directions)
  if factors is not None:
    new = jax.tree.map(np.asarray, multiply_by_factors(new, specs, factors))
  average = state.ema_weights
  if (decay := learner.ema_decay) is not None:
    decay = min(decay, (1 + step) / (10 + step)) if learner.ema_warmup else decay
    average = jax.tree.map(lambda e, w: decay * np.float64(e) + (1 - decay) * np.float64(w), average, new)
  if (recent := state.recent) is not None:  # too few steps run here for one to be a spike
    values = np.array(recent.values)
    values[:, recent.count % learner.spike_window] = loss, grad_norm
    recent = recent.replace(values=values, count=np.int32(recent.count + 1))
  state = state.replace(opt_state=opt_state, ema_weights=average, num_skipped_in_a_row=np.int32(0), recent=recent)
  return fill_in(new, weights), state, metrics | {'weight_norm': weight_norm(new)}


def _untrained_weights(optimizer: Any, gradients: Any, optimize: Any) -> Any:
  """Returns a tree of bools: true for weights that do not change, and whose gradient may even be NaN."""
  treedef: Any
  leaves, treedef = jax.tree.flatten(gradients)
  untrained: list[int] = []
  if not isinstance(optimizer, OptimizerSettings):  # our own optimizers train all weights
    untrained = [i for i, direction in enumerate(jax.tree.leaves(optimize(gradients)[0])) if not np.any(direction)]

  def are_read(indices: list[int]) -> bool:
    with_nans = [np.full_like(g, np.nan) if i in indices else g for i, g in enumerate(leaves)]
    return any(np.isnan(x).any() for x in jax.tree.leaves(_float64(optimize(treedef.unflatten(with_nans)))))

  if untrained and are_read(untrained):
    untrained = [i for i in untrained if not are_read([i])]
  return treedef.unflatten([i in untrained for i in range(len(leaves))])


def _direction(
  optimizer: Any, gradients: Any, state: Any, weights: Any, specs: Any, learning_rate: Any, loss: float, step: int
) -> tuple[Any, Any]:
  """Returns the direction of an optimizer, float64, and its new state."""
  if type(optimizer) is AdamW:
    return _adamw(optimizer, gradients, state, weights, specs)
  transformation = optimizer.transformation(specs)
  arguments: dict[str, Any] = {'learning_rate': learning_rate, 'value': np.float32(loss), 'step': np.int32(step)}
  if isinstance(transformation, SkippableTransformation):
    arguments['is_finite'] = True
  float32 = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), (gradients, weights))
  directions, state = optax.with_extra_args_support(transformation).update(float32[0], state, float32[1], **arguments)
  return _float64(directions), state


def _adamw(optimizer: AdamW, gradients: Any, state: Any, weights: Any, specs: Any) -> tuple[Any, Any]:
  """Adam's direction (Kingma and Ba, arXiv 1412.6980, algorithm 1) with decoupled decay of non-exempt weights."""
  moments, *rest = state
  count = int(moments.count) + 1
  beta1, beta2 = optimizer.beta1, optimizer.beta2
  mu = jax.tree.map(lambda m, g: beta1 * np.float64(m) + (1 - beta1) * g, moments.mu, gradients)
  nu = jax.tree.map(lambda v, g: beta2 * np.float64(v) + (1 - beta2) * g**2, moments.nu, gradients)

  def direction(path, spec, m, v, weight):
    adam = (m / (1 - beta1**count)) / (np.sqrt(v / (1 - beta2**count)) + optimizer.epsilon)
    if optimizer.base_width is not None and spec.num_input_dims and 'no_decay' not in spec.tags:
      first = spec.stacked + ('expert' in spec.tags)
      adam *= optimizer.base_width / math.prod(spec.shape[first : first + spec.num_input_dims])
    tags, is_vector = {*spec.tags} - {SPLIT_BY_DEFAULT}, len(spec.shape) - spec.num_separate_dims < 2
    if not tags and (is_vector or path[-1].key in ('bias', 'scale')):
      tags = {'no_decay'}
    decays = not tags & set(optimizer.decay_exempt_tags)
    return adam + (optimizer.weight_decay * np.asarray(weight, np.float64) if decays else 0.0)

  directions = jax.tree_util.tree_map_with_path(direction, specs, mu, nu, weights)
  stored = jax.tree.map(lambda m, old: m.astype(np.asarray(old).dtype), mu, moments.mu)
  # A second moment in bfloat16 is rounded at random: the nearest number is at most one step away.
  nu = jax.tree.map(lambda v, old: v.astype(np.asarray(old).dtype) if old.dtype != np.float32 else v, nu, moments.nu)
  return directions, (moments._replace(count=np.int32(count), mu=stored, nu=nu), *rest)


def _float64(tree: Any) -> Any:
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def _norm(tree: Any) -> float:
  return math.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(tree)))
