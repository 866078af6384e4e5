"""SamplingParams and DecodeSettings: how a task generates text.

SamplingParams say how the next token is drawn from the model's logits. DecodeSettings add the sizes that a decoding or
serving job is compiled for; the sampling parameters in them are the defaults of requests.
"""

import dataclasses
from typing import Literal

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.weights import QUANTIZED_DTYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
  """The settings by which one request draws its tokens. The defaults are greedy: always the likeliest token.

  The fields are listed in the order in which they are applied, which is the order of Hugging Face's `generate`. A
  request's `logit_bias` comes after the penalties.

  Fields:
    repetition_penalty: logits of tokens that the text contains already are divided by this number where they are
      positive, and multiplied by it where they are negative (Keskar et al., 2019); 1 changes nothing.
    frequency_penalty: this number, from -2 to 2, is subtracted from a token's logit each time that the token was
      generated; the prompt's tokens do not count. As in OpenAI's API, also the next one.
    presence_penalty: this number, from -2 to 2, is subtracted once from the logits of tokens that were generated.
    temperature: logits are divided by this number; 0 takes the likeliest token and ignores the fields below.
    top_k: keep only this many likeliest tokens; 0 keeps all.
    top_p: keep only the fewest likeliest tokens whose probabilities add up to this number (Holtzman et al., 2020); 1
      keeps all.
    min_p: keep only tokens with at least this fraction of the likeliest token's probability; 0 keeps all.
  """

  repetition_penalty: float = 1.0
  frequency_penalty: float = 0.0
  presence_penalty: float = 0.0
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0

  def __post_init__(self):
    if not 0 <= self.temperature < float('inf'):
      raise UserError(f'temperature={self.temperature} must be 0 (greedy) or positive.')
    if not 0 <= self.top_k < 2**31:
      raise UserError(f'top_k={self.top_k} must be a number of tokens, or 0 for all.')
    if not 0 <= self.top_p <= 1:
      raise UserError(f'top_p={self.top_p} must be from 0 to 1, where 1 is all tokens.')
    if not 0 <= self.min_p <= 1:
      raise UserError(f'min_p={self.min_p} must be from 0 to 1, where 0 is all tokens.')
    if not 0 < self.repetition_penalty < float('inf'):
      raise UserError(f'repetition_penalty={self.repetition_penalty} must be positive, where 1 is none.')
    for name in ('frequency_penalty', 'presence_penalty'):
      if not -2 <= getattr(self, name) <= 2:
        raise UserError(f'{name}={getattr(self, name)} must be from -2 to 2, where 0 is none.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings(SamplingParams):
  """The sizes that a task's decoding is compiled for, and the sampling parameters of requests that give none.

  Fields, beside those of SamplingParams:
    max_len: S, positions per sequence: prompt and generated tokens; None takes the training input's length.
    num_slots: N, how many sequences are generated at once.
    max_cache_tokens: how many tokens the KV cache holds, of all texts together and of beginnings of prompts that later
      ones may reuse; None is num_slots * max_len, or less where memory has no room for it.
    memory_fraction: of a device's memory, what weights and KV cache may take where max_cache_tokens is None.
    prefill_rows: P, how many prompts one prefill reads; None: as many of like lengths as make up a chunk, at most 8.
    prefill_chunk: longer prompts are read in chunks of this many tokens; best a multiple of 16 (TPUs: 64), as blocks
      of the KV cache divide it; None is 64 on CPUs and 256 elsewhere. Beam search reads whole prompts.
    num_drafts: how many tokens of a text a step guesses ahead and checks (decoding/drafts.py); the text stays the same.
    draft_model: a folder, or the directory of a job, of a smaller model with the same tokens, which guesses them; None:
      the model's own heads do (`num_nextn_predict_layers`), or, of a model without any, n-grams of the text. Its own
      settings follow a question mark: FOLDER?accept_config_keys=KEY&dtype=float32.
    min_bucket: chunks are padded to this length or to the next power of two; each such length is compiled once.
    eos_ids: tokens that end a text; None is the tokenizer's end of text.
    max_stop_ids: how many stop tokens a request may have, the end of text included.
    num_top_logprobs: how many of the likeliest tokens are reported beside each token.
    max_tokens: how many tokens a request generates by default; None generates until max_len.
    weights_dtype: how a decoding or serving job holds the weights: 'bfloat16', 'int8', 'nf4' or 'nf4_double' (kernels;
      decoding/weight_storage.py), or None, as training does. The computation has the model's dtype.
    cache_dtype: how the KV cache keeps keys and values: 'int8', 'float8_e4m3fn' or None, the model's dtype.
    cache_attention: what computes attention to the KV cache: 'pallas', a kernel that reads its blocks where they are
      (TPUs and GPUs), 'xla', a loop that copies them out, or None, the kernel where it can.
    num_beams: 1 samples; a larger number searches for the likeliest texts with that many beams instead.
    length_penalty, beam_rule: of beam search, see decoding/beam.py.
    encoder_len: of an encoder-decoder, how many tokens a prompt may have; None takes the training input's length. Then
      `max_len` counts the positions of the decoder.
    start_id: of an encoder-decoder, the token that its decoder reads first.
  """

  max_len: int | None = None
  num_slots: int = 32
  max_cache_tokens: int | None = None
  memory_fraction: float = 0.9
  prefill_rows: int | None = None
  prefill_chunk: int | None = None
  num_drafts: int = 0
  draft_model: str | None = None
  min_bucket: int = 16
  eos_ids: tuple[int, ...] | None = None
  max_stop_ids: int = 4
  num_top_logprobs: int = 0
  max_tokens: int | None = None
  weights_dtype: str | None = None
  cache_dtype: Literal['int8', 'float8_e4m3fn'] | None = None
  cache_attention: Literal['xla', 'pallas'] | None = None
  num_beams: int = 1
  length_penalty: float = 1.0
  beam_rule: Literal['exact', 't5x'] = 'exact'
  encoder_len: int | None = None
  start_id: int = 0

  def __post_init__(self):
    counts = ('max_len', 'num_slots', 'prefill_rows', 'prefill_chunk', 'min_bucket', 'max_stop_ids', 'max_tokens')
    for name in (*counts, 'num_beams', 'encoder_len', 'max_cache_tokens'):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise UserError(f'{name}={value} must be at least 1.')
    if not 0 < self.memory_fraction <= 1:
      raise UserError(f'memory_fraction={self.memory_fraction} must be above 0 and at most 1.')
    if self.prefill_chunk is not None and self.prefill_chunk < self.min_bucket:
      raise UserError(f'prefill_chunk={self.prefill_chunk} must be at least min_bucket={self.min_bucket}: raise it.')
    if self.prefill_rows is not None and self.prefill_rows > self.num_slots:
      raise UserError(f'prefill_rows={self.prefill_rows} must be at most num_slots={self.num_slots}.')
    choices: dict[str, tuple[str | None, ...]] = {
      'cache_dtype': ('int8', 'float8_e4m3fn', None),
      'cache_attention': ('xla', 'pallas', None),
      'beam_rule': ('exact', 't5x'),
      'weights_dtype': ('bfloat16', *QUANTIZED_DTYPES, None),
    }
    for name, known in choices.items():
      if getattr(self, name) not in known:
        raise UserError(f'{name}={getattr(self, name)!r} must be one of {known}.')
    if self.eos_ids is not None and len(self.eos_ids) > self.max_stop_ids:
      raise UserError(f'eos_ids={self.eos_ids} are more than max_stop_ids={self.max_stop_ids}: raise max_stop_ids.')
    for name in ('num_top_logprobs', 'num_drafts'):
      if getattr(self, name) < 0:
        raise UserError(f'{name}={getattr(self, name)} must not be negative.')
    if self.draft_model and not self.num_drafts:
      raise UserError(f'draft_model={self.draft_model!r} guesses num_drafts=0 tokens: set num_drafts, such as to 4.')
    super().__post_init__()

  def sampling_for(self, given: object) -> SamplingParams:
    """The sampling parameters of a request: its own attributes of these names, and the defaults where they are None.

    Raises a UserError: a value is impossible.
    """
    values = {field.name: getattr(given, field.name) for field in dataclasses.fields(SamplingParams)}
    return SamplingParams(**{name: getattr(self, name) if own is None else own for name, own in values.items()})

  def end_ids(self, eos_id: int | None) -> tuple[int, ...]:
    """The tokens that end a text, given the tokenizer's end of text."""
    return self.eos_ids if self.eos_ids is not None else () if eos_id is None else (eos_id,)

  def buckets(self, longest: int) -> tuple[int, ...]:
    """The lengths to which chunks are padded: min_bucket, the powers of two above it, and `longest` as the last one."""
    buckets = []
    bucket = self.min_bucket
    while bucket < longest:
      buckets.append(bucket)
      bucket = 1 << bucket.bit_length()
    return (*buckets, longest)
