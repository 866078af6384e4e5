"""Pydantic models of the JSON bodies that clients send, with one sentence for each invalid field.

    body = validate(ChatBody, parse_json(data))    # RequestError: 'n must be at least 1, not 0.', param='n'

The models check types and fixed ranges; requests.py checks what depends on the served model. Fields that would change
the answer are either supported or rejected, never ignored. A null field is treated as absent at any depth, except in
JSON schemas and in the arguments of calls.
"""

from collections.abc import Callable
import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
  AfterValidator,
  BaseModel,
  BeforeValidator,
  ConfigDict,
  FailFast,
  Field,
  PlainValidator,
  ValidationError,
  model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from spmd_tasks.decoding.sampling import MAX_BIASES
from spmd_tasks.serving.errors import RequestError

_MAX_MESSAGES = 10_000
_MAX_STOPS, _MAX_STOP_CHARS = 16, 256
_MAX_BAD_WORDS = 100
_NULL_IS_VALUE = ('parameters', 'schema', 'json', 'arguments')  # JSON schemas and arguments of calls
_INT32 = 2**31 - 1


def parse_json(data: bytes) -> dict[str, Any]:
  """Parses a JSON object; raises a RequestError if `data` is not one."""
  try:
    body = from_json(data, allow_inf_nan=False)
  except ValueError as error:
    raise RequestError(f'the body is not JSON: {error}.', code='invalid_json') from None
  if not isinstance(body, dict):
    raise RequestError(f'the body must be a JSON object, not {_kind(body)}.', code='invalid_json')
  return body


# --- models ---


class _Body(BaseModel):
  model_config = ConfigDict(strict=True, extra='forbid')

  @model_validator(mode='before')
  @classmethod
  def _keep_relevant(cls, fields: Any) -> Any:
    """Drops all unknown fields except the first, since reporting 100,000 of them would take a second."""
    if not isinstance(fields, dict) or fields.keys() <= cls.__pydantic_fields__.keys():
      return fields
    known = {name: value for name, value in fields.items() if name in cls.__pydantic_fields__}
    unknown = next(name for name in fields if name not in known)
    return known | {unknown: fields[unknown]}


def _without_nulls(value: Any) -> Any:
  if isinstance(value, dict):
    return {
      name: item if name in _NULL_IS_VALUE else _without_nulls(item) for name, item in value.items() if item is not None
    }
  if isinstance(value, list) and value and type(value[0]) is not int:  # skips token ids, which can be many
    return [_without_nulls(item) if isinstance(item, dict | list) else item for item in value]
  return value


def _is_tokens(value: Any) -> bool:
  return isinstance(value, list) and all(type(item) is int for item in value)


def _is_prompt(value: Any) -> bool:
  return isinstance(value, str) or (_is_tokens(value) and bool(value))


def _split_prompts(value: Any) -> list[str | list[int]]:
  """Returns a list of prompts (text or token ids) from one prompt or a list of them."""
  prompts = [value] if _is_prompt(value) else value
  if not isinstance(prompts, list) or not prompts or not all(_is_prompt(prompt) for prompt in prompts):
    raise PydanticCustomError('prompt', 'must be a string, an array of tokens, or an array of strings or token arrays.')
  return prompts


def _split_stop(value: Any) -> list[str]:
  """Returns a list of stop strings from one string or a list of them."""
  stops = [value] if isinstance(value, str) else value
  if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
    raise PydanticCustomError('stop', 'must be a string or an array of strings.')
  if len(stops) > _MAX_STOPS or not all(0 < len(stop) <= _MAX_STOP_CHARS for stop in stops):
    raise PydanticCustomError('stop', f'must have at most {_MAX_STOPS} strings, of 1 to {_MAX_STOP_CHARS} characters.')
  return stops


def _split_texts(value: Any) -> list[str]:
  """Returns a list of texts from one text or a list of them; a text is a string or an object with `text`."""
  items = value if isinstance(value, list) else [value]
  texts: list[Any] = [item.get('text') if isinstance(item, dict) else item for item in items]
  if not texts or not all(isinstance(text, str) for text in texts):
    raise PydanticCustomError('texts', 'must be a string or an array of strings.')
  return texts


def _check_biases(value: Any) -> dict[int, float]:
  if not isinstance(value, dict) or not all(
    len(token) < 11 and token.isdecimal() and str(int(token)) == token for token in value
  ):
    raise PydanticCustomError('biases', 'must be an object with token ids as keys, such as {{"5": -100}}.')
  if len(value) > MAX_BIASES:
    raise PydanticCustomError('biases', f'must have at most {MAX_BIASES} tokens.')
  if not all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values()):
    raise PydanticCustomError('biases', 'must have numbers from -100 to 100.')
  return {int(token): float(bias) for token, bias in value.items()}


