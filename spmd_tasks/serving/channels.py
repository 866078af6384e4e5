"""ChannelParser: the messages of a text in the harmony format (gpt-oss): reasoning, content, and calls.

    parser = ChannelParser({'weather'})
    text = '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>7 °C'
    parser.push(text, is_last=True)            # ('7 °C', []), and parser.take_reasoning() is 'Hm.'

A message is a header, `<|message|>` and a body, up to `<|end|>`, `<|call|>` or `<|return|>`. The header names a
channel: `analysis` is reasoning, `final` and `commentary` are content. With `to=functions.NAME`, the body is a call's
arguments. A text without a header, as a grammar makes it, is content.
"""

from collections.abc import Collection
import json
import re

from spmd_tasks.decoding.generated_sequence import begun_length
from spmd_tasks.serving.tool_calls import ToolCall

_MESSAGE = '<|message|>'
_ENDS = ('<|end|>', '<|call|>', '<|return|>', '<|start|>')
_OPENINGS = ('<|channel|>', '<|start|>', _MESSAGE, 'to=')


class ChannelParser:
  """Splits one growing text; what may become a marker or a call is held back.

  Attributes:
    num_calls: calls so far.
  """

  def __init__(self, names: Collection[str]):
    """Knows the tools of a request by their names."""
    self._names = names
    self._held = ''
    self._kind: str | None = None  # of the message whose body is read: content, reasoning or call; None in a header
    self._callee = ''
    self._is_first = True
    self._content_begun = False
    self._separator = ''  # between two messages of content
    self._reasoning = ''
    self.num_calls = 0

  def push(self, piece: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
    """Adds a piece; returns (content, calls) that are certain now."""
    text, self._held = self._held + piece, ''
    content, calls = '', list[ToolCall]()
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
      ends = [(place, end) for end in _ENDS if (place := text.find(end)) >= 0]
      if ends:
        place, end = min(ends)
        body, text = text[:place], text[place + len(end) :]
      elif self._kind == 'call' and not is_last:
        self._held = text  # a call is given whole
        break
      else:
        kept = 0 if is_last else begun_length(text, _ENDS)
        body, text = text[: len(text) - kept], text[len(text) - kept :]
      if self._kind == 'reasoning':
        self._reasoning += body
      elif self._kind == 'call' and (call := self._call(body)) is not None:
        calls.append(call)
      elif body:
        content, self._separator, self._content_begun = content + self._separator + body, '', True
      if not ends:
        self._held = text
        break
      self._kind = None
    self.num_calls += len(calls)
    return content, calls

  def take_reasoning(self) -> str:
    """Returns the reasoning since the last time."""
    taken, self._reasoning = self._reasoning, ''
    return taken

  def _begin(self, header: str) -> None:
    self._is_first = False
    channel = re.search(r'<\|channel\|>\s*(\w+)', header)
    callee = re.search(r'\bto=(?:functions\.)?([^\s<]+)', header)
    self._callee = callee[1] if callee else ''
    if self._callee in self._names:
      self._kind = 'call'
    elif self._callee or (channel and channel[1] == 'analysis'):
      self._kind = 'reasoning'
    else:
      self._kind, self._separator = 'content', '\n' if self._content_begun else ''

  def _call(self, body: str) -> ToolCall | None:
    try:
      arguments = json.loads(body)
    except (ValueError, RecursionError):
      return None
    if not isinstance(arguments, dict):
      return None
    return ToolCall(name=self._callee, arguments=json.dumps(arguments, ensure_ascii=False))


def _may_be_header(text: str) -> bool:
  text = text.lstrip()
  return any(text.startswith(opening) or opening.startswith(text) for opening in _OPENINGS)
