"""Logits in chunks: the loss, its metrics and every gradient are those of all logits at once, on any mesh."""

import jax
import numpy as np
import pytest

from spmd_tasks.layers import LanguageModelLoss
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, MeshSpec, context_axis_rules
from spmd_tasks.sharding.specs import sharding_scope
from tests.layers.tiny_model import VOCAB, assert_close, packed_batch, random_weights, tiny_model

LOSS = LanguageModelLoss(z_loss_weight=1e-2, label_smoothing=0.1)
EMBEDDINGS = {
  'tied, capped': {'logits_cap': 2.0, 'scale_logits': True},
  'a kernel': {'tied': False},
}
MESHES = {
  'one device': None,
  # Which divides neither rows nor vocabulary.
  'data 2 x mdl 4': (('replica', 'data', 'mdl'), (1, 2, 4), DEFAULT_AXIS_RULES),
  'data 2 x context 2 x mdl 2': (
    ('replica', 'data', 'context', 'mdl'),
    (1, 2, 2, 2),
    context_axis_rules(DEFAULT_AXIS_RULES),
  ),
}


def model_of(embedding, num_chunks, *, num_layers=1):
  model = tiny_model(num_layers=num_layers)
  return model.clone(embedding=model.embedding.clone(**EMBEDDINGS[embedding]), num_logit_chunks=num_chunks)


def batch_of(rng):
  """A packed batch with fractional weights, and with labels of -100 where the weight is 0."""
  batch = packed_batch()
  weights = np.asarray(batch['weights']) * rng.choice([0.0, 0.5, 1.0], size=batch['weights'].shape)
  weights[1, 0] = 1.0
  labels = np.where(weights == 0, -100, batch['labels'])
  return batch | {'weights': weights.astype(np.float32), 'labels': labels.astype(np.int32)}


def run(model, weights, batch, mesh=None):
  def loss(weights):
    output = LOSS(model.apply({'params': weights}, batch), batch)
    return output.loss, output

  def gradient(weights):
    if mesh is None:
      return jax.value_and_grad(loss, has_aux=True)(weights)
    names, shape, rules = mesh
    with sharding_scope(MeshSpec(axis_names=names, ici_mesh_shape=shape).build(), rules):
      return jax.value_and_grad(loss, has_aux=True)(weights)

  return jax.device_get(jax.jit(gradient)(weights))


@pytest.mark.parametrize(
  'embedding, mesh',
  [
    ('tied, capped', 'one device'),
    ('a kernel', 'data 2 x mdl 4'),
    pytest.param('tied, capped', 'data 2 x context 2 x mdl 2', marks=pytest.mark.exhaustive),
  ],
)
def test_loss_and_gradients_are_those_of_all_logits_at_once(rng, embedding, mesh):
  batch = batch_of(rng)
  weights = random_weights(model_of(embedding, 1))
  expected = run(model_of(embedding, 1), weights, batch)
  got = run(model_of(embedding, 4), weights, batch, MESHES[mesh])
  assert_close(got, expected, rtol=2e-6, atol=1e-6)


def test_the_logits_are_never_whole():
  """No array of the gradient's program is [B, T, V]."""
  batch = packed_batch()
  weights = random_weights(model_of('tied, capped', 1))

  def has_all_logits(num_chunks):
    model = model_of('tied, capped', num_chunks)

    def loss(weights):
      return LOSS(model.apply({'params': weights}, batch), batch).loss

    return f'f32[3,8,{VOCAB}]' in str(jax.make_jaxpr(jax.grad(loss))(weights))

  assert has_all_logits(1)
  assert not has_all_logits(4)
