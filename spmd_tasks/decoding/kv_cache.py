"""KvCache: the KV cache in one call of a model that generates text, so that no token is computed twice.

    with layer_scope(cache=KvCache(max_len=4096)):
      outputs, new = model.apply({'params': weights}, prompts, mutable='new_cache')                 # prefill
      outputs, new = model.apply({'params': weights, 'cache': cache}, batch, mutable='new_cache')   # step, or a chunk

Every attention writes the keys and values of the call's own tokens to the collection `new_cache`, and reads those of
earlier calls from the collection `cache`. The caller then writes `new` into `cache` (cache_arrays.py). Done once,
outside the loop over layers, the write is an update in place; in each layer it would copy the cache in every step.

A cache with S = the number of positions never wraps around. The cache of a layer with an attention window may have
S = the window, and wraps around as a ring buffer. In both cases the batch's `segment_pos` alone determines which
position an entry holds, and entries of an earlier sequence are not read. Each row holds one sequence; rows at different
positions share one step.

Other layers may have a state of fixed size per text (`advance_state`), which is in `new_cache` as it is after the
call's tokens.

Arrays are [B, G, S, K], in stacks of layers [L, B, G, S, K], which every layer gets whole: it reads blocks of its own
entries (`CachedArray`). With entries before heads, each step would transpose the whole cache for the matmuls.

Shapes: B batch (or slots), T tokens of this call, S cache entries, G key/value heads, K head dim.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from spmd_tasks.decoding.cache_arrays import (
  ENCODED,
  EXPERT_IDS,
  RING,
  SCALE,
  STATE,
  CachedArray,
  is_by_slot,
  quantize,
)
from spmd_tasks.decoding.cached_attention import EarlierTokens
from spmd_tasks.decoding.drafts import DraftRows
from spmd_tasks.layers.base import CACHE, NEW_CACHE
from spmd_tasks.sharding import SplitDims, constrain
from spmd_tasks.sharding.weights import WeightBox


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvCache:
  """Implements layers.cache.KvCache.

  Fields:
    max_len: the most tokens that a text can have; None: not known, and no array is a ring.
    dtype: of keys and values in the cache, one of cache_arrays.CACHE_DTYPES; None: the model's.
    implementation: of attention to the cache, 'pallas' or 'xla' (paged_attention.py); None: the best one.
    records_routing: whether the cache also stores which experts computed each token.
    slots: int32 [B], the slot of each row; None: row i is in slot i.
    tables: int32 [D, R, M], the blocks of each row, see CachedArray; None: arrays have one place per slot.
    drafts: says which rows are consecutive tokens of one text, if any are; T is then 1.
    layers: the layer's number in each loop over layers that it is in, from the outermost.
    arrays: the arrays of all layers, as a tree by path; `path` is the model's own.
  """

  max_len: int | None = None
  dtype: str | None = None
  implementation: str | None = None
  records_routing: bool = False
  slots: jax.Array | None = None
  tables: jax.Array | None = None
  drafts: DraftRows | None = None
  layers: tuple[jax.Array, ...] = ()
  arrays: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  path: tuple[str, ...] = ()

  def of_model(self, model: nn.Module) -> 'KvCache':
    return dataclasses.replace(self, arrays=model.variables.get(CACHE, {}), path=model.path)

  def in_layer(self, number: jax.Array) -> 'KvCache':
    return dataclasses.replace(self, layers=(*self.layers, number))

  def update(
    self,
    module: nn.Module,
    arrays: Mapping[str, jax.Array],
    split_dims: SplitDims,
    *,
    segment_ids: jax.Array | None = None,
    window: int | None = None,
  ) -> EarlierTokens | None:
    """Writes arrays [B, T, G, K] to `new_cache` as [B, G, T, K]. Returns what `cache` has; None in the first call.

    If T exceeds the window, only each row's last [B, G, window, K] are written: no later token sees the others.
    """
    num_rows, num_columns = next(iter(arrays.values())).shape[:2]
    written = arrays
    if window is not None and num_columns > window:
      if segment_ids is None:
        lengths = jnp.full((num_rows,), num_columns)
      else:
        lengths = jnp.sum(segment_ids != 0, axis=1)
      columns = jnp.maximum(lengths - window, 0)[:, None] + jnp.arange(window)[None, :]
      written = {name: jnp.take_along_axis(x, columns[:, :, None, None], axis=1) for name, x in arrays.items()}
    is_ring = window is not None and self.max_len is not None and window < self.max_len
    self._write(module, {f'{RING if is_ring else ""}{name}': x for name, x in written.items()}, split_dims)
    return self._earlier(_arrays_of(module), tuple(arrays), num_rows, split_dims)

  def read(self, path: tuple[str, ...], num_rows: int, split_dims: SplitDims) -> EarlierTokens | None:
    arrays: Mapping[str, Any] = self.arrays
    for name in path[len(self.path) :]:
      arrays = arrays.get(name, {})
    stacked = next((array.shape[:-4] for array in arrays.values()), ())
    of_last = dataclasses.replace(self, layers=tuple(jnp.int32(size - 1) for size in stacked))
    return of_last._earlier(arrays, ('key', 'value'), num_rows, split_dims)

  def _earlier(
    self, arrays: Mapping[str, Any], names: tuple[str, ...], num_rows: int, split_dims: SplitDims
  ) -> EarlierTokens | None:
    for kind in ('', RING):
      if f'cached_{kind}{names[0]}' in arrays:
        cached = [self._read(arrays, kind + name, num_rows) for name in names]
        return EarlierTokens(
          keys=cached[0],
          values=cached[-1],
          drafts=self.drafts,
          implementation=self.implementation,
          kv_split_dims=split_dims,
        )
    return None

  def advance_state(
    self,
    module: nn.Module,
    advance: Callable[[Any, Mapping[str, jax.Array]], tuple[jax.Array, Mapping[str, jax.Array]]],
    inputs: Any,
    segment_pos: jax.Array,
    split_dims: Mapping[str, SplitDims],
  ) -> jax.Array:
    """Writes arrays [B, ...] to `new_cache`; with drafts [k + 1, n, ...], the states after each token of n texts."""
    drafts = self.drafts
    if drafts is None:
      y, state = advance(inputs, self._read_state(module, segment_pos[:, 0], self.slots))
    else:
      # One token after another, as steps without drafts read them, from the same bits to the same bits.
      columns = jax.tree.map(drafts.by_column, inputs)
      first = self._read_state(module, drafts.by_column(segment_pos)[0, :, 0], drafts.slots)

      def read_column(state: Any, column: Any) -> tuple[Any, Any]:
        y, state = advance(column, state)
        state = {name: constrain(x, split_dims[name]) for name, x in state.items()}
        return state, (y, state)

      _, (y, state) = jax.lax.scan(read_column, first, columns)
      y = y[drafts.columns, jnp.minimum(drafts.owners, y.shape[1] - 1)]  # [R, 1, ...]
    for name, x in state.items():
      dims = tuple(split_dims[name] or (None,) * 4)
      box = WeightBox(value=x, split_dims=(None,) * (x.ndim - 4) + dims, tags=(), stacked=0)
      module.put_variable(NEW_CACHE, f'cached_{STATE}{name}', box)
    return y

  def _read_state(self, module: nn.Module, positions: jax.Array, slots: jax.Array | None) -> dict[str, jax.Array]:
    """Returns the state of each text, whose next token has these positions [B]; {} if there is none."""
    has_earlier, state, arrays = (positions > 0)[:, None, None, None], {}, _arrays_of(module)
    for name in arrays:
      if name.startswith(f'cached_{STATE}'):
        of_texts = dataclasses.replace(self, slots=slots)
        array = of_texts._read(arrays, name.removeprefix('cached_'), len(positions))
        stored = array.stored_entries(0, array.num_entries)
        state[name.removeprefix(f'cached_{STATE}')] = jnp.where(has_earlier, stored, jnp.zeros((), stored.dtype))
    return state

  def write_encoded(
    self, module: nn.Module, key: jax.Array, value: jax.Array, segment_ids: jax.Array, split_dims: SplitDims
  ) -> None:
    self._write(module, {ENCODED + 'key': key, ENCODED + 'value': value}, split_dims)
    segments = {ENCODED + 'segments': segment_ids[:, :, None, None]}
    self._write(module, segments, split_dims and (*split_dims[:2], None, None))

  def read_encoded(self, module: nn.Module, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array] | None:
    arrays = _arrays_of(module)
    if f'cached_{ENCODED}key' not in arrays:
      return None
    cached = (self._read(arrays, ENCODED + name, num_rows) for name in ('key', 'value', 'segments'))
    key, value, segments = (jnp.swapaxes(x.entries(0, x.num_entries), 1, 2) for x in cached)
    return key, value, segments[:, :, 0, 0]

  def write_routing(self, module: nn.Module, expert_ids: jax.Array, split_dims: SplitDims) -> None:
    if self.records_routing:
      rows = split_dims[0] if split_dims else None
      box = WeightBox(value=expert_ids[:, None], split_dims=(rows, None, None, None), tags=(), stacked=0)
      module.put_variable(NEW_CACHE, EXPERT_IDS, box)

  def _write(self, module: nn.Module, arrays: Mapping[str, jax.Array], split_dims: SplitDims) -> None:
    """Writes arrays [B, T, G, K] to `new_cache` as [B, G, T, K], quantized if they are float and there is a dtype."""
    rows, columns, heads, features = split_dims or (None,) * 4
    for name, x in arrays.items():
      x = jnp.swapaxes(x, 1, 2)
      stored = {name: (x, features)}
      if self.dtype is not None and jnp.issubdtype(x.dtype, jnp.floating):
        quantized, scale = quantize(x, self.dtype)
        stored = {name: (quantized, features), name + SCALE: (scale, None)}
      for stored_name, (value, last) in stored.items():
        box = WeightBox(value=value, split_dims=(rows, heads, columns, last), tags=(), stacked=0)
        module.put_variable(NEW_CACHE, f'cached_{stored_name}', box)

  def _read(self, arrays: Mapping[str, Any], name: str, num_rows: int) -> Any:
    """Returns the CachedArray of this name, for B rows; None if there is none."""
    array: Any = arrays.get(f'cached_{name}')
    if array is None:
      return None
    tables = self.tables
    if is_by_slot(f'cached_{name}'):
      tables = None if self.slots is None else self.slots[None, :, None]
    # A loop over layers that is not ours gives the arrays of one layer.
    scale = None if name.endswith(SCALE) else self._read(arrays, name + SCALE, num_rows)
    return CachedArray(array, self.layers[: array.ndim - 4], tables, num_rows, scale)


def _arrays_of(module: nn.Module) -> Mapping[str, Any]:
  return module.variables.get(CACHE, {})
