"""DecodeSettings: the sizes that a decoding job is compiled for, and what its requests take by default."""

import dataclasses

from spmd_tasks.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings:
  """How a task generates text. The settings of requests are defaults: a request may have others.

  Fields:
    max_len: S, positions per sequence: prompt and generated tokens; None for the training input's length.
    num_slots: N, how many sequences are generated at once.
    prefill_rows: P, how many prompts are read at once.
    prefill_chunk: longer prompts are read so many tokens at a time. Beam search reads them whole.
    min_bucket: chunks are padded to this length or the next power of two, each of which is compiled once.
    max_stop_ids: how many stop tokens a request may have, the end of text included.
    num_top_logprobs: how many of the likeliest tokens are reported beside each token.
    max_tokens: of a request; None for what max_len leaves.
    temperature, top_k, top_p, min_p, repetition_penalty: of a request, see decoding/samplers.py.
    num_beams: 1 samples; more searches for the likeliest texts with that many beams instead.
    length_penalty: of beam search, see decoding/beam.py.
  """

  max_len: int | None = None
  num_slots: int = 8
  prefill_rows: int = 1
  prefill_chunk: int = 256
  min_bucket: int = 16
  max_stop_ids: int = 4
  num_top_logprobs: int = 0
  max_tokens: int | None = None
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  num_beams: int = 1
  length_penalty: float = 1.0

  def __post_init__(self):
    counts = ('max_len', 'num_slots', 'prefill_rows', 'prefill_chunk', 'min_bucket', 'max_stop_ids', 'max_tokens')
    for name in (*counts, 'num_beams'):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise UserError(f'{name}={value} must be at least 1.')
    if self.prefill_chunk < self.min_bucket:
      raise UserError(
        f'prefill_chunk={self.prefill_chunk} must be at least min_bucket={self.min_bucket}, to which chunks are '
        'padded: raise the one or lower the other.'
      )
    if self.prefill_rows > self.num_slots:
      raise UserError(f'prefill_rows={self.prefill_rows} must be at most num_slots={self.num_slots}.')
    if self.num_top_logprobs < 0:
      raise UserError(f'num_top_logprobs={self.num_top_logprobs} must not be negative.')
    check_sampling(
      temperature=self.temperature,
      top_k=self.top_k,
      top_p=self.top_p,
      min_p=self.min_p,
      repetition_penalty=self.repetition_penalty,
    )


def check_sampling(*, temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float) -> None:
  """Raises a ValueError that names the first setting which no sampler can follow."""
  if not 0 <= temperature < float('inf'):
    raise UserError(f'temperature={temperature} must be 0 (greedy) or positive.')
  if not 0 <= top_k < 2**31:
    raise UserError(f'top_k={top_k} must be a number of tokens, or 0 for all.')
  if not 0 <= top_p <= 1:
    raise UserError(f'top_p={top_p} must be from 0 to 1, where 1 is all tokens.')
  if not 0 <= min_p <= 1:
    raise UserError(f'min_p={min_p} must be from 0 to 1, where 0 is all tokens.')
  if not 0 < repetition_penalty < float('inf'):
    raise UserError(f'repetition_penalty={repetition_penalty} must be positive, where 1 is none.')


def prefill_buckets(min_bucket: int, longest: int) -> tuple[int, ...]:
  """The lengths to which chunks are padded: powers of two from min_bucket on, and the longest."""
  buckets = []
  bucket = min_bucket
  while bucket < longest:
    buckets.append(bucket)
    bucket = 1 << bucket.bit_length()
  return (*buckets, longest)
