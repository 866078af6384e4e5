r"""Derives the format of a model's answers from its chat template: how to parse them, and how to constrain them.

    answers = answer_format(chat_template, tokenizer)
    answers.parser(tools, prompt='...<|im_start|>assistant\n', is_constrained=False)   # parses one answer
    answers.grammar(tools, prompt='...', field='tool_choice')                          # forces a tool call

tool_call_formats.py has the formats of tool calls; answer_parsers.py and response_templates.py have the parsers.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import re
from typing import Any

from absl import logging

from spmd_tasks.decoding.constraints import FormError, OutputForm
from spmd_tasks.inputs import ChatTemplate, Tokenizer
from spmd_tasks.inputs.tokenizer_files import FileTokenizer
from spmd_tasks.inputs.tokenizers import decode_all, decode_generated
from spmd_tasks.serving.answer_parsers import END_THINK, THINK, AnswerParser, ChannelParser, Parser
from spmd_tasks.serving.response_templates import ResponseTemplate, ResponseTemplateParser
from spmd_tasks.serving.tool_call_formats import ToolCallFormat, tool_call_format
from spmd_tasks.serving.tool_calls import Tools, call_schema, spaced

_PLACEHOLDERS = re.compile(r'(\{\w+\})')
_AFTER_THINKING = f'{END_THINK}\n\n'


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerFormat:
  """The format of a model's answers.

  Fields:
    calls: the format of tool calls.
    has_channels: whether answers are in the harmony format of gpt-oss, with messages in channels.
    thinks: whether answers may have reasoning between `<think>` and `</think>`.
    response_template: the `response_template` of the tokenizer's folder. If there is one, it parses answers instead of
      the other fields.
    tokenizer: decodes tokens.
    added_tokens: the ids of the tokenizer's added tokens, which are never split, by their text.
    special: the ids of those added tokens that plain decoding skips.
  """

  calls: ToolCallFormat
  has_channels: bool
  thinks: bool
  response_template: ResponseTemplate | None
  tokenizer: Tokenizer
  added_tokens: dict[str, int]
  special: frozenset[int]

  def parser(self, tools: Tools | None, *, prompt: str, is_constrained: bool) -> Parser:
    """Returns a parser for one answer.

    Args:
      tools: the tools that the answer may call; None if it must not be parsed for calls.
      prompt: the text before the answer.
      is_constrained: whether a grammar constrains the answer. A constrained answer does not follow
        `response_template`.
    """
    if self.response_template is not None and not is_constrained:
      return ResponseTemplateParser(self.response_template, tools, prompt=prompt)
    if self.has_channels:
      return ChannelParser(tools)
    return AnswerParser(
      self.calls, tools, thinks=self.thinks and not is_constrained, is_thinking=self._is_thinking(prompt)
    )

  def needs_parser(self, tools: Tools | None) -> bool:
    """Whether answers can contain anything but content."""
    return tools is not None or self.has_channels or self.thinks or self.response_template is not None

  def decoder(self, tools: Tools | None) -> Callable[[Sequence[int]], str]:
    """Returns the function that decodes an answer's tokens to the text that its parser reads.

    Special tokens are decoded only if they are markup of this format.
    """
    marks = {THINK, END_THINK} if self.thinks else set[str]()
    if tools is not None:
      marks |= {'<tool_call>', '</tool_call>', *self.calls.openings, *self.calls.markers, self.calls.closing.strip()}
    shows_all = self.has_channels or self.response_template is not None
    hidden = frozenset() if shows_all else self.special - {self.added_tokens.get(mark) for mark in marks}
    if hidden == self.special:
      return lambda ids: decode_generated(self.tokenizer, ids)
    size = self.tokenizer.vocab_size
    return lambda ids: decode_all(self.tokenizer, [token for token in ids if token < size and token not in hidden])

  def _is_thinking(self, prompt: str) -> bool:
    """Whether the prompt already opens the reasoning of the answer."""
    return self.thinks and not self.has_channels and prompt.rstrip().endswith(THINK)

  # --- grammars ---

  def grammar(
    self, tools: Tools, *, prompt: str, field: str, text: OutputForm | None = None, several: bool = False
  ) -> OutputForm:
    """Returns the grammar of an answer that calls one of the tools or, if `text` is given, has that form instead.

    Args:
      tools: the tools that the answer may call; may be empty if `text` is given.
      prompt: the text before the answer. If it opens the reasoning, the answer starts with `</think>`.
      field: the request's field that asks for this, for error messages.
      text: the form of an answer without calls; None if the answer must be a call.
      several: whether the answer may have several calls.

    Raises:
      FormError: `text` cannot be combined with calls.
    """
    rules, alternatives = list[str](), list[str]()
    schema: dict[str, Any] | None = None  # of the text, if one JSON schema covers both the text and the call
    if text is not None and text.kind == 'json_schema' and tools and self.calls.forced.startswith('{call}'):
      schema = _schema(text)
    elif text is not None:
      rules.append(f'text: {_text_rule(text)}')
      alternatives.append('text')
    if tools:
      call_rules = self._call_rules(tools, schema, several=several)
      rules += call_rules
      call = ' | '.join(f'call{number}' for number in range(len(call_rules)))
      repeats = several and self.calls.closing and '{calls}' not in self.calls.forced
      closing = self._literal(self.calls.closing)
      alternatives.append(f'({call}) ({closing} "\\n"? ({call}))* ({closing})?' if repeats else call)
    end_thinking = f'{self._literal(_AFTER_THINKING)} ' if self._is_thinking(prompt) else ''
    start = f'start: {end_thinking}({" | ".join(alternatives)})'
    return OutputForm(field=field, kind='grammar', value='\n'.join([start, *rules]))

  def _call_rules(self, tools: Tools, text: dict[str, Any] | None, *, several: bool) -> list[str]:
    """Returns the rules `call0`, `call1`, ... of a call; with `text`, a value of that schema may stand in its place."""
    forced = self.calls.forced
    if '{name}' in forced:
      return [
        f'call{number}: ' + self._rule(forced, {'{name}': name, '{arguments}': spaced(schema)})
        for number, (name, schema) in enumerate(tools.items())
      ]
    call = call_schema(tools, key=self.calls.key, text=text)
    item = {name: value for name, value in call.items() if name not in ('$defs', 'x-guidance')}
    most = {} if several else {'maxItems': 1}
    calls = {'type': 'array', 'items': item, 'minItems': 1, **most}
    calls |= {name: call[name] for name in ('$defs', 'x-guidance')}
    return ['call0: ' + self._rule(forced, {'{call}': call, '{calls}': calls})]

  def _rule(self, template: str, values: dict[str, Any]) -> str:
    """Returns the grammar rule of a template whose `{placeholders}` are filled by values: names or JSON schemas."""
    pieces = list[str]()
    for piece in _PLACEHOLDERS.split(template):
      value = values.get(piece, piece)
      pieces.append(self._literal(value) if isinstance(value, str) else f'%json {json.dumps(value)}')
    return ' '.join(filter(None, pieces))

  def _literal(self, text: str) -> str:
    """Returns a literal text for a grammar, with added tokens as `<[id]>`."""
    marks = sorted((mark for mark in self.added_tokens if mark in text), key=len, reverse=True)
    pieces = re.split(f'({"|".join(map(re.escape, marks))})', text) if marks else [text]
    tokens = {mark: f'<[{self.added_tokens[mark]}]>' for mark in marks}
    return ' '.join(tokens.get(piece) or json.dumps(piece, ensure_ascii=False) for piece in pieces if piece)


def _text_rule(form: OutputForm) -> str:
  if form.kind == 'json_schema':
    return f'%json {json.dumps(spaced(_schema(form)))}'
  if form.kind == 'choice' and isinstance(form.value, list) and all(isinstance(choice, str) for choice in form.value):
    return ' | '.join(json.dumps(choice, ensure_ascii=False) for choice in form.value)
  if form.kind == 'regex' and isinstance(form.value, str):
    escaped = re.sub(r'(\\.)|/', lambda match: match[1] or r'\/', form.value, flags=re.DOTALL)
    return f'/{escaped}/'
  raise FormError(
    f'{form.field} cannot be combined with tools: leave one out, or set tool_choice to none.',
    form.field,
  )


def _schema(form: OutputForm) -> dict[str, Any]:
  """Returns the JSON schema of a form; raises a FormError if it is not a schema."""
  value = form.value
  if isinstance(value, str):
    try:
      value = json.loads(value)
    except (ValueError, RecursionError):
      value = None
  if value is True:
    return {}
  if not isinstance(value, dict):
    raise FormError(f'{form.field} must be a JSON schema that is not empty.', form.field)
  return value


def answer_format(template: ChatTemplate, tokenizer: Tokenizer) -> AnswerFormat:
  """Derives the format of answers from a chat template and its tokenizer."""
  response_template = None
  if template.response_template is not None:
    try:
      response_template = ResponseTemplate.from_json(template.response_template)
    except ValueError as error:
      logging.warning('The response_template of the tokenizer is not used: %s.', error)
  added = tokenizer.added_tokens if isinstance(tokenizer, FileTokenizer) else {}
  has_channels = template.mentions('<|channel|>')
  calls = _CHANNELS if has_channels else tool_call_format(template)
  # A tokenizer without these marks as single tokens would spell each with many tokens, which no published model does:
  # force a shorter text.
  marks = [mark for mark in (*calls.openings, *calls.markers) if mark[0] in '<[' and mark in calls.forced]
  if not all(mark in added for mark in marks):
    short = 'to=functions.{name}<|message|>{arguments}' if has_channels else '{call}'
    calls = dataclasses.replace(calls, forced=short, closing='')
  return AnswerFormat(
    calls=calls,
    has_channels=has_channels,
    thinks=template.mentions(END_THINK) or template.mentions(THINK),
    response_template=response_template,
    tokenizer=tokenizer,
    added_tokens={text: token for text, (token, _) in added.items()},
    special=frozenset(token for token, is_special in added.values() if is_special),
  )


# Used by grammars only; ChannelParser parses this format.
_CHANNELS = dataclasses.replace(
  tool_call_format(ChatTemplate()),
  openings=('<|channel|>', '<|message|>'),
  forced='<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}',
)
