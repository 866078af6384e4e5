"""DecodeLayout: the shapes and shardings of a DecodeState on a mesh, and the blocks of its KV cache.

    layout = DecodeLayout(model)
    layout.padded_state       # the DecodeState as abstract arrays with shardings
    layout.own_blocks(2)      # the blocks of slot 2 if each slot has its own

The mesh splits slots and blocks into the same D parts, and the blocks of a slot are in the part of the slot.

Shapes: N slots, S positions of a text, C snapshots, b tokens of a block, M blocks of a text, B blocks in D parts.
"""

from collections.abc import Sequence
import functools
import math
import operator
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from spmd_tasks.decoding.cache_arrays import has_blocks, is_snapshot, is_state
from spmd_tasks.decoding.decode_model import DecodeModel
from spmd_tasks.decoding.decode_state import empty_state
from spmd_tasks.decoding.weight_storage import free_bytes, local_bytes
from spmd_tasks.errors import UserError
from spmd_tasks.sharding import padding
from spmd_tasks.sharding.specs import num_parts, spec_axes

# Platform -> positions of a block, if chunks of prompts are a multiple of it. A TPU gathers few long blocks.
_BLOCK_TOKENS, _SHORT_BLOCK_TOKENS = {'tpu': 64}, 16
# Platform -> tokens of a chunk. On a CPU, 64 tokens after 4,000 take as long as two steps of 32 texts. Elsewhere a step
# reads all weights anyway, and more tokens add little.
_CHUNK, _LONG_CHUNK = {'cpu': 64}, 256
_LEAST_FEATURES = 64  # of a head, which fill half of a TPU's rows of 128 numbers