def _check(is_valid: Callable[[Any], Any], sentence: Any, code: Any = 'wrong') -> PlainValidator:
  """Returns a validator that rejects other values with a sentence, which follows the field's name."""

  def check(value: Any) -> Any:
    if not is_valid(value):
      raise PydanticCustomError(code, sentence)
    return value

  return PlainValidator(check)


def _must_be(*values: Any) -> PlainValidator:
  """Returns a validator for a field of OpenAI or vLLM that is not supported: accepts only values without effect."""
  return _check(values.__contains__, 'is not supported by this server: leave it out.', 'unsupported_parameter')


def is_function(value: Any) -> bool:
  """Whether a value is an object with a named `function`, the shape of tools, tool calls and tool choices."""
  function = value.get('function') if isinstance(value, dict) else None
  return isinstance(function, dict) and isinstance(function.get('name'), str)


def _is_bad_words(value: Any) -> bool:
  return (
    isinstance(value, list)
    and len(value) <= _MAX_BAD_WORDS
    and all(isinstance(word, str) and 0 < len(word) <= _MAX_STOP_CHARS for word in value)
  )


def _predicted_text(value: Any) -> str:
  """Returns the text of OpenAI's `prediction`, which the answer is expected to resemble."""
  content = value.get('content') if isinstance(value, dict) and value.get('type') == 'content' else None
  parts = content if isinstance(content, list) else [{'text': content}]
  texts: list[Any] = [part.get('text') if isinstance(part, dict) else None for part in parts]
  if not all(isinstance(text, str) for text in texts):
    raise PydanticCustomError('prediction', "must be an object of type 'content' with text as its content.")
  return ''.join(texts)


_Tokens = Annotated[list[int], _check(_is_tokens, 'must be an array of tokens.')]
_Texts = Annotated[list[str], PlainValidator(_split_texts)]
_Inputs = Annotated[list[str | list[int]], PlainValidator(_split_prompts)]


class StreamOptions(_Body):
  """`stream_options`; with include_usage, the last chunk of the stream has the token counts."""

  include_usage: bool = False
  include_obfuscation: Any = None
  continuous_usage_stats: Annotated[Any, _must_be(False)] = False


class SharedBody(_Body):
  """The fields of all routes that generate; None stands for the default in the experiment's `task.decode`."""

  # OpenAI fields that do not affect generation.
  user: Any = None
  metadata: Any = None
  store: Any = None
  service_tier: Any = None
  safety_identifier: Any = None
  prompt_cache_key: Any = None
  prompt_cache_options: Any = None
  prompt_cache_retention: Any = None
  model: str | None = None
  temperature: Annotated[float, Field(ge=0, le=100)] | None = None
  top_p: Annotated[float, Field(ge=0, le=1)] | None = None
  min_p: Annotated[float, Field(ge=0, le=1)] | None = None
  top_k: Annotated[int, Field(ge=-1, le=_INT32), AfterValidator(lambda top_k: max(top_k, 0))] | None = None
  seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
  cache_salt: str = ''
  num_drafts: Annotated[int, Field(ge=0)] | None = None
  priority: Annotated[int, Field(ge=-_INT32, le=_INT32)] = 0
  stream: bool = False
  structured_outputs: dict[str, Any] | None = None


class _GenerationBody(SharedBody):
  n: Annotated[int, Field(ge=1, le=_INT32)] = 1
  best_of: Annotated[int, Field(ge=1, le=_INT32)] | None = None
  repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
  frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
  presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
  logit_bias: Annotated[dict[int, float], PlainValidator(_check_biases)] = {}
  stop: Annotated[list[str], PlainValidator(_split_stop)] = []
  stop_token_ids: _Tokens = []
  ignore_eos: bool = False
  include_stop_str_in_output: bool = False
  min_tokens: Annotated[int, Field(ge=0, le=_INT32)] = 0
  allowed_token_ids: _Tokens | None = None
  bad_words: Annotated[
    list[str],
    _check(
      _is_bad_words,
      f'must be an array of at most {_MAX_BAD_WORDS} strings, of 1 to {_MAX_STOP_CHARS} characters.',
    ),
  ] = []
  skip_special_tokens: bool = True
  spaces_between_special_tokens: bool = True  # affects only slow tokenizers of transformers, which are not used here
  truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=_INT32)] | None = None
  prompt_logprobs: Annotated[int, Field(ge=0, le=_INT32)] | None = None
  return_token_ids: bool = False
  return_tokens_as_token_ids: bool = False
  request_id: Annotated[str, Field(max_length=200)] | None = None
  response_format: dict[str, Any] | None = None
  echo: bool = False
  stream_options: StreamOptions | None = None
  use_beam_search: Annotated[Any, _must_be(False)] = False
  length_penalty: Annotated[Any, _must_be(1)] = 1
  early_stopping: Annotated[Any, _must_be(False)] = False
  logits_processors: Annotated[Any, _must_be([])] = []
  vllm_xargs: Annotated[Any, _must_be({})] = {}


