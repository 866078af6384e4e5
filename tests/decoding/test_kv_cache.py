"""Token by token gives the numbers of the whole text at once, for every kind of block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.decoding import cached_attention
from spmd_tasks.decoding.kv_cache import KvCache
from spmd_tasks.layers import (
  GatedFeedForward,
  LanguageModel,
  RmsNorm,
  StackSequence,
  TokenEmbedding,
  TransformerBlock,
  TransformerStack,
)
from spmd_tasks.layers.attention import (
  Attention,
  LatentAttention,
  LearnedPositions,
  RelativePositionBias,
  Rotary,
  YarnScaling,
)
from spmd_tasks.layers.base import layer_scope
from spmd_tasks.layers.moe import CapacityGather, ExpertChoiceRouter, Experts, MixtureOfExperts
from spmd_tasks.sharding.weights import unbox_weights
from tests.layers.tiny_model import VOCAB, random_weights

BLOCK = 5  # entries of the cache that are read at a time: the last block begins in the one before it

LENGTHS = np.array([3, 1, 0, 5])  # of the prompts; the third row is empty
NUM_STEPS = 4
NUM_POSITIONS = 12


@pytest.fixture(autouse=True)
def _short_blocks(monkeypatch):
  monkeypatch.setitem(cached_attention._BLOCK, 'cpu', BLOCK)


def _block(ffn=None, post_norm=False, pre_norm=True, **attention):
  return TransformerBlock(
    attention=Attention(num_heads=4, head_dim=6, **attention),
    ffn=ffn or GatedFeedForward(hidden_dim=20),
    norm=RmsNorm(),
    post_norm=post_norm,
    pre_norm=pre_norm,
  )


def _model(stack, positions=None):
  return LanguageModel(
    embedding=TokenEmbedding(vocab_size=VOCAB, embed_dim=16), stack=stack, final_norm=RmsNorm(), positions=positions
  )


def _stack(block, **fields):
  return TransformerStack(block=block, num_layers=2, **fields)


_BIASES = RelativePositionBias(num_heads=4, num_buckets=8, max_distance=10)
MODELS = {
  'multi-head': _model(_stack(_block())),
  'grouped, qk_norm, bias, partial rotation, unrolled': _model(
    _stack(
      _block(
        num_kv_heads=2,
        qk_norm=True,
        use_bias=True,
        rotary=Rotary(num_features=4, scaling=YarnScaling(factor=4.0, original_length=4)),
      ),
      scan=False,
      remat_policy='full',
    )
  ),
  'capped logits, scale, sinks, norm over heads, norms behind sublayers, learned positions': _model(
    _stack(
      _block(
        num_kv_heads=2,
        sinks=True,
        qk_norm=RmsNorm(epsilon=1e-5, num_dims=2),
        clip_qkv=1.5,
        rotary=None,
        pre_norm=False,
        post_norm=True,
        logit_cap=0.5,
        softmax_scale=0.7,
      )
    ),
    LearnedPositions(max_len=NUM_POSITIONS),
  ),
  'latent attention': _model(
    _stack(
      TransformerBlock(
        attention=LatentAttention(
          num_heads=3, query_rank=7, kv_rank=5, nope_head_dim=6, rope_head_dim=4, value_head_dim=3, softmax_scale=0.4
        ),
        ffn=GatedFeedForward(hidden_dim=20),
        norm=RmsNorm(),
      )
    )
  ),
  'keys and values of an earlier layer': _model(
    StackSequence(
      stacks=(
        _stack(_block(num_kv_heads=2, stores_kv='full', qk_norm=True)),  # the second layer's are read
        _stack(_block(reads_kv='full', qk_norm=True)),
      )
    )
  ),
  'windows, relative positions': _model(_stack(_block(window=6, rotary=None, position_bias=_BIASES))),
}


def _apply(model, variables, batch):
  """The predictions of a call that generates text, and what it adds to the cache."""
  with layer_scope(cache=KvCache()):
    outputs, updated = model.apply(variables, batch, mutable='new_cache')
  return outputs, unbox_weights(updated['new_cache'])


def _generate(model, weights, ids):
  """Logits [B, T, V] of the whole text, and one at a time, of the columns behind each row's prompt (else NaN)."""

  def place(fresh, full):
    # What an earlier sequence left in places that are not read must not matter.
    cache = jnp.zeros(full.shape, full.dtype).at[..., : fresh.shape[-2], :].set(fresh)
    return cache.at[..., LENGTHS.max() :, :].set(1e3)

  def write(cache, new, positions, active):
    for row in range(len(LENGTHS)):
      place = jnp.where(active[row] == 1, positions[row], NUM_POSITIONS)
      cache = cache.at[..., row, :, place, :].set(new[..., row, :, 0, :], mode='drop')
    return cache

  @jax.jit
  def read(weights):
    columns = np.arange(ids.shape[1])[None]
    batch = {
      'ids': ids,
      'segment_ids': (columns < LENGTHS[:, None]).astype(np.int32),
      'segment_pos': np.broadcast_to(columns, ids.shape).astype(np.int32),
    }
    _, cache = _apply(model, {'params': weights}, batch)
    full = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*x.shape[:-2], NUM_POSITIONS, x.shape[-1]), x.dtype), cache)
    whole = model.apply({'params': weights}, {'ids': ids})['logits']
    return whole, jax.tree.map(place, cache, full)

  @jax.jit
  def step(weights, cache, tokens, positions, active):
    batch = {'ids': tokens[:, None], 'segment_ids': active[:, None], 'segment_pos': positions[:, None]}
    outputs, new = _apply(model, {'params': weights, 'cache': cache}, batch)
    return outputs['logits'][:, 0], jax.tree.map(lambda c, n: write(c, n, positions, active), cache, new)

  whole, cache = read(weights)
  logits = np.full((*ids.shape, VOCAB), np.nan, np.float32)
  rows = np.arange(len(LENGTHS))
  for i in range(NUM_STEPS):
    positions = (LENGTHS + i) * (LENGTHS > 0)
    out, cache = step(weights, cache, ids[rows, positions], positions, (LENGTHS > 0).astype(np.int32))
    logits[rows, positions] = out
  return whole, logits