class DecodeLayout:
  """The layout of the state of a model's N slots.

  Attributes:
    prefill_chunk: the length at which prompts are cut: the setting's, at most S; S if a prompt sees itself in both
      directions.
    block_tokens, table_len: b and M.
    num_blocks, num_parts: B and D.
    slots_per_part, blocks_per_part: N / D, rounded up, and B / D.
    num_snapshots: C, how many states of prompts' beginnings are kept: the setting's number, rounded up to a multiple of
      D; 0 if no layer has a state, or no text has several chunks.
    can_reuse: whether prompts that begin alike can share blocks; False if a layer's cache is a ring, or a state without
      snapshots, or if a token sees more than the tokens before it, as in encoder-decoders.
    reads_cache: whether first chunks are read by the same program as later ones, with tables.
    abstract_state: the DecodeState with true shapes.
    padded_state: the DecodeState as it is stored, with padded shapes and shardings.
    state_shardings: the shardings of `padded_state`, with the memory layouts that are not left to the compiler.
  """

  def __init__(
    self, model: DecodeModel, *, draft_model: DecodeModel | None = None, target: 'DecodeLayout | None' = None
  ):
    """Plans the layout.

    Args:
      model: the model.
      draft_model: the draft model, whose cache has the same number of blocks in the same memory.
      target: for a draft model, the layout of the model that checks its drafts.

    Raises:
      UserError: the memory has no room for a text of S tokens, or a draft model cannot draft for its target.
    """
    settings, num_slots = model.settings, model.settings.num_slots
    self._model = model
    self.prefill_chunk: int = self._chunk_tokens() if target is None else target.prefill_chunk
    cache, specs = model.abstract_cache(num_slots)
    leaves = jax.tree_util.tree_flatten_with_path(cache)[0]
    slot_axes = [spec_axes(spec, leaf.ndim)[-4] for spec, leaf in zip(*map(jax.tree.leaves, (specs, cache)))]
    self.num_parts = max(num_parts(axes, model.mesh.shape) for axes in slot_axes)
    self.slots_per_part = -(-num_slots // self.num_parts)
    # Chunks that texts share end where a block ends.
    has_later_chunks = self.prefill_chunk < model.max_len
    block = _BLOCK_TOKENS.get(model.platform, _SHORT_BLOCK_TOKENS)
    self.block_tokens = math.gcd(self.prefill_chunk, block) if has_later_chunks else min(model.max_len, block)
    self.table_len = -(-model.max_len // self.block_tokens)
    is_stateful = model.has_states or (draft_model is not None and draft_model.has_states)
    wanted = num_slots if settings.num_snapshots is None else settings.num_snapshots
    of_part = -(-wanted // self.num_parts) if is_stateful and has_later_chunks and settings.num_beams == 1 else 0
    self.num_snapshots: int = self.num_parts * of_part if target is None else target.num_snapshots
    is_shareable = all(has_blocks(path) or is_state(path) for path, _ in leaves)
    is_shareable &= model.encoder_len is None and not model.has_prefix
    self.can_reuse = is_shareable and (self.num_snapshots > 0 or not is_stateful)
    self.reads_cache = has_later_chunks and self.num_parts == 1 and model.encoder_len is None
    if target is None:
      self.blocks_per_part = self._count_blocks(draft_model)
    else:
      self._check_draft(target, is_shareable)
      self.blocks_per_part = target.blocks_per_part
    self.num_blocks = self.num_parts * self.blocks_per_part
    by_slot = [leaf for path, leaf in leaves if not has_blocks(path) and not is_state(path)]
    if settings.num_drafts and by_slot:
      rings = [] if model.encoder_len else [leaf.shape[-2] for leaf in by_slot]
      if self.num_parts > 1 or min(rings, default=model.max_len) <= settings.num_drafts:
        raise UserError(
          f'num_drafts={settings.num_drafts}: a model with attention windows or an encoder checks fewer drafts than '
          'the shortest window has tokens, and none on a mesh that splits slots: set task.decode.num_drafts=0.'
        )

    cache, specs = model.abstract_cache(num_slots, (self.num_blocks, self.block_tokens), self.num_snapshots)
    empty = functools.partial(
      empty_state,
      num_slots=num_slots,
      vocab_size=model.vocab_size,
      num_stop_ids=settings.max_stop_ids,
      num_drafts=len(model.heads),
    )
    self.abstract_state = jax.eval_shape(lambda: empty(cache))
    replicated = NamedSharding(model.mesh, PartitionSpec())
    shardings = jax.tree.map(lambda _: replicated, self.abstract_state)
    shardings = shardings.replace(cache=jax.tree.map(self._cache_format, cache, specs))
    self.padded_state = jax.tree.map(self._padded, self.abstract_state, shardings)
    self.state_shardings = jax.tree.map(sharding_or_format, self.padded_state)

  @property
  def snapshot_bytes(self) -> int:
    """The bytes of all snapshots on each device."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(self.padded_state.cache)
    return sum(local_bytes(leaf) for path, leaf in leaves if is_snapshot(path))

  def own_blocks(self, slot: int) -> tuple[int, ...]:
    """Returns the blocks of a slot if each slot has its own."""
    part, number = divmod(slot, self.slots_per_part)
    first = part * self.blocks_per_part + number * self.table_len
    return tuple(range(first, first + self.table_len))

  def prefill_tables(self, blocks: Sequence[Sequence[int]], num_rows: int) -> np.ndarray:
    """Returns the tables of a prefill's rows, int32 [1, P, M], from the blocks of the first ones."""
    tables = np.zeros((1, num_rows, self.table_len), np.int32)
    tables += (self.num_blocks + np.arange(num_rows, dtype=np.int32))[:, None]
    for row, row_blocks in zip(tables[0], blocks, strict=False):
      row[: len(row_blocks)] = row_blocks
    return tables

  def empty_tables(self, num_rows: int) -> np.ndarray:
    """Returns tables of a step's rows, int32 [D, R/D, M], that name no block."""
    return np.full((self.num_parts, -(-num_rows // self.num_parts), self.table_len), self.blocks_per_part, np.int32)

  def _chunk_tokens(self) -> int:
    model, settings = self._model, self._model.settings
    chunk = settings.prefill_chunk or _CHUNK.get(model.platform, _LONG_CHUNK)
    return model.max_len if model.has_prefix else min(max(chunk, settings.min_bucket), model.max_len)

  def _check_draft(self, target: 'DecodeLayout', is_shareable: bool) -> None:
    """Raises a UserError if this model cannot draft for the model that has the layout `target`."""
    if not is_shareable:
      raise UserError('a draft model has no attention windows, prefixes or encoder: leave draft_model out.')
    if self.num_parts != target.num_parts:
      raise UserError(
        f'draft_model: the mesh splits its cache into {self.num_parts} parts, and the cache of the model that checks '
        f'its drafts into {target.num_parts}: leave it out on this mesh.'
      )

  def _count_blocks(self, draft_model: DecodeModel | None) -> int:
    """Returns how many blocks each of the D parts has."""
    settings, model = self._model.settings, self._model
    if settings.max_cache_tokens is not None:
      fitting = -(-settings.max_cache_tokens // (self.num_parts * self.block_tokens))
      limit = f'max_cache_tokens={settings.max_cache_tokens}'
    else:
      block_bytes, slot_bytes = self._cache_bytes(model)
      if draft_model is not None:
        block_bytes, slot_bytes = map(operator.add, (block_bytes, slot_bytes), self._cache_bytes(draft_model))
      free = free_bytes(model.mesh, model.storage.padded, settings.memory_fraction) - slot_bytes
      fitting = int(min(free / max(block_bytes, 1), self.slots_per_part * self.table_len))  # a plan's is infinite
      limit = f'memory_fraction={settings.memory_fraction}'
    if fitting < self.table_len:
      raise UserError(
        f'{limit} leaves the KV cache {max(fitting, 0) * self.num_parts * self.block_tokens} tokens, in '
        f'{self.num_parts} parts, and a text has up to max_len={model.max_len}: raise it, lower max_len, or take more '
        'devices.'
      )
    return fitting

  def _cache_bytes(self, model: DecodeModel) -> tuple[int, int]:
    """Returns the bytes on each device of one block of each part, and of what all slots have beside the blocks.

    With drafts, the latter include the states after each token of a step, of which there are one more than drafts.
    """
    blocks = self.num_parts, self.block_tokens
    cache, specs = model.abstract_cache(model.settings.num_slots, blocks, self.num_snapshots)
    block_bytes = slot_bytes = 0
    for (path, leaf), spec in zip(jax.tree_util.tree_flatten_with_path(cache)[0], jax.tree.leaves(specs), strict=True):
      size = local_bytes(self._padded(leaf, self._cache_format(leaf, spec)))
      if has_blocks(path):
        block_bytes += size
      elif is_state(path) and self._model.settings.num_drafts:
        slot_bytes += size * (self._model.settings.num_drafts + 2)
      else:
        slot_bytes += size
    return block_bytes, slot_bytes

  def _padded(self, leaf: Any, placed: NamedSharding | Format) -> Any:
    sharding: Any = placed.sharding if isinstance(placed, Format) else placed
    shape = padding.padded_shape(leaf.shape, sharding.spec, self._model.mesh.shape)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=placed)

  def _cache_format(self, leaf: Any, spec: PartitionSpec) -> NamedSharding | Format:
    """Returns the sharding of an array of the cache; on TPUs with a layout in memory that keeps blocks contiguous.

    The TPU compiler interleaves blocks, entry by entry, if entries do not fill rows of 128 numbers; a step would then
    copy the cache.
    """
    sharding = NamedSharding(self._model.mesh, spec)
    if self._model.platform != 'tpu' or leaf.shape[-1] < _LEAST_FEATURES:
      return sharding
    return Format(Layout(major_to_minor=tuple(range(leaf.ndim))), sharding)


def sharding_or_format(leaf: Any) -> Any:
  """Returns the sharding of an abstract array, with its layout in memory if that is not left to the compiler."""
  return leaf.sharding if leaf.format.layout is None else leaf.format
