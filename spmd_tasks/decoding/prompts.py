r"""Prompts: JSON lines that a decoding job completes, and the requests for them.

    {"prompt": "def fibonacci(", "max_tokens": 40, "temperature": 0.8, "seed": 7, "n": 3, "stop": ["\n\n"]}
    {"prompt_ids": [1, 17, 34], "score_prompt": true}
    {"prompt": "Yes or no?", "structured_outputs": {"regex": "yes|no"}}
    {"prompt": "Bonjour", "adapter": "french"}

Fields that are missing or null take the defaults of the task's DecodeSettings.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import difflib
import functools
import json
import re
from typing import Annotated, Any, ClassVar, Protocol

from annotated_types import Ge, Lt, MinLen
import numpy as np

from spmd_tasks.decoding.constraints import Grammars, Matcher, wanted_form
from spmd_tasks.decoding.decode_steps import DecodeSteps
from spmd_tasks.decoding.requests import Request
from spmd_tasks.decoding.sampling import MAX_BIASES, prompt_seed
from spmd_tasks.errors import UserError
from spmd_tasks.inputs import ChatTemplate, Tokenizer
from spmd_tasks.inputs.batches import import_tensorflow
from spmd_tasks.inputs.records import parse_json
from spmd_tasks.inputs.tokenizers import decode_generated, encode_prompt
from spmd_tasks.store_files import local_folder

_Count = Annotated[int, Ge(0), Lt(2**31)]
_Text = Annotated[str, MinLen(1)]
_Number = int | float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
  """One prompt; None takes the task's default. Fields are checked by `parse_prompt` and `check_prompt`.

  Fields:
    prompt, prompt_ids: either text, or tokens as they are (without a beginning of text). The encoder of an
      encoder-decoder reads them, with the end of text after a text.
    decoder_ids: the tokens that an encoder-decoder's text begins with, as part of the prompt.
    n: how many completions to generate.
    seed: the seed of the random numbers.
    max_tokens: how many tokens to generate at most; 0 only scores the prompt.
    repetition_penalty, frequency_penalty, presence_penalty, temperature, top_k, top_p, min_p: see SamplingParams.
    logit_bias: at most 300 tokens, with numbers from -100 to 100 that are added to their logits.
    stop, stop_ids: strings and tokens that end a completion, in addition to the end of text.
    score_prompt: whether to return the log-probability of each prompt token, given only the tokens before it.
    response_format, structured_outputs: the form of the completions, as in requests to the server (constraints.py).
    adapter: the name of a low-rank adapter; None uses none.
    id: any JSON value, which is repeated in the output.
  """

  __pydantic_config__: ClassVar[Any] = {'strict': True, 'allow_inf_nan': False}

  prompt: str | None = None
  prompt_ids: Annotated[tuple[_Count, ...], MinLen(1)] | None = None
  decoder_ids: tuple[_Count, ...] = ()
  n: Annotated[int, Ge(1), Lt(2**31)] | None = None
  seed: Annotated[int, Ge(0), Lt(2**32)] | None = None
  max_tokens: _Count | None = None
  repetition_penalty: _Number | None = None
  frequency_penalty: _Number | None = None
  presence_penalty: _Number | None = None
  logit_bias: dict[_Count, _Number] | None = None
  temperature: _Number | None = None
  top_k: _Count | None = None
  top_p: _Number | None = None
  min_p: _Number | None = None
  stop: tuple[_Text, ...] = ()
  stop_ids: tuple[_Count, ...] = ()
  score_prompt: bool = False
  response_format: dict[str, Any] | None = None
  structured_outputs: dict[str, Any] | None = None
  adapter: str | None = None
  id: Any = None


def chat_prompt(
  messages: Sequence[Mapping[str, Any]],
  template: ChatTemplate,
  tokenizer: Tokenizer,
  *,
  tools: Sequence[Mapping[str, Any]] | None = None,
  variables: Mapping[str, Any] = {},
  **settings: Any,
) -> Prompt:
  """Returns the Prompt for the next message of a conversation; `settings` are further fields.

  The prompt begins with the tokenizer's beginning of text, unless the template writes it itself.

  Raises:
    UserError: the template refuses the messages.
  """
  text = template.render(messages, tools=tools, **variables)
  prompt: Any = {'prompt_ids': tuple(tokenizer.encode(text))} if template.writes_bos else {'prompt': text}
  return Prompt(**prompt, stop=template.stop, **settings)


class PromptSource(Protocol):
  """A source of prompts, for decode inputs."""

  def read(self) -> list[Prompt]:
    """Returns all prompts, the same on every process and every time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptFile:
  """A file of prompts, in the format of its name.

  `.txt` has one text per line; a name with `.tfrecord` has tf.train.Examples with text or tokens in the feature `key`;
  other names are JSON lines. Blank lines are skipped.
  """

  path: str
  key: str = 'inputs'

  def read(self) -> list[Prompt]:
    """Returns the prompts.

    Raises:
      UserError: the file cannot be read, or a line is not a prompt; the message names the line.
    """
    path = local_folder(self.path)
    if '.tfrecord' in path.name:
      return _read_examples(str(path), self.key)
    try:
      data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
      reason = getattr(error, 'strerror', None) or error
      raise UserError(f'prompts {self.path} cannot be read: {reason}.') from error
    if path.suffix == '.txt':
      try:
        lines = data.decode('utf-8-sig').split('\n')  # U+2028 and the like are characters of a text
        prompts = [Prompt(prompt=text.removesuffix('\r')) for text in lines if text.strip()]
      except UnicodeDecodeError as error:
        raise UserError(f'prompts {self.path} are not UTF-8 at byte {error.start}: convert the file.') from error
    else:
      numbered = enumerate(data.splitlines(), start=1)
      prompts = [parse_prompt(line, f'{self.path} line {number}') for number, line in numbered if line.strip()]
    if not prompts:
      raise UserError(f'{self.path} holds no prompts: write one JSON object per line, such as {{"prompt": "Once"}}.')
    return prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
  """Prompts that are listed in the experiment."""

  prompts: tuple[str, ...]

  def read(self) -> list[Prompt]:
    return [Prompt(prompt=text) for text in self.prompts]


