"""Experiments of a user with a layer, loss, stack or optimizer of their own, each with one planted bug.

Every bug is one that the user's own tests on one device do not see. `bug=False` gives the sound twin of the same
experiment, which differs in the marked lines only.

Shapes: B batch, T sequence, D model, F ffn, V vocab.
"""

import dataclasses

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

from spmd_tasks.layers import FanInNormal, GatedFeedForward, LossOutput, declare_weight
from spmd_tasks.layers.pipeline import PipelinedStack, Schedule
from spmd_tasks.recipes import PipelinedLanguageModel, SyntheticLanguageModel
from spmd_tasks.sharding import constrain, current_sharding_scope, pad, padded_shape, split_dims_to_partition_spec
from tests.verification.formed_text import FormedText

BATCH_AXES = ('replica', 'data')


class Planted(SyntheticLanguageModel):
  """A model of width 8 on data 2 x mdl 2, with one bug."""

  bug: bool = True

  ici_mesh_shape = (1, 2, 2)
  vocab_size = 12
  model_dims = 8
  num_layers = 1
  num_heads = 2
  hidden_dims = 12
  seq_len = 6
  batch_size = 8
  eval_batches = 1
  num_train_steps = 4


class OfPaddedText(Planted):
  """Trains on rows of different lengths."""

  def train_input(self):
    cfg = super().train_input()
    fdl.update_callable(cfg, FormedText)
    return cfg


def on_devices(function, *arrays, in_specs=P(BATCH_AXES), out_specs=P()):
  """Calls `function` on every device with its parts of the arrays; zeros fill up what the mesh does not divide."""
  mesh = current_sharding_scope().mesh
  specs = in_specs if isinstance(in_specs, tuple) else (in_specs,) * len(arrays)
  even = [
    pad(a, jax.ShapeDtypeStruct(padded_shape(a.shape, spec, mesh.shape), a.dtype)) for a, spec in zip(arrays, specs)
  ]
  return jax.shard_map(function, mesh=mesh, in_specs=tuple(specs), out_specs=out_specs, check_vma=False)(*even)


# 1. A layer with a missing psum.


class RowParallelFfn(nn.Module, kw_only=True):
  """relu(x . up) . down, written as Megatron does: each device has some columns of `up` and rows of `down`."""

  hidden_dim: int
  bug: bool

  @nn.compact
  def __call__(self, x, segment_ids=None, *, train=False):
    embed_dim = x.shape[-1]
    up = declare_weight(self, 'up', shape=(embed_dim, self.hidden_dim), init=FanInNormal(), split_dims=('embed', 'mlp'))
    down = declare_weight(
      self, 'down', shape=(self.hidden_dim, embed_dim), init=FanInNormal(), split_dims=('mlp', 'embed')
    )
    if current_sharding_scope() is None:
      return nn.relu(x @ up) @ down, {}

    def of_device(x, up, down):
      y = nn.relu(x @ up) @ down
      return y if self.bug else jax.lax.psum(y, 'mdl')  # <-

    rows = P(BATCH_AXES)
    y = on_devices(of_device, x, up, down, in_specs=(rows, P(None, 'mdl'), P('mdl')), out_specs=rows)
    return y[: x.shape[0]], {}


class MissingPsum(Planted):
  def ffn(self):
    return fdl.Config(RowParallelFfn, hidden_dim=self.hidden_dims, bug=self.bug)


# 2. A loss that averages over the local batch.


def cross_entropy(logits, labels):
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedLoss:
  """The mean cross-entropy over the tokens, each device summing its own rows."""

  bug: bool

  def __call__(self, predictions, batch) -> LossOutput:
    def of_device(logits, labels, weights):
      total, weight = jnp.sum(cross_entropy(logits, labels) * weights), jnp.sum(weights)
      if self.bug:
        return jax.lax.pmean(total / jnp.maximum(weight, 1), BATCH_AXES)  # <-
      return jax.lax.psum(total, BATCH_AXES) / jax.lax.psum(weight, BATCH_AXES)

    loss = on_devices(of_device, predictions['logits'], batch['labels'], batch['weights'])
    return LossOutput(loss=loss, weight=jnp.sum(batch['weights']), metrics={}, per_example={})


class LocalMean(OfPaddedText):
  def loss(self):
    return fdl.Config(ShardedLoss, bug=self.bug)


# 3. An rng folded by device.


