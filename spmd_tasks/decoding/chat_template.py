"""ChatTemplate: a conversation as one text for a language model to go on with."""

from collections.abc import Iterable
import dataclasses

from spmd_tasks.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
  r"""What stands around the turns of a conversation. The default is a plain transcript.

  Fields:
    turn: one turn, with {role} (`system`, `user`, `assistant`, ...) and {content} in it.
    reply: what stands before the answer.
    stop: strings at which the answer ends, beside the end of text.
  """

  turn: str = '{role}: {content}\n'
  reply: str = 'assistant: '
  stop: tuple[str, ...] = ('\nuser:', '\nsystem:')

  def __post_init__(self):
    if not 0 <= self.turn.find('{role}') < self.turn.find('{content}'):
      raise UserError(f'turn={self.turn!r} must have {{role}} in it, and then {{content}}.')

  def render(self, messages: Iterable[tuple[str, str]]) -> str:
    """The text of (role, content) pairs, up to where the answer begins."""
    before_role, _, rest = self.turn.partition('{role}')
    between, _, after = rest.partition('{content}')
    return ''.join(f'{before_role}{role}{between}{text}{after}' for role, text in messages) + self.reply
