"""Experts' gradients need no factor: the table of what each way of taking them gives, and T5X's factor for parity.

Shapes: N tokens (n of one device), D model, E experts, one on each of 4 devices; L layers.
"""

import functools

from flax import struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from spmd_tasks.config import resolve
from spmd_tasks.learning import Learner, Sgd, accumulate_gradients
from spmd_tasks.learning.expert_weights import scale_expert_grads
from spmd_tasks.sharding import WeightSpec

N, D, E = 16, 3, 4
SPLIT = {'dense': P(), 'router': P(), 'expert': P('expert')}


def one_expert_per_token(weights, x):
  """Hidden x [n, D], its gates [n], and x in the place of its expert, zeros in the others': [E, n, D]."""
  hidden = jnp.tanh(x @ weights['dense'])
  probabilities = jax.nn.softmax(hidden @ weights['router'])
  chosen = jnp.argmax(probabilities, axis=-1)
  is_chosen = (jnp.arange(E)[:, None] == chosen[None, :]).astype(x.dtype)
  return jnp.max(probabilities, axis=-1), is_chosen[..., None] * hidden[None]


def mean_loss(outputs, gates):
  """From the experts' outputs [E, n, D]: the mean over tokens."""
  return jnp.mean(jnp.sum(jnp.square(gates[:, None] * jnp.sum(outputs, axis=0)), axis=-1))


def global_loss(weights, x):
  """On whole arrays."""
  gates, dispatched = one_expert_per_token(weights, x)
  return mean_loss(jnp.einsum('end,edf->enf', dispatched, weights['expert']), gates)


def device_loss(weights, x):
  """On one device's tokens and expert, with tokens exchanged both ways; inside shard_map."""
  gates, dispatched = one_expert_per_token(weights, x)
  exchange = functools.partial(jax.lax.all_to_all, axis_name='expert', split_axis=0, concat_axis=0)
  return mean_loss(exchange(exchange(dispatched) @ weights['expert'][0]), gates)


def mean_over_devices(loss):
  return lambda weights, x: jax.lax.pmean(loss(weights, x), 'expert')


def replicated_grads_averaged(weights, x):
  grads = jax.grad(device_loss)(weights, x)
  return {name: g if name == 'expert' else jax.lax.pmean(g, 'expert') for name, g in grads.items()}


@pytest.fixture(scope='module')
def mesh():
  return Mesh(np.array(jax.devices()[:E]), ('expert',))


@pytest.mark.parametrize(
  'grads_of, expected',
  [
    pytest.param(lambda on_devices: jax.grad(global_loss), (1, 1, 1), id='jit, global mean'),
    pytest.param(
      lambda on_devices: jax.grad(on_devices(mean_over_devices(device_loss), out_specs=P())),
      (1, 1, 1),
      id='shard_map returns pmean, grad outside',
    ),
    pytest.param(
      lambda on_devices: on_devices(jax.grad(device_loss), out_specs=SPLIT), (4, 4, 4), id='grad inside, local mean'
    ),
    pytest.param(
      lambda on_devices: on_devices(jax.grad(mean_over_devices(device_loss)), out_specs=SPLIT),
      (1, 1, 1),
      id='grad inside, pmean',
    ),
    pytest.param(
      lambda on_devices: on_devices(replicated_grads_averaged, out_specs=SPLIT, check_vma=False),
      (1, 1, 4),
      id='grad inside, unchecked, replicated grads averaged',
    ),
  ],
)
def test_how_often_each_way_counts_the_gradient(grads_of, expected, mesh, rng):
  """Ratios of dense, router and expert gradients to those of the global mean loss, in that order."""
  shapes = {'dense': (D, D), 'router': (D, E), 'expert': (E, D, D)}
  weights = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
  x = jnp.asarray(rng.normal(size=(N, D)), jnp.float32)
  true = jax.grad(global_loss)(weights, x)
  on_devices = functools.partial(jax.shard_map, mesh=mesh, in_specs=(SPLIT, P('expert')))
  shardings = {name: NamedSharding(mesh, spec) for name, spec in SPLIT.items()}
  grads = jax.jit(grads_of(on_devices), in_shardings=(shardings, NamedSharding(mesh, P('expert'))))(weights, x)
  for name, ratio in zip(('dense', 'router', 'expert'), expected):
    np.testing.assert_allclose(grads[name], ratio * true[name], rtol=1e-4, atol=1e-6, err_msg=name)


SPECS = {
  'expert': WeightSpec(shape=(10, 2), init=None, tags=('expert',)),
  'stacked': WeightSpec(shape=(3, 10, 2), init=None, tags=('expert',), stacked=1),
  'dense': WeightSpec(shape=(10, 2), init=None),
}
GRADS = {name: jnp.ones(spec.shape) for name, spec in SPECS.items()}


@pytest.mark.parametrize('scale, factor', [(1.0, 1), (0.5, 0.5), ('t5x', 10)])
def test_only_experts_are_scaled(scale, factor):
  scaled = scale_expert_grads(GRADS, SPECS, scale)
  np.testing.assert_array_equal(scaled['expert'], np.full((10, 2), factor))
  np.testing.assert_array_equal(scaled['stacked'], np.full((3, 10, 2), factor))
  assert scaled['dense'] is GRADS['dense']


def test_the_scale_comes_before_norm_and_clipping():
  weights = jax.tree.map(jnp.zeros_like, GRADS)
  norms = []
  for scale in (1.0, 2.0):
    learner = Learner(optimizer=Sgd(learning_rate=1.0), clip_global_norm=1.0, expert_grad_scale=scale)
    new, _, metrics = learner.update(GRADS, jnp.float32(1), jnp.int32(0), learner.init(weights, SPECS), weights, SPECS)
    norms.append(float(metrics['grad_norm']))
    np.testing.assert_allclose(metrics['weight_norm'], 1.0, rtol=1e-6)
    np.testing.assert_allclose(new['expert'], scale * np.asarray(new['dense']), rtol=1e-6)
  np.testing.assert_allclose(norms, np.sqrt([100, 4 * 80 + 20]), rtol=1e-6)


class LossOutput(struct.PyTreeNode):
  loss: jax.Array
  weight: jax.Array
  metrics: dict
  per_example: dict
  updated_variables: dict = struct.field(default_factory=dict)


def test_t5x_parity():
  """T5X's case: 10 experts, two steps on gradients {0, 1} and {2, 3} added up: 10 * 6 for experts, 6 for the rest."""
  specs = {name: SPECS[name] for name in ('expert', 'dense')}
  learner = Learner(optimizer=Sgd(learning_rate=1.0), num_microbatches=2, accumulation='sum', expert_grad_scale='t5x')

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


@pytest.mark.parametrize('scale', [0, -1.0, float('nan'), 'T5X', None])
def test_impossible_scales_are_refused(scale):
  with pytest.raises(ValueError, match='must be a number larger than 0'):
    Learner(optimizer=Sgd(learning_rate=1.0), expert_grad_scale=scale)


@pytest.mark.parametrize('text, scale', [('t5x', 't5x'), ('0.5', 0.5)])
def test_it_is_set_from_the_command_line(text, scale):
  job = resolve('lm.StdlibTiny', [f'task.learner.expert_grad_scale={text}']).build()
  assert job.task.learner.expert_grad_scale == scale
