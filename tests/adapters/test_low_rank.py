"""Low-rank adapters of Linears and experts compute the published formulas, start as their base, and can be merged."""

import functools

from flax import traverse_util
import flax.linen as nn
import jax
import numpy as np
import pytest

from spmd_tasks.adapters import LowRankAdapter
from spmd_tasks.adapters.adapted_weights import AdapterNames, adaptable_weights, adapters_of, without_adapters
from spmd_tasks.adapters.low_rank import merge_low_rank
from spmd_tasks.decoding.kv_cache import KvCache
from spmd_tasks.layers import GatedFeedForward, Linear, TokenEmbedding
from spmd_tasks.layers.attention import Attention, LatentAttention
from spmd_tasks.layers.base import layer_scope
from spmd_tasks.layers.moe import Experts
from spmd_tasks.sharding.weights import unbox_weights

X = np.random.default_rng(0).normal(size=(2, 5, 3, 4)).astype(np.float32)
KINDS = {
  'lora': LowRankAdapter(rank=2, alpha=6.0),
  'rslora': LowRankAdapter(rank=2, alpha=6.0, use_rslora=True),
  'dora': LowRankAdapter(rank=2, alpha=6.0, use_dora=True),
}


def random_weights(module, *inputs, seed=1):
  """Returns random weights of a module, none of them zero."""
  shapes = unbox_weights(jax.eval_shape(module.init, jax.random.key(0), *inputs)['params'])
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda leaf: (rng.normal(size=leaf.shape) * 0.3).astype(leaf.dtype), shapes)


def apply(module, weights, *inputs, **settings):
  with jax.default_matmul_precision('highest'):
    return np.asarray(jax.jit(functools.partial(module.apply, **settings))({'params': weights}, *inputs))


@pytest.mark.parametrize('kind', KINDS)
def test_a_linear_and_its_merged_kernel_compute_the_published_formula(kind):
  adapter = KINDS[kind]
  linear = Linear(output_dims=(2, 7), num_input_dims=2, use_bias=True, split_dims=None, product=adapter)
  weights = random_weights(linear, X)
  kernel, a, b = (np.asarray(weights[name], np.float64) for name in ('kernel', 'lora_a', 'lora_b'))
  adapted = kernel + (6 / np.sqrt(2) if kind == 'rslora' else 6 / 2) * np.tensordot(a, b, 1)
  if kind == 'dora':
    adapted *= weights['lora_magnitude'] / np.sqrt((adapted**2).sum((0, 1)))
  expected = np.tensordot(X, adapted, 2) + weights['bias']
  np.testing.assert_allclose(apply(linear, weights, X), expected, rtol=1e-5, atol=1e-5)
  merged = merge_low_rank(
    adapter, weights['kernel'], weights['lora_a'], weights['lora_b'], weights.get('lora_magnitude')
  )
  np.testing.assert_allclose(merged, adapted, rtol=1e-5, atol=1e-6)
  plain = Linear(output_dims=(2, 7), num_input_dims=2, use_bias=True, split_dims=None)
  y = apply(plain, {'kernel': merged, 'bias': weights['bias']}, X)
  np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_a_new_adapter_changes_no_bit_and_is_initialized_as_in_peft():
  plain, adapted = (Linear(output_dims=64, split_dims=None, product=adapter) for adapter in (None, KINDS['lora']))
  x = X.reshape(10, 12)
  y, before = plain.init_with_output(jax.random.key(0), x)
  z, after = adapted.init_with_output(jax.random.key(0), x)
  np.testing.assert_array_equal(y, z)
  a = unbox_weights(after['params'])['lora_a']
  assert a.shape == (12, 2)
  assert 0.5 * 12**-0.5 < np.abs(a).max() <= 12**-0.5  # uniform; 24 draws
  assert not np.any(unbox_weights(after['params'])['lora_b'])
  np.testing.assert_array_equal(*(unbox_weights(variables['params'])['kernel'] for variables in (before, after)))


