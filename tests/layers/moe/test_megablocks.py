"""Our layers against MegaBlocks' real ones: outputs, losses and gradients, which `scripts/run_megablocks.py` computed.

`OWN` are the 37 cases of MegaBlocks' own layer tests, `CORNERS` a few more of its settings. Sizes change
the numbers and nothing else: every run has the largest and the longest of OWN.
"""

import jax
import jax.numpy as jnp
from megablocks_cases import BALANCE_WEIGHT, CASES, CORNERS, HIDDEN, OWN, Z_WEIGHT, digest, draw
import numpy as np
import pytest

from spmd_tasks.layers import FeedForward
from spmd_tasks.layers.moe import CapacityGather, Dropless, Experts, MixtureOfExperts, TopKRouter


@pytest.fixture(scope='module')
def expected(request):
  with np.load(request.config.rootpath / 'tests/data/moe/megablocks.npz') as arrays:
    return dict(arrays)


def make_layer(case):
  """Returns our layer, in which MegaBlocks' capacity is written out."""
  batch, length, _, num_experts, top_k = case.sizes
  settings = dict(case.settings)
  capacity = CapacityGather(
    capacity_factor=settings.get('moe_capacity_factor', 1),
    capacity_counts_choices=True,
    capacity_rounding='down',
    min_capacity=0,
    group_size=batch * length,
    priority='token',
  )
  is_shared, is_routed = settings.get('shared_expert', False), case.kind in ('moe', 'dmoe')
  return MixtureOfExperts(
    router=TopKRouter(
      num_experts=num_experts, num_selected=top_k, normalize_gates=settings.get('moe_normalize_expert_weights')
    ),
    experts=Experts(num_experts=num_experts, hidden_dim=HIDDEN, gated=case.is_gated, activation='gelu'),
    computation=Dropless() if 'dmoe' in (case.kind + case.layer) else capacity,
    shared_expert=FeedForward(hidden_dim=HIDDEN, use_bias=True) if is_shared else None,
    averages_shared_expert=settings.get('shared_expert_weighted_sum', False),
    use_bias=is_routed,
    load_balance_divide_by_k=True,
  )


def as_weights(parts, case):
  """Returns our weights for MegaBlocks' arrays."""
  w1, v1 = (parts[name].swapaxes(1, 2) for name in ('w1', 'v1'))
  experts = {'gate': w1, 'up': v1} if case.is_gated else {'up': w1}
  weights = {'router': {'kernel': parts['router'].T}, 'experts': experts | {'down': parts['w2']}}
  if case.kind in ('moe', 'dmoe'):
    weights['bias'] = parts['bias']
  if dict(case.settings).get('shared_expert'):
    weights['shared_expert'] = {
      name: {'kernel': parts[name].T, 'bias': parts[f'{name}_bias']} for name in ('up', 'down')
    }
  return weights


def test_the_cases_are_those_of_megablocks():
  assert len(OWN) == 37
  assert CASES.keys() >= ALWAYS


ALWAYS = {name for name in CORNERS if not name.endswith(('factor=0', 'shared_expert=True'))}


@pytest.mark.parametrize(
  'name', [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in ALWAYS)) for name in CASES]
)
def test_equals_megablocks(name, expected):
  case, arrays = CASES[name], draw(name)
  layer, cotangent = make_layer(case), arrays.pop('cotangent')

  def loss(parts):
    y, aux = layer.apply({'params': as_weights(parts, case)}, parts['x'], train=True)
    values = aux['routing'].values()
    losses = jnp.stack([BALANCE_WEIGHT * values['load_balance_loss'], Z_WEIGHT * values['router_z_loss']])
    return jnp.sum(y * cotangent) + (jnp.sum(losses) if case.kind in ('moe', 'dmoe') else 0), (y, losses)

  gradients, (y, losses) = jax.jit(jax.grad(loss, has_aux=True))(arrays)
  np.testing.assert_allclose(y, expected[f'{name}/y'], rtol=1e-5, atol=1e-5)
  if f'{name}/losses' in expected:
    np.testing.assert_allclose(losses, expected[f'{name}/losses'], rtol=1e-5)
  found = {part.removeprefix(f'{name}/d_'): value for part, value in expected.items() if part.startswith(f'{name}/d_')}
  assert {'x', 'w1', 'w2'} <= found.keys()
  for part, value in found.items():
    norm = max(value[0], 1e-3)
    np.testing.assert_allclose(digest(gradients[part]) / norm, value / norm, atol=2e-5, err_msg=part)
