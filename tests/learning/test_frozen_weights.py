"""Frozen weights: they have no gradient, no state and no decay, and stay as they are, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.learning import Adafactor, AdamW, Learner
from spmd_tasks.learning.trained_weights import mark_frozen
from spmd_tasks.sharding import WeightSpec


def specs_of(weights):
  return jax.tree.map(lambda w: WeightSpec(shape=w.shape, init=None, split_dims=(None,) * w.ndim), weights)


@pytest.mark.parametrize(
  'optimizer',
  [AdamW(learning_rate=0.1, weight_decay=0.1), Adafactor(learning_rate=0.1)],
  ids=lambda each: type(each).__name__,
)
def test_what_is_trained_is_trained_as_if_it_were_alone(optimizer):
  weights = {'a': {'kernel': jnp.ones((2, 3)), 'lora_a': jnp.full((2, 1), 2.0)}, 'b': jnp.ones((4,))}
  specs = mark_frozen(specs_of(weights), ('lora_', '^b$'))
  assert specs['a']['kernel'].tags == ('frozen',)
  alone = {'a': {'lora_a': weights['a']['lora_a']}, 'b': weights['b']}
  learner = Learner(optimizer=optimizer, clip_global_norm=1.0, ema_decay=0.9)
  grads = {'a': {'kernel': None, 'lora_a': jnp.full((2, 1), 3.0)}, 'b': jnp.ones((4,))}
  state, other = learner.init(weights, specs), learner.init(alone, specs_of(alone))

  def step(grads, state, weights, specs):
    update = lambda grads, state, weights: learner.update(grads, jnp.float32(1), jnp.int32(0), state, weights, specs)
    return jax.jit(update)(grads, state, weights)

  new, state, metrics = step(grads, state, weights, specs)
  alone_grads = {'a': {'lora_a': grads['a']['lora_a']}, 'b': grads['b']}
  expected, other, others = step(alone_grads, other, alone, specs_of(alone))
  np.testing.assert_array_equal(new['a']['kernel'], weights['a']['kernel'])
  np.testing.assert_array_equal(new['a']['lora_a'], expected['a']['lora_a'])
  jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state), jax.tree.leaves(other))
  jax.tree.map(np.testing.assert_array_equal, metrics, others)
  shapes = jax.eval_shape(lambda: learner.init(weights, specs))
  split = learner.state_split_dims(shapes, specs)
  assert len(jax.tree.leaves(split)) == len(jax.tree.leaves(state))
