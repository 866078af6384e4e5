"""Attention to cached tokens against attention to the whole text, by numpy in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tasks.decoding import cached_attention
from spmd_tasks.decoding.cache_arrays import CachedArray, quantize
from spmd_tasks.decoding.cached_attention import EarlierTokens
from spmd_tasks.decoding.drafts import DraftRows
from spmd_tasks.layers.attention._plain import AttentionOptions, split_into_chunks

STARTS = (0, 1, 7, 12, 20)  # how many tokens of each text are cached
BLOCK, MAX_LEN = 4, 24
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 6
DRAFTED = (3, 1, 2, 3, 2)  # rows of each text in a step that checks drafts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A call of `num_columns` tokens of each text, or with `drafts` of a row for each of DRAFTED.

  The cache has `blocks`, or one place per text: of MAX_LEN entries, or with `ring` of as many as the window, or
  `chunk`, has tokens.
  """

  num_columns: int = 1
  blocks: bool = True
  ring: bool = False
  window: int | None = None
  chunk: int | None = None
  cap: float | None = None
  has_sinks: bool = False
  dtype: str | None = None
  drafts: bool = False


CASES = {
  'one token, blocks, sinks, cap': Case(has_sinks=True, cap=0.7),
  'chunk, blocks, window': Case(num_columns=4, window=5),
  'parts of a text, blocks': Case(num_columns=4, chunk=5),
  'parts of a text, ring': Case(num_columns=3, blocks=False, ring=True, chunk=8),
  'drafts, parts of a text': Case(drafts=True, chunk=6),
  'chunk, whole rows, cap': Case(num_columns=3, blocks=False, cap=0.7),
  'one token, ring': Case(blocks=False, ring=True, window=6),
  'chunk, ring, sinks': Case(num_columns=4, blocks=False, ring=True, window=6, has_sinks=True),
  'int8': Case(num_columns=2, dtype='int8'),
  'float8': Case(dtype='float8_e4m3fn'),
  'drafts, blocks, sinks': Case(drafts=True, has_sinks=True),
  'drafts, ring': Case(drafts=True, blocks=False, ring=True, window=6),
  'drafts, int8, window': Case(drafts=True, dtype='int8', window=2),
}


def whole_text(query, keys, values, position, case: Case, sinks):
  """Attention [H, K] of the token at `position`, with the query [H, K], to keys and values [S, G, K] of its text."""
  first = 0 if case.window is None else max(position - case.window + 1, 0)
  if case.chunk is not None:
    first = position - position % case.chunk
  attended = np.zeros(query.shape)
  for head in range(HEADS):
    group = head // (HEADS // KV_HEADS)
    logits = keys[first : position + 1, group] @ query[head] / np.sqrt(HEAD_DIM)
    if case.cap is not None:
      logits = case.cap * np.tanh(logits / case.cap)
    weights = np.exp(logits)
    total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
    attended[head] = weights @ values[first : position + 1, group] / total
  return attended


def stored(texts, case: Case, rng):
  """The CachedArrays of texts [B, S, G, K], whose entries behind STARTS are of an earlier text, as the model has it."""
  num_entries = case.window or case.chunk if case.ring else MAX_LEN
  rows = rng.normal(0, 30, (3, len(STARTS), KV_HEADS, num_entries, HEAD_DIM)).astype(np.float32)
  for row, start in enumerate(STARTS):
    for position in range(start):
      rows[1, row, :, position % num_entries] = texts[row, position]
  if not case.blocks:
    return rows, None
  num_blocks = MAX_LEN // BLOCK
  tables = rng.permutation(len(STARTS) * num_blocks).reshape(1, len(STARTS), num_blocks).astype(np.int32)
  pool = np.zeros((3, tables.size, KV_HEADS, BLOCK, HEAD_DIM), np.float32)
  for row, table in enumerate(tables[0]):
    for number, block in enumerate(table):
      pool[:, block] = rows[:, row, :, number * BLOCK : (number + 1) * BLOCK]
  return pool, tables


def draft_rows():
  """The rows of DRAFTED, and one that is not used."""
  num_texts, num_rows, longest = len(STARTS), sum(DRAFTED) + 1, max(DRAFTED)
  owners, columns = np.full(num_rows, num_texts), np.zeros(num_rows)
  earlier, rows = np.full((num_rows, longest - 1), num_rows), np.full((num_texts, longest), num_rows)
  row = 0
  for text, count in enumerate(DRAFTED):
    for column in range(count):
      owners[row], columns[row], rows[text, column] = text, column, row
      earlier[row, :column] = row - 1 - np.arange(column)
      row += 1
  return DraftRows(*(x.astype(np.int32) for x in (owners, columns, columns, earlier, rows)))


