"""Losses on recorded data agree with TRL's own trainers in float64, on the same logits (scripts/run_trl_offline.py)."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from spmd_tasks.learning.accumulation import accumulate_gradients
from spmd_tasks.tuning import DistillationLoss, PreferenceLoss, ScoreLoss

TRL = np.load(Path(__file__).parents[1] / 'data' / 'trl_offline.npz')
LOSSES = {
  'kto': PreferenceLoss(kind='kto'),
  'kto_weighted': PreferenceLoss(kind='kto', beta=0.5, good_weight=1.5, bad_weight=0.7),
  'orpo': PreferenceLoss(kind='orpo', beta=0.3),
}
# The number of the teacher's most probable tokens (0: all), and the loss.
DISTILLATIONS = {
  'forward': (0, DistillationLoss(beta=0.0)),
  'reverse': (0, DistillationLoss(beta=1.0)),
  'jensen_shannon': (0, DistillationLoss(beta=0.5, temperature=2.0)),
  'generalised': (0, DistillationLoss(beta=0.1, temperature=0.7, label_weight=0.3)),
  'forward_top_3': (3, DistillationLoss(beta=0.0)),
}


def value_and_gradient(loss, batch):
  """Returns the LossOutput and the gradient by the logits, with the rows sharded over 4 devices."""

  def loss_of(logits, batch):
    output = loss({'logits': logits}, batch)
    return output.loss, output

  rows = NamedSharding(Mesh(jax.devices()[:4], 'rows'), PartitionSpec('rows'))
  placed = jax.device_put(batch, rows)
  (_, output), gradient = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(placed['logits'], placed)
  return output, gradient


def recorded(kind):
  """Returns the recorded batch with its logits; the row without weights has segments, too."""
  batch = {name.partition('/')[2]: TRL[name] for name in TRL.files if name.startswith(f'{kind}/')}
  batch['segment_ids'][2] = batch['segment_ids'][0]
  return batch


@pytest.mark.parametrize('name', LOSSES)
def test_loss_and_gradient_agree_with_trl(name):
  output, gradient = value_and_gradient(LOSSES[name], recorded('pairs'))
  np.testing.assert_allclose(output.loss, TRL[f'{name}/loss'], rtol=1e-5)
  np.testing.assert_allclose(gradient, TRL[f'{name}/gradient'], rtol=1e-5, atol=1e-7)
  assert output.weight == 5
  if name.startswith('kto'):
    assert output.metrics['kl'][0] > 0.1  # large enough to matter
    assert [output.metrics[kind][1] for kind in ('good_reward', 'bad_reward')] == [3, 2]


@pytest.mark.parametrize('name', LOSSES)
def test_microbatches_give_the_gradient_of_the_whole_batch(name):
  """The microbatches have different numbers of pairs and tokens, and one has none."""
  batch, loss = {name: jnp.asarray(values) for name, values in recorded('pairs').items()}, LOSSES[name]
  task = SimpleNamespace(predict=lambda variables, batch: {'logits': batch['logits'] + variables['shift'][None]})
  variables = {'shift': jnp.zeros(batch['logits'].shape[1:])}
  batch = loss.prepare_whole_batch(task, variables, batch, 4)

  def loss_fn(variables, part, _):
    output = loss(task.predict(variables, part), part)
    return output.loss, output

  output, gradient = accumulate_gradients(loss_fn, variables, batch, None, 4)
  np.testing.assert_allclose(output.loss, TRL[f'{name}/loss'], rtol=1e-5)
  np.testing.assert_allclose(gradient['shift'], TRL[f'{name}/gradient'].sum(0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('name', DISTILLATIONS)
def test_divergences_from_a_teacher_agree_with_trl(name):
  batch, (top_k, loss) = recorded('pairs'), DISTILLATIONS[name]
  batch['teacher_log_probs'] = jax.nn.log_softmax(batch.pop('teacher_logits') / loss.temperature)
  if top_k:
    batch['teacher_log_probs'], batch['teacher_ids'] = jax.lax.top_k(batch['teacher_log_probs'], top_k)

  output, gradient = value_and_gradient(loss, batch)
  np.testing.assert_allclose(output.loss, TRL[f'{name}/loss'], rtol=1e-5)
  np.testing.assert_allclose(gradient, TRL[f'{name}/gradient'], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('kind', ['bradley_terry', 'classification', 'regression', 'contrastive'])
def test_losses_on_scores_agree_with_trl_and_transformers(kind):
  """Texts are packed, their vectors come from their last tokens, and microbatches add up by their weights."""
  batch, loss = recorded('pairs'), ScoreLoss(kind=kind, center_weight=0.01 if kind == 'bradley_terry' else 0.0)
  after = np.pad(batch['segment_ids'], ((0, 0), (0, 1)))[:, 1:]
  batch['weights'] = ((batch['segment_ids'] != after) & (batch['targets'] + batch['segment_ids'] > 0)).astype(
    np.float32
  )
  batch['weights'][2] = 0

  output, gradient = value_and_gradient(loss, batch)
  np.testing.assert_allclose(output.loss, TRL[f'{kind}/loss'], rtol=1e-5)
  np.testing.assert_allclose(gradient, TRL[f'{kind}/gradient'], rtol=1e-5, atol=1e-7)
  if kind != 'contrastive':
    rows = (slice(0, 2), slice(2, 4))
    parts = [loss({'logits': batch['logits'][part]}, {k: v[part] for k, v in batch.items()}) for part in rows]
    total = sum(part.loss * part.weight for part in parts)
    np.testing.assert_allclose(total / output.weight, output.loss, rtol=1e-5)
