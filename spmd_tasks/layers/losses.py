"""The Loss protocol, LossOutput, and LanguageModelLoss: cross-entropy with label smoothing, z-loss, auxiliary losses.

    def loss(predictions, batch):                                # a plain function is a loss: as_loss wraps it
      return jnp.mean(jnp.square(predictions - batch['y']))

Shapes: B batch, T sequence, V vocab, L layers, E experts. All results are float32.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import inspect
import math
from typing import Any, Literal, Protocol, runtime_checkable

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.errors import UserError, is_own, own_code_errors
from spmd_tasks.layers.base import describe, train_flags
from spmd_tasks.layers.softmax_head import LabelScores, total_of


class LossOutput(struct.PyTreeNode):
  """The result of a loss.

  Fields:
    loss: scalar, the mean over the batch's tokens, or a sum; it is differentiated.
    weight: scalar, the denominator of the mean; the weight for averaging over several batches.
    is_sum: whether `loss` is a sum: sums of microbatches are added, whatever their weights.
    aux_loss: (mean, weight) of a part of `loss` that microbatches average by its own weight, because the rest is a sum
      or has another weight; None for no such part.
    metrics: name -> (mean, weight). A mean is a scalar, or [E] with one value per expert; a weight is a scalar, or [E].
    per_example: name -> [B, ...], one value per row.
    summaries: name -> an array of any shape: TensorBoard shows a histogram, a scalar is written like a metric. Or an
      Image, a Histogram or a Table (runtime/media.py), from the first microbatch with a nonzero weight.
    updated_variables: the model's variables beside its weights after a train step, by collection.
  """

  loss: jax.Array
  weight: jax.Array
  is_sum: bool = struct.field(pytree_node=False, default=False)
  aux_loss: tuple[jax.Array, jax.Array] | None = None
  metrics: dict[str, tuple[jax.Array, jax.Array]] = struct.field(default_factory=dict)
  per_example: dict[str, jax.Array] = struct.field(default_factory=dict)
  summaries: dict[str, jax.Array] = struct.field(default_factory=dict)
  updated_variables: Mapping[str, Any] = struct.field(default_factory=dict)


class StepOutputs(struct.PyTreeNode):
  """What a train or eval step returns beside its metrics, as their entry `outputs`.

  Fields:
    per_example: the loss's, with rows of padding; empty unless the step keeps examples.
    is_example: bool [B], whether a row has any loss weight; None if the batch has no weights: all rows are examples.
    summaries: the loss's.
  """

  per_example: dict[str, jax.Array]
  is_example: jax.Array | None
  summaries: dict[str, jax.Array]

  @classmethod
  def of(cls, output: LossOutput, batch: Mapping[str, jax.Array], *, keeps_examples: bool) -> 'dict[str, StepOutputs]':
    """Returns {'outputs': StepOutputs}, or {} if there are none."""
    per_example = dict(output.per_example) if keeps_examples else {}
    if not per_example and not output.summaries:
      return {}
    weights = batch.get('weights') if per_example else None
    is_example = None if weights is None else jnp.any(weights != 0, axis=tuple(range(1, weights.ndim)))
    return {'outputs': cls(per_example=per_example, is_example=is_example, summaries=dict(output.summaries))}

  def examples(self) -> dict[str, np.ndarray]:
    """Returns the per-example outputs on the host, without rows of padding; waits for the step."""
    outputs = jax.device_get(self)
    rows = slice(None) if outputs.is_example is None else outputs.is_example
    return {name: values[rows] for name, values in outputs.per_example.items()}


# Names that a line of metrics.jsonl already has.
RESERVED_METRICS = (
  *('loss', 'loss_weight', 'step', 'time', 'skipped', 'grad_norm', 'weight_norm', 'learning_rate'),
  'outputs',  # StepOutputs, beside the metrics of a step
)


def as_loss_output(loss: Any, returned: Any, num_rows: int) -> LossOutput:
  """Converts what a loss returned to a LossOutput with float32 means and weights.

  Args:
    loss: for errors.
    returned: a LossOutput, or the mean over the rows, a scalar, alone or as (mean, metrics). A metric is (mean,
      weight), or a mean, which gets the weight of the loss.
    num_rows: the rows of the batch.

  Raises:
    UserError: `returned` is something else.
  """
  output = returned
  if not isinstance(returned, LossOutput):
    mean, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    output = LossOutput(loss=mean, weight=jnp.float32(num_rows), metrics=metrics)
  name = _name_of(loss)
  mean = output.loss
  if not isinstance(mean, jax.Array) or mean.shape or not jnp.issubdtype(mean.dtype, jnp.floating):
    raise UserError(
      f'the loss {name} returned {describe(returned)}: it must return the mean over the batch, a scalar jax.Array of '
      'floats (jnp.mean of the losses; a number of Python or numpy has no gradient), alone or as (mean, metrics), or a '
      'LossOutput.'
    )
  for field, reserved in (('metrics', RESERVED_METRICS), ('per_example', ()), ('summaries', ())):
    value = getattr(output, field)
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key not in reserved for key in value):
      without = f', without the names {", ".join(reserved)}' if reserved else ''
      raise UserError(
        f'the loss {name} returned the {field} {describe(value)}: give a dict by name, a string{without}.'
      )
  weight = jnp.asarray(output.weight, jnp.float32)
  metrics = {metric: _as_metric(name, metric, value, weight) for metric, value in output.metrics.items()}
  for key, rows in output.per_example.items():
    if jnp.ndim(rows) < 1 or len(rows) != num_rows:
      raise UserError(
        f'the loss {name} returned {key!r} as {describe(rows)} in per_example: it must have one value for each of the '
        f'{num_rows} rows.'
      )
  aux_loss = output.aux_loss
  if aux_loss is not None:
    aux_loss = (jnp.asarray(aux_loss[0], jnp.float32), jnp.asarray(aux_loss[1], jnp.float32))
  return output.replace(loss=mean.astype(jnp.float32), weight=weight, metrics=metrics, aux_loss=aux_loss)


def _as_metric(loss: str, name: str, value: Any, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Converts a metric that a loss returned to (mean, weight)."""
  mean, weight = value if isinstance(value, tuple) and len(value) == 2 else (value, weight)
  numbers = (jax.Array, np.ndarray, np.generic, int, float)
  is_pair = isinstance(mean, numbers) and isinstance(weight, numbers) and jnp.shape(weight) in ((), jnp.shape(mean))
  if not is_pair or jnp.ndim(mean) > (1 if isinstance(value, tuple) else 0):
    raise UserError(
      f'the loss {loss} returned the metric {name!r} as {describe(value)}: return a scalar mean, such as jnp.mean '
      'of one value per row, or (mean, weight).'
    )
  return jnp.asarray(mean, jnp.float32), jnp.asarray(weight, jnp.float32)


