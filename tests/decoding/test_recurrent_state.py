"""The state of a recurrent layer in a cache: wrong drafts are taken back, and memory is counted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.decoding import DecodeSteps, decode_layout
from spmd_tasks.decoding.cache_arrays import write_tokens
from spmd_tasks.decoding.drafts import DraftRows
from spmd_tasks.decoding.kv_cache import KvCache
from spmd_tasks.layers.base import layer_scope
from spmd_tasks.layers.recurrent import GatedDeltaNet
from spmd_tasks.sharding.weights import unbox_weights
from tests.decoding.runs import CHUNK, SETTINGS, make_run
from tests.layers.tiny_model import random_weights

D, NUM_SLOTS = 10, 4
LAYER = GatedDeltaNet(num_heads=6, num_key_heads=2, key_head_dim=5, value_head_dim=7)


def make_cache(rng):
  """A cache in which each slot has a state."""
  x = np.zeros((NUM_SLOTS, 1, D), np.float32)
  with layer_scope(cache=KvCache()):
    call = lambda: LAYER.init_with_output(jax.random.key(0), x, segment_pos=np.zeros((NUM_SLOTS, 1), np.int32))
    _, variables = jax.eval_shape(call)
  return jax.tree.map(
    lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), unbox_weights(variables['new_cache'])
  )


@jax.jit
def call(weights, cache, x, segment_ids, rows):
  """The layer's outputs for rows of single tokens, and what it adds to the cache."""
  positions = jnp.full(x.shape[:2], 3, jnp.int32)
  with layer_scope(cache=KvCache(**rows)):
    variables = {'params': weights, 'cache': cache}
    y, updated = LAYER.apply(variables, x, segment_ids, positions, mutable='new_cache')
  return y, unbox_weights(updated['new_cache'])


def test_drafts_are_read_in_order_and_wrong_ones_taken_back(rng):
  num_read, columns, slots = [2, 0, 3], 3, np.array([3, NUM_SLOTS + 1, 0], np.int32)  # the second text is unused
  weights = random_weights(LAYER, np.zeros((1, 1, D), np.float32))
  before = make_cache(rng)
  x = rng.normal(size=(columns, len(slots), 1, D)).astype(np.float32)

  texts, expected, outputs = before, before, []
  for column in range(columns):  # steps of a token of each text
    y, new = call(weights, texts, x[column], np.ones((len(slots), 1), np.int32), {'slots': slots})
    outputs.append(y)
    places = {'slots': slots, 'starts': np.full(3, 3, np.int32)}
    texts = write_tokens(texts, new, lengths=np.ones(3, np.int32), **places)
    expected = write_tokens(expected, new, lengths=np.int32(np.array(num_read) > column), **places)

  owners, of_columns = np.array([0, 0, 0, 2, 2, 2, 3], np.int32), np.array([0, 1, 2, 0, 1, 2, 0], np.int32)
  none = len(owners)
  rows = np.array([[0, 1, 2], [none] * columns, [3, 4, 5]], np.int32)
  # Attention alone reads `earlier`.
  drafts = DraftRows(owners=owners, columns=of_columns, tokens=None, earlier=None, rows=rows, slots=slots)
  of_rows = x[of_columns, np.minimum(owners, 2)]
  row_slots = np.take([*slots, NUM_SLOTS], owners)
  is_token = (owners < 3).astype(np.int32)
  y, new = call(weights, before, of_rows, is_token[:, None], {'slots': row_slots, 'drafts': drafts})
  for row in range(6):
    np.testing.assert_allclose(y[row], outputs[of_columns[row]][owners[row]], rtol=1e-5, atol=1e-6)
  lengths = np.int32(of_columns < np.take([*num_read, 0], owners))
  after = write_tokens(before, new, np.full(none, 3, np.int32), lengths, slots=row_slots, drafts=drafts)
  assert sorted(after) == [f'cached_state_{name}' for name in ('key_tail', 'query_tail', 'state', 'value_tail')]
  for name, array in after.items():
    np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6)
    changed = [slot for slot in range(NUM_SLOTS) if np.any(array[slot] != before[name][slot])]
    assert changed == [0, 3]


@pytest.mark.parametrize('num_snapshots, num_drafts', [(0, 0), (7, 0), (None, 2)])
def test_the_memory_of_states_and_snapshots_counts(num_snapshots, num_drafts, monkeypatch):
  """A layer with 3 heads of values and one of keys, of 10 and 6 features; and 3 heads of attention, of 10."""
  state_bytes, block_bytes = 4 * (3 * 6 * 10 + 3 * (2 * 6 + 3 * 10)), 4 * 2 * 3 * 10 * CHUNK
  sizes = {'num_slots': 3, 'num_snapshots': num_snapshots, 'num_drafts': num_drafts, 'max_cache_tokens': None}
  num_kept = 3 if num_snapshots is None else num_snapshots
  num_states = 3 * (num_drafts + 2 if num_drafts else 1) + num_kept
  monkeypatch.setattr(decode_layout, 'free_bytes', lambda *_: num_states * state_bytes + 20.5 * block_bytes)
  layout = DecodeSteps(make_run('recurrent layers').model, dataclasses.replace(SETTINGS, max_len=64, **sizes)).layout
  assert (layout.num_blocks, layout.num_snapshots, layout.can_reuse) == (20, num_kept, num_kept > 0)
  assert layout.snapshot_bytes == num_kept * state_bytes
