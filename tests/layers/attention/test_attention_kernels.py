"""The implementations of attention give the numbers of a plain computation in float64, forward and backward."""

import dataclasses
import functools
import math
import types

from absl import logging
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from spmd_tasks.errors import UserError
from spmd_tasks.layers.attention import _splash, implementations
from spmd_tasks.layers.attention._blockwise import attend_blockwise
from spmd_tasks.layers.attention._context import balance_tokens
from spmd_tasks.layers.attention._plain import AttentionOptions, attention_layout
from spmd_tasks.layers.attention.implementations import AttentionCall, attend, resolve_implementation
from spmd_tasks.layers.base import layer_scope
from spmd_tasks.planning import parse_target
from spmd_tasks.planning.targets import has_compiler
from spmd_tasks.sharding import MeshSpec
from spmd_tasks.sharding.specs import sharding_scope

HEADS = ('batch', 'seq', 'act_heads', None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A call of attention: [rows, length, heads, head_dim] queries, kv_heads keys and values of value_dim."""

  rows: int = 2
  length: int = 150
  heads: int = 4
  kv_heads: int = 2
  head_dim: int = 8
  value_dim: int = 8
  causal: bool = True
  window: int | None = None
  cap: float | None = None
  has_sinks: bool = False
  is_packed: bool = True
  has_prefix: bool = False  # the first tokens of each document
  dtype: str = 'float32'
  gradient_keys: int | None = None


CASES = {
  'window, sinks, cap': Case(window=40, has_sinks=True, cap=5.0, kv_heads=1),
}
MORE = {
  'one document': Case(is_packed=False, length=128, kv_heads=4),
  'packed': Case(),
  'not causal': Case(causal=False, is_packed=False),
  'not causal, packed': Case(causal=False),
  'window of one token': Case(window=1),
  'window longer than the row': Case(window=400, is_packed=False),
  'values of another size': Case(head_dim=24, value_dim=16, kv_heads=4),
  'one token': Case(length=1, is_packed=False),
  'long': Case(length=700, window=300, rows=1),
  'bfloat16': Case(dtype='bfloat16'),
}
EXHAUSTIVE = [pytest.param(case, id=name, marks=pytest.mark.exhaustive) for name, case in MORE.items()]
TABLE = [pytest.param(case, id=name) for name, case in CASES.items()] + EXHAUSTIVE


@functools.cache
def arguments(case: Case):
  """(query, key, value, sinks or None), segment ids or None; the last document of a row is padding."""
  rng = np.random.default_rng(0)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), case.dtype)

  query = normal(case.rows, case.length, case.heads, case.head_dim)
  key = normal(case.rows, case.length, case.kv_heads, case.head_dim)
  value = normal(case.rows, case.length, case.kv_heads, case.value_dim)
  sinks = jnp.asarray(rng.normal(size=case.heads), 'float32') if case.has_sinks else None
  segments = None
  if case.is_packed:
    starts = np.sort(rng.integers(1, case.length, size=(case.rows, 3)), axis=1)
    segments = (1 + (np.arange(case.length)[None, :, None] >= starts[:, None, :]).sum(-1)) % 4
  return (query, key, value, sinks), None if segments is None else jnp.asarray(segments, jnp.int32)


def reference(case: Case, arrays, segments) -> np.ndarray:
  """Attention in float64, one head after another."""
  query, key, value, sinks = (None if x is None else np.asarray(x, np.float64) for x in arrays)
  out = np.zeros((case.rows, case.length, case.heads, case.value_dim))
  distance = np.arange(case.length)[:, None] - np.arange(case.length)[None, :]
  for row in range(case.rows):
    may_see = np.ones_like(distance, bool)
    may_see &= distance >= 0 if case.causal else True
    may_see &= distance < case.window if case.window is not None else True
    if segments is not None:
      ids = np.asarray(segments[row])
      may_see &= ids[:, None] == ids[None, :]
    for head in range(case.heads):
      of_group = head // (case.heads // case.kv_heads)
      logits = query[row, :, head] @ key[row, :, of_group].T / np.sqrt(case.head_dim)
      if case.cap is not None:
        logits = case.cap * np.tanh(logits / case.cap)
      weights = np.where(may_see, np.exp(logits), 0.0)
      total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks[head]))
      out[row, :, head] = weights / total @ value[row, :, of_group]
  return out


def balanced_attend(*given, **options):
  """`attend` of tokens that are brought into the balanced order first."""
  *tokens, compared = given
  layout = attention_layout(HEADS, len(tokens[0]))
  with layer_scope(balanced_tokens=True):
    out = attend(*balance_tokens(tokens, layout), compared, **options)
  return balance_tokens(out, layout, back=True)


def values_and_gradients(case: Case, arrays, segments, attend=attend, **options):
  """The results and the gradients of a weighted sum of them, whose weights are the same for every implementation."""
  if case.has_prefix:
    same = segments[:, :, None] == segments[:, None, :]
    options['prefix_mask'] = jnp.sum(jnp.tril(same), axis=-1) < 5
  weight = jnp.asarray(np.random.default_rng(1).normal(size=(case.rows, case.length, case.heads, case.value_dim)))

  @jax.jit
  def compute(query, key, value, sinks):
    def total(arrays):
      *qkv, sinks = arrays
      compared = AttentionOptions(
        causal=case.causal,
        window=case.window,
        logit_cap=case.cap,
        sinks=sinks,
        gradient_keys=case.gradient_keys,
      )
      out = attend(*qkv, segments, compared, **options)
      return jnp.sum(out.astype(jnp.float32) * weight), out

    (_, out), gradients = jax.value_and_grad(total, has_aux=True)((query, key, value, sinks))
    return out, gradients

  return compute(*arrays)


@functools.cache
def plainly(case: Case):
  """The same of the plain computation on one device."""
  return values_and_gradients(case, *arguments(case), implementation='xla')


@pytest.fixture
def anywhere(monkeypatch):
  """Any implementation may be asked for: on other platforms than a TPU, 'splash' is interpreted."""
  monkeypatch.setattr(AttentionCall, 'obstacle', lambda self, implementation: None)


def assert_close(found, wanted, tolerance: float, what: str) -> None:
  """Within `tolerance` of the largest number of each array, or of 1 where all are smaller."""
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.isfinite(a).all(), what
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()), err_msg=what)


@pytest.mark.parametrize('case', TABLE)
@pytest.mark.usefixtures('anywhere')
def test_every_implementation_gives_the_same_numbers(case, monkeypatch):
  monkeypatch.setitem(attend_blockwise.__kwdefaults__, 'block', 48)
  arrays, segments = arguments(case)
  tolerance = 1e-5 if case.dtype == 'float32' else 2e-2
  wanted = plainly(case)
  assert_close(wanted[0], reference(case, arrays, segments), tolerance, 'xla against float64')
  for name in ('blockwise', 'splash'):
    found = values_and_gradients(case, arrays, segments, implementation=name)
    assert_close(found, wanted, tolerance, name)


# Rows, tokens and heads that no mesh here divides.
UNEVEN = Case(rows=3, heads=6, kv_heads=3, length=37, has_sinks=True, window=16, cap=5.0)
MESHES = [  # sizes of data, context and mdl
  ('splash', UNEVEN, (1, 2, 4)),
  ('blockwise', dataclasses.replace(UNEVEN, window=None, has_prefix=True), (2, 2, 2)),
  ('ring', UNEVEN, (1, 4, 2)),
]
MORE_MESHES = [
  ('splash', UNEVEN, (2, 1, 4)),
  ('splash', Case(length=500, has_sinks=True), (1, 2, 2)),
  *(('blockwise', UNEVEN, sizes) for sizes in ((2, 1, 4), (2, 2, 2))),
  *((name, dataclasses.replace(UNEVEN, heads=3), (3, 1, 2)) for name in ('splash', 'blockwise')),
  *((name, dataclasses.replace(UNEVEN, heads=8, kv_heads=2), (2, 1, 4)) for name in ('splash', 'blockwise')),
  *((name, dataclasses.replace(UNEVEN, heads=4, kv_heads=1), (1, 1, 8)) for name in ('splash', 'blockwise')),
  ('ring', Case(causal=False, is_packed=False, length=45), (2, 4, 1)),
  ('ring', Case(length=45, heads=6, kv_heads=2), (1, 8, 1)),
  ('splash', Case(length=700, window=300, heads=3, kv_heads=3), (1, 4, 2)),
  ('splash', Case(causal=False, is_packed=False), (1, 2, 1)),
  ('xla', Case(cap=5.0, is_packed=False), (1, 8, 1)),
  ('blockwise', Case(causal=False, is_packed=False, length=45), (1, 4, 1)),
]


@pytest.mark.parametrize(
  'name, case, sizes', MESHES + [pytest.param(*row, marks=pytest.mark.exhaustive) for row in MORE_MESHES]
)
@pytest.mark.usefixtures('anywhere')
def test_rows_sequences_and_heads_that_are_split_over_devices_have_the_same_numbers(name, case, sizes, monkeypatch):
  monkeypatch.setattr(implementations, 'BLOCK', 8)
  arrays, segments = arguments(case)
  axis_names = ('data', 'context', 'mdl')
  mesh = MeshSpec(axis_names=axis_names, ici_mesh_shape=sizes).build(jax.devices()[: math.prod(sizes)])
  rules = (('batch', 'data'), ('seq', 'context'), ('act_heads', 'mdl'))
  with sharding_scope(mesh, rules):
    found = values_and_gradients(case, arrays, segments, split_dims=HEADS, implementation=name)
  assert_close(found, plainly(case), 1e-5, name)


@pytest.mark.parametrize('name', ['splash', pytest.param('xla', marks=pytest.mark.exhaustive)])
@pytest.mark.usefixtures('anywhere')
def test_tokens_may_come_in_the_balanced_order_and_one_kernel_compute_all_gradients(name):
  case = Case(rows=1, length=1024, heads=2, kv_heads=1, head_dim=24, value_dim=16, window=700, gradient_keys=512)
  arrays, segments = arguments(case)
  mesh = MeshSpec(axis_names=('context',), ici_mesh_shape=(2,)).build(jax.devices()[:2])
  with sharding_scope(mesh, (('batch', None), ('seq', 'context'), ('act_heads', None))):
    settings = {'split_dims': HEADS, 'implementation': name, 'attend': balanced_attend}
    found = values_and_gradients(case, arrays, segments, **settings)
  assert_close(found, plainly(case), 1e-5, name)


@pytest.mark.usefixtures('anywhere')
def test_splash_has_the_same_numbers_where_products_take_all_heads_at_once(monkeypatch):
  """Of one document."""
  monkeypatch.setattr(_splash, 'current_device', lambda: types.SimpleNamespace(device_kind='TPU7x'))
  case = Case(rows=1, length=128, heads=2, kv_heads=1, head_dim=128, value_dim=128, is_packed=False)
  arrays, segments = arguments(case)
  assert_close(values_and_gradients(case, arrays, segments, implementation='splash'), plainly(case), 1e-5, 'TPU7x')


@pytest.mark.parametrize('name', ['splash', pytest.param('ring', marks=pytest.mark.exhaustive)])
@pytest.mark.usefixtures('anywhere')
def test_kernels_run_inside_the_stages_of_a_pipeline(name):
  (query, key, value, _), segments = arguments(Case(length=40, heads=2))
  wanted = attend(query, key, value, segments, implementation='xla')
  mesh = MeshSpec(axis_names=('stage', 'context', 'mdl'), ici_mesh_shape=(2, 2, 2)).build()

  def stage(query, key, value, segments):
    rules = (('batch', None), ('seq', 'context'), ('act_heads', 'mdl'))
    with sharding_scope(jax.sharding.get_abstract_mesh(), rules):
      return attend(query[0], key[0], value[0], segments[0], split_dims=HEADS, implementation=name)[None]

  stages = jax.shard_map(
    stage,
    mesh=mesh,
    axis_names={'stage'},
    in_specs=(PartitionSpec('stage'),) * 4,
    out_specs=PartitionSpec('stage'),
    check_vma=False,
  )
  found = jax.jit(stages)(*(jnp.stack([x, x]) for x in (query, key, value, segments)))
  assert_close(list(found), [wanted, wanted], 1e-5, name)


CALL = AttentionCall(platform='tpu', dtype='bfloat16', length=4096, head_dim=128, value_dim=128)


@pytest.mark.parametrize(
  'changes, name, reason',
  [
    ({}, 'splash', "platform 'tpu'"),
    ({'platform': 'gpu'}, 'cudnn', "platform 'gpu'"),
    ({'platform': 'gpu', 'dtype': 'float32'}, 'blockwise', 'not float32'),
    ({'platform': 'gpu', 'has_sinks': True}, 'blockwise', 'sinks'),
    ({'platform': 'gpu', 'has_cudnn': False}, 'blockwise', 'plugin for CUDA'),
    ({'platform': 'gpu', 'value_dim': 64, 'length': 100}, 'xla', 'not 128 and 64'),
    ({'platform': 'cpu'}, 'blockwise', "4096 tokens on 'cpu'"),
  ],
)
def test_the_best_implementation_is_chosen_and_logged_once(changes, name, reason, monkeypatch):
  call, lines = dataclasses.replace(CALL, **changes), []
  monkeypatch.setattr(logging, 'info', lambda line, *values: lines.append(line % values))
  implementations._best_implementation.cache_clear()
  assert [resolve_implementation(None, call), resolve_implementation(None, call)] == [name, name]
  assert [reason in line for line in lines] == [True]


@pytest.mark.parametrize(
  'asked, changes, message',
  [
    ('flash', {}, "'flash'.* unknown: choose one of xla, blockwise"),
    ('splash', {'platform': 'cpu'}, "platform 'cpu'"),
    ('cudnn', {'platform': 'gpu', 'num_token_parts': 2}, 'into 2 parts'),
    ('ring', {}, 'mesh axis of several devices'),
    ('cudnn', {'platform': 'gpu', 'head_dim': 256, 'value_dim': 256}, r'at most 128 \(256 from Hopper on\), not 256'),
  ],
)
def test_what_is_asked_for_and_cannot_be_had_is_an_error(asked, changes, message):
  with pytest.raises(UserError, match=message):
    resolve_implementation(asked, dataclasses.replace(CALL, **changes))


def compiled_gradients(case: Case, target: str, axes: dict[str, int], rules, implementation=None) -> str:
  """The program for the gradients of a call, compiled for devices that this machine does not have."""
  mesh = MeshSpec(axis_names=tuple(axes), ici_mesh_shape=tuple(axes.values())).build(parse_target(target).devices())
  arrays, segments = arguments(case)
  options = AttentionOptions(window=case.window)

  def loss(query, key, value, segments):
    with sharding_scope(mesh, rules):
      return attend(query, key, value, segments, options, split_dims=HEADS, implementation=implementation).sum()

  replicated = NamedSharding(mesh, PartitionSpec())
  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated) for x in (*arrays[:3], segments)]
  return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile().as_text()


def test_splash_compiles_for_a_tpu():
  pytest.importorskip('libtpu', reason="the TPU compiler is not installed: pip install '.[plan-tpu]'")
  case = Case(heads=3, kv_heads=3, head_dim=20, value_dim=20, length=300, window=100, dtype='bfloat16')
  rules = (('batch', None), ('seq', 'context'), ('act_heads', 'mdl'))
  text = compiled_gradients(case, 'v5p:2x2x1', {'context': 2, 'mdl': 2}, rules)
  assert text.count('custom_call_target="tpu_custom_call"') == 3  # forward, and two of the backward pass


@pytest.mark.skipif(not has_compiler('gpu'), reason="CUDA is not installed: pip install '.[plan-gpu]'")
def test_cudnn_compiles_for_a_gpu():
  case = Case(heads=3, kv_heads=3, head_dim=256, value_dim=256, length=301, window=100, dtype='bfloat16')
  rules = (('batch', 'data'), ('seq', None), ('act_heads', 'mdl'))
  text = compiled_gradients(case, 'h200:8', {'data': 2, 'mdl': 4}, rules, 'cudnn')
  assert text.count('custom_call_target="__cudnn$fmhaSoftmax') == 2  # by the offsets of documents
  assert text.count('custom_call_target="__cudnn$fmhaScaleBias') == 2  # where they do not fit
