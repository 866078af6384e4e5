r"""ConversationInput: packed batches of conversations, whose loss is on what the assistant wrote.

    ConversationInput(
      source=Conversations(pattern='chats.jsonl'),       # lines {"messages": [{"role": ..., "content": ...}]}
      tokenizer=FolderTokenizer(path='models/qwen'),
      template=ChatTemplate.from_folder('models/qwen'),
      batch_size=32,
      seq_len=2048,
    )

Everything else is TextInput's: lanes, exact positions. A conversation is never divided between two rows: one
that does not fit in what is left of a row begins the next, and one longer than a row is an error, is cut, or is left
out, as `too_long` says.
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
  """Conversations in JSON lines, Parquet or Arrow files (a glob pattern or several), by the ends of their names.

  A record has the messages in `messages_field`, each an object with `role`, `content` and what else the template
  reads (`tool_calls`, `reasoning_content`, ...); and the tools that the assistant may call in `tools_field`, if any,
  in the format of OpenAI's API. Both may also be JSON as text.
  """

  pattern: str | tuple[str, ...]
  messages_field: str = 'messages'
  tools_field: str = 'tools'

  def open(self) -> OpenRecordFiles:
    return OpenRecordFiles(self.pattern, [self.messages_field], [self.tools_field])


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversationInput(TextInput):
  """Packed batches of conversations; the fields of TextInput, and these.

  Fields:
    source: Conversations.
    template: writes the conversations as text, and says which of it is the assistant's.
    template_variables: further variables of the template, such as {'enable_thinking': False}.
    too_long: a conversation of more than T tokens is an 'error', or its end is cut ('truncate'), or it is left out
      ('skip'). A cut one in which nothing of the assistant is left is left out. How many there were is in the log.
    date: what a template takes for today (year-month-day), so that examples are the same on every day.
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
    self.renderer()

  def make_iterator(self, shard_index: int = 0, shard_count: int = 1) -> TextIterator:
    if not hasattr(self.tokenizer, 'encode_with_offsets'):
      raise UserError(
        f'{type(self.tokenizer).__name__} cannot say which characters its tokens are, so that the loss cannot be on '
        "the assistant's alone: use a model's folder with a tokenizer.json."
      )
    return self.iterator_type(self, shard_index, shard_count)

  def renderer(self) -> 'Renderer':
    """Makes the Renderer, which writes messages as tokens."""
    return Renderer(
      tokenizer=self.tokenizer, template=self.template, variables=dict(self.template_variables), date=self.date
    )

  def block_encoder(self) -> BlockEncoder:
    return ConversationEncoder(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Renderer:
  """Writes messages as tokens, by a chat template and a tokenizer."""

  tokenizer: Tokenizer
  template: ChatTemplate
  variables: Mapping[str, Any]
  date: str

  def __post_init__(self):
    _ = self.now

  @property
  def now(self) -> datetime.datetime:
    """The time that templates are given."""
    try:
      return datetime.datetime.fromisoformat(self.date)
    except (TypeError, ValueError) as e:
      raise UserError(f'date = {self.date!r} must be a year, month and day, such as 2026-01-31.') from e

  def turns(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a conversation, int32 [N], and which of them the assistant wrote, bool [N]."""
    text, spans = render_turns(self.template, messages, tools, self.variables, self.now)
    return self.encode(text, spans, ends=messages[-1]['role'] == 'assistant')

  def plain(self, prompt: str, answer: str) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of texts without a template, bos, prompt, answer, eos, and which are the answer's or the eos."""
    text = prompt + answer
    return self.encode(text, [(len(prompt), len(text))], ends=True, is_rendered=False)

  def encode(self, text: str, spans: Spans, *, ends: bool, is_rendered: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a text, int32 [N], and which of them lie in its spans, bool [N].

    Where the template does not write the beginning of text itself, it is put before, as before a prompt; and the end
    of text behind a text that `ends` with the assistant's, unless it is there.
    """
    ids, offsets = self.tokenizer.encode_with_offsets(text)  # type: ignore[attr-defined]  # `make_iterator` asks
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
    """Plain data that differ where the same messages would give other tokens."""
    written = dataclasses.asdict(self.template) | {'variables': self.variables, 'date': self.date}
    written.pop('response_template')  # by which no tokens are made
    digest = hashlib.blake2b(json.dumps(written, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
    return {'tokenizer': self.tokenizer.fingerprint(), 'template': digest}


@dataclasses.dataclass(frozen=True)
class RecordEncoder:
  """A BlockEncoder of records that stay whole; each is a document, or several. `settings` are those of its input."""

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
    """Whether a record has at most T tokens; raises a UserError if not, and `too_long` says so."""
    seq_len = self.settings.seq_len
    if num_tokens > seq_len and self.settings.too_long == 'error':
      raise UserError(
        f'{what} has {num_tokens} tokens{remark}, but a row only seq_len = {seq_len}: raise seq_len, or set too_long '
        "to 'truncate' or 'skip'."
      )
    return num_tokens <= seq_len

  def identity(self) -> dict[str, Any]:
    return self.renderer.identity() | {'too_long': self.settings.too_long}


class ConversationEncoder(RecordEncoder):
  """The BlockEncoder of conversations."""

  def encode_record(self, record: Record) -> TokenBlock:
    source = self.settings.source  # a user's own one may have no such fields
    messages_field = getattr(source, 'messages_field', 'messages')
    messages = messages_of(record.values, messages_field)
    _refuse_empty_turns(messages, messages_field)
    ids, mask = self.renderer.turns(messages, tools_of(record.values, getattr(source, 'tools_field', 'tools')))
    if not mask[1:].any():
      raise UserError("no token of the conversation is the assistant's, so that nothing can be learnt: remove it.")
    is_cut = not self.fits('the conversation', ids.size - 1)
    if is_cut:
      num_kept = self.settings.seq_len + 1
      ids, mask = ids[:num_kept], mask[:num_kept]
      if self.settings.too_long == 'skip' or not mask[1:].any():
        return empty_block(self.dtypes)
    weights = mask[1:].astype(np.float32)
    return TokenBlock(ids[:-1], ids[1:], (ids.size - 1,), {'weights': weights}, num_truncated=int(is_cut))


def config_of(template: ChatTemplate) -> fdl.Config:
  """The config that builds a template."""
  return fdl.Config(ChatTemplate, **{each.name: getattr(template, each.name) for each in dataclasses.fields(template)})


def empty_block(dtypes: Mapping[str, Any]) -> TokenBlock:
  """The block of a record that is left out."""
  arrays = {name: np.zeros(0, dtype) for name, dtype in dtypes.items() if name not in ('ids', 'labels')}
  del arrays['segment_ids'], arrays['segment_pos']
  return TokenBlock(np.zeros(0, np.int32), np.zeros(0, np.int32), (), arrays, num_skipped=1)


def messages_of(record: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
  """The messages in a field of a record, in the form that chat templates read.

  Raises:
    UserError: they are missing, or are not a list of objects with a role and something said.
  """
  if field not in record:
    raise UserError(
      f'there is no field {field!r} (it has {sorted(record)[:20]}): write messages with role and content there, or '
      'name another field by source.messages_field.'
    )
  messages = _parsed(record[field], field)
  if not isinstance(messages, list) or not messages:
    raise UserError(f'{field!r} must be a list of at least one message, not {_show(messages)}.')
  read = []
  for number, message in enumerate(messages):
    where = f'{field}[{number}]'
    if not isinstance(message, dict) or not isinstance(message.get('role'), str):
      raise UserError(f"{where} must be an object with a text 'role', not {_show(message)}.")
    if message.get('content') is None and not message.get('tool_calls') and message['role'] != 'tool':
      raise UserError(f"{where}, of the role {message['role']!r}, has neither 'content' nor 'tool_calls': add one.")
    if not _is_list_of_objects(message.get('tool_calls') or []):
      raise UserError(f"{where} must have a list of objects as its 'tool_calls', not {_show(message['tool_calls'])}.")
    message = normalized_message(message, where)
    if not isinstance(message['content'], str):
      raise UserError(f"{where} must have a text as its 'content', or parts of it, not {_show(message['content'])}.")
    read.append(message)
  return read


def tools_of(record: Mapping[str, Any], field: str) -> list[Any] | None:
  """The tools in a field of a record; None where it has none. Raises a UserError if they are not a list of objects."""
  tools = _parsed(record.get(field), field)
  if not tools:
    return None
  if not _is_list_of_objects(tools):
    raise UserError(f'{field!r} must be a list of objects, not {_show(tools)}.')
  return tools


def _is_list_of_objects(value: Any) -> bool:
  return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _refuse_empty_turns(messages: Sequence[Mapping[str, Any]], field: str) -> None:
  """Raises a UserError if a turn of the assistant has no text, and neither calls of tools nor anything else."""
  for number, message in enumerate(messages):
    content = message.get('content')
    is_empty = not (content.strip() if isinstance(content, str) else content)
    says_more = any(value for name, value in message.items() if name not in ('role', 'content', 'name'))
    if message['role'] == 'assistant' and is_empty and not says_more:
      raise UserError(
        f'{field}[{number}], a turn of the assistant, is empty, so that the model would learn to say nothing: remove '
        'the message, or the conversation.'
      )


def _parsed(value: Any, field: str) -> Any:
  """A field's value, which may be JSON as text, as tables have it whose objects differ."""
  if not isinstance(value, str) or not value.strip():
    return value
  try:
    return json.loads(value)
  except (ValueError, RecursionError) as e:
    raise UserError(f'{field!r} is a text that is not JSON: {e}.') from e


def _show(value: Any) -> str:
  text = json.dumps(value, ensure_ascii=False, default=str)
  return text if len(text) < 60 else f'{text[:60]}...'