def test_dropout_applies_to_the_adapter_s_input_in_training_only():
  linear = Linear(output_dims=4, split_dims=None, product=LowRankAdapter(rank=12, alpha=12.0, dropout_rate=0.5))
  x = np.ones((1000, 12), np.float32)
  weights = {'kernel': np.zeros((12, 4)), 'lora_a': np.eye(12), 'lora_b': np.full((12, 4), 1 / 12)}
  np.testing.assert_allclose(apply(linear, weights, x), 1.0, rtol=1e-6)
  y = apply(linear, weights, x, rngs={'dropout': jax.random.key(1)})
  assert len(np.unique(y.round(4))) > 5
  assert abs(y.mean() - 1) < 0.05


@pytest.mark.parametrize('use_dora', [False, True])
def test_the_logits_can_have_an_adapter_if_the_embedding_is_not_tied(use_dora):
  adapter = LowRankAdapter(rank=2, alpha=2.0, use_dora=use_dora, names=('softmax_kernel',))
  embedding = TokenEmbedding(vocab_size=9, embed_dim=12, tied=False, adapters=(adapter,))
  x = X.reshape(2, 5, 12)

  class Logits(nn.Module):
    @nn.compact
    def __call__(self, x):
      return embedding.copy(name='embedding').attend(x)

  weights = random_weights(Logits(), x)
  names = [f'softmax_kernel{part}' for part in ('', '_lora_a', '_lora_b', '_lora_magnitude')]
  parts = [weights['embedding'].get(name) for name in names]
  kernel = merge_low_rank(adapter, *parts)
  np.testing.assert_allclose(apply(Logits(), weights, x), x @ np.asarray(kernel), rtol=1e-4, atol=1e-5)
  assert not adaptable_weights(TokenEmbedding(vocab_size=9, embed_dim=12))


class OfWidth12(Experts):
  """Experts that can be called without an argument."""

  @nn.compact
  def __call__(self, model_dim=12):
    return super().__call__(model_dim)


@pytest.mark.parametrize('use_dora', [False, True])
def test_experts_with_dropout_and_dora_agree_with_float64(use_dora):
  """Compares adapted kernels and gradients. DoRA's norms have no gradient; all tokens share a dropout mask."""
  adapter = LowRankAdapter(rank=2, alpha=6.0, dropout_rate=0.25, use_dora=use_dora, names=('up', 'gate', 'down'))
  experts = OfWidth12(num_experts=3, hidden_dim=5, adapters=(adapter,))
  weights = random_weights(experts)
  cotangent = np.random.default_rng(2).normal(size=(3, 12, 5))

  def up(weights, **settings):
    return experts.apply({'params': weights}, **settings).up

  exact = {name: np.asarray(weights[f'up{name}'], np.float64) for name in ('', '_lora_a', '_lora_b')}
  kernel, a, b = exact.values()
  adapted = kernel + 3 * a @ b
  norms = np.linalg.norm(adapted, axis=1, keepdims=True)
  magnitude = np.asarray(weights['up_lora_magnitude'])[:, None] if use_dora else norms
  with jax.default_matmul_precision('highest'):
    np.testing.assert_allclose(up(weights), adapted * magnitude / norms, rtol=1e-5, atol=1e-5)
    gradients = jax.jit(jax.grad(lambda weights: jax.numpy.sum(up(weights) * cotangent)))(weights)
    with_dropout = np.asarray(jax.jit(functools.partial(up, rngs={'dropout': jax.random.key(3)}))(weights))
  product_cotangent = cotangent * magnitude / norms
  assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  assert_close(gradients['up_lora_a'], 3 * product_cotangent @ b.swapaxes(1, 2))
  assert_close(gradients['up_lora_b'], 3 * a.swapaxes(1, 2) @ product_cotangent)
  if use_dora:
    assert_close(gradients['up_lora_magnitude'], (cotangent * adapted / norms).sum(1))
  factor = (with_dropout * norms / magnitude - kernel) / (adapted - kernel)  # of each input: 0 or 4 / 3
  mask = factor.mean(-1, keepdims=True).round(3) > 0
  assert_close(factor, np.broadcast_to(np.where(mask, 4 / 3, 0), factor.shape), rtol=1e-2, atol=1e-2)
  assert 0.5 < mask.mean() < 0.95


