"""PairInput: pairs of texts for encoder-decoders, from records with `inputs` and `targets`.

    PairInput(
      source=TextPairs(pattern='pairs.jsonl'),     # lines {"inputs": "English to German: ...", "targets": ...}
      tokenizer=FolderTokenizer(path='models/flan-t5'), batch_size=32, inputs_length=512, seq_len=512 + 114,
    )

Each row is one pair: the encoder reads the inputs, and the decoder predicts the targets, both followed by an eos, as T5
is fine-tuned. Order and positions are TextInput's.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, ClassVar

import fiddle as fdl
import jax
import numpy as np

from spmd_tasks.bridges.huggingface import PretrainedLanguageModel
from spmd_tasks.errors import UserError
from spmd_tasks.inputs import Block, TextInput, base
from spmd_tasks.inputs.packing import TokenBlock
from spmd_tasks.inputs.span_corruption import encoder_decoder_batch, encoder_decoder_spec
from spmd_tasks.inputs.text_input import TextIterator
from spmd_tasks.tuning.conversations import empty_block
from spmd_tasks.tuning.record_files import OpenRecordFiles, Record

_SIDES = ('inputs', 'targets')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextPairs:
  """Pairs in JSON lines, Parquet or Arrow files (a glob pattern or several)."""

  pattern: str | tuple[str, ...]

  def open(self) -> OpenRecordFiles:
    return OpenRecordFiles(self.pattern, _SIDES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairInput(TextInput):
  """Batches of pairs.

  Fields, in addition to TextInput's:
    source: TextPairs.
    inputs_length: S, the length of the encoder's rows.
    seq_len: S + T; T is the length of the decoder's rows.
    too_long: what to do with a pair if one of its texts does not fit: 'error', 'truncate' or 'skip'.
  """

  inputs_length: int
  too_long: str = 'error'
  packing: bool = False

  kind: ClassVar[str] = 'text pairs'

  def __post_init__(self):
    super().__post_init__()
    if not 0 < self.inputs_length < self.seq_len:
      raise UserError(f'inputs_length = {self.inputs_length} must be at least 1 and below seq_len = {self.seq_len}.')
    if self.packing or self.too_long not in ('error', 'truncate', 'skip'):
      raise UserError(
        f"packing = {self.packing} must be False for pairs, and too_long = {self.too_long!r} 'error', 'truncate' or "
        "'skip'."
      )

  @property
  def lengths(self) -> tuple[int, int]:
    """S and T."""
    return self.inputs_length, self.seq_len - self.inputs_length

  def element_spec(self) -> dict[str, jax.ShapeDtypeStruct]:
    return encoder_decoder_spec(self.batch_size, *self.lengths)

  def block_encoder(self) -> 'PairEncoder':
    return PairEncoder(self)

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> 'PairIterator':
    return PairIterator(self, shard_index, shard_count)


@dataclasses.dataclass(frozen=True)
class PairEncoder:
  """The BlockEncoder of pairs: a record is one document, its inputs followed by its targets."""

  settings: PairInput
  keeps_whole: ClassVar[bool] = True
  dtypes: ClassVar[Mapping[str, Any]] = {**base.BATCH_DTYPES, 'is_target': np.int32}

  @property
  def pad_id(self) -> int:
    return self.settings.tokenizer.pad_id

  def encode(self, block: Block) -> TokenBlock:
    ((record, _),) = block.documents
    assert isinstance(record, Record)
    sides, num_truncated = [], 0
    settings, tokenizer = self.settings, self.settings.tokenizer
    for name, length in zip(_SIDES, settings.lengths):
      text = record.values.get(name)
      if not isinstance(text, str):
        raise UserError(f'{name!r} is {type(text).__name__}, not text: correct the record, or remove it.')
      ids = list(tokenizer.encode(text))
      if len(ids) >= length:
        if settings.too_long == 'error':
          raise UserError(
            f'{name!r} has {len(ids) + 1} tokens with its eos, more than a row of {length}: raise '
            f"{'encoder_len' if name == 'inputs' else 'seq_len'}, or set too_long to 'truncate' or 'skip'."
          )
        if settings.too_long == 'skip':
          return empty_block(self.dtypes)
        num_truncated = 1
      sides.append(np.array([*ids[: length - 1], tokenizer.eos_id], np.int32))
    tokens = np.concatenate(sides)
    is_target = np.repeat([0, 1], [side.size for side in sides])
    arrays = {'weights': np.ones(tokens.size, np.float32), 'is_target': is_target}
    return TokenBlock(tokens, tokens, (tokens.size,), arrays, num_truncated=num_truncated)

  def identity(self) -> dict[str, Any]:
    settings = self.settings
    identity = {'lengths': list(settings.lengths), 'too_long': settings.too_long}
    return {'tokenizer': settings.tokenizer.fingerprint(), **identity}


class PairIterator(TextIterator):
  """Yields the batches of one shard, with the encoder's and the decoder's arrays."""

  _settings: PairInput

  def finish(self, batch: base.Batch) -> base.Batch:
    s = self._settings
    masks = [(batch['segment_ids'] > 0) & (batch['is_target'] == side) for side in (0, 1)]
    examples = [[row[mask[i]] for mask in masks] for i, row in enumerate(batch['ids'])]
    return encoder_decoder_batch(examples, *s.lengths, s.tokenizer.pad_id)


class PairTuning(PretrainedLanguageModel):
  """Trains a folder's model on text, or, if `pairs` is set, an encoder-decoder on pairs of texts."""

  # JSON lines, Parquet or Arrow files (glob patterns) whose records have `inputs` and `targets`. The encoder's rows
  # have `encoder_len` tokens, the decoder's `seq_len`.
  pairs: str | tuple[str, ...] = ''
  eval_pairs: str | tuple[str, ...] = ''
  too_long: str = 'error'  # what to do with a pair that does not fit: 'error', 'truncate' or 'skip'

  def eval_inputs(self) -> dict[str, fdl.Config]:
    return {} if self.pairs and not self.eval_pairs else super().eval_inputs()

  def _packed_text(self, split: str, **settings: Any) -> fdl.Config:
    files = self.pairs if split == 'train' else self.eval_pairs
    if not self.pairs and not self.eval_pairs:
      return super()._packed_text(split, **settings)
    if not self.folder.decoder.num_encoder_layers:
      raise UserError(
        f'pairs = {files!r} need an encoder-decoder, but {self.model} is a decoder: see finetune.LoraSft.'
      )
    if not files:
      raise UserError(f'eval_pairs = {self.eval_pairs!r} need pairs: set both.')
    return fdl.Config(
      PairInput,
      source=fdl.Config(TextPairs, pattern=files),
      tokenizer=self.tokenizer(),
      batch_size=self.batch_size,
      inputs_length=self.encoder_len,
      seq_len=self.encoder_len + self.seq_len,
      too_long=self.too_long,
      **settings,
    )
