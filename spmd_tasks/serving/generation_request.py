"""From the bodies of /v1/completions and /v1/chat/completions to the sequences that they ask for."""

from collections.abc import Collection
import dataclasses
import secrets
from typing import Any, Literal

from spmd_tasks.decoding import ChatTemplate, Request
from spmd_tasks.inputs.tokenizers import Tokenizer
from spmd_tasks.runtime.decode_settings import DecodeSettings, SamplingParams
from spmd_tasks.serving.json_fields import Fields
from spmd_tasks.serving.settings import ServerSettings

_COMPLETION_TOKENS = 16  # OpenAI's default
_MAX_MESSAGES = 10_000
# Of other servers and clients; none of them changes what is generated here.
_IGNORED = ('user', 'metadata', 'store', 'service_tier', 'safety_identifier', 'prompt_cache_key')
_NEUTRAL: dict[str, Collection[Any]] = {
  'presence_penalty': (0,),
  'frequency_penalty': (0,),
  'logit_bias': ({},),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
  """What a request is checked against.

  Fields:
    name: as requests name it.
    created: when its weights were loaded, in seconds since 1970; step: theirs.
    tokenizer, chat_template: of its experiment.
    settings: of its compiled steps; max_len and vocab_size are theirs.
  """

  name: str
  created: int
  step: int
  tokenizer: Tokenizer
  chat_template: ChatTemplate
  settings: DecodeSettings
  max_len: int
  vocab_size: int

  def decode(self, ids: Any) -> str:
    """Tokens to text; what lies beyond the tokenizer's vocabulary, as models may have it, gives nothing."""
    return self.tokenizer.decode([token for token in ids if token < self.tokenizer.vocab_size])


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
  """What one HTTP request wants.

  Fields:
    kind: which of the two APIs.
    requests: one per choice, in the order of their indices; all samples of a prompt, then those of the next.
    echoes: text that stands before each choice's.
    num_prompt_tokens: of each prompt once.
    num_logprobs: how many of the likeliest tokens are reported beside each token; None: not even its own logprob.
    stream: answer with events; include_usage: one of them counts tokens.
  """

  kind: Literal['completion', 'chat']
  requests: tuple[Request, ...]
  echoes: tuple[str, ...]
  num_prompt_tokens: int
  num_logprobs: int | None
  stream: bool
  include_usage: bool


def parse_completion(body: dict[str, Any], model: ServedModel, limits: ServerSettings) -> GenerationRequest:
  """/v1/completions.

  Raises:
    RequestError: naming the field that is wrong.
  """
  fields = Fields(body)
  _check_model(fields, model)
  prompts = _prompts(fields, model, limits)
  num_logprobs = fields.integer('logprobs', None, 0, model.settings.num_top_logprobs)
  has_echo = fields.boolean('echo')
  least = 0 if has_echo else 1  # a prompt may be all that is wanted back, with its log-probabilities
  max_tokens = fields.integer('max_tokens', model.settings.max_tokens or _COMPLETION_TOKENS, least, 2**31 - 1)
  n = fields.integer('n', 1, 1, limits.max_choices)
  fields.refuse_others_than({'best_of': (1, n), 'suffix': ('',)})
  return _generation(
    fields, model, limits, 'completion', prompts, 'prompt', n, max_tokens, num_logprobs, has_echo=has_echo
  )


def parse_chat(body: dict[str, Any], model: ServedModel, limits: ServerSettings) -> GenerationRequest:
  """/v1/chat/completions.

  Raises:
    RequestError: naming the field that is wrong.
  """
  fields = Fields(body)
  _check_model(fields, model)
  ids = _encode(model, model.chat_template.render(_messages(fields)))
  has_logprobs = fields.boolean('logprobs')
  num_top = fields.integer('top_logprobs', None, 0, model.settings.num_top_logprobs)
  if num_top is not None and not has_logprobs:
    raise fields.error('top_logprobs', 'needs logprobs to be true.')
  max_tokens = fields.integer('max_completion_tokens', None, 1, 2**31 - 1)
  older = fields.integer('max_tokens', None, 1, 2**31 - 1)
  if max_tokens is None:
    max_tokens = older
  room = model.max_len - len(ids)
  if max_tokens is None:
    max_tokens = max(1, min(room, model.settings.max_tokens or room))
  n = fields.integer('n', 1, 1, limits.max_choices)
  fields.refuse_others_than(
    {
      'response_format': ({'type': 'text'},),
      'tools': ([],),
      'functions': ([],),
      'tool_choice': ('none', 'auto'),
      'modalities': (['text'],),
    }
  )
  fields.ignore('parallel_tool_calls')
  num_logprobs = (num_top or 0) if has_logprobs else None
  return _generation(fields, model, limits, 'chat', [(ids, '')], 'messages', n, max_tokens, num_logprobs)


def _check_model(fields: Fields, model: ServedModel) -> None:
  name = fields.text('model')
  if name is None:
    raise fields.error('model', f'is missing; it is {model.name!r}.')
  if name != model.name:
    raise fields.error(
      'model', f'{name[:100]!r} does not exist here; {model.name!r} does.', status=404, code='model_not_found'
    )


def _encode(model: ServedModel, text: str) -> tuple[int, ...]:
  begin = () if model.tokenizer.bos_id is None else (model.tokenizer.bos_id,)
  return (*begin, *model.tokenizer.encode(text))


def _prompts(fields: Fields, model: ServedModel, limits: ServerSettings) -> list[tuple[tuple[int, ...], str]]:
  """(ids, text) of each prompt: a string, an array of tokens, or an array of either."""
  value = fields.value('prompt')
  is_tokens = isinstance(value, list) and value and all(type(item) is int for item in value)
  many = [value] if isinstance(value, str) or is_tokens else value
  if not isinstance(many, list) or not many:
    raise fields.error('prompt', 'must be a string, an array of tokens, or an array of those.')
  if len(many) > limits.max_choices:
    raise fields.error('prompt', f'has {len(many)} prompts, more than {limits.max_choices}.')
  prompts = []
  for item in many:
    if isinstance(item, list) and item and all(type(token) is int for token in item):
      if not all(0 <= token < model.vocab_size for token in item):
        raise fields.error('prompt', f'has a token outside the vocabulary of {model.vocab_size}.')
      prompts.append((tuple(item), model.decode(item)))
    else:
      text = fields.checked_text('prompt', item)
      prompts.append((_encode(model, text), text))
  if not all(ids for ids, _ in prompts):
    raise fields.error('prompt', 'is empty, and this model has no token for the beginning of text.')
  return prompts


def _messages(fields: Fields) -> list[tuple[str, str]]:
  """(role, text) of each message."""
  value = fields.value('messages')
  if not isinstance(value, list) or not 0 < len(value) <= _MAX_MESSAGES:
    raise fields.error('messages', f'must be an array of 1 to {_MAX_MESSAGES} messages.')
  messages = []
  for number, item in enumerate(value):
    path = f'messages[{number}]'
    if not isinstance(item, dict):
      raise fields.error(path, 'must be an object with role and content.')
    message = Fields(item, f'{path}.')
    role = message.text('role')
    if role not in ('system', 'developer', 'user', 'assistant'):
      raise message.error('role', 'must be system, developer, user or assistant.')
    messages.append(('system' if role == 'developer' else role, _content(message)))
    message.ignore('name', 'refusal')
    message.refuse_others_than({'tool_calls': ([],), 'annotations': ([],), 'audio': ()})
    message.refuse_unknown()
  return messages


def _content(message: Fields) -> str:
  content = message.value('content')
  if not isinstance(content, list):
    return message.checked_text('content', content)
  parts = []
  for number, item in enumerate(content):
    path = f'content[{number}]'
    if not isinstance(item, dict) or item.get('type') != 'text':
      raise message.error(path, 'must be an object of type text.')
    parts.append(message.checked_text(f'{path}.text', item.get('text')))
  return ''.join(parts)


def _generation(
  fields: Fields,
  model: ServedModel,
  limits: ServerSettings,
  kind: Literal['completion', 'chat'],
  prompts: list[tuple[tuple[int, ...], str]],
  where: str,
  n: int,
  max_tokens: int,
  num_logprobs: int | None,
  *,
  has_echo: bool = False,
) -> GenerationRequest:
  """What both APIs have in common."""
  most = min(limits.max_choices, limits.max_queued)  # for more there is no room even in an empty queue
  if len(prompts) * n > most:
    raise fields.error('n', f'times {len(prompts)} prompts is more than {most} texts.')
  for ids, _ in prompts:
    if len(ids) + max_tokens > model.max_len:
      raise fields.error(
        where if len(ids) >= model.max_len else 'max_tokens',
        f'is too large: {len(ids)} tokens of prompt and max_tokens {max_tokens} exceed the {model.max_len} of this '
        'model.',
        code='context_length_exceeded',
      )
  defaults = model.settings
  sampling = {
    'temperature': fields.number('temperature', defaults.temperature, 0.0, 100.0),
    'top_p': fields.number('top_p', defaults.top_p, 0.0, 1.0),
    'min_p': fields.number('min_p', defaults.min_p, 0.0, 1.0),
    'top_k': fields.integer('top_k', defaults.top_k, 0, 2**31 - 1),
    'repetition_penalty': fields.number('repetition_penalty', defaults.repetition_penalty, 0.01, 100.0),
  }
  stop = _stop_strings(fields, limits)
  stop_ids = _stop_ids(fields, model)
  seed = fields.integer('seed', None, -(2**63), 2**63 - 1)
  stream = fields.boolean('stream')
  options = fields.object('stream_options')
  include_usage = False
  if options is not None:
    if not stream:
      raise fields.error('stream_options', 'needs stream to be true.')
    include_usage = options.boolean('include_usage')
    options.ignore('include_obfuscation')
    options.refuse_unknown()
  fields.refuse_others_than(_NEUTRAL)
  fields.ignore(*_IGNORED)
  fields.refuse_unknown()
  if kind == 'chat':
    stop = (*stop, *model.chat_template.stop)
  requests = tuple(
    Request(
      ids=ids,
      max_tokens=max_tokens,
      seed=(secrets.randbits(32) if seed is None else seed) % 2**32,
      sample=sample,
      stop_ids=stop_ids,
      stop=stop,
      score_prompt=has_echo and num_logprobs is not None,
      sampling=SamplingParams(**sampling),
    )
    for ids, _ in prompts
    for sample in range(n)
  )
  return GenerationRequest(
    kind=kind,
    requests=requests,
    echoes=tuple(text if has_echo else '' for _, text in prompts for _ in range(n)),
    num_prompt_tokens=sum(len(ids) for ids, _ in prompts),
    num_logprobs=num_logprobs,
    stream=stream,
    include_usage=include_usage,
  )


def _stop_strings(fields: Fields, limits: ServerSettings) -> tuple[str, ...]:
  value = fields.value('stop')
  many = [] if value is None else value if isinstance(value, list) else [value]
  if len(many) > limits.max_stop_strings:
    raise fields.error('stop', f'has {len(many)} strings, more than {limits.max_stop_strings}.')
  strings = tuple(fields.checked_text('stop', item) for item in many)
  if not all(0 < len(text) <= limits.max_stop_chars for text in strings):
    raise fields.error('stop', f'must have strings of 1 to {limits.max_stop_chars} characters.')
  return strings


def _stop_ids(fields: Fields, model: ServedModel) -> tuple[int, ...]:
  value = fields.value('stop_token_ids')
  many = [] if value is None else value
  if not isinstance(many, list) or not all(type(token) is int and 0 <= token < model.vocab_size for token in many):
    raise fields.error('stop_token_ids', f'must be an array of tokens below {model.vocab_size}.')
  end = () if fields.boolean('ignore_eos') else (model.tokenizer.eos_id,)
  stop_ids = tuple(dict.fromkeys((*end, *many)))
  if len(stop_ids) > model.settings.max_stop_ids:
    raise fields.error('stop_token_ids', f'and the end of text are more than {model.settings.max_stop_ids} tokens.')
  return stop_ids
