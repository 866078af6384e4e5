"""SoftmaxHead and LabelScores: a language model's loss and its gradient, without all logits [B, T, V] in memory.

With a vocabulary of 128,256, the float32 logits of a row of 8,192 tokens take 4.2 GB, and so does their gradient. A
SoftmaxHead computes the logits of a chunk of tokens at a time, and from them the few numbers per token that a loss
reads. A loss that is a sum over tokens gets its gradient in the same pass (`SoftmaxHead.total`), so chunks cost no
product. For any other function of the numbers (`SoftmaxHead.scores`), the backward pass computes the logits again.

Each device has its own tokens in every chunk. It gathers the kernel once, sums the kernel's gradient over its chunks in
float32, and only then over the other devices.

Shapes: B batch, T sequence, D model, V vocab, N chunks; P parts, one for each group of devices with the same tokens;
m tokens of a part in a chunk.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, Literal

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmd_tasks.layers.base import current_layer_scope, instantiate, soft_cap
from spmd_tasks.layers.scattered_gradients import multiply_on_devices
from spmd_tasks.sharding import SplitDims, constrain
from spmd_tasks.sharding.specs import current_sharding_scope, num_parts, spec_axes, spec_entry

_FEWEST_TOKENS = 512  # of a chunk, unless there are fewer


class LabelScores(struct.PyTreeNode):
  """The numbers that a loss needs of logits [..., V] and labels [...]: float32 [...], except `is_known`.

  Fields:
    log_normalizer: logsumexp of the logits.
    label_logit: the logit of the label; 0 if the label is not in [0, V).
    mean_logit: the mean of all logits, for label smoothing.
    highest_other: the highest logit except the label's, without a gradient.
    is_known: bool, whether the label is in [0, V).
    vocab_size: V, an int.
  """

  log_normalizer: jax.Array
  label_logit: jax.Array
  mean_logit: jax.Array
  highest_other: jax.Array
  is_known: jax.Array
  vocab_size: int = struct.field(pytree_node=False)

  @property
  def differentiable(self) -> tuple[jax.Array, jax.Array, jax.Array]:
    return self.log_normalizer, self.label_logit, self.mean_logit


# Returns the loss of each token, float32 [...], from its LabelScores and its weight [...].
Objective = Callable[[LabelScores, jax.Array], jax.Array]


def _label_scores(logits: jax.Array, labels: jax.Array) -> LabelScores:
  logits = logits.astype(jnp.float32)
  # A comparison and a sum instead of a gather: if V is sharded, every device sums its own slice.
  is_label = _is_label(labels, logits)
  return LabelScores(
    log_normalizer=jax.nn.logsumexp(logits, axis=-1),
    label_logit=jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1),
    mean_logit=jnp.mean(logits, axis=-1),
    # XLA's CPU backend runs an argmax 20 times slower than a max (and a max over a `where` 8 times slower, hence the
    # subtraction), and over a sharded V an argmax also moves indices.
    highest_other=jnp.max(logits - 1e30 * is_label, axis=-1),
    is_known=(labels >= 0) & (labels < logits.shape[-1]),
    vocab_size=logits.shape[-1],
  )


def _is_label(labels: jax.Array, logits: jax.Array) -> jax.Array:
  return labels[..., None] == jnp.arange(logits.shape[-1]).reshape((1,) * labels.ndim + (-1,))


@jax.custom_vjp
def label_scores(logits: jax.Array, labels: jax.Array) -> LabelScores:
  """Computes the LabelScores of logits [..., V] and labels int32 [...]."""
  return _label_scores(logits, labels)


def _label_scores_forward(logits, labels):
  scores = _label_scores(logits, labels)
  return scores, (logits, labels, scores.log_normalizer)


def _label_scores_backward(saved, cotangent):
  logits, labels, log_normalizer = saved
  return _logits_cotangent(logits, labels, log_normalizer, cotangent.differentiable).astype(logits.dtype), None


label_scores.defvjp(_label_scores_forward, _label_scores_backward)


def _logits_cotangent(
  logits: jax.Array, labels: jax.Array, log_normalizer: jax.Array, cotangents: tuple[jax.Array, jax.Array, jax.Array]
) -> jax.Array:
  """Returns the logits' cotangent, float32 [..., V], for cotangents [...] of `LabelScores.differentiable`."""
  normalizer, label, mean = (x[..., None] for x in cotangents)
  softmax = jnp.exp(logits.astype(jnp.float32) - log_normalizer[..., None])
  return normalizer * softmax + mean / logits.shape[-1] + jnp.where(_is_label(labels, logits), label, 0.0)


