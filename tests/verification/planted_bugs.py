"""Experiments with a custom layer, loss, stack or optimizer, each with one planted bug.

Tests on one device do not find these bugs. `bug=False` is the same experiment without the bug; it differs only in the
lines marked with `# <-`.

Shapes: B batch, T sequence, D model, F ffn, V vocab.
"""

import dataclasses

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

from spmd_tasks.layers import FanInNormal, GatedFeedForward, LossOutput, QuantizedProduct, declare_weight
from spmd_tasks.layers.pipeline import PipelinedStack, Schedule
from spmd_tasks.learning import Optimizer
from spmd_tasks.recipes import PipelinedLanguageModel, SyntheticLanguageModel
from spmd_tasks.sharding import constrain, split_dims_to_partition_spec
from spmd_tasks.sharding.padding import pad, padded_shape
from spmd_tasks.sharding.specs import current_sharding_scope
from tests.layers.tiny_model import FfnBlock

BATCH_AXES = ('replica', 'data')
ROWS = P(BATCH_AXES)


class Planted(SyntheticLanguageModel):
  """A model of width 8 on data 2 x mdl 2 with one bug, without attention."""

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

  def block(self, ffn):
    return fdl.Config(FfnBlock, ffn=ffn, norm=super().block(ffn).norm)


def own_ffn(layer):
  """The method `ffn` of an experiment with a custom feed-forward layer."""
  return lambda self: fdl.Config(layer, hidden_dim=self.hidden_dims, bug=self.bug)


def on_devices(function, *arrays, in_specs, out_specs=P()):
  """Calls `function` on every device with its shards of the arrays, which are zero-padded if they are uneven."""
  mesh = current_sharding_scope().mesh
  even = [
    pad(a, jax.ShapeDtypeStruct(padded_shape(a.shape, spec, mesh.shape), a.dtype)) for a, spec in zip(arrays, in_specs)
  ]
  return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(*even)


def ffn_weights(layer, embed_dim):
  """The weights [D, F] and [F, D] of a feed-forward layer."""
  return [
    declare_weight(layer, name, shape=shape, init=FanInNormal(), split_dims=split_dims)
    for name, shape, split_dims in (
      ('up', (embed_dim, layer.hidden_dim), ('embed', 'mlp')),
      ('down', (layer.hidden_dim, embed_dim), ('mlp', 'embed')),
    )
  ]


# 1. A layer without a psum.


class RowParallelFfn(nn.Module, kw_only=True):
  """relu(x . up) . down as in Megatron: each device has some columns of `up` and rows of `down`."""

  hidden_dim: int
  bug: bool

  @nn.compact
  def __call__(self, x, segment_ids=None, *, train=False):
    def of_device(x, up, down):
      y = nn.relu(x @ up) @ down
      return y if self.bug else jax.lax.psum(y, 'mdl')  # <-

    in_specs = (ROWS, P(None, 'mdl'), P('mdl'))
    y = on_devices(of_device, x, *ffn_weights(self, x.shape[-1]), in_specs=in_specs, out_specs=ROWS)
    return y[: x.shape[0]], {}


class MissingPsum(Planted):
  ffn = own_ffn(RowParallelFfn)


# 2. A loss that averages over the local batch, and 4. a loss with the wrong shards of labels.


