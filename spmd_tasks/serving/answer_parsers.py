"""Splits the streamed text of an answer into content, reasoning and tool calls.

    parser = AnswerParser(call_format, {'weather': schema})
    parser.push('<tool_call>{"name": "weather", "arguments": {}}</tool_call>', is_last=True).calls

    parser = ChannelParser({'weather': schema})        # for the harmony format of gpt-oss
    text = '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>7 °C'
    parser.push(text, is_last=True)                    # MessageDelta(content='7 °C', reasoning='Hm.', calls=[])

A parser buffers text that may still become a tool call or a marker, and returns the rest at once. Text that only
resembles a call, or that calls a tool which the request does not define, is content.

AnswerParser reads reasoning between `<think>` and `</think>` at the start, and then calls in one of the formats of
tool_call_formats.py. ChannelParser reads messages: a header, `<|message|>` and a body, terminated by `<|end|>`,
`<|call|>` or `<|return|>`. The header names a channel: `analysis` is reasoning; `final` and `commentary` are content.
If the header has `to=functions.NAME`, the body is the arguments of a call. Text without a header, which a grammar may
produce, is content.
"""

from collections.abc import Sequence
import re
from typing import NamedTuple, Protocol

from spmd_tasks.decoding.generated_sequence import begun_length
from spmd_tasks.serving.tool_call_formats import JSON_ANSWER, TOOL_CALL_FORMATS, ToolCallFormat, json_end, named_call
from spmd_tasks.serving.tool_calls import ToolCall, Tools

THINK, END_THINK = '<think>', '</think>'
_MESSAGE = '<|message|>'
_ENDS = ('<|end|>', '<|call|>', '<|return|>', '<|start|>')
_OPENINGS = ('<|channel|>', '<|start|>', _MESSAGE, 'to=')


class MessageDelta(NamedTuple):
  """The content, reasoning and tool calls that a piece of text adds to a message."""

  content: str
  reasoning: str = ''
  calls: Sequence[ToolCall] = ()


class Parser(Protocol):
  """Parses the text of one answer.

  Attributes:
    num_calls: number of calls parsed so far.
  """

  num_calls: int

  @property
  def may_hold_content(self) -> bool:
    """Whether buffered text may become content."""
    ...

  def push(self, piece: str, *, is_last: bool) -> MessageDelta:
    """Parses one more piece of the text; returns everything that no later piece can change."""
    ...


