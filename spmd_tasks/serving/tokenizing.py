"""The tokenizer over HTTP, as vLLM's server has it: evaluation harnesses then need no tokenizer of their own.

    POST /tokenize      {"prompt": "def ", "add_special_tokens": false}  ->  {"tokens": [...], "count": 4, ...}
    POST /detokenize    {"tokens": [...]}                                ->  {"prompt": "def "}
    GET /tokenizer_info                                                  ->  {"eos_token": "</s>", ...}

A special token is named by its text, or as `token_id:2` where the tokenizer has no text for it. A prompt that is such a
name alone is that token.
"""

from typing import Any

from spmd_tasks.errors import UserError
from spmd_tasks.inputs import FolderTokenizer, Tokenizer
from spmd_tasks.serving.bodies import DetokenizeBody, TokenizeBody, validate
from spmd_tasks.serving.errors import RequestError
from spmd_tasks.serving.requests import ServedModel, check_model_name

_NAMES = ('bos_token', 'eos_token', 'pad_token')


def tokenize(fields: dict[str, Any], model: ServedModel) -> dict[str, Any]:
  """Answers /tokenize.

  Raises:
    RequestError: names the field that is wrong.
  """
  check_model_name(fields, model)
  body = validate(TokenizeBody, fields)
  named = {_token_name(token): token for token in special_ids(model.tokenizer).values()}
  ids: tuple[int, ...]
  if body.prompt in named:
    ids = (named[body.prompt],)
  elif body.add_special_tokens:
    ids = model.encode(body.prompt)
  else:
    try:
      ids = tuple(model.tokenizer.encode(body.prompt))
    except UserError as error:
      raise RequestError(f'{error}', param='prompt') from error
  return {'tokens': list(ids), 'count': len(ids), 'max_model_len': model.max_len}


def detokenize(fields: dict[str, Any], model: ServedModel) -> dict[str, Any]:
  """Answers /detokenize.

  Raises:
    RequestError: names the field that is wrong.
  """
  check_model_name(fields, model)
  body = validate(DetokenizeBody, fields)
  if not all(0 <= token < model.vocab_size for token in body.tokens):
    raise RequestError(f'tokens has a token outside the vocabulary of {model.vocab_size}.', param='tokens')
  return {'prompt': model.decode_all(body.tokens)}


def tokenizer_info(model: ServedModel) -> dict[str, Any]:
  """Answers /tokenizer_info: the names of special tokens, and the chat template; null for a token that is not there."""
  texts = model.tokenizer.special_tokens if isinstance(model.tokenizer, FolderTokenizer) else {}
  ids = special_ids(model.tokenizer)
  names = {name: texts.get(name) or (_token_name(ids[name]) if name in ids else None) for name in _NAMES}
  return names | {'chat_template': model.chat_template.template, 'max_model_len': model.max_len}


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
  """The ids of special tokens by name."""
  ids = {'bos_token': tokenizer.bos_id, 'eos_token': tokenizer.eos_id, 'pad_token': tokenizer.pad_id}
  return {name: token for name, token in ids.items() if token is not None}


def _token_name(token: int) -> str:
  return f'token_id:{token}'
