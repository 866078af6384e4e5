"""The server's address, keys and limits."""

import dataclasses
import re

from spmd_tasks.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientKey:
  """A client's key, which is valid for all routes except /admin.

  Fields:
    key: the key.
    name: the client's name in metrics.
    own_cache: whether the client's prompts reuse cached tokens only of its own prompts.
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
        'each client line of the key file must be KEY NAME, optionally followed by own_cache=1 to keep its prompts out '
        'of the cache that clients share. Set limits per client in a proxy (docs/serving.md).'
      )
    return cls(key=match[1], name=match[2], own_cache=match[3] is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
  """The address, keys and limits of a server.

  Fields:
    host: the address to listen on.
    port: the port to listen on; 0 takes any free port.
    api_key: the key that every request must present; None requires no key.
    client_keys: further keys, valid for all routes except /admin.
    max_queued: maximum number of sequences of all requests waiting for a slot; more are answered with 429.
    max_body_bytes: maximum size of a request's body; larger ones are answered with 413.
    max_choices: maximum number of texts per request: its prompts times n.
    max_connections: maximum number of open connections; requests on more are answered with 503.
    body_timeout_s: seconds within which a client must send its body; otherwise the answer is 408.
    drain_s: seconds that running requests may take after SIGTERM before they are cut off with an error.
    stuck_s: seconds after which a running step makes /health fail.
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