# A chunk of multi-head attention is compared below; experts and pipelines are in tests/decoding/test_decode_steps.py.
@pytest.mark.parametrize('name', [name for name in MODELS if name != 'multi-head'])
def test_token_by_token_is_the_whole_text(name, rng):
  model = MODELS[name]
  weights = random_weights(model, {'ids': np.ones((4, 4), np.int32)})
  ids = rng.integers(1, VOCAB, (len(LENGTHS), LENGTHS.max() + NUM_STEPS)).astype(np.int32)
  expected, actual = _generate(model, weights, ids)
  for row in np.flatnonzero(LENGTHS):
    columns = slice(LENGTHS[row], LENGTHS[row] + NUM_STEPS)
    np.testing.assert_allclose(actual[row, columns], expected[row, columns], rtol=1e-4, atol=2e-5)


def test_a_chunk_goes_on_where_the_cache_ends(rng):
  model = MODELS['multi-head']
  weights = random_weights(model)
  ids = rng.integers(1, VOCAB, (1, 8)).astype(np.int32)
  positions = np.arange(8)[None].astype(np.int32)

  @jax.jit
  def whole_and_chunk(weights):
    whole, cache = _apply(model, {'params': weights}, {'ids': ids})
    cache = jax.tree.map(lambda x: x.at[..., 3:, :].set(0), cache)
    chunk = {'ids': ids[:, 3:7], 'segment_pos': positions[:, 3:7]}
    outputs, _ = _apply(model, {'params': weights, 'cache': cache}, chunk)
    return whole['logits'][:, 3:7], outputs['logits']

  expected, actual = whole_and_chunk(weights)
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)


def test_what_looks_ahead_is_an_error():
  experts = MixtureOfExperts(
    router=ExpertChoiceRouter(num_experts=5), experts=Experts(num_experts=5, hidden_dim=8), computation=CapacityGather()
  )
  looking_ahead = [_block(causal=False), _block(experts)]
  for block, message in zip(looking_ahead, ('causal=False', 'cannot generate'), strict=True):
    model = _model(_stack(block))
    batch = {'ids': np.ones((2, 4), np.int32)}
    with pytest.raises(ValueError, match=message):
      jax.eval_shape(lambda w, m=model, b=batch: _apply(m, {'params': w}, b), random_weights(model, batch))
