r"""ChatTemplate: renders a conversation as the text that a language model continues.

    ChatTemplate()                                          # a plain transcript
    ChatTemplate.from_folder('models/qwen')                 # the templates of a Hugging Face model
    ChatTemplate.from_file('chat_template.jinja')           # a single file
    ChatTemplate.from_turns('<{role}>{content}\n', reply='<assistant>', stop=('\n<',))
    ChatTemplate(template='{% for message in messages %}...{% endfor %}', stop=())

Templates are Jinja with the variables, filters and whitespace rules of Hugging Face's transformers, in a sandbox.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import json
import re
from typing import Any

from etils import epath

from spmd_tasks.errors import UserError
from spmd_tasks.inputs._template_sandbox import Job, Spans, render
from spmd_tasks.inputs.tokenizer_files import FileTokenizer, FolderTokenizer, read_json_object

_TRANSCRIPT = """\
{% for message in messages %}
{{ message['role'] }}: {{ message['content'] }}
{% endfor %}
{% if add_generation_prompt %}assistant: {% endif %}"""

_TRANSCRIPT_STOP = ('\nuser:', '\nsystem:')

_ANSWER = 'Quite so'  # the assistant's text in the conversations that show how a template ends a turn
_GENERATION_BLOCK = re.compile(r'\{%[-+]?\s*generation\s*[-+]?%\}')
_TESTS_CONTENT_FOR_NONE = re.compile(r"""\bcontent['"\]]*\s+is\s+(not\s+)?none\b""", re.IGNORECASE)

# Most templates read the arguments of a tool call as an object; some, such as DeepSeek's, concatenate them as text.
_ARGUMENTS = r'\barguments[\'"]?\]?\s*'
_CONCATENATES_ARGUMENTS = re.compile(r'(\+|~|\{\{-?)\s*[\w.\[\]\'"]*' + _ARGUMENTS + r'(\+|~|-?\}\})')
_READS_ARGUMENTS = re.compile(_ARGUMENTS + r'(\|\s*(tojson|items)|\.items|is\s)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
  """A Jinja chat template as in transformers, and the strings that end an answer. The default is a plain transcript.

  A template may use `messages`, `tools`, `documents`, `add_generation_prompt`, `bos_token`, `eos_token`, the variables
  of a request's `chat_template_kwargs`, the functions `raise_exception(message)`, `strftime_now(format)`, `namespace`
  and `dict`, and the filter `tojson`.

  Fields:
    template: the Jinja source.
    tool_template: the source for requests with tools; None uses `template`.
    stop: strings that end the answer, in addition to the end of text. The default is for the transcript.
    bos_token, eos_token: the values of these variables.
    writes_bos: whether the template writes the bos. If not, the server puts the tokenizer's bos before the text unless
      it begins with one.
    response_template: the JSON of a `response_template` of transformers, by which answers are parsed; None derives the
      format from `template`.

  Raises a UserError, with the line, if the template is not valid Jinja.
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
    """Makes a template that writes each message as `turn`, with {role} and then {content} in it, and then `reply`."""
    before, role, rest = turn.partition('{role}')
    between, content, after = rest.partition('{content}')
    if not role or not content:
      raise UserError(f'turn={turn!r} must contain {{role}}, and {{content}} after it.')
    before, between, after, reply = (json.dumps(text, ensure_ascii=False) for text in (before, between, after, reply))
    expressions = (before, "message['role']", between, "message['content']", after)
    message = ''.join(f'{{{{ {expression} }}}}' for expression in expressions)
    template = (
      f'{{% for message in messages %}}{message}{{% endfor %}}'
      f'{{% if add_generation_prompt %}}{{{{ {reply} }}}}{{% endif %}}'
    )
    return cls(template=template, stop=tuple(stop))

  @classmethod
  def from_file(cls, path: str) -> 'ChatTemplate':
    """Reads a Jinja file, such as chat_template.jinja. Raises a UserError if it cannot be read."""
    if str(path).endswith('.json'):
      raise UserError(f'chat template {path} must be a Jinja file: read the folder of a model by from_folder.')
    return cls(template=_read_template(epath.Path(path).expanduser()), stop=())

  @classmethod
  def from_folder(cls, path: str) -> 'ChatTemplate | None':
    """Reads the templates of a model's folder like transformers; returns None if the folder has none.

    Templates are in chat_template.jinja and additional_chat_templates/NAME.jinja, or else in tokenizer_config.json
    under `chat_template`, as a text or a list of named texts.

    Raises a UserError if a file cannot be read, or none of several named templates is named default.
    """
    folder = epath.Path(path).expanduser()
    tokenizer = FolderTokenizer(path=str(folder))
    files = {'default': folder / 'chat_template.jinja'}
    if (folder / 'additional_chat_templates').is_dir():
      files |= {file.stem: file for file in sorted((folder / 'additional_chat_templates').glob('*.jinja'))}
    templates = {name: _read_template(file) for name, file in files.items() if file.exists()}
    config = read_json_object(str(folder / 'tokenizer_config.json'))
    templates = templates or _named_templates(config)
    if not templates:
      return None
    if 'default' not in templates:
      names = ', '.join(sorted(templates))
      raise UserError(f'{path} has the chat templates {names}, but none named default: add one of this name.')
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
    """Returns the tokens that end the assistant's turn after a text and, if different, after tool calls.

    The tokens are taken from short conversations: a text ends at the first added token after it, such as <|im_end|>,
    and tool calls end at the last special token after them. If the template writes nothing there, they end at the token
    that begins the next message, such as <|user|>.

    Raises a UserError if no added token follows a text, or the template refuses short conversations.
    """
    question, answer = {'role': 'user', 'content': 'Hi'}, {'role': 'assistant', 'content': _ANSWER}
    refusal = None
    for system in ([], [{'role': 'system', 'content': 'Hi'}]):  # some templates require a system message
      try:
        conversation = [*system, question, answer]
        end = self._text_after_answer(conversation)
        following = end if end.strip() else self._text_after_answer([*conversation, question])
        break
      except UserError as error:
        refusal = refusal or error
    else:
      raise UserError(f'the end of a turn cannot be determined: {refusal}')
    tokens = tokenizer.added_tokens_in(following)
    if not tokens:
      raise UserError(f'the chat template ends a turn with {end!r:.60}, which has no added token of the tokenizer.')
    return tuple(dict.fromkeys((tokens[0], *self._call_ends(tokenizer, [*system, question]))))

  def _call_ends(self, tokenizer: FileTokenizer, before: Sequence[Mapping[str, Any]]) -> list[int]:
    """Returns the token that ends a turn of tool calls; [] if the template supports none."""
    if not self.mentions('tool_calls'):
      return []
    function = {'name': 'f', 'arguments': {'x': _ANSWER}}
    tool_calls = [{'id': 'call00001', 'type': 'function', 'function': function}]
    call = {'role': 'assistant', 'content': '', 'tool_calls': tool_calls}
    result = {'role': 'tool', 'tool_call_id': 'call00001', 'name': 'f', 'content': 'Hi'}
    schema = {'type': 'object', 'properties': {'x': {'type': 'string', 'description': 'x'}}}
    tools = [{'type': 'function', 'function': {'name': 'f', 'description': 'f', 'parameters': schema}}]
    try:
      tokens = tokenizer.added_tokens_in(self._text_after_answer([*before, call], tools), only_special=True)
      if tokens:
        return tokens[-1:]
      return tokenizer.added_tokens_in(self._text_after_answer([*before, call, result], tools), only_special=True)[:1]
    except UserError:  # the template requires calls of another form
      return []

  def _text_after_answer(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
    """Returns what the template writes after _ANSWER."""
    text = self.render(messages, tools=tools, add_generation_prompt=False)
    if _ANSWER not in text:
      raise UserError("the chat template does not write the assistant's messages.")
    return text.rpartition(_ANSWER)[2]

  def mentions(self, name: str) -> bool:
    """Whether a name occurs in the template; if not, the template cannot use this variable or role."""
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
    """Renders a conversation, like transformers' `apply_chat_template(..., tokenize=False)`.

    Args:
      messages: dicts with `role`, and `content` or other keys that the template reads.
      tools: the functions that the answer may call, in the format of OpenAI's API.
      documents: texts with titles, for templates that support them.
      add_generation_prompt: whether to append the beginning of an answer.
      **variables: further variables of the template, such as enable_thinking.

    Raises a UserError if the template refuses the messages, fails, or writes too long a text.
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
    """Renders several conversations, with the characters that the template marks as the assistant's.

    Args:
      conversations: (messages, add_generation_prompt) pairs.
      tools, variables: see `render`.
      now: the time for the template's `strftime_now`; None is the current time.

    Returns the text of each conversation, and the (start, end) characters of its `{% generation %}` blocks.

    Raises a UserError like `render`, or if a block is in a macro or a variable, so that its position is unknown.
    """
    rendered = self._render(conversations, tools, None, variables or {}, now)
    if any(spans is None for _, spans in rendered):
      raise UserError(
        'the chat template has a {% generation %} block in a macro, a {% set %} or a filter, where its position is '
        'unknown: move the block to where the text is written.'
      )
    return [(text, spans or []) for text, spans in rendered]

  def marks_generation(self, tools: Sequence[Any] | None) -> bool:
    """Whether the template for requests with or without tools has `{% generation %}` blocks."""
    return _GENERATION_BLOCK.search(self._source(tools)) is not None

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
    shared = {
      'bos_token': self.bos_token,
      'eos_token': self.eos_token,
      **variables,
      'tools': None if tools is None else list(tools),
      'documents': None if documents is None else list(documents),
    }
    source = self._source(tools)
    jobs: list[Job] = []
    for messages, add_prompt in conversations:
      adapted = [self._adapt(message, f'messages[{index}]', source) for index, message in enumerate(messages)]
      jobs.append((shared | {'messages': adapted, 'add_generation_prompt': add_prompt}, now))
    return render(source, jobs)

  def _adapt(self, message: Mapping[str, Any], where: str, source: str) -> dict[str, Any]:
    """Returns a message in the form that this template reads."""
    message = normalized_message(message, where)
    if message.get('role') == 'developer' and not self.mentions('developer'):
      message['role'] = 'system'
    if message.get('tool_calls') and not message.get('content') and _TESTS_CONTENT_FOR_NONE.search(source):
      message['content'] = None  # these templates may not write the calls of a message with empty content
    calls = message.get('tool_calls')
    if isinstance(calls, list) and _CONCATENATES_ARGUMENTS.search(source) and not _READS_ARGUMENTS.search(source):
      message['tool_calls'] = [_with_arguments_as_text(call) for call in calls]
    names = ('reasoning_content', 'thinking', 'reasoning')
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    return message if reasoning is None else {'thinking': reasoning, **message, 'reasoning_content': reasoning}


def normalized_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
  """Returns a message of OpenAI's API in the form that chat templates read. Idempotent.

  Null content becomes empty, parts of text are joined, and the arguments of tool calls become objects instead of JSON
  text. Other keys that are null, as in the `model_dump()` of a client's message, and an empty list of tool calls are
  removed.

  Raises a UserError if the arguments of a tool call are not a JSON object; `where` names the message.
  """
  message = {name: value for name, value in message.items() if value is not None}
  if calls := message.pop('tool_calls', None):
    message['tool_calls'] = calls
    if isinstance(calls, Sequence) and not isinstance(calls, str):
      message['tool_calls'] = [_normalized_call(call, f'{where}.tool_calls[{i}]') for i, call in enumerate(calls)]
  content = message.setdefault('content', '')
  if isinstance(content, Sequence) and not isinstance(content, str):
    parts = [part.get('text') for part in content if isinstance(part, Mapping) and part.get('type') == 'text']
    texts = [text for text in parts if isinstance(text, str)]
    if len(texts) == len(content):
      message['content'] = ''.join(texts)
  return message


def _normalized_call(call: Any, where: str) -> Any:
  """Returns a tool call, or its function, with its arguments as an object."""
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
  """Parses the arguments of a call if they are text; '' and null are {}. Returns None for invalid JSON."""
  if isinstance(value, str) and value.strip():
    try:
      value = json.loads(value)
      json.dumps(value, allow_nan=False)  # a template would write 1e400 as Infinity
    except (ValueError, RecursionError):
      return None
    return {} if value is None else value
  return value or {}


def _with_arguments_as_text(call: Any) -> Any:
  """Returns a tool call with its arguments as JSON text."""
  function = call.get('function') if isinstance(call, Mapping) else None
  if not isinstance(function, Mapping) or not isinstance(function.get('arguments'), Mapping):
    return call
  text = json.dumps(function['arguments'], ensure_ascii=False, default=str)
  return {**call, 'function': {**function, 'arguments': text}}


def _read_template(path: epath.Path) -> str:
  try:
    return path.read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError) as error:
    reason = getattr(error, 'strerror', None) or error
    raise UserError(f'chat template {path} cannot be read ({reason}): correct the path or the file.') from error


def _named_templates(config: Mapping[str, Any]) -> dict[str, str]:
  """Returns the templates of a tokenizer_config.json by name."""
  entries = config.get('chat_template')
  if not isinstance(entries, list):
    entries = [{'name': 'default', 'template': entries}]
  templates = {entry.get('name'): entry.get('template') for entry in entries if isinstance(entry, dict)}
  return {name: text for name, text in templates.items() if isinstance(name, str) and isinstance(text, str)}
