"""Our layer against Flaxformer's real MoeLayer: outputs, losses, use of the slots and gradients.

`scripts/run_flaxformer.py` computed them. Its groups follow from the number of tokens and of devices, 8.
"""

from flaxformer_cases import AUX_WEIGHT, CASES, EXPERTS, HIDDEN, Z_WEIGHT, draw, setting
import jax
import jax.numpy as jnp
from megablocks_cases import digest
import numpy as np
import pytest

from spmd_tasks.layers.moe import (
  CapacityGather,
  DerivedGroupSize,
  ExpertChoiceRouter,
  Experts,
  MixtureOfExperts,
  TopKRouter,
)


@pytest.fixture(scope='module')
def expected(request):
  with np.load(request.config.rootpath / 'tests/data/moe/flaxformer.npz') as arrays:
    return dict(arrays)


def make_layer(name):
  num_replicas = max(1, 8 // (setting(name, 'expert_partitions') * 2))
  groups = DerivedGroupSize(max_size=setting(name, 'max_group_size'), num_groups_multiple_of=EXPERTS * num_replicas)
  capacity = {'capacity_factor': 1.25, 'eval_capacity_factor': 0.7, 'min_capacity': 2, 'group_size': groups}
  if CASES[name][2] == 'experts':
    router = ExpertChoiceRouter(num_experts=EXPERTS, **capacity)
  else:
    router = TopKRouter(num_experts=EXPERTS, num_selected=setting(name, 'k'))
  return MixtureOfExperts(
    router=router,
    experts=Experts(num_experts=EXPERTS, hidden_dim=HIDDEN, activation='gelu'),
    computation=CapacityGather(**capacity, priority='score' if setting(name, 'by_score') else 'position'),
    padding='counted' if setting(name, 'ignores_padding') else 'routed',
    load_balance_shards='groups',
  )


# What others have too.
SIMPLE = (
  *('top-2', 'top-2 by priority', 'top-2 by scatter', 'top-2, padding ignored', 'experts choose'),
  *('top-2, groups of 2 replicas', 'top-2, groups within rows'),
)


@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in SIMPLE)) for name in CASES]
)
def test_equals_flaxformer(name, expected):
  layer, arrays = make_layer(name), draw(name)
  expected = {part.removeprefix(f'{name}/'): value for part, value in expected.items() if part.startswith(f'{name}/')}
  cotangent, segment_ids = arrays.pop('cotangent'), jnp.asarray(np.any(arrays['x'] != 0, axis=-1), jnp.int32)
  train = setting(name, 'train')

  def loss(parts):
    experts = {'gate': parts['wi_0'], 'up': parts['wi_1'], 'down': parts['wo']}
    params = {'router': {'kernel': parts['router']}, 'experts': experts}
    # What padding holds does not matter.
    x = jnp.where(segment_ids[..., None] == 0, 3.0, parts['x'])
    y, aux = layer.apply({'params': params}, x, segment_ids, train=train)
    y, values = jnp.where(segment_ids[..., None] == 0, 0.0, y), aux['routing'].values()
    total = jnp.sum(y * cotangent) + AUX_WEIGHT * values['load_balance_loss'] + Z_WEIGHT * values['router_z_loss']
    return total, (y, values)

  gradients, (y, values) = jax.jit(jax.grad(loss, has_aux=True))(arrays)
  is_real = segment_ids[..., None] != 0
  np.testing.assert_allclose(y, jnp.where(is_real, expected['y'], 0), rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(values['router_z_loss'], expected['router_z_loss'], rtol=1e-5)
  np.testing.assert_allclose(values['load_balance_loss'], expected['auxiliary_loss'], rtol=1e-5)
  if CASES[name][2] != 'experts':
    np.testing.assert_allclose(values['expert_usage'], expected['expert_usage'], rtol=1e-5)
  for part in ('router', 'wi_0', 'wi_1', 'wo'):
    value = expected[f'd_{part}']
    np.testing.assert_allclose(digest(gradients[part]) / value[0], value / value[0], atol=2e-5, err_msg=part)
