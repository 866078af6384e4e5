"""Heads that predict further tokens against float64 numpy, written with loops and the transformer's reference."""

import jax
import numpy as np
import pytest
from tiny_model import packed_batch, random_weights, tiny_model
import transformer_reference as reference

from spmd_tasks.config import resolve
from spmd_tasks.errors import UserError
from spmd_tasks.layers import LanguageModelLoss, NextnHead, NextnLanguageModel, RmsNorm

NUM_HEADS = 2
WEIGHT = 0.2


def make_model():
  plain = tiny_model(num_layers=1)
  head = NextnHead(stack=plain.stack, norm=RmsNorm())
  parts = {'embedding': plain.embedding, 'stack': plain.stack, 'final_norm': plain.final_norm}
  return NextnLanguageModel(**parts, num_nextn_predict_layers=NUM_HEADS, nextn_head=head, nextn_loss_weight=WEIGHT)


def stack_of(x, batch, layers):
  layer = jax.tree.map(lambda leaf: leaf[0], layers)
  normed = reference.rms_norm(x, layer['attention_norm']['scale'])
  x = x + reference.attention(normed, layer['attention'], batch['segment_ids'], batch['segment_pos'])
  return x + reference.gated_feed_forward(reference.rms_norm(x, layer['ffn_norm']['scale']), layer['ffn'])


def expected_losses(weights, batch):
  """(the mean cross-entropy of the next tokens, [that of each head's, over as many])."""
  table, norm = weights['embedding']['table'], reference.rms_norm
  embedded = lambda ids: table[ids] * np.sqrt(table.shape[1])
  hidden = norm(stack_of(embedded(batch['ids']), batch, weights['stack']['layers']), weights['final_norm']['scale'])
  rows, length = batch['ids'].shape
  totals = []
  for number in range(NUM_HEADS + 1):
    if number:
      head = weights[f'nextn_{number - 1}']
      following = np.array([[*row[number:], *[0] * number] for row in batch['ids']])
      both = [
        norm(x, head[f'{name}_norm']['scale']) for name, x in (('embedding', embedded(following)), ('hidden', hidden))
      ]
      x = stack_of(np.concatenate(both, -1) @ head['projection']['kernel'], batch, head['stack']['layers'])
      hidden = norm(x, head['final_norm']['scale'])
    total = 0.0
    for row in range(rows):
      for t in range(length - number):
        segments = batch['segment_ids'][row, [t, t + number]]
        if segments[0] and segments[0] == segments[1]:
          logits = table @ hidden[row, t]
          label = logits[batch['labels'][row, t + number]]
          total += batch['weights'][row, t + number] * (np.log(np.exp(logits - label).sum()))
    totals.append(total / batch['weights'].sum())
  return totals[0], totals[1:]


def test_losses_and_gradients_against_numpy():
  batch = packed_batch()
  batch['weights'] = batch['weights'].at[1, 2].set(0.5)
  model, loss = make_model(), LanguageModelLoss()
  weights = random_weights(model)

  def loss_of(weights):
    output = loss(model.apply({'params': weights}, batch), batch)
    return output.loss, output.metrics

  (found, metrics), gradients = jax.jit(jax.value_and_grad(loss_of, has_aux=True))(weights)
  exact, numbers = reference.to_float64(weights), jax.tree.map(np.asarray, batch)
  following, further = expected_losses(exact, numbers)
  np.testing.assert_allclose(metrics['cross_entropy'][0], following, rtol=1e-5)
  np.testing.assert_allclose(metrics['nextn_loss'][0], np.mean(further), rtol=1e-5)
  np.testing.assert_allclose(found, following + WEIGHT * np.mean(further), rtol=1e-5)

  def expected(place, moved):
    following, further = expected_losses(
      jax.tree.unflatten(tree, [*leaves[:place], moved, *leaves[place + 1 :]]), numbers
    )
    return following + WEIGHT * np.mean(further)

  rng, (leaves, tree) = np.random.default_rng(0), jax.tree.flatten(exact)
  for place, (leaf, gradient) in enumerate(zip(leaves, jax.tree.leaves(gradients), strict=True)):
    direction = rng.normal(size=leaf.shape)
    direction /= np.linalg.norm(direction)
    ahead, behind = (expected(place, leaf + step * direction) for step in (1e-5, -1e-5))
    np.testing.assert_allclose(np.sum(gradient * direction), (ahead - behind) / 2e-5, rtol=1e-3, atol=2e-5)


def test_a_negative_number_of_heads_is_refused():
  with pytest.raises(UserError, match='num_nextn_predict_layers = -1 must be at least 0'):
    resolve('lm.StdlibTiny', ['num_nextn_predict_layers=-1']).build()
