"""SpanCorruption: T5's denoising objective for any text input, exactly resumable and without TensorFlow.

    tokens_length, targets_length = span_corruption_lengths(512)                 # 568 and 114
    text = TextInput(source=..., tokenizer=SentencePieceTokenizer(...), batch_size=128, seq_len=tokens_length)
    SpanCorruption(text=text, inputs_length=512)

The encoder reads a row in which a sentinel replaces each random span, and the decoder predicts the spans, each after
its sentinel: `Thank you <extra_id_0> me to` and `<extra_id_0> for inviting`. The masks depend only on `seed` and on the
number of the row in the data.

Legend: B global batch size, N tokens of a row of text, S length of the inputs, T length of the targets.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any, cast

from absl import logging
import jax
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import base
from spmd_tasks.inputs.tokenizers import Tokenizer, tokenizer_of


def span_corruption_lengths(
  inputs_length: int, noise_density: float = 0.15, mean_span_length: float = 3.0
) -> tuple[int, int]:
  """Returns (N, T): how many tokens of text fill inputs of this length, and the length of their targets with eos.

  The numbers are the same as in T5's `random_spans_helper`.
  """

  def lengths(num_tokens: int) -> tuple[int, int]:
    num_noise = round(num_tokens * noise_density)
    num_spans = round(num_noise / mean_span_length)
    return num_tokens - num_noise + num_spans + 1, num_noise + num_spans + 1

  num_tokens = inputs_length - 1
  while lengths(num_tokens + 1)[0] <= inputs_length:
    num_tokens += 1
  used, targets_length = lengths(num_tokens)
  if noise_density == 0.5 and targets_length > used:  # as in T5, which prefers inputs and targets of equal length
    return num_tokens - 1, targets_length - 1
  return num_tokens, targets_length


def noise_mask(
  length: int, rng: np.random.Generator, noise_density: float = 0.15, mean_span_length: float = 3.0
) -> np.ndarray:
  """Draws a mask of the noise tokens, bool [length].

  As in T5, the length determines the numbers of noise tokens and spans, and all masks with these numbers are equally
  likely. Spans of text and of noise alternate, beginning with text.
  """
  size = max(length, 2)
  num_noise = min(max(int(np.round(np.float32(size) * np.float32(noise_density))), 1), size - 1)
  num_spans = max(int(np.round(np.float32(num_noise) / np.float32(mean_span_length))), 1)
  num_spans = min(num_spans, num_noise, size - num_noise)
  text_and_noise = [_segment_lengths(num, num_spans, rng) for num in (size - num_noise, num_noise)]
  lengths = np.stack(text_and_noise, axis=1).reshape(-1)
  return np.repeat(np.arange(2 * num_spans) % 2 == 1, lengths)[:length]


def _segment_lengths(num_items: int, num_segments: int, rng: np.random.Generator) -> np.ndarray:
  """Draws lengths >= 1 of segments of `num_items` items, [num_segments]; all divisions are equally likely."""
  # Sorts random numbers: Generator.permutation may change between versions of NumPy.
  starts = np.sort(np.argsort(rng.random(num_items - 1), kind='stable')[: num_segments - 1]) + 1
  return np.diff(starts, prepend=0, append=num_items)


def replace_spans(tokens: np.ndarray, mask: np.ndarray, first_sentinel: int) -> np.ndarray:
  """Replaces each run of masked tokens by a sentinel: `first_sentinel`, `first_sentinel - 1`, and so on."""
  begins = mask & ~np.concatenate([[False], mask[:-1]])
  replaced = np.where(begins, first_sentinel + 1 - np.cumsum(begins), tokens)
  return replaced[begins | ~mask]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanCorruption:
  """Batches for an encoder-decoder that learns to fill in spans of text.

  Attributes:
    text: the input whose rows are corrupted, such as a TextInput or a Mixture. Its rows have at most
      `span_corruption_lengths(inputs_length)[0]` tokens; a row of packed documents counts as one text.
    inputs_length, targets_length: S and T; T is the longest targets' length if None.
    noise_density: the fraction of tokens that are noise.
    mean_span_length: the mean length of noise spans, in tokens.
    seed: the seed of the masks.
  """

  text: base.Input
  inputs_length: int
  targets_length: int | None = None
  noise_density: float = 0.15
  mean_span_length: float = 3.0
  seed: int = 0

  def __post_init__(self):
    if not 0 < self.noise_density < 1 or not self.mean_span_length >= 1:
      raise UserError(
        f'noise_density = {self.noise_density} must be between 0 and 1, and mean_span_length = '
        f'{self.mean_span_length} at least 1.'
      )
    if self.tokenizer is None:
      raise UserError('`text` must have a tokenizer, whose last ids are the sentinels: use an input of text.')
    tokens, targets = span_corruption_lengths(self.inputs_length, self.noise_density, self.mean_span_length)
    width = self.text.element_spec()['ids'].shape[1]
    if width > tokens:
      raise UserError(
        f'text has rows of {width} tokens, of which inputs_length = {self.inputs_length} holds {tokens}: set '
        f'text.seq_len={tokens}.'
      )
    num_spans = round(round(width * self.noise_density) / self.mean_span_length)
    if 0 < (extra_ids := getattr(self.tokenizer, 'extra_ids', 0)) < num_spans:
      logging.warning(
        'Rows of %d tokens have %d spans, but the tokenizer only extra_ids = %d: its last words become sentinels, as '
        'in T5. To avoid this, raise extra_ids or mean_span_length.',
        width,
        num_spans,
        extra_ids,
      )
    if self.targets_length is not None and self.targets_length < targets:
      raise UserError(f'targets_length = {self.targets_length} must be at least {targets}, the longest targets.')

  @property
  def batch_size(self) -> int:
    return self.text.batch_size

  @property
  def tokenizer(self) -> Tokenizer | None:
    return tokenizer_of(self.text)

  @property
  def source_names(self) -> tuple[str, ...]:
    return base.source_names(self.text)

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    return self.text.element_spec() | encoder_decoder_spec(self.batch_size, *self._widths())

  def _widths(self) -> tuple[int, int]:
    """Returns S and T."""
    targets = span_corruption_lengths(self.inputs_length, self.noise_density, self.mean_span_length)[1]
    return self.inputs_length, self.targets_length or targets

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'SpanCorruptionIterator':
    rows = base.shard_rows(self.batch_size, shard_index, shard_count)
    return SpanCorruptionIterator(self, self.text.make_iterator(shard_index, shard_count), rows)

  def reshard_states(self, states: Sequence[base.State], shard_count: int) -> list[base.State]:
    texts = self.text.reshard_states([state['text'] for state in states], shard_count)
    return [{**states[0], 'text': text} for text in texts]

  def epochs(self, state: base.State) -> float | None:
    return base.epochs_of(self.text, state['text'])

  def progress(self, state: base.State) -> dict[str, float]:
    return base.progress_of(self.text, state['text'])

  def corrupt(self, batch: base.Batch, numbers: Sequence[int]) -> base.Batch:
    """Corrupts rows of `text`; `numbers`, the numbers of the rows in the data, determine the masks."""
    tokenizer = self.tokenizer
    assert tokenizer is not None
    examples = []
    for number, ids, segments in zip(numbers, batch['ids'], batch['segment_ids'], strict=True):
      tokens = ids[segments > 0]
      # The row's number is the highest word of the counter, so that rows share no random numbers.
      rng = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, number]))
      mask = noise_mask(tokens.size, rng, self.noise_density, self.mean_span_length)
      first = tokenizer.vocab_size - 1  # the sentinel of the first span
      if not tokens.size:
        examples.append([tokens, tokens])
        continue
      inputs, targets = replace_spans(tokens, mask, first), replace_spans(tokens, ~mask, first)
      # T5 rounds the number of noise tokens in two ways; if they differ, the targets are up to two tokens too long.
      pair = zip((inputs, targets), self._widths(), strict=True)
      examples.append([np.append(part[: width - 1], tokenizer.eos_id) for part, width in pair])
    extra = {name: rows for name, rows in batch.items() if name not in base.BATCH_DTYPES}
    return extra | encoder_decoder_batch(examples, *self._widths(), tokenizer.pad_id)


def encoder_decoder_spec(batch_size: int, inputs_length: int, targets_length: int) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the element spec of an encoder-decoder's batch: [B, S] arrays for the encoder, [B, T] for the decoder."""
  encoder, decoder = (base.language_model_spec(batch_size, length) for length in (inputs_length, targets_length))
  return decoder | {f'encoder_{name}': encoder[name] for name in ('ids', 'segment_ids', 'segment_pos')}


