"""Converts the bodies of /v1/completions and /v1/chat/completions to requests for the scheduler.

    parsed = completion_request({'model': 'lm.Tiny', 'prompt': 'def ', 'n': 2}, model, limits)
    len(parsed.requests)   # 2: one per choice

request_bodies.py checks types and fixed ranges. This file checks each request against the served model and the server's
limits, tokenizes its prompts and fills in defaults. A RequestError names the invalid field.
"""

from collections.abc import Collection, Sequence
import dataclasses
import functools
import itertools
import json
import re
import secrets
from typing import Any, Literal

from spmd_tasks.decoding import DecodeSettings, Request
from spmd_tasks.decoding.constraints import (
  BadWords,
  FormError,
  Grammars,
  Matcher,
  OutputForm,
  TokenLimits,
  Vocabulary,
  wanted_form,
)
from spmd_tasks.decoding.generated_sequence import GeneratedSequence
from spmd_tasks.decoding.sampling import prompt_seed
from spmd_tasks.decoding.text_scorer import TextReading
from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ChatTemplate, FolderTokenizer, Tokenizer
from spmd_tasks.inputs.tokenizers import bytes_of_tokens, decode_all, decode_generated, encode_prompt
from spmd_tasks.serving.answer_format import AnswerFormat, answer_format
from spmd_tasks.serving.answer_parsers import THINK, Parser
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.request_bodies import ChatBody, CompletionBody, DetokenizeBody, Message, TokenizeBody, validate
from spmd_tasks.serving.settings import ServerSettings
from spmd_tasks.serving.tool_calls import ToolChoice, Tools, calls_for_template, read_choice, read_tools

_COMPLETION_TOKENS = 16  # OpenAI's default


