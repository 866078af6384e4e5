"""Under any optax transformation that is not refused, a stack learns exactly as its layers would, one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spmd_tasks.learning import FromOptax, Learner
from spmd_tasks.learning.layer_weights import layer_matrix
from spmd_tasks.sharding import WeightSpec

L, D, F, H, K, E = 2, 6, 5, 3, 2, 3
SPECS = {
  'up': WeightSpec(shape=(L, D, F), init=None, stacked=1, num_input_dims=1),
  'query': WeightSpec(shape=(L, D, H, K), init=None, stacked=1, num_input_dims=1),
  'experts': WeightSpec(shape=(L, E, F, D), init=None, stacked=1, num_input_dims=1, tags=('expert',)),
  'norms': WeightSpec(shape=(L, D), init=None, stacked=1, tags=('no_decay',)),
  'table': WeightSpec(shape=(7, D), init=None, num_input_dims=0),
}


def of_layers(function):
  """A tree with what the function returns for each layer and expert of each weight: function(name, index, shape)."""
  return {
    name: {
      str(index): function(name, index, layer_matrix(spec))
      for index in np.ndindex(*spec.shape[: spec.num_separate_dims])
    }
    for name, spec in SPECS.items()
  }


def cut(tree):
  return of_layers(lambda name, index, shape: tree[name][index].reshape(shape))


def draw(rng):
  size = lambda spec: 10.0 ** rng.integers(-2, 3, size=spec.shape[:1]).reshape(-1, *[1] * (len(spec.shape) - 1))
  return {name: jnp.asarray(rng.normal(size=s.shape) * size(s), jnp.float32) for name, s in SPECS.items()}


def trained(optimizer, specs, weights, all_grads):
  learner = Learner(optimizer=optimizer)
  state = learner.init(weights, specs)
  learner.state_split_dims(jax.eval_shape(lambda: state), specs)
  update = jax.jit(lambda g, i, state, w: learner.update(g, jnp.float32(1.5), i, state, w, specs)[:2])
  for i, grads in enumerate(all_grads):
    weights, state = update(grads, jnp.int32(i), state, weights)
  return weights


def chain(*parts):
  return lambda learning_rate: optax.chain(*parts, optax.scale_by_learning_rate(learning_rate))


def several_dims(weights):
  return jax.tree.map(lambda w: w.ndim > 1, weights)


CLIP = optax.clip_by_global_norm(1.0)
SMALL = {'min_dim_size_to_factor': 3}
CASES = [  # fast ones first
  ('trust ratios of layers', optax.lamb, {}),
  ('matrices of layers, joined heads', optax.contrib.muon, {}),
  ('a mask by the number of dims', lambda learning_rate: optax.adamw(learning_rate, mask=several_dims), {}),
  ('a norm over all weights', chain(CLIP, optax.scale_by_adam()), {}),
  ('factored moments and rms of layers', optax.adafactor, SMALL),
]
SLOW = [
  (
    'several steps in one',
    lambda learning_rate: optax.MultiSteps(optax.adam(learning_rate), 2).gradient_transformation(),
    {},
  ),
]
EXHAUSTIVE = [  # these read what one of those above reads
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
  + [pytest.param(*case, id=name, marks=pytest.mark.slow) for name, *case in SLOW]
  + [pytest.param(*case, id=name, marks=pytest.mark.exhaustive) for name, *case in EXHAUSTIVE],
)
def test_a_stack_learns_as_its_layers(factory, arguments, rng):
  optimizer = FromOptax(factory=factory, learning_rate=0.01, arguments=arguments)
  start, grads = draw(rng), [draw(rng) for _ in range(2)]
  got = cut(trained(optimizer, SPECS, start, grads))
  specs = of_layers(lambda name, index, shape: WeightSpec(shape=shape, init=None, tags=SPECS[name].tags[1:]))
  expected = trained(optimizer, specs, cut(start), [cut(g) for g in grads])
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(
  'factory',
  [chain(CLIP, optax.scale_by_trust_ratio()), chain(CLIP, optax.add_decayed_weights(0.1, several_dims))],
  ids=['clipping before trust ratios', 'clipping beside a mask by the number of dims'],
)
def test_what_reads_layers_and_all_weights_is_refused(factory):
  learner = Learner(optimizer=FromOptax(factory=factory, learning_rate=0.1))
  with pytest.raises(ValueError, match=r'clip by learner\.clip_global_norm instead of in the chain'):
    jax.eval_shape(
      lambda w: learner.init(w, SPECS), {n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in SPECS.items()}
    )
