r"""AnswerForm: how a model's answers are written, by its chat template: how they are read, and how calls are forced.

    form = answer_form(chat_template, tokenizer)
    form.parser(tools, prompt='...<|im_start|>assistant\n', is_fixed=False)       # of one answer
    form.grammar(tools, prompt='...', field='tool_choice')                         # of an answer that must be a call

call_forms.py has the forms of calls, answer_parsers.py and response_templates.py the parsers.
"""

from collections.abc import Callable, Sequence
import dataclasses
import json
import re
from typing import Any

from absl import logging

from spmd_tasks.decoding.constraints import FormError, OutputForm
from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ChatTemplate, Tokenizer
from spmd_tasks.inputs.tokenizer_files import FileTokenizer
from spmd_tasks.inputs.tokenizers import decode_all, decode_generated
from spmd_tasks.serving.answer_parsers import END_THINK, THINK, AnswerParser, ChannelParser, Parser
from spmd_tasks.serving.call_forms import CallForm, call_form
from spmd_tasks.serving.response_templates import ResponseTemplate, ResponseTemplateParser
from spmd_tasks.serving.tool_calls import Tools, call_schema, spaced

_PLACES = re.compile(r'(\{\w+\})')
_AFTER_THINKING = f'{END_THINK}\n\n'


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerForm:
  """The form of a model's answers.

  Fields:
    calls: how calls are written.
    has_channels: whether an answer has messages in channels, as those of gpt-oss.
    thinks: whether reasoning is between `<think>` and `</think>`.
    response_template: of the tokenizer's folder; it is read by, rather than by the other fields.
    tokenizer: turns tokens into text.
    added_tokens: the ids of tokens that are never split, by their texts; of them `special` have no text of their own.
  """

  calls: CallForm
  has_channels: bool
  thinks: bool
  response_template: ResponseTemplate | None
  tokenizer: Tokenizer
  added_tokens: dict[str, int]
  special: frozenset[int]

  def parser(self, tools: Tools | None, *, prompt: str, is_fixed: bool) -> Parser:
    """Makes the parser of one answer.

    Args:
      tools: that the answer may call; None for an answer without calls.
      prompt: the text before the answer.
      is_fixed: whether a grammar decides what the answer is, so that it is not in the form of `response_template`.
    """
    if self.response_template is not None and not is_fixed:
      return ResponseTemplateParser(self.response_template, tools, prompt=prompt)
    if self.has_channels:
      return ChannelParser(tools)
    return AnswerParser(self.calls, tools, thinks=self.thinks and not is_fixed, is_thinking=self._is_thinking(prompt))

  def needs_parser(self, tools: Tools | None) -> bool:
    """Whether answers have more than content."""
    return tools is not None or self.has_channels or self.thinks or self.response_template is not None

  def decoder(self, tools: Tools | None) -> Callable[[Sequence[int]], str]:
    """Returns the function that turns an answer's tokens into the text that its parser reads.

    Special tokens have text only if they are marks of the form.
    """
    marks = {THINK, END_THINK} if self.thinks else set[str]()
    if tools is not None:
      marks |= {'<tool_call>', '</tool_call>', *self.calls.openings, *self.calls.markers, self.calls.closed.strip()}
    shows_all = self.has_channels or self.response_template is not None
    hidden = frozenset() if shows_all else self.special - {self.added_tokens.get(mark) for mark in marks}
    if hidden == self.special:
      return lambda ids: decode_generated(self.tokenizer, ids)
    size = self.tokenizer.vocab_size
    return lambda ids: decode_all(self.tokenizer, [token for token in ids if token < size and token not in hidden])

  def _is_thinking(self, prompt: str) -> bool:
    """Whether a prompt ends in the reasoning of the answer."""
    return self.thinks and not self.has_channels and prompt.rstrip().endswith(THINK)

  # --- grammars ---

  def grammar(
    self, tools: Tools, *, prompt: str, field: str, text: OutputForm | None = None, several: bool = False
  ) -> OutputForm:
    """Makes the form of an answer that is a call of one of the tools, or a text in the form `text` if there is one.

    Args:
      tools: that the answer may call; none if it is a text.
      prompt: the text before the answer. If it has begun the reasoning, the answer ends that first.
      field: of the request, which an error names.
      text: the form of an answer without calls.
      several: whether the answer may have several calls.

    Raises a FormError: `text` has no form that may stand beside calls.
    """
    form = self.calls
    rules, alternatives = list[str](), list[str]()
    is_one_value = text is not None and text.kind == 'json_schema' and bool(tools) and form.forced.startswith('{call}')
    if text is not None and not is_one_value:
      rules.append(f'text: {_text_rule(text)}')
      alternatives.append('text')
    if tools:
      calls = self._call_rules(tools, None if not is_one_value else _schema(text), several=several)
      rules += calls
      names = [f'call{number}' for number in range(len(calls))]
      one = ' | '.join(names)
      repeats = several and form.closed and '{calls}' not in form.forced
      closed = self._literal(form.closed)
      alternatives.append(f'({one}) ({closed} "\\n"? ({one}))* ({closed})?' if repeats else one)
    begin = f'{self._literal(_AFTER_THINKING)} ' if self._is_thinking(prompt) else ''
    start = f'start: {begin}({" | ".join(alternatives)})'
    return OutputForm(field=field, kind='grammar', value='\n'.join([start, *rules]))

  def _call_rules(self, tools: Tools, text: Any, *, several: bool) -> list[str]:
    form = self.calls
    if '{name}' in form.forced:
      return [
        f'call{number}: ' + self._rule(form.forced, {'{name}': name, '{arguments}': spaced(schema)})
        for number, (name, schema) in enumerate(tools.items())
      ]
    call = call_schema(tools, key=form.key, text=text)
    item = {name: value for name, value in call.items() if name not in ('$defs', 'x-guidance')}
    most = {} if several else {'maxItems': 1}
    calls = {'type': 'array', 'items': item, 'minItems': 1, **most}
    calls |= {name: call[name] for name in ('$defs', 'x-guidance')}
    return ['call0: ' + self._rule(form.forced, {'{call}': call, '{calls}': calls})]

  def _rule(self, form: str, values: dict[str, Any]) -> str:
    """A form with values in its places: a name is text, a schema stands for JSON."""
    pieces = list[str]()
    for piece in _PLACES.split(form):
      value = values.get(piece, piece)
      pieces.append(self._literal(value) if isinstance(value, str) else f'%json {json.dumps(value)}')
    return ' '.join(filter(None, pieces))

  def _literal(self, text: str) -> str:
    """A text in a grammar, whose tokens that are never split are named by their numbers."""
    marks = sorted((mark for mark in self.added_tokens if mark in text), key=len, reverse=True)
    pieces = re.split(f'({"|".join(map(re.escape, marks))})', text) if marks else [text]
    tokens = {mark: f'<[{self.added_tokens[mark]}]>' for mark in marks}
    return ' '.join(tokens.get(piece) or json.dumps(piece, ensure_ascii=False) for piece in pieces if piece)


