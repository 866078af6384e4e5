import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
import numpy as np
import pytest
from tiny_model import packed_batch, random_weights, tiny_model
import transformer_reference as reference

from spmd_tasks.layers import LanguageModelLoss, RmsNorm
from spmd_tasks.layers.attention import LearnedPositions
from spmd_tasks.sharding import split_dims_to_partition_spec
from spmd_tasks.sharding.specs import sharding_scope
from spmd_tasks.sharding.weights import weight_specs

LOSS = LanguageModelLoss(z_loss_weight=1e-3, label_smoothing=0.1)


def _apply(model, weights, batch):
  return np.asarray(jax.jit(model.apply)({'params': weights}, batch)['logits'])


@pytest.mark.parametrize('num_kv_heads', [None, 1])
def test_logits_against_numpy(num_kv_heads):
  model, batch = tiny_model(num_kv_heads=num_kv_heads), packed_batch()
  weights = random_weights(model)
  expected = reference.language_model(jax.tree.map(np.asarray, batch), reference.to_float64(weights))
  np.testing.assert_allclose(_apply(model, weights, batch), expected, rtol=1e-3, atol=1e-4)


def test_packed_documents_are_as_if_alone():
  model, batch = tiny_model(), packed_batch()
  weights = random_weights(model)
  packed = _apply(model, weights, batch)
  for start, end in [(0, 3), (3, 7)]:
    alone = _apply(model, weights, {'ids': batch['ids'][:1, start:end]})
    np.testing.assert_allclose(packed[:1, start:end], alone, rtol=1e-4, atol=1e-5)


def test_a_token_sees_no_later_one():
  model, batch = tiny_model(), packed_batch()
  weights = random_weights(model)
  changed = batch | {'ids': batch['ids'].at[1, 5].set(9)}
  difference = np.abs(_apply(model, weights, batch) - _apply(model, weights, changed))[1].max(-1)
  assert (difference[:5] == 0).all()
  assert (difference[5:] > 0).all()


@pytest.mark.parametrize('present', [(), ('segment_pos',)])
def test_segments_are_optional(present):
  model, batch = tiny_model(), packed_batch()
  weights = random_weights(model)
  row = {name: value[1:2] for name, value in batch.items()}  # the row that is one document
  partial = {name: row[name] for name in ('ids', *present)}
  np.testing.assert_allclose(_apply(model, weights, partial), _apply(model, weights, row), rtol=1e-4, atol=1e-5)


def test_segment_ids_without_positions_are_an_error():
  model, batch = tiny_model(), packed_batch()
  with pytest.raises(ValueError, match="no 'segment_pos'"):
    model.init(jax.random.key(0), {'ids': batch['ids'], 'segment_ids': batch['segment_ids']})


def test_untied_logits_have_their_own_kernel():
  model, batch = tiny_model(tied=False), packed_batch()
  weights = random_weights(model)
  assert weights['embedding']['softmax_kernel'].shape == (30, 257)
  zeroed = weights | {'embedding': weights['embedding'] | {'softmax_kernel': jnp.zeros((30, 257))}}
  assert np.abs(_apply(model, weights, batch)).max() > 0
  np.testing.assert_array_equal(_apply(model, zeroed, batch), np.zeros((3, 8, 257)))


def test_learned_positions_enter_by_position_in_the_document():
  model = tiny_model().clone(positions=LearnedPositions(max_len=8))
  weights, batch = random_weights(model), packed_batch()
  assert weights['positions']['table'].shape == (8, 30)
  packed, alone = _apply(model, weights, batch), _apply(model, weights, {'ids': batch['ids'][:1, 3:7]})
  np.testing.assert_allclose(packed[:1, 3:7], alone, rtol=1e-4, atol=1e-5)
  flat = weights | {'positions': {'table': jnp.zeros((8, 30))}}
  assert np.abs(packed - _apply(model, flat, batch)).max() > 1e-2


