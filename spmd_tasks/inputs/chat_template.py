r"""ChatTemplate: renders a conversation as the text that a language model continues.

    ChatTemplate()                                          # a plain transcript
    ChatTemplate.from_folder('models/qwen')                 # the templates of a Hugging Face model
    ChatTemplate.from_file('chat_template.jinja')           # or of one file
    ChatTemplate.from_turns('<{role}>{content}\n', reply='<assistant>', stop=('\n<',))
    ChatTemplate(template='{% for message in messages %}...{% endfor %}', stop=())

Templates are in Jinja, with the variables, filters and whitespace rules of Hugging Face's transformers, in a sandbox.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import json
import re
from typing import Any

from etils import epath

from spmd_tasks.errors import UserError
from spmd_tasks.inputs._call_arguments import with_arguments_as_read
from spmd_tasks.inputs._template_sandbox import Job, Spans, render
from spmd_tasks.inputs.tokenizer_files import FileTokenizer, FolderTokenizer, read_json_object

_TRANSCRIPT = """\
{% for message in messages %}
{{ message['role'] }}: {{ message['content'] }}
{% endfor %}
{% if add_generation_prompt %}assistant: {% endif %}"""

_TRANSCRIPT_STOP = ('\nuser:', '\nsystem:')

_ANSWER = 'Quite so'  # of the assistant, in conversations that show how a template ends a turn
_MARK = re.compile(r'\{%[-+]?\s*generation\s*[-+]?%\}')
_TESTS_NONE = re.compile(r"""\bcontent['"\]]*\s+is\s+(not\s+)?none\b""", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
  """A Jinja template in Hugging Face's format, and where the model's answer ends. The default is a plain transcript.

  A template may use `messages`, `tools`, `documents`, `add_generation_prompt`, `bos_token`, `eos_token`, the variables
  of a request's `chat_template_kwargs`, the functions `raise_exception(sentence)`, `strftime_now(format)`, `namespace`
  and `dict`, and the filter `tojson`.

  Fields:
    template: the Jinja source.
    tool_template: another one for requests with tools; None takes `template` for them too.
    stop: strings at which the answer ends, in addition to the end of text. The default fits the transcript.
    bos_token, eos_token: texts for the template.
    writes_bos: whether the template itself writes the beginning of text, where the model has one. If not, the server
      puts the tokenizer's bos before the text, unless it is there.
    response_template: how answers are read, the JSON of a `response_template` of transformers; None goes by `template`.

  Raises a UserError: the template is not valid Jinja; the message has its line.
  """

  template: str = _TRANSCRIPT
  tool_template: str | None = None
  stop: tuple[str, ...] = _TRANSCRIPT_STOP
  bos_token: str = ''
  eos_token: str = ''
  writes_bos: bool = False
  response_template: str | None = None

  def __post_init__(self):
    for source in {self.template, self.tool_template or self.template} - {_TRANSCRIPT}:
      render(source)

  @classmethod
  def from_turns(
    cls, turn: str = '{role}: {content}\n', *, reply: str = 'assistant: ', stop: Sequence[str] = _TRANSCRIPT_STOP
  ) -> 'ChatTemplate':
    """A template that writes every message as `turn`, with {role} and then {content} in it, and then `reply`."""
    before, role, rest = turn.partition('{role}')
    between, content, after = rest.partition('{content}')
    if not role or not content:
      raise UserError(f'turn={turn!r} must contain {{role}}, and {{content}} after it.')
    before, between, after, reply = (json.dumps(text, ensure_ascii=False) for text in (before, between, after, reply))
    pieces = (before, "message['role']", between, "message['content']", after)
    written = ''.join(f'{{{{ {piece} }}}}' for piece in pieces)
    template = (
      f'{{% for message in messages %}}{written}{{% endfor %}}'
      f'{{% if add_generation_prompt %}}{{{{ {reply} }}}}{{% endif %}}'
    )
    return cls(template=template, stop=tuple(stop))

  @classmethod
  def from_file(cls, path: str) -> 'ChatTemplate':
    """Reads a Jinja file, such as chat_template.jinja. Raises a UserError if it cannot be read."""
    if str(path).endswith('.json'):
      raise UserError(f'chat template {path} must be a Jinja file: take the folder of a model by from_folder.')
    try:
      return cls(template=epath.Path(path).expanduser().read_text(encoding='utf-8'), stop=())
    except (OSError, UnicodeDecodeError) as error:
      raise UserError(f'chat template {path} cannot be read: {getattr(error, "strerror", None) or error}.') from error

  @classmethod
  def from_folder(cls, path: str) -> 'ChatTemplate | None':
    """Reads the templates of a model's folder as transformers does; None where the folder has none.

    Templates are in chat_template.jinja and additional_chat_templates/NAME.jinja, or else in tokenizer_config.json
    under `chat_template`: a text, or a list of texts with names.

    Raises a UserError: a file cannot be read, or has templates with names but none named default.
    """
    folder = epath.Path(path).expanduser()
    tokenizer = FolderTokenizer(path=str(folder))
    named = {'default': folder / 'chat_template.jinja'}
    if (folder / 'additional_chat_templates').is_dir():
      named |= {file.stem: file for file in sorted((folder / 'additional_chat_templates').glob('*.jinja'))}
    try:
      templates = {name: file.read_text(encoding='utf-8') for name, file in named.items() if file.exists()}
    except (OSError, UnicodeDecodeError) as error:
      raise UserError(f'the chat templates of {path} cannot be read: {error}.') from error
    config = read_json_object(str(folder / 'tokenizer_config.json'))
    templates = templates or _named_templates(config)
    if not templates:
      return None
    if 'default' not in templates:
      names = ', '.join(sorted(templates))
      raise UserError(f'{path} has the chat templates {names}, but none named default: add that one.')
    return cls(
      template=templates['default'],
      tool_template=templates.get('tool_use'),
      stop=(),
      bos_token=tokenizer.special_tokens.get('bos_token', ''),
      eos_token=tokenizer.special_tokens.get('eos_token', ''),
      writes_bos=True,
      response_template=json.dumps(response) if (response := config.get('response_template')) is not None else None,
    )

  def turn_ends(self, tokenizer: FileTokenizer) -> tuple[int, ...]:
    """Returns the tokens that end a turn of the assistant: behind a text and, if they differ, behind tool calls.

    The template renders short conversations. A text ends at the first added token behind it, such as <|im_end|>, calls
    end at the last special one. If nothing is behind it, it ends where the next message begins, such as <|user|>.

    Raises a UserError: there is no such token behind a text, or the template refuses short conversations.
    """
    question, answer = {'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': _ANSWER}
    refusal = None
    for system in ([], [{'role': 'system', 'content': 'Hi'}]):  # some templates need one
      try:
        talk = [*system, question, answer]
        rest = self._behind_answer(talk)
        following = rest if rest.strip() else self._behind_answer([*talk, question])
        break
      except UserError as error:
        refusal = refusal or error
    else:
      raise UserError(f'the end of a turn is not found: {refusal}')
    tokens = tokenizer.added_tokens_in(following)
    if not tokens:
      raise UserError(f'the chat template ends a turn by {rest!r:.60}, which has no added token of the tokenizer.')
    return tuple(dict.fromkeys((tokens[0], *self._call_ends(tokenizer, [*system, question]))))

  def _call_ends(self, tokenizer: FileTokenizer, before: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the token that ends a turn of tool calls; none if the template has no calls."""
    if not self.mentions('tool_calls'):
      return []
    called, said = {'name': 'f', 'arguments': {'x': _ANSWER}}, {'role': 'assistant', 'content': ''}
    call = said | {'tool_calls': [{'id': 'call00001', 'type': 'function', 'function': called}]}
    result = {'role': 'tool', 'tool_call_id': 'call00001', 'name': 'f', 'content': 'Hi'}
    schema = {'type': 'object', 'properties': {'x': {'type': 'string', 'description': 'x'}}}
    tools = [{'type': 'function', 'function': {'name': 'f', 'description': 'f', 'parameters': schema}}]
    try:
      tokens = tokenizer.added_tokens_in(self._behind_answer([*before, call], tools), only_special=True)
      if tokens:
        return tokens[-1:]
      return tokenizer.added_tokens_in(self._behind_answer([*before, call, result], tools), only_special=True)[:1]
    except UserError:  # it takes other calls
      return []

  def _behind_answer(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
    """Returns what the template writes behind _ANSWER. Raises a UserError if there is none."""
    text = self.render(messages, tools=tools, add_generation_prompt=False)
    if _ANSWER not in text:
      raise UserError('the chat template does not write what the assistant says.')
    return text.rpartition(_ANSWER)[2]

  def mentions(self, name: str) -> bool:
    """Whether the template has this word, without which it cannot use a variable or a role of that name."""
    return name in self.template or name in (self.tool_template or '')

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
  ) -> str:
    """Renders a conversation, as transformers' `apply_chat_template(..., tokenize=False)`.

    Args:
      messages: each with `role`, and `content` or what else the template reads.
      tools: descriptions of functions that the answer may call, in the format of OpenAI's API.
      documents: texts with titles, for templates that know them.
      add_generation_prompt: whether the text ends where the answer begins.
      **variables: further variables of the template, such as enable_thinking.

    Raises a UserError: the template refuses the messages, fails, or writes too long a text.
    """
    ((text, _),) = self._render([(messages, add_generation_prompt)], tools, documents, variables, None)
    return text

  def render_each(
    self,
    conversations: Sequence[tuple[Sequence[Mapping[str, Any]], bool]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    now: datetime.datetime | None = None,
  ) -> list[tuple[str, Spans]]:
    """Renders several conversations, and says which of their characters the template marks as the assistant's.

    Args:
      conversations: each its messages, and whether the text ends where the answer begins.
      tools, variables: as in `render`.
      now: the time that the template's `strftime_now` formats; None: the clock's.

    Returns for each the text, and the (start, end) characters that `{% generation %}` blocks wrote.

    Raises a UserError: as `render`; or a block is in a macro or a variable, so that its place in the text is not known.
    """
    made = self._render(conversations, tools, None, variables or {}, now)
    if any(spans is None for _, spans in made):
      raise UserError(
        'the chat template has a {% generation %} block in a macro, a {% set %} or a filter, where its place in the '
        'text is not known: move the block out to where the text is written.'
      )
    return [(text, spans or []) for text, spans in made]

  def has_marks(self, tools: Sequence[Any] | None) -> bool:
    """Whether the template, or the one for requests with tools, has `{% generation %}` blocks."""
    return _MARK.search(self._source(tools)) is not None

  def _source(self, tools: Sequence[Any] | None) -> str:
    return self.template if tools is None or self.tool_template is None else self.tool_template

  def _render(
    self,
    conversations: Sequence[tuple[Sequence[Mapping[str, Any]], bool]],
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any],
    now: datetime.datetime | None,
  ) -> list[tuple[str, Spans | None]]:
    given = {
      'bos_token': self.bos_token,
      'eos_token': self.eos_token,
      **variables,
      'tools': None if tools is None else list(tools),
      'documents': None if documents is None else list(documents),
    }
    source = self._source(tools)
    jobs: list[Job] = []
    for messages, add_prompt in conversations:
      read = [self._readable(message, f'messages[{number}]', source) for number, message in enumerate(messages)]
      variables = given | {'messages': read, 'add_generation_prompt': add_prompt}
      jobs.append((with_arguments_as_read(source, variables), now))
    return render(source, jobs)

  def _readable(self, message: Mapping[str, Any], where: str, source: str) -> dict[str, Any]:
    """Returns a message in the form that this template reads."""
    message = normalized_message(message, where)
    if message.get('role') == 'developer' and not self.mentions('developer'):
      message['role'] = 'system'
    if message.get('tool_calls') and not message.get('content') and _TESTS_NONE.search(source):
      message['content'] = None  # without content, such templates write the calls; with an empty one, they may not
    names = ('reasoning_content', 'thinking', 'reasoning')
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    return message if reasoning is None else {'thinking': reasoning, **message, 'reasoning_content': reasoning}


def normalized_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
  """Returns a message of OpenAI's API in the form that chat templates read.

  Null content and content without parts is empty, parts of text are joined, and the arguments of tool calls are objects
  instead of JSON text. Other keys that are null, as in the `model_dump()` of a client's message, and an empty list of
  tool calls are left out. A message in this form is returned as it is.

  Raises a UserError: the arguments of a tool call are not a JSON object; `where` names the message.
  """
  message = {name: value for name, value in message.items() if value is not None}
  if calls := message.pop('tool_calls', None):
    message['tool_calls'] = calls
    if isinstance(calls, Sequence) and not isinstance(calls, str):
      message['tool_calls'] = [_normalized_call(call, f'{where}.tool_calls[{i}]') for i, call in enumerate(calls)]
  content = message.setdefault('content', '')
  if isinstance(content, Sequence) and not isinstance(content, str):
    texts = [part.get('text') for part in content if isinstance(part, Mapping) and part.get('type') == 'text']
    written = [text for text in texts if isinstance(text, str)]
    if len(written) == len(content):
      message['content'] = ''.join(written)
  return message


def _normalized_call(call: Any, where: str) -> Any:
  """Returns a tool call, or its function, whose arguments are an object."""
  if not isinstance(call, Mapping):
    return call
  call = {name: value for name, value in call.items() if value is not None or name == 'arguments'}
  if 'function' in call:
    return {'type': 'function', **call, 'function': _normalized_call(call['function'], f'{where}.function')}
  if 'arguments' not in call and 'name' not in call:
    return call
  arguments = _parsed_arguments(call.get('arguments'))
  if not isinstance(arguments, Mapping):
    raise UserError(f'{where}.arguments must be a JSON object, or its text, not {call["arguments"]!r:.100}.')
  return {**call, 'arguments': arguments}


def _parsed_arguments(value: Any) -> Any:
  """Returns the arguments of a call: an object, or what is no object. No arguments are written as '', null or {}."""
  if isinstance(value, str) and value.strip():
    try:
      value = json.loads(value)
      json.dumps(value, allow_nan=False)  # a template would write 1e400 as Infinity
    except (ValueError, RecursionError):
      return None
    return {} if value is None else value
  return value or {}


def _named_templates(config: Mapping[str, Any]) -> dict[str, str]:
  """The templates of a tokenizer_config.json by name."""
  found = config.get('chat_template')
  entries = found if isinstance(found, list) else [{'name': 'default', 'template': found}]
  texts = {each.get('name'): each.get('template') for each in entries if isinstance(each, dict)}
  return {name: text for name, text in texts.items() if isinstance(name, str) and isinstance(text, str)}
