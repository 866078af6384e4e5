"""Token-choice routers against a float64 reference that goes token by token, and their search for the best experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.layers.moe import TopKRouter, load_balance_loss, router_z_loss
from spmd_tasks.layers.moe._balance import attach_balance_gradient, routing_statistics, routing_sums
from spmd_tasks.layers.moe._router import top_k_ids
from spmd_tasks.sharding import MeshSpec
from spmd_tasks.sharding.specs import sharding_scope

B, T, D, E = 4, 6, 5, 7
RULES = (('batch', 'data'), ('seq', None), ('embed', 'data'))

CASES = {
  'switch': {'num_selected': 1},
  'mixtral': {'num_selected': 2, 'normalize_gates': 1.0},
  'euclidean': {'num_selected': 3, 'normalize_gates': 2.0},
  'deepseek': {
    'num_selected': 3,
    'score_function': 'sigmoid',
    'normalize_gates': 1.0,
    'gate_scale': 2.5,
    'balance_bias': True,
  },
  'gpt-oss': {'num_selected': 2, 'normalize_gates': 1.0, 'use_bias': True},
  'phi': {'num_selected': 2, 'gate_margin': 0.6},
  'sigmoid': {'num_selected': 1, 'score_function': 'sigmoid'},
  'all experts': {'num_selected': E, 'normalize_gates': 1.0, 'balance_bias': True},
}
# Of 12 experts; without groups other ones are chosen.
CASES |= {
  'DeepSeek-V2': {'num_selected': 3, 'num_groups': 4, 'num_selected_groups': 2},
  'DeepSeek-V3': CASES['deepseek'] | {'num_groups': 4, 'num_selected_groups': 2, 'group_score': 'top2_sum'},
  'V3 without a bias': {'num_selected': 4, 'num_groups': 2, 'num_selected_groups': 1, 'group_score': 'top2_sum'},
}


def draw(rng, num_experts=E):
  weights = {
    'kernel': rng.normal(size=(D, num_experts)).astype(np.float32),
    'balance_bias': rng.normal(size=num_experts).astype(np.float32),
    'bias': rng.normal(size=num_experts).astype(np.float32),
  }
  return rng.normal(size=(B, T, D)).astype(np.float32), weights, rng.random((B, T)) < 0.7


def reference(
  x,
  weights,
  mask,
  *,
  num_selected,
  score_function='softmax',
  normalize_gates=None,
  gate_scale=1.0,
  balance_bias=False,
  use_bias=False,
  num_groups=1,
  num_selected_groups=1,
  group_score='max',
  gate_margin=None,
  expert_ids=None,
):
  """The decision in float64. `expert_ids` fixes the choice, as differences of this function need."""
  logits = x.astype(np.float64) @ weights['kernel'].astype(np.float64)
  logits += weights['bias'] if use_bias else 0
  scores, gates = np.zeros_like(logits), np.zeros((*mask.shape, num_selected))
  ids = np.full(gates.shape, logits.shape[-1])
  for b, t in np.ndindex(*mask.shape):
    exps = np.exp(logits[b, t])
    affinities = exps / exps.sum() if score_function == 'softmax' else exps / (1 + exps)
    scores[b, t] = affinities / affinities.sum()
    if mask[b, t]:
      preferences = affinities + (weights['balance_bias'] if balance_bias else 0)
      groups = np.split(np.arange(len(preferences)), num_groups)
      best = [np.sort(preferences[group])[::-1][: 1 if group_score == 'max' else 2].sum() for group in groups]
      for group in np.argsort(-np.array(best))[num_selected_groups:]:
        preferences[groups[group]] = -np.inf
      chosen = np.argsort(-preferences, kind='stable')[:num_selected] if expert_ids is None else expert_ids[b, t]
      ids[b, t], gates[b, t] = chosen, affinities[chosen]
      others = [*range(len(preferences))]
      for j, expert in enumerate(chosen if gate_margin is not None else ()):
        top, z = logits[b, t, expert], logits[b, t, others]
        close = z[(top - z) / np.maximum(np.abs(z), top) <= gate_margin]
        gates[b, t, j] = np.exp(top) / np.exp(close).sum()
        others.remove(expert)
      if normalize_gates is not None:
        gates[b, t] /= (gates[b, t] ** normalize_gates).sum() ** (1 / normalize_gates)
  return {'logits': logits, 'scores': scores, 'expert_ids': ids, 'gates': gate_scale * gates}


def route(x, weights, mask, *, router=TopKRouter, train=False, num_experts=E, **settings):
  names = (
    ['kernel'] + ['balance_bias'] * settings.get('balance_bias', False) + ['bias'] * settings.get('use_bias', False)
  )
  weights = {name: weights[name] for name in names}
  apply = jax.jit(router(num_experts=num_experts, **settings).apply, static_argnames='train')
  return apply({'params': weights}, x, mask, train=train, rngs={'dropout': jax.random.key(1)})


@pytest.mark.parametrize('settings', CASES.values(), ids=CASES)
def test_is_the_reference(settings, rng):
  num_experts = 12 if 'num_groups' in settings else E
  x, weights, mask = draw(rng, num_experts)
  expected = reference(x, weights, mask, **settings)
  routing = route(x, weights, mask, num_experts=num_experts, **settings)
  for name, value in expected.items():
    actual = getattr(routing, name)
    assert actual.dtype == ('int32' if name == 'expert_ids' else 'float32')
    np.testing.assert_allclose(actual, value, rtol=1e-5, atol=1e-6, err_msg=name)
  np.testing.assert_array_equal(routing.token_mask, mask)


@pytest.mark.parametrize('settings', [CASES[name] for name in ('euclidean', 'deepseek')])
def test_gradient_of_the_gates_is_the_references(settings, rng):
  x, weights, mask = draw(rng)
  direction, cotangent = rng.normal(size=(D, E)), rng.normal(size=(B, T, settings['num_selected']))
  ids = reference(x, weights, mask, **settings)['expert_ids']

  def moved(step):
    kernel = weights['kernel'].astype(np.float64) + step * direction
    gates = reference(x, weights | {'kernel': kernel}, mask, expert_ids=ids, **settings)['gates']
    return (gates * cotangent).sum()

  grad = jax.grad(lambda w: jnp.sum(route(x, w, mask, **settings).gates * cotangent))(weights)
  expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
  np.testing.assert_allclose(np.vdot(grad['kernel'], direction), expected, rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(grad['balance_bias'], 0)


def test_bfloat16_inputs_are_routed_in_float32(rng):
  x, weights, mask = draw(rng)
  half = jnp.asarray(x, jnp.bfloat16)
  settings = CASES['deepseek']
  expected = reference(np.asarray(half, np.float32), weights, mask, **settings)
  routing = route(half, weights, mask, **settings)
  np.testing.assert_allclose(routing.logits, expected['logits'], rtol=1e-5, atol=1e-6)
  np.testing.assert_array_equal(routing.expert_ids, expected['expert_ids'])
  assert 'HIGHEST' in str(jax.make_jaxpr(lambda x: route(x, weights, mask, **settings).logits)(half))


@pytest.mark.parametrize('score_function', ['softmax', 'sigmoid'])
def test_logits_whose_scores_underflow_are_routed_by_their_order(score_function, rng):
  x, weights, mask = draw(rng)
  x[..., 0], weights['kernel'][0] = -1.0, 200.0  # in float32 every sigmoid of these logits is 0

  def loss(kernel):
    settings = {'num_selected': 2, 'score_function': score_function, 'normalize_gates': 1.0}
    routing = route(x, {'kernel': kernel}, mask, **settings)
    return jnp.sum(routing.gates * jnp.array([[[1.0, 2.0]]])) + jnp.sum(jnp.square(routing.scores)), routing

  (_, routing), grad = jax.value_and_grad(loss, has_aux=True)(weights['kernel'])
  order = np.argsort(-np.asarray(routing.logits), kind='stable')[..., :2]
  np.testing.assert_array_equal(routing.expert_ids, np.where(mask[..., None], order, E))
  np.testing.assert_allclose(routing.gates.sum(-1), mask, rtol=1e-5)
  np.testing.assert_allclose(routing.scores.sum(-1), 1.0, rtol=1e-5)
  assert np.isfinite(grad).all()


def test_jitter_scales_the_input_in_training_only(rng):
  _, weights, _ = draw(rng)
  x = np.zeros((B, T, D), np.float32)
  x[..., 0] = 1.0  # so that a token's logits are row 0 of the kernel times its jitter
  settings = {'num_selected': 1, 'jitter_eps': 0.25}
  plain, jittered = (route(x, weights, None, train=train, **settings).logits for train in (False, True))
  np.testing.assert_array_equal(plain, route(x, weights, None, num_selected=1).logits)
  factors = jittered / plain
  np.testing.assert_allclose(factors, np.broadcast_to(factors[..., :1], factors.shape), rtol=1e-5)
  assert 0.75 <= factors.min() < 0.85
  assert 1.15 < factors.max() <= 1.25


@pytest.mark.parametrize('settings', [CASES['deepseek']])
def test_same_on_8_devices_as_on_one(settings, rng):
  x, weights, mask = draw(rng)
  x, mask = (np.concatenate([v, v[::-1]]) for v in (x, mask))

  def loss(weights, x):
    routing = route(x, weights, mask, train=True, jitter_eps=0.1, **settings)
    sums = routing_sums(routing, num_shards=2)
    gates = attach_balance_gradient(routing.gates, routing.balance_bias, sums)
    total = jnp.sum(jnp.square(gates)) + load_balance_loss(sums) + router_z_loss(sums)
    return total, (routing, routing_statistics(sums))

  mesh = MeshSpec(axis_names=('data',), ici_mesh_shape=(8,)).build()

  def sharded_loss(weights, x):
    with sharding_scope(mesh, RULES):
      return loss(weights, x)

  expected = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(weights, x)
  x = jax.device_put(x, jax.NamedSharding(mesh, jax.P('data')))
  actual = jax.jit(jax.value_and_grad(sharded_loss, argnums=(0, 1), has_aux=True))(weights, x)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected)
  np.testing.assert_array_equal(actual[0][1][0].expert_ids, expected[0][1][0].expert_ids)


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'num_experts': 0, 'num_selected': 0}, 'num_selected=0 must be from 1 to num_experts=0'),
    ({'num_selected': E + 1}, f'num_selected={E + 1} must be from 1 to num_experts={E}'),
    ({'num_experts': 12, 'num_selected': 2, 'num_groups': 5}, 'num_groups=5 must divide num_experts=12'),
    (
      {'num_experts': 12, 'num_selected': 4, 'num_groups': 4, 'num_selected_groups': 1},
      'num_selected_groups=1 must be .* num_selected=4',
    ),
    ({'num_selected': 1, 'gate_margin': 0.1, 'normalize_gates': 1.0}, "gate_margin needs score_function='softmax'"),
    ({'num_selected': 1, 'score_function': 'relu'}, r"'relu' is unknown: choose one of \['sigmoid', 'softmax'\]"),
  ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    TopKRouter(**{'num_experts': E} | settings)


def test_top_k_shows_no_device_anothers_rows(rng):
  mesh = MeshSpec(axis_names=('replica', 'data', 'mdl'), ici_mesh_shape=(1, 8, 1)).build()

  @jax.jit
  def search(x):
    with sharding_scope(mesh, (('batch', ('replica', 'data')), ('seq', 'mdl'))):
      return top_k_ids(x, 3, ('batch', 'seq', None))

  x = jax.device_put(np.float32(rng.random((8, 6, 7))), jax.NamedSharding(mesh, jax.P('data')))
  hlo = search.lower(x).compile().as_text()
  assert not any(name in hlo for name in ('all-gather', 'all-to-all', 'collective-permute', 'all-reduce'))