def encoder_decoder_batch(
  examples: Sequence[Sequence[np.ndarray]], inputs_length: int, targets_length: int, pad_id: int = 0
) -> base.Batch:
  """Makes a batch with one (inputs, targets) pair per row; the decoder reads `pad_id` and then the targets."""
  encoder, decoder = (base.empty_batch(len(examples), length, pad_id) for length in (inputs_length, targets_length))
  for row, example in enumerate(examples):
    for part, tokens in zip((encoder, decoder), example):
      part['ids'][row, 1 : tokens.size] = tokens[:-1]
      part['labels'][row, : tokens.size] = tokens
      part['weights'][row, : tokens.size] = 1
      part['segment_ids'][row, : tokens.size] = 1
      part['segment_pos'][row, : tokens.size] = np.arange(tokens.size)
  # The encoder reads its tokens themselves, which are the labels of a decoder.
  names = {'encoder_ids': 'labels', 'encoder_segment_ids': 'segment_ids', 'encoder_segment_pos': 'segment_pos'}
  return decoder | {new: encoder[old] for new, old in names.items()}


class SpanCorruptionIterator(base.InputIterator):
  """Yields the batches of one shard of a SpanCorruption."""

  def __init__(self, settings: SpanCorruption, text: base.InputIterator, rows: range):
    self._settings, self._text, self._rows = settings, text, rows
    self._num_rows = 0  # rows of all shards before the position
    names = ('inputs_length', 'noise_density', 'mean_span_length', 'seed')
    self._identity: Mapping[str, Any] = {'kind': 'span_corruption', **{name: getattr(settings, name) for name in names}}

  @property
  def reads_rows(self) -> bool:
    return base.reads_rows(self._text)

  def __next__(self) -> base.Batch:
    return self._corrupt(next(self._text), self._settings.batch_size, self._rows)

  def next_rows(self, count: int, indices: Sequence[int]) -> base.Batch:
    return self._corrupt(cast(base.RowIterator, self._text).next_rows(count, indices), count, indices)

  def _corrupt(self, batch: base.Batch, count: int, indices: Sequence[int]) -> base.Batch:
    batch = self._settings.corrupt(batch, [self._num_rows + int(index) for index in indices])
    self._num_rows += count
    return batch

  def get_state(self) -> base.State:
    return {**self._identity, 'num_rows': self._num_rows, 'text': self._text.get_state()}

  def set_state(self, state: base.State) -> None:
    base.check_state(state, self._identity)
    self._text.set_state(state['text'])
    num_rows = state.get('num_batches', 0) * self._settings.batch_size  # earlier versions saved `num_batches`
    self._num_rows = int(state.get('num_rows', num_rows))

  def close(self) -> None:
    self._text.close()
