"""Prefill: reads chunks of prompts into their slots, by one program for each size of a batch.

    prefill = Prefill(programs)
    state, first = prefill(variables, state, prefill.make_batch(chunks))

Shapes: N slots, P rows of a prefill.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

import numpy as np

from spmd_tasks.decoding import step_functions
from spmd_tasks.decoding.constraints import mask_rows
from spmd_tasks.decoding.decode_programs import DecodePrograms
from spmd_tasks.decoding.requests import Chunk, PrefillBatch, Request, make_prefill_batch
from spmd_tasks.decoding.step_functions import DecodeState, Outputs
from spmd_tasks.runtime.task import Variables

_MOST_ROWS = 8  # of a prefill, where the settings do not say
_PREFILL_TOKENS = 128  # of several prompts in one prefill, where chunks are shorter


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
    """Reads the chunks, and samples the first token of each prompt that ends; see step_functions.prefill."""
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
      encoder_len=self._model.encoder_len,
    )
    return batch if masks is None else batch.replace(masks=mask_rows(masks, num_rows, self._model.vocab_size))

  def bucket(self, length: int) -> int:
    """Returns the shortest bucket that holds a chunk of `length` tokens."""
    return next(bucket for bucket in self.buckets if bucket >= length)

  def num_rows(self, bucket: int, num_chunks: int, score_prompts: bool = False) -> int:
    """Returns how many rows the prefill has that reads so many chunks of a bucket.

    There are two at most, for one chunk and for more, where the settings do not say: a row of one may differ from that
    of the other in last bits.
    """
    settings = self._settings
    if settings.prefill_rows is not None:
      return settings.prefill_rows
    if score_prompts or settings.num_beams > 1 or (num_chunks == 1 and bucket > 1):
      return 1
    chunk = self._layout.prefill_chunk
    num_tokens = chunk if settings.prefill_chunk is not None else max(_PREFILL_TOKENS, chunk)
    return max(min(_MOST_ROWS, settings.num_slots, num_tokens // bucket), 1)

  def any_chunks(self, score_prompts: bool = False) -> list[list[Chunk]]:
    """Returns chunks for each program; a prefill of them writes to no slot."""
    size = self.buckets[-1]
    starts = (0, size) if size < self._model.max_len and not self._layout.reads_cache else (0,)
    counts = {
      bucket: sorted({self.num_rows(bucket, num, score_prompts): num for num in (2, 1)}.values())
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
    return Chunk(request=request, slot=self._settings.num_slots + row, start=start, stop=start + bucket, blocks=())

  def _function(self) -> Any:
    return functools.partial(
      step_functions.prefill,
      num_top_logprobs=self._settings.num_top_logprobs,
      by_slot=self._layout.num_parts == 1,
      has_prefix=self._model.has_prefix,
      heads=self._model.heads,
    )