class CompletionBody(_GenerationBody):
  """POST /v1/completions."""

  prompt: _Inputs
  max_tokens: Annotated[int, Field(ge=0, le=_INT32)] | None = None
  logprobs: Annotated[int, Field(ge=0, le=_INT32)] | None = None
  add_special_tokens: bool = True
  suffix: Annotated[Any, _must_be('')] = ''


def _split_content(value: Any) -> Any:
  if isinstance(value, str):
    return [{'type': 'text', 'text': value}]
  if not isinstance(value, list):
    raise PydanticCustomError('content', 'must be a string or an array of text parts.')
  return value


class _TextPart(BaseModel):
  model_config = ConfigDict(strict=True, extra='ignore')

  type: Literal['text']
  text: str


class Message(_Body):
  """One turn of a conversation."""

  role: Literal['system', 'developer', 'user', 'assistant', 'tool']
  content: Annotated[list[_TextPart], FailFast(), BeforeValidator(_split_content)] = []
  name: str | None = None
  refusal: Any = None
  reasoning_content: str | None = None
  reasoning: str | None = None
  tool_calls: list[Any] = []
  tool_call_id: str | None = None
  annotations: Annotated[Any, _must_be([])] = []
  audio: Annotated[Any, _must_be()] = None
  function_call: Annotated[Any, _check(lambda value: False, "is OpenAI's older form: write tool_calls.")] = None

  @property
  def text(self) -> str:
    """The content as one text."""
    return ''.join(part.text for part in self.content)


class ChatBody(_GenerationBody):
  """POST /v1/chat/completions."""

  messages: Annotated[list[Message], FailFast(), Field(min_length=1, max_length=_MAX_MESSAGES)]
  max_completion_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = None
  max_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = None
  logprobs: bool = False
  top_logprobs: Annotated[int, Field(ge=0, le=_INT32)] | None = None
  tools: list[Any] = []
  functions: Annotated[Any, _must_be([])] = []
  function_call: Annotated[Any, _must_be('none', 'auto')] = None
  tool_choice: Any = None
  documents: list[dict[str, Any]] | None = None
  chat_template_kwargs: dict[str, Any] = {}
  enable_thinking: bool | None = None
  reasoning_effort: Literal['none', 'minimal', 'low', 'medium', 'high', 'xhigh', 'max'] | None = None
  verbosity: Literal['low', 'medium', 'high'] | None = None
  add_generation_prompt: bool | None = None
  continue_final_message: bool = False
  add_special_tokens: bool = False
  prediction: Annotated[str, PlainValidator(_predicted_text)] = ''
  modalities: Annotated[Any, _must_be(['text'])] = None
  audio: Annotated[Any, _must_be()] = None
  mm_processor_kwargs: Annotated[Any, _must_be({})] = {}
  include_reasoning: Annotated[Any, _must_be(True)] = True
  parallel_tool_calls: bool | None = None


class ResponsesBody(SharedBody):
  """POST /v1/responses; responses_api.py converts it to the body of a chat, which is validated in turn."""

  input: Annotated[
    Any,
    _check(
      lambda value: value and (isinstance(value, str) or (type(value) is list and all(type(x) is dict for x in value))),
      'must be a string or an array of objects.',
    ),
  ]
  instructions: str | None = None
  max_output_tokens: Annotated[int, Field(ge=1, le=_INT32)] | None = None
  stream_options: Any = None
  text: dict[str, Any] = {}
  tools: list[Any] = []
  tool_choice: Any = None
  parallel_tool_calls: bool | None = None
  top_logprobs: int | None = None
  include: list[str] = []
  reasoning: dict[str, Any] = {}
  chat_template_kwargs: dict[str, Any] = {}
  enable_thinking: bool | None = None
  # The server stores nothing, so these have no meaning.
  previous_response_id: Annotated[Any, _must_be()] = None
  conversation: Annotated[Any, _must_be()] = None
  prompt: Annotated[Any, _must_be()] = None
  background: Annotated[Any, _must_be(False)] = False
  truncation: Annotated[Any, _must_be('disabled')] = 'disabled'
  max_tool_calls: Annotated[Any, _must_be()] = None


class PoolingBody(_Body):
  """The fields of all routes that score or embed; `truncate_prompt_tokens` -1 truncates to the model's length."""

  model: str | None = None
  truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=_INT32)] | None = None
  user: Any = None