def _read_examples(path: str, key: str) -> list[Prompt]:
  """Reads the prompts of a TFRecord file of tf.train.Examples."""
  tf, prompts = import_tensorflow(f'the TFRecord file {path}'), []
  try:
    for number, record in enumerate(tf.data.TFRecordDataset(path).as_numpy_iterator(), 1):
      features = tf.train.Example.FromString(record).features.feature
      texts, tokens = features[key].bytes_list.value, features[key].int64_list.value
      if len(texts) == 1:
        prompts.append(Prompt(prompt=texts[0].decode()))
      elif tokens and min(tokens) >= 0:
        prompts.append(Prompt(prompt_ids=tuple(tokens)))
      else:
        names = ', '.join(sorted(name for name in features if name != key)) or 'none'
        raise UserError(
          f'{path} record {number} has no text or tokens in the feature {key!r}: set the `key` of its PromptFile in '
          f'decode_inputs() to another one; there are {names}.'
        )
  except (tf.errors.OpError, UnicodeDecodeError, ValueError) as error:
    if isinstance(error, UserError):
      raise
    raise UserError(
      f'prompts {path} are not a TFRecord file of tf.train.Examples: {error}'.partition(chr(10))[0]
    ) from error
  if not prompts:
    raise UserError(f'{path} holds no prompts: write tf.train.Examples, each with a text.')
  return prompts


def parse_prompt(line: bytes, where: str) -> Prompt:
  """Reads a Prompt from a line of JSON.

  Raises:
    UserError: the line is not a prompt; the message begins with `where`.
  """
  record = parse_json(line, where)
  if not isinstance(record, dict):
    raise UserError(f'{where}: expected an object such as {{"prompt": "Once"}}, found {type(record).__name__}.')
  return _checked(record, where)


def check_prompt(prompt: Any, where: str) -> Prompt:
  """Returns a Prompt that was made in Python, with the checks of one in a file; NumPy's numbers and arrays will do.

  Raises:
    UserError: it is not a Prompt, or a field is wrong; the message begins with `where`.
  """
  if not isinstance(prompt, Prompt):
    raise UserError(f'{where} must be a Prompt, such as Prompt(prompt="Once"), not {prompt!r:.100}.')
  values = ((field, getattr(prompt, field.name)) for field in dataclasses.fields(Prompt) if field.name != 'id')
  record = {field.name: _plain(value) for field, value in values if value is not field.default}
  return dataclasses.replace(_checked(record, where), id=prompt.id)


