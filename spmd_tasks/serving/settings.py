"""ServerSettings: where the server listens, and what it lets a client do."""

import dataclasses

from spmd_tasks.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerSettings:
  """Limits hold for each request unless they say otherwise; times are in seconds.

  Fields:
    host, port: where to listen; port 0 is any that is free.
    api_key: what every request, to any route, must bring; None: nobody is asked.
    max_queued: sequences that may wait for a slot, of all requests together; one more is answered 429.
    max_body_bytes: of a request's body, else 413.
    max_choices: texts that one request may ask for: its prompts times n.
    max_stop_strings, max_stop_chars: of `stop`, and of each of its strings.
    body_timeout_s: for a client to send its body, else 408.
    send_timeout_s: for a client to take what it was sent, else it counts as gone.
    drain_s: after SIGTERM, for what has begun to end; what remains is told that it was cut.
    stuck_s: a step that takes longer makes /health fail.
  """

  host: str = '127.0.0.1'
  port: int = 8000
  api_key: str | None = None
  max_queued: int = 64
  max_body_bytes: int = 2_000_000
  max_choices: int = 16
  max_stop_strings: int = 4
  max_stop_chars: int = 256
  body_timeout_s: float = 20.0
  send_timeout_s: float = 60.0
  drain_s: float = 30.0
  stuck_s: float = 600.0

  def __post_init__(self):
    if not 0 <= self.port < 65536:
      raise UserError(f'port {self.port} must be from 0 (any that is free) to 65535.')
    if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
      raise UserError('the API key must be printable ASCII characters on one line.')
    for name in ('max_queued', 'max_body_bytes', 'max_choices'):
      if getattr(self, name) < 1:
        raise UserError(f'{name}={getattr(self, name)} must be at least 1.')
    for name in ('body_timeout_s', 'send_timeout_s'):
      if not getattr(self, name) > 0:
        raise UserError(f'{name}={getattr(self, name)} must be more than 0 seconds.')
    for name in ('drain_s', 'stuck_s'):
      if not getattr(self, name) >= 0:
        raise UserError(f'{name}={getattr(self, name)} must not be negative.')
