"""A pipelined stack is the stack: same results, gradients and statistics, on 4 stages x data 2 fake devices.

Tolerances: float32; microbatches and shards are summed in another order.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

from spmd_tasks.layers.attention import Attention
from spmd_tasks.layers.feed_forward import GatedFeedForward
from spmd_tasks.layers.norm import RmsNorm
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.layers.statistics import Statistics
from spmd_tasks.layers.transformer import TransformerBlock, TransformerStack
from spmd_tasks.sharding.mesh import MeshSpec
from spmd_tasks.sharding.specs import sharding_scope
from spmd_tasks.sharding.weights import unbox_weights

B, T, D = 16, 8, 12
STAGES = {'data': 2, 'stage': 4}
RULES = (
  ('batch', ('data', 'stage')),
  ('layers', 'stage'),
  *((name, None) for name in ('embed', 'mlp', 'heads', 'kv_heads', 'head_dim', 'norm', 'seq')),
  *((name, None) for name in ('act_embed', 'act_mlp', 'act_heads', 'act_kv_heads')),
)


class SquaredMean(Statistics):
  """Not linear in the tokens, as a balance loss is: the mean over microbatches would be another number."""

  total: jax.Array

  def values(self):
    return {'squared_mean': jnp.square(self.total / self.num_tokens)}


class ReportingFeedForward(nn.Module):
  """A feed-forward sublayer that reports on the tokens that are not padding, and is infinite where x is 0."""

  @nn.compact
  def __call__(self, x, segment_ids=None, *, train=False):
    y, _ = GatedFeedForward(hidden_dim=24)(x, segment_ids, train=train)
    is_real = (segment_ids != 0).astype(x.dtype)
    statistics = SquaredMean(num_tokens=jnp.sum(is_real), total=jnp.sum(is_real * jnp.abs(y).sum(-1)))
    return y / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True)), {'y': statistics}


def make_block(dropout_rate=0.0):
  return TransformerBlock(
    attention=Attention(num_heads=3), ffn=ReportingFeedForward(), norm=RmsNorm(), dropout_rate=dropout_rate
  )


@functools.cache
def make_mesh(**sizes):
  sizes = sizes or STAGES
  num_devices = int(np.prod(list(sizes.values())))
  return MeshSpec(axis_names=tuple(sizes), ici_mesh_shape=tuple(sizes.values())).build(jax.devices()[:num_devices])


@functools.cache
def inputs():
  rng = np.random.default_rng(0)
  segment_ids = np.sort(rng.integers(0, 4, (B, T)), axis=1)[:, ::-1]  # up to three documents and padding
  segment_pos = np.array([[t - list(row).index(row[t]) for t in range(T)] for row in segment_ids])
  x = rng.normal(size=(B, T, D))
  return jnp.asarray(x, 'float32'), jnp.asarray(segment_ids, 'int32'), jnp.asarray(segment_pos, 'int32')


@functools.cache
def make_weights(num_layers):
  """Away from the initial values, where mistakes hide."""
  stack = TransformerStack(block=make_block(), num_layers=num_layers)
  abstract = unbox_weights(jax.eval_shape(stack.init, jax.random.key(0), *inputs())['params'])
  rng = np.random.default_rng(1)
  return jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape) + 0.1, 'float32'), abstract)


def loss_fn(stack, weights, x, rngs=None):
  y, aux = stack.apply({'params': weights}, x, *inputs()[1:], train=True, rngs=rngs)
  loss = jnp.sum(jnp.square(y) * jnp.cos(jnp.arange(D, dtype='float32'))[None, None]) / B + jnp.sum(aux['squared_mean'])
  return loss, (y, aux)


def grad_fn(stack, rngs=None):
  return jax.value_and_grad(functools.partial(loss_fn, stack, rngs=rngs), argnums=(0, 1), has_aux=True)


@functools.cache
def reference(num_layers):
  stack = TransformerStack(block=make_block(), num_layers=num_layers)
  return jax.device_get(jax.jit(grad_fn(stack))(make_weights(num_layers), inputs()[0]))


def split(weights, num_repeats):
  return jax.tree.map(lambda w: w.reshape(num_repeats, -1, *w.shape[1:]) if num_repeats > 1 else w, weights)


def merge(weights, num_repeats):
  return jax.tree.map(lambda w: w.reshape(-1, *w.shape[2:]) if num_repeats > 1 else w, weights)


def compile_grad(stack, num_layers, mesh=None, rules=RULES, rngs=None):
  mesh = mesh or make_mesh()

  def run(weights, x):
    with sharding_scope(mesh, rules):
      return grad_fn(stack, rngs)(weights, x)

  spec = jax.P(*[None] * (stack.num_repeats > 1), 'stage')
  weights = split(make_weights(num_layers), stack.num_repeats)
  even = num_layers // stack.num_repeats % mesh.shape['stage'] == 0
  weights_shardings = NamedSharding(mesh, spec if even else jax.P())
  x_sharding = NamedSharding(mesh, jax.P(('data', 'stage')))
  in_shardings = weights_shardings, x_sharding
  out_shardings = (None, in_shardings)
  compiled = jax.jit(run, in_shardings=in_shardings, out_shardings=out_shardings).lower(weights, inputs()[0]).compile()
  return compiled, jax.device_put((weights, inputs()[0]), in_shardings)


@functools.cache
def pipelined(num_layers, **settings):
  stack = PipelinedStack(block=make_block(), num_layers=num_layers, **settings)
  compiled, args = compile_grad(stack, num_layers)
  (loss, outputs), (weights, x) = jax.device_get(compiled(*args))
  return compiled.as_text(), ((loss, outputs), (merge(weights, stack.num_repeats), x))


CASES = {
  'gpipe': (8, {'num_microbatches': 8}),
  'gpipe, as many microbatches as stages': (8, {'num_microbatches': 4}),
  'gpipe, 6 layers on 4 stages, full remat': (6, {'num_microbatches': 8, 'remat_policy': 'full'}),
  'circular': (8, {'num_microbatches': 8, 'schedule': 'circular', 'num_repeats': 2}),
  'circular, no delay': (8, {'num_microbatches': 4, 'schedule': 'circular', 'num_repeats': 2}),
  'circular, 10 layers on 4 stages x 2': (
    10,
    {'num_microbatches': 8, 'schedule': 'circular', 'num_repeats': 2, 'remat_policy': 'dots'},
  ),
  'one forward, one backward': (8, {'num_microbatches': 8, 'schedule': 'one_forward_one_backward'}),
  'one forward, one backward, 6 layers, full remat': (
    6,
    {'num_microbatches': 16, 'schedule': 'one_forward_one_backward', 'remat_policy': 'full'},
  ),
}


def assert_close(got, expected):
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
    scale = max(1e-3, np.max(np.abs(b)))
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize('name', CASES)
def test_results_gradients_and_statistics_are_those_of_the_stack(name):
  num_layers, settings = CASES[name]
  _, got = pipelined(num_layers, **settings)
  assert_close(got, reference(num_layers))