def loss_sums(logits, labels, weights):
  """The summed cross-entropy of the tokens, and their summed weight."""
  return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, labels) * weights), jnp.sum(weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardedLoss:
  """The mean cross-entropy over the tokens, each device summing its own rows."""

  is_local: bool = False
  is_reordered: bool = False

  def __call__(self, predictions, batch) -> LossOutput:
    def of_device(logits, labels, weights):
      total, weight = loss_sums(logits, labels, weights)
      if self.is_local:
        return jax.lax.pmean(total / jnp.maximum(weight, 1), BATCH_AXES)  # <-
      return jax.lax.psum(total, BATCH_AXES) / jax.lax.psum(weight, BATCH_AXES)

    labels = P(BATCH_AXES[::-1]) if self.is_reordered else ROWS  # <-
    arrays = predictions['logits'], batch['labels'], batch['weights']
    loss = on_devices(of_device, *arrays, in_specs=(ROWS, labels, labels))
    return LossOutput(loss=loss, weight=jnp.sum(batch['weights']), metrics={}, per_example={})


class LocalMean(Planted):
  def loss(self):
    return fdl.Config(ShardedLoss, is_local=self.bug)


class WrongLabels(Planted):
  ici_mesh_shape = (2, 2, 1)

  def loss(self):
    return fdl.Config(ShardedLoss, is_reordered=self.bug)


# 3. Dropout with an rng that depends on the device.


class DropoutFfn(GatedFeedForward, kw_only=True):
  """A gated feed-forward sublayer with dropout of its hidden layer."""

  bug: bool

  def _hidden(self, x):
    hidden = super()._hidden(x)
    if not self.has_rng('dropout'):
      return hidden
    rng = self.make_rng('dropout')

    def drop(rng, hidden):
      return hidden * jax.random.bernoulli(rng, 0.75, hidden.shape) / 0.75

    def of_device(hidden):
      return drop(jax.random.fold_in(rng, jax.lax.axis_index('data')), hidden)  # <-

    if not self.bug:
      return drop(rng, hidden)
    return on_devices(of_device, hidden, in_specs=(ROWS,), out_specs=ROWS)[: x.shape[0]]


class RngOfDevice(Planted):
  ffn = own_ffn(DropoutFfn)


# 5. A norm that includes padding.


class NormedHiddenFfn(nn.Module, kw_only=True):
  """relu(rms_norm(x . up)) . down, with a hidden layer that is padded to a multiple of the mesh axis."""

  hidden_dim: int
  bug: bool

  @nn.compact
  def __call__(self, x, segment_ids=None, *, train=False):
    up, down = ffn_weights(self, x.shape[-1])
    num_missing = -self.hidden_dim % current_sharding_scope().mesh.shape['mdl']
    hidden = jnp.pad(x @ up, ((0, 0), (0, 0), (0, num_missing)))
    hidden = constrain(hidden, ('batch', 'seq', 'act_mlp'))
    size = hidden.shape[-1] if self.bug else self.hidden_dim  # <-
    mean_square = jnp.sum(jnp.square(hidden), axis=-1, keepdims=True) / size
    hidden = nn.relu(hidden * jax.lax.rsqrt(mean_square + 1e-6))
    return hidden @ jnp.pad(down, ((0, num_missing), (0, 0))), {}


class PadInNorm(Planted):
  ici_mesh_shape = (1, 1, 4)
  hidden_dims = 10
  ffn = own_ffn(NormedHiddenFfn)


# 6. A loss whose microbatches are averaged by rows instead of tokens.


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightOfRowsLoss:
  """The mean cross-entropy over the tokens."""

  bug: bool

  def __call__(self, predictions, batch) -> LossOutput:
    total, num_tokens = loss_sums(predictions['logits'], batch['labels'], batch['weights'])
    weight = jnp.float32(len(batch['weights'])) if self.bug else num_tokens  # <-
    return LossOutput(loss=total / jnp.maximum(num_tokens, 1), weight=weight, metrics={}, per_example={})


class MeanOfMeans(Planted):
  def loss(self):
    return fdl.Config(WeightOfRowsLoss, bug=self.bug)


# 7. A pipeline without its last tick.


class ShortSchedule(Schedule):
  """A schedule with one tick too few."""

  @property
  def num_ticks(self) -> int:
    return super().num_ticks - 1  # <-


class ShortStack(PipelinedStack, kw_only=True):
  """A pipeline with ShortSchedule."""

  bug: bool = True

  def _schedules(self, *args, **kwargs):
    schedules = super()._schedules(*args, **kwargs)
    return [ShortSchedule(**dataclasses.asdict(schedule)) for schedule in schedules] if self.bug else schedules


class LostTick(PipelinedLanguageModel, Planted):
  ici_mesh_shape = (1, 2, 2, 1)
  num_layers = 2
  num_microbatches = 2

  def stack(self):
    cfg = super().stack()
    fdl.update_callable(cfg, ShortStack)
    cfg.bug = self.bug
    return cfg


# 8. An optimizer that includes padding.


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormalizedMomentum(Optimizer):
  """Momentum, divided by the root mean square of each weight's gradient."""

  bug: bool
  learning_rate: float = 1e-2

  def transformation(self, weight_specs) -> optax.GradientTransformation:
    def mean_square_by_device(grad, weight_spec):
      scope = current_sharding_scope()
      axis_names = scope.mesh.axis_names
      spec = split_dims_to_partition_spec(weight_spec.split_dims, axis_names, scope.axis_rules)
      return on_devices(lambda part: jax.lax.pmean(jnp.mean(jnp.square(part)), axis_names), grad, in_specs=(spec,))

    def normalize(grad, weight_spec):
      mean_square = mean_square_by_device(grad, weight_spec) if self.bug else jnp.mean(jnp.square(grad))  # <-
      return grad / (jnp.sqrt(mean_square) + 1e-6)

    def update(grads, state, weights=None):
      momentum = jax.tree.map(lambda m, g, spec: 0.9 * m + normalize(g, spec), state, grads, weight_specs)
      return momentum, momentum

    return optax.GradientTransformation(lambda weights: jax.tree.map(jnp.zeros_like, weights), update)


class PadInOptimizer(Planted):
  ici_mesh_shape = (1, 1, 2)
  hidden_dims = 9

  def task(self):
    cfg = super().task()
    cfg.learner.optimizer = fdl.Config(NormalizedMomentum, bug=self.bug)
    return cfg


# 9. A layer that reads later tokens, which do not exist in generation.


class LooksAheadFfn(nn.Module, kw_only=True):
  """Adds the scaled mean of all tokens of the row, or without the bug the scaled token itself."""

  hidden_dim: int
  bug: bool

  @nn.compact
  def __call__(self, x, segment_ids=None, *, train=False):
    scale = declare_weight(self, 'scale', shape=x.shape[-1:], init=nn.initializers.ones, split_dims=('embed',))
    y = jnp.mean(x, axis=1, keepdims=True) if self.bug else x  # <-
    return jnp.broadcast_to(y * scale[None, None, :], x.shape), {}


class LooksAhead(Planted):
  block = SyntheticLanguageModel.block
  ffn = own_ffn(LooksAheadFfn)


# 10. A layer that stores its bfloat16 hidden layer in int8 without a scale.


class CoarseFfn(GatedFeedForward, kw_only=True):
  """A gated feed-forward sublayer whose hidden layer is stored in 8 bits."""

  bug: bool

  def _hidden(self, x):
    hidden = super()._hidden(x)
    if self.bug and hidden.dtype == jnp.bfloat16:
      hidden = hidden.astype(jnp.int8).astype(hidden.dtype)  # <-
    return hidden


class CoarseBfloat16(Planted):
  def ffn(self):
    return fdl.Config(CoarseFfn, hidden_dim=self.hidden_dims, dtype=self.dtype, bug=self.bug)


# 11. Products in int8 with a fixed range that is too small.


class NarrowInt8(Planted):
  def task(self):
    task = super().task()
    task.quantization = {'ffn/': fdl.Config(QuantizedProduct, bound=0.02 if self.bug else None)}  # <-
    return task