@runtime_checkable
class Loss(Protocol):
  """A loss that a Task trains with: `loss(predictions, batch)`, and hooks whose defaults fit most losses.

  A user's loss is a plain function, which `as_loss` wraps. Subclass `Loss` to override a hook.

  In the hooks, `task` is the Task, `variables` are its model's by collection, and `batch` is a dict of arrays [B, ...].
  """

  @abc.abstractmethod
  def __call__(self, predictions: Any, batch: Mapping[str, jax.Array]) -> Any:
    """Returns the loss of a batch, or of a microbatch if the learner accumulates gradients.

    The result is a LossOutput, or the mean over the rows, alone or as (mean, metrics): see `as_loss_output`. If the
    method has an argument `train` (or another name of `layers.base.train_flags`), it is passed too.
    """

  def compute(self, predictions: Any, batch: Mapping[str, jax.Array], *, train: bool) -> LossOutput:
    """Calls the loss in a train or eval step and returns a LossOutput of float32.

    Raises a UserError if an experiment's own loss fails, or a loss returns something else.
    """
    return _call(self, predictions, batch, train)

  @property
  def shows_metrics(self) -> bool:
    """Whether the progress line shows the metrics that the loss returns. Metric files always have them."""
    return is_own(self)

  def check_weights(self, weight_specs: Any) -> None:
    """Called once, with a WeightSpec per weight. Raises a UserError if a trained weight must be frozen."""
    del weight_specs

  def prepare_batch(
    self, task: Any, variables: Mapping[str, Any], batch: Mapping[str, jax.Array]
  ) -> Mapping[str, jax.Array]:
    """Called before the model, in every train and eval step and for every microbatch. Returns the batch for the loss.

    A loss that compares the model with a reference runs the reference here, without gradients, and adds an entry.
    """
    del task, variables
    return batch

  def prepare_whole_batch(
    self, task: Any, variables: Mapping[str, Any], batch: Mapping[str, jax.Array], num_microbatches: int
  ) -> Mapping[str, jax.Array]:
    """Called once per train step before the batch is split into microbatches. Adds entries that depend on all rows."""
    del task, variables, num_microbatches
    return batch

  def may_have_empty_microbatches(self, batch: Mapping[str, jax.Array]) -> bool:
    """Returns whether the last microbatches of a batch may be padding only, so that the step may skip them."""
    del batch
    return False


