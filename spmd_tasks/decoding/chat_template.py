r"""ChatTemplate: renders a conversation as the text that a language model continues.

    ChatTemplate()                                          # a plain transcript
    ChatTemplate.from_file('tokenizer_config.json')         # the template of a Hugging Face model
    ChatTemplate.from_turns('<{role}>{content}\n', reply='<assistant>', stop=('\n<',))
    ChatTemplate(template='{% for message in messages %}...{% endfor %}', stop=())

Templates are in Jinja, with the variables, filters and whitespace rules of Hugging Face's transformers, in a sandbox.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import datetime
import functools
import json
from typing import TYPE_CHECKING, Any, NoReturn

from etils import epath

from spmd_tasks.errors import UserError

if TYPE_CHECKING:
  import jinja2

_TRANSCRIPT = """\
{% for message in messages %}
{{ message['role'] }}: {{ message['content'] }}
{% endfor %}
{% if add_generation_prompt %}assistant: {% endif %}"""

_TRANSCRIPT_STOP = ('\nuser:', '\nsystem:')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
  """A Jinja template in Hugging Face's format, and where the model's answer ends. The default is a plain transcript.

  A template may use `messages`, `add_generation_prompt`, `bos_token`, `eos_token`, `tools` and `documents` (both None),
  the functions `raise_exception(sentence)` and `strftime_now(format)`, and the filter `tojson`.

  Fields:
    template: the Jinja source.
    stop: strings at which the answer ends, in addition to the end of text. The default fits the transcript.
    bos_token, eos_token: texts for the template. The server puts the tokenizer's bos before the text in any case, once.

  Raises:
    UserError: the template is not valid Jinja; the message has its line.
  """

  template: str = _TRANSCRIPT
  stop: tuple[str, ...] = _TRANSCRIPT_STOP
  bos_token: str = ''
  eos_token: str = ''

  def __post_init__(self):
    _compile(self.template)

  @classmethod
  def from_turns(
    cls, turn: str = '{role}: {content}\n', *, reply: str = 'assistant: ', stop: Sequence[str] = _TRANSCRIPT_STOP
  ) -> 'ChatTemplate':
    """A template that writes every message as `turn`, with {role} and then {content} in it, and then `reply`."""
    if not 0 <= turn.find('{role}') < turn.find('{content}'):
      raise UserError(f'turn={turn!r} must contain {{role}}, and {{content}} after it.')
    before, _, rest = turn.partition('{role}')
    between, _, after = rest.partition('{content}')
    pieces = (_literal(before), "message['role']", _literal(between), "message['content']", _literal(after))
    template = (
      '{% for message in messages %}'
      + ''.join(f'{{{{ {piece} }}}}' for piece in pieces)
      + f'{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {_literal(reply)} }}}}{{% endif %}}'
    )
    return cls(template=template, stop=tuple(stop))

  @classmethod
  def from_file(cls, path: str, *, stop: Sequence[str] = ()) -> 'ChatTemplate':
    """Reads the template of a Hugging Face model.

    Args:
      path: a tokenizer_config.json with the key `chat_template`, or a Jinja file such as chat_template.jinja.
      stop: strings at which the answer ends, in addition to the end of text.

    Raises:
      UserError: the file cannot be read, or holds no template that can be used.
    """
    try:
      text = epath.Path(path).expanduser().read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
      raise UserError(f'chat template {path} cannot be read: {getattr(error, "strerror", None) or error}.') from error
    if not str(path).endswith('.json'):
      return cls(template=text, stop=tuple(stop))
    try:
      config = json.loads(text)
    except (ValueError, RecursionError) as error:
      raise UserError(f'chat template {path} is not JSON: {error}.') from error
    template = config.get('chat_template') if isinstance(config, dict) else None
    if isinstance(template, list):  # several templates by name
      template = {each.get('name'): each.get('template') for each in template if isinstance(each, dict)}.get('default')
    if not isinstance(template, str):
      raise UserError(
        f"{path} has no text under the key 'chat_template': give the model's chat_template.jinja, or write a template."
      )
    return cls(
      template=template,
      stop=tuple(stop),
      bos_token=_special_token(config.get('bos_token')),
      eos_token=_special_token(config.get('eos_token')),
    )

  def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
    """Renders messages with `role` and `content`; with `add_generation_prompt` the text ends where the answer begins.

    Raises:
      UserError: the template refuses the messages, or fails.
    """
    import jinja2

    try:
      return _compile(self.template).render(
        messages=list(messages),
        add_generation_prompt=add_generation_prompt,
        bos_token=self.bos_token,
        eos_token=self.eos_token,
        tools=None,
        documents=None,
      )
    except _RefusedError as error:
      raise UserError(f'the chat template refuses the messages: {error}') from error
    except (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
      sentence = str(error).rstrip('.')
      raise UserError(f'the chat template fails in line {_line_of(error)} for these messages: {sentence}.') from error


class _RefusedError(Exception):
  """A template called raise_exception."""


@functools.cache
def _compile(template: str) -> 'jinja2.Template':
  """Compiles a template as transformers does."""
  import jinja2
  import jinja2.ext
  import jinja2.sandbox

  class GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}...{% endgeneration %}`, which marks the assistant's tokens for training."""

    tags = {'generation'}

    def parse(self, parser):
      next(parser.stream)
      return parser.parse_statements(('name:endgeneration',), drop_needle=True)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
  )
  environment.filters['tojson'] = _to_json
  environment.globals['raise_exception'] = _refuse
  environment.globals['strftime_now'] = lambda format: datetime.datetime.now().strftime(format)
  try:
    return environment.from_string(template)
  except jinja2.TemplateSyntaxError as error:
    sentence = str(error.message).rstrip('.')
    raise UserError(f'the chat template is not valid Jinja in line {error.lineno}: {sentence}.') from error


def _to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
  """Replaces Jinja's own filter, which escapes the characters of HTML."""
  return json.dumps(value, ensure_ascii=ensure_ascii, **settings)


def _refuse(sentence: str) -> NoReturn:
  raise _RefusedError(sentence)


def _line_of(error: BaseException) -> int | str:
  """The line of the template in which an error was raised: Jinja puts the template's lines into tracebacks."""
  line: int | str = '?'
  traceback = error.__traceback__
  while traceback is not None:
    if traceback.tb_frame.f_code.co_filename == '<template>':
      line = traceback.tb_lineno
    traceback = traceback.tb_next
  return line


def _literal(text: str) -> str:
  return json.dumps(text, ensure_ascii=False)


def _special_token(value: Any) -> str:
  """The text of a special token of a tokenizer_config.json: a string, or an object with the key `content`."""
  text = value.get('content') if isinstance(value, dict) else value
  return text if isinstance(text, str) else ''
