"""Gradients of experts are those of the global mean loss, and need no factor; five ways to take them on 4 devices.

T5X multiplies gradients of experts by their number "to account for implicit averaging". Under `jit` there is none, nor
where a gradient is taken outside of `shard_map`. Two of the ways to take it inside are wrong, each by its own factor.
"""

import functools

from dropless_reference import mesh_and_rules
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from spmd_tasks.layers import Linear
from spmd_tasks.layers.moe import Dropless, Experts, MixtureOfExperts, TopKRouter
from spmd_tasks.sharding import sharding_scope, unbox_weights

X, B, T, D, F = 4, 8, 3, 4, 6  # X devices, with an expert each


class DenseThenExperts(nn.Module):
  """A dense layer, a router and experts."""

  dispatch: str

  @nn.compact
  def __call__(self, x):
    x = Linear(output_dims=D, split_dims=(None, None), activation_split_dims=('batch', 'seq', None), name='dense')(x)
    y, _ = MixtureOfExperts(
      router=TopKRouter(num_experts=X, num_selected=2, split_dims=(None, None)),
      experts=Experts(num_experts=X, hidden_dim=F),
      computation=Dropless(dispatch=self.dispatch),
      name='moe',
    )(jnp.tanh(x))
    return y


@pytest.mark.parametrize('dispatch', ['ring', 'padded_all_to_all'])
def test_our_layers_under_jit(dispatch, rng):
  """One program, of the global mean loss. Every gradient is that of one device: the ratio is 1."""
  mesh, rules = mesh_and_rules({'expert': X}, {'batch': 'expert'})
  rules = (*rules, ('act_mlp', None))
  model = DenseThenExperts(dispatch=dispatch)
  x = rng.normal(size=(B, T, D)).astype(np.float32)
  weights = unbox_weights(jax.jit(model.init)(jax.random.key(0), x))

  def mean_loss(weights):
    return jnp.mean(model.apply(weights, x) ** 2)

  def mean_loss_in_scope(weights):
    with sharding_scope(mesh, rules):
      return mean_loss(weights)

  expected = jax.jit(jax.grad(mean_loss))(weights)
  actual = jax.jit(jax.grad(mean_loss_in_scope))(weights)
  assert len(jax.tree.leaves(expected)) == 5  # dense, router, up, gate and down
  for (path, wanted), gradient in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(actual), strict=True):
    assert np.max(np.abs(wanted)) > 1e-4, path
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-7, err_msg=jax.tree_util.keystr(path))


# The other ways, by hand: every token meets every expert, through an all-to-all there and one back.
def local_loss(weights, x, meet_experts):
  """The mean loss of tokens x [n, D]; meet_experts(h [n, D], expert weights) -> [X, n, D]."""
  h = jnp.tanh(x @ weights['dense'])
  gates = jax.nn.softmax(h @ weights['router'])
  return jnp.mean(jnp.sum(gates.T[:, :, None] * meet_experts(h, weights['expert']), axis=0) ** 2)


def meet_experts_by_all_to_all(h, expert):
  """On one device of X, which holds one expert."""
  sent = jnp.broadcast_to(h[None], (X, *h.shape))
  arrived = jax.lax.all_to_all(sent, 'expert', 0, 0)
  return jax.lax.all_to_all(jnp.tanh(jnp.einsum('xnd,df->xnf', arrived, expert[0])), 'expert', 0, 0)


def meet_experts_on_one_device(h, expert):
  return jnp.tanh(jnp.einsum('nd,xdf->xnf', h, expert))


def mean_of_local_loss(weights, x):
  return jax.lax.pmean(local_loss(weights, x, meet_experts_by_all_to_all), 'expert')


WEIGHT_SPECS = {'dense': P(), 'router': P(), 'expert': P('expert')}


def outside_of_shard_map(mesh, weights, x):
  loss = jax.shard_map(mean_of_local_loss, mesh=mesh, in_specs=(WEIGHT_SPECS, P('expert')), out_specs=P())
  return jax.grad(loss)(weights, x)


def inside_of_shard_map(gradient, mesh, weights, x, *, check_vma=True):
  return jax.shard_map(
    gradient, mesh=mesh, in_specs=(WEIGHT_SPECS, P('expert')), out_specs=WEIGHT_SPECS, check_vma=check_vma
  )(weights, x)


def inside_of_the_local_loss(mesh, weights, x):
  gradient = jax.grad(functools.partial(local_loss, meet_experts=meet_experts_by_all_to_all))
  return inside_of_shard_map(gradient, mesh, weights, x)


def inside_of_the_mean_loss(mesh, weights, x):
  return inside_of_shard_map(jax.grad(mean_of_local_loss), mesh, weights, x)


def inside_with_a_mean_of_the_replicated(mesh, weights, x):
  """What Horovod-style code does: no tracking of what varies, and an average over devices of all but the experts."""

  def gradient(weights, x):
    gradients = jax.grad(functools.partial(local_loss, meet_experts=meet_experts_by_all_to_all))(weights, x)
    return {name: g if name == 'expert' else jax.lax.pmean(g, 'expert') for name, g in gradients.items()}

  return inside_of_shard_map(gradient, mesh, weights, x, check_vma=False)


@pytest.mark.parametrize(
  'take_gradient, ratios',
  [
    (outside_of_shard_map, {'dense': 1, 'router': 1, 'expert': 1}),
    (inside_of_the_local_loss, {'dense': X, 'router': X, 'expert': X}),
    (inside_of_the_mean_loss, {'dense': 1, 'router': 1, 'expert': 1}),
    (inside_with_a_mean_of_the_replicated, {'dense': 1, 'router': 1, 'expert': X}),
  ],
  ids=lambda value: getattr(value, '__name__', ''),
)
def test_ratio_to_the_true_gradient(take_gradient, ratios, rng):
  """The true gradient is that of the global mean loss on one device."""
  mesh, _ = mesh_and_rules({'expert': X}, {})
  shapes = {'dense': (D, D), 'router': (D, X), 'expert': (X, D, D)}
  weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
  x = rng.normal(size=(B * T, D)).astype(np.float32)
  true = jax.grad(functools.partial(local_loss, meet_experts=meet_experts_on_one_device))(weights, x)
  gradients = jax.jit(functools.partial(take_gradient, mesh))(weights, x)
  for name, ratio in ratios.items():
    np.testing.assert_allclose(gradients[name], ratio * true[name], rtol=1e-4, atol=1e-7, err_msg=name)