class ShardedDropoutFfn(RowParallelFfn, kw_only=True):
  """The sound layer of 1, with dropout of its output."""

  rate: float = 0.25

  @nn.compact
  def __call__(self, x, segment_ids=None, *, train=False):
    y, aux = RowParallelFfn(hidden_dim=self.hidden_dim, bug=False, name='ffn')(x)
    if not train:
      return y, aux
    rng = self.make_rng('dropout')

    def of_device(y):
      rng_of_device = jax.random.fold_in(rng, jax.lax.axis_index('data'))  # <-
      return y * jax.random.bernoulli(rng_of_device, 1 - self.rate, y.shape) / (1 - self.rate)

    if not self.bug:
      return y * jax.random.bernoulli(rng, 1 - self.rate, y.shape) / (1 - self.rate), aux
    rows = P(BATCH_AXES)
    return on_devices(of_device, y, out_specs=rows)[: y.shape[0]], aux


class RngOfDevice(Planted):
  def ffn(self):
    return fdl.Config(ShardedDropoutFfn, hidden_dim=self.hidden_dims, bug=self.bug)


# 4. A wrong shard of labels.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicatedLabelsLoss:
  """The mean cross-entropy; every device has all labels and cuts out those of its own rows."""

  bug: bool

  def __call__(self, predictions, batch) -> LossOutput:
    sizes = current_sharding_scope().mesh.shape
    num_parts = sizes['replica'] * sizes['data']
    num_missing = -batch['labels'].shape[0] % num_parts
    labels, weights = (jnp.pad(batch[name], ((0, num_missing), (0, 0))) for name in ('labels', 'weights'))

    def of_device(logits):
      replica, data = jax.lax.axis_index('replica'), jax.lax.axis_index('data')
      part = replica + sizes['replica'] * data if self.bug else replica * sizes['data'] + data  # <-
      own_labels, own_weights = (
        jax.lax.dynamic_slice_in_dim(a, part * logits.shape[0], logits.shape[0]) for a in (labels, weights)
      )
      totals = jnp.stack([jnp.sum(cross_entropy(logits, own_labels) * own_weights), jnp.sum(own_weights)])
      return jax.lax.psum(totals, BATCH_AXES)

    total, weight = on_devices(of_device, predictions['logits'])
    return LossOutput(loss=total / weight, weight=weight, metrics={}, per_example={})


class WrongLabels(Planted):
  ici_mesh_shape = (2, 2, 1)

  def loss(self):
    return fdl.Config(ReplicatedLabelsLoss, bug=self.bug)


# 5. A pad that leaks into a norm.


class NormedHiddenFfn(nn.Module, kw_only=True):
  """relu(rms_norm(x . up)) . down, with a hidden layer that is rounded up to the size of the mesh."""

  hidden_dim: int
  bug: bool

  @nn.compact
  def __call__(self, x, segment_ids=None, *, train=False):
    embed_dim, hidden_dim = x.shape[-1], self.hidden_dim
    up = declare_weight(self, 'up', shape=(embed_dim, hidden_dim), init=FanInNormal(), split_dims=('embed', 'mlp'))
    down = declare_weight(self, 'down', shape=(hidden_dim, embed_dim), init=FanInNormal(), split_dims=('mlp', 'embed'))
    scope = current_sharding_scope()
    num_missing = 0 if scope is None else -hidden_dim % scope.mesh.shape['mdl']
    hidden = jnp.pad(x @ up, ((0, 0), (0, 0), (0, num_missing)))
    hidden = constrain(hidden, ('batch', 'seq', 'act_mlp'))
    size = hidden.shape[-1] if self.bug else hidden_dim  # <-
    mean_square = jnp.sum(jnp.square(hidden), axis=-1, keepdims=True) / size
    hidden = nn.relu(hidden * jax.lax.rsqrt(mean_square + 1e-6))
    return hidden @ jnp.pad(down, ((0, num_missing), (0, 0))), {}


class PadInNorm(Planted):
  ici_mesh_shape = (1, 1, 4)
  hidden_dims = 10

  def ffn(self):
    return fdl.Config(NormedHiddenFfn, hidden_dim=self.hidden_dims, bug=self.bug)


