"""Requests on the host, and the arrays that a prefill takes of them."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any, Protocol

import numpy as np

from spmd_tasks.decoding.loop import Requests
from spmd_tasks.decoding.samplers import Sampling
from spmd_tasks.runtime.decode_settings import DecodeSettings

GREEDY = {'repetition_penalty': 1.0, 'temperature': 0.0, 'top_k': 0, 'top_p': 1.0, 'min_p': 0.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One sequence to generate.

  Fields:
    ids: the prompt's tokens, at least one.
    max_tokens: how many may follow; 0 only reads the prompt, for its scores.
    seed, sample: which draw this is, see samplers.request_keys.
    stop_ids: tokens that end it; they are in the result's ids but not in its text.
    stop: strings that end it; the text ends before the first of them.
    score_prompt: whether the prompt's own log-probabilities are wanted.
    sampling: values of Sampling's fields.
  """

  ids: tuple[int, ...]
  max_tokens: int
  seed: int = 0
  sample: int = 0
  stop_ids: tuple[int, ...] = ()
  stop: tuple[str, ...] = ()
  score_prompt: bool = False
  sampling: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict(GREEDY))

  def as_sample(self, sample: int) -> 'Request':
    """Another draw for the same prompt; prompts are scored with the first."""
    score = self.score_prompt and sample == 0
    return dataclasses.replace(self, sample=sample, score_prompt=score)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
  """A piece of a prompt, for one prefill.

  Prompts are cut at multiples of `prefill_chunk`, always: the same tokens are then read by the same program whether
  another slot's are reused or not.

  Fields:
    request: whose prompt it is.
    slot: where it goes.
    start: position of its first token, a multiple of prefill_chunk.
    stop: position behind its last token; where that is the prompt's length, the first token is sampled.
    source: the slot that holds the tokens before `start`: this one, or another whose prompt begins with the same.
  """

  request: Request
  slot: int
  start: int
  stop: int
  source: int


def chunk_prompt(request: Request, slot: int, size: int) -> list[Chunk]:
  """All chunks of a prompt, of `size` tokens each but for the last one."""
  length = len(request.ids)
  return [
    Chunk(request=request, slot=slot, start=start, stop=min(start + size, length), source=slot)
    for start in range(0, length, size)
  ]


class Sizes(Protocol):
  """What make_requests needs of runtime.decode_steps.DecodeSteps."""

  settings: DecodeSettings
  max_len: int

  def bucket(self, length: int) -> int: ...


def make_requests(steps: Sizes, chunks: Sequence[Chunk], *, score_prompts: bool = False) -> Requests:
  """The arrays of a prefill, in the bucket of the longest chunk; rows that are left over go to no slot.

  Either all chunks are the first of their prompts or none is. `source` is not looked at.
  """
  settings = steps.settings
  num_rows = settings.prefill_rows
  bucket = steps.bucket(max(chunk.stop - chunk.start for chunk in chunks))
  requests = [chunk.request for chunk in chunks]

  def rows(dtype: Any, values: Iterable[Any], fill: Any, *shape: int) -> Any:
    array = np.full((num_rows, *shape), fill, dtype)
    for row, value in enumerate(values):
      if shape:
        array[row, : len(value)] = value
      else:
        array[row] = value
    return array

  def sampling(name: str) -> Any:
    dtype = np.int32 if name == 'top_k' else np.float32
    return rows(dtype, [request.sampling[name] for request in requests], 0 if name != 'repetition_penalty' else 1)

  is_first = chunks[0].start == 0
  before = None if is_first else rows(np.int32, [c.request.ids[: c.start] for c in chunks], -1, steps.max_len)
  targets = [c.request.ids[c.start + 1 : c.stop + 1] for c in chunks]
  max_tokens = [c.request.max_tokens if c.stop == len(c.request.ids) else 0 for c in chunks]
  return Requests(
    ids=rows(np.int32, [c.request.ids[c.start : c.stop] for c in chunks], 0, bucket),
    lengths=rows(np.int32, [c.stop - c.start for c in chunks], 1),
    starts=rows(np.int32, [c.start for c in chunks], 0),
    before=before,
    targets=rows(np.int32, targets, -1, bucket) if score_prompts else None,
    slots=slot_rows(settings, [chunk.slot for chunk in chunks]),
    max_tokens=rows(np.int32, max_tokens, 1 if settings.num_beams > 1 else 0),
    seeds=rows(np.uint32, [request.seed for request in requests], 0),
    samples=rows(np.uint32, [request.sample for request in requests], 0),
    stop_ids=rows(np.int32, [request.stop_ids for request in requests], -1, settings.max_stop_ids),
    sampling=Sampling(**{name: sampling(name) for name in GREEDY}),
  )


def slot_rows(settings: DecodeSettings, slots: Sequence[int]) -> Any:
  """int32 [P]: slots for the rows of a prefill; rows that are left over go to slots that do not exist."""
  nowhere = settings.num_slots + np.arange(len(slots), settings.prefill_rows)
  return np.concatenate([np.asarray(slots), nowhere]).astype(np.int32)