@dataclasses.dataclass(frozen=True)
class FunctionLoss(Loss):
  """Wraps a function `(predictions, batch)` as a Loss; see `as_loss`.

  Attributes:
    function: returns what `as_loss_output` takes. It may have an argument `train`, as Loss.__call__ may.
  """

  function: Callable[..., Any]

  @property
  def shows_metrics(self) -> bool:
    return is_own(self.function)

  def __call__(self, predictions: Any, batch: Mapping[str, jax.Array]) -> Any:
    return self.function(predictions, batch)

  def compute(self, predictions: Any, batch: Mapping[str, jax.Array], *, train: bool) -> LossOutput:
    return _call(self.function, predictions, batch, train)


def as_loss(loss: Loss | Callable[..., Any]) -> Loss:
  """Wraps a function `(predictions, batch)` as a FunctionLoss; returns a Loss unchanged."""
  return loss if isinstance(loss, Loss) else FunctionLoss(loss)


def _call(loss: Callable[..., Any], predictions: Any, batch: Mapping[str, jax.Array], train: bool) -> LossOutput:
  with _loss_errors(loss, batch):
    returned = loss(predictions, batch, **_flags_of(loss, train))
  return as_loss_output(loss, returned, max((len(rows) for rows in batch.values() if rows.ndim), default=1))


def _flags_of(loss: Callable[..., Any], train: bool) -> dict[str, bool]:
  """Returns the train flags that are arguments of the loss, except arguments that a functools.partial has bound."""
  try:
    parameters = inspect.signature(loss).parameters
  except (TypeError, ValueError):  # some C functions have no signature
    return {}
  bound = loss.keywords if isinstance(loss, functools.partial) else {}
  return {name: value for name, value in train_flags(train).items() if name in parameters and name not in bound}


def _loss_errors(loss: Callable[..., Any], batch: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
  """Context in which an error of an experiment's own loss names the loss."""
  return own_code_errors(f'the loss {_name_of(loss)}(predictions, batch)', keys=tuple(batch), part=loss)


def _name_of(loss: Callable[..., Any]) -> str:
  return getattr(loss, '__name__', type(loss).__name__)


def _divide(total: jax.Array, weight: jax.Array) -> jax.Array:
  """Returns total / weight, or 0 if the weight is 0: a batch of padding only has loss 0 and gradient 0."""
  return jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1.0, weight))


