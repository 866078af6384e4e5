"""Any optax transformation updates a stack exactly as it would update single layers."""

import re

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.learning import FromOptax, Learner
from spmd_tasks.learning.layer_weights import layer_matrix
from spmd_tasks.learning.layerwise import layerwise
from spmd_tasks.sharding import WeightSpec

L, D, F, H, K, E = 2, 6, 5, 3, 2, 2
SPECS = {
  'up': WeightSpec(shape=(L, D, F), init=None, stacked=1, num_input_dims=1),
  'query': WeightSpec(shape=(L, D, H, K), init=None, stacked=1, num_input_dims=1),
  'experts': WeightSpec(shape=(L, E, F, D), init=None, stacked=1, num_input_dims=1, tags=('expert',)),
  'norms': WeightSpec(shape=(L, D), init=None, stacked=1, tags=('no_decay',)),
  'table': WeightSpec(shape=(7, D), init=None, num_input_dims=0),
}


def map_layers(function):
  """Maps function(name, index, shape) over the layers and experts of all weights."""
  return {
    name: {
      str(index): function(name, index, layer_matrix(spec))
      for index in np.ndindex(*spec.shape[: spec.num_separate_dims])
    }
    for name, spec in SPECS.items()
  }


def unstack(tree):
  return map_layers(lambda name, index, shape: tree[name][index].reshape(shape))


def random_tree(rng):
  size = lambda spec: 10.0 ** rng.integers(-2, 3, size=spec.shape[:1]).reshape(-1, *[1] * (len(spec.shape) - 1))
  return {name: jnp.asarray(rng.normal(size=s.shape) * size(s), jnp.float32) for name, s in SPECS.items()}


def trained(optimizer, specs, weights, all_grads):
  learner = Learner(optimizer=optimizer)
  state = jax.jit(lambda weights: learner.init(weights, specs))(weights)
  learner.state_split_dims(jax.eval_shape(lambda: state), specs)
  update = jax.jit(lambda g, i, state, w: learner.update(g, jnp.float32(1.5), i, state, w, specs)[:2])
  for i, grads in enumerate(all_grads):
    weights, state = update(grads, jnp.int32(i), state, weights)
  return weights


def chain(*parts):
  return lambda learning_rate: optax.chain(*parts, optax.scale_by_learning_rate(learning_rate))


def several_dims(weights):
  return jax.tree.map(lambda w: w.ndim > 1, weights)


def in_group(transformation, group, by_path=False):
  """Applies the transformation to a group of weights, and plain gradients to the others."""

  def by_name(tree):
    return {name: 'group' if name in group else 'rest' for name in tree}

  def by_whole_path(tree):
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator='/')
    label = lambda path, _: 'group' if re.fullmatch(f'({"|".join(group)})(/.*,.*)?', name(path)) else 'rest'
    return jax.tree_util.tree_map_with_path(label, tree)

  return optax.multi_transform(
    {'group': transformation, 'rest': optax.identity()}, by_whole_path if by_path else by_name
  )


def scale_by_norms(tree):
  """A user's own transformation, by the mean and the largest norm of all weights."""
  norms = jnp.stack([jnp.linalg.norm(x) for x in jax.tree.leaves(tree)])
  return jax.tree.map(lambda x: x * jnp.mean(norms) / jnp.max(norms), tree)


CLIP = optax.clip_by_global_norm(1.0)
SMALL = {'min_dim_size_to_factor': 3}
CASES = [  # fast ones first
  ('trust ratios of layers', optax.lamb, {}),
  ('matrices of layers, joined heads', optax.contrib.muon, {}),
  ('factored moments and rms of layers', optax.adafactor, SMALL),
  ('a norm over a group of one stack', chain(in_group(CLIP, ['query'])), {}),
  ('a norm over all weights before trust ratios', chain(CLIP, optax.scale_by_trust_ratio()), {}),
  ('a norm over all weights and a mask', chain(CLIP, optax.add_decayed_weights(0.1, several_dims)), {}),
  ('a function of all norms', chain(optax.stateless(lambda updates, _: scale_by_norms(updates))), {}),
]
EXHAUSTIVE = [
  (  # as in test_evaluation_weights.py
    'MultiSteps',
    lambda learning_rate: optax.MultiSteps(optax.adam(learning_rate), 2).gradient_transformation(),
    {},
  ),
  ('finite gradients of a group', chain(in_group(optax.apply_if_finite(optax.adam(1.0), 2), ['experts'])), {}),
  ('a group by paths', chain(in_group(optax.chain(CLIP, optax.scale_by_adam()), ['up', 'norms'], by_path=True)), {}),
  ('a group of a group', chain(in_group(in_group(optax.contrib.normalize(), ['up']), ['up', 'table'])), {}),
  ('rms of blocks in a group', chain(in_group(optax.chain(CLIP, optax.clip_by_block_rms(0.1)), ['experts'])), {}),
  ('a mask by the number of dims', lambda learning_rate: optax.adamw(learning_rate, mask=several_dims), {}),
  ('a norm over all weights', chain(CLIP, optax.scale_by_adam()), {}),
  # these read the same quantities as transformations above
  ('a vector of all weights', optax.lbfgs, {'linesearch': None}),
  ('norms of units', chain(optax.adaptive_grad_clip(0.1)), {}),
  ('norms of layers', optax.novograd, {}),
  ('a norm of layers with momentum', optax.lars, {}),
  ('sums of products over all weights', optax.contrib.prodigy, {}),
  ('the loss over a norm', chain(optax.polyak_sgd(1.0)), {}),
  ('singular vectors', optax.contrib.galore, {}),
]


