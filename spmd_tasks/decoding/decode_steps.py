"""DecodeSteps: compiles prefill, step and beam search of a PartitionedModel for its mesh.

    steps = DecodeSteps(model, settings)
    state = steps.init()
    variables = steps.storage.store(variables)      # the model's, unless the settings have a weights_dtype
    state, first = steps.prefill(variables, state, steps.make_batch(chunks))
    state, outputs = steps.step(variables, state, steps.make_inputs(keep))

As in training, stored arrays are padded, and the steps slice variables and caches to their true shapes before they
compute. The state is donated: it is updated in place. Every process passes the same batches, as host arrays. Outputs
are replicated. Nothing is compiled after `compile()`, whatever the requests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import os
from typing import Any

from flax import traverse_util
import jax
from jax.experimental.layout import Format, Layout
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from spmd_tasks.activity import doing
from spmd_tasks.decoding import beam, nextn_drafts, step_functions
from spmd_tasks.decoding.cache_arrays import has_blocks
from spmd_tasks.decoding.constraints import mask_rows
from spmd_tasks.decoding.draft_model import DraftModel, DraftSteps, own_batch
from spmd_tasks.decoding.drafts import DraftRows
from spmd_tasks.decoding.group_sampling import Groups, Samples, sample_groups
from spmd_tasks.decoding.requests import Chunk, PrefillBatch, Request, make_prefill_batch
from spmd_tasks.decoding.step_functions import DecodeState, Outputs, ScoreBatch, Scores, StepInputs
from spmd_tasks.decoding.weight_storage import (
  LAYER_KERNELS,
  WeightStorage,
  find_kernels,
  free_bytes,
  local_bytes,
  multiplying_by_layer,
  with_layer_kernels,
)
from spmd_tasks.errors import UserError
from spmd_tasks.layers.adapter import adapter_choices, map_adapters
from spmd_tasks.layers.base import layer_scope
from spmd_tasks.runtime import DecodeSettings, PartitionedModel, Task
from spmd_tasks.runtime.task import Variables
from spmd_tasks.sharding import padding
from spmd_tasks.sharding.axis_rules import stage_axis, without_axis
from spmd_tasks.sharding.specs import current_platform, num_parts, sharding_scope, spec_axes
from spmd_tasks.sharding.weights import is_quantized, unbox_weights, weight_specs

# Platform -> positions of a block, where the chunks of prompts are multiples of it. A TPU's kernel copies each block.
_BLOCK_TOKENS, _SHORT_BLOCK_TOKENS = {'tpu': 64}, 16
_LEAST_FEATURES = 64  # of a head, whose rows of 128 in a TPU's memory are half full
_PREFILL_ROWS = 8  # of a prefill at most, where the settings do not say
# Platform -> tokens of a chunk. To a CPU 64 at the end of 4,000 take as long as two steps of 32 texts; elsewhere a step
# reads all weights anyway, and more tokens cost little beside that.
_CHUNK, _LONG_CHUNK = {'cpu': 64}, 256
_FEWEST_ROWS, _MANY_ROWS = 2, 64  # of the smallest step: accelerators read all weights for one row as for 64
_LEAST_ROWS = {'gpu': 16}  # of any step: XLA multiplies fewer rows by kernels that take longer
_COMPILED_AT_ONCE = 8  # programs
_PREFILL_TOKENS = 128  # of several prompts in one prefill, where chunks are shorter
# Platform -> an option of the compiler, which XLA_FLAGS may set too. XLA would make one product of those with a layer's
# queries, keys and values, for which it copies the three kernels: a tenth of what a step of 32 texts reads.
_COMPILER_OPTIONS = {'gpu': ('xla_gpu_dot_merger_threshold_mb', '0')}


class DecodeSteps:
  """The compiled steps of one task and settings.

  Attributes:
    settings: the sizes.
    storage: how the variables that the steps take are stored; its `store` makes them from the model's.
    max_len: S.
    encoder_len: E, the encoder's positions; None where the model has no encoder.
    prefill_chunk: C, the length at which prompts are cut: the setting's, at most max_len.
    buckets: the lengths of chunks for which prefills are compiled.
    step_rows: how many rows a step may compute, in order: the least that hold all busy slots; on GPUs and TPUs 64 or N
      at least, on GPUs never fewer than 16, which may be more than N. One row would not have the bits of several, whose
      products are of another kind. Where the mesh splits slots, each step computes all N.
    can_reuse: whether texts that begin alike can share blocks; False where the cache of a layer is a ring, and where
      what a token reads depends on more than the tokens before it, as in encoder-decoders.
    block_tokens, num_blocks, table_len: b positions of a block of the KV cache, how many blocks there are, and how many
      a text of max_len has, M.
    num_drafts: k, how many drafts of a slot a step may check.
    draft: the steps of the model that guesses them; None where n-grams or the model's own heads do.
    heads: the number of the head that guesses each draft; () where none do.
    num_parts: D, into how many parts the mesh splits slots and blocks; a slot's blocks are of its own part.
    vocab_size: V.
    adapter_names: of the low-rank adapters that a request can choose by their numbers, from 1 on.
    kept_state: that of the last `generate` to its end, which the next one takes in place of a new one; None: there is
      none. The device's memory holds it.
    abstract_state, padded_state: true shapes of the DecodeState, and the shapes and shardings in which it is stored.
  """

  def __init__(
    self,
    model: PartitionedModel,
    settings: DecodeSettings | None = None,
    *,
    temperature: float = 1.0,
    draft: DraftModel | None = None,
  ):
    """Partitions the state; compiles nothing yet.

    Args:
      model: the partitioned model.
      settings: None takes the task's.
      temperature: the model's logits are divided by it, so that log-probabilities are after it; a request's own one,
        which they are before, comes on top.
      draft: guesses the drafts, where the settings have any; None: the model's own heads do (nextn_drafts.py), or, of a
        model without, n-grams (drafts.py).

    Raises:
      UserError: the model cannot generate text.
    """
    self._task = model.task.as_task('text generation')
    self.settings = self._task.decode if settings is None else settings
    self.storage = WeightStorage(model, self.settings.weights_dtype)
    self.adapter_names = adapter_choices(self._task.model)
    self._model = model
    self._temperature = temperature
    # Decoding runs the layers one after another; their weights stay sharded over the pipeline stages.
    axis = stage_axis(model.mesh.axis_names, model.axis_rules)
    rules = model.axis_rules if axis is None else without_axis(axis, model.axis_rules)
    # A call has few tokens, and the cache grows by them: devices that split a training sequence all compute the same.
    self._axis_rules = tuple((name, None if name == 'seq' else axes) for name, axes in rules)
    self._replicated = NamedSharding(model.mesh, PartitionSpec())
    check_reads_tokens(model.input_layout.spec, self.settings)
    self.max_len = self.settings.max_len or model.input_layout.spec['ids'].shape[1]
    spec = model.input_layout.spec
    self.encoder_len = None
    if 'encoder_ids' in spec:
      self.encoder_len = self.settings.encoder_len or spec['encoder_ids'].shape[1]
    # A prompt, and the context of a text that is scored, is the prefix, which sees itself in both directions.
    self._has_prefix = 'prefix_mask' in spec
    with self._scope():
      self._platform = current_platform()
    chunk = _CHUNK.get(self._platform, _LONG_CHUNK)
    block = _BLOCK_TOKENS.get(self._platform, _SHORT_BLOCK_TOKENS)
    num_slots = self.settings.num_slots
    chunk = self.settings.prefill_chunk or chunk
    self.prefill_chunk = self.max_len if self._has_prefix else min(max(chunk, self.settings.min_bucket), self.max_len)
    # Beam search reads whole prompts.
    longest = self.max_len if self.settings.num_beams > 1 else self.prefill_chunk
    self.buckets = self.settings.buckets(longest)
    num_heads = getattr(model.task.model, 'num_nextn_predict_layers', 0) if draft is None else 0
    num_guessed = self.settings.num_drafts if num_heads and self.settings.num_beams == 1 else 0
    self.heads = tuple(min(number, num_heads - 1) for number in range(num_guessed))
    self._compiled: dict[Any, Any] = {}
    self._pool: concurrent.futures.Executor | None = None
    self.kept_state: DecodeState | None = None

    self._prefills: dict[int, Any] = {}  # by the number of rows: the shapes that a prefill returns
    found: set[tuple[str, ...]] = set()
    with self._scope():
      finds = current_platform() == 'cpu' and model.mesh.size == 1
    with find_kernels(found) if finds else contextlib.nullcontext():
      abstract_cache, specs, self.vocab_size = self._abstract_cache(num_slots)
    # What was traced are the model's kernels, of which some are stored quantized.
    stored = traverse_util.flatten_dict(self.storage.padded.get('params', {}))
    self._layer_kernels = {path for path in found if not is_quantized(stored[path])}
    self._variables = self.arrange(self.storage.padded)
    slot_axes = [spec_axes(spec, leaf.ndim)[-4] for spec, leaf in zip(*map(jax.tree.leaves, (specs, abstract_cache)))]
    self.num_parts = max(num_parts(axes, model.mesh.shape) for axes in slot_axes)
    # Chunks that texts share end where a block ends.
    shares = self.prefill_chunk < self.max_len
    self.block_tokens = math.gcd(self.prefill_chunk, block) if shares else min(self.max_len, block)
    self.table_len = -(-self.max_len // self.block_tokens)
    self._slots_of_part = -(-num_slots // self.num_parts)
    is_pool = [has_blocks(path) for path, _ in jax.tree_util.tree_flatten_with_path(abstract_cache)[0]]
    self.can_reuse = all(is_pool) and self.encoder_len is None and not self._has_prefix
    # One program then reads first and later chunks, by tables; texts without later chunks need no tables.
    self._reads_cache = shares and self.num_parts == 1 and self.encoder_len is None
    of_blocks = functools.partial(self._abstract_cache, num_slots)
    sizes = {'max_len': self.max_len, 'prefill_chunk': self.prefill_chunk, 'max_cache_tokens': num_slots * self.max_len}
    is_counted = self.settings.max_cache_tokens is not None
    self.draft = None if draft is None or is_counted else self._draft_steps(draft, **sizes)
    self.num_blocks = self.num_parts * self._blocks_of_part(of_blocks, is_pool)
    if draft is not None:
      self.draft = self._draft_steps(draft, **sizes | {'max_cache_tokens': self.num_blocks * self.block_tokens})
    abstract_cache, specs, _ = of_blocks((self.num_blocks, self.block_tokens))
    empty = functools.partial(
      step_functions.empty_state,
      num_slots=self.settings.num_slots,
      vocab_size=self.vocab_size,
      num_stop_ids=self.settings.max_stop_ids,
      num_drafts=len(self.heads),
    )
    self.abstract_state = jax.eval_shape(lambda: empty(abstract_cache))
    shardings = jax.tree.map(lambda _: self._replicated, self.abstract_state)
    shardings = shardings.replace(cache=jax.tree.map(self._cache_format, abstract_cache, specs))

    self.padded_state = jax.tree.map(self._padded, self.abstract_state, shardings)
    self._state_shardings = jax.tree.map(_format, self.padded_state)
    self.num_drafts = self.settings.num_drafts
    if self.num_drafts and not all(is_pool):
      by_slot = [leaf for leaf, pooled in zip(jax.tree.leaves(abstract_cache), is_pool, strict=True) if not pooled]
      rings = [] if self.encoder_len else [leaf.shape[-2] for leaf in by_slot]
      if self.num_parts > 1 or min(rings, default=self.max_len) <= self.num_drafts:
        raise UserError(
          f'num_drafts={self.num_drafts}: a model with attention windows or an encoder checks fewer drafts than the '
          'shortest window has tokens, and none on a mesh that splits slots: set task.decode.num_drafts=0.'
        )
    self.step_rows = self._step_sizes()

  def _step_sizes(self) -> tuple[int, ...]:
    """How many rows a step may have, in order."""
    num_slots = self.settings.num_slots
    many = self._platform != 'cpu' and not self.num_drafts  # which give a slot several rows
    fewest = _MANY_ROWS if many else _FEWEST_ROWS
    fewer = (fewest * 4**i for i in range(num_slots)) if self.num_parts == 1 else ()
    most = max(num_slots, _LEAST_ROWS.get(self._platform, 1)) if many and self.num_parts == 1 else num_slots
    return (*itertools.takewhile(lambda rows: rows < num_slots, fewer), most)

  def arrange(self, variables: Variables) -> Variables:
    """Returns stored variables as the compiled steps take them; every call of a step does it where it is not done."""
    return with_layer_kernels(variables, self._layer_kernels)

  def init(self) -> DecodeState:
    """The state in which no slot is active."""

    def empty():
      return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.padded_state)

    if self.draft is not None:
      self.draft.init()
    return self._compile('init', empty, out=self._state_shardings)()

  def make_batch(
    self, chunks: Sequence[Chunk], *, score_prompts: bool = False, masks: Mapping[int, np.ndarray] | None = None
  ) -> PrefillBatch:
    """The arrays of a prefill, padded to the bucket of the longest chunk; see make_prefill_batch.

    With `masks`, the token masks of some rows, other rows may begin with any token.
    """
    num_columns = self.bucket(max(chunk.stop - chunk.start for chunk in chunks))
    num_rows = self.prefill_rows(num_columns, len(chunks), score_prompts)
    batch = make_prefill_batch(
      chunks,
      self.settings,
      tables=self._row_tables([self.own_blocks(c.slot) if c.blocks is None else c.blocks for c in chunks], num_rows),
      max_len=self.max_len,
      num_rows=num_rows,
      num_columns=num_columns,
      reads_cache=self._reads_cache,
      score_prompts=score_prompts,
      encoder_len=self.encoder_len,
    )
    return batch if masks is None else batch.replace(masks=self._mask_rows(masks, num_rows))

  def prefill(self, variables: Variables, state: DecodeState, batch: PrefillBatch) -> tuple[DecodeState, Outputs]:
    """See step_functions.prefill."""
    if self.draft is not None:
      self.draft.prefill(batch)
    return self._prefill(batch)(self.arrange(variables), state, batch)

  def _draft_steps(self, draft: DraftModel, **sizes: Any) -> DraftSteps:
    made = DraftSteps(draft, DecodeSteps, dataclasses.replace(self.settings, **sizes))
    own = [made.steps.num_parts, made.steps.block_tokens, made.steps.table_len]
    if own != [self.num_parts, self.block_tokens, self.table_len]:
      raise UserError(
        f'draft_model: its cache has {own} parts, tokens of a block and blocks of a text, and not '
        f'{[self.num_parts, self.block_tokens, self.table_len]}: leave it out on this mesh.'
      )
    return made

  def _padded(self, leaf: Any, placed: NamedSharding | Format) -> Any:
    sharding: Any = placed.sharding if isinstance(placed, Format) else placed
    shape = padding.padded_shape(leaf.shape, sharding.spec, self._model.mesh.shape)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=placed)

  def _cache_format(self, leaf: Any, spec: PartitionSpec) -> NamedSharding | Format:
    """The layout of an array of the cache: a kernel reads its blocks one by one.

    A TPU's compiler would lay blocks whose entries do not fill rows of 128 numbers side by side, entry by entry.
    """
    sharding = NamedSharding(self._model.mesh, spec)
    if self._platform != 'tpu' or leaf.shape[-1] < _LEAST_FEATURES:
      return sharding
    return Format(Layout(major_to_minor=tuple(range(leaf.ndim))), sharding)

  def _blocks_of_part(self, abstract_cache: Callable[[tuple[int, int]], Any], is_pool: Sequence[bool]) -> int:
    """How many blocks each of the D parts of the pool has."""
    given = self.settings.max_cache_tokens
    if given is not None:
      fitting = -(-given // (self.num_parts * self.block_tokens))
      why = f'max_cache_tokens={given}'
    else:
      # One block in each part, which is one per device, and what all slots have beside the pool.
      shapes, specs, _ = abstract_cache((self.num_parts, self.block_tokens))
      sizes = [
        local_bytes(self._padded(leaf, self._cache_format(leaf, spec)))
        for leaf, spec in zip(jax.tree.leaves(shapes), jax.tree.leaves(specs), strict=True)
      ]
      of_block = sum(size for size, pooled in zip(sizes, is_pool, strict=True) if pooled)
      of_block += 0 if self.draft is None else self.draft.block_bytes
      free = free_bytes(self._model.mesh, self.storage.padded, self.settings.memory_fraction) - sum(sizes) + of_block
      fitting = int(min(free / max(of_block, 1), self._slots_of_part * self.table_len))  # a plan's is infinite
      why = f'memory_fraction={self.settings.memory_fraction}'
    if fitting < self.table_len:
      raise UserError(
        f'{why} leaves the KV cache {max(fitting, 0) * self.num_parts * self.block_tokens} tokens, in {self.num_parts} '
        f'parts, and a text has up to max_len={self.max_len}: raise it, lower max_len, or take more devices.'
      )
    return fitting

  def own_blocks(self, slot: int) -> tuple[int, ...]:
    """The blocks of a slot where each slot has its own."""
    part, number = divmod(slot, self._slots_of_part)
    first = part * (self.num_blocks // self.num_parts) + number * self.table_len
    return tuple(range(first, first + self.table_len))

  def prefill_rows(self, bucket: int, num_chunks: int, score_prompts: bool = False) -> int:
    """How many rows the prefill has that reads so many chunks of a bucket.

    There are two at most, for one chunk and for more, where the settings do not say: a row of one may differ from that
    of the other in last bits.
    """
    if self.settings.prefill_rows is not None:
      return self.settings.prefill_rows
    if score_prompts or self.settings.num_beams > 1 or (num_chunks == 1 and bucket > 1):
      return 1
    num_tokens = _PREFILL_TOKENS if self.settings.prefill_chunk is None else self.prefill_chunk
    return max(min(_PREFILL_ROWS, self.settings.num_slots, max(num_tokens, self.prefill_chunk) // bucket), 1)

  def _row_tables(self, blocks: Sequence[Sequence[int]], num_rows: int) -> Any:
    """The tables of a prefill's rows, int32 [1, P, M]."""
    tables = np.zeros((1, num_rows, self.table_len), np.int32)
    tables += (self.num_blocks + np.arange(num_rows, dtype=np.int32))[:, None]
    for row, each in zip(tables[0], blocks, strict=False):
      row[: len(each)] = each
    return tables

  def step(self, variables: Variables, state: DecodeState, inputs: StepInputs) -> tuple[DecodeState, Outputs]:
    """See step_functions.step."""
    return self._step(inputs)(self.arrange(variables), state, inputs)

  def make_inputs(
    self,
    keep: np.ndarray,
    *,
    masks: Mapping[int, np.ndarray] | None = None,
    blocks: Mapping[int, Sequence[int]] | None = None,
    drafts: Mapping[int, Sequence[int]] | None = None,
  ) -> StepInputs:
    """Returns the inputs of the smallest step for these slots, as host arrays.

    Args:
      keep: bool [N].
      masks: the token masks of some slots; without any another program runs.
      blocks: the blocks of the slots to keep; None: each slot has its own.
      drafts: up to k tokens of some slots, which masks exclude. If a model guesses them, they say only how many; a slot
        that may have some later has none here.
    """
    (busy,) = np.nonzero(keep)
    num_slots = self.settings.num_slots
    num_rows = next(rows for rows in self.step_rows if rows >= len(busy))
    slots, tables = self._places(busy, num_rows, blocks, by_slot=num_rows == num_slots)
    if drafts and (any(drafts.values()) or (self.heads and not masks)):
      size = next(size for size in self.draft_sizes(num_rows) if size >= len(busy) + sum(map(len, drafts.values())))
      rows, tables = self._draft_rows(slots, tables, drafts, size)
      return StepInputs(keep=keep, slots=slots, tables=tables, drafts=rows)
    return StepInputs(
      keep=keep,
      slots=None if num_rows == num_slots else slots,
      tables=tables,
      masks=self._mask_rows(masks, num_slots) if masks else None,
    )

  def _any_inputs(self, num_rows: int, *, masked: bool = False, draft_rows: int = 0) -> StepInputs:
    """The inputs of a step of this size that keeps no slot."""
    num_slots = self.settings.num_slots
    tables: Any = np.zeros((self.num_parts, -(-num_rows // self.num_parts), self.table_len), np.int32)
    slots, drafts = np.full(num_rows, num_slots, np.int32), None
    if draft_rows:
      drafts, tables = self._draft_rows(slots, tables, {}, draft_rows)
    return StepInputs(
      keep=np.zeros(num_slots, np.bool_),
      slots=None if num_rows == num_slots and not draft_rows else slots,
      tables=tables,
      masks=self._mask_rows({}, num_slots) if masked else None,
      drafts=drafts,
    )

  def _places(
    self, busy: np.ndarray, num_rows: int, blocks: Mapping[int, Sequence[int]] | None, *, by_slot: bool = False
  ) -> tuple[Any, Any]:
    """The slots and tables of a step's rows; with `by_slot` row i is of slot i."""
    slots = self.settings.num_slots + np.arange(num_rows, dtype=np.int32)
    slots[places := busy if by_slot else np.arange(len(busy))] = busy
    part = self.num_blocks // self.num_parts
    tables = np.full((self.num_parts, -(-num_rows // self.num_parts), self.table_len), part, np.int32)
    for place, slot in zip(places.tolist(), busy.tolist(), strict=True):
      held = self.own_blocks(slot) if blocks is None else blocks.get(slot, ())
      where = divmod(place, tables.shape[1])
      tables[where][: len(held)] = held
      if where[0]:
        tables[where][: len(held)] -= where[0] * part
    return slots, tables

  def draft_sizes(self, num_slots: int) -> tuple[int, ...]:
    """How many rows a step with drafts of so many slots may have, R, in order."""
    if self.num_parts > 1:
      return (self.num_parts * self._slots_of_part * (self.num_drafts + 1),)
    return tuple(dict.fromkeys(num_slots * (num + 1) for num in (1, self.num_drafts)))

  def _draft_rows(
    self, slots: np.ndarray, tables: np.ndarray, drafts: Mapping[int, Sequence[int]], num_rows: int
  ) -> tuple[DraftRows, np.ndarray]:
    """Assigns rows to the busy slots' tokens, each in its slot's part. Returns them and their tables."""
    (places,) = np.nonzero(slots < self.settings.num_slots)
    tokens = [(0, *drafts.get(slot, ())) for slot in slots[places].tolist()]
    counts, parts = np.array([*map(len, tokens)], np.int32), slots[places] // self._slots_of_part
    before, of_part = np.cumsum(counts) - counts, num_rows // self.num_parts
    firsts = parts * of_part + before - before[np.searchsorted(parts, parts)]
    columns = np.arange(self.num_drafts + 1)
    is_used = columns < counts[:, None]
    rows: Any = DraftRows(
      owners=np.full(num_rows, len(slots), np.int32),
      columns=np.zeros(num_rows, np.int32),
      tokens=np.zeros(num_rows, np.int32),
      earlier=np.full((num_rows, self.num_drafts), num_rows, np.int32),
      rows=np.full((len(slots), self.num_drafts + 1), num_rows, np.int32),
    )
    rows.rows[places] = np.where(is_used, firsts[:, None] + columns, num_rows)
    used = rows.rows[places][is_used]
    rows.owners[used] = np.repeat(places, counts)
    rows.columns[used] = is_used.nonzero()[1]
    rows.tokens[used] = [*itertools.chain(*tokens)]
    rows.earlier[used] = np.where(columns[:-1] < rows.columns[used, None], used[:, None] - 1 - columns[:-1], num_rows)
    of_rows = np.full((num_rows, self.table_len), self.num_blocks // self.num_parts, np.int32)
    of_rows[used] = tables.reshape(-1, self.table_len)[rows.owners[used]]
    return rows, of_rows.reshape(self.num_parts, of_part, -1)

  def score(self, variables: Variables, batch: ScoreBatch) -> Scores:
    """See step_functions.score. Each shape of batch is compiled once, on first use."""
    name = ('score', *batch.ids.shape, batch.columns.shape[1])
    return self._compile_stateless(name, step_functions.score, batch)(self.arrange(variables), batch)

  def search(self, variables: Variables, batch: PrefillBatch) -> beam.Beams:
    """Beam search for each row of the batch; ignores its slots, seeds and sampling."""
    return self._search(batch)(self.arrange(variables), *_search_arguments(batch))

  def sample(self, variables: Variables, groups: Groups, num_samples: int, max_new_tokens: int) -> Samples:
    """See group_sampling.sample_groups. Each shape is compiled once, on first use; uses no slots."""

    def sample(forward, variables, groups):
      cache = self._empty_cache(groups.ids.shape[0] * num_samples)
      given = functools.partial(sample_groups, num_samples=num_samples, max_new_tokens=max_new_tokens)
      return given(forward, variables, cache, groups, shrinks=self.num_parts == 1)

    name = ('sample', *groups.ids.shape, num_samples, max_new_tokens, groups.sampling.top_k is None)
    return self._compile_stateless(name, sample, groups)(self.arrange(variables), groups)

  def compile(self, *, score_prompts: bool = False, constrain: bool = False) -> None:
    """Compiles the step and a prefill per bucket.

    Args:
      score_prompts: whether also the prefills that score prompts.
      constrain: whether all prefills take token masks; then also the step that takes them.
    """
    if self.settings.num_beams > 1:
      for chunks in self.any_chunks():
        self._search(self.make_batch(chunks))
      return
    self.init()
    with self._compiling_at_once():
      self._compile_all(score_prompts, constrain)

  @contextlib.contextmanager
  def _compiling_at_once(self) -> Iterator[None]:
    """Context in which `_compile` leaves programs to threads. (A CPU's compiler uses all cores for each.)"""
    if self._platform == 'cpu' or jax.process_count() > 1:  # all processes compile in one order
      yield
      return
    earlier = dict(self._compiled)
    try:
      with concurrent.futures.ThreadPoolExecutor(_COMPILED_AT_ONCE) as self._pool:
        yield
      programs = {name: each.result() for name, each in self._compiled.items() if name not in earlier}
    except BaseException:
      programs = {}
      raise
    finally:
      self._pool, self._compiled = None, earlier | programs

  def _compile_all(self, score_prompts: bool, constrain: bool) -> None:
    for num_rows in self.step_rows:
      for masked in (False, True) if constrain else (False,):
        self._step(self._any_inputs(num_rows, masked=masked))
      for size in self.draft_sizes(num_rows) if self.num_drafts else ():
        inputs = self._any_inputs(num_rows, draft_rows=size)
        self._step(inputs)
        if self.draft is not None:
          self.draft.compile(self.abstract_state, inputs)
      if self.draft is not None and constrain:
        self.draft.compile(self.abstract_state, self._any_inputs(num_rows))
    for score in (False, True) if score_prompts else (False,):
      for chunks in self.any_chunks(score):
        batch = self.make_batch(chunks, score_prompts=score, masks={} if constrain else None)
        self._prefill(batch)
        if self.draft is not None:
          self.draft.steps._prefill(own_batch(batch))

  def lower_prefill(self) -> Any:
    """Returns the lowered prefill of the longest chunk that a prompt begins with, for inspection and planning."""
    return self._prefill(self.make_batch([self._any_chunk(0, self.buckets[-1])]), make=self._lower_stateful)

  def lower_step(self) -> Any:
    """Returns the lowered step of all slots and drafts (jax.stages.Lowered), for inspection and planning."""
    num_rows = self.step_rows[-1]
    draft_rows = self.draft_sizes(num_rows)[-1] if self.num_drafts else 0
    return self._step(self._any_inputs(num_rows, draft_rows=draft_rows), make=self._lower_stateful)

  def bucket(self, length: int) -> int:
    """The shortest bucket that holds a chunk of `length` tokens."""
    return next(bucket for bucket in self.buckets if bucket >= length)

  def any_chunks(self, score_prompts: bool = False) -> list[list[Chunk]]:
    """Chunks for each compiled prefill; a prefill of them writes to no slot."""
    size = self.buckets[-1]
    starts = (0, size) if size < self.max_len and not self._reads_cache else (0,)
    counts = {
      bucket: sorted({self.prefill_rows(bucket, num, score_prompts): num for num in (2, 1)}.values())
      for bucket in self.buckets
    }
    return [
      [self._any_chunk(start, bucket, row) for row in range(num)]
      for start in starts
      for bucket in self.buckets
      for num in counts[bucket]
    ]

  def _any_chunk(self, start: int, bucket: int, row: int = 0) -> Chunk:
    request = Request(ids=(0,) * (start + bucket), max_tokens=1)
    return Chunk(request=request, slot=self.settings.num_slots + row, start=start, stop=start + bucket, blocks=())

  def _prefill(self, batch: PrefillBatch, make: Callable[..., Any] | None = None) -> Any:
    def prefill(padded_variables, padded_state, batch):
      state, outputs = step_functions.prefill(
        self._forward,
        self._true(padded_variables),
        padding.unpad(padded_state, self.abstract_state),
        batch,
        num_top_logprobs=self.settings.num_top_logprobs,
        by_slot=self.num_parts == 1,
        has_prefix=self._has_prefix,
        heads=self.heads,
      )
      return padding.pad(state, self.padded_state), outputs

    name = ('prefill', *batch.ids.shape, batch.before is None, batch.targets is None, batch.masks is None)
    return (make or self._compile_stateful)(name, prefill, batch)

  def _step(self, inputs: StepInputs, make: Callable[..., Any] | None = None) -> Any:
    def step(padded_variables, padded_state, inputs):
      state, outputs = step_functions.step(
        self._forward,
        self._true(padded_variables),
        padding.unpad(padded_state, self.abstract_state),
        inputs,
        num_top_logprobs=self.settings.num_top_logprobs,
        heads=() if inputs.masks is None and inputs.drafts is None else self.heads,
      )
      return padding.pad(state, self.padded_state), outputs

    num_rows = self.settings.num_slots if inputs.slots is None else len(inputs.slots)
    name = ('step', num_rows, inputs.masks is not None, inputs.drafts and len(inputs.drafts.owners))
    return (make or self._compile_stateful)(name, step, inputs)

  def _mask_rows(self, masks: Mapping[int, np.ndarray], num_rows: int) -> Any:
    return mask_rows(masks, num_rows, self.vocab_size)

  def _search(self, batch: PrefillBatch) -> Any:
    num_beams = self.settings.num_beams

    def search(forward, variables, *arrays):
      return beam.beam_search(
        forward,
        variables,
        self._empty_cache((self.settings.prefill_rows or 1) * num_beams),
        *arrays,
        num_beams=num_beams,
        max_new_tokens=self.max_len - 1,
        length_penalty=self.settings.length_penalty,
        rule=self.settings.beam_rule,
      )

    return self._compile_stateless(('search', batch.ids.shape[1]), search, *_search_arguments(batch))

  def _compile_stateless(self, name: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Compiles a function of the model's forward function, variables and host arguments."""

    def of_padded(padded_variables, *given):
      return function(self._forward, self._true(padded_variables), *given)

    return self._compile(name, of_padded, *arguments, held=(self._variables,), out=self._replicated)

  def _compile_stateful(self, name: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Compiles a function of variables, state and host arguments that returns (state, outputs)."""
    held = (self._variables, self.padded_state)
    return self._compile(name, function, *arguments, held=held, out=(self._state_shardings, self._replicated))

  def _lower_stateful(self, name: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Lowers what `_compile_stateful` compiles."""
    held = (self._variables, self.padded_state)
    return self._lower(function, *arguments, held=held, out=(self._state_shardings, self._replicated))

  def _compile(
    self, name: Any, function: Callable[..., Any], *arguments: Any, held: tuple[Any, ...] = (), out: Any
  ) -> Any:
    """Compiles `function` once, as `_lower` has it."""
    if name not in self._compiled:
      parts = name if isinstance(name, tuple) else (name,)
      text = 'compiling for decoding: ' + ' '.join(str(part) for part in parts if type(part) in (str, int))
      with doing(text):
        lowered = self._lower(function, *arguments, held=held, out=out)
        self._compiled[name] = lowered.compile() if self._pool is None else self._pool.submit(_compile, text, lowered)
    return self._compiled[name]

  def _lower(self, function: Callable[..., Any], *arguments: Any, held: tuple[Any, ...] = (), out: Any) -> Any:
    """Lowers `function`: its first arguments are trees on the mesh (`held`), the others host arrays."""

    def scoped(*given):
      with self._scope(), self._layer_scope():
        return function(*given)

    jitted = jax.jit(
      scoped,
      in_shardings=(
        *jax.tree.map(_format, held),
        *jax.tree.map(lambda _: self._replicated, arguments),
      ),
      out_shardings=out,
      donate_argnums=tuple(i for i, tree in enumerate(held) if tree is self.padded_state),
      compiler_options=_compiler_options(self._platform),
    )
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
    return jitted.lower(*held, *abstract)

  def _true(self, arranged: Variables) -> Variables:
    return arranged if LAYER_KERNELS in arranged else self.storage.true(arranged)  # one device has no padding

  def _forward(self, variables: Variables, cache: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, Any]:
    if self._has_prefix and cache is None:
      batch = {'prefix_mask': batch['segment_ids'], **batch}
    is_known = {'adapters': bool(self.adapter_names), 'prefix_mask': self._has_prefix}
    batch = {name: each for name, each in batch.items() if is_known.get(name, True)}
    logits, new = _read_tokens(self._task, variables, cache, batch)
    return logits if self._temperature == 1 else logits / self._temperature, unbox_weights(new)

  def _abstract_cache(self, num_rows: int, blocks: tuple[int, int] | None = None) -> tuple[Any, Any, int]:
    """Returns (shapes of the cache, its PartitionSpecs, V) for rows of max_len, by tracing a prefill.

    With `blocks`, (B, b), leaves of any length are pools.
    """
    model = self._model
    batch = {
      name: jax.ShapeDtypeStruct((num_rows, self.max_len), jnp.int32) for name in ('ids', 'segment_ids', 'segment_pos')
    }
    if self.encoder_len is not None:
      text = jax.ShapeDtypeStruct((num_rows, self.encoder_len), jnp.int32)
      batch |= {f'encoder_{name}': text for name in ('ids', 'segment_ids', 'segment_pos')}

    def prefill(variables, batch):
      forward, returned = functools.partial(_read_tokens, self._task), {'returns_hidden': True} if self.heads else {}
      logits, new = forward(variables, None, batch | returned)
      if self.heads:
        given = {'following': batch['ids'], 'lengths': (first := batch['ids'][:, 0]), 'draw': lambda logits: first}
        _, new = nextn_drafts.guess(forward, variables, None, batch, new, self.heads, **given)
      return logits, new

    def as_pool(path, leaf):
      if blocks is None or not has_blocks(path):
        return leaf
      shape = (*leaf.shape[:-4], blocks[0], leaf.shape[-3], blocks[1], leaf.shape[-1])
      return jax.ShapeDtypeStruct(shape, leaf.dtype)

    with self._scope() as scope, self._layer_scope():
      if num_rows not in self._prefills:
        self._prefills[num_rows] = jax.eval_shape(prefill, model.abstract_state.variables, batch)
      logits, boxed = self._prefills[num_rows]
    cache = jax.tree_util.tree_map_with_path(as_pool, unbox_weights(boxed))
    specs = jax.tree.map(lambda box, x: scope.activation_spec(box.split_dims, x.shape), weight_specs(boxed), cache)
    return cache, specs, logits.shape[-1]

  def _empty_cache(self, num_rows: int) -> Any:
    """Within a computation: zeros for rows of max_len, laid out over the mesh."""

    def empty(leaf, spec):
      return jax.lax.with_sharding_constraint(jnp.zeros(leaf.shape, leaf.dtype), NamedSharding(self._model.mesh, spec))

    return jax.tree.map(empty, *self._abstract_cache(num_rows)[:2])

  @contextlib.contextmanager
  def _layer_scope(self):
    facts = {name: getattr(self.settings, name) for name in ('cache_dtype', 'cache_attention')}
    with layer_scope(longest_text=self.max_len, **facts), self._task.layer_context():
      yield

  def _scope(self):
    return sharding_scope(self._model.mesh, self._axis_rules, self._model.inputs_split_mapping)


def _read_tokens(task: Task, variables: Variables, cache: Any, batch: Mapping[str, Any]) -> tuple[jax.Array, Any]:
  """Reads a batch's tokens after those in the KV cache, as `Forward` of step_functions.py says; returns boxes.

  Raises a UserError: the model cannot generate text.
  """
  if cache is not None:
    variables = variables | {'cache': cache}
  model, numbers = task.model, batch.get('adapters')
  if numbers is not None:
    model = map_adapters(model, lambda adapter: adapter.of_rows(numbers))
  given, named = task.arguments(batch, train=False)
  facts = {f'cache_{name}': batch.get(name) for name in ('slots', 'tables', 'drafts')}
  with layer_scope(**facts), multiplying_by_layer(variables) as variables:
    outputs, updated = model.apply(variables, *given, **named, mutable='new_cache')
  if not isinstance(outputs, Mapping) or 'logits' not in outputs or not updated.get('new_cache'):
    raise UserError(
      f'{type(task.model).__name__} cannot generate text: it must return logits [B, T, V] under the key '
      "'logits' and leave the keys and values of its attention in the collection 'new_cache', as LanguageModel does."
    )
  return outputs['logits'], updated['new_cache']


def _compile(text: str, lowered: Any) -> Any:
  with doing(text):
    return lowered.compile()


def _compiler_options(platform: str) -> dict[str, str] | None:
  option = _COMPILER_OPTIONS.get(platform)
  return None if option is None or option[0] in os.environ.get('XLA_FLAGS', '') else dict([option])


def _format(leaf: Any) -> Any:
  """The sharding of an abstract array, with its layout where that is not the compiler's choice."""
  return leaf.sharding if leaf.format.layout is None else leaf.format


def _search_arguments(batch: PrefillBatch) -> tuple[Any, ...]:
  """Returns the arrays of a batch that a search takes."""
  arrays = (batch.ids, batch.lengths, batch.max_tokens, batch.stop_ids)
  return arrays if batch.encoder_ids is None else (*arrays, batch.encoder_ids, batch.encoder_lengths)


def check_reads_tokens(spec: Mapping[str, Any], settings: DecodeSettings | None) -> None:
  """Raises a UserError if the batches of a model have no tokens, so that it can continue no text."""
  if 'ids' not in spec and (settings is None or settings.max_len is None):
    raise UserError(
      f'the model generates no text, because its batches have {", ".join(sorted(spec))} and no `ids`, the tokens of a '
      'language model: take --mode eval, or `model.apply` in Python; a language model with other training data needs '
      'task.decode.max_len.'
    )
