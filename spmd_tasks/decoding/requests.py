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
    ids: the prompt's tokens, at least one; of an encoder-decoder, those that its decoder begins with.
    encoder_ids: of an encoder-decoder, the tokens that its encoder reads.
    max_tokens: how many tokens may follow; 0 only reads the prompt, for its scores.
    seed, sample: select one random draw, see sampling.request_keys.
    stop_ids: tokens that end the sequence; the result's ids contain them, its text does not.
    stop: strings that end the sequence; the text ends before the first of them.
    kept_stops: which of `stop` and `stop_ids` stay at the end of the text.
    min_tokens: how many tokens come before a stop string may end the sequence; a matcher withholds stop tokens.
    score_prompt: whether the prompt's own log-probabilities are wanted.
    sampling: how tokens are drawn.
    logit_bias: pairs of a token and what is added to its logit; at most MAX_BIASES.
    adapter: the number of the low-rank adapter that the model has for this request; 0 is none.
    cache_key: prompts share what the KV cache holds with those of the same key only, so that nobody finds out by the
      time of an answer what others have asked.
    num_drafts: how many tokens a step may guess ahead (drafts.py), at most the settings' number, which None takes; the
      text is the same whatever the number.
    prediction: tokens that the text may resemble, which n-grams then guess from.
    priority: the least takes a slot first and gives it up last; those of one priority in the order of their coming.
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
    """Another draw for the same prompt; only the first draw scores the prompt."""
    score = self.score_prompt and sample == 0
    return dataclasses.replace(self, sample=sample, score_prompt=score)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
  """A piece of a prompt, for one prefill.

  Prompts are always cut at multiples of `prefill_chunk`: the same program then reads the same tokens, whether another
  prompt's chunks are reused or not.

  Fields:
    request: the request whose prompt is cut.
    slot: the slot that receives the tokens' keys and values.
    start: position of the first token, a multiple of prefill_chunk.
    stop: position behind the last token; where this is the prompt's length, the prefill samples the first token.
    blocks: the blocks of the KV cache that hold the slot's text, in order, for the positions before `stop` and some
      behind it; None where each slot has its own.
  """

  request: Request
  slot: int
  start: int
  stop: int
  blocks: tuple[int, ...] | None = None


def chunk_prompt(request: Request, slot: int, size: int) -> list[Chunk]:
  """All chunks of a prompt, `size` tokens each except for the last one."""
  length = len(request.ids)
  return [
    Chunk(request=request, slot=slot, start=start, stop=min(start + size, length)) for start in range(0, length, size)
  ]


class PrefillBatch(struct.PyTreeNode):
  """P chunks of prompts, as the arrays that a prefill takes.

  Attributes:
    ids: int32 [P, T], padded at the end.
    lengths: int32 [P], at least 1.
    starts: int32 [P], position of the first token.
    before: int32 [P, S], the prompt's tokens before the chunk, padded with -1; None where all chunks are the first ones
      of their prompts.
    targets: int32 [P, T], the prompt's token that follows each of `ids`, -1 where there is none; None where no prompt
      is scored.
    slots: int32 [P], all different; unused rows have ids from N on, which the scatter into the state drops.
    tables: int32 [1, P, M], the blocks of each row, padded with ids behind the pool.
    followers: int32 [P], the prompt's token behind the chunk; 0 where it ends.
    max_tokens: int32 [P], how many tokens may be generated; 0 where another chunk of the prompt follows, and where the
      prompt is only scored.
    seeds, samples: uint32 [P], see sampling.request_keys.
    stop_ids: int32 [P, K], tokens that end the sequence, padded with -1.
    sampling: arrays [P].
    adapters: int32 [P], the number of each row's low-rank adapter; 0 is none.
    masks: uint32 [P, W], the tokens that may come first (constraints.py); None where no request is constrained.
    encoder_ids, encoder_lengths: int32 [P, E] and [P], what an encoder reads; None where the model has none.
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
  encoder_len: int | None = None,
) -> PrefillBatch:
  """The arrays of a prefill, as host arrays.

  Args:
    chunks: at most P, either all the first ones of their prompts or none of them. Their `blocks` are ignored.
    settings, tables: give N and K; as in the batch.
    max_len, num_rows, num_columns, encoder_len: S, P, T and E.
    reads_cache, score_prompts: whether the batch has `before` for first chunks, too, and targets.
  """
  requests = [chunk.request for chunk in chunks]

  rows = functools.partial(filled_rows, num_rows)
  is_first = chunks[0].start == 0 and not reads_cache
  before = None if is_first else rows(np.int32, [c.request.ids[: c.start] for c in chunks], -1, max_len)
  targets = [c.request.ids[c.start + 1 : c.stop + 1] for c in chunks]
  max_tokens = [c.request.max_tokens if c.stop == len(c.request.ids) else 0 for c in chunks]
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
    encoder_ids=encoder_len and rows(np.int32, [request.encoder_ids for request in requests], 0, encoder_len),
    encoder_lengths=encoder_len and rows(np.int32, [len(request.encoder_ids) for request in requests], 0),
  )


def filled_rows(num_rows: int, dtype: Any, values: Iterable[Any], fill: Any, *size: int) -> Any:
  """A host array of `num_rows` numbers, or rows of a size, that begin with these values; the rest is `fill`."""
  array = np.full((num_rows, *size), fill, dtype)
  for row, value in enumerate(values):
    array[(row, slice(len(value))) if size else row] = value
  return array
