import flax.linen as nn
import jax
import numpy as np

from spmd_tasks.layers.linear import Linear
from spmd_tasks.layers.sublayers import WithSublayers


class Pair(WithSublayers):
  first: nn.Module
  second: nn.Module | None = None

  def __call__(self, x):
    x = self.first(x)
    return x if self.second is None else self.second(x)


def _weights(module):
  return jax.tree.map(np.asarray, nn.unbox(module.init(jax.random.key(0), np.ones((1, 3), np.float32))['params']))


def test_one_template_in_two_places_has_two_sets_of_weights():
  linear = Linear(output_dims=3)
  weights = _weights(Pair(first=linear, second=linear))
  assert set(weights) == {'first', 'second'}
  assert not np.array_equal(weights['first']['kernel'], weights['second']['kernel'])


def test_one_template_at_two_depths_has_two_sets_of_weights():
  linear = Linear(output_dims=3)
  weights = _weights(Pair(first=Pair(first=linear), second=linear))
  assert not np.array_equal(weights['first']['first']['kernel'], weights['second']['kernel'])


def test_the_template_itself_stays_unbound():
  linear = Linear(output_dims=3)
  _weights(Pair(first=linear))
  assert linear.parent is None
  assert linear.scope is None


def test_absent_sublayers_are_allowed():
  assert set(_weights(Pair(first=Linear(output_dims=3)))) == {'first'}
