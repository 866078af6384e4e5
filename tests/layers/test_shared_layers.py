"""Layers that read keys and values of earlier layers, and a vector of their own for each token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.layers import (
  BlockGroup,
  GatedFeedForward,
  LanguageModel,
  LayerEmbedding,
  LayerInput,
  NextnHead,
  NextnLanguageModel,
  RmsNorm,
  StackSequence,
  TokenEmbedding,
  TransformerBlock,
  TransformerStack,
)
from spmd_tasks.layers.attention import Attention
from spmd_tasks.layers.pipeline import PipelinedStack
from spmd_tasks.sharding import DEFAULT_AXIS_RULES, MeshSpec, stage_axis_rules
from spmd_tasks.sharding.specs import sharding_scope
from tests.layers.tiny_model import VOCAB, assert_close, packed_batch, random_weights


def block(**attention):
  return TransformerBlock(
    attention=Attention(num_heads=3, num_kv_heads=1, qk_norm=True, **attention),
    ffn=GatedFeedForward(hidden_dim=20),
    norm=RmsNorm(),
    layer_input=LayerInput(),
  )


STORES = block(window=3, stores_kv='windowed'), block(stores_kv='full')
READS = block(window=3, reads_kv='windowed'), block(reads_kv='full')


def model_of(stack, num_layers=6, cls=LanguageModel, **fields):
  return cls(
    embedding=TokenEmbedding(vocab_size=VOCAB, embed_dim=30),
    layer_embedding=LayerEmbedding(vocab_size=VOCAB, num_layers=num_layers, dim=5, norm=RmsNorm()),
    stack=stack,
    final_norm=RmsNorm(),
    **fields,
  )


def two_stacks(cls=TransformerStack, **fields):
  stacks = TransformerStack(block=BlockGroup(blocks=STORES), num_layers=1, remat_policy='full')
  return StackSequence(stacks=(stacks, cls(block=BlockGroup(blocks=READS), num_layers=2, **fields)))


def loss_and_gradients(model, weights):
  def loss(weights):
    logits = model.apply({'params': weights}, packed_batch(), train=True)['logits']
    return jnp.mean(jnp.square(logits) * jnp.cos(jnp.arange(VOCAB, dtype=jnp.float32))[None, None])

  return jax.device_get(jax.jit(jax.value_and_grad(loss))(weights))


def test_a_loop_over_the_layers_computes_the_same_as_all_layers_in_turn():
  scanned, in_turn = (
    model_of(two_stacks(remat_policy='full')),
    model_of(TransformerStack(block=BlockGroup(blocks=(*STORES, *READS, *READS)), num_layers=1, remat_policy='none')),
  )
  weights = random_weights(scanned)
  attention = weights['stack']['stack_1']['layers']['block_0']['attention']
  assert sorted(attention) == ['out', 'query', 'query_norm']

  def unrolled(weights):
    first, rest = (weights['stack'][f'stack_{i}']['layers'] for i in range(2))
    blocks = [first['block_0'], first['block_1']]
    for layer in range(2):
      blocks += [jax.tree.map(lambda w, i=layer: w[i : i + 1], rest[f'block_{n}']) for n in range(2)]
    return weights | {'stack': {'layers': {f'block_{i}': block for i, block in enumerate(blocks)}}}

  loss, gradients = loss_and_gradients(scanned, weights)
  expected_loss, expected = loss_and_gradients(in_turn, unrolled(weights))
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
  assert_close(unrolled(gradients), expected)


WRONG = {
  'no such layer': (model_of(TransformerStack(block=BlockGroup(blocks=READS), num_layers=3)), 'no layer before has'),
  'other layers': (model_of(two_stacks(), num_layers=5), 'layer_embedding.num_layers=5 must be 6'),
  'no vectors': (model_of(two_stacks()).clone(layer_embedding=None), 'needs blocks with a layer_input'),
  'no layer embedding in stages': (model_of(two_stacks(PipelinedStack, num_microbatches=1)), 'takes no layer_inputs'),
}


@pytest.mark.parametrize('case', WRONG)
def test_what_does_not_fit_is_refused(case):
  model, message = WRONG[case]
  with pytest.raises(UserError, match=message):
    jax.eval_shape(model.init, jax.random.key(0), packed_batch())


def test_stages_of_a_pipeline_share_no_keys():
  stores, reads = (layer.clone(layer_input=None) for layer in (STORES[1], READS[1]))
  stack = PipelinedStack(block=reads, num_layers=2, num_microbatches=2)
  model = model_of(StackSequence(stacks=(TransformerStack(block=stores, num_layers=1), stack)))
  model, batch = model.clone(layer_embedding=None), {name: x[:2] for name, x in packed_batch().items()}
  mesh = MeshSpec(axis_names=('replica', 'stage', 'data', 'mdl'), ici_mesh_shape=(1, 2, 1, 1)).build(jax.devices()[:2])
  scope = sharding_scope(mesh, stage_axis_rules(DEFAULT_AXIS_RULES))
  with scope, pytest.raises(UserError, match='stages of a pipeline, which do not share'):
    jax.eval_shape(model.init, jax.random.key(0), batch)


def test_heads_of_later_tokens_have_no_layer_embedding():
  head = NextnHead(stack=TransformerStack(block=STORES[1], num_layers=1), norm=RmsNorm())
  with pytest.raises(UserError, match='support neither layer_embedding'):
    model_of(two_stacks(), cls=NextnLanguageModel, nextn_head=head)
