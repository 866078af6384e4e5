"""ServerSettings: the server's address and its limits; ClientKey: a key of one client."""

import dataclasses
import re

from spmd_tasks.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientKey:
  """A key that opens all routes but those of /admin.

  Fields:
    key: the key; `name` stands for it in metrics.
    own_cache: whether its prompts share what the KV cache holds among themselves only.
  """

  key: str
  name: str
  own_cache: bool = False

  @classmethod
  def from_line(cls, line: str) -> 'ClientKey':
    """Reads `KEY NAME` or `KEY NAME own_cache=1`."""
    match = re.fullmatch(r'(\S+)\s+([^\s=]+)(\s+own_cache=1)?', line.strip())
    if match is None:
      raise UserError(
        'a line of a client in the file of keys must be KEY NAME, and then own_cache=1 if other clients must not share '
        'what its prompts leave in the KV cache. Limits of a client are for the proxy in front (docs/serving.md).'
      )
    return cls(key=match[1], name=match[2], own_cache=match[3] is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
  """The address and the limits of a server; limits hold per request unless stated otherwise.

  Fields:
    host, port: the address to listen on; port 0 takes any free port.
    api_key: the key that every request to any route must carry; None asks for no key.
    client_keys: keys that open all routes but those of /admin.
    max_queued: how many sequences of all requests together may wait for a slot; further ones are answered 429.
    max_body_bytes: size of a body; larger ones are answered 413.
    max_choices: how many texts one request may ask for: its prompts times n.
    max_connections: how many connections may be open; a request on a further one is answered 503.
    body_timeout_s: seconds within which a client must send its body; otherwise the answer is 408.
    drain_s: seconds after SIGTERM within which running requests may end; then the rest is cut and told so.
    stuck_s: a step that takes more seconds makes /health fail.
  """

  host: str = '127.0.0.1'
  port: int = 8000
  api_key: str | None = None
  client_keys: tuple[ClientKey, ...] = ()
  max_queued: int = 64
  max_body_bytes: int = 2_000_000
  max_choices: int = 16
  max_connections: int = 1000
  body_timeout_s: float = 20.0
  drain_s: float = 30.0
  stuck_s: float = 600.0

  def __post_init__(self):
    if not 0 <= self.port < 65536:
      raise UserError(f'port {self.port} must be from 0 (any free port) to 65535.')
    if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
      raise UserError('the API key must be printable ASCII characters on one line.')
    for name in ('max_queued', 'max_body_bytes', 'max_choices', 'max_connections'):
      if getattr(self, name) < 1:
        raise UserError(f'{name}={getattr(self, name)} must be at least 1.')
    if not self.body_timeout_s > 0:
      raise UserError(f'body_timeout_s={self.body_timeout_s} must be more than 0 seconds.')
    for name in ('drain_s', 'stuck_s'):
      if not getattr(self, name) >= 0:
        raise UserError(f'{name}={getattr(self, name)} must not be negative.')
