"""DPO trains with the same numbers on every mesh, padded, accumulated and pipelined."""

import dataclasses

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.adapters.adapted_weights import without_adapters
from spmd_tasks.sharding.weights import is_quantized
from spmd_tasks.tuning.preference_loss import label_log_probs, pair_log_probs
from tests.runtime.loss_curves import assert_same_run, make_model, reference, runner, table
from tests.tuning.preference_experiments import (
  BaseDpo,
  Dpo,
  LowRankDpo,
  LowRankExpertsDpo,
  PipelinedBaseDpo,
  PipelinedDpo,
  PipelinedLowRankExpertsDpo,
)

ONE_F_ONE_B = ('schedule=one_forward_one_backward',)
CIRCULAR = ('schedule=circular', 'num_repeats=2')
IN_PARTS = ('task.learner.num_microbatches=4',)
ONE_BY_ONE = [
  ('adapters, data 2 x mdl 4, 4 microbatches', LowRankDpo, LowRankDpo, (1, 2, 4), IN_PARTS),
  ('data 2 x mdl 4', Dpo, Dpo, (1, 2, 4), ()),
  ('logits in parts, data 2 x mdl 4', Dpo, Dpo, (1, 2, 4), ('num_logit_chunks=4',)),
  ('circular, stage 2 x data 2 x mdl 2', Dpo, PipelinedDpo, (1, 2, 2, 2), CIRCULAR),
  ('compared with the base, data 2 x mdl 4, 4 microbatches', BaseDpo, BaseDpo, (1, 2, 4), IN_PARTS),
  ('compared with the base, one forward, one backward', BaseDpo, PipelinedBaseDpo, (1, 4, 2, 1), ONE_F_ONE_B),
  (
    'adapters of experts, stage 2 x data 2 x expert 2',
    LowRankExpertsDpo,
    PipelinedLowRankExpertsDpo,
    (1, 2, 2, 2, 1),
    (),
  ),
]


@pytest.mark.parametrize('name, plain, experiment, shape, overrides', table((), ONE_BY_ONE))
def test_one_loss_curve_and_one_state(name, plain, experiment, shape, overrides):
  assert_same_run(runner(experiment, shape, overrides=overrides), reference(plain))


def test_the_base_as_a_reference_is_the_model_before_its_adapters_were_trained():
  """Loss and gradients are the same as with the base's log-probabilities in the batch."""
  model, train_input = make_model(BaseDpo, (1, 1, 1), overrides=('num_layers=1',))
  task, batch = model.task, {name: jnp.asarray(values) for name, values in next(train_input.make_iterator()).items()}
  state = jax.tree.map(jnp.asarray, model.init(0))
  at_start = {'params': state.weights}
  flat = traverse_util.flatten_dict(state.weights, sep='/')
  flat = {name: leaf + 0.05 if name.endswith('lora_b') else leaf for name, leaf in flat.items()}
  trained = {'params': traverse_util.unflatten_dict(flat, sep='/')}

  noise = batch | {'reference_log_probs': batch['weights'] * 7}

  @jax.jit
  def at_start_of(at_start, trained):
    """Pairs of the base with the references of the trained model, the latter's batch, and the loss of an eval."""
    prepared = task.loss.prepare_batch(task, trained, batch)
    log_probs = label_log_probs(task.predict(at_start, batch), batch)
    return pair_log_probs(log_probs, prepared), prepared, task.compute_loss(at_start, noise, train=False).loss

  def loss_of(weights, loss, batch):
    return dataclasses.replace(task, loss=loss).compute_loss({'params': weights}, batch, train=True).loss

  @jax.jit
  def losses_of(weights, prepared):
    from_batch = dataclasses.replace(task.loss, reference_from='batch')
    return [jax.value_and_grad(loss_of)(weights, *each) for each in ((task.loss, noise), (from_batch, prepared))]

  pairs, prepared, evaluated = at_start_of(at_start, trained)
  np.testing.assert_allclose(pairs.chosen, pairs.reference_chosen, rtol=1e-6)
  (value, gradient), (expected, expected_gradient) = losses_of(trained['params'], prepared)
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), gradient, expected_gradient)
  np.testing.assert_allclose(evaluated, np.log(2), rtol=1e-6)


@pytest.mark.parametrize(
  'dtype', ['int8', *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ('nf4', 'nf4_double'))]
)
def test_a_quantized_base_gives_the_loss_of_its_dequantized_weights(dtype):
  """The losses of a train step and an eval agree with the same weights in float32, and the base's log-probabilities."""
  overrides = ('num_layers=1', f'task.frozen_dtype={dtype}', 'task.model.stack.remat_policy=dots')
  model, train_input = make_model(BaseDpo, (1, 1, 1), overrides=overrides)
  task, batch = model.task, {name: jnp.asarray(values) for name, values in next(train_input.make_iterator()).items()}
  state = model.init(0)
  flat = traverse_util.flatten_dict(state.weights, sep='/')
  assert any(map(is_quantized, flat.values()))
  flat = {name: leaf + 0.05 if name.endswith('lora_b') else leaf for name, leaf in flat.items()}
  state = state.replace(weights=traverse_util.unflatten_dict(flat, sep='/'))

  dequantized = {name: leaf.unbox() if is_quantized(leaf) else leaf.astype(jnp.float32) for name, leaf in flat.items()}
  base = {name: leaf for name, leaf in dequantized.items() if 'lora_' not in name}
  dequantized, base = (traverse_util.unflatten_dict(weights, sep='/') for weights in (dequantized, base))
  loss = dataclasses.replace(task.loss, reference_from='batch')

  @jax.jit
  def losses(base, dequantized, weights):
    """The losses of the dequantized weights in training, against the base's log-probabilities, and in an eval."""
    logits = without_adapters(task.model).apply({'params': base}, batch)['logits']
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), batch['labels'][..., None], axis=-1)[..., 0]
    with_reference = batch | {'reference_log_probs': log_probs * (batch['weights'] > 0)}
    expected = loss(task.model.apply({'params': dequantized}, batch), with_reference).loss
    return expected, task.compute_loss({'params': weights}, batch, train=False).loss

  expected, evaluated = losses(base, dequantized, state.weights)
  assert abs(expected - np.log(2)) > 1e-3  # log(2) is the loss of the base
  np.testing.assert_allclose(evaluated, expected, rtol=1e-5)
  _, metrics = model.train_step(state, model.train_step.place(batch))
  np.testing.assert_allclose(metrics['loss'], expected, rtol=1e-5)