@pytest.mark.parametrize(
  'factory, arguments',
  [pytest.param(*case, id=name) for name, *case in CASES]
  + [pytest.param(*case, id=name, marks=pytest.mark.exhaustive) for name, *case in EXHAUSTIVE],
)
def test_a_stack_is_updated_like_its_layers(factory, arguments, rng):
  optimizer = FromOptax(factory=factory, learning_rate=0.01, arguments=arguments)
  start, grads = random_tree(rng), [random_tree(rng) for _ in range(2)]
  got = unstack(trained(optimizer, SPECS, start, grads))
  specs = map_layers(lambda name, index, shape: WeightSpec(shape=shape, init=None, tags=SPECS[name].tags[1:]))
  expected = trained(optimizer, specs, unstack(start), [unstack(g) for g in grads])
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_a_group_of_one_stack_has_one_norm():
  """With gradients of norm 1, 10 and 100 in three layers, the step of all three has norm 1."""
  specs = {'kernel': WeightSpec(shape=(3, 2, 2), init=None, stacked=1, num_input_dims=1)}
  sizes = jnp.array([1.0, 10.0, 100.0])
  grads = {'kernel': jnp.broadcast_to(sizes[:, None, None] / 2, (3, 2, 2))}
  start = {'kernel': jnp.zeros((3, 2, 2))}
  for transformation in (CLIP, optax.masked(CLIP, {'kernel': True}), in_group(CLIP, ['kernel'])):
    new = trained(optax.chain(transformation, optax.sgd(1.0)), specs, start, [grads])
    norms = jnp.linalg.norm(new['kernel'], axis=(1, 2))
    np.testing.assert_allclose(norms, np.array([1, 10, 100]) / np.sqrt(10101), rtol=1e-5)


def test_operations_are_on_whole_stacks():
  """20 layers add to 2 layers only three scalar operations per layer, for the norm."""
  clipped = optax.chain(CLIP, optax.adamw(0.1, mask=several_dims))
  count = {}
  for num_layers in (2, 20):
    specs = {'kernel': WeightSpec(shape=(num_layers, 4, 2, 3), init=None, stacked=1, num_input_dims=1)}
    weights = {'kernel': jax.ShapeDtypeStruct((num_layers, 4, 2, 3), jnp.float32)}
    init, update = layerwise(clipped.init, clipped.update, specs, 'adamw')
    state = jax.eval_shape(init, weights)
    assert state[1][0].mu['kernel'].shape == (num_layers, 4, 2, 3)
    operations = jax.make_jaxpr(update)(weights, state, weights).jaxpr.eqns
    count[num_layers] = sum(len(x.outvars[0].aval.shape) > 1 for x in operations), len(operations)
  assert count[2][0] == count[20][0]
  assert count[20][1] - count[2][1] == 18 * 3  # slice, reshape, add


@pytest.mark.parametrize(
  'label',
  [
    lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == 'bias', tree),
    lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: [x.key for x in path] == ['a', 'bias'], tree),
    lambda tree: flax.traverse_util.path_aware_map(lambda path, w: path[-1] == 'bias' and w.ndim == 1, tree),
    lambda tree: {'a': {'bias': True, 'kernel': False}},
    {'a': {'bias': True, 'kernel': False}},
  ],
  ids=['last key', 'all keys', 'flax', 'dict', 'tree'],
)
def test_masks_find_weights_of_stacks(label):
  """A mask by key paths or by a tree applies to all layers of a weight."""
  specs = {
    'a': {
      'bias': WeightSpec(shape=(2, 3), init=None, stacked=1, tags=('no_decay',)),
      'kernel': WeightSpec(shape=(2, 3, 3), init=None, stacked=1, num_input_dims=1),
    }
  }
  ones = jax.tree.map(lambda spec: jnp.ones(spec.shape), specs)
  optimizer = optax.chain(optax.apply_if_finite(optax.masked(CLIP, label), 3), optax.sgd(1.0))
  new = trained(optimizer, specs, jax.tree.map(jnp.zeros_like, ones), [ones])
  np.testing.assert_allclose(new['a']['bias'], -np.ones((2, 3)) / np.sqrt(6), rtol=1e-5)
  np.testing.assert_array_equal(new['a']['kernel'], -ones['a']['kernel'])


def test_paths_and_dicts_at_once_are_refused():
  by_path = lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == 'query', tree)
  optimizer = optax.chain(optax.masked(CLIP, by_path), in_group(CLIP, ['up']))
  with pytest.raises(UserError, match=r'key paths and by a tree of dicts .*tree_map_with_path'):
    Learner(optimizer=optimizer).init({name: jnp.zeros(spec.shape) for name, spec in SPECS.items()}, SPECS)