@pytest.mark.parametrize('name', CASES)
def test_cached_tokens_count_as_in_the_whole_text(name, rng, monkeypatch):
  case = CASES[name]
  monkeypatch.setitem(cached_attention._BLOCK, 'cpu', BLOCK + 1)
  texts = rng.normal(size=(2, len(STARTS), MAX_LEN + 4, KV_HEADS, HEAD_DIM)).astype(np.float32)
  sinks = rng.normal(size=HEADS).astype(np.float32) if case.has_sinks else None
  arrays, tables = zip(*(stored(x, case, np.random.default_rng(0)) for x in texts), strict=True)
  drafts = draft_rows() if case.drafts else None
  if drafts is None:
    owners, columns = np.arange(len(STARTS)), np.arange(case.num_columns)[None]
  else:
    owners, columns = np.minimum(drafts.owners, len(STARTS) - 1), drafts.columns[:, None]
  positions = (np.array(STARTS)[owners, None] + columns).astype(np.int32)
  keys, values = texts[:, owners[:, None], positions]
  query = rng.normal(size=(*positions.shape, HEADS, HEAD_DIM)).astype(np.float32)

  @jax.jit
  def attend(query, keys, values, arrays, tables):
    def cached(array):
      if tables is None:  # one place per text, and several rows of a text with drafts
        whose = None if drafts is None else jnp.asarray(owners, jnp.int32)[None, :, None]
      else:
        whose = tables[:, owners]
      array, scale = (array, None) if case.dtype is None else quantize(array, case.dtype)
      result = CachedArray(array, (jnp.int32(1),), whose, len(query))
      return result if scale is None else result._replace(scale=result._replace(array=scale))

    earlier = EarlierTokens(keys=cached(arrays[0]), values=cached(arrays[1]), drafts=drafts)
    options = AttentionOptions(window=case.window, chunk=case.chunk, logit_cap=case.cap, sinks=sinks)
    segment_ids = None if case.chunk is None else split_into_chunks(None, jnp.asarray(positions), case.chunk)
    return earlier.attend(query, keys, values, segment_ids, jnp.asarray(positions), options)

  actual = attend(query, keys, values, [*map(jnp.asarray, arrays)], tables[0])
  if case.dtype is not None:  # the call's own token is as the model has it, all others as they are stored
    as_stored = [
      np.asarray(values.astype(np.float32) * scale)
      for values, scale in (quantize(jnp.asarray(x), case.dtype) for x in texts)
    ]
  for row, text in enumerate(owners if drafts is None else drafts.owners):
    for column, position in enumerate(positions[row]):
      if text == len(STARTS):
        continue
      of_text = texts[:, text].astype(np.float64)
      if case.dtype is not None:
        own = position if drafts is not None else STARTS[text]
        of_text[:, :own] = [x[text, :own] for x in as_stored]
      expected = whole_text(query[row, column], *of_text, position, case, sinks)
      np.testing.assert_allclose(actual[row, column], expected, rtol=2e-5, atol=2e-5)


def test_padding_and_other_rows_change_no_bit(rng):
  """A row's result is the same alone, with padding behind it, and beside longer rows."""
  keys, values = rng.normal(size=(2, 2, KV_HEADS, MAX_LEN, HEAD_DIM)).astype(np.float32)
  query = rng.normal(size=(2, 3, HEADS, HEAD_DIM)).astype(np.float32)
  new = rng.normal(size=(2, 3, KV_HEADS, HEAD_DIM)).astype(np.float32)
  segment_ids = np.array([[1, 1, 0], [1, 1, 1]], np.int32)

  @jax.jit
  def attend(positions):
    cached = [CachedArray(x, (), None, len(query)) for x in (keys, values)]
    earlier = EarlierTokens(keys=cached[0], values=cached[1])
    return earlier.attend(query, new, new, segment_ids, positions, AttentionOptions())

  short, long = (attend(np.array([[5], [start]], np.int32) + np.arange(3)) for start in (0, MAX_LEN - 3))
  np.testing.assert_array_equal(short[0, :2], long[0, :2])