class AnswerParser:
  """Parses an answer with reasoning in `<think>` tags and calls in one format."""

  def __init__(
    self, call_format: ToolCallFormat, tools: Tools | None, *, thinks: bool = False, is_thinking: bool = False
  ):
    """Initializes the parser at the start of an answer.

    Args:
      call_format: the model's format of tool calls. The Hermes format and bare JSON are recognized in addition.
      tools: the tools that may be called; None if the answer must not be parsed for calls.
      thinks: whether the answer may start with reasoning.
      is_thinking: whether the prompt already ends inside the reasoning.
    """
    self._tools = tools or {}
    formats = [] if tools is None else [call_format, TOOL_CALL_FORMATS['hermes']]
    self._readers = {opening: call_format.read for call_format in reversed(formats) for opening in call_format.openings}
    self._whole_readers = [
      call_format.read for call_format in (*formats, JSON_ANSWER) if formats and not call_format.openings
    ]
    self._phase = 'reasoning' if is_thinking else 'beginning' if thinks else 'body'
    self._is_trimming = thinks or is_thinking  # strips white space around the tags
    self._buffer = ''
    self._is_in_call = False  # whether the buffer starts with the opening of a call
    # Leading white space, which is content only if text follows; None once text has followed.
    self._pending_space: str | None = None if tools is None else ''
    self.num_calls = 0

  @property
  def may_hold_content(self) -> bool:
    return bool(self._buffer) and self._phase != 'reasoning'

  def push(self, piece: str, *, is_last: bool) -> MessageDelta:
    """Parses one more piece of the text; returns everything that no later piece can change."""
    if self._is_in_call and not is_last and not any(mark in piece for mark in '}]>`'):
      self._buffer += piece  # none of its characters can end a call
      return MessageDelta('')
    text, self._buffer = self._buffer + piece, ''
    reasoning = ''
    if self._phase == 'beginning':
      begun = text.lstrip()
      if begun.startswith(THINK):
        self._phase, text = 'reasoning', begun.removeprefix(THINK)
      elif THINK.startswith(begun) and not is_last:
        self._buffer = text
        return MessageDelta('')
      else:
        self._phase, self._is_trimming = 'body', False
    if self._phase == 'reasoning':
      reasoning, text = self._parse_reasoning(text, is_last=is_last)
      if self._phase == 'reasoning':
        return MessageDelta('', reasoning)
    if self._is_trimming:
      text = text.lstrip()
      self._is_trimming = not text
    content, calls = self._parse_body(text, is_last=is_last)
    self.num_calls += len(calls)
    if is_last and self._pending_space and not self.num_calls:
      content, self._pending_space = content + self._pending_space, None
    return MessageDelta(content, reasoning, calls)

  def _parse_reasoning(self, text: str, *, is_last: bool) -> tuple[str, str]:
    """Returns the reasoning parsed so far and the text after it."""
    if self._is_trimming:
      text = text.lstrip()
      if THINK.startswith(text) and not is_last:
        self._buffer = text
        return '', ''
      text, self._is_trimming = text.removeprefix(THINK).lstrip(), False
    thought, end, rest = text.partition(END_THINK)
    if end:
      self._phase, self._is_trimming = 'body', True
      return thought.rstrip(), rest
    num_held = 0 if is_last else begun_length(text, (END_THINK,))
    certain = text[: len(text) - num_held].rstrip()
    self._buffer = '' if is_last else text[len(certain) :]
    return certain, ''

  def _parse_body(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
    """Returns the content and the calls parsed so far; buffers the rest."""
    content, calls = '', list[ToolCall]()
    self._is_in_call = False
    for read in list(self._whole_readers):
      reading = read(text, self._tools, is_last)
      if reading is None:
        self._buffer = text
        return content, calls
      if reading.calls:
        return content, list(reading.calls)
      self._whole_readers.remove(read)
    while text:
      places = [(place, opening) for opening in self._readers if (place := text.find(opening)) >= 0]
      if not places:
        num_held = 0 if is_last else begun_length(text, self._readers)
        content += self._emit(text[: len(text) - num_held])
        self._buffer = text[len(text) - num_held :]
        break
      place, opening = min(places)
      content += self._emit(text[:place])
      text = text[place:]
      reading = self._readers[opening](text, self._tools, is_last)
      if reading is None:
        self._buffer, self._is_in_call = text, True
        break
      length = max(reading.length, 1)
      if reading.calls:
        calls += reading.calls
        self._pending_space = ''
      elif not reading.is_markup:
        content += self._emit(text[:length])
      text = text[length:]
    return content, calls

  def _emit(self, text: str) -> str:
    """Returns the delta of `text` to send as content; keeps leading white space back until text follows."""
    if self._pending_space is None:
      return text
    text, self._pending_space = self._pending_space + text, None
    if not text.strip():
      text, self._pending_space = '', text
    return text


class ChannelParser:
  """Parses an answer in the harmony format: messages in channels."""

  may_hold_content = False  # only markup is buffered

  def __init__(self, tools: Tools | None):
    """Initializes the parser at the start of an answer that may call `tools`."""
    self._tools = tools or {}
    self._buffer = ''
    self._kind: str | None = None  # of the current message: content, reasoning or call; None inside a header
    self._callee = ''
    self._is_first = True
    self._content_begun = False
    self._separator = ''  # between two messages of content
    self.num_calls = 0

  def push(self, piece: str, *, is_last: bool) -> MessageDelta:
    """Parses one more piece of the text; returns everything that no later piece can change."""
    if self._kind == 'call' and not is_last and '>' not in piece:
      self._buffer += piece  # cannot end the message
      return MessageDelta('')
    text, self._buffer = self._buffer + piece, ''
    content, reasoning, calls = '', '', list[ToolCall]()
    while True:
      if self._kind is None:
        if self._is_first and not _may_be_header(text):
          self._kind = 'content'
          continue
        header, marker, rest = text.partition(_MESSAGE)
        if not marker:
          self._buffer = '' if is_last else text
          break
        self._start_message(header)
        text = rest
        continue
      start = 0
      if self._kind == 'call' and (begin := text.find('{')) >= 0:
        json_stop = json_end(text, begin)  # an end marker inside the arguments' JSON does not end the message
        if json_stop is None and not is_last:
          self._buffer = text
          break
        start = json_stop or 0
      ends = [(place, end) for end in _ENDS if (place := text.find(end, start)) >= 0]
      if ends:
        place, end = min(ends)
        body, text = text[:place], text[place + len(end) :]
      elif self._kind == 'call' and not is_last:
        self._buffer = text  # calls are returned whole
        break
      else:
        num_held = 0 if is_last else begun_length(text, _ENDS)
        body, text = text[: len(text) - num_held], text[len(text) - num_held :]
      call = named_call(self._callee, body, self._tools) if self._kind == 'call' and (ends or body.strip()) else None
      if call is not None:
        calls.append(call)
      elif self._kind == 'reasoning':
        reasoning += body
      elif body:
        content, self._separator, self._content_begun = content + self._separator + body, '', True
      if not ends:
        self._buffer = text
        break
      self._kind = None
    self.num_calls += len(calls)
    return MessageDelta(content, reasoning, calls)

  def _start_message(self, header: str) -> None:
    self._is_first = False
    channel = re.search(r'<\|channel\|>\s*(\w+)', header)
    callee = re.search(r'\bto=(?:functions\.)?([^\s<]+)', header)
    self._callee = callee[1] if callee else ''
    if self._callee in self._tools:
      self._kind = 'call'
    elif self._callee or (channel and channel[1] == 'analysis'):
      self._kind = 'reasoning'
    else:
      self._kind, self._separator = 'content', '\n' if self._content_begun else ''


def _may_be_header(text: str) -> bool:
  text = text.lstrip()
  return any(text.startswith(opening) or opening.startswith(text) for opening in _OPENINGS)
