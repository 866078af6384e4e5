"""SyntheticText: random tokens that follow a learnable rule; SyntheticPairs: texts and their beginnings.

Token t+1 is `rule[token t]`, a fixed random permutation, except that with probability `noise` it is drawn uniformly. A
model that has learned the rule reaches a loss of about `noise * log(vocab_size)` plus the entropy of the noise itself.
A row depends only on (seed, stream, batch, row), so any number of hosts reads the same global batch, and a position is
one number.
"""

from collections.abc import Sequence
import dataclasses

import jax
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import base
from spmd_tasks.inputs.span_corruption import encoder_decoder_batch, encoder_decoder_spec


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticText:
  """Random tokens that follow a learnable rule; ends after `num_batches`, or never if None.

  `seed` determines the rule. Another `stream` of the same seed is other text with the same rule, for evaluation.
  """

  batch_size: int
  seq_len: int
  vocab_size: int = 256
  seed: int = 0
  stream: int = 0
  noise: float = 0.1
  num_batches: int | None = None

  def __post_init__(self):
    if self.vocab_size < 2 or self.seq_len < 1:
      raise UserError(f'vocab_size {self.vocab_size} must be at least 2 and seq_len {self.seq_len} at least 1.')
    if self.num_batches is not None and self.num_batches < 1:
      raise UserError(f'num_batches {self.num_batches} must be at least 1, or None for an endless input.')
    if not 0 <= self.noise <= 1:
      raise UserError(f'noise {self.noise} must be a probability in [0, 1].')

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    return base.language_model_spec(self.batch_size, self.seq_len)

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'SyntheticIterator':
    return SyntheticIterator(self, base.shard_rows(self.batch_size, shard_index, shard_count))

  def reshard_states(self, states: Sequence[base.State], shard_count: int) -> list[base.State]:
    assert all(state == states[0] for state in states)
    return [dict(states[0]) for _ in range(shard_count)]


class SyntheticIterator(base.InputIterator):
  """Yields the rows `rows` of each batch of a SyntheticText."""

  def __init__(self, settings: SyntheticText, rows: range):
    self._settings, self._rows = settings, rows
    self._rule = np.random.default_rng(settings.seed).permutation(settings.vocab_size).astype(np.int32)
    self._next_batch = 0

  def __next__(self) -> base.Batch:
    s = self._settings
    if s.num_batches is not None and self._next_batch >= s.num_batches:
      raise StopIteration
    tokens = np.empty((len(self._rows), s.seq_len + 1), np.int32)
    replaced = np.empty(tokens.shape, bool)
    for i, row in enumerate(self._rows):
      rng = np.random.default_rng((s.seed, s.stream, self._next_batch, row))
      tokens[i] = rng.integers(s.vocab_size, size=s.seq_len + 1, dtype=np.int32)
      replaced[i] = rng.random(s.seq_len + 1) < s.noise
    for t in range(1, s.seq_len + 1):
      tokens[:, t] = np.where(replaced[:, t], tokens[:, t], self._rule[tokens[:, t - 1]])
    self._next_batch += 1
    batch = base.empty_batch(len(self._rows), s.seq_len)
    batch['ids'][:] = tokens[:, :-1]
    batch['labels'][:] = tokens[:, 1:]
    batch['weights'][:] = 1
    batch['segment_ids'][:] = 1
    batch['segment_pos'][:] = np.arange(s.seq_len)
    return batch

  def _settings_of_state(self) -> base.State:
    s = self._settings
    names = ('batch_size', 'seq_len', 'vocab_size', 'seed', 'stream', 'noise')
    return {'kind': 'synthetic', **{name: getattr(s, name) for name in names}}

  def get_state(self) -> base.State:
    return {**self._settings_of_state(), 'next_batch': self._next_batch}

  def set_state(self, state: base.State) -> None:
    base.check_state(state, self._settings_of_state())
    self._next_batch = int(state['next_batch'])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticPairs(SyntheticText):
  """Random texts for the encoder, whose beginnings the decoder learns to copy.

  Text tokens are 2 and above. The decoder's first input is token 0, and its last label token 1. A text has between half
  of `encoder_len` and `encoder_len` tokens.

  Fields, in addition to SyntheticText's:
    encoder_len: S, the length of the encoder's rows. If None, each row has the text as a prefix and then its beginning,
      for a prefix language model.
  """

  encoder_len: int | None = 128

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    if self.encoder_len is not None:
      return encoder_decoder_spec(self.batch_size, self.encoder_len, self.seq_len)
    spec = base.language_model_spec(self.batch_size, self.seq_len)
    return spec | {'prefix_mask': spec['ids']}

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'SyntheticPairsIterator':
    return SyntheticPairsIterator(self, base.shard_rows(self.batch_size, shard_index, shard_count))


class SyntheticPairsIterator(SyntheticIterator):
  """Yields the rows `rows` of each batch of a SyntheticPairs."""

  def __init__(self, settings: SyntheticPairs, rows: range):
    self._pairs = settings
    names = ('batch_size', 'vocab_size', 'seed', 'stream', 'noise', 'num_batches')
    text = {name: getattr(settings, name) for name in names}
    text['vocab_size'] -= 2
    # One row of a prefix language model: token 0, the text, its beginning, token 1.
    length = settings.encoder_len or (settings.seq_len - 1) // 2
    super().__init__(SyntheticText(**text, seq_len=length), rows)

  def __next__(self) -> base.Batch:
    number = self._next_batch
    tokens = super().__next__()['ids'] + 2
    length, seq_len, encoder_len = tokens.shape[1], self._pairs.seq_len, self._pairs.encoder_len
    texts = [text[: length - (row + number) % (length // 2 + 1)] for row, text in zip(self._rows, tokens, strict=True)]
    if encoder_len is not None:
      examples = [(text, np.append(text[: seq_len - 1], 1)) for text in texts]
      return encoder_decoder_batch(examples, encoder_len, seq_len)
    no_inputs = np.zeros(0, np.int32)
    examples = [(no_inputs, np.concatenate([text, text[: seq_len - 1 - len(text)], [1]])) for text in texts]
    batch = encoder_decoder_batch(examples, 0, seq_len)
    batch = {name: batch[name] for name in base.BATCH_DTYPES} | {'prefix_mask': np.zeros_like(batch['ids'])}
    for row, text in enumerate(texts):
      batch['weights'][row, : len(text)] = 0
      batch['prefix_mask'][row, : 1 + len(text)] = 1
    return batch

  def _settings_of_state(self) -> base.State:
    pairs = self._pairs
    lengths = {'seq_len': pairs.seq_len, 'encoder_len': pairs.encoder_len}
    return {**super()._settings_of_state(), 'kind': 'synthetic pairs', **lengths}
