"""Kernels that read the pages of a KV cache give the numbers of the loop over its blocks."""

import contextlib
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from spmd_tasks.decoding import paged_attention, paged_attention_gpu
from spmd_tasks.decoding.cache_arrays import CachedArray, quantize
from spmd_tasks.decoding.cached_attention import EarlierTokens
from spmd_tasks.decoding.drafts import DraftRows
from spmd_tasks.decoding.partial_softmax import Queries
from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention._plain import AttentionOptions
from spmd_tasks.planning import parse_target
from spmd_tasks.planning.targets import has_compiler
from spmd_tasks.sharding import MeshSpec
from spmd_tasks.sharding.specs import sharding_scope

HEADS, KV_HEADS = ('batch', None, 'heads', None), ('batch', None, 'kv_heads', None)
LATENT = ('batch', None, None, None)
RULES = (('batch', 'data'), ('heads', 'mdl'), ('kv_heads', 'mdl'))
BLOCK, TABLE = 16, 4
LENGTHS = (0, 1, BLOCK, 2 * BLOCK + 1, TABLE * BLOCK)  # of what rows have in the cache
DRAFTED = (3, 1, 2, 3, 1)  # how many rows each of these texts has, and in two parts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A call of `columns` tokens for rows with LENGTHS entries; `is_latent`: the values are the keys.

  With `drafts` a row has one token, and a text as many rows as DRAFTED says.
  """

  columns: int = 1
  heads: int = 4
  kv_heads: int = 2
  head_dim: int = 64
  is_latent: bool = False
  has_sinks: bool = False
  window: int | None = None
  cap: float | None = None
  dtype: str = 'float32'
  mesh: tuple[int, int] | None = None
  cache_dtype: str | None = None
  drafts: bool = False


CASES = {
  'one token, grouped heads': Case(has_sinks=True),
  'chunk, one head, window, cap': Case(columns=3, kv_heads=1, window=20, cap=2.0, dtype='bfloat16'),
  'latent, queries split over a mesh': Case(columns=2, kv_heads=1, head_dim=80, is_latent=True, mesh=(2, 4)),
  'rows and heads split over a mesh': Case(heads=8, kv_heads=4, mesh=(2, 4)),
  'drafts, window, cap': Case(has_sinks=True, window=20, cap=2.0, drafts=True),
  'drafts, latent': Case(kv_heads=1, head_dim=80, is_latent=True, drafts=True),
  'drafts, split over a mesh': Case(heads=8, kv_heads=4, mesh=(2, 4), drafts=True),
  '8 bits, split over a mesh': Case(heads=8, kv_heads=4, cache_dtype='int8', mesh=(2, 4)),
  '8 bits, drafts': Case(cache_dtype='int8', drafts=True),
}
# Each of drafts, latent attention, windows, 8 bits and meshes is in one of the other cases.
_FURTHER = ('rows and heads split over a mesh', 'drafts, window, cap', 'drafts, latent', '8 bits, split over a mesh')
MARKS = dict.fromkeys(_FURTHER, pytest.mark.exhaustive)


def arguments(case: Case):
  """(query, key, value, keys and values in blocks of 3 layers, tables), positions [B, T], and the layer's number."""
  rng = np.random.default_rng(0)
  parts = 1 if case.mesh is None else case.mesh[0]
  rows_of_part = -(-len(LENGTHS) // parts)
  part = rows_of_part * TABLE + 2

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), case.dtype)

  tables = np.full((parts, rows_of_part, TABLE), part, np.int32)
  free = [iter(rng.permutation(part)) for _ in range(parts)]
  for row, length in enumerate(LENGTHS):
    used = -(-length // BLOCK)
    number, place = divmod(row, rows_of_part)
    tables[number, place, :used] = [next(free[number]) for _ in range(used)]
  key, value = (normal(len(LENGTHS), case.columns, case.kv_heads, case.head_dim) for _ in range(2))
  keys, values = (normal(3, parts * part, case.kv_heads, BLOCK, case.head_dim) for _ in range(2))
  query = normal(len(LENGTHS), case.columns, case.heads, case.head_dim)
  if case.is_latent:
    value, values = key, keys
  sinks = normal(case.heads) if case.has_sinks else None
  positions = np.array(LENGTHS, np.int32)[:, None] + np.arange(case.columns, dtype=np.int32)[None]
  return (query, key, value, keys, values, jnp.asarray(tables), sinks), positions, jnp.int32(1)


def draft_rows(num_parts: int):
  """The rows of DRAFTED, those of a text in its part, and then some that are not used."""
  num_texts, of_part = len(LENGTHS), -(-len(LENGTHS) // num_parts)
  num_rows = num_parts * (sum(DRAFTED[:of_part]) + 1)
  earlier, rows = np.full((num_rows, 2), num_rows), np.full((num_texts, 3), num_rows)
  owners, columns = np.full(num_rows, num_texts), np.zeros(num_rows, int)
  free = [iter(range(part * num_rows // num_parts, num_rows)) for part in range(num_parts)]
  for text, count in enumerate(DRAFTED):
    for column in range(count):
      row = next(free[text // of_part])
      owners[row], columns[row], rows[text, column] = text, column, row
      earlier[row, :column] = row - 1 - np.arange(column)
  return DraftRows(*(x.astype(np.int32) for x in (owners, columns, columns, earlier, rows)))


def attend(case: Case, how: str):
  given, positions, layer = arguments(case)
  drafts = None
  if case.drafts:
    drafts = draft_rows(len(given[5]))
    rng, texts = np.random.default_rng(1), np.minimum(drafts.owners, len(LENGTHS) - 1)
    tokens = [jnp.asarray(rng.normal(size=(len(texts), *x.shape[1:])), x.dtype) for x in given[:3]]
    tokens[2] = tokens[1] if case.is_latent else tokens[2]
    tables = given[5].reshape(-1, TABLE)[texts].reshape(len(given[5]), -1, TABLE)
    given, positions = (*tokens, *given[3:5], tables, given[6]), jnp.asarray(positions[texts] + drafts.columns[:, None])
  mesh = None if case.mesh is None else MeshSpec(axis_names=('data', 'mdl'), ici_mesh_shape=case.mesh).build()

  @jax.jit
  def compute(query, key, value, keys, values, tables, sinks, layer):
    cached = tuple(CachedArray(x, (layer,), tables, len(query)) for x in (keys, values))
    if case.is_latent:
      cached = cached[:1] * 2
    if case.cache_dtype:
      kept = [(x, *quantize(x.array, case.cache_dtype)) for x in cached]
      cached = tuple(x._replace(array=array, scale=x._replace(array=scale)) for x, array, scale in kept)
    options = AttentionOptions(window=case.window, logit_cap=case.cap, sinks=sinks)
    kv_split_dims = LATENT if case.is_latent else KV_HEADS
    earlier = EarlierTokens(
      keys=cached[0], values=cached[1], drafts=drafts, implementation=how, kv_split_dims=kv_split_dims
    )
    with contextlib.nullcontext() if mesh is None else sharding_scope(mesh, RULES):
      return earlier.attend(query, key, value, None, positions, options, split_dims=HEADS)

  attended = np.asarray(compute(*given, layer), np.float32)
  return attended if drafts is None else attended[drafts.owners < len(LENGTHS)]


@pytest.mark.parametrize('name', [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def test_the_kernel_gives_the_numbers_of_the_loop(name, monkeypatch):
  case = CASES[name]
  expected = attend(case, 'xla')
  monkeypatch.setattr(paged_attention, 'kernel_of', lambda platform: paged_attention_gpu)
  monkeypatch.setattr(paged_attention_gpu, '_MOST_ENTRIES', BLOCK)
  monkeypatch.setattr(paged_attention_gpu, '_DEVICES', re.compile(''))
  interpreted = functools.partial(paged_attention_gpu.attend_to_pages, interpret=True)
  monkeypatch.setattr(paged_attention_gpu, 'attend_to_pages', interpreted)
  tolerance = 2e-2 if case.dtype == 'bfloat16' else 1e-5
  np.testing.assert_allclose(attend(case, 'pallas'), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
  'changes, message',
  [
    ({}, "platform 'cpu'"),
    ({'tables': None}, None),  # whole rows have no pages
    ({'num_entries': 8}, None),  # nor has a ring
    ({'head_dim': 120}, 'divisible by 16'),
    ({'dtype': 'float64'}, 'float64'),
    ({'device': 'A100'}, 'cpu'),
  ],
)
def test_what_the_kernel_cannot_compute_is_refused(changes, message, monkeypatch):
  if changes:
    monkeypatch.setattr(paged_attention, 'kernel_of', lambda platform: paged_attention_gpu)
    monkeypatch.setattr(paged_attention_gpu, '_DEVICES', re.compile(changes.get('device', '')))
  num_entries, head_dim = changes.get('num_entries', BLOCK), changes.get('head_dim', 128)
  array = jax.ShapeDtypeStruct((2, 9, 2, num_entries, head_dim), 'bfloat16')
  tables = jax.ShapeDtypeStruct((1, 1, 1 if 'num_entries' in changes else TABLE), jnp.int32)
  keys = CachedArray(array, (jnp.int32(0),), changes.get('tables', tables), 1)
  query = jax.ShapeDtypeStruct((1, 2, 2, 1, head_dim), changes.get('dtype', 'bfloat16'))
  positions = jax.ShapeDtypeStruct((1, 1), jnp.int32)
  queries = Queries(query, positions, AttentionOptions(window=8))
  is_error = contextlib.nullcontext() if message is None else pytest.raises(UserError, match=message)
  with is_error:
    assert paged_attention.attend_to_pages(queries, keys, keys, 'pallas', None, None) is None
  assert paged_attention.attend_to_pages(queries, keys, keys, None, None, None) is None


@pytest.mark.skipif(not has_compiler('gpu'), reason="CUDA is not installed: pip install '.[plan-gpu]'")
@pytest.mark.filterwarnings('ignore:The Pallas Triton backend is deprecated:DeprecationWarning')  # from jax 0.11 on
@pytest.mark.parametrize('target', ['h100:8', 'b200:8'])
def test_the_kernel_compiles_for_gpus_and_copies_no_cache(target):
  mesh = MeshSpec(axis_names=('data', 'mdl'), ici_mesh_shape=(2, 4)).build(parse_target(target).devices())

  def compute(query, key, pages, tables, positions, layer):
    cached = CachedArray(pages, (layer,), tables, len(query))
    earlier = EarlierTokens(keys=cached, values=cached, implementation='pallas', kv_split_dims=KV_HEADS)
    with sharding_scope(mesh, RULES):
      return earlier.attend(query, key, key, None, positions, AttentionOptions(), split_dims=HEADS)

  def shape(*sizes, dtype='bfloat16', split=()):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec(*split)))

  of_heads = ('data', None, 'mdl')
  given = [shape(4, 1, 32, 128, split=of_heads), shape(4, 1, 8, 128, split=of_heads)]
  given += [shape(3, 64, 8, BLOCK, 128, split=(None, 'data', 'mdl')), shape(2, 2, 9, dtype='int32', split=('data',))]
  given += [shape(4, 1, dtype='int32', split=('data',)), shape(dtype='int32')]
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    compiled = jax.jit(compute).lower(*given).compile()
  text = compiled.as_text()
  assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 1
  assert not re.search(r'= bf16\[(3,)?32,2,16,128\]\S* (?!parameter)', text)
