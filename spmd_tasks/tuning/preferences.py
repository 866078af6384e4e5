r"""PreferenceInput: packed pairs of a preferred and a rejected answer to one prompt, for PreferenceLoss.

    PreferenceInput(
      source=Preferences(pattern='pairs.jsonl'),     # lines {"prompt": ..., "chosen": ..., "rejected": ...}
      tokenizer=..., template=..., batch_size=32, seq_len=4096,
    )

A pair is two segments of one row: the prompt with the chosen answer, which has an odd segment id, and the prompt with
the rejected one, with the even id after it. Segments do not see one another, so that the model is that of any packed
text; and a pair is never divided, so that neither hosts, microbatches nor pipelines matter to it. Rows hold as many
whole pairs as fit in T tokens.

A batch has the arrays of any language model's, `weights` 1 on the tokens of the answers, and `reference_log_probs`
float32: at the first token of each answer the log-probability that the reference model gives to the whole answer, and 0
elsewhere. The training program computes them once (references.py) and `reference` names its file.
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
from spmd_tasks.tuning._assistant_turns import render_added
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
  """Pairs of answers in JSON lines, Parquet or Arrow files (a glob pattern or several), by the ends of their names.

  A record has `prompt`, `chosen` and `rejected`: all three texts, or all three lists of messages; and `tools`, if any.
  Without `prompt` the answers are whole conversations, and what they have in common at the beginning is the prompt.
  """

  pattern: str | tuple[str, ...]

  def open(self) -> OpenRecordFiles:
    return OpenRecordFiles(self.pattern, _ANSWERS, ['prompt', 'tools'])


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgedAnswers:
  """Answers that are good or bad, in JSON lines, Parquet or Arrow files: KTO's data.

  A record has `prompt` and `completion`, both texts or both lists of messages; `label`, true or false; and `tools`, if
  any. A pair is the answer of a record and, behind the same prompt, that of the record before it.
  """

  pattern: str | tuple[str, ...]

  def open(self) -> OpenRecordFiles:
    return _OpenJudgedAnswers(self.pattern, ['prompt', 'completion', 'label'], ['tools'])


class _OpenJudgedAnswers(OpenRecordFiles):
  """Records as pairs, with the judgement of the first answer."""

  def __getitem__(self, index: int) -> Block:
    block, before = super().__getitem__(index), super().__getitem__((index or len(self)) - 1)
    (own, other) = (each.documents[0][0].values for each in (block, before))
    if not isinstance(own.get('label'), bool | np.bool_) or 'completion' not in own or own.get('prompt') is None:
      raise UserError(
        f'a judged answer has prompt, completion and label, true or false; this has {sorted(own)[:20]}, '
        f'and its label is {own.get("label")!r}.'
      )
    values = {**own, 'chosen': own['completion'], 'rejected': other.get('completion')}
    return Block(block.name, [(Record(index, values), True)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceInput(ConversationInput):
  """Packed batches of pairs; the fields of ConversationInput, and these.

  Fields:
    source: Preferences, or JudgedAnswers, with which batches have `judgement` float32 too: at the first token of a
      pair's first answer 1 or -1, and 0 elsewhere.
    too_long: as there, of the tokens of both segments of a pair; 'truncate' cuts each to T/2 tokens.
    reference: the file of the reference model's log-probabilities; None: the training program names its own.
    reference_free: the reference model gives the same probability to every answer; no file is read.
  """

  reference: str | None = None
  reference_free: bool = False

  kind: ClassVar[str] = 'preferences'

  def block_encoder(self) -> 'PreferenceEncoder':
    return PreferenceEncoder(self)

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> TextIterator:
    if self.reference is None and not self.reference_free:
      raise UserError(
        "this input needs the reference model's log-probabilities, which --mode train computes before its first step: "
        'train first, or set reference to their file, or reference_free=True.'
      )
    return super().make_iterator(shard_index, shard_count)

  def without_reference(self) -> 'PreferenceInput':
    """The same pairs, with zeros for the reference model's log-probabilities."""
    return dataclasses.replace(self, reference=None, reference_free=True)

  def numbered(self) -> 'NumberedPairs':
    """Every pair once and in order, with its number and without a reference."""
    fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
    once: dict[str, Any] = {'num_epochs': 1, 'shuffle': False, 'packing': True, 'max_batches': None}
    return NumberedPairs(**fields | once | {'reference': None, 'reference_free': True})