class EmbeddingBody(PoolingBody):
  """POST /v1/embeddings."""

  input: _Inputs
  encoding_format: Literal['float', 'base64'] = 'float'
  dimensions: Annotated[int, Field(ge=1, le=_INT32)] | None = None


class _ScoringBody(PoolingBody):
  """`use_activation` false returns the model's raw scores."""

  use_activation: bool | None = None


class ScoreBody(_ScoringBody):
  """POST /v1/score."""

  text_1: _Texts
  text_2: _Texts


class RerankBody(_ScoringBody):
  """POST /v1/rerank; `top_n` 0 returns all documents."""

  query: str
  documents: _Texts
  top_n: Annotated[int, Field(ge=0, le=_INT32)] = 0
  return_documents: bool = True


class TokenizeBody(_Body):
  """POST /tokenize; `add_special_tokens` prepends the special tokens that completions have."""

  model: str | None = None
  prompt: str
  add_special_tokens: bool = True


class DetokenizeBody(_Body):
  """POST /detokenize."""

  model: str | None = None
  tokens: _Tokens


class PublishBody(_Body):
  """POST /admin/publish; `step` None names the newest checkpoint."""

  step: Annotated[int, Field(ge=0, le=2**53)] | None = None


class NoFieldsBody(_Body):
  """POST /admin/unpublish."""


# --- errors ---

_SENTENCES = {
  'missing': 'is missing.',
  'string_type': 'must be a string, not {value}.',
  'int_type': 'must be an integer, not {value}.',
  'float_type': 'must be a number, not {value}.',
  'bool_type': 'must be true or false, not {value}.',
  'list_type': 'must be an array, not {value}.',
  'model_type': 'must be an object, not {value}.',
  'dict_type': 'must be an object, not {value}.',
  'greater_than_equal': 'must be at least {ge}, not {value}.',
  'less_than_equal': 'must be at most {le}, not {value}.',
  'too_short': 'must not be empty.',
  'too_long': 'must have at most {max_length} items.',
  'literal_error': 'must be {expected}.',
}
_CODES = ('unknown_parameter', 'unsupported_parameter')
# Fields of other servers, with what to use instead.
_REMEDIES = {
  'chat_template': "only the operator sets the template, by the experiment's chat_template()",
  'guided_choice': 'write structured_outputs.choice',
  'guided_grammar': 'write structured_outputs.grammar',
  'guided_json': 'write structured_outputs.json',
  'guided_regex': 'write structured_outputs.regex',
  'max_new_tokens': 'write max_tokens',
  'prompt_embeds': 'give text or tokens as prompt',
}
_NESTED: dict[str, type[_Body]] = {'stream_options': StreamOptions, 'messages': Message}

_Model = TypeVar('_Model', bound=_Body)


def validate(body_class: type[_Model], fields: dict[str, Any]) -> _Model:
  """Validates the fields of a JSON object.

  Raises:
    RequestError: a field is invalid, missing or unknown; the error names the first such field.
  """
  try:
    return body_class.model_validate(_without_nulls(fields))
  except ValidationError as error:
    first_error = error.errors(include_url=False)[0]
  raise _request_error(body_class, first_error)


def _request_error(body_class: type[_Body], error: ErrorDetails) -> RequestError:
  path = ''
  for key in error['loc']:
    path += f'[{key}]' if isinstance(key, int) else f'.{key}' if path else key
  path = path[:100] or 'the body'
  if error['type'] == 'extra_forbidden':
    *parents, name = map(str, error['loc'])
    model: type[_Body] = _NESTED[parents[0]] if parents else body_class
    similar = difflib.get_close_matches(name[:100], model.model_fields, n=1)
    remedy = f'; nearest: {similar[0]!r}.' if similar else ': leave it out.'
    remedy = f': {_REMEDIES[name]}.' if name in _REMEDIES else remedy
    return RequestError(f'{path!r} is not a known field{remedy}', param=path, code='unknown_parameter')
  sentence = _SENTENCES.get(error['type'], error['msg'])
  values = {name: _short(value) if isinstance(value, float) else value for name, value in error.get('ctx', {}).items()}
  values['value'] = repr(error['input']) if isinstance(error['input'], float) else _short(error['input'])
  code = error['type'] if error['type'] in _CODES else None
  return RequestError(f'{path} {sentence.format_map(values)}', param=path, code=code)


def _short(value: Any) -> str:
  if isinstance(value, bool) or not isinstance(value, int | float):
    return _kind(value)
  return f'{value:g}' if isinstance(value, float) else f'{value}' if abs(value) < 10**20 else 'a much larger number'


def _kind(value: Any) -> str:
  names = {bool: 'a boolean', int: 'a number', float: 'a number', str: 'a string', list: 'an array', dict: 'an object'}
  return 'null' if value is None else names[type(value)]
