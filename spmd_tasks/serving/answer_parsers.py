"""Parsers of answers: what of a growing text is content, what reasoning, and what tool calls.

    parser = AnswerParser(form, {'weather': schema})
    parser.push('<tool_call>{"name": "weather", "arguments": {}}</tool_call>', is_last=True).calls

    parser = ChannelParser({'weather': schema})        # of texts in the harmony format (gpt-oss)
    text = '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>7 °C'
    parser.push(text, is_last=True)                    # Part(content='7 °C', reasoning='Hm.', calls=[])

A parser returns what is certain, and holds back what may become a call or a marker. A text that only looks like a call,
or names no tool of the request, is content.

AnswerParser reads reasoning between `<think>` and `</think>` at the beginning, and then calls in a form of
call_forms.py. ChannelParser reads messages: a header, `<|message|>` and a body, up to `<|end|>`, `<|call|>` or
`<|return|>`. The header names a channel: `analysis` is reasoning, `final` and `commentary` are content. With
`to=functions.NAME`, the body is a call's arguments. A text without a header, as a grammar makes it, is content.
"""

from collections.abc import Sequence
import re
from typing import NamedTuple, Protocol

from spmd_tasks.decoding.generated_sequence import begun_length
from spmd_tasks.serving.call_forms import CALL_FORMS, JSON_ANSWER, CallForm, json_end, named_call
from spmd_tasks.serving.tool_calls import ToolCall, Tools

THINK, END_THINK = '<think>', '</think>'
_MESSAGE = '<|message|>'
_ENDS = ('<|end|>', '<|call|>', '<|return|>', '<|start|>')
_OPENINGS = ('<|channel|>', '<|start|>', _MESSAGE, 'to=')


class Part(NamedTuple):
  """What a piece of an answer adds to the message."""

  content: str
  reasoning: str = ''
  calls: Sequence[ToolCall] = ()


class Parser(Protocol):
  """Parses one answer.

  Attributes:
    num_calls: how many calls it has.
  """

  num_calls: int

  @property
  def may_hold_content(self) -> bool:
    """Whether text that is held back may become content."""
    ...

  def push(self, piece: str, *, is_last: bool) -> Part:
    """Adds a piece; returns what is certain."""
    ...


