"""Fields: a JSON body read field by field, where everything that is not as it should be is named in a 4xx answer."""

from collections.abc import Collection
import json
import math
from typing import Any

from spmd_tasks.errors import UserError


class RequestError(Exception):
  """What a client is told: `status`, a sentence, the field that is wrong, a code for programs."""

  def __init__(
    self,
    message: str,
    *,
    status: int = 400,
    param: str | None = None,
    code: str | None = None,
    retry_after_s: int | None = None,
  ):
    super().__init__(message)
    self.message = message
    self.status = status
    self.param = param
    self.code = code
    self.retry_after_s = retry_after_s

  @property
  def body(self) -> dict[str, Any]:
    """As OpenAI's API has it."""
    kinds = {401: 'authentication_error', 404: 'not_found_error', 429: 'rate_limit_error'}
    kind = kinds.get(self.status, 'invalid_request_error' if self.status < 500 else 'server_error')
    return {'error': {'message': self.message, 'type': kind, 'param': self.param, 'code': self.code}}


def parse_body(data: bytes) -> dict[str, Any]:
  """The JSON object of a request's body.

  Raises:
    RequestError: it is none.
  """
  try:
    body = json.loads(data.decode('utf-8'), parse_constant=_refuse_constant)
  except (ValueError, RecursionError) as error:
    raise RequestError(f'the body is not JSON in UTF-8: {error}', code='invalid_json') from None
  if not isinstance(body, dict):
    raise RequestError(f'the body must be a JSON object, not {_kind(body)}.', code='invalid_json')
  return body


def _refuse_constant(name: str) -> Any:
  raise UserError(f'{name} is not JSON')


class Fields:
  """The fields of one JSON object. null is the same as a field that is not there; what was not asked for is refused."""

  def __init__(self, body: dict[str, Any], path: str = ''):
    self._body = body
    self._path = path
    self._asked: set[str] = set()

  def value(self, name: str) -> Any:
    """The field as it is, None where it is not there."""
    self._asked.add(name)
    return self._body.get(name)

  def error(self, name: str, sentence: str, **details: Any) -> RequestError:
    """For `raise`: what is wrong with a field."""
    path = f'{self._path}{name}'
    return RequestError(f'{path} {sentence}', param=path, **details)

  def text(self, name: str, default: str | None = None) -> str | None:
    value = self.value(name)
    return default if value is None else self.checked_text(name, value)

  def checked_text(self, name: str, value: Any) -> str:
    """`value`, a part of field `name`, as a string that can be encoded."""
    if not isinstance(value, str):
      raise self.error(name, f'must be a string, not {_kind(value)}.')
    try:
      value.encode('utf-8')
    except UnicodeEncodeError:
      raise self.error(name, 'has half of a surrogate pair in it, which is no character.') from None
    return value

  def integer(self, name: str, default: Any, low: int, high: int) -> Any:
    """An int from low to high; `default` where it is not there."""
    value = self.value(name)
    if value is None:
      return default
    if not isinstance(value, int) or isinstance(value, bool):
      raise self.error(name, f'must be an integer, not {_kind(value)}.')
    if not low <= value <= high:
      raise self.error(name, f'must be from {low} to {high}, not {_short(value)}.')
    return value

  def number(self, name: str, default: float, low: float, high: float) -> float:
    """A float from low to high."""
    value = self.value(name)
    if value is None:
      return default
    if not isinstance(value, int | float) or isinstance(value, bool):
      raise self.error(name, f'must be a number, not {_kind(value)}.')
    if not low <= value <= high or not math.isfinite(value):
      raise self.error(name, f'must be from {low:g} to {high:g}, not {_short(value)}.')
    return float(value)

  def boolean(self, name: str) -> bool:
    """A bool; false where it is not there."""
    value = self.value(name)
    if value is None:
      return False
    if not isinstance(value, bool):
      raise self.error(name, f'must be true or false, not {_kind(value)}.')
    return value

  def object(self, name: str) -> 'Fields | None':
    """The fields of an object in this one."""
    value = self.value(name)
    if value is None:
      return None
    if not isinstance(value, dict):
      raise self.error(name, f'must be an object, not {_kind(value)}.')
    return Fields(value, f'{self._path}{name}.')

  def ignore(self, *names: str) -> None:
    """Fields that may say anything: they do not change the answer."""
    self._asked.update(names)

  def refuse_others_than(self, allowed: dict[str, Collection[Any]]) -> None:
    """Fields that may be there if they say what is done anyway."""
    for name, values in allowed.items():
      value = self.value(name)
      if value is not None and value not in list(values):
        raise self.error(name, 'is not supported by this server; leave it out.', code='unsupported_parameter')

  def refuse_unknown(self) -> None:
    """To be called last."""
    unknown = [name for name in self._body if name not in self._asked]
    if unknown:
      path = f'{self._path}{unknown[0]}'[:100]
      raise RequestError(f'{path!r} is no field that this server knows.', param=path, code='unknown_parameter')


def _kind(value: Any) -> str:
  names = {bool: 'a boolean', int: 'a number', float: 'a number', str: 'a string', list: 'an array', dict: 'an object'}
  return 'null' if value is None else names[type(value)]


def _short(value: Any) -> str:
  text = f'{value:g}' if isinstance(value, float) else f'{value}' if abs(value) < 10**20 else 'a number so large'
  return text
