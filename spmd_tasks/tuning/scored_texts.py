"""ScoredInput: packed texts, for each of which a model computes one vector: scores, or an embedding.

    ScoredInput(source=RewardPairs(pattern='pairs.jsonl'), ...)     # {"prompt", "chosen", "rejected", "margin"?}
    ScoredInput(source=LabeledTexts(pattern='mails.jsonl'), ...)    # {"text" or "messages", "label": number}
    ScoredInput(source=SimilarTexts(pattern='faq.jsonl'), ...)      # {"anchor", "positive"}: texts

Each text is one segment of a row, with all its tokens. The vector of a text is the sum of its tokens' vectors times
`weights`: 1 on the last token, or 1 / n on all n tokens. `targets` float32 have the margin or the label at the last
token of a record's first text, and 0 elsewhere. The texts of a pair are segments 1 and 2, 3 and 4, and so on.
"""

from collections.abc import Mapping
import dataclasses
import numbers
from typing import Any, ClassVar, cast

import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs.base import BATCH_DTYPES
from spmd_tasks.inputs.packing import TokenBlock
from spmd_tasks.tuning.conversations import ConversationInput, RecordEncoder, empty_block, messages_of, tools_of
from spmd_tasks.tuning.preferences import encode_answer
from spmd_tasks.tuning.record_files import OpenRecordFiles, Record

_POOLINGS = ('last', 'mean')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardPairs:
  """Pairs of answers like Preferences, with an optional `margin`: by how much the chosen answer is better."""

  pattern: str | tuple[str, ...]
  texts: ClassVar[tuple[str, ...]] = ('chosen', 'rejected')
  target: ClassVar[str] = 'margin'
  num_classes: ClassVar[int] = 0

  def open(self) -> OpenRecordFiles:
    return OpenRecordFiles(self.pattern, self.texts, ['prompt', 'tools', 'margin'])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimilarTexts:
  """Pairs of texts that should have similar vectors: `anchor`, such as a question, and `positive`."""

  pattern: str | tuple[str, ...]
  texts: ClassVar[tuple[str, ...]] = ('anchor', 'positive')
  target: ClassVar[str] = ''
  num_classes: ClassVar[int] = 0

  def open(self) -> OpenRecordFiles:
    return OpenRecordFiles(self.pattern, self.texts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabeledTexts:
  """Texts with labels: `text` or `messages`, and `label`, a class in [0, num_classes), or any number if that is 0."""

  pattern: str | tuple[str, ...]
  num_classes: int = 0
  texts: ClassVar[tuple[str, ...]] = ('text',)
  target: ClassVar[str] = 'label'

  def open(self) -> OpenRecordFiles:
    return OpenRecordFiles(self.pattern, ['label'], ['text', 'messages', 'tools'])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredInput(ConversationInput):
  """Packed batches of texts with targets.

  Fields, in addition to ConversationInput's:
    source: RewardPairs, LabeledTexts or SimilarTexts.
    too_long: applies to the tokens of all texts of a record; 'truncate' divides T equally among them.
    pooling: whether the vector of a text is the 'last' token's, or the 'mean' over its tokens.
  """

  pooling: str = 'last'

  kind: ClassVar[str] = 'scored texts'

  def __post_init__(self):
    super().__post_init__()
    if self.pooling not in _POOLINGS:
      raise UserError(f'pooling = {self.pooling!r} must be one of {", ".join(map(repr, _POOLINGS))}.')

  def block_encoder(self) -> 'ScoredEncoder':
    return ScoredEncoder(self)


@dataclasses.dataclass(frozen=True)
class ScoredEncoder(RecordEncoder):
  """The BlockEncoder of scored texts: one record is one document or two."""

  settings: ScoredInput
  dtypes: ClassVar[Mapping[str, Any]] = {**BATCH_DTYPES, 'targets': np.float32}

  def encode_record(self, record: Record) -> TokenBlock:
    settings, source = self.settings, cast(Any, self.settings.source)
    parts = [self._ids(record.values, name) for name in source.texts]
    is_truncated = not self.fits('the record', sum(part.size for part in parts))
    if is_truncated and settings.too_long == 'skip':
      return empty_block(self.dtypes)
    if is_truncated:
      parts = [part[: settings.seq_len // len(parts)] for part in parts]
    sizes = [part.size for part in parts]
    ends = np.cumsum(sizes)
    weights, targets = np.zeros((2, ends[-1]), np.float32)
    weights[ends - 1] = 1
    if settings.pooling == 'mean':
      weights = np.repeat(1 / np.array(sizes), sizes).astype(np.float32)
    targets[ends[0] - 1] = _target(record.values, source.target, source.num_classes)
    ids = np.concatenate(parts)
    arrays = {'weights': weights, 'targets': targets}
    return TokenBlock(ids, ids, tuple(ends.tolist()), arrays, num_truncated=int(is_truncated))

  def _ids(self, record: Mapping[str, Any], name: str) -> np.ndarray:
    """Returns the tokens of a text with bos and eos, or of messages as the chat template renders them."""
    if name in RewardPairs.texts:
      return encode_answer(self.renderer, record, name)[0]
    if name == 'text' and record.get('messages') is not None:
      return self.renderer.turns(messages_of(record, 'messages'), tools_of(record, 'tools'))[0]
    if not isinstance(record.get(name), str) or not record[name]:
      raise UserError(f'the record has no text {name!r}, only {sorted(record)[:20]}: add it, or remove the record.')
    return self.renderer.plain('', record[name])[0]

  def identity(self) -> dict[str, Any]:
    return super().identity() | {'pooling': self.settings.pooling}


def _target(record: Mapping[str, Any], name: str, num_classes: int) -> float:
  value: Any = record.get(name)
  if value is None and name != 'label':  # the margin is optional
    return 0.0
  is_number = isinstance(value, numbers.Real | np.number | np.bool_)
  if not is_number or not abs(value) < 1e38:
    raise UserError(f'{name!r} must be a number that float32 can represent, not {value!r:.60}.')
  if num_classes and value not in range(num_classes):
    raise UserError(f'{name!r} is {value}: with num_labels = {num_classes} it must be from 0 to {num_classes - 1}.')
  return float(value)