def _text_rule(form: OutputForm) -> str:
  if form.kind == 'json_schema':
    return f'%json {json.dumps(spaced(_schema(form)))}'
  if form.kind == 'choice' and isinstance(form.value, list) and all(isinstance(one, str) for one in form.value):
    return ' | '.join(json.dumps(one, ensure_ascii=False) for one in form.value)
  if form.kind == 'regex' and isinstance(form.value, str):
    escaped = re.sub(r'(\\.)|/', lambda match: match[1] or r'\/', form.value, flags=re.DOTALL)
    return f'/{escaped}/'
  raise FormError(
    f'{form.field} cannot be used beside tools that may be called: leave one out, or set tool_choice to none.',
    form.field,
  )


def _schema(form: OutputForm | None) -> dict[str, Any]:
  """The JSON schema of a form."""
  value = None if form is None else form.value
  if isinstance(value, str):
    try:
      value = json.loads(value)
    except (ValueError, RecursionError):
      value = None
  if value is True:
    return {}
  if not isinstance(value, dict):
    field = '' if form is None else form.field
    raise FormError(f'{field} must be a JSON schema, and not empty.', field)
  return value


def answer_form(template: ChatTemplate, tokenizer: Tokenizer) -> AnswerForm:
  """Returns the form in which a chat template writes answers."""
  response_template = None
  if template.response_template is not None:
    try:
      response_template = ResponseTemplate.from_json(template.response_template)
    except UserError as error:
      logging.warning('The response_template of the tokenizer is not used: %s.', error)
  added = tokenizer.added_tokens if isinstance(tokenizer, FileTokenizer) else {}
  has_channels = template.mentions('<|channel|>')
  calls = _CHANNELS if has_channels else call_form(template)
  # As long texts, marks would cost many tokens, and no published model writes them so: a shorter form is forced.
  marks = [mark for mark in (*calls.openings, *calls.markers) if mark[0] in '<[' and mark in calls.forced]
  if not all(mark in added for mark in marks):
    short = 'to=functions.{name}<|message|>{arguments}' if has_channels else '{call}'
    calls = dataclasses.replace(calls, forced=short, closed='')
  return AnswerForm(
    calls=calls,
    has_channels=has_channels,
    thinks=template.mentions(END_THINK) or template.mentions(THINK),
    response_template=response_template,
    tokenizer=tokenizer,
    added_tokens={text: token for text, (token, _) in added.items()},
    special=frozenset(token for token, is_special in added.values() if is_special),
  )


# Only forced by this form: a ChannelParser reads it.
_CHANNELS = dataclasses.replace(
  call_form(ChatTemplate()),
  openings=('<|channel|>', '<|message|>'),
  forced='<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}',
)