class SoftmaxHead(struct.PyTreeNode):
  """The activations and the kernel whose product is the logits, which are never computed all at once.

  Fields:
    x: [B, T, D].
    kernel: [V, D] if `is_table`, else [D, V].
    dtype: of the operands of the product; logits are float32.
    divisor: the product is divided by it.
    bias: float32 [V], added to the quotient; None for none.
    cap: bounds the logits, see `soft_cap`.
    temperature: the capped logits are divided by it.
    num_chunks: N, or 'auto' for chunks of at most max(2 D, 512) tokens of a device: enough that the passes over the
      kernel's gradient, one for each chunk, cost little. The last chunk is padded.
    split_dims, logits_split_dims: of the kernel, and of logits [B, T, V].
  """

  x: jax.Array
  kernel: jax.Array
  bias: jax.Array | None = None
  is_table: bool = struct.field(pytree_node=False, default=False)
  dtype: Any = struct.field(pytree_node=False, default='float32')
  divisor: float = struct.field(pytree_node=False, default=1.0)
  cap: float | None = struct.field(pytree_node=False, default=None)
  temperature: float = struct.field(pytree_node=False, default=1.0)
  num_chunks: int | Literal['auto'] = struct.field(pytree_node=False, default='auto')
  split_dims: SplitDims = struct.field(pytree_node=False, default=None)
  logits_split_dims: SplitDims = struct.field(pytree_node=False, default=None)

  @jax.named_scope('softmax_head')
  def scores(self, labels: jax.Array) -> LabelScores:
    """Returns the LabelScores [B, T] of labels int32 [B, T]; the backward pass computes each chunk's logits again."""
    product = _Product.of(self)
    layout = product.layout
    scores = _scores(product, self._spread(product), layout.chunks(self.x.astype(self.dtype)), layout.chunks(labels))
    return jax.tree.map(layout.whole, scores)

  @jax.named_scope('softmax_head')
  def total(self, labels: jax.Array, objective: Objective, weights: jax.Array) -> tuple[jax.Array, LabelScores]:
    """Returns the sum over tokens of objective * weight, and the LabelScores [B, T], which have no gradient.

    Args:
      labels, weights: int32 and float32 [B, T]; weights have no gradient.
      objective: the loss of each token, which is differentiated in the forward pass. It must close over no tracers.
    """
    product = _Product.of(self)
    layout = product.layout
    chunks = (layout.chunks(array) for array in (self.x.astype(self.dtype), labels, weights))
    total, scores = _total(product, objective, self._spread(product), *chunks)
    return total, jax.lax.stop_gradient(jax.tree.map(layout.whole, scores))

  def _spread(self, product: '_Product') -> 'Weights':
    """Returns the kernel and the bias for each part: one gather, whose transpose sums the gradient."""
    kernel = self._spread_kernel(product.layout)
    if self.bias is None:
      return (kernel,)
    bias = jnp.broadcast_to(self.bias.astype(jnp.float32)[None], (len(kernel), *self.bias.shape))
    return kernel, product.constrain(bias, vocab_dim=1)

  def _spread_kernel(self, layout: '_Layout') -> jax.Array:
    scope, axes = current_sharding_scope(), layout.axes
    # The constraint is for the gradient: it is reduce-scattered when it is complete.
    kernel = constrain(self.kernel, self.split_dims).astype(self.dtype)
    if scope is None or not axes:
      return kernel[None]
    if current_layer_scope().scatters_gradients:
      parts = jnp.zeros(layout.num_parts, self.dtype)
      return multiply_on_devices(lambda _, kernel: kernel[None], parts, kernel, self.split_dims, (axes,))
    spread = jnp.broadcast_to(kernel[None], (layout.num_parts, *kernel.shape))
    own_axes = () if self.split_dims is None else spec_axes(scope.spec(self.split_dims), kernel.ndim)
    entries = [spec_entry([axis for axis in dim if axis not in axes]) for dim in own_axes]
    spec = PartitionSpec(spec_entry(axes), *entries)
    return jax.lax.with_sharding_constraint(spread, NamedSharding(scope.mesh, spec))


