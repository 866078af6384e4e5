"""PreferenceInput: packed pairs of a chosen and a rejected answer to the same prompt, for PreferenceLoss.

    PreferenceInput(
      source=Preferences(pattern='pairs.jsonl'),     # lines {"prompt": ..., "chosen": ..., "rejected": ...}
      tokenizer=..., template=..., batch_size=32, seq_len=4096,
    )

A pair is two segments of one row: the prompt with the chosen answer has an odd segment id, and the prompt with the
rejected answer has the next even id. Segments do not attend to one another, as in any packed text. A pair is never
divided, so the losses do not depend on hosts, microbatches or pipelines. A row has as many whole pairs as fit in T
tokens.

A batch has the arrays of a language model's batch, with `weights` 1 on the tokens of the answers, and
`reference_log_probs` float32: the reference model's log-probability of each answer, at the answer's first token, and 0
elsewhere. The training program computes them once (references.py); `reference` is their file.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import io
import json
from typing import Any, ClassVar

from etils import epath
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import Block, Input
from spmd_tasks.inputs.base import BATCH_DTYPES
from spmd_tasks.inputs.mixture import map_sources
from spmd_tasks.inputs.packing import TokenBlock
from spmd_tasks.inputs.text_input import TextIterator
from spmd_tasks.tuning._assistant_turns import check_roles, render_spans
from spmd_tasks.tuning.conversations import (
  ConversationInput,
  RecordEncoder,
  Renderer,
  empty_block,
  messages_of,
  tools_of,
)
from spmd_tasks.tuning.record_files import OpenRecordFiles, Record

_ANSWERS = ('chosen', 'rejected')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preferences:
  """Pairs of answers in JSON lines, Parquet or Arrow files (a glob pattern or several).

  A record has `prompt`, `chosen` and `rejected`, all texts or all lists of messages, and optionally `tools`. Without
  `prompt`, the answers are whole conversations, whose common beginning is the prompt.
  """

  pattern: str | tuple[str, ...]

  def open(self) -> OpenRecordFiles:
    return OpenRecordFiles(self.pattern, _ANSWERS, ['prompt', 'tools'])


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgedAnswers:
  """Answers labeled good or bad, in JSON lines, Parquet or Arrow files: KTO's data.

  A record has `prompt` and `completion`, both texts or both lists of messages; `label`, true or false; and optionally
  `tools`. A pair is the answer of a record, and the answer of the record before it to the same prompt.
  """

  pattern: str | tuple[str, ...]

  def open(self) -> OpenRecordFiles:
    return _OpenJudgedAnswers(self.pattern, ['prompt', 'completion', 'label'], ['tools'])


class _OpenJudgedAnswers(OpenRecordFiles):
  """Pairs of a record's answer, as chosen, and the answer of the record before it, as rejected."""

  def __getitem__(self, index: int) -> Block:
    block, before = super().__getitem__(index), super().__getitem__((index or len(self)) - 1)
    record, record_before = (block.documents[0][0].values for block in (block, before))
    label = record.get('label')
    if not isinstance(label, bool | np.bool_) or 'completion' not in record or record.get('prompt') is None:
      raise UserError(
        f'the record has {sorted(record)[:20]} and label {label!r}: it must have prompt, completion, and a label that '
        'is true or false.'
      )
    values = {**record, 'chosen': record['completion'], 'rejected': record_before.get('completion')}
    return Block(block.name, [(Record(index, values), True)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceInput(ConversationInput):
  """Packed batches of pairs of answers.

  Fields, in addition to ConversationInput's:
    source: Preferences or JudgedAnswers. With JudgedAnswers, batches also have `judgement` float32: 1 or -1 at the
      first token of a pair's first answer, and 0 elsewhere.
    too_long: applies to the tokens of both segments of a pair; 'truncate' truncates each to T/2 tokens.
    reference: the file of the reference model's log-probabilities; None is the training program's own file.
    reference_free: whether to set all log-probabilities of the reference model to 0, without a file.
  """

  reference: str | None = None
  reference_free: bool = False

  kind: ClassVar[str] = 'preferences'

  def block_encoder(self) -> 'PreferenceEncoder':
    return PreferenceEncoder(self)

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> TextIterator:
    if self.reference is None and not self.reference_free:
      raise UserError(
        "this input needs the reference model's log-probabilities: train first, which computes them, or set reference "
        'to their file, or reference_free=True.'
      )
    return super().make_iterator(shard_index, shard_count)

  def without_reference(self) -> 'PreferenceInput':
    """Returns this input with zeros for the reference model's log-probabilities."""
    return dataclasses.replace(self, reference=None, reference_free=True)

  def numbered(self) -> 'NumberedPairs':
    """Returns an input that reads each pair once and in order, with its number."""
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    once: dict[str, Any] = {'num_epochs': 1, 'shuffle': False, 'packing': True, 'max_batches': None}
    return NumberedPairs(**fields | once | {'reference': None, 'reference_free': True})


class NumberedPairs(PreferenceInput):
  """Pairs whose batches have `record_index` instead of a reference: int32, 1 + the index of a token's record."""

  def block_encoder(self) -> 'PreferenceEncoder':
    return PreferenceEncoder(self, numbered=True)


@dataclasses.dataclass(frozen=True)
class PreferenceEncoder(RecordEncoder):
  """The BlockEncoder of pairs: a record is two documents, first the chosen and then the rejected answer."""

  settings: PreferenceInput
  numbered: bool = False

  @property
  def is_judged(self) -> bool:
    return isinstance(self.settings.source, JudgedAnswers)

  @property
  def dtypes(self) -> Mapping[str, Any]:  # type: ignore[override]
    return {
      **BATCH_DTYPES,
      **({'record_index': np.int32} if self.numbered else {'reference_log_probs': np.float32}),
      **({'judgement': np.float32} if self.is_judged else {}),
    }

  @functools.cached_property
  def _references(self) -> np.ndarray:
    """float32 [N, 2]: log-probabilities of each record's chosen and rejected answer; NaN if the record is left out."""
    assert self.settings.reference is not None
    return read_references(self.settings.reference)

  def encode_record(self, record: Record) -> TokenBlock:
    pair = [encode_answer(self.renderer, record.values, name) for name in _ANSWERS]
    if self._are_equal(pair):
      raise UserError("'chosen' and 'rejected' are equal: correct the pair, or remove it.")
    num_tokens = sum(ids.size - 1 for ids, _ in pair)
    is_truncated = not self.fits('the pair', num_tokens, ', with its prompt counted twice')
    if is_truncated:
      length = self.settings.seq_len // 2 + 1
      pair = [(ids[:length], mask[:length]) for ids, mask in pair]
      has_two_answers = all(mask[1:].any() for _, mask in pair) and not self._are_equal(pair)
      if self.settings.too_long == 'skip' or not has_two_answers:
        return empty_block(self.dtypes)
    ids = np.concatenate([ids[:-1] for ids, _ in pair])
    labels = np.concatenate([ids[1:] for ids, _ in pair])
    weights = np.concatenate([mask[1:] for _, mask in pair]).astype(np.float32)
    ends = tuple(np.cumsum([ids.size - 1 for ids, _ in pair]).tolist())
    first = [int(np.argmax(weights[: ends[0]])), ends[0] + int(np.argmax(weights[ends[0] :]))]
    arrays: dict[str, np.ndarray] = {'weights': weights}
    if self.numbered:
      arrays['record_index'] = np.full(ids.size, record.index + 1, np.int32)
    else:
      arrays['reference_log_probs'] = np.zeros(ids.size, np.float32)
      if self.settings.reference is not None:
        arrays['reference_log_probs'][first] = self._reference_of(record.index)
    if self.is_judged:
      arrays['judgement'] = np.zeros(ids.size, np.float32)
      arrays['judgement'][first[0]] = 1 if record.values['label'] else -1
    return TokenBlock(ids, labels, ends, arrays, num_truncated=int(is_truncated))

  def _are_equal(self, pair: Sequence[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Whether the answers of a pair of Preferences are equal."""
    return not self.is_judged and np.array_equal(pair[0][0], pair[1][0])

  def _reference_of(self, index: int) -> np.ndarray:
    if index >= len(self._references) or np.isnan(self._references[index]).any():
      raise UserError(
        f'{self.settings.reference} has no log-probabilities of record {index}, because it was computed for other '
        'data: delete it.'
      )
    return self._references[index]

  def identity(self) -> dict[str, Any]:
    return super().identity() | {'reference_free': self.settings.reference_free}


def encode_answer(renderer: Renderer, record: Mapping[str, Any], name: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns the tokens of the prompt with one answer, and a mask of the answer's tokens."""
  missing = [answer for answer in _ANSWERS if record.get(answer) is None]
  if missing:
    raise UserError(f'the pair has no {missing[0]!r}, only {sorted(record)[:20]}: add it, or remove the pair.')
  fields = {field: record[field] for field in ('prompt', *_ANSWERS) if record.get(field) is not None}
  if all(isinstance(value, str) and not _is_messages(value) for value in fields.values()):
    ids, mask = renderer.plain(record.get('prompt') or '', record[name])
  else:
    _check_are_messages(fields)
    ids, mask = _encode_messages(renderer, record, name)
  if not record[name] or not mask[1:].any():
    raise UserError(f'{name!r} is empty: add an answer, or remove the pair.')
  return ids, mask


def _encode_messages(renderer: Renderer, record: Mapping[str, Any], name: str) -> tuple[np.ndarray, np.ndarray]:
  """Encodes an answer of messages: the mask has what rendering them adds to rendering the prompt's messages."""
  answer = messages_of(record, name)
  if record.get('prompt') is None:
    other = messages_of(record, next(field for field in _ANSWERS if field != name))
    prompt, answer = _split_prompt(answer, other)
    if not prompt:
      raise UserError("'chosen' and 'rejected' do not begin with the same messages: add a 'prompt', or correct them.")
  else:
    prompt = messages_of(record, 'prompt')
  if not prompt or not answer or answer[-1]['role'] != 'assistant':
    raise UserError(f"{name!r} must end with a message of the assistant after the prompt's messages.")
  if any(message['role'] == 'assistant' and message.get('weight') == 0 for message in answer):
    raise UserError(f'a message of {name!r} has the weight 0, but a whole answer is preferred: remove the weight.')
  tools, whole = tools_of(record, 'tools'), [*prompt, *answer]
  check_roles(renderer.template, whole)
  turns = [(len(prompt), len(whole))]
  text, spans = render_spans(renderer.template, whole, turns, tools, renderer.variables, renderer.now)
  return renderer.encode(text, spans, ends=True)


def _is_messages(value: Any) -> bool:
  """Whether a text is the JSON of a list of messages."""
  if not isinstance(value, str) or not value.lstrip().startswith('['):
    return False
  try:
    messages = json.loads(value)
  except (ValueError, RecursionError):
    return False
  return bool(messages) and all(isinstance(message, dict) and 'role' in message for message in messages)


def _check_are_messages(fields: Mapping[str, Any]) -> None:
  """Raises a UserError unless all fields are lists of messages, or JSON of such lists."""
  kinds = {name: 'text' if isinstance(value, str) else type(value).__name__ for name, value in fields.items()}
  if not all(isinstance(value, list) or _is_messages(value) for value in fields.values()):
    types = ', '.join(f'{name!r} is of type {kind}' for name, kind in kinds.items())
    raise UserError(f'{", ".join(fields)} must be all texts, or all lists of messages, but {types}.')


def _split_prompt(
  answer: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Splits a conversation after its common beginning with another, at the last message that is not the assistant's."""
  common = 0
  while common < min(len(answer), len(other)) and answer[common] == other[common]:
    common += 1
  while common and answer[common - 1]['role'] == 'assistant':
    common -= 1
  return list(answer[:common]), list(answer[common:])


def read_references(path: str) -> np.ndarray:
  """Reads a file of references.py, float32 [N, 2]. Raises a UserError if it is missing or damaged."""
  try:
    values = np.load(io.BytesIO(epath.Path(path).read_bytes()), allow_pickle=False)
    if values.ndim != 2 or values.shape[1] != 2 or values.dtype != np.float32:
      raise ValueError(f'it has {values.dtype}{[*values.shape]} instead of float32[N, 2]')
  except (OSError, ValueError, EOFError) as e:
    raise UserError(
      f"{path}, the reference model's log-probabilities, cannot be read ({e}): put it back, or train in a new "
      '--job_log_dir, which computes them.'
    ) from e
  return values


def without_references(source: Input) -> Input:
  """Returns an input or a mixture with zeros for references that are not computed yet."""

  def without_reference(name: str, source: Input) -> Input:
    if isinstance(source, PreferenceInput) and source.reference is None:
      return source.without_reference()
    return source

  return map_sources(without_reference, source)
