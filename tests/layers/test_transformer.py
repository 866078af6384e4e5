import functools
import re

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import assert_close, packed_batch, random_weights, tiny_model

from spmd_tasks.decoding.kv_cache import KvCache
from spmd_tasks.layers import (
  BlockGroup,
  GatedFeedForward,
  RmsNorm,
  StackSequence,
  Statistics,
  TransformerBlock,
  TransformerStack,
  remat_policy,
)
from spmd_tasks.layers.attention import Attention
from spmd_tasks.layers.base import NEW_CACHE, layer_scope
from spmd_tasks.layers.transformer import REMAT_POLICIES, ROUTING_NAME
from spmd_tasks.sharding.weights import unbox_weights


def _loss_and_gradients(**fields):
  """Of a model with dropout, in training; the weights and the rngs are the same for all `fields`."""
  model, batch = tiny_model(dropout_rate=0.2, **fields), packed_batch()

  def loss(weights):
    logits = model.apply({'params': weights}, batch, train=True, rngs={'dropout': jax.random.key(0)})['logits']
    return jnp.mean(jnp.square(logits - 0.5))

  return jax.jit(jax.value_and_grad(loss))(random_weights(model))


@functools.cache
def _plain_loss_and_gradients():
  return _loss_and_gradients()


@pytest.mark.parametrize(
  'fields',
  [{'scan': False, 'remat_policy': 'full'}, {'remat_policy': 'attention_offloaded'}]
  + [  # what each of them keeps is told by the jaxpr, below
    pytest.param({'remat_policy': name}, marks=pytest.mark.exhaustive)
    for name in REMAT_POLICIES
    if name not in ('none', 'attention_offloaded')
  ],
  ids=str,
)
def test_neither_unrolling_nor_remat_changes_loss_or_gradients(fields):
  assert_close(_loss_and_gradients(**fields), _plain_loss_and_gradients(), atol=1e-5)


def test_a_parallel_block_with_factors_of_its_sublayers(rng):
  x = rng.normal(size=(1, 5, 12)).astype(np.float32)
  positions = np.arange(5)[None]
  attention, ffn, norm = Attention(num_heads=3), GatedFeedForward(hidden_dim=9), RmsNorm()
  block = TransformerBlock(attention=attention, ffn=ffn, norm=norm, parallel=True, residual_multiplier=0.3)
  weights = random_weights(block, x, None, positions)
  assert weights.keys() == {'attention', 'attention_norm', 'ffn'}

  @jax.jit
  def both(weights):
    normed = norm.apply({'params': weights['attention_norm']}, x)
    attended = attention.apply({'params': weights['attention']}, normed, None, positions)
    hidden, _ = ffn.apply({'params': weights['ffn']}, normed)
    return block.apply({'params': weights}, x, None, positions)[0], x + 0.3 * (attended + hidden)

  actual, expected = both(weights)
  np.testing.assert_allclose(actual, expected, atol=1e-5)
  with pytest.raises(ValueError, match='parallel=True needs pre_norm=True'):
    block.clone(pre_norm=False)

  def scaled(scale):
    y, _ = block.clone(output_scale=True).apply({'params': {**weights, 'output_scale': scale}}, x, None, positions)
    return jnp.sum(y), y

  of_scale, y = jax.jit(jax.grad(scaled, has_aux=True))(np.full(1, 0.7, np.float32))
  np.testing.assert_allclose(y, 0.7 * actual, atol=1e-5)
  assert not of_scale


def test_remat_policies_keep_less_and_less():
  """Bytes of the device, then of the host, that the forward pass hands to the backward pass, by policy in order."""
  weights, batch = random_weights(tiny_model()), packed_batch()

  def saved_bytes(policy):
    model = tiny_model(remat_policy=policy)
    pullback = jax.make_jaxpr(lambda w: jax.vjp(lambda w: model.apply({'params': w}, batch)['logits'], w)[1])(weights)
    sizes = {True: 0, False: 0}
    for aval in pullback.out_avals:
      sizes[aval.memory_space == jax.memory.Space.Host] += aval.size * aval.dtype.itemsize
    return sizes[False], sizes[True]

  sizes = [saved_bytes(policy) for policy in REMAT_POLICIES]
  assert sizes == sorted(sizes, reverse=True)
  assert len(set(sizes)) == len(sizes) - 1  # 'dots' and 'dots_no_batch' differ in experts, which this model lacks


def test_what_generates_on_a_gpu_has_its_layers_one_after_another(monkeypatch):
  monkeypatch.setattr('spmd_tasks.layers.transformer.current_platform', lambda: 'gpu')
  model = tiny_model(num_layers=3)
  weights = jax.eval_shape(model.init, jax.random.key(0), packed_batch())['params']

  def at_a_time(cache):
    with layer_scope(cache=cache):
      step = jax.make_jaxpr(lambda w: model.apply({'params': w}, packed_batch(), mutable=[NEW_CACHE]))(weights)
    return set(re.findall(r'unroll=(\d+)', str(step)))

  assert (at_a_time(KvCache()), at_a_time(None)) == ({'3'}, {'1'})


def test_every_layer_starts_from_its_own_values():
  weights = unbox_weights(jax.jit(tiny_model(num_layers=3).init)(jax.random.key(0), packed_batch())['params'])
  kernels = weights['stack']['layers']['ffn']['up']['kernel']
  assert len(np.unique(np.asarray(kernels[:, 0, 0]))) == 3
  np.testing.assert_allclose(kernels.std(axis=(1, 2)), 30**-0.5, rtol=0.1)  # fan-in does not count the layers