def label_scores_of(predictions: Mapping[str, Any], labels: jax.Array, temperature: float = 1.0) -> LabelScores:
  """Returns the LabelScores [B, T] of a model's predictions, at a temperature of the logits.

  The predictions have a SoftmaxHead as `softmax_head`, or `logits` [B, T, V].
  """
  head: SoftmaxHead | None = predictions.get('softmax_head')
  if head is not None:
    return head.replace(temperature=temperature).scores(labels)
  logits = predictions['logits']
  return label_scores(logits if temperature == 1 else logits.astype(jnp.float32) / temperature, labels)


def total_of(
  predictions: Mapping[str, Any], labels: jax.Array, objective: Objective, weights: jax.Array
) -> tuple[jax.Array, LabelScores]:
  """Returns `SoftmaxHead.total` of a model's predictions, or computes it from their `logits` [B, T, V]."""
  head: SoftmaxHead | None = predictions.get('softmax_head')
  if head is not None:
    return head.total(labels, objective, weights)
  scores = label_scores(predictions['logits'], labels)
  return jnp.sum(objective(scores, weights) * weights), jax.lax.stop_gradient(scores)


@dataclasses.dataclass(frozen=True)
class _Layout:
  """How B x T tokens are divided into P parts, and each part's into N chunks of m tokens.

  Fields:
    axes: the mesh axes that split the parts.
    rows, columns: into how many parts the rows and the columns are divided.
    num_rows, num_columns, num_chunks: B, T and N.
  """

  axes: tuple[str, ...]
  rows: int
  columns: int
  num_rows: int
  num_columns: int
  num_chunks: int

  @classmethod
  def of(cls, head: SoftmaxHead) -> '_Layout':
    num_rows, num_columns, width = head.x.shape
    scope = current_sharding_scope()
    axes: list[tuple[str, ...]] = [(), ()]
    if scope is not None and head.logits_split_dims is not None:
      spec = scope.activation_spec(head.logits_split_dims[:2], (num_rows, num_columns), is_even=True)
      axes = [tuple(axis for axis in dim if scope.mesh.shape[axis] > 1) for dim in spec_axes(spec, 2)]
    rows, columns = (1 if not dim or scope is None else num_parts(dim, scope.mesh.shape) for dim in axes)
    num_tokens = max(1, num_rows * num_columns // (rows * columns))
    most_tokens = max(2 * width, _FEWEST_TOKENS)
    chunks = -(-num_tokens // most_tokens) if head.num_chunks == 'auto' else min(head.num_chunks, num_tokens)
    return cls((*axes[0], *axes[1]), rows, columns, num_rows, num_columns, chunks)

  @property
  def num_parts(self) -> int:
    return self.rows * self.columns

  def chunks(self, x: jax.Array) -> jax.Array:
    """Returns [N, P, m, ...] for x [B, T, ...], padded with zeros."""
    others = x.shape[2:]
    x = x.reshape(self.rows, self.num_rows // self.rows, self.columns, self.num_columns // self.columns, *others)
    x = jnp.moveaxis(x, 2, 1).reshape(self.num_parts, -1, *others)
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % self.num_chunks), *[(0, 0)] * len(others)])
    return self.constrain(jnp.moveaxis(x.reshape(self.num_parts, self.num_chunks, -1, *others), 1, 0), dim=1)

  def whole(self, x: jax.Array) -> jax.Array:
    """Returns [B, T, ...] for x [N, P, m, ...]: the inverse of `chunks`."""
    others, (rows, columns) = x.shape[3:], (self.num_rows // self.rows, self.num_columns // self.columns)
    x = jnp.moveaxis(x, 0, 1).reshape(self.num_parts, -1, *others)[:, : rows * columns]
    x = jnp.moveaxis(x.reshape(self.rows, self.columns, rows, columns, *others), 1, 2)
    return x.reshape(self.num_rows, self.num_columns, *others)

  def constrain(self, x: jax.Array, *, dim: int, others: Mapping[int, Any] | None = None) -> jax.Array:
    """Constrains the parts in dim `dim` of x to their devices, and other dims to the entries of a PartitionSpec."""
    scope = current_sharding_scope()
    if scope is None or not (self.axes or others):
      return x
    entries = [None] * x.ndim
    for other, entry in {dim: spec_entry(self.axes), **(others or {})}.items():
      entries[other] = entry
    return jax.lax.with_sharding_constraint(x, NamedSharding(scope.mesh, PartitionSpec(*entries)))


# The kernel [P, V, D] or [P, D, V] of each part, and its bias [P, V] if there is one; or their gradients.
Weights = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class _Product:
  """The product of a chunk's activations with the kernel, and its derivatives."""

  layout: _Layout
  is_table: bool
  divisor: float
  cap: float | None
  temperature: float
  vocab_entry: Any

  @classmethod
  def of(cls, head: SoftmaxHead) -> '_Product':
    scope, entry, layout = current_sharding_scope(), None, _Layout.of(head)
    if scope is not None and head.logits_split_dims is not None:
      entry = spec_entry(spec_axes(scope.spec(head.logits_split_dims), 3)[2])
    return cls(layout, head.is_table, head.divisor, head.cap, head.temperature, entry)

  @property
  def _kernel_dims(self) -> str:
    return 'PVD' if self.is_table else 'PDV'

  def constrain(self, x: jax.Array, *, vocab_dim: int) -> jax.Array:
    """Constrains x [P, ...] to the devices of the parts and of the vocabulary."""
    return self.layout.constrain(x, dim=0, others={vocab_dim: self.vocab_entry} if self.vocab_entry else None)

  def logits(self, weights: Weights, x: jax.Array) -> jax.Array:
    """Returns float32 [P, m, V] for x [P, m, D]."""
    kernel, *bias = weights
    logits = jnp.einsum(f'PmD,{self._kernel_dims}->PmV', x, kernel, preferred_element_type=jnp.float32)
    logits = logits if self.divisor == 1 else logits / self.divisor
    logits = soft_cap(logits + bias[0][:, None] if bias else logits, self.cap)
    return self.constrain(logits if self.temperature == 1 else logits / self.temperature, vocab_dim=2)

  def zeros(self, weights: Weights) -> Weights:
    """Returns the gradients of the weights before the first chunk."""
    return self._constrained(tuple(jnp.zeros(weight.shape, jnp.float32) for weight in weights))

  def add_gradients(
    self, total: Weights | None, weights: Weights, x: jax.Array, logits: jax.Array, cotangent: jax.Array
  ) -> tuple[Weights | None, jax.Array]:
    """Returns `total` + the gradients of the weights, float32, and the gradient of x, from the cotangent of the logits.

    Without a total, as of frozen weights, only the gradient of x.
    """
    kernel, *bias = weights
    if self.temperature != 1:
      cotangent = cotangent / self.temperature
    if self.cap is not None:
      cotangent *= 1.0 - jnp.square(logits * (self.temperature / self.cap))
    of_product = cotangent if self.divisor == 1 else cotangent / self.divisor
    of_product = self.constrain(of_product.astype(x.dtype), vocab_dim=2)
    of_x = jnp.einsum(f'PmV,{self._kernel_dims}->PmD', of_product, kernel)
    if total is None:
      return None, of_x
    of_kernel = jnp.einsum(f'PmD,PmV->{self._kernel_dims}', x, of_product, preferred_element_type=jnp.float32)
    gradients = (of_kernel, jnp.sum(cotangent, axis=1)) if bias else (of_kernel,)
    return self._constrained(jax.tree.map(jnp.add, total, gradients)), of_x

  def _constrained(self, weights: Weights) -> Weights:
    kernel, *bias = weights
    kernel = self.constrain(kernel, vocab_dim=1 if self.is_table else 2)
    return kernel, *(self.constrain(x, vocab_dim=1) for x in bias)


def _over_chunks(step: Callable[..., Any], carry: Any, arrays: Any) -> tuple[Any, Any]:
  """Scans over the chunks; one chunk needs no loop."""
  if len(jax.tree.leaves(arrays)[0]) > 1:
    return jax.lax.scan(step, carry, arrays)
  carry, results = step(carry, jax.tree.map(lambda x: x[0], arrays))
  return carry, jax.tree.map(lambda x: x[None], results)


def _like(gradients: Weights | None, weights: Weights) -> Weights | None:
  """Returns the gradients in the dtypes of the weights."""
  return gradients and tuple(x.astype(weight.dtype) for x, weight in zip(gradients, weights, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(product: _Product, weights: Weights, x: jax.Array, labels: jax.Array) -> LabelScores:
  """Returns LabelScores [N, P, m] for the weights of each part, x [N, P, m, D] and labels [N, P, m]."""
  return _scores_of_chunks(product, weights, x, labels)


def _scores_of_chunks(product: _Product, weights: Weights, x: jax.Array, labels: jax.Array) -> LabelScores:
  step = lambda _, chunk: (None, _label_scores(product.logits(weights, chunk[0]), chunk[1]))
  return _over_chunks(step, None, (x, labels))[1]


def _scores_forward(product, weights, x, labels):
  is_trained = () if any(weight.perturbed for weight in weights) else None  # a bool would become an array
  weights, x, labels = tuple(weight.value for weight in weights), x.value, labels.value
  scores = _scores_of_chunks(product, weights, x, labels)
  return scores, (is_trained, weights, x, labels, scores.log_normalizer)


def _scores_backward(product, saved, cotangent):
  is_trained, weights, *chunks = saved

  def step(total, chunk):
    x, labels, log_normalizer, cotangents = chunk
    logits = product.logits(weights, x)
    cotangent = _logits_cotangent(logits, labels, log_normalizer, cotangents)
    return product.add_gradients(total, weights, x, logits, cotangent)

  total = None if is_trained is None else product.zeros(weights)
  cotangents = tuple(instantiate(x) for x in cotangent.differentiable)
  total, of_x = _over_chunks(step, total, (*chunks, cotangents))
  return _like(total, weights), of_x, None


_scores.defvjp(_scores_forward, _scores_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _total(
  product: _Product, objective: Objective, weights: Weights, x: jax.Array, labels: jax.Array, token_weights: jax.Array
) -> tuple[jax.Array, LabelScores]:
  """Returns the sum of objective * weight, and LabelScores [N, P, m]; takes the arguments of `_scores`."""
  scores = _scores_of_chunks(product, weights, x, labels)
  return jnp.sum(objective(scores, token_weights) * token_weights), scores


def _total_forward(product, objective, weights, *chunks):
  is_trained = any(weight.perturbed for weight in weights)
  weights = tuple(weight.value for weight in weights)

  def step(total, chunk):
    x, labels, token_weights = chunk
    logits = product.logits(weights, x)
    scores = _label_scores(logits, labels)

    def losses(log_normalizer, label_logit, mean_logit):
      numbers = {'log_normalizer': log_normalizer, 'label_logit': label_logit, 'mean_logit': mean_logit}
      return objective(scores.replace(**numbers), token_weights) * token_weights

    per_token, pull_back = jax.vjp(losses, *scores.differentiable)
    cotangents = pull_back(jnp.ones_like(per_token))
    cotangent = _logits_cotangent(logits, labels, scores.log_normalizer, cotangents)
    total, of_x = product.add_gradients(total, weights, x, logits, cotangent)
    return total, (per_token, scores, of_x)

  total = product.zeros(weights) if is_trained else None
  total, (per_token, scores, of_x) = _over_chunks(step, total, tuple(chunk.value for chunk in chunks))
  return (jnp.sum(per_token), scores), (_like(total, weights), of_x)


def _total_backward(product, objective, gradients, cotangents):
  del product, objective
  factor = instantiate(cotangents[0])
  return *jax.tree.map(lambda x: x * factor.astype(x.dtype), gradients), None, None


_total.defvjp(_total_forward, _total_backward, symbolic_zeros=True)
