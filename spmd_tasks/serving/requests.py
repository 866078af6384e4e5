"""Turns the bodies of /v1/completions and /v1/chat/completions into the requests that the scheduler runs.

    wanted = completion_request({'model': 'lm.Tiny', 'prompt': 'def ', 'n': 2}, model, limits)
    len(wanted.requests)   # 2: one per choice

bodies.py has checked types and fixed ranges; here each request is checked against the served model and the server's
limits, and gets its tokens and defaults. A RequestError names the field that is wrong.
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
from spmd_tasks.serving.answer_parsers import THINK, Parser
from spmd_tasks.serving.answers import AnswerForm, answer_form
from spmd_tasks.serving.bodies import ChatBody, CompletionBody, DetokenizeBody, Message, TokenizeBody, validate
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.settings import ServerSettings
from spmd_tasks.serving.tool_calls import ToolChoice, Tools, calls_for_template, read_choice, read_tools

_COMPLETION_TOKENS = 16  # OpenAI's default


def check_adapter_names(names: Sequence[str], adapters: Collection[str]) -> None:
  """Raises a UserError if one of a model's adapters has a name of the model itself."""
  for name in set(names).intersection(adapters):
    raise UserError(f'adapters has the name {name!r}, which is that of the model itself: choose another one.')


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
  """The model that requests are checked against.

  Fields:
    name: the name that requests give, if any; `alias` is another one, the experiment's where the name is a folder's.
    adapters: the names that requests give instead where they want the model with one of its low-rank adapters, in the
      order of the adapters' numbers from 1 on.
    created: when the weights were loaded, in seconds since 1970.
    step: the training step of the weights.
    tokenizer, chat_template: those of the experiment.
    grammars: compiles the forms that requests give for their output.
    settings, max_len, vocab_size: those of the compiled steps.
    reading: of a model that scores or embeds texts, and generates none.
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
    """The names that requests can give: a name's place is the number of its adapter, 0 for none."""
    return (self.name, *self.adapters)

  def resolve(self, name: str | None) -> str:
    """Returns the one of `names` that a request means, which leaves the name out or gives one that is served."""
    return self.name if name in (None, self.alias) else str(name)

  def encode(self, text: str, *, with_bos: bool = True) -> tuple[int, ...]:
    """Turns a prompt into tokens, after the token for the beginning of text if there is one.

    Raises a RequestError: the tokenizer refuses the text, as one of ids refuses words.
    """
    try:
      return encode_prompt(self.tokenizer, text) if with_bos else tuple(self.tokenizer.encode(text))
    except UserError as error:
      raise RequestError(f'{error}') from error

  def decode(self, ids: Sequence[int]) -> str:
    """Turns tokens into text; ids beyond the tokenizer's vocabulary, which a padded model may have, add no text."""
    return decode_generated(self.tokenizer, ids)

  @functools.cached_property
  def answer_form(self) -> AnswerForm:
    """How answers are written."""
    return answer_form(self.chat_template, self.tokenizer)

  def decode_all(self, ids: Sequence[int]) -> str:
    """Decodes as `decode`, with special tokens by their names where the tokenizer has such."""
    return decode_all(self.tokenizer, [token for token in ids if token < self.tokenizer.vocab_size])

  def bytes_of_tokens(self, ids: Sequence[int]) -> list[bytes]:
    """The bytes that each token adds to a text; none for special tokens."""
    return bytes_of_tokens(self.tokenizer, ids)

  @functools.cached_property
  def vocabulary(self) -> Vocabulary:
    """The bytes of all tokens."""
    return Vocabulary(self.bytes_of_tokens(range(self.vocab_size)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerReading:
  """How the texts of a chat's answers are read.

  Fields:
    form: in which the model writes.
    tools: that may be called; None if calls are content.
    prompt: the text before the answer, which may have begun its reasoning.
    is_fixed: whether a grammar decides what the answer is.
    one_call: whether what follows the first call is dropped.
  """

  form: AnswerForm
  tools: Tools | None
  prompt: str
  is_fixed: bool
  one_call: bool

  def parser(self) -> Parser:
    """Makes the parser of one answer."""
    return self.form.parser(self.tools, prompt=self.prompt, is_fixed=self.is_fixed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
  """One HTTP request, checked and tokenized.

  Fields:
    kind: the route.
    model: the name of the model, or of its adapter, that answers.
    requests: one per choice, in the order of the choices: all samples of the first prompt, then of the next.
    echoes: the text before each choice's generated text.
    num_prompt_tokens: of all prompts, each counted once.
    num_logprobs: how many of the likeliest tokens are reported beside each token; None reports no log-probabilities.
    num_prompt_logprobs: the same of the prompt's tokens, apart from those of `echo`.
    returns_ids: whether the tokens of prompts and choices are reported.
    names_by_id: whether log-probabilities name each token as `token_id:17`.
    shows_special: whether the text has special tokens by their names.
    id: the client's name of the request; None makes one.
    matcher: allows the tokens of the output; every choice takes a copy. None allows all.
    reading: how the output is read, if it has more than content.
    stream: whether the answer is a stream of events.
    include_usage: whether the stream's last event counts tokens.
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
  reading: 'AnswerReading | None' = None

  def sequences(self, model: ServedModel, owner: Any) -> list[GeneratedSequence]:
    """The sequences of the choices, for the engine."""
    decode = model.decode if self.reading is None else self.reading.form.decoder(self.reading.tools)
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
  """Reads the body of /v1/completions."""
  check_model_name(fields, model)
  body = validate(CompletionBody, fields)
  if len(body.prompt) > limits.max_choices:
    raise RequestError(
      f'prompt has {len(body.prompt)} prompts, more than {limits.max_choices}: send several requests.', param='prompt'
    )
  _check_num_logprobs('logprobs', body.logprobs, model)
  # With echo, a client may want the prompt alone back, with its log-probabilities.
  if body.max_tokens == 0 and not body.echo:
    raise RequestError('max_tokens must be at least 1, not 0, unless echo is true.', param='max_tokens')
  max_tokens = body.max_tokens
  if max_tokens is None:
    max_tokens = model.settings.max_tokens or _COMPLETION_TOKENS
  prompts = [_prompt(item, body, model, max_tokens) for item in body.prompt]
  return _generation_request(body, model, limits, prompts, max_tokens=max_tokens, num_logprobs=body.logprobs)


def chat_request(fields: dict[str, Any], model: ServedModel, limits: ServerSettings) -> GenerationRequest:
  """Reads the body of /v1/chat/completions."""
  check_model_name(fields, model)
  body = validate(ChatBody, fields)
  choice = read_choice(body.tool_choice, read_tools(body.tools))
  ids, prompt = _conversation(body, model, _shown_tools(body, choice))
  if not ids:
    raise RequestError('messages render as no tokens: give one some content.', param='messages')
  _check_num_logprobs('top_logprobs', body.top_logprobs, model)
  if body.top_logprobs and not body.logprobs:
    raise RequestError('top_logprobs needs logprobs to be true.', param='top_logprobs')
  max_tokens = body.max_completion_tokens or body.max_tokens
  ids = _truncated(ids, body, model, max_tokens or 1)
  if max_tokens is None:
    room = model.max_len - len(ids)
    max_tokens = max(1, min(room, model.settings.max_tokens or room))
  num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
  echo = body.messages[-1].text if body.messages[-1].role == 'assistant' else ''
  output, opens_text = _output_form(body, model, choice, prompt)
  try:
    wanted = _generation_request(
      body, model, limits, [(ids, echo)], max_tokens=max_tokens, num_logprobs=num_logprobs, form=output
    )
  except RequestError as error:
    if output is not None and error.param == output.field:
      _check_parts(body, model, choice)  # whose error is clearer
    raise
  tools, is_fixed = choice.tools or None, output is not None
  if not model.answer_form.needs_parser(tools):
    return wanted
  reading = AnswerReading(
    form=model.answer_form,
    tools=tools,
    prompt=prompt if opens_text else '',
    is_fixed=is_fixed,
    one_call=body.parallel_tool_calls is False,
  )
  return dataclasses.replace(wanted, reading=reading)


def _shown_tools(body: ChatBody, choice: ToolChoice) -> list[Any] | None:
  """The tools that the template is given: those that may be called, unless a grammar leaves the others out."""
  if choice.mode == 'none':
    return None
  is_all = choice.mode == 'required'
  return [tool for tool in body.tools if is_all or tool['function']['name'] in choice.tools] or None


def _output_form(body: ChatBody, model: ServedModel, choice: ToolChoice, prompt: str) -> tuple[OutputForm | None, bool]:
  """The form of the whole output, None for any, and whether the output goes on with what the prompt has begun."""
  grammar = functools.partial(model.answer_form.grammar, prompt=prompt)
  try:
    text = wanted_form(body)
    if choice.mode == 'required':
      if text is not None and body.structured_outputs:
        raise RequestError(f'a call has no other form: leave {text.field} or tool_choice out.', param=text.field)
      return grammar(choice.tools, field='tool_choice'), True
    if text is None or not (choice.tools or prompt.rstrip().endswith(THINK)):
      return text, True
    if not choice.tools and text.kind == 'grammar':  # which may have the reasoning in it
      return text, False
    several = body.parallel_tool_calls is not False
    return grammar(choice.tools, field=text.field, text=text, several=several), True
  except FormError as error:
    raise RequestError(str(error), param=error.field) from error


_MAX_CHECKED = 64  # tools, of which each takes time


def _check_parts(body: ChatBody, model: ServedModel, choice: ToolChoice) -> None:
  """Raises a RequestError if one schema of a form cannot be had alone; the error names it."""
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


_TOOLS_IN_MESSAGE = re.compile(r"\bmessage(\.|\[['\"])tools\b")  # of the system, as Phi-4-mini's template reads them


def _conversation(body: ChatBody, model: ServedModel, tools: list[Any] | None) -> tuple[tuple[int, ...], str]:
  """The tokens and the text of a chat's messages."""
  template = model.chat_template
  used = {'tools': tools, 'documents': body.documents, 'messages': any(turn.tool_calls for turn in body.messages)}
  for field, value in used.items():
    name = 'tool_calls' if field == 'messages' else field
    if value and not template.mentions(name):
      raise RequestError(f"this model's chat template has no {name}: leave them out.", param=field)
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


# Put behind the last message, which ends where the rendered text has it, as in transformers' apply_chat_template.
_OPEN_END = 'CONTINUE_FINAL_MESSAGE_TAG '


def _open_ended(text: str) -> str:
  """Cuts a rendered conversation behind its last message's content."""
  place = text.rfind(_OPEN_END.strip())
  if place < 0:
    raise RequestError(
      "this model's chat template does not write the last message's content: leave continue_final_message out.",
      param='continue_final_message',
    )
  is_trimmed = not text.startswith(_OPEN_END, place)
  return text[:place].rstrip() if is_trimmed else text[:place]


def _template_variables(body: ChatBody, template: ChatTemplate) -> dict[str, Any]:
  """The variables that a request sets, by `chat_template_kwargs` or by fields of their own."""
  variables = body.chat_template_kwargs
  for name, value in variables.items():
    if name in _TEMPLATE_VARIABLES or not name.isidentifier():
      raise RequestError(f'chat_template_kwargs cannot have {name[:100]!r}.', param='chat_template_kwargs')
    if value and not template.mentions(name):
      raise RequestError(f"this model's chat template has no {name[:100]}: leave it out.", param='chat_template_kwargs')
  own: dict[str, tuple[str, Any]] = {}  # by variable: the field, and the variable's value
  if body.enable_thinking is not None:
    own['enable_thinking'] = 'enable_thinking', body.enable_thinking
  if (effort := body.reasoning_effort) is not None:
    if template.mentions('reasoning_effort') or not template.mentions('enable_thinking'):
      own['reasoning_effort'] = 'reasoning_effort', effort
    else:  # the template knows thinking or none, and no degrees of it
      own.setdefault('enable_thinking', ('reasoning_effort', effort != 'none'))
  if body.verbosity is not None:
    own['verbosity'] = 'verbosity', body.verbosity
  for name, (field, value) in own.items():
    if not template.mentions(name) and value not in (False, 'none' if field == 'reasoning_effort' else 'medium'):
      raise RequestError(f"this model's chat template has no {name}: leave {field} out.", param=field)
    if variables.get(name, value) != value:
      raise RequestError(f'{field} and chat_template_kwargs.{name} differ: leave one out.', param=field)
  return variables | {name: value for name, (_, value) in own.items() if template.mentions(name)}


def _turn(turn: Message, path: str, template: ChatTemplate) -> dict[str, Any]:
  """A message as templates read it."""
  role = 'system' if turn.role == 'developer' and not template.mentions('developer') else turn.role
  message: dict[str, Any] = {'role': role, 'content': turn.text}
  if turn.tool_calls:
    message['tool_calls'] = calls_for_template(turn.tool_calls, path)
  reasoning = turn.reasoning if turn.reasoning_content is None else turn.reasoning_content
  own = {'name': turn.name, 'tool_call_id': turn.tool_call_id, 'reasoning_content': reasoning}
  return message | {name: value for name, value in own.items() if value is not None}


def check_model_name(fields: dict[str, Any], model: ServedModel) -> None:
  """Refuses a request for another model; a request may leave the name out."""
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
  """The tokens and the text of a prompt."""
  if isinstance(item, str):
    ids, text = model.encode(item, with_bos=body.add_special_tokens), item
  else:
    if not all(0 <= token < model.vocab_size for token in item):
      raise RequestError(f'prompt has a token outside the vocabulary of {model.vocab_size}.', param='prompt')
    ids, text = tuple(item), model.decode(item)
  if not ids:
    raise RequestError('prompt is empty, and this model has no token for the beginning of text.', param='prompt')
  kept = _truncated(ids, body, model, max_tokens)
  if kept != ids or not body.skip_special_tokens:
    text = model.decode(kept) if body.skip_special_tokens else model.decode_all(kept)
  return kept, text


def _truncated(
  ids: tuple[int, ...], body: CompletionBody | ChatBody, model: ServedModel, max_tokens: int
) -> tuple[int, ...]:
  """The last tokens of a prompt, at least one, where the request wants that; -1 is as many as there is room for."""
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
  """Checks and resolves the fields that both routes have."""
  is_chat = isinstance(body, ChatBody)
  name = model.resolve(body.model)
  _check_sizes(body, model, limits, [ids for ids, _ in prompts], max_tokens)
  if body.best_of not in (None, body.n):
    raise RequestError(
      f'best_of must equal n={body.n}, not be {body.best_of}: this server returns every text that it generates.',
      param='best_of',
      code='unsupported_parameter',
    )
  own_stop = model.chat_template.stop if is_chat else ()
  stop_ids = _stop_ids(body, model)
  _check_num_logprobs('prompt_logprobs', body.prompt_logprobs, model)
  if body.prompt_logprobs is not None and body.stream:
    raise RequestError('prompt_logprobs are not streamed: leave stream out.', param='prompt_logprobs')
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
  """The matcher of a form, with the limits of the request's own fields."""
  if body.min_tokens > max_tokens:
    raise RequestError(
      f'min_tokens must be at most max_tokens {max_tokens}, not {body.min_tokens}.', param='min_tokens'
    )
  allowed = body.allowed_token_ids
  if allowed is not None and not (allowed and all(0 <= token < model.vocab_size for token in allowed)):
    raise RequestError(
      f'allowed_token_ids must have tokens below {model.vocab_size}, at least one.', param='allowed_token_ids'
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
    reason = limits.failure or 'min_tokens and the form of the output leave no token that may come first'
    raise RequestError(f'{reason}: leave one out.', param=field)
  return limits


def _check_sizes(
  body: CompletionBody | ChatBody,
  model: ServedModel,
  limits: ServerSettings,
  prompts: list[tuple[int, ...]],
  max_tokens: int,
) -> None:
  most = min(limits.max_choices, limits.max_queued)  # even an empty queue has no room for more
  if len(prompts) * body.n > most:
    raise RequestError(
      f'n={body.n} for {len(prompts)} prompt(s) is more than {most} texts: ask for fewer, or send several requests.',
      param='n',
    )
  for ids in prompts:
    if len(ids) + max_tokens > model.max_len:
      prompt_field = 'messages' if isinstance(body, ChatBody) else 'prompt'
      field = prompt_field if len(ids) >= model.max_len else 'max_tokens'
      raise RequestError(
        f'{field} is too large: {len(ids)} tokens of prompt and max_tokens {max_tokens} exceed the {model.max_len} of '
        'this model.',
        param=field,
        code='context_length_exceeded',
      )


def _stop_ids(body: CompletionBody | ChatBody, model: ServedModel) -> tuple[int, ...]:
  if not all(0 <= token < model.vocab_size for token in body.stop_token_ids):
    raise RequestError(f'stop_token_ids must be tokens below {model.vocab_size}.', param='stop_token_ids')
  end = () if body.ignore_eos else _end_ids(model)
  stop_ids = tuple(dict.fromkeys((*end, *body.stop_token_ids)))
  if len(stop_ids) > model.settings.max_stop_ids:
    raise RequestError(
      f'stop_token_ids and the end of text are more than {model.settings.max_stop_ids} tokens.', param='stop_token_ids'
    )
  return stop_ids


def _end_ids(model: ServedModel) -> tuple[int, ...]:
  return model.settings.end_ids(model.tokenizer.eos_id)


# --- the tokenizer, as vLLM's server has it: evaluation harnesses then need none of their own ---


def tokenize(fields: dict[str, Any], model: ServedModel) -> dict[str, Any]:
  """Answers /tokenize: `{"prompt": "def ", "add_special_tokens": false}` with tokens, count and max_model_len.

  A special token is named by its text, or as `token_id:2` where the tokenizer has no text for it. A prompt that is such
  a name alone is that token.
  """
  check_model_name(fields, model)
  body = validate(TokenizeBody, fields)
  named = {_token_name(token): token for token in _special_ids(model.tokenizer).values()}
  ids: Sequence[int]
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
    raise RequestError(f'tokens has a token outside the vocabulary of {model.vocab_size}.', param='tokens')
  return {'prompt': model.decode_all(body.tokens)}


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
  """Answers /tokenizer_info: the names of special tokens, and the chat template; null for a token that is not there."""
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
