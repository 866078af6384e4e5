"""EncoderDecoderLm and prefix language models against T5X's networks, and their generation against whole rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.layers import LanguageModelLoss, TransformerBlock
from spmd_tasks.layers.attention import Attention
from spmd_tasks.layers.pipeline import PipelinedStack
from tests.layers import t5x_networks

LOSSES = ('sum', 7.5, 'tokens', 'all_tokens', 'sequences')


@functools.cache
def logits(name: str, implementation: str | None = None) -> np.ndarray:
  arrays = t5x_networks.case(name)
  model = t5x_networks.model(name, implementation=implementation)
  apply = jax.jit(lambda weights, batch: model.apply({'params': weights}, batch)['logits'])
  return np.asarray(apply(t5x_networks.weights(arrays), t5x_networks.batch(arrays)))


@pytest.mark.parametrize('name, implementation', [('packed', None), ('prefix', None), ('packed', 'blockwise')])
def test_the_logits_are_those_of_t5x(name, implementation):
  """Those of padding too, which attends evenly to all: experts may read it. A block of queries is a whole row here."""
  np.testing.assert_allclose(logits(name, implementation), t5x_networks.case(name)['logits'], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('number, normalization', list(enumerate(LOSSES)))
def test_the_losses_are_those_of_t5x(number, normalization):
  arrays = t5x_networks.case('packed')
  batch = t5x_networks.batch(arrays) | {'weights': arrays['decoder_loss_weights']}
  loss = LanguageModelLoss(z_loss_weight=1e-3, label_smoothing=0.1, smoothing='others', normalization=normalization)

  output = loss({'logits': arrays['logits']}, jax.tree.map(jnp.asarray, batch))

  np.testing.assert_allclose(output.loss, arrays['losses'][number], rtol=2e-6)
  assert output.is_sum == (normalization in ('sum', 7.5))


def test_dropout_drops_a_key_for_all_queries_and_a_feature_for_all_tokens():
  attention = Attention(num_heads=2, head_dim=3, rotary=None, dropout_rate=0.5)
  x = jax.random.normal(jax.random.key(0), (2, 5, 6))
  variables = jax.jit(attention.init)(jax.random.key(1), x)
  rngs = {'dropout': jax.random.key(2)}
  apply = jax.jit(
    lambda layer, x: (layer.apply(variables, x, train=True, rngs=rngs), layer.apply(variables, x)), static_argnums=0
  )
  dropped, kept = apply(attention, x)
  assert not np.allclose(dropped, kept)

  # Equal values at all places: what a query gets is the share of its kept keys, the same for all queries of a head.
  even = Attention(num_heads=2, head_dim=3, rotary=None, dropout_rate=0.5, causal=False)
  shares = np.divide(*apply(even, jnp.ones((2, 5, 6))))
  np.testing.assert_allclose(shares, np.broadcast_to(shares[:, :1], shares.shape), rtol=1e-5)


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'cross': True}, 'cross=True does not support rotary'),
    ({'rotary': None, 'dropout_rate': 1.5}, 'a dropout rate of 1.5 must be from 0 to 1'),
    ({'rotary': None, 'logit_cap': float('inf')}, 'logit_cap=inf must be positive'),
    ({'rotary': None, 'implementation': 'splash', 'even_padding': True}, 'evenly attending padding'),
  ],
)
def test_what_attention_cannot_do_is_refused(settings, message):
  with pytest.raises(UserError, match=message):
    Attention(num_heads=2, **settings).init(jax.random.key(0), jnp.ones((1, 4, 6)))


def test_a_pipeline_refuses_an_encoder_and_a_plain_block_cross_attention():
  model = t5x_networks.model('packed')
  batch = t5x_networks.batch(t5x_networks.case('packed'))
  block = model.stack.block
  pipelined = PipelinedStack(block=block.clone(), num_layers=2, num_microbatches=1)
  for masks_zeros, also in ((False, ''), (True, ' and no token_mask')):
    refused = model.clone(stack=pipelined, masks_zeros=masks_zeros)
    with pytest.raises(UserError, match=f'the stack PipelinedStack takes no position_bias and no encoded{also}: '):
      jax.eval_shape(refused.init, jax.random.key(0), batch)
  plain = TransformerBlock(attention=block.attention.clone(), ffn=block.ffn.clone(), norm=block.norm.clone())
  with pytest.raises(UserError, match='need cross_attention'):
    jax.eval_shape(model.clone(stack=model.stack.clone(block=plain)).init, jax.random.key(0), batch)
