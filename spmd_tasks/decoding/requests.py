"""Requests on the host, chunks of their prompts, and the arrays of a prefill.

    request = Request(ids=(1, 17, 34), max_tokens=20, sampling=SamplingParams(temperature=0.8), seed=7)
    chunks = chunk_prompt(request, slot=0, size=256)
    batch = make_prefill_batch(chunks[:1], settings, max_len=1024, num_columns=256)

Shapes: N slots, P rows of a prefill, T tokens of a chunk, S positions, K stop ids, W words of a token mask.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import functools
from typing import Any

from flax import struct
import jax
import numpy as np

from spmd_tasks.decoding.sampling import SamplingArrays
from spmd_tasks.runtime import DecodeSettings, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One sequence to generate.

  Fields:
    ids: the prompt's tokens, at least one; for an encoder-decoder, the tokens that its decoder begins with.
    encoder_ids: the tokens that the encoder of an encoder-decoder reads.
    max_tokens: how many tokens to generate at most; 0 only reads the prompt, for its scores.
    seed, sample: select the random numbers, see sampling.request_keys.
    stop_ids: tokens that end the sequence; the result's ids contain them, its text does not.
    stop: strings that end the sequence; the text ends before the first one.
    kept_stops: which of `stop` and `stop_ids` stay at the end of the text.
    min_tokens: how many tokens to generate before a stop string ends the sequence; a matcher withholds stop tokens.
    score_prompt: whether to return the log-probabilities of the prompt's tokens.
    sampling: the sampling parameters.
    logit_bias: pairs of a token and the number that is added to its logit; at most MAX_BIASES.
    adapter: the number of the request's low-rank adapter; 0 for none.
    cache_key: only prompts with the same key share blocks of the KV cache, so that nobody can find out from the time of
      an answer what others have asked.
    num_drafts: how many drafts a step may check (drafts.py), at most the settings' number, which is the default. The
      text does not depend on it.
    prediction: tokens that the text may resemble, for drafts by n-grams.
    priority: requests with lower numbers take slots first and are preempted last; equal ones first come, first served.
  """

  ids: tuple[int, ...]
  encoder_ids: tuple[int, ...] = ()
  max_tokens: int
  seed: int = 0
  sample: int = 0
  stop_ids: tuple[int, ...] = ()
  stop: tuple[str, ...] = ()
  kept_stops: tuple[str | int, ...] = ()
  min_tokens: int = 0
  score_prompt: bool = False
  sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
  logit_bias: tuple[tuple[int, float], ...] = ()
  adapter: int = 0
  cache_key: str = ''
  num_drafts: int | None = None
  prediction: tuple[int, ...] = ()
  priority: int = 0

  def as_sample(self, sample: int) -> 'Request':
    """Returns the request for another sample of the same prompt; only sample 0 scores the prompt."""
    return dataclasses.replace(self, sample=sample, score_prompt=self.score_prompt and sample == 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
  """A piece of a prompt, for one prefill.

  Prompts are always cut at multiples of `prefill_chunk`, so that the same program reads the same tokens whether or not
  another prompt's chunks are reused.

  Fields:
    request: the request whose prompt is cut.
    slot: the slot that receives the tokens' keys and values.
    start: the position of the first token, a multiple of prefill_chunk.
    stop: the position after the last token. If it is the prompt's length, the prefill samples the first token.
    blocks: the blocks of the slot's text in order, at least for the positions before `stop`; None if each slot has its
      own blocks.
    restored: the snapshot with which the slot's state continues, if another prompt's chunks precede this one.
    saved: the snapshot to which the state after this chunk is written; None for none.
  """

  request: Request
  slot: int
  start: int
  stop: int
  blocks: tuple[int, ...] | None = None
  restored: int | None = None
  saved: int | None = None


def chunk_prompt(request: Request, slot: int, size: int) -> list[Chunk]:
  """Cuts a prompt into chunks of `size` tokens; the last one may be shorter."""
  length = len(request.ids)
  return [
    Chunk(request=request, slot=slot, start=start, stop=min(start + size, length)) for start in range(0, length, size)
  ]


class PrefillBatch(struct.PyTreeNode):
  """P chunks of prompts, as the arrays that a prefill takes.

  Attributes:
    ids: int32 [P, T], padded at the end.
    lengths: int32 [P], at least 1.
    starts: int32 [P], the position of the first token.
    before: int32 [P, S], the prompt's tokens before the chunk, padded with -1; None if all chunks are first chunks.
    targets: int32 [P, T], the prompt's token after each of `ids`, -1 at its end; None if no prompt is scored.
    slots: int32 [P], all different; N or more for unused rows, which the scatter into the state drops.
    tables: int32 [1, P, M], the blocks of each row, padded with ids from the number of blocks on.
    followers: int32 [P], the prompt's token after the chunk; 0 at its end.
    max_tokens: int32 [P], how many tokens to generate at most; 0 if another chunk of the prompt follows, or if the
      prompt is only scored.
    seeds, samples: uint32 [P], see sampling.request_keys.
    stop_ids: int32 [P, K], tokens that end the sequence, padded with -1.
    sampling: arrays [P].
    adapters: int32 [P], the low-rank adapter of each row; 0 for none.
    masks: uint32 [P, W], the tokens that may come first (constraints.py); None if no request is constrained.
    restored, saved: int32 [P], the snapshot that each row's state continues from, and the one that it is written to. No
      two rows save to the same one. A row without one has C, the number of snapshots, or more. None if C is 0.
    encoder_ids, encoder_lengths: int32 [P, E] and [P], the encoder's texts; None if the model has no encoder.
  """

  ids: jax.Array
  lengths: jax.Array
  starts: jax.Array
  before: jax.Array | None
  targets: jax.Array | None
  slots: jax.Array
  tables: jax.Array
  followers: jax.Array
  max_tokens: jax.Array
  seeds: jax.Array
  samples: jax.Array
  stop_ids: jax.Array
  sampling: SamplingArrays
  adapters: jax.Array
  masks: jax.Array | None = None
  restored: Any = None
  saved: Any = None
  encoder_ids: Any = None
  encoder_lengths: Any = None


def make_prefill_batch(
  chunks: Sequence[Chunk],
  settings: DecodeSettings,
  *,
  tables: Any,
  max_len: int,
  num_rows: int,
  num_columns: int,
  reads_cache: bool = False,
  score_prompts: bool = False,
  num_snapshots: int = 0,
  encoder_len: int | None = None,
) -> PrefillBatch:
  """Returns the arrays of a prefill, as host arrays.

  Args:
    chunks: at most P chunks; either all of them are first chunks of their prompts, or none is. Ignores their `blocks`.
    settings: has N and K.
    tables: as in the batch.
    max_len, num_rows, num_columns, encoder_len: S, P, T and E.
    reads_cache: whether the batch has `before` for first chunks too.
    score_prompts: whether the batch has `targets`.
    num_snapshots: how many there are.
  """
  requests = [chunk.request for chunk in chunks]

  rows = functools.partial(filled_rows, num_rows)
  is_first = chunks[0].start == 0 and not reads_cache
  before = None if is_first else rows(np.int32, [c.request.ids[: c.start] for c in chunks], -1, max_len)
  targets = [c.request.ids[c.start + 1 : c.stop + 1] for c in chunks]
  max_tokens = [c.request.max_tokens if c.stop == len(c.request.ids) else 0 for c in chunks]
  no_snapshots = range(num_snapshots, num_snapshots + num_rows)

  def snapshots(numbers: Iterable[int | None]) -> Any:
    named = [other if number is None else number for number, other in zip(numbers, no_snapshots)]
    return rows(np.int32, [*named, *no_snapshots[len(chunks) :]], 0) if num_snapshots else None

  return PrefillBatch(
    ids=rows(np.int32, [c.request.ids[c.start : c.stop] for c in chunks], 0, num_columns),
    lengths=rows(np.int32, [c.stop - c.start for c in chunks], 1),
    starts=rows(np.int32, [c.start for c in chunks], 0),
    before=before,
    targets=rows(np.int32, targets, -1, num_columns) if score_prompts else None,
    # Unused rows get different ids from N on, which a scatter drops.
    slots=rows(
      np.int32, [*(c.slot for c in chunks), *range(settings.num_slots + len(chunks), settings.num_slots + num_rows)], 0
    ),
    tables=tables,
    followers=rows(np.int32, [(*c.request.ids, 0)[c.stop] for c in chunks], 0),
    max_tokens=rows(np.int32, max_tokens, 1 if settings.num_beams > 1 else 0),
    seeds=rows(np.uint32, [request.seed for request in requests], 0),
    samples=rows(np.uint32, [request.sample for request in requests], 0),
    stop_ids=rows(np.int32, [request.stop_ids for request in requests], -1, settings.max_stop_ids),
    sampling=SamplingArrays.from_params(
      [request.sampling for request in requests], num_rows, [request.logit_bias for request in requests]
    ),
    adapters=rows(np.int32, [request.adapter for request in requests], 0),
    restored=snapshots(chunk.restored for chunk in chunks),
    saved=snapshots(chunk.saved for chunk in chunks),
    encoder_ids=encoder_len and rows(np.int32, [request.encoder_ids for request in requests], 0, encoder_len),
    encoder_lengths=encoder_len and rows(np.int32, [len(request.encoder_ids) for request in requests], 0),
  )


def filled_rows(num_rows: int, dtype: Any, values: Iterable[Any], fill: Any, *size: int) -> Any:
  """Returns a host array [num_rows, *size] that begins with these values, padded with `fill`."""
  array = np.full((num_rows, *size), fill, dtype)
  for row, value in enumerate(values):
    array[(row, slice(len(value))) if size else row] = value
  return array
