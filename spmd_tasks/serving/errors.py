"""Errors of requests, and the HTTP responses that report them to clients."""

import dataclasses
from typing import Any

from starlette.responses import JSONResponse, Response


@dataclasses.dataclass(eq=False)
class RequestError(Exception):
  """A request that cannot be served.

  Fields:
    message: one sentence with the value, the constraint and the remedy.
    status: the HTTP status.
    param: the invalid field of the body, such as `messages[0].role`.
    code: a machine-readable name, such as `queue_full`.
    retry_after_s: seconds after which the client may retry.
  """

  message: str
  _: dataclasses.KW_ONLY
  status: int = 400
  param: str | None = None
  code: str | None = None
  retry_after_s: int | None = None

  @property
  def body(self) -> dict[str, Any]:
    """The JSON body of the error, in the format of OpenAI's API."""
    kinds = {401: 'authentication_error', 404: 'not_found_error', 429: 'rate_limit_error'}
    kind = kinds.get(self.status, 'invalid_request_error' if self.status < 500 else 'server_error')
    return {'error': {'message': self.message, 'type': kind, 'param': self.param, 'code': self.code}}


def error_response(error: RequestError) -> Response:
  """Returns the JSON response that reports an error."""
  headers = {} if error.retry_after_s is None else {'retry-after': str(error.retry_after_s)}
  if error.status == 401:
    headers['www-authenticate'] = 'Basic realm="spmd-tasks", charset="UTF-8"'
  if error.status in (401, 408, 413) or error.code == 'ambiguous_length':
    headers['connection'] = 'close'
  return JSONResponse(error.body, error.status, headers)