def _plain(value: Any) -> Any:
  return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _checked(record: dict[str, Any], where: str) -> Prompt:
  """Returns the Prompt with the fields of a JSON object."""
  import pydantic

  names = [field.name for field in dataclasses.fields(Prompt)]
  for name in record:
    if name not in names:
      near = difflib.get_close_matches(name[:100], names, n=1)
      hint = f'nearest: {near[0]!r}' if near else f'there are {", ".join(names)}'
      raise UserError(f'{where}: there is no field {name[:100]!r}; {hint}.')
  if isinstance(record.get('stop'), str):
    record['stop'] = [record['stop']]
  fields = {name: value for name, value in record.items() if value is not None}
  if ('prompt' in fields) == ('prompt_ids' in fields):
    raise UserError(f"{where}: give one of 'prompt' (text) and 'prompt_ids' (tokens).")
  try:
    return _prompt_adapter().validate_json(json.dumps(fields, default=_plain))
  except pydantic.ValidationError as error:
    # A value that is neither int nor float has an error for each of them: skip the one for int.
    first = next(details for details in error.errors(include_url=False) if details['loc'][-1:] != ('int',))
    message = re.sub(r'^\w+ should', 'must', first['msg'])
    if not first['loc']:
      raise UserError(f'{where}: {message}.') from error
    keys = [key for key in first['loc'] if key not in ('float', '[key]')]
    path = ''.join(f'[{key}]' if isinstance(key, int) else f'.{key}' for key in keys).removeprefix('.')
    raise UserError(f'{where}: {path} = {first["input"]!r} {message}.') from error


