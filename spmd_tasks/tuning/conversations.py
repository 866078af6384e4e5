"""ConversationInput: packed batches of conversations, with the loss on the assistant's text.

    ConversationInput(
      source=Conversations(pattern='chats.jsonl'),       # lines {"messages": [{"role": ..., "content": ...}]}
      tokenizer=FolderTokenizer(path='models/qwen'),
      template=ChatTemplate.from_folder('models/qwen'),
      batch_size=32,
      seq_len=2048,
    )

Order and positions are TextInput's. A conversation is never divided between two rows: if it does not fit in the
rest of a row, it begins the next row, and `too_long` says what to do if it is longer than a row.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import functools
import hashlib
import json
from typing import Any, ClassVar

import fiddle as fdl
import numpy as np

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import Block, ChatTemplate, TextInput, Tokenizer
from spmd_tasks.inputs.base import BATCH_DTYPES
from spmd_tasks.inputs.chat_template import normalized_message
from spmd_tasks.inputs.packing import BlockEncoder, TokenBlock
from spmd_tasks.inputs.text_input import TextIterator
from spmd_tasks.inputs.tokenizers import encode_prompt
from spmd_tasks.tuning._assistant_turns import Spans, render_turns, tokens_of_spans
from spmd_tasks.tuning.record_files import OpenRecordFiles, Record

_TOO_LONG = ('error', 'truncate', 'skip')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversations:
  """Conversations in JSON lines, Parquet or Arrow files (a glob pattern or several).

  A record has its messages in `messages_field`, objects with `role`, `content` and other keys that the template reads
  (`tool_calls`, `reasoning_content`, ...), and optionally the tools that the assistant may call in `tools_field`, in
  the format of OpenAI's API. Both fields may also be JSON text.
  """

  pattern: str | tuple[str, ...]
  messages_field: str = 'messages'
  tools_field: str = 'tools'

  def open(self) -> OpenRecordFiles:
    return OpenRecordFiles(self.pattern, [self.messages_field], [self.tools_field])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversationInput(TextInput):
  """Packed batches of conversations.

  Fields, in addition to TextInput's:
    source: Conversations.
    template: renders the conversations, and determines which text is the assistant's.
    template_variables: further variables of the template, such as {'enable_thinking': False}.
    too_long: what to do with a conversation of more than T tokens: 'error', 'truncate' (or leave it out, if no token of
      the assistant remains), or 'skip'. The log says how many there were.
    date: the date (year-month-day) that the template reads, so that examples do not depend on the day.
  """

  template: ChatTemplate = dataclasses.field(default_factory=ChatTemplate)
  template_variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  too_long: str = 'error'
  date: str = '2026-01-01'

  kind: ClassVar[str] = 'conversations'
  iterator_type: ClassVar[type[TextIterator]] = TextIterator

  def __post_init__(self):
    super().__post_init__()
    if self.too_long not in _TOO_LONG:
      raise UserError(f'too_long = {self.too_long!r} must be one of {", ".join(map(repr, _TOO_LONG))}.')
    if unused := [name for name in self.template_variables if not self.template.mentions(name)]:
      raise UserError(
        f'template_variables has {unused[0]!r}, which the chat template does not use: correct it, or leave it out.'
      )
    self.renderer()

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> TextIterator:
    if not hasattr(self.tokenizer, 'encode_with_offsets'):
      raise UserError(
        f'{type(self.tokenizer).__name__} has no offsets of tokens, by which the loss is restricted to the assistant: '
        'use a FolderTokenizer, whose folder has a tokenizer.json. For a model folder without one, transformers '
        'writes it: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER).'
      )
    return self.iterator_type(self, shard_index, shard_count)

  def renderer(self) -> 'Renderer':
    """Returns the Renderer of messages."""
    return Renderer(
      tokenizer=self.tokenizer, template=self.template, variables=dict(self.template_variables), date=self.date
    )

  def block_encoder(self) -> BlockEncoder:
    return ConversationEncoder(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Renderer:
  """Renders messages as tokens with a chat template and a tokenizer."""

  tokenizer: Tokenizer
  template: ChatTemplate
  variables: Mapping[str, Any]
  date: str

  def __post_init__(self):
    _ = self.now

  @property
  def now(self) -> datetime.datetime:
    """The time for the template's `strftime_now`."""
    try:
      return datetime.datetime.fromisoformat(self.date)
    except (TypeError, ValueError) as e:
      raise UserError(f'date = {self.date!r} must be a year, month and day, such as 2026-01-31.') from e

  def turns(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of a conversation, int32 [N], and a mask of the assistant's tokens, bool [N]."""
    text, spans = render_turns(self.template, messages, tools, self.variables, self.now)
    return self.encode(text, spans, ends=messages[-1]['role'] == 'assistant')

  def plain(self, prompt: str, answer: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of bos, prompt, answer and eos without a template, and a mask of the answer and the eos."""
    text = prompt + answer
    return self.encode(text, [(len(prompt), len(text))], ends=True, is_rendered=False)

  def encode(self, text: str, spans: Spans, *, ends: bool, is_rendered: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of a text, int32 [N], and a mask of the tokens in its spans, bool [N].

    Unless the template writes the bos, adds the tokens that begin a prompt, and, if `ends`, an eos after the text;
    neither is added twice.
    """
    ids, offsets = self.tokenizer.encode_with_offsets(text)  # type: ignore[attr-defined]  # `make_iterator` checks
    mask = tokens_of_spans(offsets, spans)
    if is_rendered and self.template.writes_bos:
      return ids, mask
    start = np.array(encode_prompt(self.tokenizer, ''), np.int32)
    if start.size and not np.array_equal(ids[: start.size], start):
      ids, mask = np.concatenate([start, ids]), np.concatenate([np.zeros(start.size, bool), mask])
    if ends and self.tokenizer.eos_id not in ids[-2:].tolist():
      ids, mask = np.append(ids, np.int32(self.tokenizer.eos_id)), np.append(mask, True)
    return ids, mask

  def identity(self) -> dict[str, Any]:
    """Returns JSON data that change whenever the tokens of messages would change."""
    settings = dataclasses.asdict(self.template) | {'variables': self.variables, 'date': self.date}
    settings.pop('response_template')  # which affects no tokens
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
    return {'tokenizer': self.tokenizer.fingerprint(), 'template': digest}


@dataclasses.dataclass(frozen=True)
class RecordEncoder:
  """Base class of BlockEncoders of records, which are never divided between rows; `settings` is the input."""

  settings: ConversationInput
  keeps_whole: ClassVar[bool] = True
  dtypes: ClassVar[Mapping[str, Any]] = BATCH_DTYPES

  @functools.cached_property
  def renderer(self) -> Renderer:
    return self.settings.renderer()

  @property
  def pad_id(self) -> int:
    return self.settings.tokenizer.pad_id

  def encode(self, block: Block) -> TokenBlock:
    ((record, _),) = block.documents
    assert isinstance(record, Record)
    return self.encode_record(record)

  def encode_record(self, record: Record) -> TokenBlock:
    raise NotImplementedError

  def fits(self, what: str, num_tokens: int, remark: str = '') -> bool:
    """Returns whether a record has at most T tokens; raises a UserError if not and `too_long` is 'error'."""
    seq_len = self.settings.seq_len
    if num_tokens > seq_len and self.settings.too_long == 'error':
      raise UserError(
        f'{what} has {num_tokens} tokens{remark}, more than seq_len = {seq_len}: raise seq_len, or set too_long to '
        "'truncate' or 'skip'."
      )
    return num_tokens <= seq_len

  def identity(self) -> dict[str, Any]:
    return self.renderer.identity() | {'too_long': self.settings.too_long}


class ConversationEncoder(RecordEncoder):
  """The BlockEncoder of conversations."""

  def encode_record(self, record: Record) -> TokenBlock:
    source = self.settings.source  # a user's own source may lack the fields
    messages_field = getattr(source, 'messages_field', 'messages')
    messages = messages_of(record.values, messages_field)
    _check_turns_are_not_empty(messages, messages_field)
    ids, mask = self.renderer.turns(messages, tools_of(record.values, getattr(source, 'tools_field', 'tools')))
    if not mask[1:].any():
      raise UserError('the conversation has no token of the assistant to learn: remove it.')
    is_truncated = not self.fits('the conversation', ids.size - 1)
    if is_truncated:
      length = self.settings.seq_len + 1
      ids, mask = ids[:length], mask[:length]
      if self.settings.too_long == 'skip' or not mask[1:].any():
        return empty_block(self.dtypes)
    weights = mask[1:].astype(np.float32)
    return TokenBlock(ids[:-1], ids[1:], (ids.size - 1,), {'weights': weights}, num_truncated=int(is_truncated))


def config_of(template: ChatTemplate) -> fdl.Config:
  """Returns the config that builds a template."""
  fields = {field.name: getattr(template, field.name) for field in dataclasses.fields(template)}
  return fdl.Config(ChatTemplate, **fields)


def empty_block(dtypes: Mapping[str, Any]) -> TokenBlock:
  """Returns the block of a record that is left out."""
  arrays = {name: np.zeros(0, dtype) for name, dtype in dtypes.items() if name not in ('ids', 'labels')}
  del arrays['segment_ids'], arrays['segment_pos']
  return TokenBlock(np.zeros(0, np.int32), np.zeros(0, np.int32), (), arrays, num_skipped=1)


def messages_of(record: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
  """Returns the messages in a field of a record, in the form that chat templates read.

  Raises a UserError unless they are a list of objects with a role, and text or tool calls.
  """
  if field not in record:
    raise UserError(
      f'the record has no field {field!r}, only {sorted(record)[:20]}: add messages with role and content, or set '
      'train_input.source.messages_field.'
    )
  messages = _parsed(record[field], field)
  if not isinstance(messages, list) or not messages:
    raise UserError(f'{field!r} must be a list of at least one message, not {_show(messages)}.')
  normalized = []
  for index, message in enumerate(messages):
    where = f'{field}[{index}]'
    if not isinstance(message, dict) or not isinstance(message.get('role'), str):
      raise UserError(f"{where} must be an object with a text 'role', not {_show(message)}.")
    if message.get('content') is None and not message.get('tool_calls') and message['role'] != 'tool':
      raise UserError(f"{where}, with role {message['role']!r}, has neither 'content' nor 'tool_calls': add one.")
    if message['role'] == 'assistant' and message.get('weight') not in (None, 0, 1):
      raise UserError(f"'weight' of {where} must be 0 (not learned) or 1, not {_show(message['weight'])}.")
    if not _is_list_of_objects(message.get('tool_calls') or []):
      raise UserError(f"'tool_calls' of {where} must be a list of objects, not {_show(message['tool_calls'])}.")
    message = normalized_message(message, where)
    if not isinstance(message['content'], str):
      raise UserError(f"'content' of {where} must be text or parts of text, not {_show(message['content'])}.")
    normalized.append(message)
  return normalized


def tools_of(record: Mapping[str, Any], field: str) -> list[Any] | None:
  """Returns the tools in a field of a record, or None. Raises a UserError if they are not a list of objects."""
  tools = _parsed(record.get(field), field)
  if not tools:
    return None
  if not _is_list_of_objects(tools):
    raise UserError(f'{field!r} must be a list of objects, not {_show(tools)}.')
  return tools


def _is_list_of_objects(value: Any) -> bool:
  return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _check_turns_are_not_empty(messages: Sequence[Mapping[str, Any]], field: str) -> None:
  """Raises a UserError if a message of the assistant has neither text, nor tool calls, nor another value."""
  for index, message in enumerate(messages):
    content = message.get('content')
    is_empty = not (content.strip() if isinstance(content, str) else content)
    has_more = any(value for name, value in message.items() if name not in ('role', 'content', 'name', 'weight'))
    is_learned = message['role'] == 'assistant' and message.get('weight', 1) != 0
    if is_learned and is_empty and not has_more:
      raise UserError(
        f'{field}[{index}] is an empty message of the assistant: remove it, or the model learns to answer nothing.'
      )


def _parsed(value: Any, field: str) -> Any:
  """Returns a field's value, parsed if it is JSON text, as in tables whose objects have different fields."""
  if not isinstance(value, str) or not value.strip():
    return value
  try:
    return json.loads(value)
  except (ValueError, RecursionError) as e:
    raise UserError(f'{field!r} is text, but not JSON: {e}. Repair or remove the record.') from e


def _show(value: Any) -> str:
  text = json.dumps(value, ensure_ascii=False, default=str)
  return text if len(text) < 60 else f'{text[:60]}...'