class InputSum(Statistics):
  """The sum of the tokens' elements, in a vector of one."""

  total: jax.Array

  def values(self):
    return {'mean': self.total[0] / self.num_tokens, 'vector': self.total}


class Constant(nn.Module):
  """A feed-forward sublayer that adds a constant, of which dropout makes its mask, and reports its input."""

  value: float = 1.0

  @nn.compact
  def __call__(self, x, segment_ids=None, *, train=False):
    total = jnp.sum(x)[None]
    return jnp.full_like(x, self.value), {'input': InputSum(num_tokens=jnp.float32(x[..., 0].size), total=total)}


class Silent(nn.Module):
  """A feed-forward sublayer that adds nothing and reports nothing."""

  @nn.compact
  def __call__(self, x, segment_ids=None, *, train=False):
    return jnp.zeros_like(x), {}


class Zeros(nn.Module):
  """An attention sublayer that adds nothing."""

  @nn.compact
  def __call__(self, x, segment_ids, segment_pos, *, train=False):
    return jnp.zeros_like(x)


def _dropout_stack(num_layers, rate=0.5):
  block = TransformerBlock(attention=Zeros(), ffn=Constant(), norm=RmsNorm(), dropout_rate=rate)
  return TransformerStack(block=block, num_layers=num_layers)


def test_dropout_differs_by_layer_and_by_rng():
  x = jnp.zeros((2, 3, 8))
  weights = _dropout_stack(2).init(jax.random.key(0), x)

  def masks(num_layers, seed):
    """The sum of the layers' masks, each 0 or 2."""
    stack = _dropout_stack(num_layers)
    variables = jax.tree.map(lambda w: w[:num_layers], weights)
    apply = jax.jit(functools.partial(stack.apply, train=True))
    return np.asarray(apply(variables, x, rngs={'dropout': jax.random.key(seed)})[0])

  assert set(np.unique(masks(1, 0))) == {0.0, 2.0}
  assert 2.0 in masks(2, 0)  # two equal masks would give 0 and 4 only
  assert not np.array_equal(masks(1, 0), masks(1, 1))
  np.testing.assert_array_equal(masks(2, 0), masks(2, 0))


def test_a_block_group_is_its_blocks_in_sequence():
  x = jax.random.normal(jax.random.key(1), (2, 3, 8))
  block = TransformerBlock(attention=Zeros(), ffn=Constant(), norm=RmsNorm())
  values = [1.0, -3.0]
  group = BlockGroup(blocks=tuple(block.clone(ffn=Constant(value=value)) for value in values))
  (y, aux), _ = TransformerStack(block=group, num_layers=2).init_with_output(jax.random.key(0), x)
  np.testing.assert_allclose(y, x + 2 * sum(values), rtol=1e-5)

  inputs = np.asarray(x) + np.cumsum([0.0, 1.0, -3.0, 1.0]).reshape(4, 1, 1, 1)  # of the four layers, in order
  normed = inputs / np.sqrt(np.mean(inputs**2, axis=-1, keepdims=True))
  np.testing.assert_allclose(aux['mean'], normed.sum(axis=(1, 2, 3)) / 6, rtol=1e-3)


def test_a_sequence_of_stacks_is_its_layers_in_order():
  """A stack of three layers is one of two and one of one, and reports what they report."""
  model = tiny_model(num_layers=3)
  weights, batch = random_weights(model), packed_batch()
  parts = tuple(model.stack.clone(num_layers=n) for n in (2, 1))
  layers = weights['stack']['layers']
  split = {
    'stack_0': {'layers': jax.tree.map(lambda w: w[:2], layers)},
    'stack_1': {'layers': jax.tree.map(lambda w: w[2:], layers)},
  }
  expected = jax.jit(model.apply)({'params': weights}, batch)['logits']
  sequence = model.clone(stack=StackSequence(stacks=parts))
  actual = jax.jit(sequence.apply)({'params': weights | {'stack': split}}, batch)['logits']
  np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)

  x = jnp.zeros((2, 3, 8))
  silent = TransformerStack(block=TransformerBlock(attention=Zeros(), ffn=Silent(), norm=RmsNorm()), num_layers=2)
  sequence = StackSequence(stacks=(_dropout_stack(1), silent, _dropout_stack(2)))
  (_, aux), _ = sequence.init_with_output(jax.random.key(0), x)
  np.testing.assert_allclose(aux['mean'], [0.0, 8.0, 8.0], atol=1e-3)
  assert aux['vector'].shape == (3, 1)


@pytest.mark.parametrize('name', [name for name in REMAT_POLICIES if name != 'none'])
def test_every_policy_keeps_decisions_and_computes_elementwise_results_again(name):
  def layer(x):
    choice = checkpoint_name(jnp.argmax(jnp.sin(x), axis=1), ROUTING_NAME)
    return jnp.sum(jnp.exp(x) * (choice[:, None] == jnp.arange(4)[None, :]))

  _, pullback = jax.vjp(jax.checkpoint(layer, policy=remat_policy(name)), jnp.ones((3, 4)))
  saved = sorted((value.shape, value.dtype.name) for value in jax.tree.leaves(pullback))
  assert saved == [((3,), 'int32'), ((3, 4), 'float32')]