# 6. A microbatch mean of means.


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightOfRowsLoss:
  """The mean cross-entropy over the tokens."""

  bug: bool

  def __call__(self, predictions, batch) -> LossOutput:
    weights = batch['weights']
    loss = jnp.sum(cross_entropy(predictions['logits'], batch['labels']) * weights) / jnp.maximum(jnp.sum(weights), 1)
    weight = jnp.asarray(len(weights), jnp.float32) if self.bug else jnp.sum(weights)  # <-
    return LossOutput(loss=loss, weight=weight, metrics={}, per_example={})


class MeanOfMeans(OfPaddedText):
  def loss(self):
    return fdl.Config(WeightOfRowsLoss, bug=self.bug)


# 7. A stage that drops its last tick.


class ShortSchedule(Schedule):
  """One tick less than the microbatches need to pass all stages."""

  @property
  def num_ticks(self) -> int:
    return super().num_ticks - 1  # <-


class ShortStack(PipelinedStack, kw_only=True):
  """A pipeline with a schedule of its own."""

  bug: bool = True

  def _schedules(self, *args, **kwargs):
    schedules = super()._schedules(*args, **kwargs)
    return [ShortSchedule(**dataclasses.asdict(each)) for each in schedules] if self.bug else schedules


class LostTick(PipelinedLanguageModel, Planted):
  ici_mesh_shape = (1, 2, 2, 1)
  num_layers = 2
  num_microbatches = 2

  def stack(self):
    cfg = super().stack()
    fdl.update_callable(cfg, ShortStack)
    cfg.bug = self.bug
    return cfg


# 8. An optimizer that sees padding.


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormalizedMomentum:
  """Momentum, divided by the root mean square of each weight's gradient; each device sums its own part of it."""

  bug: bool
  learning_rate: float = 1e-2

  def transformation(self, weight_specs) -> optax.GradientTransformation:
    def rms(grad, weight_spec):
      scope = current_sharding_scope()
      assert scope is not None
      mesh = scope.mesh
      spec = split_dims_to_partition_spec(weight_spec.split_dims, mesh.axis_names, scope.axis_rules)
      even = pad(grad, jax.ShapeDtypeStruct(padded_shape(grad.shape, spec, mesh.shape), grad.dtype))

      def of_device(part):
        return jax.lax.pmean(jnp.mean(jnp.square(part)), mesh.axis_names)

      mean = jax.shard_map(of_device, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)(even)
      if not self.bug:
        mean = mean * (even.size / grad.size)  # <-
      return jnp.sqrt(mean) + 1e-6

    def update(grads, state, weights=None):
      normed = jax.tree.map(lambda g, spec: g / rms(g, spec), grads, weight_specs)
      momentum = jax.tree.map(lambda m, n: 0.9 * m + n, state, normed)
      return momentum, momentum

    return optax.GradientTransformation(lambda weights: jax.tree.map(jnp.zeros_like, weights), update)


class PadInOptimizer(Planted):
  ici_mesh_shape = (1, 1, 4)
  hidden_dims = 10

  def task(self):
    cfg = super().task()
    cfg.learner.optimizer = fdl.Config(NormalizedMomentum, bug=self.bug)
    return cfg


# 9. A layer that looks ahead, which no generated token can.


class LooksAheadFfn(nn.Module, kw_only=True):
  """Adds the mean of all tokens of the row, or of those up to each token, with a weight."""

  bug: bool

  @nn.compact
  def __call__(self, x, segment_ids=None, *, train=False):
    scale = declare_weight(self, 'scale', shape=x.shape[-1:], init=nn.initializers.ones, split_dims=('embed',))
    y = jnp.mean(x, axis=1, keepdims=True) if self.bug else x  # <-
    return jnp.broadcast_to(y * scale[None, None, :], x.shape), {}


class LooksAhead(Planted):
  def ffn(self):
    return fdl.Config(LooksAheadFfn, bug=self.bug)


# 10. A layer that keeps 8 bits of integers, without a scale, where it should keep those of bfloat16.


class CoarseFfn(GatedFeedForward, kw_only=True):
  """A gated feed-forward sublayer whose hidden layer is stored in 8 bits."""

  bug: bool = True

  def _hidden(self, x):
    hidden = super()._hidden(x)
    if self.bug and hidden.dtype == jnp.bfloat16:
      hidden = hidden.astype(jnp.int8).astype(hidden.dtype)  # <-
    return hidden


class CoarseBfloat16(Planted):
  def ffn(self):
    return fdl.Config(CoarseFfn, hidden_dim=self.hidden_dims, dtype=self.dtype, bug=self.bug)
