"""MultiOptimizer updates each weight as its own optimizer would alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.learning import Adafactor, AdamW, Learner, MultiOptimizer, ProductOfFactors
from spmd_tasks.sharding import WeightSpec

SPECS = {
  'embedding': {'table': WeightSpec(shape=(6, 4), init=None, split_dims=('vocab', None))},
  'stack': {
    'norm': {'scale': WeightSpec(shape=(3, 4), init=None, stacked=1, tags=('no_decay',))},
    'up': {
      'kernel': WeightSpec(shape=(3, 4, 8), init=None, stacked=1, num_input_dims=1, split_dims=(None, None, 'mlp'))
    },
  },
}
ADAM = AdamW(learning_rate=ProductOfFactors(base=0.1, warmup_steps=2))
ADAFACTOR = Adafactor.as_t5x(learning_rate=0.1, min_dim_size_to_factor=2, momentum=0.9)


def train(optimizer, weights, grads):
  learner = Learner(optimizer=optimizer)
  state = learner.init(weights, SPECS)
  update = jax.jit(lambda grad, t, state, weights: learner.update(grad, jnp.float32(1), t, state, weights, SPECS)[:2])
  for t, grad in enumerate(grads):
    weights, state = update(grad, jnp.int32(t), state, weights)
  return weights, state


def test_each_weight_is_updated_by_its_optimizer(rng):
  def random_tree():
    return jax.tree.map(lambda spec: jnp.asarray(rng.normal(size=spec.shape), jnp.float32), SPECS)

  weights, grads = random_tree(), [random_tree() for _ in range(3)]
  both, state = train(
    MultiOptimizer(optimizers=(('stack/norm|embedding', ADAM), ('stack/', ADAFACTOR))), weights, grads
  )
  adam, adafactor = train(ADAM, weights, grads)[0], train(ADAFACTOR, weights, grads)[0]
  np.testing.assert_array_equal(both['embedding']['table'], adam['embedding']['table'])
  np.testing.assert_array_equal(both['stack']['norm']['scale'], adam['stack']['norm']['scale'])
  np.testing.assert_array_equal(both['stack']['up']['kernel'], adafactor['stack']['up']['kernel'])
  only, _ = train(MultiOptimizer(optimizers=(('stack/', ADAFACTOR),)), weights, grads)
  np.testing.assert_array_equal(only['embedding']['table'], weights['embedding']['table'])
  # Moments are split like their weights.
  learner = Learner(optimizer=MultiOptimizer(optimizers=(('stack/norm|embedding', ADAM), ('stack/', ADAFACTOR))))
  specs = learner.state_split_dims(jax.eval_shape(lambda: state), SPECS).opt_state
  assert specs[0][0].mu['embedding']['table'].split_dims == ('vocab', None)
  assert specs[1][0].v_col['stack']['up']['kernel'].split_dims == (None, 'mlp')


def test_patterns_that_match_no_weight_are_refused():
  with pytest.raises(UserError, match="'stak/', which matches no weight"):
    MultiOptimizer(optimizers=(('stak/', ADAM), ('', ADAFACTOR))).transformation(SPECS)
  with pytest.raises(UserError, match=r"'\('.*regular expression"):
    MultiOptimizer(optimizers=(('(', ADAM), ('', ADAFACTOR)))
  with pytest.raises(UserError, match='optimizers is empty'):
    MultiOptimizer(optimizers=())