class AnswerParser:
  """Parses an answer with reasoning in tags and calls in one form."""

  def __init__(self, form: CallForm, tools: Tools | None, *, thinks: bool = False, is_thinking: bool = False):
    """Begins an answer.

    Args:
      form: how calls are written; Hermes' form and answers that are JSON are read beside it.
      tools: that may be called; None if an answer without calls is wanted.
      thinks: whether the answer may begin with reasoning.
      is_thinking: whether the prompt has begun the reasoning.
    """
    self._tools = tools or {}
    forms = [] if tools is None else [form, CALL_FORMS['hermes']]
    self._readers = {opening: form.read for form in reversed(forms) for opening in form.openings}
    self._whole_readers = [form.read for form in (*forms, JSON_ANSWER) if forms and not form.openings]
    self._phase = 'reasoning' if is_thinking else 'beginning' if thinks else 'body'
    self._is_trimming = thinks or is_thinking  # white space around the tags
    self._held = ''
    self._waits_for_call = False  # whether what is held begins with the opening of a call
    self._gap: str | None = None if tools is None else ''  # white space that is content only if text follows
    self.num_calls = 0

  @property
  def may_hold_content(self) -> bool:
    return bool(self._held) and self._phase != 'reasoning'

  def push(self, piece: str, *, is_last: bool) -> Part:
    """Adds a piece; returns what is certain."""
    if self._waits_for_call and not is_last and not any(mark in piece for mark in '}]>`'):
      self._held += piece  # none of its characters ends a call
      return Part('')
    text, self._held = self._held + piece, ''
    reasoning = ''
    if self._phase == 'beginning':
      begun = text.lstrip()
      if begun.startswith(THINK):
        self._phase, text = 'reasoning', begun.removeprefix(THINK)
      elif THINK.startswith(begun) and not is_last:
        self._held = text
        return Part('')
      else:
        self._phase, self._is_trimming = 'body', False
    if self._phase == 'reasoning':
      reasoning, text = self._reason(text, is_last=is_last)
      if self._phase == 'reasoning':
        return Part('', reasoning)
    if self._is_trimming:
      text = text.lstrip()
      self._is_trimming = not text
    content, calls = self._read(text, is_last=is_last)
    self.num_calls += len(calls)
    if is_last and self._gap and not self.num_calls:
      content, self._gap = content + self._gap, None
    return Part(content, reasoning, calls)

  def _reason(self, text: str, *, is_last: bool) -> tuple[str, str]:
    """Returns the reasoning that is certain, and the text behind it."""
    if self._is_trimming:
      text = text.lstrip()
      if THINK.startswith(text) and not is_last:
        self._held = text
        return '', ''
      text, self._is_trimming = text.removeprefix(THINK).lstrip(), False
    thought, end, rest = text.partition(END_THINK)
    if end:
      self._phase, self._is_trimming = 'body', True
      return thought.rstrip(), rest
    kept = 0 if is_last else begun_length(text, (END_THINK,))
    certain = text[: len(text) - kept].rstrip()
    self._held = '' if is_last else text[len(certain) :]
    return certain, ''

  def _read(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
    """Returns the content and the calls that are certain."""
    content, calls = '', list[ToolCall]()
    self._waits_for_call = False
    for read in list(self._whole_readers):
      reading = read(text, self._tools, is_last)
      if reading is None:
        self._held = text
        return content, calls
      if reading.calls:
        return content, list(reading.calls)
      self._whole_readers.remove(read)
    while text:
      places = [(place, opening) for opening in self._readers if (place := text.find(opening)) >= 0]
      if not places:
        kept = 0 if is_last else begun_length(text, self._readers)
        content += self._shown(text[: len(text) - kept])
        self._held = text[len(text) - kept :]
        break
      place, opening = min(places)
      content += self._shown(text[:place])
      text = text[place:]
      reading = self._readers[opening](text, self._tools, is_last)
      if reading is None:
        self._held, self._waits_for_call = text, True
        break
      length = max(reading.length, 1)
      if reading.calls:
        calls += reading.calls
        self._gap = ''
      elif not reading.is_markup:
        content += self._shown(text[:length])
      text = text[length:]
    return content, calls

  def _shown(self, text: str) -> str:
    """The text that is content for certain."""
    if self._gap is None:
      return text
    text, self._gap = self._gap + text, None
    if not text.strip():
      text, self._gap = '', text
    return text


class ChannelParser:
  """Parses an answer of messages in channels."""

  may_hold_content = False  # only markup is held back

  def __init__(self, tools: Tools | None):
    """Begins an answer that may call `tools`."""
    self._tools = tools or {}
    self._held = ''
    self._kind: str | None = None  # of the message whose body is read: content, reasoning or call; None in a header
    self._callee = ''
    self._is_first = True
    self._content_begun = False
    self._separator = ''  # between two messages of content
    self.num_calls = 0

  def push(self, piece: str, *, is_last: bool) -> Part:
    """Adds a piece; returns what is certain."""
    if self._kind == 'call' and not is_last and '>' not in piece:
      self._held += piece  # which ends no message
      return Part('')
    text, self._held = self._held + piece, ''
    content, reasoning, calls = '', '', list[ToolCall]()
    while True:
      if self._kind is None:
        if self._is_first and not _may_be_header(text):
          self._kind = 'content'
          continue
        header, marker, rest = text.partition(_MESSAGE)
        if not marker:
          self._held = '' if is_last else text
          break
        self._begin(header)
        text = rest
        continue
      start = 0
      if self._kind == 'call' and (begin := text.find('{')) >= 0:
        json_stop = json_end(text, begin)  # an end in a string of a call's arguments is a part of it
        if json_stop is None and not is_last:
          self._held = text
          break
        start = json_stop or 0
      ends = [(place, end) for end in _ENDS if (place := text.find(end, start)) >= 0]
      if ends:
        place, end = min(ends)
        body, text = text[:place], text[place + len(end) :]
      elif self._kind == 'call' and not is_last:
        self._held = text  # a call is given whole
        break
      else:
        kept = 0 if is_last else begun_length(text, _ENDS)
        body, text = text[: len(text) - kept], text[len(text) - kept :]
      call = named_call(self._callee, body, self._tools) if self._kind == 'call' and (ends or body.strip()) else None
      if call is not None:
        calls.append(call)
      elif self._kind == 'reasoning':
        reasoning += body
      elif body:
        content, self._separator, self._content_begun = content + self._separator + body, '', True
      if not ends:
        self._held = text
        break
      self._kind = None
    self.num_calls += len(calls)
    return Part(content, reasoning, calls)

  def _begin(self, header: str) -> None:
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
