"""Praxis models in experiments of ours, against Praxis' own functions on one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from praxis import base_hyperparams, base_layer, layers, pax_fiddle, py_utils
import pytest

from spmd_tasks.bridges.pax import PraxisLayer, PraxisTask
from spmd_tasks.config import resolve
from spmd_tasks.decoding import DecodeSettings, DecodeSteps, Request, generate
from spmd_tasks.errors import UserError
from spmd_tasks.experiment import partition_job
from spmd_tasks.sharding.weights import unbox_weights
from tests.bridges.pax import own_experiments

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings('ignore')]  # Praxis', of what it will migrate one day


@pytest.fixture(autouse=True, scope='module')
def praxis_promotes_ranks():
  with jax.numpy_rank_promotion('allow'):
    yield


def make(experiment, mesh=None, *overrides):
  """The partitioned model, a state and a batch."""
  job = resolve(experiment, overrides).build()
  size = None if mesh is None else int(np.prod(mesh))
  spec = job.experiment.mesh_spec()
  model = partition_job(job, spec.build(jax.devices()[: size or int(np.prod(spec.ici_mesh_shape))]))
  return model, model.init(0), next(job.train_input.make_iterator())


def curve(model, state, batch, num_steps=3):
  losses = []
  for _ in range(num_steps):
    state, metrics = model.train_step(state, model.train_step.place(batch))
    losses.append(float(metrics['loss']))
  return losses, state


def praxis_loss(model, variables, batch, *, do_eval):
  """Loss and updated variables by Praxis alone, on one device and without a mesh."""
  inputs = py_utils.NestedMap(**batch, paddings=(batch['segment_ids'] == 0).astype(np.float32))
  with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=do_eval)):
    key = jax.random.PRNGKey(0)
    rngs = {'params': key, 'random': key, 'dropout': key}
    (metrics, _), updated = model.apply(variables, inputs, rngs=rngs, mutable=True)
  return metrics['total_loss'][0], updated


@pytest.fixture(scope='module')
def small_lm():
  return make(own_experiments.SmallLm)


def whole(tree):
  return jax.tree.map(lambda x: jnp.asarray(jax.device_get(x)), tree)


def test_the_loss_is_praxis_own(small_lm):
  model, state, batch = small_lm
  true = model.from_canonical(model.to_canonical(state)).variables  # not donated below
  variables = jax.tree.map(
    lambda x, like: x[tuple(map(slice, like.shape))], whole(true), model.abstract_state.variables
  )
  expected, _ = praxis_loss(model.task.model, variables, batch, do_eval=False)
  evaluated = model.eval_step(model.input_layout.spec)
  averages = evaluated(state.variables, evaluated.place(batch), jnp.int32(0))
  np.testing.assert_allclose(float(averages['loss'].compute()), expected, rtol=2e-6)
  losses, _ = curve(model, jax.tree.map(jnp.copy, state), batch, 1)
  np.testing.assert_allclose(losses[0], expected, rtol=2e-6)


@pytest.mark.parametrize('mesh', [pytest.param('1,1,1', marks=pytest.mark.exhaustive), '1,3,2'])
def test_one_curve_on_every_layout(small_lm, mesh):
  """1 x 3 x 2 pads the 20, 30 and 31 dims of the weights."""
  model, state, batch = small_lm
  sizes = tuple(map(int, mesh.split(',')))
  other, other_state, _ = make(own_experiments.SmallLm, sizes, f'ici_mesh_shape={mesh}')
  expected, _ = curve(model, jax.tree.map(jnp.copy, state), batch)
  np.testing.assert_allclose(curve(other, other_state, batch)[0], expected, rtol=2e-5)


@pytest.mark.exhaustive  # test_decode_pax.py has the tokens of Praxis' own decoding
def test_the_engine_generates_what_the_model_predicts(small_lm):
  """Greedy tokens by `decode_forward`, prompts of one chunk and of two; `predict` reads the whole texts at once."""
  model, state, _ = small_lm
  settings = DecodeSettings(max_len=12, num_slots=2, prefill_chunk=4, min_bucket=4)
  prompts = [(3,), (5, 7, 11, 2, 9), (8, 1)]
  requests = [Request(ids=prompt, max_tokens=6) for prompt in prompts]
  generated = generate(DecodeSteps(model, settings), state.variables, requests, decode=lambda ids: '')
  tokens = {number: tuple(completion.ids) for number, completion in generated}
  ids = np.zeros((len(prompts), 12), np.int32)
  for number, prompt in enumerate(prompts):
    ids[number, : len(prompt) + 6] = prompt + tokens[number]
  step = model.forward_step({'ids': jax.ShapeDtypeStruct(ids.shape, ids.dtype)})
  predicted = np.argmax(step(state.variables, step.place({'ids': ids})).logits, axis=-1)
  for number, prompt in enumerate(prompts):
    assert tuple(predicted[number, len(prompt) - 1 :][:6]) == tokens[number]


def test_split_dims_and_collections_are_those_of_praxis(small_lm):
  model, _, _ = small_lm
  layer = model.weight_specs['lm']['transformer']['x_layers_0']['ff_layer']
  assert layer['ffn_layer1']['linear']['w'].split_dims == ('data', 'mdl')
  assert layer['ffn_layer2']['linear']['w'].split_dims == ('mdl', 'data')
  assert 'no_decay' in layer['layer_norm']['scale'].tags


def test_bfloat16_is_cast_before_the_model_and_the_state_stays_float32():
  model, state, batch = make(own_experiments.SmallLm, None, 'fprop_dtype=bfloat16')
  losses, state = curve(model, state, batch, 1)
  assert {leaf.dtype for leaf in jax.tree.leaves(state.weights)} == {jnp.dtype('float32')}
  assert np.isfinite(losses).all()


def test_moving_averages_are_updated_in_training_and_used_in_eval():
  model, state, batch = make(own_experiments.Normed)
  before = whole(state.variables)
  _, updated = praxis_loss(model.task.model, before, batch, do_eval=False)
  _, state = curve(model, state, batch, 1)
  for name, value in updated[own_experiments.NON_TRAINABLE]['norm'].items():
    np.testing.assert_allclose(jax.device_get(state.non_trainable['non_trainable']['norm'][name]), value, rtol=1e-6)
    assert not np.array_equal(value, before['non_trainable']['norm'][name])
  expected, _ = praxis_loss(model.task.model, whole(state.variables), batch, do_eval=True)
  step = model.eval_step(model.input_layout.spec)
  np.testing.assert_allclose(
    float(step(state.variables, step.place(batch), jnp.int32(1))['loss'].compute()), expected, rtol=1e-6
  )


def test_a_model_that_draws_in_evaluation_draws_the_same_every_time():
  class Noisy(own_experiments.NormedModel):
    def compute_predictions(self, batch):
      return super().compute_predictions(batch) + jax.random.normal(self.next_prng_key(), ())

  job = resolve(own_experiments.Normed).build()
  batch = next(job.train_input.make_iterator())
  task = PraxisTask(model=pax_fiddle.Config(Noisy, name='noisy').Instantiate(), learner=job.task.learner)
  variables = unbox_weights(task.init_variables(jax.random.key(0), batch))
  first, second = (float(task.compute_loss(variables, batch, train=False).loss) for _ in range(2))
  assert first == second


def test_a_loss_that_the_model_does_not_return_is_refused(small_lm):
  model, _, batch = small_lm
  task = PraxisTask(model=model.task.model, learner=model.task.learner, loss_name='perplexity')
  compute_loss = functools.partial(task.compute_loss, train=False)
  with pytest.raises(UserError, match=r"returns no 'perplexity' to differentiate: set task\.loss_name to one of"):
    jax.eval_shape(compute_loss, model.abstract_state.variables, batch)


def test_a_praxis_layer_stands_in_a_stack_of_ours():
  """Scanned over the layers, and padded over mdl 3; a norm of width 20 is split by nothing."""
  model, state, batch = make(own_experiments.WithPraxisNorms)
  spec = model.weight_specs['stack']['layers']['ffn_norm']['layer']['scale']
  assert (spec.shape, spec.split_dims, spec.stacked) == ((2, 20), ('layers', None), 1)
  expected, _ = curve(model, state, batch)
  other, other_state, _ = make(own_experiments.WithPraxisNorms, (1, 1, 3), 'ici_mesh_shape=1,1,3')
  np.testing.assert_allclose(curve(other, other_state, batch)[0], expected, rtol=2e-5)


def test_a_praxis_layer_computes_what_praxis_computes(rng):
  config = pax_fiddle.Config(layers.BatchNorm, dim=4)
  x = rng.normal(size=(3, 5, 4)).astype(np.float32)
  module = PraxisLayer(config=config)
  variables = unbox_weights(module.init(jax.random.key(0), x))
  y, updated = module.apply(variables, x, train=True, mutable=['non_trainable'])
  layer = base_hyperparams.instantiate(config)
  with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=False)):
    own = {name: tree['layer'] for name, tree in variables.items()}
    expected, own_updated = layer.apply(own, x, mutable=['non_trainable'])
  np.testing.assert_array_equal(y, expected)
  jax.tree.map(np.testing.assert_array_equal, updated['non_trainable']['layer'], own_updated['non_trainable'])
