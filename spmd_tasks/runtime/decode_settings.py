"""SamplingParams and DecodeSettings: how a task generates text.

SamplingParams define how the next token is sampled from the model's logits. DecodeSettings add the sizes that a
decoding or serving job is compiled for; their sampling parameters are the defaults of requests.
"""

import dataclasses
import math
from typing import Literal

from spmd_tasks.errors import UserError
from spmd_tasks.sharding.weights import QUANTIZED_DTYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
  """The sampling parameters of one request. The defaults are greedy: always the likeliest token.

  Fields are listed in the order in which they are applied, which is the order of Hugging Face's `generate`. A request's
  `logit_bias` is applied after the penalties.

  Fields:
    repetition_penalty: positive logits of tokens that the text contains are divided by this number, negative ones are
      multiplied by it (Keskar et al., 2019); 1 turns it off.
    frequency_penalty: from -2 to 2; subtracted from a token's logit once for each time that the token was generated, as
      in OpenAI's API. The prompt's tokens do not count.
    presence_penalty: from -2 to 2; subtracted once from the logits of tokens that were generated, as in OpenAI's API.
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
    for name, is_valid, constraint in (
      ('temperature', 0 <= self.temperature < math.inf, '0 (greedy) or positive'),
      ('top_k', 0 <= self.top_k < 2**31, 'a number of tokens, or 0 for all'),
      ('top_p', 0 <= self.top_p <= 1, 'from 0 to 1, where 1 is all tokens'),
      ('min_p', 0 <= self.min_p <= 1, 'from 0 to 1, where 0 is all tokens'),
      ('repetition_penalty', 0 < self.repetition_penalty < math.inf, 'positive, where 1 is none'),
      ('frequency_penalty', -2 <= self.frequency_penalty <= 2, 'from -2 to 2, where 0 is none'),
      ('presence_penalty', -2 <= self.presence_penalty <= 2, 'from -2 to 2, where 0 is none'),
    ):
      if not is_valid:
        raise UserError(f'{name}={getattr(self, name)} must be {constraint}.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings(SamplingParams):
  """The sizes that a task's decoding is compiled for, and the default sampling parameters of requests.

  Fields, in addition to SamplingParams:
    max_len: S, positions per sequence: prompt and generated tokens; None takes the training input's length.
    num_slots: N, the number of sequences that are generated at once.
    max_cache_tokens: the number of tokens in the KV cache, including prefixes of prompts that later prompts may reuse;
      None is num_slots * max_len, or less if memory does not suffice.
    memory_fraction: the fraction of a device's memory for weights and KV cache if max_cache_tokens is None.
    prefill_rows: P, the number of prompts per prefill; None: as many of similar length as fill a chunk, at most 8.
    prefill_chunk: longer prompts are prefilled in chunks of this many tokens, preferably a multiple of 16 (TPUs: 64),
      so that blocks of the KV cache divide it; None is 64 on CPUs and 256 elsewhere. Beam search prefills whole
      prompts.
    num_snapshots: for a model with recurrent layers, how many states of prompts' beginnings are kept, from which later
      prompts continue; None is num_slots. Each takes as much memory as the state of a slot; 0 keeps none.
    num_drafts: the number of draft tokens that a step verifies (decoding/drafts.py); drafts do not change the text.
    draft_model: a model folder or job directory of a smaller model with the same tokens, which drafts; None uses the
      model's own heads (`num_nextn_predict_layers`), or n-grams of the text if it has none. Settings follow a question
      mark: FOLDER?accept_config_keys=KEY&dtype=float32.
    min_bucket: chunks are padded to this length or to the next power of two; each such length is compiled once.
    eos_ids: tokens that end a text; None is the tokenizer's end of text.
    max_stop_ids: the largest number of stop tokens of a request, including the end of text.
    num_top_logprobs: the number of likeliest tokens that are reported for each token.
    max_tokens: the number of tokens that a request generates by default; None generates until max_len.
    weights_dtype: the dtype in which a decoding or serving job stores kernels: 'bfloat16', 'int8', 'nf4' or
      'nf4_double' (decoding/weight_storage.py), or None for training's. The model still computes in its own dtype.
    cache_dtype: the dtype of keys and values in the KV cache: 'int8', 'float8_e4m3fn' or None for the model's.
    cache_attention: the implementation of attention to the KV cache: 'pallas', a kernel that reads blocks in place
      (GPUs), 'xla', a loop that copies blocks, or None, the kernel if it supports the layer.
    num_beams: 1 samples; a larger number runs beam search instead.
    length_penalty, beam_rule: settings of beam search, see decoding/beam.py.
    encoder_len: for an encoder-decoder, the largest length of a prompt; None takes the training input's length.
      `max_len` then counts the decoder's positions.
    start_id: for an encoder-decoder, the decoder's first token.
  """

  max_len: int | None = None
  num_slots: int = 32
  max_cache_tokens: int | None = None
  memory_fraction: float = 0.9
  prefill_rows: int | None = None
  prefill_chunk: int | None = None
  num_snapshots: int | None = None
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
    minimums: dict[str, int] = dict.fromkeys((*counts, 'num_beams', 'encoder_len', 'max_cache_tokens'), 1)
    minimums |= {'num_top_logprobs': 0, 'num_drafts': 0, 'num_snapshots': 0}
    choices: dict[str, tuple[str | None, ...]] = {
      'cache_dtype': ('int8', 'float8_e4m3fn', None),
      'cache_attention': ('xla', 'pallas', None),
      'beam_rule': ('exact', 't5x'),
      'weights_dtype': ('bfloat16', *QUANTIZED_DTYPES, None),
    }
    is_at_least = lambda name, minimum: getattr(self, name) is None or getattr(self, name) >= minimum
    for name, is_valid, constraint in (
      *((name, is_at_least(name, minimum), f'at least {minimum}') for name, minimum in minimums.items()),
      *((name, getattr(self, name) in values, f'one of {values}') for name, values in choices.items()),
      ('memory_fraction', 0 < self.memory_fraction <= 1, 'above 0 and at most 1'),
      ('prefill_chunk', is_at_least('prefill_chunk', self.min_bucket), f'at least min_bucket={self.min_bucket}'),
      ('prefill_rows', (self.prefill_rows or 0) <= self.num_slots, f'at most num_slots={self.num_slots}'),
      ('eos_ids', len(self.eos_ids or ()) <= self.max_stop_ids, f'at most max_stop_ids={self.max_stop_ids} tokens'),
      ('draft_model', not self.draft_model or self.num_drafts, 'None if num_drafts=0: set num_drafts, such as to 4'),
    ):
      if not is_valid:
        raise UserError(f'{name}={getattr(self, name)!r} must be {constraint}.')
    super().__post_init__()

  def sampling_for(self, request: object) -> SamplingParams:
    """Returns the sampling parameters of a request: its attributes of these names, or the defaults for None.

    Raises a UserError if a value is out of range.
    """
    values = {field.name: getattr(request, field.name) for field in dataclasses.fields(SamplingParams)}
    return SamplingParams(**{name: getattr(self, name) if own is None else own for name, own in values.items()})

  def end_ids(self, eos_id: int | None) -> tuple[int, ...]:
    """Returns the tokens that end a text, given the tokenizer's end of text."""
    return self.eos_ids if self.eos_ids is not None else () if eos_id is None else (eos_id,)

  def buckets(self, longest: int) -> tuple[int, ...]:
    """Returns the lengths to which chunks are padded: min_bucket, the powers of two above it, and `longest`."""
    buckets = []
    bucket = self.min_bucket
    while bucket < longest:
      buckets.append(bucket)
      bucket = 1 << bucket.bit_length()
    return (*buckets, longest)