def losses_by_source(
  losses: jax.Array, weights: jax.Array, batch: Mapping[str, Any]
) -> dict[str, tuple[jax.Array, jax.Array]]:
  """Returns the metric `loss_by_source` of a mixture of S inputs, [S]: (mean over the source's tokens, their weight).

  Any loss can add it to its metrics; logs and evals name its values `loss/<source>`. Losses and weights are float32
  [B, T] or [B]; the batch of a mixture has the entry `row_sources`, bool [B, S]. Without it there is no metric.
  """
  if 'row_sources' not in batch:
    return {}
  axes = tuple(range(1, losses.ndim))
  rows = jnp.stack([jnp.sum(losses * weights, axis=axes), jnp.sum(weights, axis=axes)])  # [2, B]
  # Not a product: a NaN in one row must not reach other sources.
  totals, row_weights = jnp.sum(jnp.where(batch['row_sources'].T, rows[:, None, :], 0.0), axis=2)  # [S] each
  return {'loss_by_source': (_divide(totals, row_weights), row_weights)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithAuxLosses(Loss):
  """Base of losses that add what layers report, such as the balance losses of routers.

  Fields:
    aux_loss_weights: name of an entry of `predictions['aux']` -> its weight in the loss. Microbatches of a step average
      these losses by their tokens, whether the rest of the loss is a mean or a sum. Every entry's mean over layers is
      also a metric, without this weight: a scalar, or a vector [E] for an entry with one value per expert.
    num_aux_layers: how many layers must report each entry of `aux_loss_weights`, over all stages of a pipeline; None
      for any number. Guards against a mean over fewer layers than the model has (MegaBlocks).
  """

  aux_loss_weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
  num_aux_layers: int | None = None

  def add_aux_losses(
    self,
    loss: jax.Array,
    weight: jax.Array,
    metrics: dict[str, tuple[jax.Array, jax.Array]],
    aux: Mapping[str, jax.Array],
  ) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
    """Returns the loss with the aux losses, and the metrics with the mean of every entry of `aux` over its layers."""
    if not aux and not self.aux_loss_weights:
      return loss, metrics
    self._check_aux(aux)
    if taken := sorted({'loss', *metrics}.intersection(aux)):
      raise UserError(f"the entries {taken} of aux have the names of the loss's own metrics: rename them in the layer.")
    metrics = dict(metrics)
    for name, values in aux.items():
      mean = jnp.mean(jnp.atleast_1d(values).astype(jnp.float32), axis=0)
      mean = jnp.where(weight == 0, 0.0, mean)  # layers may report anything for a batch of padding
      metrics[name] = (mean, weight)
      if name in self.aux_loss_weights:
        loss = loss + self.aux_loss_weights[name] * mean
    return loss, metrics

  def _check_aux(self, aux: Mapping[str, jax.Array]) -> None:
    """Raises a UserError if an aux loss is missing or a vector, lacks a layer, or has a weight that is not finite."""
    for name, weight in self.aux_loss_weights.items():
      if isinstance(weight, (int, float)) and not math.isfinite(weight):
        raise UserError(f'aux_loss_weights has {name}={weight}, which must be finite: correct it.')
      if name not in aux:
        raise UserError(
          f'aux_loss_weights names {name!r}, but the model reports {sorted(aux)}: correct the name, or use a layer '
          'that computes it.'
        )
      shape = jnp.shape(aux[name])
      if len(shape) > 1:
        raise UserError(
          f'the aux loss {name!r} has shape {shape}, but must have one value per layer: remove it from '
          'aux_loss_weights.'
        )
      num_layers = math.prod(shape)
      if self.num_aux_layers not in (None, num_layers):
        raise UserError(
          f'{num_layers} layers report the aux loss {name!r}, but num_aux_layers is {self.num_aux_layers}: correct it, '
          'or pass on the aux of every layer and pipeline stage.'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelLoss(WithAuxLosses):
  """Computes the mean of cross-entropy + z_loss_weight * logsumexp(logits)^2, weighted by `batch['weights']`.

  With label smoothing s, the target is 1 - s on the label plus s / V on every token (Szegedy et al., 2016). With
  `smoothing='others'`, it is 1 - s on the label and s / (V - 1) on every other token, and the entropy of the target is
  subtracted, so that the lowest loss is 0 (Tensor2Tensor, T5X). The z-loss keeps the softmax's normalizer near 1
  (Chowdhery et al., 2022). The metric `cross_entropy` and its per-example value include neither: exp(cross_entropy) is
  the perplexity. A label outside [0, V) makes the loss NaN unless its weight is 0: mask labels -100 ("ignore") out. For
  a mixture of inputs, the metric `loss/<source>` is the loss on the tokens of one source, without aux losses.

  Fields:
    z_loss_weight, label_smoothing: 0 turns them off.
    smoothing: 'all' or 'others', the tokens that share s.
    normalization: metrics are always means over tokens; the loss is
      'tokens': the mean over tokens.
      'sum', or a number: the sum over tokens, divided by the number (T5X's `loss_normalizing_factor`).
      'all_tokens': the sum over tokens divided by B * T, padding included.
      'sequences': the mean over documents of their means over tokens.
    aux_loss_weights, num_aux_layers: as in WithAuxLosses.
  """

  z_loss_weight: float = 0.0
  label_smoothing: float = 0.0
  smoothing: Literal['all', 'others'] = 'all'
  normalization: Literal['tokens', 'sum', 'all_tokens', 'sequences'] | float = 'tokens'

  def __post_init__(self):
    if not 0.0 <= self.label_smoothing < 1.0 or self.smoothing not in ('all', 'others'):
      raise UserError(
        f'label_smoothing={self.label_smoothing} must be at least 0 and less than 1, and smoothing={self.smoothing!r} '
        "'all' or 'others': correct them."
      )
    names, divisor = ('tokens', 'sum', 'all_tokens', 'sequences'), self.normalization
    if divisor not in names and not (isinstance(divisor, (int, float)) and divisor > 0):
      raise UserError(f'normalization={divisor!r} must be one of {names}, or a positive number that divides the sum.')

  def __call__(self, predictions: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> LossOutput:
    """Computes the LossOutput.

    Args:
      predictions: `logits` float [B, T, V], or a SoftmaxHead as `softmax_head`, which computes them in chunks.
        Optionally `aux` {name: scalar, [L], or [L, E] for one value per expert}, which `aux_loss_weights` reads, and
        `nextn` and `nextn_loss_weight` of heads (layers/nextn.py).
      batch: `labels` int32 [B, T], `weights` float [B, T] (0: padding); for 'sequences' also `segment_ids` int32 [B,
        T] in [0, T], the document of each token; without them, a row is one document.

    Raises a UserError if the batch lacks labels or weights.
    """
    if missing := ' and '.join(name for name in ('labels', 'weights') if name not in batch):
      raise UserError(
        f'the batch has no {missing}, which LanguageModelLoss reads, only {", ".join(sorted(batch))}: add what is '
        'missing to the input (docs/inputs.md lists the arrays), or choose another loss.'
      )
    weights = batch['weights'].astype(jnp.float32)
    loss_weights, loss_weight, is_sum, divisor = weights, jnp.sum(weights), False, None
    if self.normalization == 'all_tokens':
      loss_weight = jnp.float32(weights.size)
    elif self.normalization == 'sequences':
      loss_weights = _shares_of_documents(weights, batch.get('segment_ids'))
      loss_weight = jnp.sum(loss_weights)
    elif self.normalization != 'tokens':
      is_sum, divisor = True, 1.0 if self.normalization == 'sum' else self.normalization
    total, scores = total_of(predictions, batch['labels'], self._objective, loss_weights)
    loss = _divide(total, loss_weight) if divisor is None else total / divisor

    cross_entropy, objective = _cross_entropy(scores, weights), self._objective(scores, weights)
    # A tie with another logit counts as wrong, so that a collapsed model does not look perfect.
    correct = (scores.label_logit > scores.highest_other).astype(jnp.float32)
    per_token = {'cross_entropy': cross_entropy, 'accuracy': correct}
    if self.z_loss_weight:
      per_token['z_loss'] = self.z_loss_weight * jnp.square(scores.log_normalizer)
    # One sum over a stack: if B is sharded, separate sums would be separate all-reduces.
    stack = jnp.stack([*per_token.values(), jnp.ones_like(weights)])
    *totals, weight = jnp.sum(stack * weights[None], axis=(1, 2))
    metrics = {name: (_divide(total, weight), weight) for name, total in zip(per_token, totals, strict=True)}
    if heads := predictions.get('nextn'):
      total = total_loss_of_heads(heads, batch, _shares_of_documents if self.normalization == 'sequences' else None)
      metrics['nextn_loss'] = (_divide(total, loss_weight), loss_weight)
      loss += predictions['nextn_loss_weight'] * (_divide(total, loss_weight) if divisor is None else total / divisor)
    metrics |= losses_by_source(objective, weights, batch)
    aux_loss, metrics = self.add_aux_losses(jnp.float32(0), weight, metrics, predictions.get('aux', {}))
    # A sum of its own, which accumulation over microbatches computes in advance, without the model.
    own_weight = jnp.sum(weights) if self.aux_loss_weights and self.normalization != 'tokens' else None
    per_example = {'cross_entropy': jnp.sum(cross_entropy * weights, axis=-1), 'num_tokens': jnp.sum(weights, axis=-1)}
    return LossOutput(
      loss=loss + aux_loss,
      weight=loss_weight,
      is_sum=is_sum,
      aux_loss=None if own_weight is None else (aux_loss, own_weight),
      metrics=metrics,
      per_example=per_example,
    )

  def _objective(self, scores: LabelScores, weights: jax.Array) -> jax.Array:
    """Returns the loss of each token, which is NaN for an unknown label unless its weight is 0."""
    objective = cross_entropy = _cross_entropy(scores, weights)
    if smoothing := self.label_smoothing:
      entropy = 0.0
      if self.smoothing == 'others':
        others = scores.vocab_size - 1
        low = smoothing / others
        entropy = -(1.0 - smoothing) * math.log1p(-smoothing) - smoothing * math.log(low + 1e-20)
        smoothing += low  # spread over all tokens, it leaves 1 - s on the label
      uniform = scores.log_normalizer - scores.mean_logit  # cross-entropy to the uniform distribution
      objective = (1.0 - smoothing) * cross_entropy + smoothing * uniform - entropy
    if self.z_loss_weight:
      objective = objective + self.z_loss_weight * jnp.square(scores.log_normalizer)
    return objective


def _cross_entropy(scores: LabelScores, weights: jax.Array) -> jax.Array:
  """Returns the cross-entropy of each token, which is NaN for an unknown label unless its weight is 0."""
  return jnp.where(scores.is_known | (weights == 0), scores.log_normalizer - scores.label_logit, jnp.nan)


def total_loss_of_heads(
  heads: Sequence[Mapping[str, Any]], batch: Mapping[str, jax.Array], shares: Callable[..., jax.Array] | None
) -> jax.Array:
  """Returns the cross-entropy, summed over the batch's tokens and averaged over heads.

  A predicted token has its own loss weight, or 0 if it is of another document. `shares`, a function (weights, segment
  ids), returns the weights to use instead.
  """
  labels, weights = batch['labels'], batch['weights'].astype(jnp.float32)
  segment_ids, totals = batch.get('segment_ids', jnp.ones_like(labels)), []
  for num, head in enumerate(heads, start=1):
    is_same = (segment_ids == shift(segment_ids, num)) & (segment_ids > 0)
    token_weights = jnp.where(is_same, shift(weights, num), 0.0)
    if shares is not None:
      token_weights = shares(token_weights, batch.get('segment_ids'))
    totals.append(total_of(head, shift(labels, num), _cross_entropy, token_weights)[0])
  return jnp.mean(jnp.stack(totals))


def shift(x: jax.Array, num: int) -> jax.Array:
  """Returns x [B, T] shifted left by `num` positions, padded with zeros."""
  return jnp.pad(x[:, num:], ((0, 0), (0, min(num, x.shape[1]))))


def _shares_of_documents(weights: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
  """Returns the weights [B, T] divided by the sum of weights of their document, or 0 if the sum is 0."""
  if segment_ids is None:
    return _divide(weights, jnp.sum(weights, axis=-1, keepdims=True))

  def document_sums(weights: jax.Array, ids: jax.Array) -> jax.Array:
    return jax.ops.segment_sum(weights, ids, num_segments=len(ids) + 1)[ids]

  return _divide(weights, jax.vmap(document_sums)(weights, segment_ids))