@functools.cache
def _prompt_adapter() -> Any:
  import pydantic

  return pydantic.TypeAdapter(Prompt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptTokenizer:
  """Turns prompts into requests that fit the compiled steps.

  Fields:
    steps: the model's compiled steps.
    tokenizer: the tokenizer; None if the experiment has none, so that prompts and completions are tokens.
    seed: the seed from which prompts without one get different seeds.
    len_setting: the setting that allows longer prompts, for errors.
  """

  steps: DecodeSteps
  tokenizer: Tokenizer | None
  seed: int
  len_setting: str = 'task.decode.max_len'

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of tokens; empty without a tokenizer."""
    return '' if self.tokenizer is None else decode_generated(self.tokenizer, ids)

  def request(self, prompt: Prompt, where: str, number: int = 0) -> tuple[Request, int]:
    """Returns the first request of a prompt, and how many samples or beams it wants.

    Args:
      prompt: the prompt.
      where: the beginning of errors, such as a line of a file.
      number: the index of the prompt among the prompts that share the seed.

    Raises:
      UserError: the prompt does not fit the model or the settings; the message begins with `where`.
    """
    ids: tuple[int, ...] = self._ids(prompt, where)
    encoder_ids: tuple[int, ...] = ()
    if prompt.decoder_ids and self.steps.encoder_len is None:
      raise UserError(
        f'{where}: decoder_ids are for encoder-decoders, which this model is not: append them to prompt_ids.'
      )
    if self.steps.encoder_len is not None:
      encoder_ids, ids = ids, (self.steps.settings.start_id, *prompt.decoder_ids)
      if len(encoder_ids) > self.steps.encoder_len:
        raise UserError(
          f'{where}: the prompt has {len(encoder_ids)} tokens and encoder_len is {self.steps.encoder_len}: shorten it, '
          'or raise task.decode.encoder_len.'
        )
      if max(ids) >= self.steps.vocab_size:
        raise UserError(f'{where}: token {max(ids)} is outside the vocabulary of {self.steps.vocab_size}.')
    max_tokens = self._max_tokens(prompt, len(ids), where)
    end = self.steps.settings.end_ids(None if self.tokenizer is None else self.tokenizer.eos_id)
    stop_ids = tuple(dict.fromkeys((*end, *prompt.stop_ids)))
    if len(stop_ids) > self.steps.settings.max_stop_ids:
      raise UserError(
        f'{where}: {len(stop_ids)} stop tokens, the end of text included, are more than max_stop_ids='
        f'{self.steps.settings.max_stop_ids}: name fewer, or raise task.decode.max_stop_ids.'
      )
    try:
      sampling = self.steps.settings.sampling_for(prompt)
    except UserError as error:
      raise UserError(f'{where}: {error}') from error
    biases = tuple((prompt.logit_bias or {}).items())
    beyond = [token for token, _ in biases if token >= self.steps.vocab_size]
    if beyond:
      raise UserError(f'{where}: logit_bias has token {beyond[0]}, outside the vocabulary of {self.steps.vocab_size}.')
    if len(biases) > MAX_BIASES or not all(-100 <= bias <= 100 for _, bias in biases):
      raise UserError(f'{where}: logit_bias must have at most {MAX_BIASES} tokens, and numbers from -100 to 100.')
    num_beams = self.steps.settings.num_beams
    num_outputs = prompt.n or num_beams
    if num_beams > 1:
      if num_outputs > num_beams:
        raise UserError(f'{where}: n={num_outputs} is more than task.decode.num_beams={num_beams}.')
      if max_tokens == 0 or prompt.score_prompt:
        raise UserError(f'{where}: beam search scores no prompts: set task.decode.num_beams to 1.')
      if sampling.frequency_penalty or sampling.presence_penalty or biases:
        raise UserError(f'{where}: beam search has no penalties or logit_bias: set task.decode.num_beams to 1.')
      if prompt.adapter is not None:
        raise UserError(f'{where}: beam search has no adapters: set task.decode.num_beams to 1.')
    request = Request(
      ids=ids,
      encoder_ids=encoder_ids,
      max_tokens=max_tokens,
      seed=prompt_seed(self.seed, number) if prompt.seed is None else prompt.seed,
      stop_ids=stop_ids,
      stop=prompt.stop,
      score_prompt=prompt.score_prompt or max_tokens == 0,
      sampling=sampling,
      logit_bias=biases,
      adapter=0 if prompt.adapter is None else self.adapter_number(prompt.adapter, where),
    )
    return request, num_outputs

  def adapter_number(self, name: str, where: str) -> int:
    """Returns the number of an adapter.

    Raises:
      UserError: there is no adapter with this name; the message begins with `where`.
    """
    if name not in self.steps.adapter_names:
      known = f'there are {", ".join(self.steps.adapter_names)}' if self.steps.adapter_names else 'this job has none'
      raise UserError(f"{where}: there is no adapter {name!r}; {known}: set the experiment's `adapters`.")
    return 1 + self.steps.adapter_names.index(name)

  def matcher(self, prompt: Prompt, where: str) -> Matcher | None:
    """Returns the matcher of the form that a prompt asks for; None if it asks for none.

    Raises:
      UserError: the form is invalid, or this job cannot use it; the message begins with `where`.
    """
    try:
      form = wanted_form(prompt)
      if form is None:
        return None
      if self.steps.settings.num_beams > 1:
        raise UserError(f'beam search has no {form.field}: set task.decode.num_beams to 1.')
      if self.tokenizer is None:
        raise UserError(f"{form.field} needs a tokenizer, but the experiment's inputs have none.")
      return form.compile(self._grammars)
    except UserError as error:
      raise UserError(f'{where}: {error}') from error

  @functools.cached_property
  def _grammars(self) -> Grammars:
    assert self.tokenizer is not None
    end_ids = self.steps.settings.end_ids(self.tokenizer.eos_id)
    return Grammars(self.tokenizer, vocab_size=self.steps.vocab_size, end_ids=end_ids)

  def _ids(self, prompt: Prompt, where: str) -> tuple[int, ...]:
    if prompt.prompt_ids is not None:
      beyond = [token for token in prompt.prompt_ids if token >= self.steps.vocab_size]
      if beyond:
        raise UserError(f'{where}: token {beyond[0]} is outside the vocabulary of {self.steps.vocab_size}.')
      return prompt.prompt_ids
    if self.tokenizer is None:
      raise UserError(
        f"{where}: the prompt is text, but the experiment's inputs have no tokenizer: give 'prompt_ids' instead."
      )
    assert prompt.prompt is not None
    if self.steps.encoder_len is not None:
      return (*self.tokenizer.encode(prompt.prompt), self.tokenizer.eos_id)
    ids = encode_prompt(self.tokenizer, prompt.prompt)
    if not ids:
      raise UserError(
        f'{where}: the prompt is empty, and the tokenizer has no token for the beginning of text: write a text.'
      )
    return ids

  def _max_tokens(self, prompt: Prompt, num_ids: int, where: str) -> int:
    room = self.steps.max_len - num_ids
    # The last token needs no position, but a prompt must leave room for one token.
    if room < (0 if prompt.max_tokens == 0 else 1):
      raise UserError(
        f'{where}: the prompt has {num_ids} tokens and max_len is {self.steps.max_len}: shorten it, or raise '
        f'{self.len_setting}.'
      )
    if prompt.max_tokens is None:
      return min(room, self.steps.settings.max_tokens or room)
    if prompt.max_tokens > room:
      raise UserError(
        f'{where}: {num_ids} tokens of prompt and max_tokens={prompt.max_tokens} exceed max_len {self.steps.max_len}: '
        f'lower max_tokens, or raise {self.len_setting}.'
      )
    return prompt.max_tokens
