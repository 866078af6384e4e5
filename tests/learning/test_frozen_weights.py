"""Frozen weights have no gradient, state or decay, and do not change by a bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.learning import Adafactor, AdamW, Learner
from spmd_tasks.learning.frozen_weights import mark_frozen
from spmd_tasks.sharding import WeightSpec


def specs_of(weights):
  return jax.tree.map(lambda w: WeightSpec(shape=w.shape, init=None, split_dims=(None,) * w.ndim), weights)


@pytest.mark.parametrize(
  'optimizer',
  [AdamW(learning_rate=0.1, weight_decay=0.1), Adafactor(learning_rate=0.1)],
  ids=lambda optimizer: type(optimizer).__name__,
)
def test_trained_weights_are_updated_as_without_the_frozen_ones(optimizer):
  weights = {'a': {'kernel': jnp.ones((2, 3)), 'lora_a': jnp.full((2, 1), 2.0)}, 'b': jnp.ones((4,))}
  specs = mark_frozen(specs_of(weights), ('lora_', '^b$'))
  assert specs['a']['kernel'].tags == ('frozen',)
  trained = {'a': {'lora_a': weights['a']['lora_a']}, 'b': weights['b']}
  learner = Learner(optimizer=optimizer, clip_global_norm=1.0, ema_decay=0.9)
  grads = {'a': {'kernel': None, 'lora_a': jnp.full((2, 1), 3.0)}, 'b': jnp.ones((4,))}
  state, other = learner.init(weights, specs), learner.init(trained, specs_of(trained))

  def step(grads, state, weights, specs):
    update = lambda grads, state, weights: learner.update(grads, jnp.float32(1), jnp.int32(0), state, weights, specs)
    return jax.jit(update)(grads, state, weights)

  new, state, metrics = step(grads, state, weights, specs)
  trained_grads = {'a': {'lora_a': grads['a']['lora_a']}, 'b': grads['b']}
  expected, other, others = step(trained_grads, other, trained, specs_of(trained))
  np.testing.assert_array_equal(new['a']['kernel'], weights['a']['kernel'])
  np.testing.assert_array_equal(new['a']['lora_a'], expected['a']['lora_a'])
  jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state), jax.tree.leaves(other))
  jax.tree.map(np.testing.assert_array_equal, metrics, others)
  shapes = jax.eval_shape(lambda: learner.init(weights, specs))
  split = learner.state_split_dims(shapes, specs)
  assert len(jax.tree.leaves(split)) == len(jax.tree.leaves(state))