@pytest.mark.parametrize(
  'layer, inputs',
  [
    (Attention(num_heads=3, adapters=()), ()),
    (LatentAttention(num_heads=2, kv_rank=4, nope_head_dim=2, rope_head_dim=2, value_head_dim=3), ()),
    (LatentAttention(num_heads=2, query_rank=4, kv_rank=4, nope_head_dim=2, rope_head_dim=2, value_head_dim=3), ()),
    (GatedFeedForward(hidden_dim=5), ()),
  ],
)
def test_a_layer_adapts_all_its_adaptable_projections(layer, inputs):
  """Each name is a weight of the layer, and gets A and B."""
  adaptable = adaptable_weights(layer)
  plain = layer.clone(adapters=())
  projections = tuple(projection for _, projection in adaptable.values())
  layer = layer.clone(adapters=(LowRankAdapter(rank=2, alpha=2.0, names=projections),))
  assert without_adapters(layer) == plain != layer
  assert adapters_of(layer).keys() == adaptable.keys()
  x, ids = np.ones((1, 4, 12), np.float32), np.zeros((1, 4), np.int32)
  shapes = jax.eval_shape(layer.init, jax.random.key(0), x, ids, *([] if 'Feed' in type(layer).__name__ else [ids]))
  flat = traverse_util.flatten_dict(shapes['params'], sep='/')
  for name in adaptable:
    names = AdapterNames(kernel=name)
    kernel, a, b = flat[name], flat[names.a], flat[names.b]
    assert a.value.shape[-1] == b.value.shape[0] == 2
    assert a.split_dims[:-1] + b.split_dims[1:] == kernel.split_dims


def test_an_adapter_of_latent_attention_s_up_projection_agrees_with_its_merged_kernel_also_in_generation():
  settings = {'num_heads': 2, 'kv_rank': 4, 'nope_head_dim': 2, 'rope_head_dim': 2, 'value_head_dim': 3}
  adapter = LowRankAdapter(rank=2, alpha=6.0, use_dora=True, names=('kv_up',))
  plain, adapted = (LatentAttention(**settings, adapters=adapters) for adapters in ((), (adapter,)))
  x, positions = jax.numpy.asarray(X.reshape(2, 5, 12)), np.tile(np.arange(5, dtype=np.int32), (2, 1))
  inputs = (x, np.ones_like(positions), positions)
  weights = random_weights(adapted, *inputs)
  parts = [weights[f'kv_up{part}'] for part in ('', '_lora_a', '_lora_b', '_lora_magnitude')]
  merged = {name: leaf for name, leaf in weights.items() if 'lora' not in name} | {
    'kv_up': merge_low_rank(adapter, *parts)
  }
  with jax.default_matmul_precision('highest'):
    expected = np.asarray(jax.jit(plain.apply)({'params': merged}, *inputs))
  first, rest = (tuple(x[:, part] for x in inputs) for part in (slice(3), slice(3, None)))
  with jax.default_matmul_precision('highest'), layer_scope(cache=KvCache()):
    generate = jax.jit(functools.partial(adapted.apply, mutable='new_cache'))
    prefix, variables = generate({'params': weights}, *first)
    continuation, _ = generate({'params': weights, 'cache': unbox_weights(variables['new_cache'])}, *rest)
  np.testing.assert_allclose(prefix, expected[:, :3], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(continuation, expected[:, 3:], rtol=1e-5, atol=1e-5)
