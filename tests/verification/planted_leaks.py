"""Experiments with packed rows in which one layer or the loss lets a document depend on another.

`leaks=False` is the same experiment without the leak; it differs only in the lines marked with `# <-`.

Shapes: B batch, T sequence, D model, V vocab.
"""

import dataclasses
import functools

import fiddle as fdl
from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

from spmd_tasks import Task
from spmd_tasks.layers import FanInNormal, LanguageModelLoss, declare_weight
from spmd_tasks.layers.attention import Attention
from spmd_tasks.layers.base import WithSublayers
from spmd_tasks.recipes import SyntheticLanguageModel
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, context_axis_rules
from tests.verification.planted_bugs import on_devices


class Packed(SyntheticLanguageModel):
  """One block of width 8 with another layer in place of attention."""

  leaks: bool = True

  vocab_size = 12
  model_dims = 8
  num_layers = 1
  num_heads = 2
  hidden_dims = 12
  seq_len = 16
  batch_size = 6
  eval_batches = 1
  num_train_steps = 4

  def mixer(self):
    return fdl.Config(ShortConvolution, leaks=False)

  def block(self, ffn):
    return fdl.Config(MixerBlock, mixer=self.mixer(), norm=super().block(ffn).norm)


class MixerBlock(WithSublayers, kw_only=True):
  """A user's own block: x + mixer(norm(x))."""

  mixer: nn.Module
  norm: nn.Module

  @nn.compact
  def __call__(self, x, segment_ids, segment_pos):
    return x + self.mixer(self.norm(x), segment_ids, segment_pos)


def same_document(segment_ids):
  """Returns which tokens [B, T, T] see which: earlier ones of their document."""
  is_earlier = jnp.tril(jnp.ones((1, *segment_ids.shape[1:] * 2), bool))
  return (segment_ids[:, :, None] == segment_ids[:, None, :]) & is_earlier


# 1. Attention without a mask of documents, and 3. a window that crosses them.


class LeakingAttention(Attention, kw_only=True):
  leaks: bool

  @nn.compact
  def __call__(self, x, segment_ids, segment_pos):
    if self.leaks:
      segment_ids = jnp.minimum(segment_ids, 1)  # <-
    return super().__call__(x, segment_ids, segment_pos)


class NoMask(Packed):
  window: int | None = None

  def mixer(self):
    return fdl.Config(LeakingAttention, num_heads=self.num_heads, window=self.window, leaks=self.leaks)


class WindowAcross(NoMask):
  window = 2


# 2. Positions that do not restart.


class ColumnPositions(nn.Module, kw_only=True):
  """Adds a learned vector for each position."""

  leaks: bool

  @nn.compact
  def __call__(self, x, segment_pos):
    table = declare_weight(self, 'table', shape=(64, x.shape[-1]), init=FanInNormal(), split_dims=(None, 'embed'))
    if self.leaks:
      segment_pos = jnp.broadcast_to(jnp.arange(x.shape[1]), segment_pos.shape)  # <-
    return x + table[segment_pos]


class Columns(Packed):
  def language_model(self):
    model = super().language_model()
    model.positions = fdl.Config(ColumnPositions, leaks=self.leaks)
    return model


# 4. Tokens that all documents share, as attention sinks do.


class SharedTokens(nn.Module, kw_only=True):
  """Attends to the first two tokens of the document."""

  leaks: bool

  @nn.compact
  def __call__(self, x, segment_ids, segment_pos):
    may_see = same_document(segment_ids) & (segment_pos[:, None, :] < 2)
    if self.leaks:
      may_see |= (jnp.arange(x.shape[1]) < 2)[None, None, :] & (segment_ids > 0)[:, :, None]  # <-
    logits = jnp.where(may_see, jnp.einsum('btd,bsd->bts', x, x), -1e9)
    return jnp.einsum('bts,bsd->btd', nn.softmax(logits), x)


class Sinks(Packed):
  def mixer(self):
    return fdl.Config(SharedTokens, leaks=self.leaks)


# 5. A convolution that crosses a border.


class ShortConvolution(nn.Module, kw_only=True):
  """y_t = a * x_t + b * x_(t-1)."""

  leaks: bool

  @nn.compact
  def __call__(self, x, segment_ids, segment_pos):
    kernel = declare_weight(self, 'kernel', shape=(2, x.shape[-1]), init=FanInNormal(), split_dims=(None, 'embed'))
    previous = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
    if not self.leaks:
      previous = jnp.where(segment_pos[..., None] > 0, previous, 0)  # <-
    return x * kernel[None, None, 0] + previous * kernel[None, None, 1]


class Convolution(Packed):
  def mixer(self):
    return fdl.Config(ShortConvolution, leaks=self.leaks)


# 6. A recurrence whose state is not reset. At the start it keeps e^-20 of the state per token, which hides the leak.


class Recurrence(nn.Module, kw_only=True):
  """s_t = exp(-exp(a)) s_(t-1) + x_t."""

  leaks: bool

  @nn.compact
  def __call__(self, x, segment_ids, segment_pos):
    log_rate = declare_weight(
      self, 'log_rate', shape=x.shape[-1:], init=nn.initializers.constant(3.0), split_dims=('embed',)
    )
    kept = jnp.broadcast_to(jnp.exp(-jnp.exp(log_rate))[None, None, :], x.shape)
    if not self.leaks:
      kept = jnp.where(segment_pos[..., None] > 0, kept, 0)  # <-

    def combine(left, right):
      return left[0] * right[0], right[0] * left[1] + right[1]

    return jax.lax.associative_scan(combine, (kept, x), axis=1)[1]