class NumberedPairs(PreferenceInput):
  """Pairs whose batches have, in place of the reference, `record_index`: int32, 1 + the number of a token's record."""

  def block_encoder(self) -> 'PreferenceEncoder':
    return PreferenceEncoder(self, numbered=True)


@dataclasses.dataclass(frozen=True)
class PreferenceEncoder(RecordEncoder):
  """The BlockEncoder of pairs: one record is two documents, in the order chosen, rejected."""

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
    """float32 [N, 2]: of every record the log-probabilities of its chosen and its rejected answer; NaN: left out."""
    assert self.settings.reference is not None
    return read_references(self.settings.reference)

  def encode_record(self, record: Record) -> TokenBlock:
    pair = [encode_answer(self.renderer, record.values, name) for name in _ANSWERS]
    if self._are_same(pair):
      raise UserError(
        "'chosen' and 'rejected' are the same, so that there is nothing to prefer: remove the pair, or correct it."
      )
    num_tokens = sum(ids.size - 1 for ids, _ in pair)
    is_cut = not self.fits('the pair', num_tokens, ', its prompt counted twice')
    if is_cut:
      num_kept = self.settings.seq_len // 2 + 1
      pair = [(ids[:num_kept], mask[:num_kept]) for ids, mask in pair]
      has_two_answers = all(mask[1:].any() for _, mask in pair) and not self._are_same(pair)
      if self.settings.too_long == 'skip' or not has_two_answers:
        return empty_block(self.dtypes)
    ids = np.concatenate([ids[:-1] for ids, _ in pair])
    labels = np.concatenate([ids[1:] for ids, _ in pair])
    weights = np.concatenate([mask[1:] for _, mask in pair]).astype(np.float32)
    ends = tuple(np.cumsum([ids.size - 1 for ids, _ in pair]).tolist())
    first = [int(np.argmax(weights[: ends[0]])), ends[0] + int(np.argmax(weights[ends[0] :]))]
    own: dict[str, np.ndarray]
    if self.numbered:
      own = {'record_index': np.full(ids.size, record.index + 1, np.int32)}
    else:
      own = {'reference_log_probs': np.zeros(ids.size, np.float32)}
      if self.settings.reference is not None:
        own['reference_log_probs'][first] = self._reference_of(record.index)
    if self.is_judged:
      own['judgement'] = np.zeros(ids.size, np.float32)
      own['judgement'][first[0]] = 1 if record.values['label'] else -1
    return TokenBlock(ids, labels, ends, {'weights': weights, **own}, num_truncated=int(is_cut))

  def _are_same(self, pair: Sequence[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Whether there is nothing to prefer."""
    return not self.is_judged and np.array_equal(pair[0][0], pair[1][0])

  def _reference_of(self, index: int) -> np.ndarray:
    if index >= len(self._references) or np.isnan(self._references[index]).any():
      file = self.settings.reference
      raise UserError(f'{file} has no log-probabilities of record {index}: it is of other data. Delete it.')
    return self._references[index]

  def identity(self) -> dict[str, Any]:
    return super().identity() | {'reference_free': self.settings.reference_free}


def encode_answer(renderer: Renderer, record: Mapping[str, Any], name: str) -> tuple[np.ndarray, np.ndarray]:
  """The tokens of the prompt with one answer, and which of them are the answer's."""
  missing = [each for each in _ANSWERS if record.get(each) is None]
  if missing:
    raise UserError(
      f'there is no field {missing[0]!r} with a value (it has {sorted(record)[:20]}): a pair has chosen and rejected.'
    )
  given = {each: record[each] for each in ('prompt', *_ANSWERS) if record.get(each) is not None}
  if all(isinstance(value, str) and not _is_messages(value) for value in given.values()):
    prompt, answer = record.get('prompt') or '', record[name]
    if not answer:
      raise UserError(f'{name!r} is empty: give the pair two answers, or remove it.')
    ids, mask = renderer.plain(prompt, answer)
  else:
    _refuse_texts_among_messages(given)
    ids, mask = _encode_messages(renderer, record, name)
  if not mask[1:].any():
    raise UserError(f'no token of {name!r} is behind the prompt: give the pair two answers, or remove it.')
  return ids, mask


def _encode_messages(renderer: Renderer, record: Mapping[str, Any], name: str) -> tuple[np.ndarray, np.ndarray]:
  """A conversation: what rendering the answer's messages adds to rendering the prompt's."""
  answer = messages_of(record, name)
  if record.get('prompt') is None:
    others = messages_of(record, next(each for each in _ANSWERS if each != name))
    prompt, answer = _divide(answer, others)
    if not prompt:
      raise UserError("'chosen' and 'rejected' do not begin with the same messages: add a 'prompt', or correct them.")
  else:
    prompt = messages_of(record, 'prompt')
  if not prompt or not answer or answer[-1]['role'] != 'assistant':
    raise UserError(f"{name!r} must end with a message of the assistant, behind the prompt's messages.")
  tools, whole = tools_of(record, 'tools'), [*prompt, *answer]
  turns = [(len(prompt), len(whole))]
  text, spans = render_added(renderer.template, whole, turns, tools, renderer.variables, renderer.now)
  return renderer.encode(text, spans, ends=True)


def _is_messages(value: Any) -> bool:
  """Whether a text holds a list of objects with roles, as JSON."""
  if not isinstance(value, str) or not value.lstrip().startswith('['):
    return False
  try:
    messages = json.loads(value)
  except (ValueError, RecursionError):
    return False
  return bool(messages) and all(isinstance(each, dict) and 'role' in each for each in messages)


def _refuse_texts_among_messages(given: Mapping[str, Any]) -> None:
  """Raises a UserError if some of the fields are lists of messages, also as JSON in a text, and others are not."""
  kinds = {name: 'text' if isinstance(value, str) else type(value).__name__ for name, value in given.items()}
  if not all(isinstance(value, list) or _is_messages(value) for value in given.values()):
    found = ', '.join(f'{name!r} is of type {kind}' for name, kind in kinds.items())
    raise UserError(f'{", ".join(given)} must be all texts, or all lists of messages, but {found}.')


def _divide(
  answer: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Two conversations' common beginning, up to the last message of the user in it, and the rest of the first."""
  common = 0
  while common < min(len(answer), len(other)) and answer[common] == other[common]:
    common += 1
  while common and answer[common - 1]['role'] == 'assistant':
    common -= 1
  return list(answer[:common]), list(answer[common:])


def read_references(path: str) -> np.ndarray:
  """The log-probabilities in a file of references.py: float32 [N, 2].

  Raises:
    UserError: it is missing or damaged.
  """
  try:
    values = np.load(io.BytesIO(epath.Path(path).read_bytes()), allow_pickle=False)
  except (OSError, ValueError, EOFError) as e:
    raise UserError(
      f"{path}, the reference model's log-probabilities, cannot be read ({e}): put it back, or train in a new "
      '--job_log_dir, which computes them.'
    ) from e
  if values.ndim != 2 or values.shape[1] != 2 or values.dtype != np.float32:
    raise UserError(f'{path} holds {values.dtype}{list(values.shape)}, not float32 [N, 2]: put the right file back.')
  return values


def without_references(given: Input) -> Input:
  """Returns an input, or a mixture, in which pairs whose reference is not computed yet have zeros in its place."""

  def zero(name: str, each: Input) -> Input:
    return each.without_reference() if isinstance(each, PreferenceInput) and each.reference is None else each

  return map_sources(zero, given)
