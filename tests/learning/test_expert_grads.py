"""expert_grad_scale multiplies experts' gradients, for parity with T5X."""

import jax.numpy as jnp
from jax.sharding import AbstractMesh
import numpy as np
import optax
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.layers.losses import LossOutput
from spmd_tasks.learning import Learner
from spmd_tasks.learning.accumulation import accumulate_gradients
from spmd_tasks.learning.expert_weights import scale_expert_grads
from spmd_tasks.sharding import WeightSpec
from spmd_tasks.sharding.specs import sharding_scope

SPECS = {
  'expert': WeightSpec(shape=(10, 2), init=None, split_dims=('expert', None), tags=('expert',)),
  'stacked': WeightSpec(
    shape=(3, 10, 2), init=None, split_dims=('layers', 'expert', 'embed'), tags=('expert',), stacked=1
  ),
  'dense': WeightSpec(shape=(10, 2), init=None),
}
GRADS = {name: jnp.ones(spec.shape) for name, spec in SPECS.items()}


MESH = AbstractMesh((2, 5, 1), ('data', 'expert', 'mdl'))
RULES = (('layers', None), ('embed', 'data'))


@pytest.mark.parametrize('scale, factor', [(1.0, 1), (0.5, 0.5), ('t5x', 5)])
def test_only_experts_are_scaled(scale, factor):
  """'t5x' is the number of expert partitions, 5."""
  with sharding_scope(MESH, RULES):
    scaled = scale_expert_grads(GRADS, SPECS, scale)
  np.testing.assert_array_equal(scaled['expert'], np.full((10, 2), factor))
  np.testing.assert_array_equal(scaled['stacked'], np.full((3, 10, 2), factor))
  assert scaled['dense'] is GRADS['dense']


def test_t5x_parity():
  """T5X's own case: two steps with gradients 0 + 1 and 2 + 3 give 10 * 6 with 10 expert partitions, and 6 otherwise."""
  specs = {name: SPECS[name] for name in ('expert', 'dense')}
  learner = Learner(optimizer=optax.sgd(1.0), num_microbatches=2, accumulation='sum', expert_grad_scale=10)

  def loss_fn(weights, batch, rng):
    loss = batch['i'][0] * sum(jnp.sum(w) for w in weights.values())
    return loss, LossOutput(loss=loss, weight=jnp.float32(1), metrics={}, per_example={})

  weights = {name: jnp.zeros(spec.shape) for name, spec in specs.items()}
  state = learner.init(weights, specs)
  for step, i in enumerate([[0.0, 1.0], [2.0, 3.0]]):
    output, grads = accumulate_gradients(loss_fn, weights, {'i': jnp.array(i)}, None, 2, learner.accumulation)
    weights, state, _ = learner.update(grads, output.loss, jnp.int32(step), state, weights, specs)
  np.testing.assert_array_equal(weights['expert'], np.full((10, 2), -60))
  np.testing.assert_array_equal(weights['dense'], np.full((10, 2), -6))


@pytest.mark.parametrize('scale', [0, 'T5X'])
def test_impossible_scales_are_refused(scale):
  with pytest.raises(UserError, match=r'expert_grad_scale .*larger than 0'):
    Learner(optimizer=optax.sgd(1.0), expert_grad_scale=scale)