class Forgetful(Packed):
  def mixer(self):
    return fdl.Config(Recurrence, leaks=self.leaks)


# 7. A head that is taught the first token of the next document: test_packing_claim.py replaces the loss.


class Heads(Packed):
  num_nextn_predict_layers = 1


# 8. A loss whose last token of a document predicts the next document.


@dataclasses.dataclass(frozen=True, kw_only=True)
class NextTokenLoss:
  """The mean cross-entropy of the tokens that follow in the row."""

  leaks: bool

  def __call__(self, predictions, batch):
    ids, segment_ids = batch['ids'], batch['segment_ids']
    losses = optax.softmax_cross_entropy_with_integer_labels(predictions['logits'][:, :-1], ids[:, 1:])
    weights = (segment_ids[:, 1:] > 0).astype(losses.dtype)
    if not self.leaks:
      weights *= segment_ids[:, 1:] == segment_ids[:, :-1]  # <-
    return jnp.sum(losses * weights) / jnp.sum(weights)


class LossAcross(Packed):
  def loss(self):
    return fdl.Config(NextTokenLoss, leaks=self.leaks)


# 9. A convolution over tokens that several devices share, which forgets the borders between documents at theirs.


class HaloConvolution(nn.Module, kw_only=True):
  """ShortConvolution; each device gets the last token of the device before it."""

  leaks: bool

  @nn.compact
  def __call__(self, x, segment_ids, segment_pos):
    kernel = declare_weight(self, 'kernel', shape=(2, x.shape[-1]), init=FanInNormal(), split_dims=(None, 'embed'))

    def previous_of_device(x, segment_pos):
      ring = [(i, i + 1) for i in range(jax.lax.axis_size('context') - 1)]
      halo = jax.lax.ppermute(x[:, -1:], 'context', ring)
      is_start = segment_pos == 0
      if self.leaks:
        is_start = is_start.at[:, 0].set(False)  # <-
      return jnp.where(is_start[..., None], 0, jnp.concatenate([halo, x[:, :-1]], axis=1))

    tokens = P('data', 'context')
    previous = on_devices(previous_of_device, x, segment_pos, in_specs=(tokens, tokens), out_specs=tokens)
    return x * kernel[None, None, 0] + previous[: len(x)] * kernel[None, None, 1]


class Halo(Packed):
  mesh_axis_names = ('replica', 'data', 'context', 'mdl')
  ici_mesh_shape = (1, 1, 2, 1)
  axis_rules = context_axis_rules(DEFAULT_AXIS_RULES)

  def mixer(self):
    return fdl.Config(HaloConvolution, leaks=self.leaks)


# 10. A convolution whose own gradient rule sends cotangents across the border.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def previous_tokens(leaks, x, is_start):
  """Returns x_(t-1), or zero at the start of a document."""
  return jnp.where(is_start, 0, jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0))))


def _pull_back(leaks, is_start, cotangent):
  if not leaks:
    cotangent = jnp.where(is_start, 0, cotangent)  # <-
  return jnp.pad(cotangent[:, 1:], ((0, 0), (0, 1), (0, 0))), None


previous_tokens.defvjp(lambda leaks, x, is_start: (previous_tokens(leaks, x, is_start), is_start), _pull_back)


class ConvolutionWithRule(nn.Module, kw_only=True):
  """ShortConvolution with `previous_tokens`."""

  leaks: bool

  @nn.compact
  def __call__(self, x, segment_ids, segment_pos):
    kernel = declare_weight(self, 'kernel', shape=(2, x.shape[-1]), init=FanInNormal(), split_dims=(None, 'embed'))
    x = x * kernel[None, None, 1]
    return x * kernel[None, None, 0] + previous_tokens(self.leaks, x, segment_pos[..., None] == 0)


class Backward(Packed):
  def mixer(self):
    return fdl.Config(ConvolutionWithRule, leaks=self.leaks)


# 11. A model of NNX modules, one of which is a convolution that crosses a border.


class NnxConvolution(nnx.Module):
  def __init__(self, width: int, leaks: bool, *, rngs: nnx.Rngs):
    self.kernel = nnx.Param(0.5 * rngs.params.normal((2, width)))
    self.leaks = leaks

  def __call__(self, x, segment_pos):
    previous = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
    if not self.leaks:
      previous = jnp.where(segment_pos[..., None] > 0, previous, 0)  # <-
    return x * self.kernel[None, None, 0] + previous * self.kernel[None, None, 1]


class NnxLanguageModel(nnx.Module):
  def __init__(self, vocab_size: int, width: int, leaks: bool, *, rngs: nnx.Rngs):
    self.embedding = nnx.Embed(vocab_size, width, rngs=rngs)
    self.mixers = nnx.List([NnxConvolution(width, leaks and number == 1, rngs=rngs) for number in range(2)])
    self.logits = nnx.Linear(width, vocab_size, rngs=rngs)

  def __call__(self, ids, segment_ids, segment_pos):
    x = self.embedding(ids)
    for mixer in self.mixers:
      x = x + mixer(x, segment_pos)
    return {'logits': self.logits(jnp.where(segment_ids[..., None] > 0, x, 0))}


class Nnx(Packed):
  def task(self):
    model = functools.partial(NnxLanguageModel, self.vocab_size, self.model_dims, self.leaks)
    return Task(model=model, loss=LanguageModelLoss(), learner=optax.adamw(0.01))