def test_a_norm_given_twice_is_two_norms():
  norm = RmsNorm()
  model = tiny_model()
  block = model.stack.block.clone(norm=norm)
  model = model.clone(stack=model.stack.clone(block=block), final_norm=norm)
  weights = random_weights(model)
  assert weights['final_norm']['scale'].shape == (30,)
  assert weights['stack']['layers']['attention_norm']['scale'].shape == (2, 30)


@functools.cache
def _float32_loss_and_gradients():
  model = tiny_model()
  weights = random_weights(model)
  return weights, *jax.jit(_loss_and_gradients(model, packed_batch()))(weights)


def _loss_and_gradients(model, batch):
  return jax.value_and_grad(lambda weights: LOSS(model.apply({'params': weights}, batch), batch).loss)


def test_bfloat16_compute_is_close_and_its_gradients_are_float32():
  weights, loss, gradients = _float32_loss_and_gradients()
  model = tiny_model(dtype='bfloat16')
  assert jax.eval_shape(model.apply, {'params': weights}, packed_batch())['logits'].dtype == np.float32
  loss_16, gradients_16 = jax.jit(_loss_and_gradients(model, packed_batch()))(weights)
  np.testing.assert_allclose(loss_16, loss, rtol=1e-2)
  assert loss_16 != loss
  for a, b in zip(jax.tree.leaves(gradients_16), jax.tree.leaves(gradients), strict=True):
    assert a.dtype == np.float32
    assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)


def test_padding_rows_give_finite_gradients_and_change_nothing():
  weights, loss, gradients = _float32_loss_and_gradients()  # the batch's last row is padding only
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
  without = {name: value[:2] for name, value in packed_batch().items()}
  loss_without, gradients_without = jax.jit(_loss_and_gradients(tiny_model(), without))(weights)
  np.testing.assert_allclose(loss, loss_without, rtol=1e-6)
  for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(gradients_without), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


AXIS_RULES = (
  ('vocab', 'mdl'),
  ('embed', 'data'),
  ('mlp', 'mdl'),
  ('heads', 'mdl'),
  ('kv_heads', 'mdl'),
  ('head_dim', None),
  ('norm', None),
  ('layers', None),
  ('batch', ('replica', 'data')),
  ('seq', None),
  ('act_embed', None),
  ('act_mlp', 'mdl'),
  ('act_heads', 'mdl'),
  ('act_kv_heads', 'mdl'),
  ('act_vocab', 'mdl'),
)


@pytest.mark.parametrize(
  'overrides', [{}, {'act_embed': 'mdl', 'head_dim': 'mdl', 'heads': 'data'}], ids=['heads', 'mixed']
)
def test_dims_that_the_mesh_does_not_divide(overrides):
  """3 heads, 90 ffn, 257 vocab, 30 model, 3 rows over axes of 2 and 4: loss and gradients as on one device."""
  weights, loss, gradients = _float32_loss_and_gradients()
  model, batch = tiny_model(), packed_batch()
  specs = weight_specs(jax.eval_shape(model.init, jax.random.key(0), batch)['params'])
  mesh = jax.make_mesh((1, 2, 4), ('replica', 'data', 'mdl'), axis_types=(AxisType.Auto,) * 3)
  rules = tuple((name, overrides.get(name, target)) for name, target in AXIS_RULES)

  @jax.jit
  def step(weights):
    with sharding_scope(mesh, rules):
      constrained = jax.tree.map(
        lambda weight, spec: jax.lax.with_sharding_constraint(
          weight, NamedSharding(mesh, split_dims_to_partition_spec(spec.split_dims, mesh.axis_names, rules))
        ),
        weights,
        specs,
      )
      return _loss_and_gradients(model, batch)(constrained)

  sharded_loss, sharded_gradients = step(weights)
  np.testing.assert_allclose(sharded_loss, loss, rtol=1e-5)
  for a, b in zip(jax.tree.leaves(sharded_gradients), jax.tree.leaves(gradients), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())
