"""ServerSettings: the server's address, and the limits on its clients; ClientKey: those on one of them."""

import dataclasses
import re

from spmd_tasks.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientKey:
  """A key that opens all routes but those of /admin.

  Fields:
    key: the key; `name` stands for it in metrics.
    max_sequences: how many of its sequences may wait and run at once; further ones are answered 429.
    tokens_per_minute: of prompts and answers; a client that has had more is answered 429 until they are a minute's.
    own_cache: whether its prompts share what the KV cache holds among themselves only.
  """

  key: str
  name: str
  max_sequences: int | None = None
  tokens_per_minute: int | None = None
  own_cache: bool = False

  def __post_init__(self):
    for name in ('max_sequences', 'tokens_per_minute'):
      if getattr(self, name) is not None and getattr(self, name) < 1:
        raise UserError(f'client {self.name}: {name}={getattr(self, name)} must be at least 1.')

  @classmethod
  def from_line(cls, line: str) -> 'ClientKey':
    """Reads `KEY NAME max_sequences=8 tokens_per_minute=20000`; limits may be left out."""
    match = re.fullmatch(
      r'(\S+)\s+([^\s=]+)((?:\s+(?:(?:max_sequences|tokens_per_minute)=\d+|own_cache=1))*)', line.strip()
    )
    if match is None:
      raise UserError(
        'a line of a client in the file of keys must be KEY NAME, and then max_sequences=N and tokens_per_minute=N '
        'where they have a limit, and own_cache=1 where others do not share what its prompts leave in the KV cache.'
      )
    limits = dict(limit.split('=') for limit in match[3].split())
    own_cache = bool(limits.pop('own_cache', False))
    numbers = {name: int(number) for name, number in limits.items()}
    return cls(key=match[1], name=match[2], own_cache=own_cache, **numbers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
  """The address and the limits of a server; limits hold per request unless stated otherwise.

  Fields:
    host, port: the address to listen on; port 0 takes any free port.
    api_key: the key that every request to any route must carry; None asks for no key.
    client_keys: keys that open all routes but those of /admin, each with its own limits.
    max_queued: how many sequences of all requests together may wait for a slot; further ones are answered 429.
    max_body_bytes: size of a body; larger ones are answered 413.
    max_choices: how many texts one request may ask for: its prompts times n.
    max_connections: how many connections may be open; a request on a further one is answered 503.
    header_timeout_s: seconds from a connection's begin within which a client must send its first request's header.
    body_timeout_s: seconds within which a client must send its body; otherwise the answer is 408.
    send_timeout_s: seconds within which a client must read what was sent; otherwise the client counts as gone.
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
  header_timeout_s: float = 10.0
  body_timeout_s: float = 20.0
  send_timeout_s: float = 60.0
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
    for name in ('header_timeout_s', 'body_timeout_s', 'send_timeout_s'):
      if not getattr(self, name) > 0:
        raise UserError(f'{name}={getattr(self, name)} must be more than 0 seconds.')
    for name in ('drain_s', 'stuck_s'):
      if not getattr(self, name) >= 0:
        raise UserError(f'{name}={getattr(self, name)} must not be negative.')
