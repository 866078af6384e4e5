"""Prefill: reads chunks of prompts into their slots.

    prefill = Prefill(programs)
    state, first = prefill(variables, state, prefill.make_batch(chunks))      # and the first token of each prompt

A program computes `read_chunks` for one size of a batch. A long prompt is read in chunks, one prefill after another;
its last chunk gives the first token.

Shapes: N slots, P rows of a prefill, T tokens of its chunks, S positions, V vocabulary.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tasks.decoding import nextn_drafts
from spmd_tasks.decoding.cache_arrays import restore_states, save_states, take_slots, write_tokens
from spmd_tasks.decoding.constraints import mask_rows
from spmd_tasks.decoding.decode_programs import DecodePrograms
from spmd_tasks.decoding.decode_state import (
  DecodeState,
  Forward,
  Outputs,
  encoder_entries,
  put_rows,
  sample_next_tokens,
  target_logprobs,
  text_entries,
)
from spmd_tasks.decoding.requests import Chunk, PrefillBatch, Request, make_prefill_batch
from spmd_tasks.decoding.sampling import request_keys
from spmd_tasks.layers.nextn import shift
from spmd_tasks.runtime.task import Variables

_MOST_ROWS = 8  # of a prefill, unless the settings say
_PREFILL_TOKENS = 128  # of several prompts in one prefill, if chunks are shorter


def read_chunks(
  forward: Forward,
  variables: Any,
  state: DecodeState,
  batch: PrefillBatch,
  *,
  num_top_logprobs: int = 0,
  by_slot: bool = True,
  has_prefix: bool = False,
  heads: Sequence[int] = (),
) -> tuple[DecodeState, Outputs]:
  """Reads chunks of prompts into their slots and samples the first token after each prompt that ends.

  A first chunk replaces what its slot held before; a later chunk continues it, or the beginning of another prompt.

  Args:
    forward, variables, state, batch: the model, the state and the chunks.
    num_top_logprobs: how many of the likeliest tokens to return.
    by_slot: whether the model reads the cache in place; False copies the slots first, if the mesh splits slots.
    has_prefix: whether tokens of a prompt see later ones; its scores then take a second call, in which they do not.
    heads: the model's own heads that guess the next tokens.

  Returns:
    The new state, and outputs [P].
  """
  if batch.before is not None and batch.restored is not None:
    state = state.replace(cache=restore_states(state.cache, batch.slots, batch.restored))
  cache = None
  model_batch: dict[str, Any] = text_entries(batch.ids, batch.lengths, batch.starts) | {'adapters': batch.adapters}
  model_batch |= {'returns_hidden': True} if heads else {}
  if batch.before is None:
    model_batch |= encoder_entries(batch.encoder_ids, batch.encoder_lengths)
  elif by_slot:  # the cache has the encoder's text
    cache = state.cache
    model_batch |= {'slots': batch.slots, 'tables': batch.tables}
  else:
    cache = take_slots(state.cache, batch.slots, batch.tables)
  last = jnp.maximum(batch.lengths - 1, 0)[:, None]
  scores = {}
  if batch.targets is None:
    logits, new = forward(variables, cache, model_batch | {'logit_columns': last})
  else:
    logits, new = forward(variables, cache, model_batch)
    causal_logits = logits
    if has_prefix:
      causal_logits, _ = forward(variables, cache, model_batch | {'prefix_mask': jnp.zeros_like(batch.ids)})
    scores = _score_prompts(causal_logits, batch.targets, num_top_logprobs)
    logits = jnp.take_along_axis(logits, last[:, :, None], axis=1)

  rows = _make_rows(batch, vocab_size=logits.shape[-1], num_drafts=len(heads))
  rows, outputs = sample_next_tokens(logits[:, 0], rows, batch.masks, num_top_logprobs)
  if heads:
    followers = jnp.where(batch.max_tokens > 0, outputs.tokens, batch.followers)
    following = shift(batch.ids, 1).at[jnp.arange(len(followers)), last[:, 0]].set(followers)
    call = forward, variables, cache, model_batch, new, heads
    rows, new = nextn_drafts.update_drafts(rows, *call, following=following, lengths=batch.lengths)
  state = put_rows(state.replace(cache=None), rows, batch.slots).replace(cache=state.cache)
  cache = write_tokens(
    state.cache, new, starts=batch.starts, lengths=batch.lengths, slots=batch.slots, tables=batch.tables
  )
  if batch.saved is not None:
    cache = save_states(cache, new, batch.saved)
  return state.replace(cache=cache), outputs.replace(**scores)


def _make_rows(batch: PrefillBatch, *, vocab_size: int, num_drafts: int) -> DecodeState:
  """Returns the state of P sequences that have read their chunks, without a cache."""
  num_rows = len(batch.ids)
  numbers = jnp.arange(num_rows)[:, None]
  is_text = jnp.arange(batch.ids.shape[1])[None, :] < batch.lengths[:, None]
  seen = jnp.zeros((num_rows, vocab_size), jnp.bool_)
  seen = seen.at[numbers, jnp.where(is_text, batch.ids, vocab_size)].set(True, mode='drop')
  if batch.before is not None:
    seen = seen.at[numbers, jnp.where(batch.before >= 0, batch.before, vocab_size)].set(True, mode='drop')
  ends = batch.starts + batch.lengths
  return DecodeState(
    cache=None,
    tokens=batch.ids[:, 0],
    positions=ends - 1,
    ends=ends + batch.max_tokens,
    active=batch.max_tokens > 0,
    keys=request_keys(batch.seeds, batch.samples),
    seen=seen,
    counts=jnp.zeros((num_rows, vocab_size), jnp.int32),
    stop_ids=batch.stop_ids,
    sampling=batch.sampling,
    adapters=batch.adapters,
    drafts=jnp.zeros((num_rows, num_drafts), jnp.int32) if num_drafts else None,
  )


def _score_prompts(logits: jax.Array, targets: jax.Array, num_top_logprobs: int) -> dict[str, jax.Array]:
  """Returns the prompt_* fields of Outputs, from logits [P, T, V]."""
  logprobs, prompt_logprobs = target_logprobs(logits, targets)
  top_logprobs, top_ids = jax.lax.top_k(logprobs, num_top_logprobs)
  return {'prompt_logprobs': prompt_logprobs, 'prompt_top_ids': top_ids, 'prompt_top_logprobs': top_logprobs}


class Prefill:
  """The compiled prefills of a model.

  Attributes:
    buckets: the lengths of chunks for which prefills are compiled.
  """

  def __init__(self, programs: DecodePrograms):
    """Compiles nothing yet."""
    self._programs, self._model, self._layout = programs, programs.model, programs.layout
    self._settings = self._model.settings
    # Beam search reads whole prompts.
    longest = self._model.max_len if self._settings.num_beams > 1 else self._layout.prefill_chunk
    self.buckets = self._settings.buckets(longest)

  def __call__(self, variables: Variables, state: DecodeState, batch: PrefillBatch) -> tuple[DecodeState, Outputs]:
    """Reads the chunks, and samples the first token of each prompt that ends; see read_chunks."""
    return self.compile(batch)(self._model.arrange(variables), state, batch)

  def compile(self, batch: PrefillBatch) -> Any:
    """Compiles the prefill of a batch of this size."""
    name = ('prefill', *batch.ids.shape, batch.before is None, batch.targets is None, batch.masks is None)
    return self._programs.update(name, self._function(), batch)

  def lower(self) -> Any:
    """Lowers the prefill of the longest chunk that a prompt begins with, for inspection and planning."""
    batch = self.make_batch([self._any_chunk(0, self.buckets[-1])])
    return self._programs.lower_update(self._function(), batch)

  def make_batch(
    self, chunks: Sequence[Chunk], *, score_prompts: bool = False, masks: Mapping[int, np.ndarray] | None = None
  ) -> PrefillBatch:
    """Returns the arrays of a prefill, padded to the bucket of the longest chunk; see make_prefill_batch.

    With `masks`, the token masks of some rows, other rows may begin with any token.
    """
    num_columns = self.bucket(max(chunk.stop - chunk.start for chunk in chunks))
    num_rows = self.num_rows(num_columns, len(chunks), score_prompts)
    blocks = [self._layout.own_blocks(chunk.slot) if chunk.blocks is None else chunk.blocks for chunk in chunks]
    batch = make_prefill_batch(
      chunks,
      self._settings,
      tables=self._layout.prefill_tables(blocks, num_rows),
      max_len=self._model.max_len,
      num_rows=num_rows,
      num_columns=num_columns,
      reads_cache=self._layout.reads_cache,
      score_prompts=score_prompts,
      num_snapshots=self._layout.num_snapshots,
      encoder_len=self._model.encoder_len,
    )
    return batch if masks is None else batch.replace(masks=mask_rows(masks, num_rows, self._model.vocab_size))

  def bucket(self, length: int) -> int:
    """Returns the shortest bucket that holds a chunk of `length` tokens."""
    return next(bucket for bucket in self.buckets if bucket >= length)

  def num_rows(self, bucket: int, num_chunks: int, score_prompts: bool = False) -> int:
    """Returns how many rows the prefill has that reads `num_chunks` chunks of a bucket.

    Unless the settings say, there are at most two numbers, for one chunk and for several: a chunk may have other last
    bits in a prefill of another size.
    """
    settings = self._settings
    if settings.prefill_rows is not None:
      return settings.prefill_rows
    if score_prompts or settings.num_beams > 1 or (num_chunks == 1 and bucket > 1):
      return 1
    chunk = self._layout.prefill_chunk
    num_tokens = chunk if settings.prefill_chunk is not None else max(_PREFILL_TOKENS, chunk)
    return max(min(_MOST_ROWS, settings.num_slots, num_tokens // bucket), 1)

  def any_chunks(
    self, score_prompts: bool = False, *, num_texts: int | None = None, longest: int | None = None
  ) -> list[list[Chunk]]:
    """Returns chunks for each program that up to `num_texts` texts of at most `longest` tokens need.

    None: any number, any length. A prefill of the chunks writes to no slot.
    """
    size = self.buckets[-1]
    longest = self._model.max_len if longest is None else longest
    starts = (0, size) if size < longest and not self._layout.reads_cache else (0,)
    nums = (1,) if num_texts == 1 else (2, 1)
    counts = {
      bucket: sorted({self.num_rows(bucket, num, score_prompts): num for num in nums}.values())
      for bucket in self.buckets[: 1 + self.buckets.index(self.bucket(min(longest, size)))]
    }
    return [
      [self._any_chunk(start, bucket, row) for row in range(num)]
      for start in starts
      for bucket in counts
      for num in counts[bucket]
    ]

  def _any_chunk(self, start: int, bucket: int, row: int = 0) -> Chunk:
    request = Request(ids=(0,) * (start + bucket), max_tokens=1)
    return Chunk(request=request, slot=self._settings.num_slots + row, start=start, stop=start + bucket, blocks=())

  def _function(self) -> Any:
    return functools.partial(
      read_chunks,
      num_top_logprobs=self._settings.num_top_logprobs,
      by_slot=self._layout.num_parts == 1,
      has_prefix=self._model.has_prefix,
      heads=self._model.heads,
    )
