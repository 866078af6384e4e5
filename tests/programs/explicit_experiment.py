"""A model with a kernel for explicit mesh axes, a loss that reads the sharding, and the same for `jax.set_mesh`."""

import fiddle as fdl
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

from spmd_tasks import Experiment, Learner, Task
from spmd_tasks.layers import declare_weight
from spmd_tasks.recipes import SyntheticLanguageModel
from tests.programs.nnx_experiment import batches


def multiply(x, w):
  """Computes x [B, D] @ w [D, F] by the columns of each device; the norm of all of them scales the result."""
  y = x @ w
  square = jax.lax.psum(jnp.sum(jnp.square(y), axis=-1, keepdims=True), 'mdl')
  return y * jax.lax.rsqrt(square / (y.shape[-1] * jax.lax.axis_size('mdl')) + 1e-6)


class Explicit(nn.Module):
  """The sharding is in the types: `multiply` takes w as it is declared, and the second product names its own."""

  width: int = 32

  @nn.compact
  def __call__(self, image):
    init = nn.initializers.lecun_normal()
    w = self.param('up', nn.with_partitioning(init, (None, 'mlp')), (100, self.width))
    down = self.param('down', nn.with_partitioning(init, ('mlp', None)), (self.width, 10))
    rows = jax.typeof(image).sharding.spec[0]  # ('replica', 'data')
    x, columns = image.reshape(len(image), -1), P(None, 'mdl')
    hidden = nn.relu(jax.shard_map(multiply, in_specs=(P(rows, None), columns), out_specs=P(rows, 'mdl'))(x, w))
    return jnp.einsum('bf,fd->bd', hidden, down, out_sharding=P(rows, None))


class InMeshContext(nn.Module):
  """The same numbers, written for automatic axes in the context of a mesh."""

  width: int = 32

  @nn.compact
  def __call__(self, image):
    init = nn.initializers.lecun_normal()
    w = self.param('up', nn.with_partitioning(init, (None, 'mlp')), (100, self.width))
    down = self.param('down', nn.with_partitioning(init, ('mlp', None)), (self.width, 10))
    rows, columns = P('data', None), P(None, 'mdl')
    x = jax.lax.with_sharding_constraint(image.reshape(len(image), -1), rows)
    hidden = nn.relu(jax.shard_map(multiply, in_specs=(rows, columns), out_specs=P('data', 'mdl'))(x, w))
    return hidden @ down


def feed(x, up, down):
  """A feed-forward layer for explicit axes, x [B, T, D]."""
  rows = P(jax.typeof(x).sharding.spec[0], None, None)
  layer = lambda x, up, down: jax.lax.psum(nn.relu(x @ up) @ down, 'mdl')
  return jax.shard_map(layer, in_specs=(rows, P(None, 'mdl'), P('mdl', None)), out_specs=rows)(x, up, down)


class ExplicitFeed(nn.Module):
  """One layer with explicit axes for a stack of ours."""

  @nn.compact
  def __call__(self, x):
    init = nn.initializers.lecun_normal()
    up = declare_weight(self, 'up', shape=(8, 32), init=init, split_dims=(None, 'mlp'))
    down = declare_weight(self, 'down', shape=(32, 8), init=init, split_dims=('mlp', None))
    specs = P(('replica', 'data')), P(None, 'mdl'), P('mdl', None)
    return jax.sharding.explicit_axes(feed, in_sharding=specs)(x, up, down)


class OwnFeed(SyntheticLanguageModel):
  """A language model whose feed-forward layers have explicit axes."""

  model_dims = 8
  num_layers = 1
  num_heads = 2
  seq_len = 4
  batch_size = 8

  def task(self):
    task = super().task()
    task.learner = fdl.Config(Learner, optimizer=fdl.Config(optax.sgd, 0.1))
    return task

  def ffn(self):
    return fdl.Config(ExplicitFeed)


def loss(logits, batch):
  losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(batch['label'], 10))
  return losses.mean()


def explicit_loss(logits, batch):
  rows = jax.typeof(batch['label']).sharding.spec
  assert jax.typeof(logits).sharding.spec == P(*rows, None), jax.typeof(logits)
  return loss(logits, batch)


class InContext(Experiment):
  ici_mesh_shape = (1, 4, 2)
  num_train_steps = 4
  checkpoint_every = 2

  def task(self):
    return Task(model=InMeshContext(), loss=loss, learner=optax.adamw(0.01))

  def train_input(self):
    return batches(0)

  def eval_inputs(self):
    return {'valid': batches(1)}


class Types(InContext):
  def task(self):
    return Task(model=Explicit(), loss=explicit_loss, learner=optax.adamw(0.01), explicit_axes=True)