def check_adapter_names(names: Sequence[str], adapters: Collection[str]) -> None:
  """Raises a UserError if an adapter has the same name as the model."""
  for name in set(names).intersection(adapters):
    raise UserError(f'adapter {name!r} has the name of the model itself: rename the adapter.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
  """The served model, against which requests are checked.

  Fields:
    name: the model's name in requests, which may omit it.
    alias: a second name: the experiment's, if `name` is the name of a model folder.
    adapters: the names of the low-rank adapters, numbered from 1. A request gives one as its `model` to use it.
    created: Unix time at which the weights were loaded.
    step: the training step of the weights.
    tokenizer, chat_template: the experiment's.
    grammars: compiles the constraints of requests on their output.
    settings, max_len, vocab_size: the compiled decode steps' settings, maximum tokens per sequence and vocabulary size.
    reading: how texts are scored or embedded, if the model does this instead of generating.
  """

  name: str
  created: int
  step: int
  tokenizer: Tokenizer
  chat_template: ChatTemplate
  settings: DecodeSettings
  max_len: int
  vocab_size: int
  grammars: Grammars
  adapters: tuple[str, ...] = ()
  alias: str | None = None
  reading: TextReading | None = None

  @property
  def names(self) -> tuple[str, ...]:
    """The names that requests can give; the index of a name is the number of its adapter, 0 for none."""
    return (self.name, *self.adapters)

  def resolve(self, name: str | None) -> str:
    """Returns the element of `names` for the `model` of a request: None and the alias stand for the model's name."""
    return self.name if name in (None, self.alias) else str(name)

  def encode(self, text: str, *, with_bos: bool = True) -> tuple[int, ...]:
    """Tokenizes a prompt, with a leading BOS token if the tokenizer has one and `with_bos`.

    Raises a RequestError if the tokenizer cannot encode the text, as a tokenizer of numeric ids cannot encode words.
    """
    try:
      return encode_prompt(self.tokenizer, text) if with_bos else tuple(self.tokenizer.encode(text))
    except UserError as error:
      raise RequestError(f'{error}') from error

  def decode(self, ids: Sequence[int]) -> str:
    """Decodes tokens; ids beyond the tokenizer's vocabulary, which a padded model may generate, add no text."""
    return decode_generated(self.tokenizer, ids)

  @functools.cached_property
  def answer_format(self) -> AnswerFormat:
    """The format of the model's answers."""
    return answer_format(self.chat_template, self.tokenizer)

  def decode_all(self, ids: Sequence[int]) -> str:
    """Decodes like `decode`, but shows the text of special tokens if the tokenizer has it."""
    return decode_all(self.tokenizer, [token for token in ids if token < self.tokenizer.vocab_size])

  def bytes_of_tokens(self, ids: Sequence[int]) -> list[bytes]:
    """Returns the bytes that each token adds to a text; empty for special tokens."""
    return bytes_of_tokens(self.tokenizer, ids)

  @functools.cached_property
  def vocabulary(self) -> Vocabulary:
    """The bytes of every token in the vocabulary."""
    return Vocabulary(self.bytes_of_tokens(range(self.vocab_size)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParserSettings:
  """How to parse the answers of one chat request.

  Fields:
    answer_format: the model's format of answers.
    tools: the tools that may be called; None if answers must not be parsed for calls.
    prompt: the text before the answer, which may already open its reasoning.
    is_constrained: whether a grammar constrains the answer.
    one_call: whether everything after the first call is dropped.
  """

  answer_format: AnswerFormat
  tools: Tools | None
  prompt: str
  is_constrained: bool
  one_call: bool

  def parser(self) -> Parser:
    """Returns a parser for one answer."""
    return self.answer_format.parser(self.tools, prompt=self.prompt, is_constrained=self.is_constrained)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
  """One HTTP request, validated and tokenized.

  Fields:
    kind: the route: a completion or a chat.
    model: the name of the model or adapter that answers.
    requests: one per choice, in order: all samples of the first prompt, then all of the second, and so on.
    echoes: per choice, the text to put before the generated text.
    num_prompt_tokens: total tokens of the prompts, each prompt counted once.
    num_logprobs: number of top alternatives to report per generated token; None reports no log-probabilities.
    num_prompt_logprobs: the same for `prompt_logprobs`, which covers the tokens of the prompt.
    returns_ids: whether the token ids of prompts and choices are returned.
    names_by_id: whether log-probabilities name tokens by id, as `token_id:17`.
    shows_special: whether the text shows special tokens.
    id: the client's id of the request; None generates one.
    matcher: restricts the tokens of the output; every choice gets a copy. None allows all tokens.
    parser_settings: how to parse the output; None if it is content only.
    stream: whether to stream the answer as server-sent events.
    include_usage: whether the stream ends with token counts.
  """

  kind: Literal['completion', 'chat']
  model: str
  requests: tuple[Request, ...]
  echoes: tuple[str, ...]
  num_prompt_tokens: int
  num_logprobs: int | None
  stream: bool
  include_usage: bool
  num_prompt_logprobs: int | None = None
  returns_ids: bool = False
  names_by_id: bool = False
  shows_special: bool = False
  id: str | None = None
  matcher: Matcher | TokenLimits | None = None
  parser_settings: ParserSettings | None = None

  def sequences(self, model: ServedModel, owner: Any) -> list[GeneratedSequence]:
    """Returns one sequence per choice, for the engine; `owner` gets their deltas."""
    settings = self.parser_settings
    decode = model.decode if settings is None else settings.answer_format.decoder(settings.tools)
    return [
      GeneratedSequence(
        request,
        model.decode_all if self.shows_special else decode,
        index=index,
        has_logprobs=self.num_logprobs is not None,
        matcher=None if self.matcher is None else self.matcher.copy(),
        owner=owner,
      )
      for index, request in enumerate(self.requests)
    ]


def completion_request(fields: dict[str, Any], model: ServedModel, limits: ServerSettings) -> GenerationRequest:
  """Validates the body of /v1/completions."""
  check_model_name(fields, model)
  body = validate(CompletionBody, fields)
  if len(body.prompt) > limits.max_choices:
    raise RequestError(
      f'prompt has {len(body.prompt)} prompts, more than {limits.max_choices}: send several requests.', param='prompt'
    )
  _check_num_logprobs('logprobs', body.logprobs, model)
  # With echo, a client may ask for the prompt alone, to get its log-probabilities.
  if body.max_tokens == 0 and not body.echo:
    raise RequestError('max_tokens must be at least 1, not 0, unless echo is true.', param='max_tokens')
  max_tokens = body.max_tokens
  if max_tokens is None:
    max_tokens = model.settings.max_tokens or _COMPLETION_TOKENS
  prompts = [_prompt(item, body, model, max_tokens) for item in body.prompt]
  return _generation_request(body, model, limits, prompts, max_tokens=max_tokens, num_logprobs=body.logprobs)


def chat_request(fields: dict[str, Any], model: ServedModel, limits: ServerSettings) -> GenerationRequest:
  """Validates the body of /v1/chat/completions."""
  check_model_name(fields, model)
  body = validate(ChatBody, fields)
  choice = read_choice(body.tool_choice, read_tools(body.tools))
  ids, prompt = _render(body, model, _tools_for_template(body, choice))
  if not ids:
    raise RequestError('messages render to an empty prompt: add some content.', param='messages')
  _check_num_logprobs('top_logprobs', body.top_logprobs, model)
  if body.top_logprobs and not body.logprobs:
    raise RequestError('top_logprobs needs logprobs to be true.', param='top_logprobs')
  max_tokens = body.max_completion_tokens or body.max_tokens
  ids = _truncated(ids, body, model, max_tokens or 1)
  if max_tokens is None:
    num_free = model.max_len - len(ids)
    max_tokens = max(1, min(num_free, model.settings.max_tokens or num_free))
  num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
  echo = body.messages[-1].text if body.messages[-1].role == 'assistant' else ''
  output, continues_prompt = _output_form(body, model, choice, prompt)
  try:
    parsed = _generation_request(
      body, model, limits, [(ids, echo)], max_tokens=max_tokens, num_logprobs=num_logprobs, form=output
    )
  except RequestError as error:
    if output is not None and error.param == output.field:
      _check_parts(body, model, choice)  # raises a clearer error if it finds one
    raise
  tools = choice.tools or None
  if not model.answer_format.needs_parser(tools):
    return parsed
  settings = ParserSettings(
    answer_format=model.answer_format,
    tools=tools,
    prompt=prompt if continues_prompt else '',
    is_constrained=output is not None,
    one_call=body.parallel_tool_calls is False,
  )
  return dataclasses.replace(parsed, parser_settings=settings)


def _tools_for_template(body: ChatBody, choice: ToolChoice) -> list[Any] | None:
  """Returns the tools to pass to the chat template.

  With mode 'required' these are all tools, because a grammar restricts the call; otherwise only the callable ones.
  """
  if choice.mode == 'none':
    return None
  passes_all = choice.mode == 'required'
  return [tool for tool in body.tools if passes_all or tool['function']['name'] in choice.tools] or None


def _output_form(body: ChatBody, model: ServedModel, choice: ToolChoice, prompt: str) -> tuple[OutputForm | None, bool]:
  """Returns the form that constrains the whole output, and whether the parser gets the prompt.

  The form is None if nothing constrains the output. The parser does not get the prompt if the client's own grammar may
  cover the reasoning.
  """
  grammar = functools.partial(model.answer_format.grammar, prompt=prompt)
  try:
    text = wanted_form(body)
    if choice.mode == 'required':
      if text is not None and body.structured_outputs:
        raise RequestError(
          f'{text.field} cannot constrain a required tool call: leave {text.field} or tool_choice out.',
          param=text.field,
        )
      return grammar(choice.tools, field='tool_choice'), True
    if text is None or not (choice.tools or prompt.rstrip().endswith(THINK)):
      return text, True
    if not choice.tools and text.kind == 'grammar':  # the client's grammar may include the reasoning
      return text, False
    several = body.parallel_tool_calls is not False
    return grammar(choice.tools, field=text.field, text=text, several=several), True
  except FormError as error:
    raise RequestError(str(error), param=error.field) from error


_MAX_CHECKED = 64  # tools; compiling each schema takes time


def _check_parts(body: ChatBody, model: ServedModel, choice: ToolChoice) -> None:
  """Raises a RequestError that names the first schema of a combined grammar that cannot be compiled by itself."""
  names = [tool['function']['name'] for tool in body.tools]
  try:
    if (text := wanted_form(body)) is not None:
      text.compile(model.grammars)
    for name, schema in itertools.islice(choice.tools.items(), _MAX_CHECKED):
      field = f'tools[{names.index(name)}].function.parameters'
      OutputForm(field=field, kind='json_schema', value=schema).compile(model.grammars)
  except FormError as error:
    raise RequestError(str(error), param=error.field) from error


_TEMPLATE_VARIABLES = ('messages', 'tools', 'documents', 'add_generation_prompt', 'self')
_TOOLS_IN_MESSAGE = re.compile(r"\bmessage(\.|\[['\"])tools\b")  # Phi-4-mini reads tools from the system message


def _render(body: ChatBody, model: ServedModel, tools: list[Any] | None) -> tuple[tuple[int, ...], str]:
  """Renders a chat's messages with the chat template; returns the tokens and the text."""
  template = model.chat_template
  used = {'tools': tools, 'documents': body.documents, 'messages': any(turn.tool_calls for turn in body.messages)}
  for field, value in used.items():
    name = 'tool_calls' if field == 'messages' else field
    if value and not template.mentions(name):
      raise RequestError(f"this model's chat template does not use {name}: leave them out.", param=field)
  variables = _template_variables(body, template)
  if body.continue_final_message and body.add_generation_prompt:
    raise RequestError(
      'continue_final_message continues the last message, and add_generation_prompt begins another: set one to false.',
      param='continue_final_message',
    )
  messages = [_turn(turn, f'messages[{number}]', template) for number, turn in enumerate(body.messages)]
  if tools and _TOOLS_IN_MESSAGE.search(template.template):
    messages = [*([] if messages[0]['role'] == 'system' else [{'role': 'system', 'content': ''}]), *messages]
    messages[0]['tools'] = json.dumps([tool['function'] for tool in tools], ensure_ascii=False)
  if body.continue_final_message:
    messages[-1]['content'] += _OPEN_END
  begins_reply = body.add_generation_prompt is not False and not body.continue_final_message
  try:
    text = template.render(
      messages, tools=tools, documents=body.documents, add_generation_prompt=begins_reply, **variables
    )
    if body.continue_final_message:
      text = _open_ended(text)
    return model.encode(text, with_bos=body.add_special_tokens or not template.writes_bos), text
  except UserError as error:
    raise RequestError(f'messages: {error}', param='messages') from error


# Appended to the last message to find its end in the rendered text, as transformers' apply_chat_template does.
_OPEN_END = 'CONTINUE_FINAL_MESSAGE_TAG '


def _open_ended(text: str) -> str:
  """Truncates a rendered conversation after the content of its last message."""
  index = text.rfind(_OPEN_END.strip())
  if index < 0:
    raise RequestError(
      "this model's chat template does not render the content of the last message: leave continue_final_message out.",
      param='continue_final_message',
    )
  is_stripped = not text.startswith(_OPEN_END, index)
  return text[:index].rstrip() if is_stripped else text[:index]


def _template_variables(body: ChatBody, template: ChatTemplate) -> dict[str, Any]:
  """Returns the template variables that a request sets, by `chat_template_kwargs` or by its own fields."""
  variables = body.chat_template_kwargs
  for name, value in variables.items():
    if name in _TEMPLATE_VARIABLES or not name.isidentifier():
      raise RequestError(f'chat_template_kwargs cannot set {name[:100]!r}.', param='chat_template_kwargs')
    if value and not template.mentions(name):
      raise RequestError(
        f"this model's chat template does not use {name[:100]}: leave it out.", param='chat_template_kwargs'
      )
  own: dict[str, tuple[str, Any]] = {}  # variable -> (field of the request, value)
  if body.enable_thinking is not None:
    own['enable_thinking'] = 'enable_thinking', body.enable_thinking
  if (effort := body.reasoning_effort) is not None:
    if template.mentions('reasoning_effort') or not template.mentions('enable_thinking'):
      own['reasoning_effort'] = 'reasoning_effort', effort
    else:  # the template can only switch thinking on or off
      own.setdefault('enable_thinking', ('reasoning_effort', effort != 'none'))
  if body.verbosity is not None:
    own['verbosity'] = 'verbosity', body.verbosity
  for name, (field, value) in own.items():
    if not template.mentions(name) and value not in (False, 'none' if field == 'reasoning_effort' else 'medium'):
      raise RequestError(f"this model's chat template does not use {name}: leave {field} out.", param=field)
    if variables.get(name, value) != value:
      raise RequestError(f'{field} and chat_template_kwargs.{name} conflict: leave one out.', param=field)
  return variables | {name: value for name, (_, value) in own.items() if template.mentions(name)}


def _turn(turn: Message, path: str, template: ChatTemplate) -> dict[str, Any]:
  """Converts a message to the dict that chat templates read."""
  role = 'system' if turn.role == 'developer' and not template.mentions('developer') else turn.role
  message: dict[str, Any] = {'role': role, 'content': turn.text}
  if turn.tool_calls:
    message['tool_calls'] = calls_for_template(turn.tool_calls, path)
  reasoning = turn.reasoning if turn.reasoning_content is None else turn.reasoning_content
  own = {'name': turn.name, 'tool_call_id': turn.tool_call_id, 'reasoning_content': reasoning}
  return message | {name: value for name, value in own.items() if value is not None}


def check_model_name(fields: dict[str, Any], model: ServedModel) -> None:
  """Raises a RequestError (404) if a request names a model that is not served; a request may omit the name."""
  name = fields.get('model')
  if isinstance(name, str) and model.resolve(name) not in model.names:
    raise RequestError(
      f'model {name[:100]!r} is not served here; {_listed(model.names)}.',
      status=404,
      param='model',
      code='model_not_found',
    )


def _listed(names: tuple[str, ...]) -> str:
  shown = ', '.join(map(repr, names[:20])) + (', ...' if len(names) > 20 else '')
  return f'{shown} {"is" if len(names) == 1 else "are"}'


def _check_num_logprobs(field: str, number: int | None, model: ServedModel) -> None:
  most = model.settings.num_top_logprobs
  if number is not None and number > most:
    raise RequestError(f'{field} must be at most {most}, not {number}.', param=field)


def _prompt(
  item: str | list[int], body: CompletionBody, model: ServedModel, max_tokens: int
) -> tuple[tuple[int, ...], str]:
  """Returns the tokens and the text of a prompt."""
  if isinstance(item, str):
    ids, text = model.encode(item, with_bos=body.add_special_tokens), item
  else:
    if not all(0 <= token < model.vocab_size for token in item):
      raise RequestError(f'prompt must have tokens below {model.vocab_size}.', param='prompt')
    ids, text = tuple(item), model.decode(item)
  if not ids:
    raise RequestError('prompt must not be empty, because this model has no BOS token.', param='prompt')
  kept = _truncated(ids, body, model, max_tokens)
  if kept != ids or not body.skip_special_tokens:
    text = model.decode(kept) if body.skip_special_tokens else model.decode_all(kept)
  return kept, text


def _truncated(
  ids: tuple[int, ...], body: CompletionBody | ChatBody, model: ServedModel, max_tokens: int
) -> tuple[int, ...]:
  """Truncates a prompt to its last `truncate_prompt_tokens` tokens, at least one; -1 keeps as many as fit."""
  num_kept = body.truncate_prompt_tokens
  if num_kept is None:
    return ids
  return ids[-max(1, model.max_len - max_tokens if num_kept == -1 else num_kept) :]


def _generation_request(
  body: CompletionBody | ChatBody,
  model: ServedModel,
  limits: ServerSettings,
  prompts: list[tuple[tuple[int, ...], str]],
  *,
  max_tokens: int,
  num_logprobs: int | None,
  form: OutputForm | None = None,
) -> GenerationRequest:
  """Checks the fields that both routes have, and builds the requests.

  Args:
    body: the validated body.
    model: the served model.
    limits: the server's limits.
    prompts: the tokens and the text of each prompt.
    max_tokens: the maximum number of tokens to generate.
    num_logprobs: see GenerationRequest.
    form: the form that constrains the output; None derives it from `body`.
  """
  is_chat = isinstance(body, ChatBody)
  name = model.resolve(body.model)
  _check_sizes(body, model, limits, [ids for ids, _ in prompts], max_tokens)
  if body.best_of not in (None, body.n):
    raise RequestError(
      f'best_of must equal n={body.n}, not {body.best_of}: this server returns every text that it generates.',
      param='best_of',
      code='unsupported_parameter',
    )
  own_stop = model.chat_template.stop if is_chat else ()
  stop_ids = _stop_ids(body, model)
  _check_num_logprobs('prompt_logprobs', body.prompt_logprobs, model)
  if body.prompt_logprobs is not None and body.stream:
    raise RequestError('prompt_logprobs cannot be streamed: leave stream out.', param='prompt_logprobs')
  if body.stream_options is not None and not body.stream:
    raise RequestError('stream_options needs stream to be true.', param='stream_options')
  sampling = model.settings.sampling_for(body)
  if not all(token < model.vocab_size for token in body.logit_bias):
    raise RequestError(f'logit_bias must have tokens below {model.vocab_size}.', param='logit_bias')
  try:
    form = wanted_form(body) if form is None else form
    matcher = None if form is None else form.compile(model.grammars, () if body.ignore_eos else _end_ids(model))
  except FormError as error:
    raise RequestError(str(error), param=error.field) from error
  limited = _limited(body, model, stop_ids, max_tokens, matcher)
  predicted = body.prediction if isinstance(body, ChatBody) else ''
  prediction = model.encode(predicted, with_bos=False) if predicted else ()
  requests = tuple(
    Request(
      ids=ids,
      max_tokens=max_tokens,
      seed=secrets.randbits(32) if body.seed is None else prompt_seed(body.seed % 2**32, number),
      sample=sample,
      stop_ids=stop_ids,
      stop=(*body.stop, *own_stop),
      kept_stops=(*body.stop, *stop_ids) if body.include_stop_str_in_output else (),
      min_tokens=body.min_tokens,
      score_prompt=body.prompt_logprobs is not None or (not is_chat and body.echo and num_logprobs is not None),
      sampling=sampling,
      logit_bias=tuple(body.logit_bias.items()),
      adapter=model.names.index(name),
      cache_key=body.cache_salt,
      num_drafts=body.num_drafts,
      prediction=prediction,
      priority=body.priority,
    )
    for number, (ids, _) in enumerate(prompts)
    for sample in range(body.n)
  )
  return GenerationRequest(
    kind='chat' if is_chat else 'completion',
    model=name,
    requests=requests,
    echoes=tuple(text if body.echo else '' for _, text in prompts for _ in range(body.n)),
    num_prompt_tokens=sum(len(ids) for ids, _ in prompts),
    num_logprobs=num_logprobs,
    stream=body.stream,
    include_usage=body.stream_options is not None and body.stream_options.include_usage,
    num_prompt_logprobs=body.prompt_logprobs,
    returns_ids=body.return_token_ids,
    names_by_id=body.return_tokens_as_token_ids,
    shows_special=not body.skip_special_tokens,
    id=body.request_id,
    matcher=limited,
  )


def _limited(
  body: CompletionBody | ChatBody,
  model: ServedModel,
  stop_ids: tuple[int, ...],
  max_tokens: int,
  form: Matcher | None,
) -> Matcher | TokenLimits | None:
  """Combines the matcher of the output's form with min_tokens, allowed_token_ids and bad_words."""
  if body.min_tokens > max_tokens:
    raise RequestError(
      f'min_tokens must be at most max_tokens {max_tokens}, not {body.min_tokens}.', param='min_tokens'
    )
  allowed = body.allowed_token_ids
  if allowed is not None and not (allowed and all(0 <= token < model.vocab_size for token in allowed)):
    raise RequestError(
      f'allowed_token_ids must have at least one token, all below {model.vocab_size}.', param='allowed_token_ids'
    )
  if not (body.min_tokens or body.bad_words) and allowed is None:
    return form
  words = tuple(word.encode() for word in body.bad_words)
  limits = TokenLimits(
    vocab_size=model.vocab_size,
    min_tokens=body.min_tokens,
    end_ids=stop_ids,
    allowed_ids=allowed,
    bad_words=BadWords(words=words, vocabulary=model.vocabulary) if words else None,
    form=form,
  )
  if limits.is_over and max_tokens:
    field = 'allowed_token_ids' if allowed is not None else 'bad_words' if words else 'min_tokens'
    reason = limits.failure or 'min_tokens and the form of the output allow no first token'
    raise RequestError(f'{reason}: leave one out.', param=field)
  return limits


def _check_sizes(
  body: CompletionBody | ChatBody,
  model: ServedModel,
  limits: ServerSettings,
  prompts: list[tuple[int, ...]],
  max_tokens: int,
) -> None:
  max_choices = min(limits.max_choices, limits.max_queued)  # more would not fit in an empty queue
  if len(prompts) * body.n > max_choices:
    raise RequestError(
      f'n={body.n} for {len(prompts)} prompt(s) is more than {max_choices} choices: lower n, or send several requests.',
      param='n',
    )
  for ids in prompts:
    if len(ids) + max_tokens > model.max_len:
      prompt_field = 'messages' if isinstance(body, ChatBody) else 'prompt'
      field = prompt_field if len(ids) >= model.max_len else 'max_tokens'
      raise RequestError(
        f'{field} is too large: {len(ids)} prompt tokens plus max_tokens {max_tokens} exceed {model.max_len}, the '
        "model's maximum.",
        param=field,
        code='context_length_exceeded',
      )


def _stop_ids(body: CompletionBody | ChatBody, model: ServedModel) -> tuple[int, ...]:
  if not all(0 <= token < model.vocab_size for token in body.stop_token_ids):
    raise RequestError(f'stop_token_ids must have tokens below {model.vocab_size}.', param='stop_token_ids')
  end = () if body.ignore_eos else _end_ids(model)
  stop_ids = tuple(dict.fromkeys((*end, *body.stop_token_ids)))
  if len(stop_ids) > model.settings.max_stop_ids:
    raise RequestError(
      f'stop_token_ids and the EOS tokens must be at most {model.settings.max_stop_ids} tokens together.',
      param='stop_token_ids',
    )
  return stop_ids


def _end_ids(model: ServedModel) -> tuple[int, ...]:
  return model.settings.end_ids(model.tokenizer.eos_id)


# --- vLLM's tokenizer routes, so that evaluation harnesses need no tokenizer of their own ---


def tokenize(fields: dict[str, Any], model: ServedModel) -> dict[str, Any]:
  """Answers /tokenize: `{"prompt": "def ", "add_special_tokens": false}` with tokens, count and max_model_len.

  The body of a chat, with `messages` in place of `prompt`, is answered with the tokens of its rendered prompt. A prompt
  that is just the name of a special token without text, such as `token_id:2`, encodes to that token.
  """
  check_model_name(fields, model)
  ids: Sequence[int]
  if fields.get('messages') is not None:
    chat = validate(ChatBody, fields)
    ids, _ = _render(chat, model, _tools_for_template(chat, read_choice(chat.tool_choice, read_tools(chat.tools))))
  else:
    body = validate(TokenizeBody, fields)
    named = {_token_name(token): token for token in _special_ids(model.tokenizer).values()}
    if body.prompt in named:
      ids = [named[body.prompt]]
    else:
      ids = model.encode(body.prompt, with_bos=body.add_special_tokens)
  return {'tokens': list(ids), 'count': len(ids), 'max_model_len': model.max_len}


def detokenize(fields: dict[str, Any], model: ServedModel) -> dict[str, Any]:
  """Answers /detokenize: `{"tokens": [...]}` with `{"prompt": "def "}`."""
  check_model_name(fields, model)
  body = validate(DetokenizeBody, fields)
  if not all(0 <= token < model.vocab_size for token in body.tokens):
    raise RequestError(f'tokens must be below {model.vocab_size}.', param='tokens')
  return {'prompt': model.decode_all(body.tokens)}


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
  """Answers /tokenizer_info: the chat template and the names of special tokens, null if the tokenizer lacks one."""
  texts = model.tokenizer.special_tokens if isinstance(model.tokenizer, FolderTokenizer) else {}
  ids = _special_ids(model.tokenizer)
  special = ('bos_token', 'eos_token', 'pad_token')
  names = {name: texts.get(name) or (_token_name(ids[name]) if name in ids else None) for name in special}
  return names | {'chat_template': model.chat_template.template, 'max_model_len': model.max_len}


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
  ids = {'bos_token': tokenizer.bos_id, 'eos_token': tokenizer.eos_id, 'pad_token': tokenizer.pad_id}
  return {name: token for name, token in ids.items() if token is not None}


def _token_name(token: int) -> str:
  return f'token_id:{token}'
